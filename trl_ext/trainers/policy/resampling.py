"""Dynamic sampling: groups without a signal are replaced by groups of further prompts (DAPO, arXiv 2503.14476)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trl_ext.trainers.policy.reward_functions import Rewards

Rows = list[dict[str, Any]]
# Fields of `Rewards` with a value for each of this process's responses.
_OF_REWARDS = ("finished", "lengths", "not_finite")


def check_resampling(given: dict[str, Any]) -> None:
    """Raise ValueError if there is no data to draw prompts from."""
    dataset = given.get("train_dataset")
    by_index = isinstance(dataset, Dataset) and not {"image", "images"} & set(dataset.column_names)
    if given.get("environment_factory") or not by_index:
        raise ValueError("resample_groups draws prompts from the training data by their index: give a Dataset of text")


def has_two_rewards(rewards: Tensor) -> bool:
    """Whether two rewards of a group differ; one that is not finite is not a reward."""
    known = rewards[rewards.isfinite()]
    return len(known) > 0 and bool(known.min() < known.max())


def fill_places(signals: Sequence[Sequence[bool]]) -> list[tuple[int, int]]:
    """Which group takes each place of a rollout: its round and its place there.

    Groups of later rounds that have a signal take the places of those without one in the first round, both in order.
    What is left over is not used, and a place for which nothing is left keeps its group.

    Args:
        signals: whether each group has a signal, by round.
    """
    further = ((turn, group) for turn, found in enumerate(signals) if turn for group, has in enumerate(found) if has)
    return [(0, group) if has else next(further, (0, group)) for group, has in enumerate(signals[0])]


@dataclass
class _Round:
    """What a round has sampled: this process's tensors and rewards, and TRL's table of the completions of all."""

    rollout: dict[str, Tensor]
    rewards: Rewards
    table: dict[str, list]
    signals: list[bool]


def sample_rollout(trainer, sample: Callable[[Rows], dict], inputs: Rows) -> dict:
    """This process's part of a rollout, with the groups that have no signal replaced.

    All processes have the same rewards and therefore decide alike. Afterwards the trainer's rewards and logged
    completions are those of the groups in the rollout.

    Args:
        trainer: a `PolicyTrainer`.
        sample: samples and scores a response to each row.
        inputs: this process's rows.
    """
    limit = trainer.args.resample_groups if trainer.model.training else 0
    if not limit:
        return sample(inputs)

    def next_round(rows: Rows) -> _Round:
        rollout = sample(rows)
        table = {name: list(column) for name, column in _table(trainer).items()}
        groups = trainer.weighted_sum(trainer.rewards.by_function).view(-1, trainer.num_generations)
        return _Round(rollout, trainer.rewards, table, list(map(has_two_rewards, groups)))

    rounds, further = [next_round(inputs)], _further_inputs(trainer, inputs)
    while len(rounds) <= limit and sum(sum(one.signals) for one in rounds) < len(rounds[0].signals):
        rounds.append(next_round(next(further)))
    trainer.further_rollouts += len(rounds) - 1
    places = fill_places([one.signals for one in rounds])
    sampled, replaced = len(rounds) * len(places), sum(turn > 0 for turn, _ in places)
    figures = {
        "rounds": len(rounds) - 1,
        "prompts": sampled,
        "responses": sampled * trainer.num_generations,
        "replaced": replaced / len(places),
        "dead": 1 - (replaced + sum(rounds[0].signals)) / len(places),
    }
    for name, value in figures.items():
        trainer.metrics[f"resampling/{name}"].append(float(value))
    return rounds[0].rollout if len(rounds) == 1 else _merge(trainer, rounds, places)


def _further_inputs(trainer, inputs: Rows) -> Iterator[Rows]:
    """This process's rows of each further round: prompts that the rollout has not had, and all again after the last.

    Their order follows from the seed and the number of the rollout, so that a resumed run draws the same.
    """
    data, size = trainer.train_dataset, trainer.num_generations
    order = np.random.default_rng((trainer.args.seed, trainer.rollouts)).permutation(len(data)).tolist()
    seen = set(map(repr, trainer._logs["prompt"]))
    unseen = (index for index in order if repr(data[index]["prompt"]) not in seen)
    indices = itertools.chain(unseen, itertools.cycle(order))
    while True:
        drawn = list(itertools.islice(indices, trainer.args.generation_batch_size // size))
        rows = trainer.own_rows([index for index in drawn for _ in range(size)])
        yield [{name: value for name, value in data[index].items() if name in inputs[0]} for index in rows]


def _table(trainer) -> dict:
    """TRL's table of the completions of a rollout, by column; the trainer itself replaces the advantages."""
    logs = trainer._logs
    return {"prompt": logs["prompt"], "completion": logs["completion"], **logs["rewards"], **logs["extra"]}


def _merge(trainer, rounds: list[_Round], places: list[tuple[int, int]]) -> dict:
    """This process's part of the rollout made of the groups at `places`."""
    size, device = trainer.num_generations, trainer.accelerator.device
    # Of each response of the rollout: its round, and its row there among those of all processes.
    sources = [(turn, group * size + place) for turn, group in places for place in range(size)]
    responses = [gather_object(_responses(one)) for one in rounds]
    own = [responses[turn][row] for turn, row in trainer.own_rows(sources)]
    # A sampler may record its log-probabilities in some rounds only.
    names = [name for name in own[0] if all(name in response for response in own)]
    padding = {"tool_mask": 1, **dict.fromkeys(("prompt_ids", "completion_ids"), trainer._tokenizer.pad_token_id)}
    merged = {}
    for name in names:
        # As TRL pads them.
        side = "left" if name.startswith("prompt") else "right"
        rows, value = [response[name] for response in own], padding.get(name, 0)
        merged[name] = pad_sequence(rows, batch_first=True, padding_value=value, padding_side=side).to(device)
    trainer.rewards = Rewards(
        by_function=torch.stack([rounds[turn].rewards.by_function[row] for turn, row in sources]),
        **{name: merged.pop(name)[:, 0] for name in _OF_REWARDS},
        # Of all rounds.
        failed=sum(one.rewards.failed for one in rounds),
    )
    for name, column in _table(trainer).items():
        # A reward function may report a column in some rounds only.
        if all(len(one.table.get(name, [])) == len(sources) for one in rounds):
            column.extend(rounds[turn].table[name][row] for turn, row in sources)
    return merged


def _responses(one: _Round) -> list[dict[str, Tensor]]:
    """This process's responses, each with its tensors by name, [tokens] or [1]."""
    # The trainer sets the advantages itself.
    columns = {name: value for name, value in one.rollout.items() if value.ndim > 1}
    columns |= {name: getattr(one.rewards, name) for name in _OF_REWARDS}
    columns = {name: value.reshape(len(value), -1).cpu() for name, value in columns.items()}
    # A slice would be sent with the whole tensor.
    return [{name: value[row].clone() for name, value in columns.items()} for row in range(len(one.rewards.lengths))]
