"""The report's figures, taken from the runs' results.json, and the Pareto fronts of reward against KL."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trl_ext.evaluation.reporting import results
from trl_ext.evaluation.reporting.runs import Run
from trl_ext.evaluation.statistics.intervals import Estimate

Row = dict[str, Any]
KL, HALF, FRONT = "KL to the base (nats per response)", "win rate, ties as half", "may be on the Pareto front"
# Decimals of trade-offs, both in print and for the fronts: figures that look the same count as the same.
DECIMALS = {"kl": 2, "reward": 3}


def summarize(runs: Sequence[Run], incomplete: Sequence[Row]) -> dict[str, list[Row]]:
    """The report's rows: `policies`, `reward_models`, `incomplete` and `problems`."""
    fronts = fronts_by_run(runs)
    rows = [
        {"run": run.label, "folder": str(run.folder), "method": run.method, "task": run.task}
        | {"figures": figures(run, fronts), "tasks": task_figures(run)}
        for run in runs
    ]
    return {
        "policies": [row for row, run in zip(rows, runs, strict=True) if not run.trains_reward_model],
        "reward_models": [row for row, run in zip(rows, runs, strict=True) if run.trains_reward_model],
        "incomplete": list(incomplete),
        "problems": [{"run": run.label, **problem} for run in runs for problem in run.problems],
    }


@dataclass(frozen=True)
class Task:
    """The runs of one task; its names on the page end in `end`, which is empty if it is the only one."""

    title: str
    end: str
    policies: list[Run]
    reward_models: list[Run]


def by_task(runs: Sequence[Run]) -> list[Task]:
    """Split the runs by task."""
    titles = list(dict.fromkeys(run.task for run in sorted(runs, key=lambda run: run.trains_reward_model)))
    return [
        Task(
            title,
            f"-{number}" if len(titles) > 1 else "",
            *([run for run in runs if (run.task, run.trains_reward_model) == (title, kind)] for kind in (False, True)),
        )
        for number, title in enumerate(titles, start=1)
    ]


def figures(run: Run, fronts: Mapping[str, Sequence[str]] | None = None) -> Row:
    """The figures of a policy, or of a reward model, by their titles; None if missing from its results.

    Args:
        fronts: by the run's label, the trade-offs on whose Pareto front it may be, given its intervals.
    """
    found = run.results
    if run.trains_reward_model:
        pairs, order = found.pairs, found.true_order
        return {
            "accuracy": estimate(pairs),
            "n": pairs and pairs.n,
            "accuracy, true order": estimate(order),
            "labels, true order": order and order.label_agreement,
            "mean margin": pairs and pairs.margin,
            "NLL (nats)": pairs and pairs.nll,
            "Brier": pairs and pairs.brier,
            "ECE": pairs and pairs.ece,
        }
    half, agreed = (estimate(found.win_rate and getattr(found.win_rate, rule)) for rule in ("half", "agreed"))
    accuracy, ranked, kl = _accuracy(run), _pair_accuracy(run), estimate(found.kl)
    gain, policy = estimate(found.score and found.score.gain), (found.generations or {}).get("policy")
    rewards = {f"gain in {name}": estimate(reward.gain) for name, reward in (found.rewards or {}).items()}
    n = next((one.n for one in (half, *accuracy.values(), gain, *rewards.values(), kl) if one and one.n), None)
    return {
        **accuracy,
        HALF: half,
        "n": n,
        "win rate, ties dropped": agreed,
        "n without ties": agreed and agreed.n,
        "judge errors": (found.win_rate and found.win_rate.n_errors) or None,
        f"gain in {run.score_name}": gain,
        KL: kl,
        "n of the KL": kl.n if kl and kl.n != n else None,
        "accuracy on held-out pairs": ranked,
        "n pairs": ranked and ranked.n,
        "tokens": policy and policy.mean_tokens,
        FRONT: "; ".join((fronts or {}).get(run.label, ())),
        **rewards,
    }


def task_figures(run: Run) -> dict[str, dict[str, Estimate | None]]:
    """The metrics of `trl-ext evaluate`, by task and name."""
    return {task: {name: estimate(one) for name, one in own.items()} for task, own in run.results.tasks.items()}


def estimate(part: results.Estimate | None) -> Estimate | None:
    """An estimate of a results.json; None if it is missing or covers no rows."""
    if part is None or part.value is None or part.n == 0:
        return None
    return Estimate(part.value, part.low, part.high, part.n)


def trade_offs(runs: Iterable[Run]) -> dict[str, list[Row]]:
    """For each kind of reward, the policies that have it and a KL: `run`, `setting`, estimates `kl` and `reward`."""
    points: dict[str, list[Row]] = {}
    for run in runs:
        own = {} if run.trains_reward_model else figures(run)
        rewards = {f"{run.score_name} gain": own.pop(f"gain in {run.score_name}", None), HALF: own.get(HALF)}
        for name, reward in (rewards | {name: own[name] for name in own if name.startswith("gain in ")}).items():
            if reward is not None and own[KL] is not None:
                setting = run.results.run.model, run.task
                point = {"run": run.label, "setting": setting, "kl": own[KL], "reward": reward}
                points.setdefault(name, []).append(point)
    return points


def fronts_by_run(runs: Iterable[Run]) -> dict[str, list[str]]:
    """By label, the trade-offs on whose Pareto front a run may be, given its intervals."""
    fronts: dict[str, list[str]] = {}
    for name, points in trade_offs(runs).items():
        for label in pareto_front(points):
            fronts.setdefault(label, []).append(name)
    return fronts


def pareto_front(points: Iterable[Mapping[str, Any]]) -> set[str]:
    """Runs not dominated (at least the reward, at most the KL, better in one) by any of the same model and data.

    One run dominates another only if this holds everywhere in their intervals: its lowest reward is at least the
    other's highest, and its highest KL at most the other's lowest. A figure without an interval is its own interval.
    All figures are rounded as printed.
    """

    def rounded(point: Mapping[str, Any], name: str) -> tuple[float, float, float]:
        """The value, and the bounds of its interval."""
        value, low, high = (getattr(point[name], key) for key in ("value", "low", "high"))
        known = low is not None and high is not None
        return tuple(round(one, DECIMALS[name]) for one in ((value, low, high) if known else (value,) * 3))

    def dominates(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
        (kl, _, kl_high), (other_kl, other_kl_low, _) = (rounded(point, "kl") for point in (one, other))
        (reward, low, _), (other_reward, _, other_high) = (rounded(point, "reward") for point in (one, other))
        better = kl < other_kl or reward > other_reward
        return one["setting"] == other["setting"] and kl_high <= other_kl_low and low >= other_high and better

    points = list(points)
    return {point["run"] for point in points if not any(dominates(other, point) for other in points)}


def _accuracy(run: Run) -> dict[str, Estimate | None]:
    """Accuracy by decoding; an untrained model was evaluated with only one."""
    reasoning = run.results.reasoning
    found = {name: one.accuracy for name, one in reasoning.after.items()} if reasoning else {}
    if reasoning and reasoning.accuracy:
        is_greedy = (run.results.run.sampling or {}).get("temperature") == 0
        found["greedy" if is_greedy else "sampled"] = reasoning.accuracy
    return {f"accuracy, {name}": estimate(found.get(name)) for name in ("sampled", "greedy")}


def _pair_accuracy(run: Run) -> Estimate | None:
    """Share of held-out pairs ranked as labelled by the log-ratio; None for an unchanged model, where all are ties."""
    after = run.results.preferences and run.results.preferences.after
    ranking = after and after.reference_corrected
    known = ranking and ranking.ties != after.n
    return Estimate(ranking.value, ranking.low, ranking.high, after.n) if known else None
