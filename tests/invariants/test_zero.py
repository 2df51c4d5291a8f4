"""The trainers under DeepSpeed ZeRO-2 and ZeRO-3, on two processes of the CPU: what plain data parallelism gives."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support import recipes
from tests.support.sharded import (
    ADAPTERS,
    TRAINED,
    check_saved_adapter,
    check_saved_model,
    specification,
    with_arguments,
)
from tests.support.tiny import pairs, save_tiny_model
from tests.support.train_once import Run, largest_difference, launch, relative_difference, train_under
from trl_ext import toy
from trl_ext.rewards import RewardModel

# Not imported here, which would take seconds whatever tests are run.
HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not HAS_DEEPSPEED, reason="needs the extra: trl_ext[deepspeed]")]

SAMPLED = specification("PolicyTrainer", lora=True)
PRECOMPUTED = specification("PreferenceTrainer", args={"loss": "dpo", "precompute_ref_log_probs": True})
STAGES = {"zero2": 2, "zero3": 3}


def uneven_pairs() -> list[dict]:
    """Pairs of which every other has responses so long, and a prompt so short, that packing saves next to nothing.

    With one pair per process, the first process has the long pairs, and the second the short ones.
    """
    rows = pairs(12)
    for row in rows[::2]:
        row["prompt"][0]["content"] = "?"
        for side, letter in (("chosen", "a"), ("rejected", "b")):
            row[side][0]["content"] = letter * 700
    return rows


@pytest.fixture(scope="module")
def specifications(tiny_model_path, tmp_path_factory) -> dict[str, dict]:
    other = tmp_path_factory.mktemp("other-model")
    save_tiny_model(other, seed=1)
    specs = {**TRAINED, "sampled": SAMPLED, "generated": with_arguments(SAMPLED, fast_rollouts="off")}
    specs["uneven"] = with_arguments({**TRAINED["dpo"], "rows": uneven_pairs()}, per_device_train_batch_size=1)
    specs = {name: {**spec, "model": tiny_model_path} for name, spec in {**specs, "precomputed": PRECOMPUTED}.items()}
    return {**specs, "precomputed_other": {**PRECOMPUTED, "model": str(other)}}


@pytest.fixture(scope="module")
def plain(specifications, tmp_path_factory) -> dict[str, Run]:
    """Data parallelism; what is of `TRAINED` is not packed."""
    unpacked = {name: with_arguments(specifications[name], packing="off") for name in TRAINED}
    return train_under(None, specifications | unpacked, tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module", params=STAGES)
def sharded(request, specifications, tmp_path_factory) -> dict[str, Run]:
    """Under one of the stages, packed; what is of `TRAINED` is also resumed from a checkpoint at step 2."""
    folder, specs = tmp_path_factory.mktemp(request.param), dict(specifications)
    for name in TRAINED:
        specs[name] = with_arguments(specs[name], save_strategy="steps", save_steps=2)
        checkpoint = str(folder / name / "checkpoint-2")
        specs[f"resumed_{name}"] = {**specifications[name], "resume_from_checkpoint": checkpoint}
    runs = train_under(request.param, specs, folder)
    assert {run.facts["zero_stage"] for run in runs.values()} == {STAGES[request.param]}
    return runs


def assert_same_run(run: Run, expected: Run) -> None:
    assert largest_difference(run.start, expected.start) < 1e-6
    assert relative_difference(run.change, expected.change) < 1e-5
    assert len(run.logs) == len(expected.logs) == 3
    for entry, other in zip(without_times(run), without_times(expected), strict=True):
        assert entry == pytest.approx(other, rel=1e-4, abs=2e-6)


def without_times(run: Run) -> list[dict]:
    return [{name: value for name, value in entry.items() if "time" not in name} for entry in run.logs]


# ---- Trained as without the engine ----


@pytest.mark.parametrize("name", TRAINED)
def test_packed_training_is_that_of_data_parallelism(name, sharded, plain):
    run, expected = sharded[name], plain[name]
    # Three steps of Adam at 0.01 change a parameter by 0.03 at most; here they do change them.
    assert 0.001 < expected.change.abs().max() < 0.031
    assert_same_run(run, expected)
    assert 0 < run.facts["packed_tokens"] < 0.6 * run.facts["padded_tokens"]
    assert run.facts["left_padded"] == {}
    assert run.facts["reference"] is (name in ("dpo", "policy"))


def test_the_engine_is_foreseen(sharded, plain):
    """What is checked before a model is loaded is what accelerate then has."""
    assert {run.facts["engine"] for run in plain.values()} == {"DDP"}
    (engine,) = {run.facts["engine"] for run in sharded.values()}
    assert engine == f"ZeRO-{sharded['dpo'].facts['zero_stage']}"


def test_processes_may_have_batches_of_unlike_shape(sharded, plain):
    """The first process has the long pairs, of which packing saves next to nothing; both make as many passes."""
    run = sharded["uneven"]
    assert_same_run(run, plain["uneven"])
    assert run.facts["packed_tokens"] > 0.95 * run.facts["padded_tokens"]


def test_sampled_responses_are_those_of_data_parallelism(sharded, plain):
    """Under ZeRO-3 transformers samples in place of the fast sampler."""
    sampler = "generated" if sharded["sampled"].facts["zero_stage"] == 3 else "sampled"
    assert_same_run(sharded["sampled"], plain[sampler])
    assert_same_run(sharded["generated"], plain["generated"])


@pytest.mark.parametrize("name", ["precomputed", "precomputed_other"])
def test_precomputed_reference_log_probabilities_are_of_the_model(name, sharded, plain):
    """The second run has the pairs of the first and another model, and must not find what the first left on disk."""
    assert_same_run(sharded[name], plain[name])
    first, second = (plain[name].logs[0]["loss"] for name in ("precomputed", "precomputed_other"))
    assert abs(first - second) > 0.01


# ---- Saved and taken up again ----


@pytest.mark.parametrize("name", TRAINED)
def test_a_resumed_run_ends_where_the_straight_one_does(name, sharded):
    run, expected = sharded[f"resumed_{name}"], sharded[name]
    assert largest_difference(run.parameters, expected.parameters) < 1e-7
    # What was logged until then is the checkpoint's.
    logs, expected_logs = without_times(run), without_times(expected)
    assert logs[:2] == expected_logs[:2]
    # TRL counts tokens from the start of the process, but for a policy's.
    last, expected_last = ({k: v for k, v in each[2].items() if k != "num_tokens"} for each in (logs, expected_logs))
    assert last == pytest.approx(expected_last, rel=1e-6, abs=1e-7)
    # And the checkpoint is not the end already.
    assert expected.logs[2]["loss"] != pytest.approx(expected.logs[1]["loss"], rel=1e-3)


@pytest.mark.parametrize("name", ["dpo", "reward", "policy"])
def test_a_saved_model_loads(name, sharded):
    check_saved_model(name, sharded[name])


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_saved_adapter_loads_and_merges(name, sharded, tiny_model_path):
    check_saved_adapter(name, sharded[name], tiny_model_path)


@pytest.mark.parametrize("name", ["reward", "reward_adapter"])
def test_a_saved_reward_model_scores_as_it_did(name, sharded):
    run, rows = sharded[name], pairs(12)
    model, prompts = RewardModel(run.folder), [row["prompt"] for row in rows]
    scores = torch.cat([model.score(prompts, [row[side] for row in rows]) for side in ("chosen", "rejected")])
    torch.testing.assert_close(scores, run.scores, rtol=1e-4, atol=1e-5)


# ---- The recipes ----

SHORT = ["--max_steps=2", "--per_device_train_batch_size=4", "--gradient_accumulation_steps=1", "--logging_steps=1"]
SHORT += ["--save_steps=1", "--eval_strategy=no", "--num_eval_prompts=4", "--generation_eval_every=0", "--seed=1"]


@pytest.mark.parametrize("engine", ["zero2", "zero3"])
def test_a_recipe_leaves_a_model_for_plain_transformers(engine, tmp_path):
    """Its base is compared with, so that the reference is gathered too."""
    script = [str(recipes.RECIPES / "aot.py"), *SHORT, "--max_new_tokens=4", "--eval_split=none"]
    launched = launch(engine, [*script, f"--output_dir={tmp_path / 'run'}"], tmp_path)
    assert launched.returncode == 0, launched.stderr[-8000:]
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert (results["run"]["optimizer_steps"], results["run"]["processes"]) == (2, 2)
    model, problems = AutoModelForCausalLM.from_pretrained(tmp_path / "run", output_loading_info=True)
    assert not problems["missing_keys"] and not problems["mismatched_keys"]
    assert sum(p.numel() for p in model.parameters()) == 403_680
    base = AutoModelForCausalLM.from_pretrained(toy.MODEL_DIR)
    moved = largest_difference(dict(model.named_parameters()), dict(base.named_parameters()))
    assert 1e-6 < moved < 1e-2
    tokens = AutoTokenizer.from_pretrained(tmp_path / "run")("What", return_tensors="pt")
    assert model.generate(**tokens, max_new_tokens=3).shape[1] > tokens["input_ids"].shape[1]
