"""The figures of the report, one row per run, read from results.json; no figure is made up and none rounded.

Computed are the interval of a share whose results have none, the Pareto fronts, and the means over seeds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trl_ext.evaluation.intervals import wilson_interval
from trl_ext.evaluation.reporting.problems import find_problems
from trl_ext.evaluation.reporting.runs import IncompleteRun, Run
from trl_ext.evaluation.reporting.values import number, pick, text

Row = dict[str, Any]
# The tables that each task has for itself.
OF_A_TASK = ("policies", "reward_models", "methods")
# Decimals of a trade-off, as they are printed and as fronts are found: what reads the same is the same.
DECIMALS = {"kl": 2, "reward": 3}


def summarize(runs: Sequence[Run], incomplete: Sequence[IncompleteRun]) -> dict[str, list[Row]]:
    """The report's tables as JSON-ready rows: `policies`, `reward_models`, `methods`, `incomplete` and `problems`.

    A policy's `on_front` names the trade-offs on whose Pareto front it may be, by its intervals; `on_point_front`
    those on whose front its figures are.
    """
    policies = [policy_row(run) for run in runs if not run.trains_reward_model]
    for key, intervals in (("on_front", True), ("on_point_front", False)):
        fronts = {name: pareto_front(points, intervals=intervals) for name, points in trade_offs(policies).items()}
        for row in policies:
            row[key] = [name for name, front in fronts.items() if row["run"] in front]
    return {
        "policies": policies,
        "reward_models": [reward_model_row(run) for run in runs if run.trains_reward_model],
        "methods": over_seeds(policies),
        "incomplete": [{"run": run.label, "folder": str(run.folder), "reason": run.reason} for run in incomplete],
        "problems": [
            {"run": run.label, "file": problem.file, "field": problem.field, "problem": problem.fault}
            for run in runs
            for problem in find_problems(run)
        ],
    }


@dataclass(frozen=True)
class Task:
    """The rows and runs of one task; names on the page end in its `end`, which is empty if there is no other."""

    title: str
    end: str
    summary: dict[str, list[Row]]
    policies: list[Run]
    reward_models: list[Run]


def by_task(summary: dict[str, list[Row]], runs: Sequence[Run] = ()) -> list[Task]:
    """The rows of a summary, and the runs, apart by task."""
    titles = list(dict.fromkeys(row["task"] for name in OF_A_TASK for row in summary[name]))
    return [
        Task(
            title,
            f"-{number}" if len(titles) > 1 else "",
            {name: [row for row in summary[name] if row["task"] == title] for name in OF_A_TASK},
            *([run for run in runs if (run.task, run.trains_reward_model) == (title, kind)] for kind in (False, True)),
        )
        for number, title in enumerate(titles, start=1)
    ]


def policy_row(run: Run) -> Row:
    """A policy's figures; None for what its results do not hold."""
    results = run.results
    rewards = pick(results, "rewards")
    return {
        **_what_was_run(run),
        "win_rate": {rule: _share(results, "win_rate", rule, value="rate") for rule in ("half", "agreed")},
        "judge_errors": number(results, "win_rate", "n_errors"),
        "score_name": run.score_name,
        "accuracy": _accuracy(results),
        "score": _means(results, "score"),
        "score_gain": _estimate(results, "score", "gain"),
        "rewards": {
            name: _estimate(reward, "gain") for name, reward in (rewards if isinstance(rewards, dict) else {}).items()
        },
        "kl": _estimate(results, "kl"),
        "pair_accuracy": _pair_accuracy(results),
        "tokens": {source: number(results, "generations", source, "mean_tokens") for source in ("base", "policy")},
    }


def reward_model_row(run: Run) -> Row:
    """A reward model's figures on held-out pairs; None for what its results do not hold."""
    results = run.results
    return {
        **_what_was_run(run),
        "weights": text(results, "run", "weights"),
        "accuracy": _share(results, "pairs", value="accuracy"),
        **{name: number(results, "pairs", name) for name in ("ties", "margin", "nll", "brier", "ece")},
        "true_accuracy": _share(results, "true_order", value="accuracy"),
        "label_agreement": number(results, "true_order", "label_agreement"),
    }


def trade_offs(policies: Iterable[Row]) -> dict[str, list[Row]]:
    """For each kind of reward, the runs that have it and a KL: `run`, `setting`, the estimates `kl` and `reward`."""
    points: dict[str, list[Row]] = {}
    for row in policies:
        rewards = {f"{row['score_name']} gain": row["score_gain"], "win rate, ties as half": row["win_rate"]["half"]}
        rewards |= {f"gain in {name}": gain for name, gain in row["rewards"].items()}
        for name, reward in rewards.items():
            if reward is not None and row["kl"] is not None:
                point = {"run": row["run"], "setting": (row["model"], row["task"]), "kl": row["kl"], "reward": reward}
                points.setdefault(name, []).append(point)
    return points


def pareto_front(points: Iterable[Mapping[str, Any]], *, intervals: bool) -> set[str]:
    """The runs that no other of the same model and data dominates: at least the reward at no more KL, more of one.

    With `intervals` this must hold wherever in their intervals the two lie: the lowest reward of the one is at least
    the highest of the other, and its highest KL at most the other's lowest. A figure without an interval is its own.
    All are rounded as they are printed.
    """

    def rounded(point: Mapping[str, Any], name: str, key: str) -> float | None:
        value = point[name].get(key)
        return None if value is None else round(value, DECIMALS[name])

    def ends(point: Mapping[str, Any], name: str) -> tuple[float, float]:
        value, low, high = (rounded(point, name, key) for key in ("value", "low", "high"))
        if not intervals or low is None or high is None or not low <= value <= high:
            return value, value
        return low, high

    def dominates(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
        kl = ends(other, "kl")[0] - ends(one, "kl")[1]
        reward = ends(one, "reward")[0] - ends(other, "reward")[1]
        less_kl = rounded(one, "kl", "value") < rounded(other, "kl", "value")
        better = less_kl or rounded(one, "reward", "value") > rounded(other, "reward", "value")
        return one["setting"] == other["setting"] and min(kl, reward) >= 0 and better

    points = list(points)
    return {point["run"] for point in points if not any(dominates(other, point) for other in points)}


def over_seeds(policies: Iterable[Row]) -> list[Row]:
    """Mean, lowest and highest figure of the runs that differ only in their seed, where there are two or more.

    Of runs with the same seed the first counts.
    """

    def what(row: Row) -> tuple[str, ...]:
        return tuple(str(row.get(name)) for name in ("objective", "model", "task", "steps", "settings_digest"))

    groups: dict[tuple[str, ...], dict[float | None, Row]] = {}
    for row in policies:
        groups.setdefault(what(row), {}).setdefault(row["seed"], row)
    rows = []
    for by_seed in groups.values():
        group = list(by_seed.values())
        if len(group) > 1:
            figures = {
                "win_rate_half": [row["win_rate"]["half"] for row in group],
                "win_rate_agreed": [row["win_rate"]["agreed"] for row in group],
                "score_gain": [row["score_gain"] for row in group],
                "kl": [row["kl"] for row in group],
            }
            names = ("task", "score_name", "method", "objective", "model", "data", "steps")
            rows.append(
                {
                    **{name: group[0][name] for name in names},
                    "runs": [row["run"] for row in group],
                    **{
                        name: _spread([value and value["value"] for value in values])
                        for name, values in figures.items()
                    },
                    "tokens": _spread([row["tokens"]["policy"] for row in group]),
                    "training_seconds": _spread([row["training_seconds"] for row in group]),
                }
            )
    return rows


def _what_was_run(run: Run) -> Row:
    results = run.results
    seconds = {name: number(results, "run", name) for name in ("training_seconds", "total_seconds")}
    return {
        "run": run.label,
        "folder": str(run.folder),
        "method": run.method,
        "objective": run.objective,
        "model": text(results, "run", "model"),
        "data": run.data,
        "task": run.task,
        "steps": number(results, "run", "optimizer_steps"),
        "settings_digest": text(results, "run", "settings_digest"),
        "seed": number(results, "run", "seed"),
        **seconds,
        "device": text(results, "run", "device"),
        "processes": number(results, "run", "processes"),
    }


def _estimate(results: Any, *keys: str, value: str = "mean") -> dict[str, float | None] | None:
    """A figure with its interval, which may be missing, and the rows it is over; None without the figure."""
    found = number(results, *keys, value)
    if found is None:
        return None
    return {"value": found, **{name: number(results, *keys, name) for name in ("low", "high", "n")}}


def _share(results: Any, *keys: str, value: str) -> dict[str, float | None] | None:
    """A share with its interval: where the results have none, Wilson's, which the library writes for every share."""
    found = _estimate(results, *keys, value=value)
    # Where every comparison is a tie, there is no rate without ties.
    return with_wilson_interval(found) if found and found["n"] != 0 else None


def with_wilson_interval(share: dict[str, float | None]) -> dict[str, float | None]:
    """The share with its 95% interval, computed from its `value` and `n` where it is missing and can be."""
    value, n = share["value"], share["n"]
    missing = share["low"] is None or share["high"] is None
    if not missing or n is None or n < 1 or n != int(n) or not 0 <= value <= 1:
        return share
    low, high = wilson_interval(value * n, int(n))
    return {**share, "low": low, "high": high}


def _means(results: Any, key: str) -> dict[str, float | None]:
    return {source: number(results, key, source) for source in ("base", "policy")}


def _accuracy(results: Any) -> dict[str, dict[str, float | None] | None]:
    """By decoding; a model that was not trained was evaluated with one alone."""
    found = {name: _estimate(results, "reasoning", "after", name, "accuracy") for name in ("sampled", "greedy")}
    alone = "greedy" if number(results, "run", "sampling", "temperature") == 0 else "sampled"
    return {**found, alone: found[alone] or _estimate(results, "reasoning", "accuracy")}


def _pair_accuracy(results: Any) -> dict[str, float | None] | None:
    """Held-out pairs ranked as labelled by the log-ratio; None where the model has not moved and all are ties."""
    after = pick(results, "preferences", "after")
    if number(after, "reference_corrected", "ties") == number(after, "n"):
        return None
    accuracy = _estimate(after, "reference_corrected", value="accuracy")
    return accuracy and with_wilson_interval({**accuracy, "n": number(after, "n")})


def _spread(values: Sequence[float | None]) -> dict[str, float | int] | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {"mean": sum(known) / len(known), "low": min(known), "high": max(known), "n": len(known)}
