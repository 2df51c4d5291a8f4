"""The report's figures, one row per run, taken from results.json, with Pareto fronts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trl_ext.evaluation.reporting.results import Estimate
from trl_ext.evaluation.reporting.runs import Run

Row = dict[str, Any]
# Tables that each task has separately.
OF_A_TASK = ("policies", "reward_models")
# Decimals of trade-offs, both in print and for the fronts: figures that look the same count as the same.
DECIMALS = {"kl": 2, "reward": 3}


def summarize(runs: Sequence[Run], incomplete: Sequence[Row]) -> dict[str, list[Row]]:
    """The report's tables as JSON-ready rows: `policies`, `reward_models`, `incomplete` and `problems`.

    `on_front` of a policy names the trade-offs on whose Pareto front it may be, given its intervals.
    """
    policies = [policy_row(run) for run in runs if not run.trains_reward_model]
    fronts = {name: pareto_front(points, intervals=True) for name, points in trade_offs(policies).items()}
    for row in policies:
        row["on_front"] = [name for name, front in fronts.items() if row["run"] in front]
    return {
        "policies": policies,
        "reward_models": [reward_model_row(run) for run in runs if run.trains_reward_model],
        "incomplete": list(incomplete),
        "problems": [{"run": run.label, **problem} for run in runs for problem in run.problems],
    }


@dataclass(frozen=True)
class Task:
    """The rows and runs of one task; its names on the page end in `end`, which is empty if it is the only one."""

    title: str
    end: str
    summary: dict[str, list[Row]]
    policies: list[Run]
    reward_models: list[Run]


def by_task(summary: dict[str, list[Row]], runs: Sequence[Run] = ()) -> list[Task]:
    """Split the rows of a summary, and the runs, by task."""
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
    """A policy's figures; None if missing from its results."""
    results = run.results
    win_rate, score = results.win_rate, results.score
    texts = results.generations or {}
    return {
        **_what_was_run(run),
        "win_rate": {rule: _figure(win_rate and getattr(win_rate, rule)) for rule in ("half", "agreed")},
        "judge_errors": win_rate and win_rate.n_errors,
        "tasks": {task: {key: _figure(one) for key, one in own.items()} for task, own in results.tasks.items()},
        "score_name": run.score_name,
        "accuracy": _accuracy(run),
        "score": {"base": score and score.base, "policy": score and score.policy},
        "score_gain": _figure(score and score.gain),
        "rewards": {name: _figure(reward.gain) for name, reward in (results.rewards or {}).items()},
        "kl": _figure(results.kl),
        "pair_accuracy": _pair_accuracy(run),
        "identical": _identical(run),
        "on_front": [],
        "tokens": {source: texts[source].mean_tokens if source in texts else None for source in ("base", "policy")},
    }


def reward_model_row(run: Run) -> Row:
    """A reward model's figures on held-out pairs; None if missing from its results."""
    pairs, order = run.results.pairs, run.results.true_order
    return {
        **_what_was_run(run),
        "weights": run.results.run.weights or "",
        "accuracy": _figure(pairs),
        **{name: pairs and getattr(pairs, name) for name in ("ties", "margin", "nll", "brier", "ece")},
        "true_accuracy": _figure(order),
        "label_agreement": order and order.label_agreement,
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
    """Runs not dominated (at least the reward, at most the KL, better in one) by any of the same model and data.

    With `intervals`, one run dominates another only if this holds everywhere in their intervals: its lowest reward is
    at least the other's highest, and its highest KL at most the other's lowest. A figure without an interval is its
    own interval. All figures are rounded as printed.
    """

    def figure(point: Mapping[str, Any], name: str) -> tuple[float, float, float]:
        """The value, and the bounds of its interval."""
        value, low, high = (point[name].get(key) for key in ("value", "low", "high"))
        known = intervals and low is not None and high is not None
        return tuple(round(one, DECIMALS[name]) for one in ((value, low, high) if known else (value,) * 3))

    def dominates(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
        (kl, _, kl_high), (other_kl, other_kl_low, _) = (figure(point, "kl") for point in (one, other))
        (reward, low, _), (other_reward, _, other_high) = (figure(point, "reward") for point in (one, other))
        better = kl < other_kl or reward > other_reward
        return one["setting"] == other["setting"] and kl_high <= other_kl_low and low >= other_high and better

    points = list(points)
    return {point["run"] for point in points if not any(dominates(other, point) for other in points)}


def _what_was_run(run: Run) -> Row:
    what = run.results.run
    names = ("seed", "training_seconds", "total_seconds", "processes")
    return {
        "run": run.label,
        "folder": str(run.folder),
        "method": run.method,
        "data": what.dataset or "",
        "task": run.task,
        "steps": what.optimizer_steps,
        **{name: getattr(what, name) or "" for name in ("objective", "model", "device")},
        **{name: getattr(what, name) for name in names},
    }


def _figure(part: Estimate | None) -> dict[str, float | None] | None:
    return part and part.figure()


def _accuracy(run: Run) -> dict[str, dict[str, float | None] | None]:
    """Accuracy by decoding; an untrained model was evaluated with only one."""
    reasoning = run.results.reasoning
    found = {name: one.accuracy for name, one in reasoning.after.items()} if reasoning else {}
    if reasoning and reasoning.accuracy:
        is_greedy = (run.results.run.sampling or {}).get("temperature") == 0
        found["greedy" if is_greedy else "sampled"] = reasoning.accuracy
    return {name: _figure(found.get(name)) for name in ("sampled", "greedy")}


def _identical(run: Run) -> int | None:
    """The number of responses if all are the same as the base's."""
    same = all(row.response_text == row.base_response_text for row in run.generations)
    return len(run.generations) or None if same else None


def _pair_accuracy(run: Run) -> dict[str, float | None] | None:
    """Share of held-out pairs ranked as labelled by the log-ratio; None for an unchanged model, where all are ties."""
    after = run.results.preferences and run.results.preferences.after
    ranking = after and after.reference_corrected
    return {**ranking.figure(), "n": after.n} if ranking and ranking.ties != after.n else None
