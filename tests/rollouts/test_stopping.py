"""Stop strings end a response in `generate_responses`, in trainers, and in the sampler's own loop."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.rollout_once import lengths
from tests.support.sampling import batch, decoder, settings
from tests.support.tiny import build_tokenizer
from tests.support.trl_private import rollout_batches
from trl_ext import GRPOConfig, GRPOTrainer
from trl_ext.rollouts import generate_responses
from trl_ext.rollouts.sampler import fast_rollouts
from trl_ext.rollouts.stopping import StopInResponse, cut_at_stop

LIMIT = 12


@pytest.fixture(scope="module")
def tokenizer(tiny_model_path):
    return AutoTokenizer.from_pretrained(tiny_model_path)


@pytest.fixture
def model(tiny_model_path):
    return AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32).eval()


def test_stop_strings_end_a_response():
    tokenizer = build_tokenizer()
    model = decoder(vocab_size=len(tokenizer))
    given = batch()
    plain = model.generate(**given, generation_config=settings())[:, 17:]
    stop = [tokenizer.decode(plain[0, 3:5]), tokenizer.decode(plain[1, 6:7])]
    expected = model.generate(**given, generation_config=settings(stop_strings=stop), tokenizer=tokenizer)
    sampler = fast_rollouts(model)
    criteria = [StopInResponse(tokenizer, stop, 17)]
    found = model.generate(**given, generation_config=settings(), stopping_criteria=criteria)
    assert torch.equal(found, expected) and not torch.equal(found[:, 17:], plain) and sampler.log_probs is not None


@pytest.mark.parametrize("fast", [False, True])
def test_a_stop_string_that_begins_in_the_prompt_ends_nothing(fast, model, tokenizer):
    """Greedy responses to prompts whose end and first response tokens together would be a stop string."""
    prompts = ["what is this", "what is that one"]
    plain = generate_responses(model, tokenizer, prompts, max_new_tokens=LIMIT, fast=fast)
    stop = [tokenizer.decode([*row.prompt_ids[-2:], *row.response_ids[:1]]) for row in plain]
    assert all(one not in row.text for one in stop for row in plain)
    assert generate_responses(model, tokenizer, prompts, max_new_tokens=LIMIT, stop=stop, fast=fast) == plain


def cut(text: str, stop: list[str]) -> str:
    """The text up to the first end of a stop string."""
    ends = [text.index(one) + len(one) for one in stop if one in text]
    return text[: min(ends, default=len(text))]


def test_a_stopped_response_has_no_padding(model, tokenizer):
    prompts = ["a", "what is this", "so", "one more of them", "and that"]
    plain = generate_responses(model, tokenizer, prompts, max_new_tokens=LIMIT)
    stop = [tokenizer.decode(plain[row].response_ids[at : at + 2]) for row, at in ((0, 2), (3, 6))]
    stopped = generate_responses(model, tokenizer, prompts, max_new_tokens=LIMIT, stop=stop)
    assert any(row.finished for row in stopped)
    for one, whole in zip(stopped, plain, strict=True):
        count = len(one.response_ids)
        assert one.response_ids == whole.response_ids[:count] and len(one.log_probs) == count
        assert one.finished == (any(text in one.text for text in stop)) and (one.finished or count == LIMIT)
        assert one.text == cut(whole.text, stop)
        assert not any(text in tokenizer.decode(one.response_ids[:-1]) for text in stop), "no token more than it takes"


def test_rollouts_with_a_stop_string_that_begins_in_the_prompt(tmp_path, tiny_model_path, tokenizer):
    """No padding is trained on, and the sampler's log-probabilities are those of the trainer."""
    # The policy stays the one that has sampled.
    settings = {"max_completion_length": LIMIT, "max_steps": 1, "learning_rate": 0.0, "use_cpu": True, "bf16": False}
    settings |= {"per_device_train_batch_size": 8, "num_generations": 8, "report_to": "none", "save_strategy": "no"}
    # Each prompt ends with the first half of this text.
    stop = ["at" + tokenizer.decode([token]) for token in range(20, 60)]
    data = Dataset.from_dict({"prompt": ["what is that", "look at"]})
    arguments = GRPOConfig(str(tmp_path), stop=stop, **settings)
    trainer = GRPOTrainer(tiny_model_path, lengths, arguments, train_dataset=data)
    trainer.train()
    assert trainer.sampler.reason is None and trainer.sampler.log_probs is not None
    [rollout] = rollout_batches(trainer)
    difference = trainer.score(trainer.model, rollout).log_probs - rollout["sampling_per_token_logps"]
    difference = difference * rollout["completion_mask"]
    assert difference.abs().max() < 1e-4


def test_a_special_token_is_no_stop_string(model, tokenizer, tmp_path, tiny_model_path):
    special = tokenizer.eos_token
    with pytest.raises(ValueError, match="add it to eos_token_id"):
        generate_responses(model, tokenizer, ["so"], max_new_tokens=2, stop=[special])
    settings = GRPOConfig(str(tmp_path), stop=[special], num_generations=8, use_cpu=True, bf16=False, report_to="none")
    data = Dataset.from_dict({"prompt": ["so"] * 8})
    with pytest.raises(ValueError, match="add it to eos_token_id"):
        GRPOTrainer(tiny_model_path, lambda **columns: [0.0], settings, train_dataset=data)


def test_a_tokenizer_without_a_padding_token(model, tokenizer, tiny_model_path):
    prompts = ["a", "what is this"]
    expected = generate_responses(model, tokenizer, prompts, max_new_tokens=LIMIT)
    bare = AutoTokenizer.from_pretrained(tiny_model_path, pad_token=None)
    bare.pad_token = None
    assert generate_responses(model, bare, prompts, max_new_tokens=LIMIT) == expected


# ---- The end of a stop string in a text ----


class Pieces:
    """A tokenizer whose tokens are the pieces of a text."""

    @staticmethod
    def decode(tokens, skip_special_tokens):
        return "".join(token for token in tokens if token != "<pad>")


@pytest.mark.parametrize(
    ("tokens", "stop", "expected"),
    [
        # The token that completes the string stays whole; the text ends with the string.
        (["a", "</ans", "wer>\n", "b", "<pad>"], ["</answer>"], (["a", "</ans", "wer>\n"], "a</answer>")),
        (["</answer>"], ["</answer>"], (["</answer>"], "</answer>")),
        # Of several the one that is complete first, and of one its first occurrence.
        (["a!", "b.", "c!"], [".", "!"], (["a!"], "a!")),
        (["x", "yz", "y"], ["yz", "y"], (["x", "yz"], "xy")),
        (["a", "</answer"], ["</answer>"], None),
        (["a"], [], None),
        ([], ["a"], None),
    ],
)
def test_responses_are_cut_behind_the_first_stop_string(tokens, stop, expected):
    assert cut_at_stop(Pieces, tokens, stop) == expected
