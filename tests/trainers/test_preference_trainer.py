"""`PreferenceTrainer`: equality with TRL's `DPOTrainer`, and what its loss is given."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
from datasets import Dataset, IterableDataset
from peft import PromptTuningConfig
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

import trl_ext.losses
import trl_ext.trainers
from tests.support.float64 import float32_again
from tests.support.tiny import build_tokenizer, independent_scores, pairs, token_ids
from tests.support.train_once import (
    REFERENCE,
    build,
    largest_difference,
    load_models,
    named_methods,
    result,
    train,
    train_under,
)
from trl_ext import preference_loss
from trl_ext.losses import PreferenceScores
from trl_ext.registry import preference_losses
from trl_ext.trainers.preference import methods

pytestmark = pytest.mark.usefixtures("in_float64")


STEPS = {"max_steps": 3, "gradient_accumulation_steps": 2, "learning_rate": 0.1}
SETUPS = {
    "full": {},
    "lora": {"lora": True},
    "lora given": {"lora": "given"},
    "precomputed": {"args": {"precompute_ref_log_probs": True}},
    "lora precomputed": {"lora": True, "args": {"precompute_ref_log_probs": True}},
}


def specification(model_path: str, trainer: str, setup: str) -> dict:
    spec = SETUPS[setup]
    # Passes as TRL makes them, where the runs are compared bit by bit.
    own = {} if trainer.startswith("trl.") else {"packing": "off", "precompute_ref_log_probs": False}
    args = {**STEPS, **own, **spec.get("args", {})}
    return {"model": model_path, "trainer": trainer, **spec, "pairs": 16, "args": args}


@pytest.fixture(scope="module")
def models(tiny_model_path):
    return load_models(tiny_model_path)


# ---- Equal to TRL ----

NOT_OF_TRAINING = ("skipped_updates", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second")


@pytest.mark.parametrize("setup", [*SETUPS, "full in float32"])
def test_dpo_is_trls_bit_by_bit(setup, tiny_model_path, tmp_path):
    """What is computed in a higher precision than TRL's would show in float32 alone."""
    setup, _, dtype = setup.partition(" in ")
    with float32_again() if dtype else nullcontext():
        stock, own = (
            result(
                train({**specification(tiny_model_path, trainer, setup), "dtype": dtype or "float64"}, str(tmp_path))
            )
            for trainer in ("trl.DPOTrainer", "DPOTrainer")
        )
    assert same_in_trl(own) == same_in_trl(stock)  # names and values of metrics
    assert len(own.logs) == 3
    assert largest_difference(own.parameters, stock.parameters) == 0.0


def same_in_trl(run) -> list[dict]:
    """Logs without the count that TRL has not, and without means over tokens, which in TRL are of micro-batches."""
    other = ("skipped_updates", "entropy", "logits/chosen", "logits/rejected", "mean_token_accuracy")
    return [{key: value for key, value in entry.items() if key not in other} for entry in run.logs]


@pytest.mark.parametrize("setup", ["full", "wpo", "router", "soft prompt"])
def test_of_one_micro_batch_every_metric_is_trls(setup, tiny_model_path, tmp_path):
    """Names, values and parameters; in training and in an evaluation that also computes logits."""
    # torch multiplies by groups of experts in float32 only.
    dtype, tolerance, path = ("float32", 1e-5, tmp_path / "experts") if setup == "router" else ("float64", 1e-9, None)
    if path is not None:
        save_mixture_of_experts(path)
    args = {"trl.DPOTrainer": {}, "DPOTrainer": {"packing": "off"}}
    if setup == "wpo":
        args["trl.DPOTrainer"] = {"use_weighting": True}
        args["DPOTrainer"] |= {"weighting": ["wpo"], "weighting_kwargs": {"max_weight": None}}
    given = {"compute_metrics": lambda prediction: {"logits": float(abs(prediction.predictions[:, -2]).mean())}}
    if setup == "soft prompt":
        given["peft_config"] = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    runs = []
    for trainer, own in args.items():
        spec = {
            "model": str(path or tiny_model_path),
            "trainer": trainer,
            "dtype": dtype,
            "held_out": pairs(4, seed=3),
        }
        spec["args"] = {"max_steps": 3, "learning_rate": 0.1, "per_device_eval_batch_size": 4, **own}
        with float32_again() if setup == "router" else nullcontext():
            trained = train(spec, str(tmp_path), **given)
            trained.evaluate()
        logged = [entry for entry in trained.state.log_history if {"loss", "eval_loss"} & {*entry}]
        runs.append((result(trained), [{k: v for k, v in one.items() if k not in NOT_OF_TRAINING} for one in logged]))
    (stock, expected), (own, logged) = runs
    for entry, of_trl in zip(logged, expected, strict=True):
        assert entry == pytest.approx(of_trl, rel=tolerance)
    assert len(logged) == 4 and ("aux_loss" in logged[0]) == (setup == "router") and "eval_logits" in logged[3]
    assert largest_difference(own.parameters, stock.parameters) < (1e-6 if setup == "router" else 1e-12)


def save_mixture_of_experts(path) -> None:
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.3}
    config = MixtralConfig(vocab_size=len(tokenizer), **shape, initializer_range=0.2, output_router_logits=True)
    MixtralForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)


@pytest.mark.slow
def test_precomputing_from_memory_on_two_processes(tiny_model_path, tmp_path):
    """TRL fails there, each process having its own cache; what it trains without one is the same."""
    wanted = [("trl.DPOTrainer", "full"), ("trl.DPOTrainer", "lora")]
    wanted += [("DPOTrainer", "full"), ("DPOTrainer", "lora")]
    wanted += [("DPOTrainer", "precomputed"), ("DPOTrainer", "lora precomputed")]
    specs = {f"{trainer} {setup}": specification(tiny_model_path, trainer, setup) for trainer, setup in wanted}
    *stock, full, lora, ahead, lora_ahead = train_under(None, specs, tmp_path).values()
    for expected, own, computed_ahead in zip(stock, (full, lora), (ahead, lora_ahead), strict=True):
        # Pairs are balanced over processes, so that sums are added up in another order than TRL's.
        for entry, of_trl in zip(same_in_trl(own), same_in_trl(expected), strict=True):
            assert entry == pytest.approx(of_trl, rel=1e-13)
        assert largest_difference(own.parameters, expected.parameters) < 1e-13
        assert largest_difference(computed_ahead.parameters, expected.parameters) < 1e-6


@pytest.mark.parametrize(
    ("own", "stock"),
    [
        ({"loss_type": ["hinge"]}, {"loss_type": ["hinge"]}),
        ({"loss_type": ["ipo"]}, {"loss_type": ["ipo"]}),
        ({"loss": "nca"}, {"loss_type": ["nca_pair"]}),
        ({"loss": "robust_dpo", "label_smoothing": 0.2}, {"loss_type": ["robust"], "label_smoothing": 0.2}),
        ({"loss": "apo_zero"}, {"loss_type": ["apo_zero"]}),
        ({"loss": "apo_down"}, {"loss_type": ["apo_down"]}),
        ({"loss": "aot", "aot_scope": "device"}, {"loss_type": ["aot_unpaired"]}),
        ({"loss": "aot_paired", "aot_scope": "device"}, {"loss_type": ["aot"]}),
        # TRL's sppo_hard lacks the paper's factor one half: twice our learning rate makes up for it.
        ({"loss": "sppo", "learning_rate": 2e-4}, {"loss_type": ["sppo_hard"], "learning_rate": 1e-4}),
        ({"loss": "dpo", "weighting": ["wpo"], "weighting_kwargs": {"max_weight": None}}, {"use_weighting": True}),
    ],
    ids=lambda arguments: arguments.get("loss", str(arguments.get("loss_type", "stock"))),
)
def test_other_losses_are_trls(own, stock, tiny_model_path, tmp_path):
    spec = {"model": tiny_model_path, **REFERENCE, "pairs": 12}
    arguments = {**STEPS, "beta": 0.2}
    expected = train({**spec, "trainer": "trl.DPOTrainer", "args": {**arguments, **stock}}, str(tmp_path / "stock"))
    trained = train({**spec, "args": {**arguments, **own}}, str(tmp_path / "own"))
    if own.get("loss") != "sppo":
        assert result(trained).losses == pytest.approx(result(expected).losses, rel=1e-9)
    assert largest_difference(result(trained).parameters, result(expected).parameters) < 1e-11


# ---- Without a reference ----


def test_reference_free_training_runs_the_policy_once(models, tiny_model_path, tmp_path):
    trainer = build({"model": tiny_model_path, "trainer": "SimPOTrainer", "args": {"max_steps": 3}}, str(tmp_path))
    calls = []
    trainer.model.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    trainer.train()
    assert trainer.ref_model is None
    assert calls == [True] * 3

    # The trained policy, by SimPO's formula with beta 2 and gamma 1.
    tokenizer, _, _ = models
    trained = AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float64)
    trained.load_state_dict(trainer.model.state_dict())
    rows = pairs(4, seed=9)
    scores = independent_scores(tokenizer, trained, trained, rows)
    means = scores.chosen / scores.chosen_length, scores.rejected / scores.rejected_length
    expected = torch.log1p(torch.exp(-(2 * (means[0] - means[1]) - 1))).mean().item()
    trainer.args.per_device_eval_batch_size = 4
    assert trainer.evaluate(Dataset.from_list(rows))["eval_loss"] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        (REFERENCE, "ref_model"),
        ({"args": {"precompute_ref_log_probs": True}}, "precompute_ref_log_probs"),
        ({"args": {"sync_ref_model": True}}, "sync_ref_model"),
    ],
)
def test_a_reference_is_refused_where_it_is_not_used(spec, name, tiny_model_path, tmp_path):
    with pytest.raises(ValueError, match=f"'simpo' uses no reference model: leave out {name}$"):
        build({"model": tiny_model_path, "trainer": "SimPOTrainer", **spec}, str(tmp_path))


# ---- The trainer's life ----


@pytest.mark.parametrize("name", ["DPOTrainer", "AOTTrainer", "SFTTrainer", "RewardTrainer"])
def test_an_evaluation_that_was_not_logged_is_not_in_the_next(name, tiny_model_path, tmp_path):
    spec = {"model": tiny_model_path, "trainer": name, "args": {"per_device_eval_batch_size": 2}}
    spec |= REFERENCE if name in ("DPOTrainer", "AOTTrainer") else {}
    trainer = build({**spec, "held_out": pairs(6, seed=3)}, str(tmp_path))

    def figures():
        return {key: value for key, value in trainer.evaluate().items() if not key.endswith(("_second", "time"))}

    expected = figures()
    step, calls = trainer.prediction_step, iter([None, KeyboardInterrupt])

    def interrupted(*args, **kwargs):
        if error := next(calls):
            raise error
        return step(*args, **kwargs)

    trainer.prediction_step = interrupted
    with pytest.raises(KeyboardInterrupt):
        trainer.evaluate()
    trainer.prediction_step = step
    assert figures() == expected
    trainer.predict(trainer.eval_dataset.select([0, 1]))
    assert figures() == expected


@pytest.mark.parametrize("name", named_methods(methods))
def test_named_trainer_trains_on_its_loss(name, models, tiny_model_path, tmp_path):
    """The logged loss of its first step is its function's of scores computed independently."""
    spec = {"model": tiny_model_path, "trainer": f"{name}Trainer", "args": {"per_device_train_batch_size": 4}}
    method = getattr(trl_ext.trainers, f"{name}Config")._method
    loss, reference_free = getattr(trl_ext.losses, method), not preference_losses[method].needs_reference
    trained = result(train(spec if reference_free else {**spec, **REFERENCE}, str(tmp_path)))
    expected = loss(independent_scores(*models, pairs(4))).mean().item()
    assert math.isfinite(expected)
    assert trained.losses == pytest.approx([expected], rel=1e-9)


SEEN: list[PreferenceScores] = []


@preference_loss("seen_dpo")
def seen_dpo(scores: PreferenceScores, *, beta: float = 0.1) -> torch.Tensor:
    """DPO that remembers what it was given."""
    SEEN.append(scores)
    return -logsigmoid(beta * scores.margin)


# ---- What a loss is given ----


@pytest.mark.parametrize("precompute", [False, True])
def test_columns_reach_the_loss(precompute, tiny_model_path, tmp_path):
    arguments = {"loss": "seen_dpo", "loss_columns": ["avg_confidence"], "precompute_ref_log_probs": precompute}
    trainer = build({"model": tiny_model_path, **REFERENCE, "args": arguments}, str(tmp_path))
    SEEN.clear()
    trainer.train()
    rows = pairs(8)
    expected = [row["avg_confidence"] for row in rows]
    torch.testing.assert_close(SEEN[0].columns, {"avg_confidence": torch.tensor(expected[:2], dtype=torch.float32)})
    trainer.args.per_device_eval_batch_size = len(rows)
    SEEN.clear()
    trainer.evaluate(Dataset.from_list(rows))
    torch.testing.assert_close(SEEN[0].columns["avg_confidence"], torch.tensor(expected, dtype=torch.float32))


def test_a_missing_column_is_named(tiny_model_path, tmp_path):
    spec = {"model": tiny_model_path, "args": {"loss": "seen_dpo", "loss_columns": ["margin"]}}
    with pytest.raises(ValueError, match="column 'margin', which the train dataset lacks"):
        build(spec, str(tmp_path))
    bare = Dataset.from_list(pairs(4)).remove_columns("avg_confidence")
    spec["args"] = {"weighting": ["confidence"]}
    for name, held_out in (("eval", bare), ("held_out", {"held_out": bare})):
        with pytest.raises(ValueError, match=f"column 'avg_confidence', which the {name} dataset lacks"):
            build(spec, str(tmp_path), eval_dataset=held_out)


@pytest.mark.parametrize("value", [None, "high"])
def test_a_column_that_is_not_a_number_is_named(value, tiny_model_path, tmp_path):
    rows = [{**row, "avg_confidence": value} for row in pairs(4)]
    spec = {"model": tiny_model_path, "args": {"weighting": ["confidence"]}}
    with pytest.raises(ValueError, match="numbers from the columns .'avg_confidence'"):
        train(spec, str(tmp_path), train_dataset=Dataset.from_list(rows))


@pytest.mark.parametrize("name", ["PreferenceTrainer", "RewardTrainer"])
def test_prompts_lose_their_beginning_and_responses_their_end(name, models, tiny_model_path, tmp_path, caplog):
    """No pair is dropped; the prompt stands before both responses of a reward model."""
    texts = {"prompt": "".join(chr(97 + i % 26) for i in range(700)), "rejected": "no"}
    texts["chosen"] = "".join(chr(97 + i % 25) for i in range(600))
    long = {key: [{"role": "user" if key == "prompt" else "assistant", "content": texts[key]}] for key in texts}
    prompt, chosen, rejected = token_ids(models[0], long)
    assert (len(prompt), len(chosen)) > (700, 600)
    rows = [{key: pairs(1)[0][key] for key in long}, long]
    other = {"max_prompt_tokens": 5, "max_response_tokens": None}
    for limits, first, second in (({}, prompt[-512:], chosen[:512]), (other, prompt[-5:], chosen)):
        spec = {"trainer": name, "model": tiny_model_path, "dtype": None, "rows": rows, "held_out": rows}
        trainer = build({**spec, "args": limits}, str(tmp_path))
        for prepared in (trainer.train_dataset, trainer.eval_dataset):
            assert len(prepared) == 2
            row = {"prompt_ids": [], **prepared[1]}
            assert row["prompt_ids"] in (first, [])
            both = [row["prompt_ids"] + row[f"{side}_ids"] for side in ("chosen", "rejected")]
            assert both == [first + second, first + rejected]
        # Cut once, and not to a joint limit again.
        assert next(iter(trainer.get_train_dataloader()))["input_ids"].shape == (4, len(first + second))
    assert "train: 1 of 2 prompts are longer than max_prompt_tokens 512 and are truncated" in caplog.text
    assert "train: 1 of 4 responses are longer than max_response_tokens 512 and are truncated" in caplog.text


def test_streamed_pairs_train_alike(tiny_model_path, tmp_path):
    spec = {"model": tiny_model_path, "args": {"max_prompt_tokens": 6, "max_response_tokens": 4, "max_steps": 2}}
    streamed = IterableDataset.from_generator(lambda: iter(pairs(8)))
    expected = result(train(spec, str(tmp_path / "map")))
    trained = result(train(spec, str(tmp_path / "stream"), train_dataset=streamed))
    assert largest_difference(trained.parameters, expected.parameters) == 0.0
