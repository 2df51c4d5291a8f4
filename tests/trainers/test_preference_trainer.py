"""`PreferenceTrainer`: equality with TRL\'s `DPOTrainer`, and what its loss is given; `KTOTrainer`."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from datasets import Dataset, IterableDataset
from peft import PromptTuningConfig
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from tests.support import train_once
from tests.support.float64 import float32_again
from tests.support.tiny import build_tokenizer, independent_scores, pairs, response_log_prob, token_ids
from tests.support.train_once import (
    REFERENCE,
    build,
    largest_difference,
    load_models,
    relative_difference,
    result,
    train,
    train_under,
)
from trl_ext import preference_loss
from trl_ext.losses import PreferenceScores, kto

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


# ---- KTO ----


def build_kto(path: str, folder, rows: list[dict], eval_dataset=None, **args):
    spec = {"trainer": "KTOTrainer", "model": path, "reference_seed": 1, "reference_scale": 0.02}
    spec["args"] = {"per_device_train_batch_size": 8, **args}
    data = {"train_dataset": Dataset.from_list(rows), "eval_dataset": eval_dataset}
    return train_once.build(spec, str(folder), **data)


def test_loss_and_gradient(tiny_model_path, tmp_path):
    """One step on 4 pairs taken apart: the mean of `kto`, its divergence from each prompt with another response."""
    weights = {"desirable_weight": 1.0, "undesirable_weight": 0.8}
    trainer = build_kto(tiny_model_path, tmp_path, pairs(4), beta=0.5, **weights)
    rows = list(trainer.train_dataset)
    assert [row["label"] for row in rows] == [True, False] * 4
    start = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    run = result(trainer)

    _, model, reference = train_once.load_models(tiny_model_path, scale=0.02)

    def log_ratios(completions: list[list[int]]):
        both = zip(rows, completions, strict=True)
        both = [(row["prompt_ids"], ids) for row, ids in both]
        with torch.no_grad():
            base = torch.stack([response_log_prob(reference, *row) for row in both])
        return torch.stack([response_log_prob(model, *row) for row in both]) - base

    completions = [row["completion_ids"] for row in rows]
    shifted = log_ratios([completions[-1], *completions[:-1]]).detach()
    assert shifted.mean() > 0.01, "clamped at 0, the divergence would not be tested"
    labels = torch.tensor([row["label"] for row in rows])
    loss = kto(log_ratios(completions), labels, shifted, beta=0.5, **weights).mean()
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    moved = torch.cat([(start[name] - run.parameters[name]).flatten() for name in start]).double()
    assert run.losses == pytest.approx([loss.item()], rel=1e-8)
    assert relative_difference(moved, gradient) < 1e-9
    assert run.logs[0]["kl"] == pytest.approx(shifted.mean().item(), rel=1e-8)


def test_the_step_and_its_metrics_are_trls(tiny_model_path, tmp_path):
    """Names and values, and parameters, of three steps of two micro-batches each."""
    runs = []
    for name, own in (("trl.KTOTrainer", {}), ("KTOTrainer", {"packing": "off"})):
        spec = {"trainer": name, "model": tiny_model_path, "reference_seed": 1, "rows": labelled(*[True, False] * 6)}
        spec["args"] = {"max_steps": 3, "learning_rate": 0.1, "gradient_accumulation_steps": 2, **own}
        runs.append(result(train_once.train(spec, str(tmp_path))))
    stock, own = runs
    assert [{k: v for k, v in entry.items() if k != "skipped_updates"} for entry in own.logs] == stock.logs
    assert len(own.logs) == 3 and largest_difference(own.parameters, stock.parameters) == 0


def test_unpaired_rows_are_truncated_at_both_ends(tiny_model_path, tmp_path, caplog):
    whole = build_kto(tiny_model_path, tmp_path, pairs(4)).train_dataset
    cut = build_kto(tiny_model_path, tmp_path, pairs(4), max_prompt_tokens=20, max_response_tokens=5).train_dataset
    assert max(map(len, whole["prompt_ids"])) > 20 and max(map(len, whole["completion_ids"])) > 5
    for row, full in zip(cut, whole, strict=True):
        assert row["prompt_ids"] == full["prompt_ids"][-20:]
        assert row["completion_ids"] == full["completion_ids"][:5]
        assert row["KL_completion_ids"] == full["KL_completion_ids"][:5]
    count = sum(len(ids) > 5 for ids in whole["completion_ids"])
    assert f"train: {count} of 8 responses are longer than max_response_tokens 5 and are truncated" in caplog.text


def labelled(*labels) -> list[dict]:
    return [
        {"row_id": f"row{index}", "prompt": f"prompt {index}", "completion": f"answer {index}", "label": label}
        for index, label in enumerate(labels)
    ]


def test_several_processes_pair_the_same_rows(tiny_model_path, tmp_path):
    """Ten rows in batches of 4, tokenized by two processes, 5 rows each: batches are of all rows all the same."""
    rows = labelled(*[True, False] * 5)
    dataset = build_kto(
        tiny_model_path, tmp_path, rows, per_device_train_batch_size=4, dataset_num_proc=2
    ).train_dataset
    own = dataset["completion_ids"]
    assert dataset["KL_completion_ids"] == [own[index] for index in (3, 0, 1, 2, 7, 4, 5, 6, 9, 8)]


def test_a_last_row_that_is_alone_is_left_out(tiny_model_path, tmp_path, caplog):
    """9 rows in batches of 4: the ninth would be paired with itself, (i, i), z being its own log-ratio.
    10 rows leave two, which have each other; the paired response is that of the row before, or the batch's last."""
    held_out = Dataset.from_list(labelled(*[False, True] * 4, False))
    trainer = build_kto(
        tiny_model_path,
        tmp_path,
        labelled(*[True, False] * 4, True),
        per_device_train_batch_size=4,
        eval_dataset={"one": held_out, "two": Dataset.from_list(labelled(*[True, False] * 5))},
    )
    rotated = [3, 0, 1, 2, 7, 4, 5, 6]
    of = {"train": trainer.train_dataset, **trainer.eval_dataset}
    for name, expected in {"train": rotated, "one": rotated, "two": [*rotated, 9, 8]}.items():
        own = of[name]["completion_ids"]
        assert of[name]["KL_completion_ids"] == [own[index] for index in expected], name
    assert "train_dataset: the last of 9 rows is left out" in caplog.text
    assert "one_dataset: the last of 9 rows" in caplog.text and caplog.text.count("is left out") == 2
    caplog.clear()
    # 5 rows: 4 with neighbours, with a loss that the fifth does not enter.
    rows = [held_out.select(range(count)) for count in (4, 5)]
    four, five = (trainer.evaluate(one)["eval_loss"] for one in rows)
    assert four == five and caplog.text.count("eval_dataset: the last of 5 rows is left out") == 1
    with pytest.raises(ValueError, match="eval_dataset has one row"):
        trainer.evaluate(held_out.select(range(1)))


@pytest.mark.parametrize("labels", [(True, True), (False, False, False), (True, None, False)])
def test_both_labels_are_needed(labels, tiny_model_path, tmp_path):
    with pytest.raises(ValueError, match="KTO needs responses of both labels"):
        build_kto(tiny_model_path, tmp_path, labelled(*labels))
