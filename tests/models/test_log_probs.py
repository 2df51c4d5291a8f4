"""`score_responses` against a plain computation, one row at a time, without padding, in float64."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.tiny import token_log_probs
from tests.support.train_once import build
from trl_ext.models import score_responses


@pytest.fixture(scope="module")
def model(tiny_model_path):
    return AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def exact_model(tiny_model_path):
    return AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float64).eval()


@pytest.fixture(scope="module")
def rows() -> tuple[list[list[int]], list[list[int]]]:
    """11 prompts and responses of 1 to 40 and 0 to 30 tokens, long prompts with short responses among them."""
    draw = random.Random(0)
    ids = lambda length: [draw.randrange(3, 250) for _ in range(length)]  # noqa: E731
    lengths = [
        (1, 1),
        (40, 2),
        (3, 30),
        (1, 30),
        (25, 0),
        *((draw.randint(1, 40), draw.randint(1, 30)) for _ in "123456"),
    ]
    return [ids(prompt) for prompt, _ in lengths], [ids(response) for _, response in lengths]


@torch.no_grad()
def expected_log_probs(model, prompt: list[int], response: list[int]) -> torch.Tensor:
    return token_log_probs(model, prompt, response).gather(1, torch.tensor(response, dtype=torch.long)[:, None])[:, 0]


@pytest.mark.parametrize(("batch_size", "pad_token_id"), [(1, 0), (3, 200), (4, 0), (100, 200)])
def test_against_rows_alone_in_float64(batch_size, pad_token_id, model, exact_model, rows):
    prompts, responses = rows
    scored = score_responses(model, prompts, responses, batch_size=batch_size, pad_token_id=pad_token_id)
    assert [len(values) for values in scored] == [len(response) for response in responses]
    for values, prompt, response in zip(scored, prompts, responses, strict=True):
        assert values.dtype == torch.float32 and values.device.type == "cpu" and not values.requires_grad
        torch.testing.assert_close(
            values.double(), expected_log_probs(exact_model, prompt, response), atol=1e-5, rtol=1e-5
        )


def test_padding_does_not_move_absolute_positions(rows):
    """GPT-2 adds an embedding of each position, so that a row shifted by its padding would score otherwise."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=256, n_positions=128, n_embd=16, n_layer=2, n_head=2, initializer_range=0.3)
    model = GPT2LMHeadModel(config).eval()
    scored = score_responses(model, *rows, batch_size=4)
    model.double()
    for values, prompt, response in zip(scored, *rows, strict=True):
        torch.testing.assert_close(values.double(), expected_log_probs(model, prompt, response), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_the_model_of_a_trainer(lora, rows, tiny_model_path, tmp_path):
    """A trainer puts a fused head in place of the model's own; in training mode, with checkpointing and dropout."""
    arguments = {"gradient_checkpointing": True, "disable_dropout": False}
    spec = {"model": tiny_model_path, "lora": lora, "lora_dropout": 0.5, "args": arguments}
    trained = build(spec, str(tmp_path)).model.train()
    scored = score_responses(trained, *rows)
    trained.eval()
    for values, prompt, response in zip(scored, *rows, strict=True):
        torch.testing.assert_close(
            values.double(), expected_log_probs(trained, prompt, response), atol=1e-4, rtol=1e-5
        )


def test_empty_responses_and_prompts(model):
    first, empty = score_responses(model, [[5, 6], [7]], [[8], []])
    assert (first.shape, empty.shape) == ((1,), (0,))
    assert [values.shape for values in score_responses(model, [[5], [6]], [[], []])] == [(0,), (0,)]
    assert score_responses(model, [], []) == []
    with pytest.raises(ValueError, match="^prompt 1 is empty"):
        score_responses(model, [[1], []], [[2], [3]])


@pytest.mark.parametrize("training", [True, False])
def test_mode_of_the_model_is_restored(training, tiny_model_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_path).train(training)
    modes = []
    handle = model.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    score_responses(model, [[1, 2]], [[3]])
    assert modes == [False]
    assert model.training is training
    handle.remove()

    def fail(*_):
        raise RuntimeError("out of memory")

    model.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        score_responses(model, [[1, 2]], [[3]])
    assert model.training is training
