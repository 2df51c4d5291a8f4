"""The course's functions: values worked by hand, and values and gradients of loops over single tokens in float64."""

from __future__ import annotations

import inspect
import math
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.tiny import alpaca, build_tokenizer, perturbed
from trl_ext import course, rewards

NAN = float("nan")


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("tokenize_prompt_and_output", "prompt_strs, output_strs, tokenizer"),
        ("token_entropy", "logits"),
        ("response_log_probs", "model, input_ids, labels, return_token_entropy=False"),
        ("masked_mean", "tensor, mask, dim=None"),
        ("masked_normalize", "tensor, mask, normalize_constant, dim=None"),
        (
            "compute_group_normalized_rewards",
            "reward_fn, rollout_responses, repeated_ground_truths, group_size, advantage_eps, normalize_by_std",
        ),
        ("naive_policy_gradient_loss", "raw_rewards_or_advantages, policy_log_probs"),
        ("grpo_clip_loss", "advantages, policy_log_probs, old_log_probs, cliprange"),
        (
            "policy_gradient_loss",
            "policy_log_probs, loss_type, raw_rewards=None, advantages=None, old_log_probs=None, cliprange=None",
        ),
        (
            "sft_microbatch_step",
            "policy_log_probs, response_mask, gradient_accumulation_steps, normalize_constant=1.0",
        ),
        (
            "policy_microbatch_step",
            "policy_log_probs, response_mask, gradient_accumulation_steps, loss_type, raw_rewards=None, "
            "advantages=None, old_log_probs=None, cliprange=None",
        ),
        ("per_instance_dpo_loss", "lm, lm_ref, tokenizer, beta, prompt, response_chosen, response_rejected"),
        ("PackedSFTDataset", "tokenizer, dataset_path, seq_length, shuffle"),
        ("iterate_batches", "dataset, batch_size, shuffle"),
        ("parse_gsm8k_response", "model_output"),
        ("parse_mmlu_response", "mmlu_example, model_output"),
    ],
)
def test_names_and_arguments(name, arguments):
    parameters = inspect.signature(getattr(course, name)).parameters.values()
    assert ", ".join(str(p.replace(annotation=p.empty)) for p in parameters) == arguments
    assert name in course.__all__


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        course.nope  # noqa: B018


def test_parsers():
    assert course.parse_mmlu_response is rewards.parse_mmlu_response
    assert course.parse_gsm8k_response is rewards.parse_gsm8k_response


# ---------------------------------------------------------------------------------------------------- reductions


def test_masked_mean_by_hand():
    """Rows (1 + 3) / 2 and nothing; columns 1, nothing, 3; everything (1 + 3) / 2."""
    tensor, mask = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, NAN]]), torch.tensor([[1, 0, 1], [0, 0, 0]])
    assert course.masked_mean(tensor, mask).item() == 2
    assert course.masked_mean(tensor, mask, dim=1).tolist() == pytest.approx([2, NAN], nan_ok=True)
    assert course.masked_mean(tensor, mask.bool(), 0).tolist() == pytest.approx([1, NAN, 3], nan_ok=True)
    with pytest.raises(ValueError, match=r"^mask must broadcast to the tensor's shape \[2, 3\], got \[2\]$"):
        course.masked_mean(tensor, torch.tensor([1, 1]))
    with pytest.raises(ValueError, match=r"shape \[3\], got \[2, 3\]$"):
        course.masked_mean(tensor[0], mask)


def test_masked_normalize_by_hand():
    """(1 + 3) / 8; rows 4 / 8 and 0 / 8."""
    tensor, mask = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, NAN]]), torch.tensor([[1, 0, 1], [0, 0, 0]])
    assert course.masked_normalize(tensor, mask, 8).item() == 0.5
    assert course.masked_normalize(tensor, mask, 8.0, dim=1).tolist() == [0.5, 0]
    assert course.masked_normalize(tensor, mask, 8, 0).tolist() == [0.125, 0, 0.375]
    with pytest.raises(ValueError, match="^normalize_constant must be positive, got 0$"):
        course.masked_normalize(tensor, mask, 0)
    with pytest.raises(ValueError, match="^mask must broadcast"):
        course.masked_normalize(tensor, mask[:, :2], 1.0)


# ------------------------------------------------------------------------------------------------------- rewards


def reward_of(table: dict[str, float]):
    return lambda response, truth: {
        "reward": table[response],
        "format_reward": 1.0,
        "answer_reward": float(response == truth),
    }


def test_group_normalized_rewards_by_hand():
    """Groups 0, 1, 0, 0 and 2, 2, 2, 2. The first has mean 1/4 and sample variance (1/16 * 3 + 9/16) / 3 = 1/4, so
    that its advantages are (-1/4, 3/4, -1/4, -1/4) over 1/2 + 3/2 here; the second has none.
    """
    table = {"a": 0.0, "b": 1.0, "c": 2.0}
    responses, truths = list("abaacccc"), ["b"] * 4 + ["a"] * 4
    advantages, rewards, metadata = course.compute_group_normalized_rewards(
        reward_of(table), responses, truths, 4, 1.5, True
    )
    assert advantages.tolist() == [-0.125, 0.375, -0.125, -0.125, 0, 0, 0, 0]
    assert rewards.tolist() == [0, 1, 0, 0, 2, 2, 2, 2]
    assert metadata == {
        "reward": 9 / 8,
        "format_reward": 1,
        "answer_reward": 1 / 8,
        "reward_std": 0.25,
        "frac_reward_zero_std": 0.5,
    }
    assert all(type(number) is float for number in metadata.values())
    centered, _, _ = course.compute_group_normalized_rewards(reward_of(table), responses, truths, 4, 1.5, False)
    assert centered.tolist() == [-0.25, 0.75, -0.25, -0.25, 0, 0, 0, 0]


def test_sample_deviation():
    """Of 0.2, 0.5, 0, 0.4: mean 0.275, squares 0.005625 + 0.050625 + 0.075625 + 0.015625 = 0.1475, over 3."""
    rewards = dict(zip("wxyz", [0.2, 0.5, 0.0, 0.4], strict=True))
    expected = [(reward - 0.275) / (math.sqrt(0.1475 / 3) + 1e-6) for reward in rewards.values()]
    advantages, _, _ = course.compute_group_normalized_rewards(reward_of(rewards), "wxyz", "wxyz", 4, 1e-6, True)
    assert advantages.tolist() == pytest.approx(expected, abs=1e-6)
    assert expected == pytest.approx([-0.338239, 1.014718, -1.240210, 0.563732], abs=1e-6)


@pytest.mark.parametrize("normalize_by_std", [True, False])
def test_group_of_one_has_no_signal(normalize_by_std):
    advantages, rewards, metadata = course.compute_group_normalized_rewards(
        reward_of({"a": 1.0}), ["a"], ["a"], 1, 1e-6, normalize_by_std
    )
    assert (advantages.tolist(), rewards.tolist()) == ([0], [1])
    assert (metadata["reward_std"], metadata["frac_reward_zero_std"]) == (0, 1)


def test_bad_rewards():
    def call(reward_fn, responses="ab", truths="ab", group_size=2):
        course.compute_group_normalized_rewards(reward_fn, responses, truths, group_size, 1e-6, True)

    good = reward_of({"a": 0.0, "b": 1.0})
    with pytest.raises(ValueError, match="got 2 rollout_responses and 1 repeated_ground_truths$"):
        call(good, truths="a")
    with pytest.raises(ValueError, match="2 rewards do not divide into groups of 3"):
        call(good, group_size=3)
    with pytest.raises(ValueError, match="^reward_fn returned a reward of nan for response 1$"):
        call(reward_of({"a": 0.0, "b": NAN}))
    with pytest.raises(ValueError, match="a dict with a number 'reward', got {'score': 1} for response 0$"):
        call(lambda response, truth: {"score": 1})
    with pytest.raises(ValueError, match="a dict with a number 'reward', got 1.0 for response 0$"):
        call(lambda response, truth: 1.0)


# ----------------------------------------------------------------------------------------------------------- DPO


class Unigram(torch.nn.Module):
    """The same distribution over the tokens at every position."""

    def __init__(self, probabilities: torch.Tensor):
        super().__init__()
        self.logits = torch.nn.Parameter(probabilities.log())

    def forward(self, input_ids):
        return SimpleNamespace(logits=self.logits.expand(*input_ids.shape, -1))


def test_dpo_by_hand():
    """The texts differ in one token, `a` or `b`, of probability 1/2 and 1/4; the reference takes them as equal.

    The margin is ln 2: with beta 1 the loss is -log sigmoid(ln 2) = ln(1 + 1/2). It falls with the margin by
    1 - sigmoid(ln 2) = 1/3, and the margin is the difference of two logits.
    """
    tokenizer = build_tokenizer()
    a, b = (tokenizer.convert_tokens_to_ids(letter) for letter in "ab")
    probabilities = torch.full((len(tokenizer),), 0.25 / (len(tokenizer) - 2), dtype=torch.float64)
    probabilities[[a, b]] = torch.tensor([0.5, 0.25], dtype=torch.float64)
    lm, lm_ref = Unigram(probabilities), Unigram(torch.full_like(probabilities, 1 / len(tokenizer)))
    loss = course.per_instance_dpo_loss(lm, lm_ref, tokenizer, 1.0, "Which?", "a", "b")
    assert loss.shape == ()
    assert loss.item() == pytest.approx(math.log(1.5), rel=1e-9)
    loss.backward()
    expected = torch.zeros_like(probabilities)
    expected[[a, b]] = torch.tensor([-1 / 3, 1 / 3], dtype=torch.float64)
    torch.testing.assert_close(lm.logits.grad, expected)
    assert lm_ref.logits.grad is None


def test_dpo_of_a_transformer(tiny_model_path):
    """Against sums over the responses alone, token by token, in float64; and the gradient of every parameter."""
    tokenizer = build_tokenizer()
    lm, lm_ref = (AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float64).eval() for _ in "12")
    perturbed(lm)
    prompt, chosen, rejected = "Say {this}.", "A good answer.", "{bad}"

    def response_sum(model, response):
        ids = tokenizer(alpaca(prompt, response))["input_ids"] + [tokenizer.eos_token_id]
        start = len(tokenizer(alpaca(prompt, ""))["input_ids"])
        logits = model(torch.tensor([ids])).logits[0]
        return sum(logits[t - 1, ids[t]] - logits[t - 1].exp().sum().log() for t in range(start, len(ids)))

    margin = (response_sum(lm, chosen) - response_sum(lm_ref, chosen)) - (
        response_sum(lm, rejected) - response_sum(lm_ref, rejected)
    )
    expected = torch.log1p(torch.exp(-0.3 * margin))
    loss = course.per_instance_dpo_loss(lm, lm_ref, tokenizer, 0.3, prompt, chosen, rejected)
    assert abs(margin.item()) > 0.1
    assert loss.item() == pytest.approx(expected.item(), rel=1e-9)
    parameters = list(lm.parameters())
    gradients = zip(torch.autograd.grad(loss, parameters), torch.autograd.grad(expected, parameters), strict=True)
    # The model's norms are computed in float32 whatever its weights are, and the prompt's part cancels up to that.
    for own, plain in gradients:
        torch.testing.assert_close(own, plain, rtol=1e-5, atol=2e-6)
        assert plain.abs().max() > 1e-3
    same = course.per_instance_dpo_loss(lm_ref, lm_ref, tokenizer, 0.3, prompt, chosen, rejected)
    assert same.item() == pytest.approx(math.log(2), rel=1e-9)
    with pytest.raises(ValueError, match="^beta must be positive, got 0$"):
        course.per_instance_dpo_loss(lm, lm_ref, tokenizer, 0, prompt, chosen, rejected)
