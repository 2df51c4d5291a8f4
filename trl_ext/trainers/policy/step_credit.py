"""Credit per step: where the steps of a response end, their rewards, and the advantage of each step at its tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import torch
from accelerate.utils import gather
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

# The value of `step_separator` for which the steps are the policy's turns.
TURNS = "turns"

# The texts of a response's steps, and the number of tokens before the end of each.
Steps = tuple[list[str], list[int]]


def check_step_credit(args, objective) -> None:
    """Raise ValueError for settings that do not go with advantages of steps or of reward functions."""
    if not args.step_separator:
        raise ValueError(f"step_separator must be a text such as a line break, or {TURNS}")
    if objective.reads("components"):
        penalties = {name: getattr(args, name) for name in ("missing_eos_penalty", "overlong_share")}
        for flag, given in {**penalties, "kl_in": objective.kl_in == "reward"}.items():
            if given:
                raise ValueError(
                    f"{flag}: the advantage {objective.advantage} reads each reward function by itself, and no "
                    "penalty on their sum; use a reward function of finished, or kl_in loss"
                )
    if not objective.reads("step_rewards"):
        return
    if objective.surrogate in ("gmpo", "optimal_advantage") or (
        objective.ratio == "sequence" and objective.surrogate != "gspo_token"
    ):
        raise ValueError(
            f"the advantage {objective.advantage} differs within a response, and {args.algorithm} has one ratio for "
            "all of it: use --algorithm gspo_token, or --ratio token"
        )
    if args.off_policy_mask_threshold is not None:
        raise ValueError(
            "off_policy_mask_threshold masks whole responses by one advantage, and here each step has its own"
        )


def split_by_text(ids: list[int], decode: Callable[[list[int]], str], separator: str) -> Steps:
    """Steps that end with a separator in the text; the last one ends with the response.

    Blank pieces between separators are not steps. A token that completes a separator is the last of its step, whatever
    follows in it: it is the first with which the decoded text has as many separators.
    """
    pieces = decode(ids).split(separator)
    kept = [index for index, piece in enumerate(pieces) if piece.strip()] or [0]
    ends: list[int] = []
    for index in kept[:-1]:
        start = ends[-1] if ends else 0
        ends.append(
            bisect_left(range(len(ids) + 1), index + 1, lo=start, key=lambda end: decode(ids[:end]).count(separator))
        )
    return [pieces[index] for index in kept], [*ends, len(ids)]


def split_by_turns(ids: list[int], decode: Callable[[list[int]], str], chosen: list[int]) -> Steps:
    """Steps that end where a result of a tool begins; the last one ends with the response.

    Args:
        chosen: 1 where the policy chose the token.
    """
    starts = [end for end, own in enumerate(chosen) if own and (not end or not chosen[end - 1])] or [0]
    ends = [end for end in range(1, len(ids)) if chosen[end - 1] and not chosen[end]]
    # What follows the last turn is a tool's.
    ends = [*ends[: len(starts) - 1], len(ids)]
    texts = [
        decode([token for token, own in zip(ids[start:end], chosen[start:end], strict=True) if own])
        for start, end in zip(starts, ends, strict=True)
    ]
    return texts, ends


def find_steps(trainer, completion_ids: list[list[int]], tool_mask: list[list[int]] | None = None) -> list[Steps]:
    """The steps of responses, given as token ids and with 1 where the policy chose the token."""

    def decode(ids: list[int]) -> str:
        return trainer._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    separator = trainer.args.step_separator
    if separator != TURNS:
        return [split_by_text(ids, decode, separator) for ids in completion_ids]
    masks = [[1] * len(ids) for ids in completion_ids] if tool_mask is None else tool_mask
    return [split_by_turns(ids, decode, mask) for ids, mask in zip(completion_ids, masks, strict=True)]


def add_step_rewards(trainer, output: dict) -> dict:
    """Add to a rollout of this process its steps and what reward functions have returned.

    - `step_rewards`: the weighted sum of the lists that reward functions returned, [n, K], NaN after the last step.
    - `whole_rewards`: the weighted sum of their numbers, [n]; NaN where a response could not be scored.
    - `step_of`: the index of the step of each token, [n, T].
    """
    device, width = trainer.accelerator.device, output["completion_ids"].shape[1]
    first = trainer.accelerator.process_index * len(trainer.steps)
    rewards = trainer._rollout[0][first : first + len(trainer.steps)].clone()
    of_steps = [torch.zeros(len(texts), dtype=torch.float64) for texts, _ in trainer.steps]
    for column, guarded in enumerate(trainer.reward_funcs):
        # TRL adds an environment's own reward to the functions that were given.
        lists = trainer.reward_guard.step_rewards.get(id(getattr(guarded, "function", None)), [])
        for row, numbers in enumerate(lists):
            if numbers is not None and not rewards[row, column].isnan():
                of_steps[row] += trainer.reward_weights[column].item() * torch.tensor(numbers, dtype=torch.float64)
                rewards[row, column] = 0
    output["step_rewards"] = pad_sequence(of_steps, batch_first=True, padding_value=float("nan")).to(rewards)
    output["whole_rewards"] = trainer._weighted_sum(rewards)
    places = torch.arange(width)
    step_of = [(places[:, None] >= torch.tensor(ends[:-1], dtype=torch.long)).sum(1) for _, ends in trainer.steps]
    output["step_of"] = torch.stack(step_of).to(device)
    return output


def rewards_by_step(trainer, output: dict) -> tuple[Tensor, Tensor]:
    """Rewards of whole responses, [N], and of steps, [N, K], over all processes; they leave the rollout."""
    of_steps = trainer.accelerator.pad_across_processes(output.pop("step_rewards"), dim=1, pad_index=float("nan"))
    return gather(output.pop("whole_rewards")), gather(of_steps)


def spread_over_tokens(output: dict) -> Tensor:
    """The advantages of steps, [n, K], at the tokens of the steps, [n, T]."""
    return output["advantages"].gather(1, output.pop("step_of"))
