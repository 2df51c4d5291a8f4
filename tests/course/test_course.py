"""The course's functions: values worked by hand, and values and gradients of loops over single tokens in float64."""

from __future__ import annotations

import gzip
import inspect
import json
import math
import re
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.naive_policy import ADVANTAGES, LOG_RATIO, MASK, NEW, by_loops
from tests.support.tiny import alpaca, build_tokenizer, perturbed, with_special_tokens
from trl_ext import course, rewards

NAN = float("nan")


SIGNATURES = """
tokenize_prompt_and_output(prompt_strs, output_strs, tokenizer)
token_entropy(logits)
response_log_probs(model, input_ids, labels, return_token_entropy=False)
masked_mean(tensor, mask, dim=None)
masked_normalize(tensor, mask, normalize_constant, dim=None)
compute_group_normalized_rewards(reward_fn, rollout_responses, repeated_ground_truths, group_size, advantage_eps,
    normalize_by_std)
naive_policy_gradient_loss(raw_rewards_or_advantages, policy_log_probs)
grpo_clip_loss(advantages, policy_log_probs, old_log_probs, cliprange)
policy_gradient_loss(policy_log_probs, loss_type, raw_rewards=None, advantages=None, old_log_probs=None,
    cliprange=None)
sft_microbatch_step(policy_log_probs, response_mask, gradient_accumulation_steps, normalize_constant=1.0)
policy_microbatch_step(policy_log_probs, response_mask, gradient_accumulation_steps, loss_type, raw_rewards=None,
    advantages=None, old_log_probs=None, cliprange=None)
per_instance_dpo_loss(lm, lm_ref, tokenizer, beta, prompt, response_chosen, response_rejected)
PackedSFTDataset(tokenizer, dataset_path, seq_length, shuffle)
iterate_batches(dataset, batch_size, shuffle)
parse_gsm8k_response(model_output)
parse_mmlu_response(mmlu_example, model_output)
"""


def test_names_and_arguments():
    for name, arguments in re.findall(r"(\w+)\((.*?)\)\n", SIGNATURES, re.DOTALL):
        parameters = inspect.signature(getattr(course, name)).parameters.values()
        assert ", ".join(str(p.replace(annotation=p.empty)) for p in parameters) == " ".join(arguments.split()), name
        assert name in course.__all__
    assert course.parse_mmlu_response is rewards.parse_mmlu_response
    assert course.parse_gsm8k_response is rewards.parse_gsm8k_response


# ---- Reductions ----


def test_masked_reductions_by_hand():
    """Rows (1 + 3) / 2 and nothing; columns 1, nothing, 3; everything (1 + 3) / 2. Over 8: rows 4 / 8 and 0 / 8."""
    tensor, mask = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, NAN]]), torch.tensor([[1, 0, 1], [0, 0, 0]])
    assert course.masked_mean(tensor, mask).item() == 2
    assert course.masked_mean(tensor, mask, dim=1).tolist() == pytest.approx([2, NAN], nan_ok=True)
    assert course.masked_mean(tensor, mask.bool(), 0).tolist() == pytest.approx([1, NAN, 3], nan_ok=True)
    assert course.masked_normalize(tensor, mask, 8).item() == 0.5
    assert course.masked_normalize(tensor, mask, 8.0, dim=1).tolist() == [0.5, 0]
    assert course.masked_normalize(tensor, mask, 8, 0).tolist() == [0.125, 0, 0.375]


# ---- Rewards ----


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


# ---- DPO ----


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


# The batch of tests/losses/test_policy_losses.py: the clip at 0.2 makes the loss larger at the first token of each.
REWARDS, ADVANTAGES = torch.tensor([[1.0], [0.0]]), ADVANTAGES[:, None]
GIVEN = {"raw_rewards": REWARDS, "advantages": ADVANTAGES, "old_log_probs": NEW - LOG_RATIO, "cliprange": 0.2}


# ---- Policy losses ----


def test_clip_loss_by_hand():
    """Row 1: -1.2 (clipped), -0.904837, -1.051271. Row 2: 0.8 (clipped), 1.221403, which no clip may lower, and 1."""
    losses, metadata = course.grpo_clip_loss(ADVANTAGES, NEW, NEW - LOG_RATIO, 0.2)
    expected = torch.tensor([[-1.2, -0.904837, -1.051271], [0.8, 1.221403, 1.0]])
    torch.testing.assert_close(losses, expected, atol=1e-6, rtol=0)
    assert metadata["clipped"].tolist() == [[1, 0, 0], [1, 0, 0]]
    assert metadata["clip_fraction"].item() == pytest.approx(2 / 6)


def random_batch():
    """5 responses of 0 to 9 tokens with ratios of about 0.5 to 2, in float64."""
    generator = torch.Generator().manual_seed(0)
    log_probs = -3 * torch.rand(5, 9, generator=generator, dtype=torch.float64)
    old = log_probs + 0.4 * torch.randn(5, 9, generator=generator, dtype=torch.float64)
    mask = torch.arange(9) < torch.tensor([[9], [4], [1], [0], [6]])
    mask[0, 2:5] = False
    rewards, advantages = torch.randn(2, 5, 1, generator=generator, dtype=torch.float64)
    arguments = {"raw_rewards": rewards, "advantages": advantages, "old_log_probs": old, "cliprange": 0.15}
    return log_probs.requires_grad_(), mask, arguments


@pytest.mark.parametrize(
    ("loss_type", "surrogate", "signal"),
    [
        ("no_baseline", "reinforce", "raw_rewards"),
        ("reinforce_with_baseline", "reinforce", "advantages"),
        ("grpo_clip", "clip", "advantages"),
        ("grpo_no_clip", "no_clip", "advantages"),
    ],
)
def test_losses_and_gradients_against_loops(loss_type, surrogate, signal):
    """Of all tokens, and of the step: each row's mean, over 5 rows and 3 micro-batches; an empty row counts as 0."""
    log_probs, mask, given = random_batch()
    old, advantages, clips = given["old_log_probs"], given[signal].expand(5, 9), {"clip_low": 0.15, "clip_high": 0.15}
    losses, metadata = course.policy_gradient_loss(log_probs, loss_type, **given)
    (gradient,) = torch.autograd.grad(losses.sum() / 5, log_probs)
    expected, slope = by_loops(surrogate, "sum", log_probs, old, mask | True, advantages, clips)
    assert losses.sum().item() / 5 == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(gradient, slope, rtol=1e-12, atol=1e-15)
    loss, step_metadata = course.policy_microbatch_step(log_probs, mask, 3, loss_type, **given)
    expected, slope = by_loops(surrogate, "sequence_mean", log_probs, old, mask, advantages, clips)
    assert loss.item() == pytest.approx(expected / 3, rel=1e-12)
    torch.testing.assert_close(log_probs.grad, slope / 3, rtol=1e-12, atol=1e-15)
    ratio = (log_probs - old).exp()
    clipped = torch.where(advantages > 0, ratio > 1.15, ratio < 0.85) & (loss_type == "grpo_clip")
    for found, of in ((metadata, mask | True), (step_metadata, mask)):
        assert torch.equal(found["clipped"].bool(), clipped & of)
        assert found["clip_fraction"].item() == pytest.approx((clipped & of).sum().item() / of.sum().item())
    assert ((clipped & mask).sum() > 2) == (loss_type == "grpo_clip")


def test_no_gradient_through_the_old_policy():
    """The same tensor for both: ratio 1, and the gradient of -A log p, not zero."""
    log_probs = NEW.clone().requires_grad_()
    losses, _ = course.policy_gradient_loss(log_probs, "grpo_no_clip", advantages=ADVANTAGES, old_log_probs=log_probs)
    losses.sum().backward()
    assert losses.tolist() == [[-1] * 3, [1] * 3]
    assert log_probs.grad.tolist() == [[-1] * 3, [1] * 3]


# ---- Steps ----


@pytest.mark.parametrize(
    "loss_type, expected",
    [
        # Rows (1 + 0.7 + 0.5) / 3 and 0.
        ("no_baseline", 0.366667),
        # Rows 0.733333 and -(2 + 0.3) / 2.
        ("reinforce_with_baseline", -0.208333),
        # Rows -3.156108 / 3 and 2.021403 / 2.
        ("grpo_clip", -0.020667),
        # Rows -(1.349859 + 0.904837 + 1.051271) / 3 and (0.670320 + 1.221403) / 2.
        ("grpo_no_clip", -0.078064),
    ],
)
def test_policy_step_by_hand(loss_type, expected):
    log_probs = NEW.clone().requires_grad_()
    loss, metadata = course.policy_microbatch_step(log_probs, MASK, 4, loss_type, **GIVEN)
    assert loss.item() == pytest.approx(expected / 4, abs=1e-6) and not loss.requires_grad
    once = log_probs.grad.clone()
    course.policy_microbatch_step(log_probs, MASK, 4, loss_type, **GIVEN)
    assert torch.equal(log_probs.grad, 2 * once), "micro-batches add up"
    # Two of the five tokens that count.
    assert metadata["clip_fraction"].item() == pytest.approx(0.4 if loss_type == "grpo_clip" else 0)


def test_sft_step_by_hand():
    """Rows 2.2 / 10 and 2.3 / 10; (0.22 + 0.23) / 2 / 4 = 0.05625. A token that counts has -1 / (10 * 2 * 4)."""
    log_probs = NEW.clone().requires_grad_()
    loss, metadata = course.sft_microbatch_step(log_probs, MASK, 4, normalize_constant=10.0)
    assert loss.item() == pytest.approx(0.05625)
    assert not loss.requires_grad
    assert log_probs.grad.tolist() == [pytest.approx([-0.0125] * 3), pytest.approx([-0.0125, -0.0125, 0])]
    assert metadata["token_count"].item() == 5
    assert metadata["mean_log_prob"].item() == pytest.approx(-4.5 / 5)


# ---- Refusals ----

TRAINED = NEW.clone().requires_grad_()


def grouped(responses="ab", truths="ab", reward_fn=None, group_size=2):
    reward_fn = reward_fn or reward_of({"a": 0.0, "b": 1.0})
    return course.compute_group_normalized_rewards(reward_fn, responses, truths, group_size, 1e-6, True)


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda: course.masked_normalize(NEW, MASK, 0), "constant, which must be positive, got 0"),
        (lambda: grouped(truths="a"), "shorter"),
        (lambda: grouped(group_size=3), "2 rewards .* groups of 3"),
        (lambda: grouped(reward_fn=reward_of({"a": 0.0, "b": NAN})), "rewards that are not finite"),
        (lambda: course.grpo_clip_loss(ADVANTAGES, NEW, NEW[:, :2], 0.2), r"old_log_probs .*got \[2, 2\]"),
        (lambda: course.policy_gradient_loss(NEW, "grpo-clip"), "did you mean 'grpo_clip'"),
        (lambda: course.sft_microbatch_step(TRAINED, MASK[:, 0], 1), r"response_mask .*got \[2\]"),
        (lambda: course.policy_gradient_loss(NEW, "no_baseline"), "raw_rewards"),
        (lambda: course.policy_microbatch_step(TRAINED, MASK, 1, "reinforce_with_baseline"), "advantages"),
        (lambda: course.policy_gradient_loss(NEW, "grpo_clip", advantages=ADVANTAGES), "old_log_probs, cliprange"),
        (lambda: course.policy_gradient_loss(NEW, "grpo_no_clip", advantages=ADVANTAGES), "old_log_probs"),
    ],
)
def test_refusals(refused, message):
    with pytest.raises(ValueError, match=message):
        refused()


# ---- Packed sequences and batches ----


ROWS = [{"prompt": f"Question {n}?", "response": "Yes. " * n, "source": n} for n in range(1, 7)]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "examples.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS) + "\n")
    return path


def stream(tokenizer, rows) -> list[int]:
    """Documents letter by letter, one token each, with the end-of-text token after every one."""
    names = {" ": "\u0120", "\n": "\u010a"}
    ids = []
    for row in rows:
        text = alpaca(row["prompt"], row["response"])
        ids += [tokenizer.convert_tokens_to_ids(names.get(letter, letter)) for letter in text]
        ids.append(tokenizer.eos_token_id)
    return ids


@pytest.mark.parametrize("seq_length", [1, 10, 64])
@pytest.mark.parametrize("compressed", [False, True])
def test_packed_sequences(seq_length, compressed, path):
    if compressed:
        packed = gzip.compress(path.read_bytes())
        path = path.with_name("examples.jsonl.gz")
        path.write_bytes(packed)
    tokenizer = build_tokenizer()
    dataset = course.PackedSFTDataset(tokenizer, path, seq_length, shuffle=False)
    expected = stream(tokenizer, ROWS)
    assert len(dataset) == (len(expected) - 1) // seq_length
    for index, item in enumerate(dataset):
        start = index * seq_length
        assert item["input_ids"].tolist() == expected[start : start + seq_length]
        assert item["labels"].tolist() == expected[start + 1 : start + seq_length + 1]
        assert item["input_ids"].dtype == item["labels"].dtype == torch.long
    assert index == len(dataset) - 1


def test_a_sequence_needs_the_token_after_it(path):
    """Of 2 n tokens the last has no label, so that only one sequence of n is whole; of 2 n + 1, both are."""
    tokenizer, row = build_tokenizer(), ROWS[0]
    length = len(stream(tokenizer, [row]))
    for added in (0, 1):
        path.write_text(json.dumps(row | {"response": row["response"] + "!" * added}))
        dataset = course.PackedSFTDataset(tokenizer, path, (length + added) // 2, shuffle=False)
        assert len(dataset) == 1 + (length + added) % 2


def test_one_end_between_documents(path):
    """Also of a tokenizer that puts tokens of its own before and after each text."""
    tokenizer = with_special_tokens(build_tokenizer(), "<|im_start|> $A <|im_end|>")
    dataset = course.PackedSFTDataset(tokenizer, path, 1, shuffle=False)
    ids = [item["input_ids"].item() for item in dataset] + [dataset[-1]["labels"].item()]
    start, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    documents = tokenizer.decode(ids).split("<|im_end|>")
    assert documents == ["<|im_start|>" + alpaca(row["prompt"], row["response"]) for row in ROWS] + [""]
    assert (ids.count(start), ids.count(end)) == (len(ROWS), len(ROWS))


def test_shuffled_documents_stay_whole(path):
    tokenizer = build_tokenizer()

    def documents(seed):
        torch.manual_seed(seed)
        dataset = course.PackedSFTDataset(tokenizer, path, 1, shuffle=True)
        ids = [item["input_ids"].item() for item in dataset] + [dataset[-1]["labels"].item()]
        return tokenizer.decode(ids).split("<|im_end|>")[:-1]

    in_order = [alpaca(row["prompt"], row["response"]) for row in ROWS]
    assert documents(0) == documents(0) != documents(1)
    assert documents(0) != in_order and sorted(documents(0)) == sorted(in_order)


def test_batches(path):
    """Every sequence once per pass, in batches of 8 and a last one of the rest."""
    dataset = course.PackedSFTDataset(build_tokenizer(), path, 16, shuffle=False)
    in_order = [item["input_ids"].tolist() for item in dataset]
    batches = course.iterate_batches(dataset, 8, shuffle=False)
    assert len(batches) == math.ceil(len(dataset) / 8)
    shapes = [tuple(batch["labels"].shape) for batch in batches]
    assert shapes == [(8, 16)] * (len(dataset) // 8) + [(len(dataset) % 8, 16)]
    assert [row for batch in batches for row in batch["input_ids"].tolist()] == in_order
    torch.manual_seed(0)
    shuffled = course.iterate_batches(dataset, 8, shuffle=True)
    passes = [[row for batch in shuffled for row in batch["input_ids"].tolist()] for _ in "12"]
    assert sorted(passes[0]) == sorted(passes[1]) == sorted(in_order)
    assert passes[0] != in_order and passes[0] != passes[1]


@pytest.mark.parametrize(
    ("content", "seq_length", "message"),
    [
        (None, 0, "seq_length must be at least 1, got 0"),
        (None, 9999, r"\d+ tokens .* one sequence of 9999"),
        (json.dumps(ROWS[0]) + "\n{oops}\n", 8, "examples.jsonl: 1 bad row: line 2"),
        ('{"prompt": "a"}\n', 8, "line 1: response: missing"),
    ],
)
def test_bad_files(content, seq_length, message, path):
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=message):
        course.PackedSFTDataset(build_tokenizer(), path, seq_length, shuffle=False)
