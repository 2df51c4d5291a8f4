"""Tiny policies that train on their own samples: prompts, fixed responses and rewards.

Rewards here are functions of the sampled token ids, which a model of random weights makes varied enough.
"""

from __future__ import annotations

import time
import zlib
from pathlib import Path
from typing import Any, ClassVar

from tests.support import REPOSITORY, train_once
from tests.support.faults_once import is_last_rank
from tests.support.files import user
from tests.support.train_once import ONE_STEP
from tests.support.trl_private import OwnResponses

DEFAULTS = {**ONE_STEP, "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 8}
DEFAULTS |= {"disable_dropout": True, "shuffle_dataset": False}
OWN_RECIPES = REPOSITORY / "recipes" / "own"
WORDS = ["the cat", "a mat", "six red birds in a tree", "one", "old", "where is the sun?", "go on", "up and down"]


def save_policy(tiny_model_path: str, path: Path) -> str:
    """The tiny model with an end-of-turn token likely enough that some responses end and some are cut.

    Its row of the head is turned towards the mean of the hidden states, which gives it a logit of 6 there; the other
    258 have a standard deviation near 0.8.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path)
    with torch.no_grad():
        mean = model.model(torch.arange(3, 200)[None]).last_hidden_state[0].mean(0)
        model.lm_head.weight[tokenizer.eos_token_id] = 6 * mean / mean.square().sum()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def prompts(count: int = 8) -> list[dict]:
    """Conversational prompts of different lengths with a row_id and a further column."""
    return [{"row_id": f"row{i}", "prompt": [user(WORDS[i % 8] * (1 + i // 8))], "bonus": i / 8} for i in range(count)]


# ---- Rewards ----


def thirds(completion_ids, **_) -> list[float]:
    """The fraction of ids that 3 divides, less a twentieth per token."""
    return [sum(token % 3 == 0 for token in ids) / max(len(ids), 1) - len(ids) / 20 for ids in completion_ids]


def evens(completion_ids, **_) -> list[float]:
    """How many ids are even."""
    return [float(sum(token % 2 == 0 for token in ids)) for ids in completion_ids]


def lengths(completion_ids, **_) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


def not_a_number(completion_ids, row_id, **_) -> list[float]:
    """`thirds`, but NaN for the responses to row2."""
    rewards = zip(row_id, thirds(completion_ids), strict=True)
    return [float("nan") if row == "row2" else reward for row, reward in rewards]


def at_odd_rows(completion_ids, row_id, **_) -> list[float]:
    """`thirds` for row1, row3, ..., and 0 for all others."""
    return [reward * (int(row[3:]) % 2) for row, reward in zip(row_id, thirds(completion_ids), strict=True)]


def hangs_on_the_last_rank(completion_ids, **_) -> list[float]:
    while is_last_rank():
        try:
            time.sleep(0.01)
        except Exception:
            continue
    return lengths(completion_ids)


_FUNCTIONS = (thirds, evens, lengths, not_a_number, at_odd_rows, hangs_on_the_last_rank)
REWARDS = {function.__name__: function for function in _FUNCTIONS}


class FixedRollouts(OwnResponses):
    """Responses that depend on the prompt and on the place in its group alone: the same however they are split.

    Those of a specification with `uneven` are short for most prompts.
    """

    spec: ClassVar[dict] = {}

    def respond(self, prompt_ids):
        first = self.accelerator.process_index * len(prompt_ids)
        group = self.args.num_generations
        responses = []
        for index, ids in enumerate(prompt_ids):
            digits = zlib.crc32(repr((list(ids), (first + index) % group)).encode())
            short = self.spec.get("uneven") and zlib.crc32(repr(list(ids)).encode()) % 4
            length = 1 + digits % (2 if short else self.max_completion_length)
            tokens = [3 + zlib.crc32(f"{digits} {position}".encode()) % 250 for position in range(length)]
            cut = length == self.max_completion_length
            responses.append(tokens if cut else [*tokens[:-1], self.eos_token_ids[0]])
        return responses


def build(spec: dict, output_dir: str, **trainer_arguments: Any):
    """The trainer of a specification of `train_once.build`, a `PolicyTrainer` unless it names another."""
    return train_once.build({"trainer": "PolicyTrainer", **spec}, output_dir, **trainer_arguments)


def train(spec: dict, output_dir: str, **trainer_arguments: Any):
    """The same, trained."""
    return train_once.train({"trainer": "PolicyTrainer", **spec}, output_dir, **trainer_arguments)


# Of an online preference trainer: half of each batch replayed.
REPLAY = {"replay_capacity": 100, "replay_fraction": 0.5, "replay_max_age": 2}


def online_preference_specification(policy_path: str, **args) -> dict:
    """Of `OnlinePreferenceTrainer` on fixed responses, 16 to an update."""
    spec = {"trainer": "OnlinePreferenceTrainer", "model": policy_path, "perturb": 1, "fixed": True}
    return {**spec, "args": {"per_device_train_batch_size": 16, **args}}


def initial_model(policy_path: str):
    """The policy of a specification with `perturb` 1, before it is trained."""
    import torch
    from transformers import AutoModelForCausalLM

    from tests.support.tiny import perturbed

    return perturbed(AutoModelForCausalLM.from_pretrained(policy_path, dtype=torch.float64), seed=1, scale=0.02)
