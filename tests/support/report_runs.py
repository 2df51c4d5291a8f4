"""Run folders for the tests of the report, and its page as they read it."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

from tests.support.files import write_rows
from trl_ext.evaluation import write_report

HOSTILE = (
    "</script><script>window.pwned = 1</script><img src=http://127.0.0.1:9/x onerror='window.pwned = 1'>"
    '<!-- {{data}} \u2028 \u2029 ![x](http://127.0.0.1:9/y) | `tick` </textarea>\n&amp; "quoted"'
)
PROMPTS = [("Name a bird.", "name"), ("Say hi, politely.", "say"), ("Sort 2 1.", "sort"), (HOSTILE, "say")]
BASE = ["crow", "hi", "1 2 3", HOSTILE]
WIN, TIE, LOSS = "candidate", "tie", "base"


def interval(mean: float, half_width: float) -> dict[str, float]:
    return {"mean": mean, "low": mean - half_width, "high": mean + half_width}


def write_policy(
    folder: Path,
    *,
    objective: str = "dpo",
    responses: tuple[str, ...] = ("x",) * 4,
    outcomes: tuple[str, ...] = (WIN,) * 4,
    seed: int = 0,
    gain: float = 0.25,
    kl: float = 1.5,
) -> Path:
    """A policy's run of four prompts: of n outcomes, w wins and t ties, rates of (w + t / 2) / n and w / (n - t)."""
    folder.mkdir(parents=True)
    wins, ties, n = outcomes.count(WIN), outcomes.count(TIE), len(outcomes)
    rates = {"half": ((wins + ties / 2) / n, n), "agreed": (wins / max(n - ties, 1), n - ties)}
    texts = {"distinct_1": 0.31, "distinct_2": 0.52, "repetition": 0.1, "collapsed": False}
    ranked = {"accuracy": 0.75, "low": 0.41, "high": 0.93, "ties": 0}
    run = {"objective": objective, "model": "small", "dataset": "pairs", "training_seconds": 12.3}
    run |= {"total_seconds": 15.7, "optimizer_steps": 40, "seed": seed, "processes": 1, "device": "cpu"}
    results = {
        "run": run,
        "win_rate": {r: {"rate": x, "low": x - 0.11, "high": x + 0.07, "n": n} for r, (x, n) in rates.items()},
        "score": {"policy": 0.5 + gain, "base": 0.5, "gain": interval(gain, 0.03)}
        | {"by_kind": {"say": {"policy": 0.625, "base": 0.5}}},
        "rewards": {"judge-rm": {"policy": 1.75, "base": 1.5, "gain": interval(gain, 0.125)}},
        "preferences": {"after": {"n": 8, "reference_corrected": ranked}},
        "kl": {**interval(kl, 0.2), "n": n},
        "generations": {"policy": {"mean_tokens": 10.5, **texts}, "base": {"mean_tokens": 14.25, **texts}},
    }
    (folder / "results.json").write_text(json.dumps(results))
    held_out = [
        {"step": step, "kl": kl * step / 40, "win_rate": 0.5 + step / 200, "score": 0.5, "collapsed": 0.0}
        for step in (0, 20, 40)
    ]
    training = [{"step": step, "loss": 0.7 - step / 100, "grad_norm": 1.25} for step in (10, 20, 30, 40)]
    write_rows(folder / "metrics.jsonl", sorted(held_out + training, key=lambda row: row["step"]))
    shared = {"base_generated_num_tokens": 6, "base_finished": True, "score": 0.625, "base_score": 0.5}
    shared |= {"reward/judge-rm": 1.75, "base_reward/judge-rm": 1.5}
    rows = [
        {"row_id": f"row-{index}", "prompt_text": prompt, "kind": kind, "response_text": response, "outcome": outcome}
        | {"base_response_text": base, "generated_num_tokens": 5 + index, "finished": index != 2, **shared}
        for index, ((prompt, kind), response, base, outcome) in enumerate(
            zip(PROMPTS, responses, BASE, outcomes, strict=True)
        )
    ]
    write_rows(folder / "generations.jsonl", rows)
    return folder


def change(folder: Path, *keys: str | int, to) -> None:
    """Set the value under the keys of a run's results."""
    results = json.loads((folder / "results.json").read_text())
    inner = results
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = to
    (folder / "results.json").write_text(json.dumps(results))


def write_reward_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    bins = [(0.5, 0.55, 3, 0.53, 0.333), (0.55, 0.6, 0, None, None), (0.95, 1.0, 5, 0.97, 0.8)]
    names = ("low", "high", "n", "confidence", "accuracy")
    pairs = {"n": 8, "accuracy": 0.625, "low": 0.31, "high": 0.86, "ties": 0, "margin": 0.44}
    pairs |= {"nll": 0.61, "brier": 0.21, "ece": 0.18}
    run = {"objective": "Bradley-Terry", "model": "small", "dataset": "pairs", "weights": "checkpoint-20"}
    results = {
        "run": {**run, "optimizer_steps": 20, "seed": 7, "training_seconds": 8.1, "total_seconds": 9.2},
        "pairs": {**pairs, "calibration": [dict(zip(names, row, strict=True)) for row in bins]},
        "true_order": {"n": 7, "ties": 1, "accuracy": 0.714, "low": 0.36, "high": 0.92, "label_agreement": 0.857},
    }
    (folder / "results.json").write_text(json.dumps(results))
    logged = [{"step": 10, "loss": 0.66, "accuracy": 0.6}, {"step": 20, "loss": 0.62, "accuracy": 0.63}]
    write_rows(folder / "metrics.jsonl", logged)
    return folder


def write_example(folder: Path) -> Path:
    """Three policies and a reward model.

    Outcomes by prompt: alpha win, tie, loss, win; beta win, win, loss, tie; gamma loss, win, loss, win.
    """
    for name, objective, responses, outcomes, gain, kl in (
        ("alpha", "dpo (beta 0.1)", ("wren", "hi", "2 1", HOSTILE), (WIN, TIE, LOSS, WIN), 0.25, 1.5),
        ("beta", "aot (beta 0.1)", ("robin", "Please, hi.", "2 1", "no"), (WIN, WIN, LOSS, TIE), 0.125, 2.5),
        ("gamma", "grpo <b> (beta 0.02)", ("rook rook", "Kindly, hi.", "2 1", ""), (LOSS, WIN, LOSS, WIN), 0.375, 2.5),
    ):
        write_policy(folder / name, objective=objective, responses=responses, outcomes=outcomes, gain=gain, kl=kl)
    write_reward_model(folder / "rm")
    return folder


class Page(HTMLParser):
    """A parsed page: its tags with their attributes, the text of each script, and the cells of each table."""

    def __init__(self, path: Path):
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {"script": [], "style": []}
        self.tables: dict[str, list[list[str]]] = {}
        self.inside: str | None = None
        self.table: list[list[str]] | None = None
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.close()

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append((tag, attributes))
        if tag != "span":
            self.inside = tag
        if tag in self.texts:
            self.texts[tag].append("")
        elif tag == "table":
            self.table = self.tables[attributes["id"]] = []
        elif tag == "tr":
            self.table.append([])
        elif tag in ("td", "th"):
            self.table[-1].append("")

    def handle_endtag(self, tag):
        if tag != "span":
            self.inside = None
        if tag == "table":
            self.table = None

    def handle_data(self, data):
        if self.inside in self.texts:
            self.texts[self.inside][-1] += data
        elif self.inside in ("td", "th", "button") and self.table:
            self.table[-1][-1] += data

    @property
    def data(self):
        return json.loads(self.texts["script"][0])

    def charts(self, title: str) -> list[ElementTree.Element]:
        """The drawings of a title."""
        found = re.findall(r"<figure><figcaption>(.*?)</figcaption>(.*?)</figure>", self.source, re.S)
        return [svg for name, body in found if name == title for svg in ElementTree.fromstring(f"<f>{body}</f>")]

    def column(self, table: str, title: str) -> list[str]:
        head, *rows = self.tables[f"table-{table}"]
        index = head.index(title)
        return [row[index] for row in rows]


def report(folder: Path) -> tuple[dict[str, list[dict]], Page]:
    """Writes the report of a folder beside it; returns its summary and its page."""
    summary = write_report(folder, folder.parent / "report.html")
    return summary, Page(folder.parent / "report.html")


def write_two_tasks(folder: Path) -> Path:
    """Two runs on preferences and two on verified problems of data with the same name, as both embedded sets have."""
    accuracy = {"accuracy": {"mean": 0.75, "low": 0.5, "high": 0.875, "n": 4}}
    for name, objective in (("a-dpo", "dpo"), ("b-sum", "grpo"), ("c-grpo", "grpo"), ("d-sum", "sft")):
        run = write_policy(folder / name, objective=objective)
        if name.endswith("sum"):
            for part in ("win_rate", "kl", "rewards"):
                change(run, part, to=None)
            change(run, "reasoning", to={"before": {"sampled": accuracy}, "after": {"sampled": accuracy}})
    return folder
