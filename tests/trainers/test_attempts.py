"""A teacher that sees the attempts of a group: which ones it is shown, and what counts in the loss (SDPO)."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.rollout_once import thirds, train, train_in_processes
from tests.support.tiny import perturbed
from tests.support.train_once import largest_difference, result
from tests.trainers.test_distillation import another, built, plain_loss, rows, specification, update, with_hint
from trl_ext import DistillationConfig
from trl_ext.trainers.distillation.attempts import Attempt, takes_attempts, with_success

pytestmark = pytest.mark.usefixtures("in_float64")

PROMPT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]


def test_the_best_other_success_is_shown():
    attempts = [
        Attempt("3", 0.0, False),
        Attempt("2", 1.0, False),
        Attempt("two", 0.5, True),
        Attempt("?", 0.6, False),
    ]
    system, user = with_success({"prompt": PROMPT}, attempts)
    assert system == PROMPT[0] and user["content"].startswith("1 + 1?\n\nA correct solution:\n\n2\n\n")
    assert PROMPT[1]["content"] == "1 + 1?"
    [block, shown] = with_success(
        {"prompt": [{"role": "user", "content": [{"type": "text", "text": "1 + 1?"}]}]}, attempts
    )[0]["content"]
    assert block["text"] == "1 + 1?" and shown["text"].startswith("\n\nA correct solution:\n\n2\n\n")
    assert with_success({"prompt": "1 + 1 ="}, attempts).startswith("1 + 1 =\n\nA correct solution:\n\n2\n\n")
    # Its own success is none to learn from, and neither is a reward that is missing.
    assert with_success({"prompt": PROMPT}, [Attempt("2", 1.0, True), Attempt("3", math.nan, False)]) is None


def test_only_a_second_argument_without_a_default_is_for_attempts():
    assert takes_attempts(lambda row, attempts: None)
    assert not any(map(takes_attempts, (lambda row: None, lambda row, style="short": None, lambda row, **_: None)))


def hint_for_the_worse(row: dict, attempts: list[Attempt]) -> list[dict] | None:
    """The teacher's longer prompt for all responses but the best of a group."""
    assert sum(attempt.own for attempt in attempts) == 1 and len(attempts) in (4, 8)
    own = next(attempt for attempt in attempts if attempt.own)
    return None if own.reward == max(attempt.reward for attempt in attempts) else row.get("hint", with_hint(row))


def other_texts(row: dict, attempts: list[Attempt]) -> list[dict]:
    """What the others of the group answered, with their rewards."""
    told = " ".join(f"{attempt.response} {attempt.reward:.3f}" for attempt in attempts if not attempt.own)
    return [{"role": "user", "content": told}]


def nothing(row: dict, attempts: list[Attempt]) -> None:
    """Never anything to show."""


def with_attempts(policy_path, folder, prompt: str = "hint_for_the_worse", **args):
    return built(
        policy_path,
        folder,
        another(policy_path),
        rewards=[thirds],
        teacher_prompt=f"{__file__}:{prompt}",
        num_generations=4,
        **args,
    )


@pytest.mark.parametrize("settings", [{"beta": 0.5}, {"divergence": "sampled_token", "discount": 0.5}], ids=str)
def test_only_what_is_taught_counts(settings, policy_path, tmp_path):
    """Value and gradient are those of plain arithmetic over the responses with something to show."""
    trainer = with_attempts(policy_path, tmp_path, **settings)
    found, gradients, output = update(trainer)
    kept = [
        ids[mask.bool()].tolist()
        for ids, mask in zip(output["completion_ids"], output["completion_mask"], strict=True)
    ]
    rewards = torch.tensor(thirds(kept)).view(2, 4)
    assert output["taught"].tolist() == (rewards < rewards.max(dim=1, keepdim=True).values).flatten().tolist()
    assert trainer._metrics["train"]["taught"] == [output["taught"].double().mean().item()]
    policy = perturbed(AutoModelForCausalLM.from_pretrained(policy_path, dtype=torch.float64), seed=1, scale=0.02)
    name = settings.get("divergence", "full")
    expected = plain_loss(name, settings, policy, another(policy_path), trainer.processing_class, output)
    expected.backward()
    assert found == pytest.approx(expected.item(), abs=1e-11)
    for parameter, weight in policy.named_parameters():
        torch.testing.assert_close(gradients[parameter], weight.grad, rtol=0, atol=1e-11)


def test_the_teacher_reads_the_others_of_a_group(policy_path, tmp_path):
    trainer = with_attempts(policy_path, tmp_path, "other_texts")
    output = trainer._generate_and_score_completions(rows())
    kept = [
        ids[mask.bool()].tolist()
        for ids, mask in zip(output["completion_ids"], output["completion_mask"], strict=True)
    ]
    texts = trainer.processing_class.batch_decode(kept, skip_special_tokens=True)
    for row in range(8):
        others = [i for i in range(row // 4 * 4, row // 4 * 4 + 4) if i != row]
        told = " ".join(f"{texts[i]} {thirds([kept[i]])[0]:.3f}" for i in others)
        [ids], _, _ = trainer._tokenize_prompts([[{"role": "user", "content": told}]])
        shown = output["teacher_prompt_ids"][row][output["teacher_prompt_mask"][row].bool()].tolist()
        assert shown[-len(ids) :] == ids


@pytest.mark.parametrize("divergence", ["full", "sampled_token"])
def test_nothing_is_learned_where_nothing_is_shown(divergence, policy_path, tmp_path):
    trainer = with_attempts(policy_path, tmp_path, "nothing", divergence=divergence)
    loss, gradients, _ = update(trainer)
    assert not trainer._seen_signal
    assert loss == 0 and all(gradient.abs().max() == 0 for gradient in gradients.values())


def test_what_does_not_fit_is_not_taught(policy_path, tmp_path):
    """Without a word too many into a context of its own length."""
    trainer = with_attempts(policy_path, tmp_path, "other_texts")
    longest = trainer._generate_and_score_completions(rows())["teacher_prompt_mask"].sum(dim=1)
    trainer.teacher.model.config.max_position_embeddings = int(longest.max()) + 7
    output = trainer._generate_and_score_completions(rows())
    assert output["taught"].equal((longest < longest.max()).long())


@pytest.mark.slow
def test_two_processes_and_micro_batches_make_the_update_of_one(policy_path, tmp_path):
    """With groups that are split between the processes."""
    specs = {
        size: {
            **specification(
                policy_path,
                teacher_prompt=f"{__file__}:hint_for_the_worse",
                teacher_model_name_or_path=policy_path,
                num_generations=8,
                per_device_train_batch_size=size,
                gradient_accumulation_steps=steps,
            ),
            "rewards": ["thirds"],
        }
        for size, steps in ((8, 1), (4, 1), (2, 4))
    }
    whole = result(train(specs[8], str(tmp_path / "whole")))
    split = result(train(specs[2], str(tmp_path / "split")))
    assert largest_difference(split.parameters, whole.parameters) < 1e-11
    (spread,) = train_in_processes([specs[4]], 2, tmp_path)
    assert largest_difference(spread.parameters, whole.parameters) < 1e-11
    for name in ("taught", "divergence", "entropy", "loss"):
        assert split.logs[0][name] == pytest.approx(whole.logs[0][name]) == spread.logs[0][name] != 0


def test_settings_that_are_refused(policy_path, tmp_path):
    with pytest.raises(ValueError, match="give num_generations of 2 or more"):
        DistillationConfig(str(tmp_path), report_to=[], preset="sdpo", num_generations=1)
    with pytest.raises(ValueError, match="shows attempts by their rewards: give a reward function"):
        built(policy_path, tmp_path, None, teacher_prompt=f"{__file__}:nothing", num_generations=4)
    config = DistillationConfig(str(tmp_path), report_to=[], preset="sdpo", num_generations=4)
    assert (config.divergence, config.beta) == ("full", 0.5) and config.teacher_prompt.endswith(":with_success")
