"""The picture of a run: what it logged over its steps, and how it compares with its base."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from trl_ext.files import replacing

STEPS = "optimizer step"
# Draws one panel into the axis that it is given.
Draw = Callable[[Any], None]
# Panel title -> label of each curve -> metric name in the run's metrics.
PREFERENCE_PANELS = {
    "Loss": {"train": "loss", "held out": "eval_loss"},
    "Reward margin": {"train": "rewards/margins", "held out": "eval_rewards/margins"},
    "Preference accuracy": {"train": "rewards/accuracies", "held out": "eval_rewards/accuracies"},
    "KL to the base (nats per response)": {"sampled responses": "kl"},
    "Response length (tokens)": {"policy": "completions/mean_length"},
}
KTO_PANELS = {
    **PREFERENCE_PANELS,
    "KL to the base (nats per response)": {"sampled responses": "sampled_kl", "the loss's estimate": "kl"},
}
del KTO_PANELS["Preference accuracy"]
ONLINE_PANELS = {
    "Reward of the rollouts": {"mean": "reward", "lowest": "reward_min", "highest": "reward_max"},
    "KL to the base (nats per response)": {"held-out prompts": "eval_kl"},
    "Entropy (nats per token)": {"rollouts": "entropy"},
    "Response length (tokens)": {"rollouts": "completions/mean_length", "held out": "eval_completions/mean_length"},
    "Shares of the rollouts": {
        "cut at the limit": "completions/clipped_ratio",
        "groups without signal": "frac_reward_zero_std",
        "tokens clipped": "clip_ratio/region_mean",
    },
    "Gradient norm": {"train": "grad_norm"},
}
# Letters of a title that fit into an inch at matplotlib's default size.
LETTERS_PER_INCH = 11
# Drawn where an ensemble logs it.
_ENSEMBLE_PANEL = {"Disagreement of the ensemble (std)": {"rollouts": "ensemble_std"}}


def plot_run(
    metrics: Sequence[dict[str, Any]],
    results: dict[str, Any],
    path: str | Path,
    panels: dict[str, dict[str, str]] = PREFERENCE_PANELS,
) -> None:
    """Draw the panels' metrics over steps, and the win rates with their intervals, into a PNG.

    Where the run evaluated reward functions on held-out prompts, a first panel shows them beside the known score, so
    that a learned reward which rises while the score falls is seen. A panel without a curve of two points is left
    out, and without any panel no file is written.

    Args:
        metrics: rows of a run's `metrics.jsonl`.
        results: its `results.json`.
        path: where to write; replaced atomically.
        panels: title -> label of each curve -> metric name.

    Raises:
        ImportError: matplotlib is missing; the message names the extra to install.
    """
    if any("ensemble_std" in row for row in metrics):
        panels = {**panels, **_ENSEMBLE_PANEL}
    learned = sorted({name for row in metrics for name in row if _is_held_out_reward(name)})
    drawn = [partial(_draw_overoptimization, learned=learned, metrics=metrics)] if learned else []
    drawn += curve_panels(panels, metrics)
    if results.get("win_rate"):
        drawn.append(partial(_draw_win_rates, win_rate=results["win_rate"]))
    save_panels(drawn, path, *run_titles(results.get("run", {})))


def run_titles(run: Mapping[str, Any]) -> list[str]:
    """What was run, with and without its settings."""
    objective, model, data = (str(run.get(name, "")) for name in ("objective", "model", "dataset"))
    of = f"model {model}, data {Path(data).name if Path(data).is_absolute() else data}"
    return [f"{name}, {of}" for name in (objective, objective.split(" (")[0])]


def curve_panels(
    panels: Mapping[str, Mapping[str, str]], metrics: Sequence[Mapping[str, Any]], x_label: str = STEPS
) -> list[Draw]:
    """What draws each panel of which some metric was logged twice, so that there is a curve."""
    times = Counter(name for row in metrics for name, value in row.items() if value is not None)
    return [
        partial(draw_curves, title=title, curves=curves, metrics=metrics, x_label=x_label)
        for title, curves in panels.items()
        if any(times[name] > 1 for name in curves.values())
    ]


def save_panels(drawn: Sequence[Draw], path: str | Path, *titles: str) -> None:
    """Draw panels, from the fourth on in two rows, into a PNG under the first title that fits; no file without any.

    Raises:
        ImportError: matplotlib is missing; the message names the extra to install.
    """
    if not drawn:
        return
    rows = 1 if len(drawn) < 4 else 2
    figure, axes = new_figure(rows, -(-len(drawn) // rows))
    for axis, draw in zip(axes, drawn, strict=False):
        draw(axis)
    for axis in axes[len(drawn) :]:
        axis.set_axis_off()
    letters = int(figure.get_figwidth() * LETTERS_PER_INCH)
    fitting = [title for title in titles if len(title) <= letters]
    figure.suptitle(fitting[0] if fitting else textwrap.shorten(titles[-1], letters, placeholder="..."))
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=110)


def new_figure(rows: int, columns: int):
    """A figure that needs no display, and its axes in one list.

    Raises:
        ImportError: matplotlib is missing; the message names the extra to install.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'trl_ext[report]'") from error
    figure = Figure(figsize=(4.4 * columns, 3.5 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(rows, columns, squeeze=False).flatten())


def _is_held_out_reward(name: str) -> bool:
    return name.startswith("eval_rewards/") and name.endswith("/mean")


def _draw_overoptimization(axis, learned: Sequence[str], metrics: Sequence[dict[str, Any]]) -> None:
    """Held-out rewards on the left axis and the known score on the right one."""
    curves = {name.removeprefix("eval_rewards/").removesuffix("/mean"): name for name in learned}
    draw_curves(axis, "Learned reward and true score, held out", curves, metrics, STEPS)
    axis.set_ylabel("reward")
    scores = [(row["step"], row["eval_score"]) for row in metrics if row.get("eval_score") is not None]
    if scores:
        right = axis.twinx()
        right.plot(*zip(*scores, strict=True), color="black", linestyle="--", marker=".", label="true score")
        right.set_ylabel("true score (dashed)")


def draw_curves(
    axis, title: str, curves: Mapping[str, str], metrics: Sequence[Mapping[str, Any]], x_label: str
) -> None:
    """Draw metrics over steps into one panel, with the band from `_low` to `_high` where these were logged."""
    axis.set_title(title)
    axis.set_xlabel(x_label)
    for label, name in curves.items():
        points = [(row["step"], row[name]) for row in metrics if row.get(name) is not None]
        if points:
            axis.plot(*zip(*points, strict=True), marker="." if len(points) < 30 else None, label=label)
        band = [(row["step"], row[f"{name}_low"], row[f"{name}_high"]) for row in metrics if f"{name}_low" in row]
        if band:
            axis.fill_between(*zip(*band, strict=True), color=axis.lines[-1].get_color(), alpha=0.15)
    axis.locator_params(axis="x", nbins=8, integer=all(isinstance(row["step"], int) for row in metrics))
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)


def _draw_win_rates(axis, win_rate: dict[str, Any]) -> None:
    axis.set_title("Win rate against the base, 95% interval")
    rules = {"ties count as half": "half", "ties dropped": "agreed"}
    for position, rule in enumerate(rules.values()):
        interval = win_rate[rule]
        if interval["n"] == 0:
            axis.annotate("every comparison is a tie", (position, 0.5), ha="center", va="bottom")
            continue
        below, above = interval["rate"] - interval["low"], interval["high"] - interval["rate"]
        axis.errorbar(position, interval["rate"], yerr=[[max(below, 0)], [max(above, 0)]], fmt="o", capsize=6)
        axis.annotate(
            f"{interval['rate']:.3f} (n = {interval['n']})",
            (position, interval["rate"]),
            xytext=(10, 0),
            textcoords="offset points",
            va="center",
            # Above the dashed line, which it may cross, and below the frame.
            bbox={"color": "white", "pad": 1},
            zorder=2.2,
        )
    axis.set_xticks(range(len(rules)), list(rules))
    axis.axhline(0.5, color="grey", linestyle="--", linewidth=1)
    axis.set_xlim(-0.5, len(rules))
    axis.set_ylim(0, 1)
