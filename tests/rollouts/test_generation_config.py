"""Rollouts follow the run's sampling settings alone, whatever generation settings the model was saved with."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.rollout_once import build, prompts
from tests.support.trl_private import sampled_responses
from trl_ext.models.batches import temporarily
from trl_ext.models.packing.hook import unwrapped

# 259 tokens; the run's own settings are temperature 1, the whole vocabulary and 8 tokens a response.
SAVED = {
    "bad_words_ids": [[token] for token in range(3, 200)],
    "begin_suppress_tokens": list(range(3, 250)),
    "epsilon_cutoff": 0.02,
    "eta_cutoff": 0.2,
    "exponential_decay_length_penalty": [1, 50.0],
    "forced_eos_token_id": 2,
    "guidance_scale": 8.0,
    "min_length": 200,
    "min_new_tokens": 8,
    "min_p": 0.5,
    "no_repeat_ngram_size": 1,
    "num_beams": 2,
    "num_return_sequences": 2,
    "return_dict_in_generate": True,
    "sequence_bias": [[[9], 20.0]],
    "stop_strings": ["a"],
    "suppress_tokens": list(range(3, 250)),
    "top_h": 0.1,
    "typical_p": 0.1,
}
# TRL itself gives these neutral values.
GIVEN_BY_TRL = {"repetition_penalty": 3.0, "temperature": 0.01, "top_k": 1, "top_p": 0.01}


def sampled(trainer, *, stock: bool = False) -> list[list[int]]:
    torch.manual_seed(5)
    return sampled_responses(trainer, [row["prompt"] for row in prompts()], stock=stock)


@pytest.fixture(scope="module", params=["auto", "off", "lora"])
def trainer(request, policy_path, tmp_path_factory):
    own = {"lora": True} if request.param == "lora" else {"args": {"fast_rollouts": request.param}}
    spec = {"model": policy_path, "dtype": "float32", **own}
    return build(spec, str(tmp_path_factory.mktemp("rollouts")))


@pytest.mark.parametrize("name", [*SAVED, *GIVEN_BY_TRL])
def test_rollouts_ignore_what_the_model_was_saved_with(name, trainer):
    """TRL's own generation, with the same settings, follows the model's where TRL does not give a value."""
    model = unwrapped(trainer.model)
    neutral, saved = model.generation_config, copy.deepcopy(model.generation_config)
    expected = sampled(trainer)
    setattr(saved, name, (SAVED | GIVEN_BY_TRL)[name])
    with temporarily(model, generation_config=saved):
        assert sampled(trainer) == expected
        assert model.generation_config is saved and getattr(saved, name) == (SAVED | GIVEN_BY_TRL)[name]
        if name in SAVED:
            try:
                stock = sampled(trainer, stock=True)
            except (AttributeError, TypeError, ValueError):
                stock = None
            assert stock != expected
    assert model.generation_config is neutral


def test_ends_stay_those_of_the_model(trainer):
    """The end tokens of a checkpoint are its own, and end rollouts."""
    assert set(trainer.generation_config.eos_token_id) == set(trainer.eos_token_ids)
    ended = [ids for ids in sampled(trainer) if ids[-1] in trainer.eos_token_ids]
    assert ended and all(token not in trainer.eos_token_ids for ids in ended for token in ids[:-1])


def test_what_is_ignored_is_said_in_one_line(policy_path, tmp_path, caplog):
    model = AutoModelForCausalLM.from_pretrained(policy_path)
    for name, value in {
        "do_sample": True,
        "min_p": 0.5,
        "temperature": 1.0,
        "num_beams": 2,
        "forced_eos_token_id": 2,
    }.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(policy_path).save_pretrained(tmp_path / "model")
    with caplog.at_level(logging.WARNING):
        build({"model": str(tmp_path / "model")}, str(tmp_path / "run"))
        build({"model": policy_path}, str(tmp_path / "plain"))
    (line,) = [record.getMessage() for record in caplog.records if "generation_config" in record.getMessage()]
    assert line.endswith("are ignored: forced_eos_token_id 2, min_p 0.5, num_beams 2")
