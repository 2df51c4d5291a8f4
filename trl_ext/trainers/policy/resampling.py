"""Dynamic sampling: groups without a signal are replaced by groups of further prompts (DAPO, arXiv 2503.14476)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather, gather_object
from datasets import Dataset
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trl_ext.rewards import ShapedReward
from trl_ext.trainers.policy.config import PolicyConfig

Rows = list[dict[str, Any]]


def check_data(args: PolicyConfig, given: dict[str, Any]) -> None:
    """Raise ValueError if groups are to be replaced and the trainer's arguments hold no data to draw prompts from."""
    dataset = given.get("train_dataset")
    by_index = isinstance(dataset, Dataset) and not {"image", "images"} & set(dataset.column_names)
    if args.resample_groups and (given.get("environment_factory") or not by_index):
        raise ValueError(
            "resample_groups draws prompts from the training data by their index: give a Dataset of text, not a "
            "stream, images or an environment"
        )


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


def sample_rollout(trainer, sample: Callable[[Rows], dict], inputs: Rows) -> dict:
    """This process's part of a rollout, with the groups that have no signal replaced.

    All processes have the same rewards and therefore decide alike. Afterwards the trainer's record of the latest
    rewards, faults and logged completions is that of the groups in the rollout.

    Args:
        trainer: a `PolicyTrainer`.
        sample: TRL's `_generate_and_score_completions`.
        inputs: this process's rows.
    """
    limit = trainer.args.resample_groups if trainer.model.training else 0
    if not limit:
        return sample(inputs)
    rounds = [_Round(trainer, sample(inputs))]
    further = _further_inputs(trainer, inputs)
    while len(rounds) <= limit and sum(sum(turn.signals) for turn in rounds) < len(rounds[0].signals):
        rounds.append(_Round(trainer, sample(next(further))))
    trainer.further_rollouts += len(rounds) - 1
    places = fill_places([turn.signals for turn in rounds])
    _log(trainer, rounds, places)
    return rounds[0].output if len(rounds) == 1 else _merge(trainer, rounds, places)


def _further_inputs(trainer, inputs: Rows) -> Iterator[Rows]:
    """This process's rows of each further round: prompts that the rollout has not had, and all again after the last.

    Their order follows from the seed and the number of the rollout, so that a resumed run draws the same.
    """
    data, size = trainer.train_dataset, trainer.num_generations
    order = np.random.default_rng((trainer.args.seed, trainer.rollouts)).permutation(len(data)).tolist()
    seen = set(map(repr, trainer._logs["prompt"]))
    unseen = (index for index in order if repr(data[index]["prompt"]) not in seen)
    indices = itertools.chain(unseen, itertools.cycle(order))
    first = trainer.accelerator.process_index * len(inputs)
    while True:
        drawn = list(itertools.islice(indices, trainer.args.generation_batch_size // size))
        own = [data[drawn[row // size]] for row in range(first, first + len(inputs))]
        yield [{name: value for name, value in row.items() if name in inputs[0]} for row in own]


class _Round:
    """What a round has sampled and scored, over all processes."""

    def __init__(self, trainer, output: dict):
        self.output, guard = output, trainer.reward_guard
        self.rewards, finished, lengths = trainer._rollout
        self.failed = guard.failed
        columns = {name: value.cpu() for name, value in output.items() if value.ndim}
        columns |= {"finished": torch.tensor(finished), "length": torch.tensor(lengths)}
        columns["not_finite"] = torch.tensor([row in guard.not_finite for row in range(len(finished))])
        # A slice would be sent with the whole tensor.
        self.rows = gather_object([{n: c[row].clone() for n, c in columns.items()} for row in range(len(finished))])
        self.table = {name: list(column) for name, column in _table(trainer).items()}
        self.signals = list(map(has_two_rewards, _raw_rewards(trainer).view(-1, trainer.num_generations)))


def _table(trainer) -> dict:
    """TRL's table of the completions of a rollout, by column; the trainer itself replaces the advantages."""
    logs = trainer._logs
    return {"prompt": logs["prompt"], "completion": logs["completion"], **logs["rewards"], **logs["extra"]}


def _raw_rewards(trainer) -> Tensor:
    """The latest rewards over all processes before shaping and penalties, [N]."""
    rewards, finished, _ = trainer._rollout
    plain, first = rewards.clone(), trainer.accelerator.process_index * len(finished)
    for index, name in enumerate(trainer.reward_func_names):
        function = trainer.plain_reward_functions.get(name)
        if isinstance(function, ShapedReward):
            own = rewards[first : first + len(finished), index].contiguous()
            # There are none after a call that failed, whose rewards are NaN.
            plain[:, index] = gather(own if function.unshaped is None else function.unshaped.to(own))
    return trainer._weighted_sum(plain.masked_fill(rewards.isnan(), float("nan")))


def _merge(trainer, rounds: list[_Round], places: list[tuple[int, int]]) -> dict:
    """This process's part of the rollout made of the groups at `places`."""
    size, count = trainer.num_generations, len(trainer._rollout[1])
    first = trainer.accelerator.process_index * count
    # Of each response of the rollout: its round, and its row there among those of all processes.
    sources = [(turn, group * size + place) for turn, group in places for place in range(size)]
    own = [rounds[turn].rows[row] for turn, row in sources[first : first + count]]
    # A sampler may record its log-probabilities in some rounds only.
    names = [name for name in rounds[0].rows[first] if all(name in row for row in own)]
    pad, device = trainer._tokenizer.pad_token_id, trainer.accelerator.device
    merged = {name: _padded([row[name] for row in own], name, pad).to(device) for name in names}
    finished, lengths, not_finite = (merged.pop(name) for name in ("finished", "length", "not_finite"))
    merged["num_items_in_batch"] = gather(trainer._token_mask(merged).sum()).sum()
    rewards = torch.stack([rounds[turn].rewards[row] for turn, row in sources])
    trainer._rollout = rewards, finished.tolist(), lengths.tolist()
    trainer.reward_guard.not_finite = set(not_finite.nonzero().flatten().tolist())
    # Their number is logged, of all rounds.
    trainer.reward_guard.failed = {turn * count + row for turn, one in enumerate(rounds) for row in one.failed}
    for name, column in _table(trainer).items():
        if all(len(one.table.get(name, [])) == len(sources) for one in rounds):
            column.extend(rounds[turn].table[name][row] for turn, row in sources)
    return merged


def _padded(rows: list[Tensor], name: str, pad_token_id: int) -> Tensor:
    """Rows of one of TRL's tensors, padded as TRL does."""
    if not rows[0].ndim:
        return torch.stack(rows)
    value = {"prompt_ids": pad_token_id, "completion_ids": pad_token_id, "tool_mask": 1}.get(name, 0)
    side = "left" if name.startswith("prompt") else "right"
    return pad_sequence(rows, batch_first=True, padding_value=value, padding_side=side)


def _log(trainer, rounds: list[_Round], places: list[tuple[int, int]]) -> None:
    sampled, replaced = len(rounds) * len(places), sum(turn > 0 for turn, _ in places)
    figures = {
        "rounds": len(rounds) - 1,
        "prompts": sampled,
        "responses": sampled * trainer.num_generations,
        "replaced": replaced / len(places),
        "dead": 1 - (replaced + sum(rounds[0].signals)) / len(places),
    }
    for name, value in figures.items():
        trainer._metrics["train"][f"resampling/{name}"].append(float(value))
