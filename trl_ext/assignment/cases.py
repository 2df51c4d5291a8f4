"""Test cases of each function: drawn arguments, and the outcomes of the library's function and of known mistakes."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trl_ext import advantages, course, losses, models
from trl_ext.assignment.checking import call, verdict
from trl_ext.assignment.mistakes import REWARDS, mistakes_of

WORDS = ["red", "green", "blue", "one", "two", "three", "four", "five", "cats", "dogs", "sing", "run"]
# Special cases.
NAN, EMPTY, EQUAL = "NaN at positions that do not count", "a row without tokens", "a group of equal rewards in float32"
FAR, SINGLE = "margins of 800 and more in either direction", "float32"


class Draw:
    """A source of random arguments, determined by a seed and the number of the case."""

    def __init__(self, seed: int, index: int, special: str):
        self.index, self.special = index, special
        self._generator = torch.Generator().manual_seed(1000 * seed + index)

    def turn(self, *choices: Any) -> Any:
        """One of the choices: cases cycle through them."""
        return choices[self.index % len(choices)]

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=self._generator)

    def tensor(self, low: float, high: float, *shape: int) -> Tensor:
        values = low + (high - low) * torch.rand(*shape, generator=self._generator, dtype=torch.float64)
        return values.float() if self.special == SINGLE else values

    def mask(self, rows: int, tokens: int, start: int) -> Tensor:
        """True from `start` to the end of each row; rows differ in length."""
        ends = start + 1 + (torch.arange(rows) * 2 + self.index) % (tokens - start)
        return (torch.arange(tokens) >= start) & (torch.arange(tokens) < ends.unsqueeze(1))

    def text(self, low: int, high: int) -> str:
        numbers = self.integers(0, len(WORDS) - 1, int(self.integers(low, high)))
        return " ".join(WORDS[number] for number in numbers)


@dataclass(frozen=True)
class Task:
    """A function that students write: the library's, and the arguments of a case, of which it takes those it has.

    `options` are further arguments, with the values that cases take in turn; None leaves one out. Results of the kind
    `unordered` may be in any order; a function of the kind `step` calls `backward` itself.
    """

    right: Callable
    build: Callable[[Draw], dict[str, Any]]
    options: dict[str, tuple] = field(default_factory=dict)
    special: tuple[str, ...] = ()
    kind: str = ""

    def case(self, draw: Draw) -> dict[str, Any]:
        turns = {name: draw.turn(*values) for name, values in self.options.items()}
        options = {name: value for name, value in turns.items() if value is not None}
        known = inspect.signature(self.right).parameters
        arguments = {name: value for name, value in self.build(draw).items() if name in known}
        # The grader prints this. Students must not see the texts of hidden cases.
        about = ", ".join([draw.special or "at random", *(f"{name}={value!r}" for name, value in options.items())])
        return {"about": about, "kind": self.kind, "arguments": arguments | options}


def build_cases(name: str, seed: int, count: int) -> list[dict[str, Any]]:
    """`count` ordinary cases of a function, one in float32, and three of each special kind."""
    task, cases, scores = TASKS[name], [], {"scores": losses.PreferenceScores}
    wanted = [(index, "") for index in range(count)] + [(200, SINGLE)]
    for index, special in wanted + [(100 + index, special) for special in task.special for index in range(3)]:
        case = task.case(Draw(seed, index, special))
        case |= {"expected": call(task.right, case, **scores), "mistakes": []}
        outcomes = [(says, call(partial(wrong, task.right), case, **scores)) for says, wrong in mistakes_of(name)]
        shown = [each for each in outcomes if "error" not in each[1] and verdict(each[1], case) is not None]
        cases.append(case | {"mistakes": shown})
    return cases


# ---- Arguments ----


def tokens(draw: Draw, grad: bool = True) -> dict[str, Any]:
    """What functions of token log-probabilities take: ratios, and their means, on both sides of a clip."""
    mask, new = draw.mask(4, 5, draw.turn(0, 1)), draw.tensor(-3, -0.05, 4, 5)
    if draw.special == EMPTY:
        mask[-1] = False
    old = new - draw.tensor(0, 0.9, 4, 5) * torch.tensor([[1], [1], [-1], [-1]])
    drawn = {"log_probs": new, "old_log_probs": old, "ref_log_probs": new + draw.tensor(-0.8, 0.8, 4, 5)}
    drawn |= {"losses": draw.tensor(-2, 2, 4, 5)}
    for name, values in drawn.items():
        # Values that do not count are far from all others, to reveal leaks.
        filled = values.masked_fill(~mask, math.nan if draw.special == NAN else 37.0)
        drawn[name] = filled.requires_grad_(grad or name == "log_probs")
    log_ratio = draw.tensor(-0.7, 0.7, 4, draw.turn(5, 1)).requires_grad_()
    signed = draw.tensor(0.3, 2, 4) * torch.tensor([1, -1, 1, -1])
    return drawn | {"log_ratio": log_ratio, "mask": mask.long(), "advantages": signed, "clip": 0.2}


def course_tokens(draw: Draw) -> dict[str, Any]:
    """The same under the names and in the shapes of the reasoning course."""
    drawn, rewards = tokens(draw), draw.tensor(0, 1, 4, 1)
    drawn |= {"policy_log_probs": drawn["log_probs"], "response_mask": drawn["mask"], "tensor": drawn["losses"]}
    drawn |= {"mask": drawn["mask"].bool(), "dim": draw.turn(1, None, 0), "raw_rewards": rewards}
    return drawn | dict.fromkeys(("advantages", "raw_rewards_or_advantages"), drawn["advantages"].unsqueeze(1))


def pairs(draw: Draw) -> dict[str, Any]:
    """Scores of pairs; in a special case, two of them are beyond the range of an exponential for every beta."""
    by = torch.tensor([-16000.0, 16000, 0, 0, 0]) * (draw.special == FAR)
    names = ("chosen", "rejected", "ref_chosen", "ref_rejected")
    drawn = {name: draw.tensor(-30, -2, 5) for name in names} | {"margin": draw.tensor(-2, 2, 5)}
    drawn["chosen"] = (drawn["chosen"] + by).to(drawn["margin"]).requires_grad_()
    drawn["rejected"].requires_grad_()
    lengths = {name: draw.integers(2, 12, 5) for name in ("chosen_length", "rejected_length")}
    scores = {"make": "scores", **{name: drawn[name] for name in names}, **lengths}
    return {"scores": scores, **drawn, **draw.turn({}, {"margin": None})}


def tensors(draw: Draw) -> dict[str, Any]:
    """Rewards in groups, every second time one of equal rewards, and tokens with logits and a model."""
    size = draw.turn(4, 3, 5)
    rewards = draw.tensor(-2, 2, draw.turn(2, 3), size)
    rewards[-1] = draw.turn(rewards[-1], 0.5)
    if draw.special == EQUAL:
        # In float32, the mean of seven equal values differs from the value.
        size, rewards = 7, torch.cat([torch.full((1, 7), 0.7), draw.tensor(-2, 2, 1, 7).float()])
    drawn = {"rewards": rewards.reshape(-1), "group_size": size}
    completions = draw.integers(3, 9, 4, 6)
    # No end token, one, two, and one at the first position.
    completions[1, 3] = completions[2, 1] = completions[2, 4] = completions[3, 0] = 2
    # Every second time beyond the range of an exponential.
    drawn["logits"] = (draw.tensor(-3, 3, 3, 6, 7) * draw.turn(1, 400)).requires_grad_()
    drawn |= {"completion_ids": completions, "response_mask": draw.mask(3, 6, draw.turn(2, 1)).long()}
    drawn |= {name: draw.integers(0, 6, 3, 6) for name in ("input_ids", "labels")}
    return drawn | {"model": {"make": "model", "seed": int(draw.integers(0, 99)), "size": 9}}


def group_rewards(draw: Draw) -> dict[str, Any]:
    size, scale = draw.turn(4, 3), 1.0
    truths = [truth for _ in range(3) for truth in [draw.text(1, 1)] * size]
    # The first of a group is correct, the second almost, the others are random.
    said = [(f"{draw.text(1, 3)} {truth}", f"{truth} {truth} no", *[draw.text(1, 4)] * 2) for truth in truths]
    responses = [forms[number % size] for number, forms in enumerate(said)]
    if draw.special == EQUAL:
        # A group with equal rewards whose float32 mean is not exactly that reward.
        size, scale, truths = 7, 0.7, truths[:1] * 14
        responses = [f"it is {truths[0]}"] * 7 + [truths[0], "no"] * 3 + ["no"]
    drawn = {"reward_fn": {"make": "reward", "scale": scale}, "rollout_responses": responses, "group_size": size}
    return drawn | {"repeated_ground_truths": truths}


def texts(draw: Draw) -> dict[str, Any]:
    """Texts for a tokenizer, two models, and a pair of responses."""
    # Outputs of different lengths; every third case has an empty one.
    outputs = [draw.text(1 + row, 2 + row) for row in range(draw.turn(3, 4))]
    outputs[0] = draw.turn(outputs[0], outputs[0], "")
    drawn = {"prompt_strs": [draw.text(2, 5) for _ in outputs], "output_strs": outputs}
    drawn |= {name: draw.text(2, 5) for name in ("prompt", "response_chosen", "response_rejected")}
    seed, tokenizer = int(draw.integers(0, 99)), {"make": "tokenizer", **draw.turn({}, {"pad_token_id": None})}
    drawn |= {"lm": {"make": "model", "seed": seed}, "lm_ref": {"make": "model", "seed": 100 + seed, "grad": False}}
    return drawn | {"tokenizer": tokenizer}


def number_text(draw: Draw) -> dict[str, Any]:
    one, two, three = draw.integers(3, 899, 3).tolist()
    forms = (
        f"She has {one} + {two} = {one + two} apples.|I cannot say: {draw.text(3, 5)}.|The loss is -{one}|0.{two}|"
        f"It costs ${three},{one + 100}.25 in all, so the answer is {three},{one + 100}.25.|The answer is {one}|"
        f"First {one}, then {two}, so {one + 2 * two} of them.|{one} from {one + two} leaves {two}."
    )
    return {"model_output": draw.turn(*forms.split("|"))}


def choice_text(draw: Draw) -> dict[str, Any]:
    options = [WORDS[number] for number in draw.tensor(0, 1, len(WORDS)).argsort()[:4].tolist()]
    own, other = "AC"[draw.integers(0, 1)], "BD"[draw.integers(0, 1)]
    forms = (
        f"The answer is {other}, no, the answer is {own}.|({own}) is what I choose, and not the rest|I do not know.|"
        f"I would take option {own} of these|{options['ABCD'.index(own)]}|Because of it the answer is {own}.|"
        f"The correct answer is {own}. {other} is wrong.|{own}."
    )
    example = {"question": draw.text(2, 3), "options": options}
    return {"mmlu_example": example, "model_output": draw.turn(*forms.split("|"))}


# ---- Functions that the library has only in parts ----


def sequence_log_probs(logits: Tensor, input_ids: Tensor, response_mask: Tensor) -> Tensor:
    log_probs = logits[:, :-1].log_softmax(-1).gather(-1, input_ids[:, 1:].unsqueeze(-1)).squeeze(-1)
    return losses.masked_sum(log_probs, response_mask[:, 1:], -1)


def whole_loss(
    log_probs, old_log_probs, ref_log_probs, mask, advantages, clip, kl_coef, max_new_tokens=None, *,
    ratio=lambda new, old, mask: losses.token_log_ratio(new, old), surrogate=losses.clipped_surrogate,
    reduction="sequence_mean", kl_reduction="token_mean", detached=("old", "ref"),
) -> Tensor:  # fmt: skip
    """A whole policy loss from the library's parts. A mistake replaces one of them."""
    old = old_log_probs.detach() if "old" in detached else old_log_probs
    reference = ref_log_probs.detach() if "ref" in detached else ref_log_probs
    each = surrogate(ratio(log_probs, old, mask), advantages, clip_low=clip, clip_high=clip)
    kl = losses.aggregate(losses.kl_estimate(log_probs, reference, "k3"), mask, kl_reduction)
    return losses.aggregate(each, mask, reduction, constant=max_new_tokens) + kl_coef * kl


# ---- The functions of both assignments ----

BETAS, KL, EPS = {"beta": (0.1, 0.5)}, {"kl_coef": (0.0, 0.05)}, (1e-6, 0.1)
CLIPS = {"clip_low": (0.2, 0.1), "clip_high": (0.2, 0.28)}
KINDS = {"kind": ("sequence_mean", "token_mean", "constant", "sum"), "constant": (None, None, 8.0, None)}
# Every second time, the tokens of a batch of which these rows are a part.
KINDS["token_count"] = (None, 20.0, *[None] * 6)
TYPES = {"loss_type": ("grpo_clip", "no_baseline", "reinforce_with_baseline", "grpo_no_clip"), "cliprange": (0.2, 0.4)}
STEPS, SFT = {"gradient_accumulation_steps": (2, 4, 1)}, {"normalize_constant": (1.0, 3.0, 2.0)}
ratios = partial(tokens, grad=False)
GROUPED = {"advantage_eps": EPS, "normalize_by_std": (True, True, False)}
TASKS: dict[str, Task] = {
    "sequence_log_probs": Task(sequence_log_probs, tensors),
    "completion_mask": Task(models.completion_mask, tensors, {"eos_token_id": (2, [2, 3])}),
    "dpo": Task(losses.dpo, pairs, BETAS, (FAR,)),
    "ipo": Task(losses.ipo, pairs, BETAS | {"length_normalized": (None, None, True)}),
    "aot": Task(losses.aot, pairs, {"beta": (0.2, 0.05)}, (FAR,), "unordered"),
    "bradley_terry": Task(losses.bradley_terry, pairs, special=(FAR,)),
    "group_normalized": Task(advantages.group_normalized, tensors, {"std_ddof": (0, 0, 1), "eps": EPS}, (EQUAL,)),
    "group_centered": Task(advantages.group_centered, tensors),
    "token_log_ratio": Task(losses.token_log_ratio, ratios),
    "sequence_log_ratio": Task(losses.sequence_log_ratio, ratios, special=(NAN,)),
    "clipped_surrogate": Task(losses.clipped_surrogate, tokens, CLIPS),
    "kl_estimate": Task(losses.kl_estimate, ratios, {"kind": ("k3", "k1", "k2")}),
    "aggregate": Task(losses.aggregate, tokens, KINDS, (NAN, EMPTY)),
    "grpo_loss": Task(whole_loss, tokens, KL),
    "dr_grpo_loss": Task(partial(whole_loss, reduction="constant"), tokens, KL | {"max_new_tokens": (8, 12)}),
    "gspo_loss": Task(partial(whole_loss, ratio=losses.sequence_log_ratio), tokens, KL),
    "tokenize_prompt_and_output": Task(course.tokenize_prompt_and_output, texts),
    "token_entropy": Task(course.token_entropy, tensors),
    "response_log_probs": Task(course.response_log_probs, tensors, {"return_token_entropy": (True, False)}),
    "masked_mean": Task(course.masked_mean, course_tokens, special=(NAN,)),
    "masked_normalize": Task(course.masked_normalize, course_tokens, {"normalize_constant": (4.0, 7.0)}, (NAN,)),
    "sft_microbatch_step": Task(course.sft_microbatch_step, course_tokens, STEPS | SFT, kind="step"),
    "naive_policy_gradient_loss": Task(course.naive_policy_gradient_loss, course_tokens),
    "grpo_clip_loss": Task(course.grpo_clip_loss, course_tokens, {"cliprange": (0.2, 0.4)}),
    "policy_gradient_loss": Task(course.policy_gradient_loss, course_tokens, TYPES),
    "policy_microbatch_step": Task(course.policy_microbatch_step, course_tokens, TYPES | STEPS, kind="step"),
    REWARDS: Task(course.compute_group_normalized_rewards, group_rewards, GROUPED, (EQUAL,)),
    "parse_gsm8k_response": Task(course.parse_gsm8k_response, number_text),
    "parse_mmlu_response": Task(course.parse_mmlu_response, choice_text),
    "per_instance_dpo_loss": Task(course.per_instance_dpo_loss, texts, {"beta": (0.1, 0.02)}),
}
