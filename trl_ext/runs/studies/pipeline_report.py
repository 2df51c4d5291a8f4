"""The pipeline's report: tables of the stages above the report of their runs, and a plot of reward against KL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trl_ext.evaluation.command_line import format_table
from trl_ext.evaluation.report import write_report
from trl_ext.evaluation.reporting.plots import distances, new_figure, save_figure, share_legend
from trl_ext.evaluation.reporting.summary import pareto_front
from trl_ext.evaluation.reporting.tables import Table
from trl_ext.evaluation.statistics.intervals import Estimate
from trl_ext.files import read_json
from trl_ext.runs.finish import drawing
from trl_ext.runs.studies.pipeline import SFT, Pipeline, RLHFArguments
from trl_ext.runs.studies.pipeline_evaluation import ADVERSARIAL, HELD_OUT

TITLES = {HELD_OUT: "Held-out prompts", ADVERSARIAL: "Adversarial prompts"}
TRUE_SCORE = "true score"
PICTURE_NAME = "pareto.png"
FAMILIES = "stages-families"
SAMPLED = (
    "One response per prompt, sampled at temperature 1. Brackets hold 95% intervals, std is over responses. KL is the "
    "approximate divergence from the SFT model in nats per response."
)


def write_pipeline_report(given: RLHFArguments, pipeline: Pipeline, summary: Mapping[str, Any]) -> list[str]:
    """Write report.html, report.md and pareto.png into the pipeline's folder; return the files' names."""
    folder = Path(given.output_dir)
    pictures = {}
    with drawing(PICTURE_NAME):
        plot_pareto(summary, folder / PICTURE_NAME)
        pictures["Reward against KL from the SFT model, held-out prompts"] = (folder / PICTURE_NAME).read_bytes()
    tables = [*_model_tables(summary), _mistake_table(summary), *_sample_tables(summary), _stage_table(pipeline)]
    runs = [stage.folder for stage in pipeline.stages]
    write_report(runs, folder / "report.html", stages=tables, pictures=pictures)
    return ["report.html", "report.md", *([PICTURE_NAME] if pictures else []), "evaluation/"]


def print_tables(summary: Mapping[str, Any]) -> None:
    """Print the models' figures on both sets of prompts."""
    for table in _model_tables(summary):
        # Families are too many for a terminal.
        if table.name == FAMILIES:
            continue
        print(f"\n{table.title}\n{format_table(table.columns, table.texts())}")


# ---- Tables ----


def _model_tables(summary: Mapping[str, Any]) -> list[Table]:
    tables = []
    for name, found in summary["prompts"].items():
        rows = [
            {"model": row["name"], **_figures(row), "KL to SFT (nats per response)": _estimate(row["kl"])}
            for row in found["models"]
        ]
        tables.append(Table(f"stages-{name}", TITLES[name], SAMPLED, rows))
        rows = [
            {"family": family, "model": row["name"], **_figures(row)}
            for family, models in found["families"].items()
            for row in models
        ]
        if rows:
            note = f"{SAMPLED} The true score is that of the benchmark's instruction in the prompt, if there is one."
            tables.append(Table(FAMILIES, "Adversarial prompts by family", note, rows))
    return tables


def _figures(row: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a model by column."""
    figures = {"n": row["n"]}
    for name, one in row["rewards"].items():
        figures |= {f"reward, {name}": _estimate(one), f"std, {name}": one["std"]}
    true = row["true_score"]
    return figures | {TRUE_SCORE: _estimate(true), "n graded": true and true["n"], "tokens": row["tokens"]["mean"]}


def _estimate(found: Mapping[str, Any] | None) -> Estimate | None:
    return found and Estimate(found["mean"], found["low"], found["high"])


def _mistake_table(summary: Mapping[str, Any]) -> Table:
    texts = {"prompt": "prompt_text", "chosen": "chosen_text", "rejected": "rejected_text"}
    rows = [
        {"reward model": name, "margin": row["margin"]} | {column: row[key] for column, key in texts.items()}
        for name, found in summary["mistakes"].items()
        for row in found
    ]
    note = "Held-out pairs that a reward model ranks most clearly against their label."
    return Table("stages-mistakes", "Worst mistakes of the reward models", note, rows)


def _sample_tables(summary: Mapping[str, Any]) -> list[Table]:
    tables = []
    for name, found in summary["prompts"].items():
        rows = [
            {"prompt": sample["prompt_text"], "model": model, "response": sample["response_text"]}
            | {f"reward, {key}": value for key, value in sample["rewards"].items()}
            | {TRUE_SCORE: sample["true_score"]}
            for samples in zip(*found["samples"].values(), strict=True)
            for model, sample in zip(found["samples"], samples, strict=True)
        ]
        note = f"All of them are in evaluation/samples_{name}_*.jsonl."
        tables.append(Table(f"stages-samples-{name}", f"Samples, {TITLES[name].lower()}", note, rows))
    return tables


def _stage_table(pipeline: Pipeline) -> Table:
    rows = []
    for stage in pipeline.stages:
        run = read_json(stage.folder / "results.json")["run"]
        about = {"stage": stage.name, "objective": str(run.get("objective")), "steps": run.get("optimizer_steps")}
        seconds = {"training (s)": run.get("training_seconds"), "in all (s)": run.get("total_seconds")}
        rows.append(about | seconds)
    return Table("stages-runs", "Runs of the stages", "Each is a run of one recipe in its own folder.", rows)


# ---- The plot ----


def pareto_points(models: Sequence[Mapping[str, Any]], what: str) -> list[dict[str, Any]]:
    """The SFT model, at KL 0 from itself, and the policies, by KL and by `what`: a reward model, or `true score`.

    The base is left out, since no policy started from it.

    Returns:
        By ascending KL: `run`, the estimates `kl` and `reward`, and `on_front`: whether no other has at least its
        reward at no more KL.
    """
    points = []
    for row in models:
        reward = row["true_score"] if what == TRUE_SCORE else row["rewards"].get(what)
        kl = Estimate(0.0, 0.0, 0.0) if row["name"] == SFT else _estimate(row["kl"])
        if row["name"] != "base" and reward is not None and kl is not None:
            points.append({"run": row["name"], "setting": (), "kl": kl, "reward": _estimate(reward)})
    front = pareto_front(points, intervals=False)
    points = [{**point, "on_front": point["run"] in front} for point in points]
    return sorted(points, key=lambda point: point["kl"].value)


def plot_pareto(summary: Mapping[str, Any], path: str | Path) -> None:
    """Draw reward against KL on the held-out prompts, one panel for each reward model and for the true score."""
    models = summary["prompts"][HELD_OUT]["models"]
    panels = {name: pareto_points(models, name) for name in (*models[0]["rewards"], TRUE_SCORE)}
    panels = {name: points for name, points in panels.items() if points}
    drawing, axes = new_figure(1, max(len(panels), 2))
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    colors = {row["name"]: f"C{index}" for index, row in enumerate(models)}
    for axis, (name, points) in zip(axes, panels.items(), strict=False):
        axis.set_title(name if name == TRUE_SCORE else f"reward, {name}")
        axis.set_xlabel("KL from the SFT model (nats per response)")
        front = [(point["kl"].value, point["reward"].value) for point in points if point["on_front"]]
        axis.plot(*zip(*front, strict=True), color="grey", linestyle="--", linewidth=1, label="Pareto front")
        for point in points:
            kl, reward = point["kl"], point["reward"]
            errors = {"xerr": distances(kl), "yerr": distances(reward), "fmt": "o", "capsize": 3}
            style = {"fillstyle": "full" if point["on_front"] else "none", "color": colors[point["run"]]}
            axis.errorbar(kl.value, reward.value, **errors, **style, label=point["run"])
        axis.grid(alpha=0.3)
    share_legend(drawing, axes, loc="outside lower center", ncols=1 + len(models))
    save_figure(drawing, path)
