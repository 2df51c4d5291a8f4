"""Token batches, entropies, log-probabilities and `score_responses` against values worked by hand and in float64."""

from __future__ import annotations

import math
import random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.support.tiny import build_tokenizer, token_log_probs, with_special_tokens
from tests.support.train_once import build
from trl_ext.course import encode_documents
from trl_ext.data import encode_turn
from trl_ext.models import (
    completion_mask,
    response_log_probs,
    score_responses,
    token_entropy,
    tokenize_prompt_and_output,
)
from trl_ext.models.batches import in_batches
from trl_ext.models.loading import load_policy
from trl_ext.rewards import RewardModel
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


def test_against_rows_without_padding_in_float64(model, exact_model, batch):
    """Each row by itself, without its padding; H = -sum of p log p."""
    results = response_log_probs(model, batch["input_ids"], batch["labels"], return_token_entropy=True)
    shape = batch["labels"].shape
    assert {name: tensor.shape for name, tensor in results.items()} == {"log_probs": shape, "token_entropy": shape}
    for row, length in enumerate([len("What is 1+1?two") - 1, len("xa longer answer") - 1]):
        with torch.no_grad():
            probabilities = exact_model(batch["input_ids"][row : row + 1, :length]).logits[0].softmax(dim=-1)
        expected = probabilities.gather(1, batch["labels"][row, :length, None])[:, 0].log()
        entropies = -(probabilities * probabilities.log()).sum(dim=-1)
        torch.testing.assert_close(results["log_probs"][row, :length].double(), expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(results["token_entropy"][row, :length].double(), entropies, rtol=0, atol=1e-5)


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
@pytest.mark.parametrize("single", ["$A <|im_end|>", "<|im_start|> $A <|im_end|>", "<|im_end|> $A", "$A"])
def test_an_appended_end_token_is_no_part_of_a_prompt(single, text):
    tokenizer, beginning = with_special_tokens(build_tokenizer(), single), single.partition("$A")[0].strip()
    tokenizer.bos_token = beginning or None
    expected = build_tokenizer()(beginning + text)["input_ids"]
    end = tokenizer.eos_token_id
    assert prompt_tokens(tokenizer, text, None) == expected
    assert prompt_tokens(tokenizer, text, 2) == expected[-2:]
    prompt, response = encode_turn(tokenizer, text, "sat")
    assert (prompt, response) == (expected, [*build_tokenizer()("sat")["input_ids"], end])
    assert encode_turn(tokenizer, text, "sat", finished=False)[1] == response[:-1]
    if beginning:
        # As a chat template renders it: with one beginning, not two.
        assert prompt_tokens(tokenizer, beginning + text, None) == build_tokenizer()(beginning + text)["input_ids"]
    chat = [{"role": "user", "content": "the cat"}]
    assert prompt_tokens(tokenizer, chat, None) == prompt_tokens(build_tokenizer(), chat, None)
    (document,) = encode_documents(tokenizer, [{"prompt": "Why?", "response": "So"}])
    assert document[-1] == end and document.count(end) == 1 + single.startswith("<|im_end|>")
    if expected:
        batch = tokenize_prompt_and_output([text], ["sat"], tokenizer)
        assert [*batch["input_ids"][0].tolist(), batch["labels"][0, -1].item()] == [*expected, *response[:-1]]


@pytest.mark.parametrize(
    ("prompts", "outputs", "phrase"),
    [(["a", "b"], ["c"], "2 prompts and 1 outputs"), (["a", ""], ["b", "c"], "prompt 1")],
)
def test_refused_texts(prompts, outputs, phrase, tokenizer):
    with pytest.raises(ValueError, match=phrase):
        tokenize_prompt_and_output(prompts, outputs, tokenizer)


# ---- Responses in batches ----


@pytest.fixture(scope="module")
def rows() -> tuple[list[list[int]], list[list[int]]]:
    """11 prompts and responses of 1 to 40 and 0 to 30 tokens, long prompts with short responses among them."""
    draw = random.Random(0)
    ids = lambda length: [draw.randrange(3, 250) for _ in range(length)]  # noqa: E731
    lengths = [(1, 1), (40, 2), (3, 30), (1, 30), (25, 0)]
    lengths += [(draw.randint(1, 40), draw.randint(1, 30)) for _ in "123456"]
    return [ids(prompt) for prompt, _ in lengths], [ids(response) for _, response in lengths]


@torch.no_grad()
def assert_scored(values, model, prompt: list[int], response: list[int], atol: float = 1e-5) -> None:
    """The log-probabilities are those of one row alone."""
    chosen = torch.tensor(response, dtype=torch.long)[:, None]
    expected = token_log_probs(model, prompt, response).gather(1, chosen)[:, 0]
    torch.testing.assert_close(values.double(), expected, atol=atol, rtol=1e-5)


@pytest.mark.parametrize(("batch_size", "pad_token_id"), [(1, 0), (3, 200), (4, 0), (100, 200)])
def test_against_rows_alone_in_float64(batch_size, pad_token_id, model, exact_model, rows):
    prompts, responses = rows
    scored = score_responses(model, prompts, responses, batch_size=batch_size, pad_token_id=pad_token_id)
    assert [len(values) for values in scored] == [len(response) for response in responses]
    for values, prompt, response in zip(scored, prompts, responses, strict=True):
        assert values.dtype == torch.float32 and values.device.type == "cpu" and not values.requires_grad
        assert_scored(values, exact_model, prompt, response)


def test_padding_does_not_move_absolute_positions(rows):
    """GPT-2 adds an embedding of each position, so that a row shifted by its padding would score otherwise."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=256, n_positions=128, n_embd=16, n_layer=2, n_head=2, initializer_range=0.3)
    model = GPT2LMHeadModel(config).eval()
    scored = score_responses(model, *rows, batch_size=4)
    model.double()
    for values, prompt, response in zip(scored, *rows, strict=True):
        assert_scored(values, model, prompt, response)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_the_model_of_a_trainer(lora, rows, tiny_model_path, tmp_path):
    """A trainer puts a fused head in place of the model's own; in training mode, with checkpointing and dropout."""
    arguments = {"gradient_checkpointing": True, "disable_dropout": False}
    spec = {"model": tiny_model_path, "lora": lora, "lora_dropout": 0.5, "args": arguments}
    trained = build(spec, str(tmp_path)).model.train()
    scored = score_responses(trained, *rows)
    assert trained.training
    trained.eval()
    for values, prompt, response in zip(scored, *rows, strict=True):
        assert_scored(values, trained, prompt, response, atol=1e-4)


def test_empty_responses_and_prompts(model):
    first, empty = score_responses(model, [[5, 6], [7]], [[8], []])
    assert (first.shape, empty.shape) == ((1,), (0,))
    assert [values.shape for values in score_responses(model, [[5], [6]], [[], []])] == [(0,), (0,)]
    assert score_responses(model, [], []) == []
    with pytest.raises(ValueError, match="^prompt 1 is empty"):
        score_responses(model, [[1], []], [[2], [3]])


@pytest.mark.parametrize(
    "trainer", ["PreferenceTrainer", "SFTTrainer", "RewardTrainer", "KTOTrainer", "PolicyTrainer"]
)
def test_a_tokenizer_larger_than_the_model_is_refused_before_training(trainer, policy_path, tmp_path):
    is_reward = trainer == "RewardTrainer"
    kind = AutoModelForSequenceClassification if is_reward else AutoModelForCausalLM
    tokenizer = AutoTokenizer.from_pretrained(policy_path)

    def build_on(model, **args) -> None:
        spec = {"trainer": trainer, "model": model, "dtype": None, "args": args}
        build(spec, str(tmp_path / "run"), processing_class=tokenizer)

    small, model = (kind.from_pretrained(policy_path, **({"num_labels": 1} if is_reward else {})) for _ in range(2))
    small.resize_token_embeddings(tokenizer.eos_token_id)
    # Before its reference log-probabilities, too.
    for args in [{}, *([{"precompute_ref_log_probs": True}] if trainer == "PreferenceTrainer" else [])]:
        with pytest.raises(ValueError, match="the model has embeddings for"):
            build_on(small, **args)
    # Nor is such a policy or reward model loaded.
    for part in (small, tokenizer):
        part.save_pretrained(tmp_path / "small")
    with pytest.raises(ValueError, match="the model has embeddings for"):
        RewardModel(str(tmp_path / "small")).load() if is_reward else load_policy(str(tmp_path / "small"))
    # Neither a token that no text contains, as Gemma 3's of images, nor room in the model for more is refused.
    tokenizer.add_tokens(["<image>"])
    build_on(model)
    model.resize_token_embeddings(len(tokenizer) + 64)
    build_on(model)


def test_batches_of_shorter_rows_have_more_rows():
    """Of at most 2 x 8 tokens with padding: 8 + 8, then 5 rows of 3 or 2, and of 1 as many as are left."""
    tokens = [8, 1, 3, 8, 2, 3, 1, 3, 2, 1]
    order, taken = sorted(range(10), key=lambda row: -tokens[row]), []

    def lengths(rows: list[int]) -> list[int]:
        taken.append([tokens[row] for row in rows])
        return taken[-1]

    assert in_batches(torch.nn.Identity(), lengths, order, batch_size=2, tokens=tokens) == tokens
    assert taken == [[8, 8], [3, 3, 3, 2, 2], [1, 1, 1]]
    taken.clear()
    assert in_batches(torch.nn.Identity(), lengths, order, batch_size=4) == tokens
    assert taken == [[8, 8, 3, 3], [3, 2, 2, 1], [1, 1]]
