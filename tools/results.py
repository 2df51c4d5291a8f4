"""Results of finished runs, in docs/results: rebuild the tables and the chart of docs/results.md, or write the runs as
folders.

    python tools/results.py
    python tools/results.py --unpack runs/published

A study is four files: `runs.jsonl` (results and configuration of each run), `metrics.jsonl`, `prompts.jsonl` (scores
and lengths of every held-out prompt) and `generations.jsonl` (the responses to ten prompts). Every row names its run,
`{method}-{seed}`. `recipes/compare.py --runs` and `trl-ext report` read the unpacked folders.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import yaml

from trl_ext.evaluation.statistics.crossed import crossed_mean

PAGE = Path(__file__).parents[1] / "docs" / "results.md"
DATA = PAGE.parent / "results"
CHART = PAGE.parent / "images" / "results.png"
BEGIN, END = "<!-- {study}: rebuilt by tools/results.py -->", "<!-- end of {study} -->"
Row = Mapping[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--unpack", metavar="FOLDER", type=Path, help="write each study's runs as folders into this one"
    )
    given = parser.parse_args()
    for folder in studies():
        if given.unpack:
            unpack(folder, given.unpack / folder.name)
            print(given.unpack / folder.name)
        else:
            PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), folder), encoding="utf-8")
    if not given.unpack:
        draw(CHART)


def studies() -> list[Path]:
    """The folders of all studies."""
    return sorted(path for path in DATA.iterdir() if path.is_dir())


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def unpack(study: Path, folder: Path) -> None:
    """Write the runs of a study as folders `{method}-{seed}`, with the texts of ten responses each."""
    for run in read(study / "runs.jsonl"):
        place = folder / run["run"]
        place.mkdir(parents=True, exist_ok=True)
        (place / "results.json").write_text(json.dumps(run["results"]), encoding="utf-8")
        (place / "config.yaml").write_text(yaml.safe_dump(run["config"], sort_keys=False), encoding="utf-8")
    texts = {(row["run"], row["row_id"]): row for row in read(study / "generations.jsonl")}
    prompts = [{**row, **texts.get((row["run"], row["row_id"]), {})} for row in read(study / "prompts.jsonl")]
    for name, rows in (("metrics", read(study / "metrics.jsonl")), ("generations", prompts)):
        for run, own in _by(rows, "run").items():
            lines = (json.dumps({key: value for key, value in row.items() if key != "run"}) for row in own)
            (folder / run / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _by(rows: Iterable[Row], name: str) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row[name], []).append(row)
    return found


# ---- The gains ----


class Gain(NamedTuple):
    """The gain in score of a method over the model before training, with its 95% interval over prompts and seeds."""

    method: str
    mean: float
    low: float
    high: float
    seeds: int
    hardware: str


def gains(study: Path) -> list[Gain]:
    """The gain of each method of a study, the largest first. Runs without held-out prompts are left out."""
    prompts = _by(read(study / "prompts.jsonl"), "run")
    runs = [run for run in read(study / "runs.jsonl") if run["run"] in prompts]
    methods = _by([{**run, "method": run["run"].rpartition("-")[0]} for run in runs], "method")
    found = []
    for method, own in methods.items():
        interval = crossed_mean(_differences([prompts[run["run"]] for run in own]))
        hardware = ", ".join(sorted({run["results"]["kept"]["processor"] for run in own}))
        found.append(Gain(method, interval.mean, interval.low, interval.high, len(own), hardware))
    return sorted(found, key=lambda gain: -gain.mean)


def _differences(runs: Sequence[Sequence[Row]]) -> numpy.ndarray:
    """Score less the score before training, [prompts, seeds]."""
    by_seed = [{row["row_id"]: row["score"] - row["base_score"] for row in rows} for rows in runs]
    return numpy.array([[own[name] for own in by_seed] for name in by_seed[0]])


# ---- The page ----


def with_table(page: str, study: Path) -> str:
    """The page with the table of a study between its two markers.

    Raises:
        ValueError: the page lacks them.
    """
    begin, end = BEGIN.format(study=study.name), END.format(study=study.name)
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{PAGE} lacks the lines {begin} and {end}, between which the table belongs")
    lines = ["| method | gain in score | 95% interval | seeds | hardware |", "|---|---|---|---|---|"]
    for method, mean, low, high, seeds, hardware in gains(study):
        lines.append(f"| `{method}` | {mean:z.3f} | {low:z.3f} to {high:z.3f} | {seeds} | {hardware} |")
    return "\n".join([f"{before}{begin}", "", *lines, "", f"{end}{after}"])


def draw(path: Path) -> None:
    """The gains with their intervals as a picture, one panel a study."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    by_study = {study.name: gains(study) for study in studies()}
    figure, panels = pyplot.subplots(1, len(by_study), figsize=(11, 5), layout="constrained")
    for panel, (name, found) in zip(panels, by_study.items(), strict=True):
        height = numpy.arange(len(found), 0, -1)
        means = numpy.array([gain.mean for gain in found])
        ends = [[gain.mean - gain.low for gain in found], [gain.high - gain.mean for gain in found]]
        panel.errorbar(means, height, xerr=ends, fmt="o", markersize=4, linewidth=1.2)
        panel.axvline(0, color="grey", linewidth=0.8)
        panel.set_yticks(height, [gain.method for gain in found])
        panel.set_title(name)
        panel.set_xlabel("gain in score, 95% interval over prompts and seeds")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
