"""Checks of rewards and of the responses that were sampled in the first steps."""

from __future__ import annotations

import itertools
import math
import re
import statistics

from scipy.stats import permutation_test, spearmanr

from trl_ext.doctor.patient import Patient, Sampled
from trl_ext.doctor.report import Found
from trl_ext.doctor.rows import plain_text
from trl_ext.doctor.table import check

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@check("parser-never-matches", "error", "steps", "policy")
def parser_never_matches(patient: Patient) -> Found | None:
    sampled = patient.sampled
    right = [one for one in sampled if _agrees(one.text, patient.answers.get(one.key))]
    # A reward of the form is often 0 in the first steps, beside one that finds the answer.
    if len(right) < 3 or any(value > 0 for one in right for value in one.rewards.values()):
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


@check("reward-turned-around", "warning", "steps", "policy")
def reward_turned_around(patient: Patient) -> Found | None:
    """It compares rewards that training computed: a reward may be slow, cost money or remember its calls."""
    sampled = [one for one in patient.sampled if math.isfinite(one.reward)]
    split: dict[bool, list[float]] = {True: [], False: []}
    for one in sampled:
        if patient.answers.get(one.key):
            split[_agrees(one.text, patient.answers[one.key])].append(one.reward)
    right, wrong = split[True], split[False]
    if min(len(right), len(wrong)) < 3 or max(right) >= max(wrong) or not _lower(right, wrong):
        return None
    return Found(
        f"the {len(right)} responses that hold the right answer have a mean reward of {statistics.mean(right):.3g}, "
        f"and the other {len(wrong)} have {statistics.mean(wrong):.3g}",
        "turn the sign of the reward or of its weight, and check the order in which it compares its arguments",
    )


def _lower(some: list[float], others: list[float]) -> bool:
    """Whether the mean is lower than by chance, with many ties; the generator is not that of the training."""

    def difference(x, y, axis):
        return x.mean(axis=axis) - y.mean(axis=axis)

    settings = {"alternative": "less", "n_resamples": 9999, "vectorized": True, "random_state": 0}
    return permutation_test((some, others), difference, **settings).pvalue < 0.001


def _weights(patient: Patient) -> list[float]:
    weights = getattr(patient.trainer, "reward_weights", None)
    return [1.0] * len(patient.trainer.reward_funcs) if weights is None else weights.tolist()


def _missing(reward: float | None) -> bool:
    return reward is None or math.isnan(reward)


def read_sampled(patient: Patient, step: int) -> None:
    """Add the responses of the latest rollout, unless they are there already."""
    from trl_ext.trainers.policy.rollout_metrics import latest_rollout

    rows = latest_rollout(patient.trainer)
    weights = _weights(patient)
    new = []
    for prompt, completion, rewards in rows:
        # As TRL sums: a function that gives no reward for a response counts as 0 beside others.
        given = [(weight, one) for weight, one in zip(weights, rewards.values(), strict=False) if not _missing(one)]
        reward = sum(weight * one for weight, one in given) if given else math.nan
        new.append(Sampled(step, prompt, plain_text(completion), rewards, reward))
    last = patient.sampled[-len(new) :] if new else []
    if [(one.prompt, one.text) for one in last] != [(one.prompt, one.text) for one in new]:
        patient.sampled += new
