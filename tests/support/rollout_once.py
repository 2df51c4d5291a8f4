"""Train a tiny policy on its own samples as a specification says, in this process or in several.

Tests call `train` in their own process. `train_in_processes` runs this file under torchrun, several specifications to
one launch: `rollout_once.py SPECS.json FOLDER`. Rewards here are functions of the sampled token ids, which a model of
random weights makes varied enough.
"""

from __future__ import annotations

import copy
import functools
import zlib
from pathlib import Path
from typing import Any

from tests.support import REPOSITORY, train_once
from tests.support.train_once import ONE_STEP
from tests.support.trl_private import BeforeLoss, OwnResponses

DEFAULTS = {
    **ONE_STEP,
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 8,
    "disable_dropout": True,
    "shuffle_dataset": False,
}
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
    return [
        {
            "row_id": f"row{index}",
            "prompt": [{"role": "user", "content": WORDS[index % len(WORDS)] * (1 + index // len(WORDS))}],
            "bonus": index / 8,
        }
        for index in range(count)
    ]


# ---- Rewards ----


def thirds(completion_ids, **_) -> list[float]:
    """The fraction of ids that 3 divides, less a twentieth per token."""
    return [sum(token % 3 == 0 for token in ids) / max(len(ids), 1) - len(ids) / 20 for ids in completion_ids]


def evens(completion_ids, **_) -> list[float]:
    """How many ids are even."""
    return [float(sum(token % 2 == 0 for token in ids)) for ids in completion_ids]


def not_a_number(completion_ids, row_id, **_) -> list[float]:
    """`thirds`, but NaN for the responses to row2."""
    return [
        float("nan") if row == "row2" else reward for row, reward in zip(row_id, thirds(completion_ids), strict=True)
    ]


def at_odd_rows(completion_ids, row_id, **_) -> list[float]:
    """`thirds` for row1, row3, ..., and 0 for all others."""
    return [reward * (int(row[3:]) % 2) for row, reward in zip(row_id, thirds(completion_ids), strict=True)]


REWARDS = {function.__name__: function for function in (thirds, evens, not_a_number, at_odd_rows)}


class FixedRollouts(OwnResponses):
    """Responses that depend on the prompt and on the place in its group alone: the same however they are split."""

    def respond(self, prompt_ids):
        first = self.accelerator.process_index * len(prompt_ids)
        group = self.args.num_generations
        responses = []
        for index, ids in enumerate(prompt_ids):
            digits = zlib.crc32(repr((list(ids), (first + index) % group)).encode())
            length = 1 + digits % self.max_completion_length
            tokens = [3 + zlib.crc32(f"{digits} {position}".encode()) % 250 for position in range(length)]
            cut = length == self.max_completion_length
            responses.append(tokens if cut else [*tokens[:-1], self.eos_token_ids[0]])
        return responses


def build(spec: dict, output_dir: str, **trainer_arguments: Any):
    """The trainer of a specification, not yet trained.

    Keys: `trainer` (a name in trl_ext, or "trl.GRPOTrainer"), `model` (path), `perturb` (move the policy off its
    reference by this seed), `rewards` (names of `REWARDS`, or folders), `prompts` (how many), `lora`, `fixed`
    (`FixedRollouts`), `fault` (a name of `FAULTS`), `dtype` (of the weights, float64 unless given), and `args` for
    the configuration.
    """
    import torch
    import trl
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import trl_ext
    from tests.support.tiny import perturbed

    # More threads than one only slow so small a model down.
    torch.set_num_threads(1)
    name = spec.get("trainer", "PolicyTrainer")
    stock = name.startswith("trl.")
    trainer_class = getattr(trl if stock else trl_ext, name.removeprefix("trl."))
    config_class = train_once.classes(name)[1] if stock else trainer_class._config_class
    trainer_class = trainer_arguments.pop("trainer_class", trainer_class)
    if spec.get("fixed"):
        trainer_class = type(trainer_class.__name__, (FixedRollouts, trainer_class), {})
    if "fault" in spec:
        trainer_class = type(trainer_class.__name__, (FAULTS[spec["fault"]], trainer_class), {})
    model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=getattr(torch, spec.get("dtype", "float64")))
    lora = None
    if spec.get("lora"):
        lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM")
        lora.init_lora_weights = False  # B is zero otherwise, and the first gradients of A with it
        torch.manual_seed(0)
    defaults = {
        "reward_funcs": [REWARDS.get(reward, reward) for reward in spec.get("rewards", ["thirds"])],
        "train_dataset": Dataset.from_list(prompts(spec.get("prompts", 8))),
        "processing_class": AutoTokenizer.from_pretrained(spec["model"]),
        "peft_config": lora,
    }
    arguments = {**defaults, **trainer_arguments}
    reward_functions = arguments.pop("reward_funcs")
    args = config_class(**{**DEFAULTS, **spec.get("args", {}), "output_dir": output_dir})
    policy, moved = list(model.parameters()), []
    if "perturb" in spec:
        moved = perturbed(copy.deepcopy(model), seed=spec["perturb"], scale=0.02).parameters()
    trainer = trainer_class(model, reward_functions, args=args, **arguments)
    # Only now: the reference of a model in memory is a copy of it.
    for parameter, value in zip(policy, moved, strict=False):
        parameter.data.copy_(value)
    return trainer


class LossFaultOnTheLastRank(BeforeLoss):
    """At the second optimizer step, the last process's loss is NaN."""

    def before_loss(self, inputs):
        last = self.accelerator.process_index == self.accelerator.num_processes - 1
        if last and self.state.global_step == 1:
            inputs = {**inputs, "advantages": inputs["advantages"] * float("nan")}
        return inputs


FAULTS = {"loss_on_the_last_rank": LossFaultOnTheLastRank}


def train(spec: dict, output_dir: str, **trainer_arguments: Any):
    """The trainer of a specification, trained; a further key is `resume_from_checkpoint`."""
    trainer = build(spec, output_dir, **trainer_arguments)
    trainer.train(resume_from_checkpoint=spec.get("resume_from_checkpoint"))
    return trainer


# Of an online preference trainer: half of each batch replayed.
REPLAY = {"replay_capacity": 100, "replay_fraction": 0.5, "replay_max_age": 2}


def online_preference_specification(policy_path: str, **args) -> dict:
    """Of `OnlinePreferenceTrainer` on fixed responses, 16 to an update."""
    return {
        "trainer": "OnlinePreferenceTrainer",
        "model": policy_path,
        "perturb": 1,
        "fixed": True,
        "args": {"per_device_train_batch_size": 16, **args},
    }


def initial_model(policy_path: str):
    """The policy of a specification with `perturb` 1, before it is trained."""
    import torch
    from transformers import AutoModelForCausalLM

    from tests.support.tiny import perturbed

    return perturbed(AutoModelForCausalLM.from_pretrained(policy_path, dtype=torch.float64), seed=1, scale=0.02)


train_in_processes = functools.partial(train_once.train_in_processes, module="tests.support.rollout_once")


if __name__ == "__main__":
    train_once.main(train)
