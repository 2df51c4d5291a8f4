"""Token budgets: the rows of an accumulation window in as few forward passes as the setting `tokens_per_pass` allows.

The trainer still counts its micro-batches. The first ones of a window are empty, and the last ones are its passes, so
that gradients are exchanged after the last as always.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow.compute
import torch
from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader

from trl_ext.trainers.token_budget import TokenBudgets

# What stands in for a micro-batch whose rows are in a later pass.
EMPTY = {"in_a_later_pass": True, "input_ids": torch.empty(0, dtype=torch.long)}


def is_empty(inputs: dict[str, Any]) -> bool:
    """Whether a micro-batch's rows are in a later pass."""
    return "in_a_later_pass" in inputs


def no_loss(device: torch.device) -> Tensor:
    """The loss of an empty micro-batch, which has no gradient for any parameter."""
    return torch.zeros((), device=device, requires_grad=True)


def divide(
    costs: Sequence[int],
    budget: int,
    micro_batches: int,
    accelerator: Accelerator | None = None,
    *,
    rows: int | None = None,
) -> list[range]:
    """Divide units of these numbers of tokens into passes; every process must call this, and gets as many passes.

    Units keep their order. A pass has at most `budget` tokens, unless more passes than micro-batches would be needed,
    a process has too few units for the number of passes that another one needs, or a single unit has more.

    Args:
        costs: the tokens of each of this process's units, such as pairs or groups of responses.
        budget: tokens of a pass.
        micro_batches: the largest number of passes.
        accelerator: exchanges the number of passes; None to decide on this process alone.
        rows: the number of rows of all units, if the caller can divide a unit; then a process with fewer units than
            passes has empty passes at the end.

    Returns:
        The units of each pass.
    """
    needed = min(len(_fill(costs, budget)), micro_batches)
    if accelerator is not None and accelerator.num_processes > 1:
        both = accelerator.gather(torch.tensor([[needed, rows or len(costs)]], device=accelerator.device)).tolist()
        needed = min(max(one for one, _ in both), min(most for _, most in both))
    # The smallest capacity that does with so many passes.
    low, high = 1, sum(costs)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_fill(costs, middle)) <= needed else (middle + 1, high)
    passes = _fill(costs, low)
    while len(passes) < min(needed, len(costs)):
        largest = max((one for one in passes if len(one) > 1), key=lambda one: sum(costs[one.start : one.stop]))
        place, middle = passes.index(largest), (largest.start + largest.stop) // 2
        passes[place : place + 1] = [range(largest.start, middle), range(middle, largest.stop)]
    return passes + [range(0)] * (needed - len(passes))


def _fill(costs: Sequence[int], capacity: int) -> list[range]:
    """Units in order, each in the current pass if it fits, or else in the next."""
    starts, tokens = [0], 0
    for unit, cost in enumerate(costs):
        if tokens + cost > capacity and unit > starts[-1]:
            starts.append(unit)
            tokens = 0
        tokens += cost
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], len(costs)], strict=True)]


def window_of_passes(passes: list[dict[str, Any]], micro_batches: int) -> list[dict[str, Any]]:
    """The passes in place of so many micro-batches, of which the first are empty."""
    return [EMPTY] * (micro_batches - len(passes)) + passes


# ---- Pairs ----


def passes_of_pairs(
    batches: list[dict[str, Any]], budget: int, accelerator: Accelerator, *, pad_token_id: int, shares: bool
) -> list[dict[str, Any]]:
    """The pairs of micro-batches in passes; chosen rows come first in each, as in the micro-batches.

    Args:
        batches: micro-batches of 2b rows, chosen and then rejected ones, padded on the right, and of values of the b
            pairs; `columns` may hold further values of the pairs.
        budget: tokens of a pass.
        accelerator: exchanges the number of passes.
        pad_token_id: fills up rows.
        shares: whether a pass encodes the common prompt of a pair once.
    """
    whole = _joined(batches, pad_token_id)
    return [_pairs_of(whole, units) for units in divide(_pair_costs(whole, shares), budget, len(batches), accelerator)]


def halves_of_pairs(batch: dict[str, Any], *, shares: bool) -> tuple[int, list[dict[str, Any]]]:
    """The tokens of a pass, and the pass in two, or as it is if it has one pair."""
    costs = _pair_costs(batch, shares)
    return sum(costs), [_pairs_of(batch, units) for units in divide(costs, sum(costs) // 2, 2)]


def _pair_costs(batch: dict[str, Any], shares: bool) -> list[int]:
    """The tokens that a pass encodes for each pair."""
    chosen, rejected = batch["attention_mask"].chunk(2)
    costs = chosen.sum(dim=1) + rejected.sum(dim=1)
    if shares:
        one, other = batch["input_ids"].chunk(2)
        alike = ((one == other) & (chosen == 1) & (rejected == 1)).long().cumprod(dim=1).sum(dim=1)
        costs = costs - alike
    return costs.tolist()


def _pairs_of(batch: dict[str, Any], units: range) -> dict[str, Any]:
    """Consecutive pairs of a batch, of the width of the longest."""
    own, (chosen, rejected) = slice(units.start, units.stop), batch["attention_mask"].chunk(2)
    width = int(torch.maximum(chosen[own].sum(dim=1), rejected[own].sum(dim=1)).max())
    return {name: _rows_of(value, own, len(chosen), width) for name, value in batch.items()}


class PairPasses(TokenBudgets):
    """Mixin before a trainer on pairs: balances the tokens of the ranks, and divides a window's pairs into passes."""

    def get_train_dataloader(self):
        columns = ("prompt_ids", "chosen_ids", "rejected_ids")
        return balance_ranks(super().get_train_dataloader(), columns, self.args.gradient_accumulation_steps)

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        # As transformers does later: after an evaluation, dropout would seem to be off.
        self.model.train()
        batches, num_items_in_batch = super().get_batch_samples(epoch_iterator, num_batches, device)
        if batches:
            passes, micro_batches = batches, len(batches)
            if self.token_budget is not None and self.token_budget.divides():
                # Without dropout, a pass encodes the prompt of a pair once.
                settings = {"shares": not self.packing.draws_dropout()}
                settings["pad_token_id"] = getattr(self, "_tokenizer", self.processing_class).pad_token_id or 0
                budget = self.token_budget.of(max(batch["input_ids"].numel() for batch in batches))
                passes = passes_of_pairs(batches, budget, self.accelerator, **settings)
                self.token_budget.note([self.halves(one)[0] for one in passes], micro_batches)
            batches = window_of_passes(self.open_window(passes, micro_batches), micro_batches)
        return batches, num_items_in_batch

    def open_window(self, passes: list[dict[str, Any]], micro_batches: int) -> list[dict[str, Any]]:
        """The passes with what their loss needs of the window, which has so many micro-batches."""
        raise NotImplementedError

    def halves(self, one: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
        return halves_of_pairs(one, shares=not self.packing.draws_dropout())


def _joined(batches: list[dict[str, Any]], pad_token_id: int) -> dict[str, Any]:
    """All rows of micro-batches as one: all chosen rows, then all rejected ones."""
    width = max(batch["input_ids"].size(1) for batch in batches)
    joined: dict[str, Any] = {}
    for name, value in batches[0].items():
        parts = [batch[name] for batch in batches]
        if isinstance(value, dict):
            joined[name] = {key: torch.cat([part[key] for part in parts]) for key in value}
        elif value.ndim == 2:
            filler = pad_token_id if name == "input_ids" else 0
            parts = [torch.nn.functional.pad(part, (0, width - part.size(1)), value=filler) for part in parts]
            sides = zip(*(part.chunk(2) for part in parts), strict=True)
            joined[name] = torch.cat([half for side in sides for half in side])
        else:
            joined[name] = torch.cat(parts)
    return joined


def _rows_of(value: Any, own: slice, pairs: int, width: int) -> Any:
    if isinstance(value, dict):
        return {name: column[own] for name, column in value.items()}
    if not isinstance(value, Tensor):
        return value
    if value.ndim == 1:
        return value[own]
    return torch.cat([value[:pairs][own], value[pairs:][own]])[:, :width]


# ---- Rollouts ----


def passes_of_groups(
    batches: list[dict[str, Any]], budget: int, accelerator: Accelerator, *, shares: bool, pad_token_id: int = 0
) -> list[dict[str, Any]]:
    """The responses of micro-batches in passes, which keep the responses of a `group` together where they fit.

    Processes first exchange groups, `balance_groups`.

    Args:
        batches: micro-batches of a rollout, whose rows are padded to one width.
        budget: tokens of a pass.
        accelerator: exchanges the groups and the number of passes.
        shares: whether a pass encodes the prompt of a group once.
        pad_token_id: fills up rows.
    """
    whole = {
        name: torch.cat([batch[name] for batch in batches]) if isinstance(value, Tensor) and value.ndim else value
        for name, value in batches[0].items()
    }
    whole = balance_groups(whole, accelerator, shares=shares, pad_token_id=pad_token_id)
    units, costs = _parts_of_groups(whole, budget, shares)
    found = divide(costs, budget, len(batches), accelerator, rows=sum(map(len, units)))
    passes = [[row for unit in units[own.start : own.stop] for row in unit] for own in found]
    while [] in passes:
        largest = max(passes, key=len)
        passes[passes.index([])] = largest[len(largest) // 2 :]
        del largest[len(largest) // 2 :]
    return [_responses(whole, rows) for rows in passes]


def halves_of_groups(batch: dict[str, Any], *, shares: bool) -> tuple[int, list[dict[str, Any]]]:
    """The tokens of a pass, and the pass in two, or as it is if it has one response."""
    tokens = sum(_parts_of_groups(batch, math.inf, shares)[1])
    units, costs = _parts_of_groups(batch, tokens // 2, shares)
    halves = [[row for unit in units[own.start : own.stop] for row in unit] for own in divide(costs, tokens // 2, 2)]
    return tokens, [_responses(batch, rows) for rows in halves]


def _parts_of_groups(batch: dict[str, Any], budget: float, shares: bool) -> tuple[list[list[int]], list[int]]:
    """The rows of each group that share a pass, as far as they fit, and the tokens that the pass encodes for them."""
    groups: dict[int, list[int]] = {}
    for row, group in enumerate(batch["group"].tolist()):
        groups.setdefault(group, []).append(row)
    prompts, responses = (batch[f"{part}_mask"].sum(dim=1).tolist() for part in ("prompt", "completion"))
    units: list[list[int]] = []
    costs: list[int] = []
    for rows in groups.values():
        for row in rows:
            again = row != rows[0] and shares and costs[-1] + responses[row] <= budget
            if again:
                units[-1].append(row)
                costs[-1] += responses[row]
            else:
                units.append([row])
                costs.append(prompts[row] + responses[row])
    return units, costs


def _responses(rollout: dict[str, Any], rows: list[int]) -> dict[str, Any]:
    index = torch.tensor(rows)
    return {
        name: value[index.to(value.device)] if isinstance(value, Tensor) and value.ndim else value
        for name, value in rollout.items()
    }


# ---- Ranks ----


def balance_groups(
    rollout: dict[str, Any], accelerator: Accelerator, *, shares: bool, pad_token_id: int
) -> dict[str, Any]:
    """This process's rows of an optimizer step, after the exchange by which each process gets about as many tokens.

    The update takes as long as the process with the most tokens. All responses of a group come to one process, which
    encodes their prompt once. The rows of the step stay the same, and so does the update.

    Args:
        rollout: the rows of this process; prompts are padded on the left, and values of their tokens on the right.
        accelerator: exchanges the rows.
        shares: whether a pass encodes the prompt of a group once.
        pad_token_id: fills up rows.
    """
    if accelerator.num_processes == 1:
        return rollout
    moved = [name for name, value in rollout.items() if isinstance(value, Tensor) and value.ndim]
    group = rollout["group"]
    lengths = [rollout[f"{part}_mask"].sum(dim=1) for part in ("prompt", "completion")]
    columns = torch.stack([group, *lengths, torch.full_like(group, len(moved))], dim=1)
    rows = accelerator.gather(columns).tolist()
    # A sampler that leaves one process's batch to transformers records its log-probabilities on the others alone.
    alike = len({tensors for *_, tensors in rows}) == 1
    ranks = [[row[:3] for row in rows[start : start + len(group)]] for start in range(0, len(rows), len(group))]
    rank_of = place_groups(ranks, shares=shares) if alike else None
    if rank_of is None:
        return rollout
    own = [index for index, row in enumerate(rows) if rank_of[row[0]] == accelerator.process_index]
    prompt, response = (max(1, *(rows[index][column] for index in own)) for column in (1, 2))
    balanced = dict(rollout)
    for name in moved:
        on_the_left = name.startswith("prompt_")
        # A mask of booleans stays one.
        padding = {"pad_index": pad_token_id if name.endswith("_ids") else False, "pad_first": on_the_left}
        value = accelerator.gather(accelerator.pad_across_processes(rollout[name], dim=1, **padding))
        value = value[torch.tensor(own, device=value.device)]
        if value.ndim == 2:
            value = value[:, -prompt:] if on_the_left else value[:, :response]
        balanced[name] = value
    return balanced


def place_groups(ranks: list[list[Sequence[int]]], *, shares: bool) -> dict[int, int] | None:
    """The rank that each group of responses is given to; None if every rank keeps its rows.

    The largest remaining group comes to the rank with the fewest tokens. Ranks keep their rows if the largest number
    of tokens is within 5% of the mean, or would not fall, or if there are fewer groups than ranks.

    Args:
        ranks: the group, the prompt's tokens and the response's tokens of each row of each rank.
        shares: whether a rank encodes the prompt of a group once.
    """
    before = [sum(_tokens_of_groups(rows, shares).values()) for rows in ranks]
    tokens = _tokens_of_groups([row for rows in ranks for row in rows], shares)
    if max(before) <= 1.05 * sum(before) / len(ranks) or len(tokens) < len(ranks):
        return None
    loads, rank_of = [0] * len(ranks), {}
    for group in sorted(tokens, key=lambda group: -tokens[group]):
        rank_of[group] = loads.index(min(loads))
        loads[rank_of[group]] += tokens[group]
    return rank_of if max(loads) < max(before) else None


def _tokens_of_groups(rows: list[Sequence[int]], shares: bool) -> dict[int, int]:
    tokens: dict[int, int] = {}
    for group, prompt, response in rows:
        again = shares and group in tokens
        tokens[group] = tokens.get(group, 0) + response + (0 if again else prompt)
    return tokens


class BalancedBatches(BatchSampler):
    """Batches whose rows change places within an optimizer step, so that every rank gets about as many tokens.

    A rank that has more tokens than the others would keep them waiting. The rows of a step stay the same, and so does
    the update. transformers' `train_sampling_strategy` "batch_rebalance" chooses an order of its own, repeats rows at
    the end of an epoch, and needs a column of lengths; with it, this does nothing.

    Args:
        batches: the batches of all ranks, of which rank r takes the batches r, r + ranks, r + 2 ranks ...
        tokens: the number of tokens of each row of the dataset.
        ranks: number of ranks.
        micro_batches: number of a rank's batches in an optimizer step.
    """

    def __init__(self, batches: BatchSampler, tokens: Sequence[int], ranks: int, micro_batches: int):
        self.sampler, self.batch_size, self.drop_last = batches.sampler, batches.batch_size, batches.drop_last
        self.batches, self.tokens, self.ranks, self.micro_batches = batches, tokens, ranks, micro_batches
        if hasattr(batches, "set_epoch"):
            self.set_epoch = batches.set_epoch

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        rows: list[int] = []
        for batch in self.batches:
            rows += batch
            if len(rows) == self.ranks * self.micro_batches * self.batch_size:
                yield from self._balance(rows)
                rows = []
        # The rest of an epoch is not a whole step.
        yield from (rows[start : start + self.batch_size] for start in range(0, len(rows), self.batch_size))

    def _balance(self, rows: list[int]) -> Iterator[list[int]]:
        """Give the longest remaining row to the rank with the fewest tokens that has room for it."""
        room = self.micro_batches * self.batch_size
        places: list[list[int]] = [[] for _ in range(self.ranks)]
        loads = [0] * self.ranks
        for place in sorted(range(len(rows)), key=lambda place: -self.tokens[rows[place]]):
            rank = min((rank for rank in range(self.ranks) if len(places[rank]) < room), key=loads.__getitem__)
            places[rank].append(place)
            loads[rank] += self.tokens[rows[place]]
        own = [[rows[place] for place in sorted(ones)] for ones in places]
        for start in range(0, room, self.batch_size):
            yield from (ones[start : start + self.batch_size] for ones in own)


def balance_ranks(loader: DataLoader, columns: Sequence[str], micro_batches: int) -> DataLoader:
    """Balance the tokens over the ranks, if each takes whole batches of a dataset with any of these columns of ids."""
    shard, dataset = getattr(loader, "batch_sampler", None), loader.dataset
    columns = [name for name in columns if name in (getattr(dataset, "column_names", None) or ())]
    if isinstance(shard, BatchSamplerShard) and not shard.split_batches and shard.num_processes > 1 and columns:
        # Arrow counts them without a Python object for each token.
        table = dataset.select_columns(columns).with_format("arrow")[:]
        lengths = [pyarrow.compute.list_value_length(table[column]).to_pylist() for column in columns]
        tokens = [sum(row) for row in zip(*lengths, strict=True)]
        shard.batch_sampler = BalancedBatches(shard.batch_sampler, tokens, shard.num_processes, micro_batches)
    return loader
