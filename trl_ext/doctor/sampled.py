"""Checks of rewards and of the responses that were sampled in the first steps."""

from __future__ import annotations

import inspect
import itertools
import math
import re
from typing import Any

import torch
from scipy.stats import binomtest, spearmanr

from trl_ext.doctor.patient import Patient, Sampled
from trl_ext.doctor.report import Found
from trl_ext.doctor.rows import plain_text
from trl_ext.doctor.steps import has_teacher
from trl_ext.doctor.table import check

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@check("parser-never-matches", "error", "steps", "policy")
def parser_never_matches(patient: Patient) -> Found | None:
    sampled = [] if has_teacher(patient) else patient.sampled
    right = [one for one in sampled if _agrees(one.text, patient.answers.get(one.key))]
    if len(right) < 3:
        return None
    for name in patient.sampled[0].rewards:
        if any(one.rewards.get(name) != 0 for one in patient.sampled):
            continue
        nearest = sorted(right, key=lambda one: len(one.text))[:3]
        shown = "; ".join(f"{one.text[-60:]!r} for {patient.answers[one.key][-30:]!r}" for one in nearest)
        return Found(
            f"{name} was 0 for all {len(patient.sampled)} responses, and {len(right)} hold the right answer, "
            f"such as {shown}",
            "let the prompt ask for the form that the reward reads, or let the reward read these; try it on the three",
        )
    return None


def _agrees(text: str, answer: str | None) -> bool:
    """Whether the last number is that of the reference; without numbers, whether a short reference is in the text."""
    if not answer:
        return False
    expected, found = _NUMBER.findall(answer), _NUMBER.findall(text)
    if expected:
        # A worked solution ends with its answer; a short text is the answer.
        count = len(expected) if len(answer) <= 40 else 1
        return [one.replace(",", "") for one in found[-count:]] == [one.replace(",", "") for one in expected[-count:]]
    return 3 < len(answer) <= 40 and answer.strip().lower() in text.lower()


@check("reward-follows-length", "warning", "steps", "policy")
def reward_follows_length(patient: Patient) -> Found | None:
    known = [one for one in patient.sampled if math.isfinite(one.reward)]
    lengths, rewards = [len(one.text) for one in known], [one.reward for one in known]
    if len(known) < 24 or len(set(lengths)) < 5 or len(set(rewards)) < 5:
        return None
    correlation = spearmanr(lengths, rewards).statistic
    if abs(correlation) < 0.9:
        return None
    return Found(
        f"the rank correlation of reward and length is {correlation:.2f} over {len(known)} responses: "
        f"{'longer' if correlation > 0 else 'shorter'} responses are all that is rewarded",
        "look at long and short responses of one prompt with their rewards; a penalty on the length, or another "
        "reward model, may help",
    )


@check("identical-samples", "warning", "steps", "policy")
def identical_samples(patient: Patient) -> Found | None:
    by_prompt = itertools.groupby(patient.sampled, key=lambda one: (one.step, one.key))
    groups = [[one.text for one in group] for _, group in by_prompt]
    groups = [group for group in groups if len(group) > 1]
    same = [group[0] for group in groups if len(set(group)) == 1]
    if len(groups) < 4 or len(same) < 0.9 * len(groups):
        return None
    return Found(
        f"all responses of a group were identical in {len(same)} of {len(groups)} groups, such as {same[0][:60]!r}",
        "raise the temperature or top_p, check that sampling is on and its seed is not reset, or begin from a model "
        "whose responses vary",
    )


@check("reward-turned-around", "error", "probe", "policy")
def reward_turned_around(patient: Patient) -> Found | None:
    """Compare the rewards of reference answers with those of answers to other prompts."""
    rows = [row for row in patient.rows if row.get("prompt")]
    name = next((name for name in patient.answer_columns if rows and rows[0].get(name)), None)
    texts = [plain_text(row[name]) for row in rows if name]
    if len(set(texts)) < 10:
        return None
    own, other = (_rewards(patient, rows, answers) for answers in (texts, texts[1:] + texts[:1]))
    higher, lower = ((a > b for a, b in zip(*order, strict=True)) for order in ((own, other), (other, own)))
    more, less = sum(higher), sum(lower)
    if less <= more or binomtest(less, more + less).pvalue > 0.001:
        return None
    return Found(
        f"the reward of the reference answer ({name}) is lower than that of another prompt's answer for {less} of "
        f"{more + less} prompts",
        "turn the sign of the reward or of its weight, and check the order in which it compares its arguments",
    )


def _rewards(patient: Patient, rows: list[dict[str, Any]], texts: list[str]) -> list[float]:
    """The weighted sums of the rewards of these answers; models and functions that wait for others are left out."""
    chat = isinstance(rows[0]["prompt"], list)
    given = {key: [row.get(key) for row in rows] for key in rows[0] if key != "prompt"}
    given |= {"completion_ids": [patient.tokenizer(text)["input_ids"] for text in texts]}
    given |= {"trainer_state": patient.trainer.state, "log_extra": lambda *_: None, "log_metric": lambda *_: None}
    given |= {"prompts": [row["prompt"] for row in rows]}
    given["completions"] = [[{"role": "assistant", "content": text}] for text in texts] if chat else texts
    total = [0.0] * len(rows)
    for function, weight in zip(patient.trainer.reward_funcs, _weights(patient), strict=True):
        if isinstance(function, torch.nn.Module) or inspect.iscoroutinefunction(function):
            raise ValueError("a reward is a model or waits for others")
        rewards = function(**given)
        total = [sum_ + weight * (one or 0.0) for sum_, one in zip(total, rewards, strict=True)]
    return total


def _weights(patient: Patient) -> list[float]:
    weights = getattr(patient.trainer, "reward_weights", None)
    return [1.0] * len(patient.trainer.reward_funcs) if weights is None else weights.tolist()


def read_sampled(patient: Patient, step: int) -> None:
    """Add the responses of the latest rollout, unless they are there already."""
    from trl_ext.trainers.policy.rollout_metrics import latest_rollout

    rows = latest_rollout(patient.trainer)
    weights = _weights(patient)
    new = []
    for prompt, completion, rewards in rows:
        reward = sum(weight * one for weight, one in zip(weights, rewards.values(), strict=False))
        new.append(Sampled(step, prompt, plain_text(completion), rewards, reward))
    last = patient.sampled[-len(new) :] if new else []
    if [(one.prompt, one.text) for one in last] != [(one.prompt, one.text) for one in new]:
        patient.sampled += new
