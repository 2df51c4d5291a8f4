"""Token batches, entropies and log-probabilities against values worked by hand and plain computations in float64."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.tiny import build_tokenizer, with_special_tokens
from trl_ext.data import encode_turn
from trl_ext.data.packed_sft import encode_documents
from trl_ext.models import completion_mask, response_log_probs, token_entropy, tokenize_prompt_and_output
from trl_ext.rollouts.generation import prompt_tokens


@pytest.fixture
def tokenizer():
    return build_tokenizer()


# ---- Prompts and outputs ----


def test_a_batch_by_hand(tokenizer):
    """Rows `ab|cde` and `a|b`, one token per letter, padded to 5 tokens and shifted by one:

    tokens    a b c d e    a b - - -
    inputs    a b c d      a b - -
    labels      b c d e      b - - -
    output      0 1 1 1      1 0 0 0
    """
    a, b, c, d, e = (tokenizer.convert_tokens_to_ids(letter) for letter in "abcde")
    pad = tokenizer.pad_token_id
    batch = tokenize_prompt_and_output(["ab", "a"], ["cde", "b"], tokenizer)
    assert batch["input_ids"].tolist() == [[a, b, c, d], [a, b, pad, pad]]
    assert batch["labels"].tolist() == [[b, c, d, e], [b, pad, pad, pad]]
    assert batch["response_mask"].tolist() == [[0, 1, 1, 1], [1, 0, 0, 0]]
    assert list(batch) == ["input_ids", "labels", "response_mask"]
    assert [tensor.dtype for tensor in batch.values()] == [torch.long, torch.long, torch.bool]
    batch["labels"].fill_(-100)
    assert batch["input_ids"].tolist() == [[a, b, c, d], [a, b, pad, pad]], "the tensors share no memory"


def test_tokenized_apart():
    """A tokenizer that merges `ab` does not merge over the border between prompt and output."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    merging = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "ab": 2, "<end>": 3}, merges=[("a", "b")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=merging, eos_token="<end>")
    assert tokenizer("ab")["input_ids"] == [2]
    batch = tokenize_prompt_and_output(["a", "ab"], ["b", "ab"], tokenizer)
    assert (batch["input_ids"].tolist(), batch["labels"].tolist()) == ([[0], [2]], [[1], [2]])


def test_special_tokens_stand_before_the_prompt_once(tokenizer):
    with_special_tokens(tokenizer, "<|im_start|> $A <|im_end|>")
    start, a, b = (tokenizer.convert_tokens_to_ids(token) for token in ("<|im_start|>", "a", "b"))
    for prompt in ("a", "<|im_start|>a"):
        batch = tokenize_prompt_and_output([prompt], ["b"], tokenizer)
        assert batch["input_ids"].tolist() == [[start, a]], "no end-of-text token between the two"
        assert batch["labels"].tolist() == [[a, b]]
        assert batch["response_mask"].tolist() == [[False, True]]


# ---- Entropy ----


def test_entropies_by_hand():
    """Uniform over 4: ln 4. Probabilities 1/2, 1/4, 1/4: ln 2 / 2 + 2 ln 4 / 4 = 1.5 ln 2. One token only: 0."""
    infinity = float("inf")
    logits = torch.tensor(
        [
            [[0.0, 0.0, 0.0, 0.0], [math.log(2), 0.0, 0.0, -infinity]],
            [[7.0, -infinity, -infinity, -infinity], [3e4, -3e4, 0.0, 0.0]],
        ]
    )
    expected = torch.tensor([[math.log(4), 1.5 * math.log(2)], [0.0, 0.0]])
    torch.testing.assert_close(token_entropy(logits), expected)
    half = torch.randn(2, 3, 400, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert token_entropy(half).dtype == torch.float32
    torch.testing.assert_close(token_entropy(half), token_entropy(half.double()).float())
    # Logits on a grid of 1/64, which float32 holds exactly up to 1e4: a common offset changes nothing.
    grid = (torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(0)) * 64).round() / 64
    for offset in (1e4, -1e4):
        torch.testing.assert_close(token_entropy(grid + offset), token_entropy(grid), rtol=1e-6, atol=1e-6)


def test_entropy_and_its_gradient_in_float64():
    """dH/dlogit_j = -p_j (log p_j + H), from the definition, token by token; 0 where a token is impossible."""
    logits = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits = (4 * logits).requires_grad_()
    entropies = token_entropy(logits)
    entropies.sum().backward()
    for row in range(2):
        for position in range(3):
            weights = [math.exp(value) for value in logits[row, position].tolist()]
            probabilities = [weight / sum(weights) for weight in weights]
            entropy = -sum(p * math.log(p) for p in probabilities)
            gradient = [-p * (math.log(p) + entropy) for p in probabilities]
            assert entropies[row, position].item() == pytest.approx(entropy, rel=1e-12)
            assert logits.grad[row, position].tolist() == pytest.approx(gradient, rel=1e-9, abs=1e-12)
    uniform = torch.tensor([0.0, 0.0, -float("inf"), -1e5], requires_grad=True)
    token_entropy(uniform).backward()
    assert uniform.grad.tolist() == [0.0] * 4


# ---- Log-probabilities ----


@pytest.fixture(scope="module")
def model(tiny_model_path):
    return AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def exact_model(tiny_model_path):
    return AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float64).eval()


@pytest.fixture
def batch(tokenizer):
    return tokenize_prompt_and_output(["What is 1+1?", "x"], ["two", "a longer answer"], tokenizer)


def test_against_rows_without_padding_in_float64(model, exact_model, batch, tokenizer):
    """Each row by itself, cut to its tokens; log p = logit - log(sum of exponentials), H = -sum of p log p."""
    results = response_log_probs(model, batch["input_ids"], batch["labels"], return_token_entropy=True)
    assert {name: list(tensor.shape) for name, tensor in results.items()} == {
        "log_probs": list(batch["labels"].shape),
        "token_entropy": list(batch["labels"].shape),
    }
    for row, length in enumerate([len("What is 1+1?two") - 1, len("xa longer answer") - 1]):
        with torch.no_grad():
            logits = exact_model(batch["input_ids"][row : row + 1, :length]).logits[0]
        for position in range(length):
            exponentials = logits[position].exp()
            probabilities = exponentials / exponentials.sum()
            label = batch["labels"][row, position]
            log_prob, entropy = results["log_probs"][row, position], results["token_entropy"][row, position]
            assert log_prob.item() == pytest.approx(probabilities[label].log().item(), abs=1e-5)
            assert entropy.item() == pytest.approx(-(probabilities * probabilities.log()).sum().item(), abs=1e-5)


def test_gradient_of_the_parameters(exact_model, batch):
    """That of `cross_entropy`, summed over the response, for every parameter."""
    mask = batch["response_mask"]
    parameters = list(exact_model.parameters())
    log_probs = response_log_probs(exact_model, batch["input_ids"], batch["labels"])["log_probs"]
    own = torch.autograd.grad((log_probs * mask).sum(), parameters)
    logits = exact_model(input_ids=batch["input_ids"]).logits
    targets = batch["labels"].masked_fill(~mask, -100)
    plain = -torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    for one, other in zip(own, torch.autograd.grad(plain, parameters), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


# ---- Completion mask ----


def test_completion_mask_by_hand():
    """With 2 for the end: after the first one nothing counts, not even a later one or a token behind it."""
    ids = torch.tensor([[5, 2, 2, 7], [5, 6, 7, 8], [2, 5, 5, 5], [5, 6, 7, 2]])
    expected = [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 1]]
    assert completion_mask(ids, 2).tolist() == expected
    assert completion_mask(ids, 2).dtype == torch.bool
    assert completion_mask(ids, [7, 2]).tolist() == [[1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 0]]
    assert completion_mask(ids[:, :0], 2).shape == (4, 0)


@pytest.mark.parametrize("text", ["the cat", "the cat<|im_end|>", ""])
@pytest.mark.parametrize(
    ("single", "beginning"),
    [
        ("$A <|im_end|>", ""),
        ("<|im_start|> $A <|im_end|>", "<|im_start|>"),
        ("<|im_end|> $A", "<|im_end|>"),
        ("$A", ""),
    ],
)
def test_an_appended_end_token_is_no_part_of_a_prompt(single, beginning, text):
    tokenizer = with_special_tokens(build_tokenizer(), single)
    tokenizer.bos_token = beginning or None
    expected = build_tokenizer()(beginning + text)["input_ids"]
    end = tokenizer.eos_token_id
    assert prompt_tokens(tokenizer, text, None) == expected
    assert prompt_tokens(tokenizer, text, 2) == expected[-2:]
    prompt, response = encode_turn(tokenizer, text, "sat")
    assert (prompt, response) == (expected, [*build_tokenizer()("sat")["input_ids"], end])
    assert encode_turn(tokenizer, text, "sat", finished=False)[1] == response[:-1]
    chat = [{"role": "user", "content": "the cat"}]
    assert prompt_tokens(tokenizer, chat, None) == prompt_tokens(build_tokenizer(), chat, None)
    (document,) = encode_documents(tokenizer, [{"prompt": "Why?", "response": "So"}])
    assert document[-1] == end and document.count(end) == 1 + single.startswith("<|im_end|>")
    if expected:
        batch = tokenize_prompt_and_output([text], ["sat"], tokenizer)
        assert [*batch["input_ids"][0].tolist(), batch["labels"][0, -1].item()] == [*expected, *response[:-1]]


@pytest.mark.parametrize(
    ("prompts", "outputs", "tokens", "phrases"),
    [
        (["a", "b"], ["c"], {}, "at least one, got 2 prompts and 1 outputs"),
        (["a", ""], ["b", "c"], {}, "^prompt 1 has no tokens"),
        (["a"], ["b"], {"pad_token": None, "eos_token": None}, "neither a padding nor .*: set tokenizer.pad_token"),
    ],
)
def test_refused_texts(prompts, outputs, tokens, phrases, tokenizer):
    for name, value in tokens.items():
        setattr(tokenizer, name, value)
    with pytest.raises(ValueError, match=phrases):
        tokenize_prompt_and_output(prompts, outputs, tokenizer)


def test_labels_that_are_no_tokens_are_refused(model, batch):
    labels = batch["labels"].clone()
    labels[1, 3] = -100
    with pytest.raises(ValueError, match="labels: an id that is no token, such as -100"):
        response_log_probs(model, batch["input_ids"], labels)
