"""Scores and columns that a preference loss is given: those of each row alone, cut where the limits say."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset, IterableDataset
from torch.nn.functional import logsigmoid

from tests.support.tiny import independent_scores, pairs, token_ids, token_log_probs
from tests.support.train_once import REFERENCE, build, largest_difference, load_models, result, train
from trl_ext import preference_loss
from trl_ext.losses import PreferenceScores

pytestmark = pytest.mark.usefixtures("in_float64")

SEEN: list[PreferenceScores] = []


@preference_loss("seen_dpo")
def seen_dpo(scores: PreferenceScores, *, beta: float = 0.1) -> torch.Tensor:
    """DPO that remembers what it was given."""
    SEEN.append(scores)
    return -logsigmoid(beta * scores.margin)


@pytest.fixture(scope="module")
def models(tiny_model_path):
    return load_models(tiny_model_path)


def scores_seen(trainer, rows: list[dict]) -> PreferenceScores:
    """What the loss `seen_dpo` is given of rows in one batch."""
    trainer.args.per_device_eval_batch_size = len(rows)
    SEEN.clear()
    trainer.evaluate(Dataset.from_list(rows))
    (scores,) = SEEN
    return scores


# ---- What a loss is given ----


def test_scores_are_those_of_each_row_alone(models, tiny_model_path, tmp_path):
    trainer = build({"model": tiny_model_path, **REFERENCE, "args": {"loss": "seen_dpo"}}, str(tmp_path))
    rows = pairs(6, seed=3)
    seen, expected = scores_seen(trainer, rows), independent_scores(*models, rows)
    for name in ("chosen", "rejected", "ref_chosen", "ref_rejected"):
        torch.testing.assert_close(getattr(seen, name).double(), getattr(expected, name), atol=1e-9, rtol=1e-9)
    assert seen.chosen_length.tolist() == expected.chosen_length.tolist()
    assert seen.rejected_length.tolist() == expected.rejected_length.tolist()
    assert seen.chosen_policy_weight is None


def test_wpo_weights_are_those_of_the_full_softmax(models, tiny_model_path, tmp_path):
    """`exp(mean_t(log p(y_t) - log sum_v p(v)^2))`, from the whole distribution of every position."""
    trainer = build(
        {"model": tiny_model_path, **REFERENCE, "args": {"loss": "seen_dpo", "weighting": ["wpo"]}}, str(tmp_path)
    )
    tokenizer, policy, _ = models
    rows = pairs(4, seed=5)
    seen = scores_seen(trainer, rows)
    for index, row in enumerate(rows):
        prompt, *responses = token_ids(tokenizer, row)
        weights = seen.chosen_policy_weight[index], seen.rejected_policy_weight[index]
        for response, weight in zip(responses, weights, strict=True):
            with torch.no_grad():
                log_probs = token_log_probs(policy, prompt, response)
            of_token = log_probs.gather(1, torch.tensor(response)[:, None])[:, 0]
            expected = (of_token - log_probs.exp().square().sum(dim=1).log()).mean().exp()
            assert weight.item() == pytest.approx(expected.item(), rel=1e-9)


@pytest.mark.parametrize("precompute", [False, True])
def test_columns_reach_the_loss(precompute, tiny_model_path, tmp_path):
    arguments = {"loss": "seen_dpo", "loss_columns": ["avg_confidence"], "precompute_ref_log_probs": precompute}
    trainer = build({"model": tiny_model_path, **REFERENCE, "args": arguments}, str(tmp_path))
    SEEN.clear()
    trainer.train()
    rows = pairs(8)
    expected = [row["avg_confidence"] for row in rows]
    torch.testing.assert_close(SEEN[0].columns, {"avg_confidence": torch.tensor(expected[:2], dtype=torch.float32)})
    seen = scores_seen(trainer, rows)
    torch.testing.assert_close(seen.columns["avg_confidence"], torch.tensor(expected, dtype=torch.float32))


def test_a_missing_column_is_named(tiny_model_path, tmp_path):
    spec = {"model": tiny_model_path, "args": {"loss": "seen_dpo", "loss_columns": ["margin"]}}
    with pytest.raises(ValueError, match="column 'margin', which train_dataset does not have"):
        build(spec, str(tmp_path))
    bare = Dataset.from_list(pairs(4)).remove_columns("avg_confidence")
    spec["args"] = {"weighting": ["confidence"]}
    for name, held_out in (("eval_dataset", bare), ("held_out", {"held_out": bare})):
        with pytest.raises(ValueError, match=f"column 'avg_confidence', which {name} does not have"):
            build(spec, str(tmp_path), eval_dataset=held_out)


@pytest.mark.parametrize("value", [None, "high"])
def test_a_column_that_is_not_a_number_is_named(value, tiny_model_path, tmp_path):
    rows = [{**row, "avg_confidence": value} for row in pairs(4)]
    spec = {"model": tiny_model_path, "args": {"weighting": ["confidence"]}}
    with pytest.raises(ValueError, match="column 'avg_confidence'"):
        train(spec, str(tmp_path), train_dataset=Dataset.from_list(rows))


def test_prompts_lose_their_beginning_and_responses_their_end(models, tiny_model_path, tmp_path):
    long = [
        {
            "prompt": [{"role": "user", "content": "".join(chr(97 + i % 26) for i in range(700))}],
            "chosen": [{"role": "assistant", "content": "".join(chr(97 + i % 25) for i in range(600))}],
            "rejected": [{"role": "assistant", "content": "no"}],
        }
    ]
    dataset = Dataset.from_list(long)
    trainer = build({"model": tiny_model_path}, str(tmp_path), train_dataset=dataset, eval_dataset=dataset)
    prompt, chosen, rejected = token_ids(models[0], long[0])
    assert (len(prompt), len(chosen)) > (700, 600)
    for prepared in (trainer.train_dataset, trainer.eval_dataset):
        assert prepared[0]["prompt_ids"] == prompt[-512:]
        assert prepared[0]["chosen_ids"] == chosen[:512]
        assert prepared[0]["rejected_ids"] == rejected
    batch = next(iter(trainer.get_train_dataloader()))
    assert batch["input_ids"].shape == (2, 1024)  # cut once, and not to a joint limit again
    assert batch["completion_mask"].sum(dim=1).tolist() == [512, len(rejected)]

    limits = {"max_prompt_tokens": 5, "max_response_tokens": None}
    trainer = build({"model": tiny_model_path, "args": limits}, str(tmp_path), train_dataset=dataset)
    assert trainer.train_dataset[0]["prompt_ids"] == prompt[-5:]
    assert trainer.train_dataset[0]["chosen_ids"] == chosen


def test_streamed_pairs_train_alike(tiny_model_path, tmp_path):
    spec = {"model": tiny_model_path, "args": {"max_prompt_tokens": 6, "max_response_tokens": 4, "max_steps": 2}}
    streamed = IterableDataset.from_generator(lambda: iter(pairs(8)))
    expected = result(train(spec, str(tmp_path / "map")))
    trained = result(train(spec, str(tmp_path / "stream"), train_dataset=streamed))
    assert largest_difference(trained.parameters, expected.parameters) == 0.0
