"""The report of runs: every figure in it is in a run's files, no text of a model becomes markup, nothing ends it."""

from __future__ import annotations

import base64
import fnmatch
import hashlib
import json
import re
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import pytest

from trl_ext.evaluation import write_report
from trl_ext.evaluation.report import main
from trl_ext.evaluation.reporting.curves import thin
from trl_ext.evaluation.reporting.markdown import escape as escape_markdown
from trl_ext.evaluation.reporting.page import embed
from trl_ext.evaluation.reporting.runs import find_runs
from trl_ext.evaluation.reporting.summary import over_seeds, pareto_front

REPOSITORY = Path(__file__).resolve().parent.parent
HOSTILE = (
    "</script><script>window.pwned = 1</script><img src=http://127.0.0.1:9/x onerror='window.pwned = 1'>"
    '<!-- {{data}} \u2028 \u2029 ![x](http://127.0.0.1:9/y) | `tick` </textarea>\n&amp; "quoted"'
)
PROMPTS = [("Name a bird.", "name"), ("Say hi, politely.", "say"), ("Sort 2 1.", "sort"), (HOSTILE, "say")]
BASE = ["crow", "hi", "1 2 3", HOSTILE]


def interval(mean: float, half_width: float) -> dict[str, float]:
    return {"mean": mean, "low": mean - half_width, "high": mean + half_width}


def write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_policy(
    folder: Path,
    *,
    objective: str,
    responses: list[str],
    outcomes: list[str],
    seed: int = 0,
    gain: float = 0.25,
    kl: float = 1.5,
    timed: bool = True,
) -> None:
    """A policy's run of four prompts: of n outcomes, w wins and t ties, rates of (w + t / 2) / n and w / (n - t)."""
    folder.mkdir(parents=True)
    wins, ties, n = outcomes.count("candidate"), outcomes.count("tie"), len(outcomes)
    rates = {"half": (wins + ties / 2) / n, "agreed": wins / max(n - ties, 1)}
    results = {
        "run": {
            "objective": objective,
            "model": "small",
            "dataset": "pairs",
            "training_seconds": 12.3,
            "total_seconds": 15.7,
            "optimizer_steps": 40,
            "seed": seed,
            "processes": 1,
            "device": "cpu",
        },
        "win_rate": {
            rule: {"rate": rate, "low": rate - 0.11, "high": rate + 0.07, "n": n if rule == "half" else n - ties}
            for rule, rate in rates.items()
        },
        "score": {
            "policy": 0.5 + gain,
            "base": 0.5,
            "gain": interval(gain, 0.03),
            "by_kind": {"say": {"policy": 0.625, "base": 0.5}},
        },
        "rewards": {"judge-rm": {"policy": 1.75, "base": 1.5, "gain": interval(gain, 0.125)}},
        "preferences": {
            "after": {"n": 8, "reference_corrected": {"accuracy": 0.75, "low": 0.41, "high": 0.93, "ties": 0}}
        },
        "kl": {**interval(kl, 0.2), "n": n},
        "generations": {
            source: {
                "mean_tokens": tokens,
                "distinct_1": 0.31,
                "distinct_2": 0.52,
                "repetition": 0.1,
                "collapsed": False,
            }
            for source, tokens in (("policy", 10.5), ("base", 14.25))
        },
    }
    (folder / "results.json").write_text(json.dumps(results))
    held_out = [
        {"step": step, "kl": kl * step / 40, "win_rate": 0.5 + step / 200, "score": 0.5, "collapsed": 0.0}
        for step in (0, 20, 40)
    ]
    training = [{"step": step, "loss": 0.7 - step / 100, "grad_norm": 1.25} for step in (10, 20, 30, 40)]
    metrics = sorted(held_out + training, key=lambda row: row["step"])
    write_rows(folder / "metrics.jsonl", [{**row, "seconds": row["step"] * 3.5} if timed else row for row in metrics])
    rows = zip(PROMPTS, responses, BASE, outcomes, strict=True)
    write_rows(
        folder / "generations.jsonl",
        [
            {
                "row_id": f"row-{index}",
                "prompt_text": prompt,
                "kind": kind,
                "response_text": response,
                "base_response_text": base,
                "generated_num_tokens": 5 + index,
                "base_generated_num_tokens": 6,
                "finished": index != 2,
                "base_finished": True,
                "outcome": outcome,
                "score": 0.625,
                "base_score": 0.5,
                "reward/judge-rm": 1.75,
                "base_reward/judge-rm": 1.5,
            }
            for index, ((prompt, kind), response, base, outcome) in enumerate(rows)
        ],
    )


def write_reward_model(folder: Path) -> None:
    folder.mkdir(parents=True)
    bins = [(0.5, 0.55, 3, 0.53, 0.333), (0.55, 0.6, 0, None, None), (0.95, 1.0, 5, 0.97, 0.8)]
    results = {
        "run": {
            "objective": "Bradley-Terry",
            "model": "small",
            "dataset": "pairs",
            "weights": "checkpoint-20",
            "optimizer_steps": 20,
            "seed": 7,
            "training_seconds": 8.1,
            "total_seconds": 9.2,
        },
        "pairs": {
            "n": 8,
            "accuracy": 0.625,
            "low": 0.31,
            "high": 0.86,
            "ties": 0,
            "margin": 0.44,
            "nll": 0.61,
            "brier": 0.21,
            "ece": 0.18,
            "calibration": [
                dict(zip(("low", "high", "n", "confidence", "accuracy"), row, strict=True)) for row in bins
            ],
        },
        "true_order": {"n": 7, "ties": 1, "accuracy": 0.714, "low": 0.36, "high": 0.92, "label_agreement": 0.857},
    }
    (folder / "results.json").write_text(json.dumps(results))
    logged = [(10, 4.0, 0.66, 0.6), (20, 7.5, 0.62, 0.63)]
    names = ("step", "seconds", "loss", "accuracy")
    write_rows(folder / "metrics.jsonl", [dict(zip(names, row, strict=True)) for row in logged])
    mistake = {"prompt_text": HOSTILE, "chosen_text": HOSTILE, "rejected_text": "fine", "row_id": "r"}
    write_rows(
        folder / "reward_mistakes.jsonl",
        [{**mistake, "chosen_score": -1.5, "rejected_score": 2.25, "margin": -3.75}],
    )


def write_example(folder: Path) -> Path:
    """Three policies and a reward model.

    Outcomes by prompt: alpha win, tie, loss, win; beta win, win, loss, tie; gamma loss, win, loss, win.
    """
    candidate, tie, base = "candidate", "tie", "base"
    write_policy(
        folder / "alpha",
        objective="dpo (beta 0.1)",
        responses=["wren", "hi", "2 1", HOSTILE],
        outcomes=[candidate, tie, base, candidate],
        gain=0.25,
        kl=1.5,
    )
    write_policy(
        folder / "beta",
        objective="aot (beta 0.1)",
        responses=["robin", "Please, hi.", "2 1", "no"],
        outcomes=[candidate, candidate, base, tie],
        gain=0.125,
        kl=2.5,
    )
    write_policy(
        folder / "gamma",
        objective="grpo <b> (beta 0.02)",
        responses=["rook rook", "Kindly, hi.", "2 1", ""],
        outcomes=[base, candidate, base, candidate],
        gain=0.375,
        kl=2.5,
        timed=False,
    )
    write_reward_model(folder / "rm")
    return folder


class Page(HTMLParser):
    """A parsed page: its tags with their attributes, the text of each script, and the cells of each table."""

    def __init__(self, source: str):
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {"script": [], "style": []}
        self.tables: dict[str, list[list[tuple[str, str | None]]]] = {}
        self.inside: str | None = None
        self.table: list[list[tuple[str, str | None]]] | None = None
        self.feed(source)
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
            self.table[-1].append(("", attributes.get("data-value")))

    def handle_endtag(self, tag):
        if tag != "span":
            self.inside = None
        if tag == "table":
            self.table = None

    def handle_data(self, data):
        if self.inside in self.texts:
            self.texts[self.inside][-1] += data
        elif self.inside in ("td", "th", "button") and self.table:
            text, value = self.table[-1][-1]
            self.table[-1][-1] = (text + data, value)

    @property
    def data(self):
        return json.loads(self.texts["script"][0])

    def column(self, table: str, title: str) -> list[str]:
        head, *rows = self.tables[table]
        index = [text for text, _ in head].index(title)
        return [row[index][0] for row in rows]


def numbers_in(value) -> set[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return {number for entry in value for number in numbers_in(entry)}
    return {float(value)} if isinstance(value, (int, float)) and not isinstance(value, bool) else set()


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


@pytest.fixture(scope="module")
def example(tmp_path_factory) -> Path:
    return write_example(tmp_path_factory.mktemp("example") / "runs")


@pytest.fixture(scope="module")
def html(example, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("report") / "report.html"
    write_report(example, out)
    return out


@pytest.fixture(scope="module")
def page(html) -> Page:
    return Page(html.read_text(encoding="utf-8"))


class TestFigures:
    def test_every_figure_of_a_table_is_in_the_runs_files(self, page, example):
        """Derived are only how many of something there are, and whether a run is on the front."""
        known = set()
        for folder in example.iterdir():
            known |= numbers_in(json.loads((folder / "results.json").read_text()))
            for name in ("metrics.jsonl", "reward_mistakes.jsonl"):
                if (folder / name).exists():
                    known |= numbers_in(rows_of(folder / name))
        cells = [cell for rows in page.tables.values() for row in rows for cell in row if cell[1] is not None]
        assert len(cells) > 150
        assert {value for _, value in cells if float(value) not in known} <= {"0.0", "1.0"}
        for text, value in cells:
            for shown in re.findall(r"-?\d+\.\d+", re.sub(r"^judge-rm|\([+-][\d.]+\)", "", text))[:1]:
                digits = len(shown.partition(".")[2])
                assert shown == f"{float(value):.{digits}f}", f"{text} is not {value}"

    def test_the_summary_by_hand(self, page):
        """Alpha: two wins, one tie, one loss: (2 + 1/2) / 4 = .625 and 2/3; .625 - .11 = .515, .625 + .07 = .695."""
        assert page.column("table-policies", "run") == ["alpha", "beta", "gamma"]
        assert page.column("table-policies", "win rate, ties as half")[0] == "0.625 [0.515, 0.695]"
        assert page.column("table-policies", "win rate, ties dropped")[0] == "0.667 [0.557, 0.737]"
        assert page.column("table-policies", "n without ties") == ["3", "3", "4"]
        assert page.column("table-policies", "gain in true score")[1] == "0.125 [0.095, 0.155]"
        assert page.column("table-policies", "gain in learned reward")[0] == "judge-rm 0.250 [0.125, 0.375]"
        assert page.column("table-policies", "KL to the base (nats)")[0] == "1.50 [1.30, 1.70]"
        assert page.column("table-reward-models", "accuracy") == ["0.625 [0.310, 0.860]"]
        assert page.column("table-reward-models", "accuracy, true order") == ["0.714 [0.360, 0.920]"]
        assert page.column("table-kinds", "all prompts") == ["0.750 (+0.250)", "0.625 (+0.125)", "0.875 (+0.375)"]
        assert page.column("table-kinds", "kind: say") == ["0.625 (+0.125)"] * 3

    def test_curves_are_the_rows_of_the_metrics(self, page, example):
        panels = {panel["title"]: panel["curves"] for panel in page.data["panels"]}
        rows = rows_of(example / "alpha" / "metrics.jsonl")
        expected = {
            "win rate, ties as half": "win_rate",
            "KL to the base (nats per response)": "kl",
            "loss, dpo": "loss",
            "gradient norm": "grad_norm",
        }
        for title, key in expected.items():
            assert panels[title]["alpha"] == [[r["step"], r["seconds"], r[key]] for r in rows if key in r], title
        assert [point[1] for point in panels["loss, grpo <b>"]["gamma"]] == [None] * 4
        assert [run["label"] for run in page.data["runs"] if not run["timed"]] == ["gamma"]
        assert panels["accuracy"] == {"rm": [[10, 4.0, 0.6], [20, 7.5, 0.63]]}

    def test_an_online_run_logs_both_its_rollouts_and_its_evaluations(self, tmp_path):
        """`kl` of a training step is per token and of rollouts, and is no KL of held-out responses; `eval_kl` is.

        What is left of the last rollouts is logged behind the last evaluation, in the row of the run's times and
        without a `loss`: their response length of 10, for one, is no held-out one.
        """
        write_policy(tmp_path / "run", objective="grpo", responses=["a", "b", "c", "d"], outcomes=["candidate"] * 4)
        evaluated = {"eval_kl": 0.75, "eval_collapsed": 0.0, "eval_rewards/rm/mean": 2.5}
        rollouts = {
            "kl": 0.01,
            "collapsed": 0.0,
            "rewards/rm/mean": 9.0,
            "reward": 9.0,
            "completions/mean_length": 10.0,
        }
        write_rows(
            tmp_path / "run" / "metrics.jsonl",
            [
                {"step": 0, **evaluated},
                {"step": 1, "loss": 0.5, **rollouts},
                {"step": 2, **evaluated},
                {"step": 2, "train_runtime": 4.0, "train_loss": 0.5, **rollouts},
            ],
        )
        write_report(tmp_path, tmp_path / "report.html")
        page = Page((tmp_path / "report.html").read_text())
        panels = {panel["title"]: panel["curves"]["run"] for panel in page.data["panels"]}
        assert panels == {
            "KL to the base (nats per response)": [[0, None, 0.75], [2, None, 0.75]],
            "reward, rm": [[0, None, 2.5], [2, None, 2.5]],
            "reward of the rollouts": [[1, None, 9.0], [2, None, 9.0]],
        }
        assert page.column("table-held-out", "step") == ["0", "2"]

    def test_no_loss_flattens_another(self, tmp_path):
        """Each method's loss has a panel, which its held-out rows share; norms of 0.5 and of 100 have a log axis."""
        for name, scale in (("ipo", 100), ("dpo", 1), ("dpo-2", 1)):
            outcomes = ["candidate"] * 4
            write_policy(tmp_path / name, objective=name.split("-")[0], responses=["x"] * 4, outcomes=outcomes)
            rows = [
                {"step": step, "loss": scale * 0.25, "grad_norm": scale * 0.5, "eval_loss": scale * 0.75}
                for step in (1, 2)
            ]
            write_rows(tmp_path / name / "metrics.jsonl", rows)
        write_report(tmp_path, tmp_path / "report.html")
        panels = {p["title"]: p for p in Page((tmp_path / "report.html").read_text()).data["panels"]}
        assert list(panels) == ["loss, dpo", "loss, ipo", "gradient norm, log scale"]
        assert list(panels["loss, dpo"]["curves"]) == ["dpo", "dpo-2"]
        assert panels["loss, ipo"]["held_out"] == {"ipo": [[1, None, 75.0], [2, None, 75.0]]}
        assert [panel["log"] for panel in panels.values()] == [False, False, True]

    def test_results_that_the_library_writes_are_read(self, tmp_path):
        """The comparison and the reward metrics themselves, and the win rate again from the outcomes of the rows."""
        from trl_ext.evaluation import GroundTruthJudge, compare_generations, reward_metrics, wilson_interval
        from trl_ext.rollouts import Generation

        prompts = [{"row_id": str(i), "prompt": [{"role": "user", "content": f"p{i}"}], "kind": "k"} for i in range(5)]
        scores = {"good": 1.0, "bad": 0.0}
        policy, base = (
            [Generation([0], list(range(length)), text, True) for text in texts]
            for length, texts in ((3, ["good"] * 3 + ["bad"] * 2), (2, ["bad"] * 3 + ["good", "bad"]))
        )

        def score(prompt, response, finished=True):
            return scores[response]

        comparison = compare_generations(
            prompts, policy, base, max_new_tokens=8, judge=GroundTruthJudge(score), score_function=score
        )
        pairs = reward_metrics([2.0, 1.0, 0.5], [1.0, 2.0, 0.0])
        for name, results in (
            ("policy", {"run": {"objective": "dpo"}, **comparison.summary}),
            ("rm", {"run": {"objective": "Bradley-Terry"}, "pairs": pairs}),
        ):
            (tmp_path / name).mkdir()
            (tmp_path / name / "results.json").write_text(json.dumps(results))
        write_rows(tmp_path / "policy" / "generations.jsonl", comparison.rows)
        summary = write_report(tmp_path, tmp_path / "report.html")
        outcomes = [row["outcome"] for row in comparison.rows]
        assert outcomes == ["candidate"] * 3 + ["base", "tie"]
        row = summary["policies"][0]
        low, high = wilson_interval(3, 4)
        assert row["win_rate"]["agreed"] == {"value": 0.75, "low": low, "high": high, "n": 4}
        assert row["win_rate"]["half"]["value"] == 0.7
        assert row["score_gain"]["value"] == pytest.approx((3 - 1) / 5)
        assert row["tokens"] == {"base": 2.0, "policy": 3.0}
        assert summary["reward_models"][0]["accuracy"]["value"] == pytest.approx(2 / 3)
        assert summary["reward_models"][0]["nll"] == pairs["nll"]

    def test_ties_alone_are_no_rate_without_ties(self, tmp_path):
        write_policy(tmp_path / "even", objective="dpo", responses=["a"] * 4, outcomes=["tie"] * 4)
        row = write_report(tmp_path, tmp_path / "report.html")["policies"][0]
        assert row["win_rate"]["agreed"] is None and row["win_rate"]["half"]["value"] == 0.5

    def test_markdown_has_the_tables(self, html):
        markdown = html.with_suffix(".md").read_text(encoding="utf-8")
        assert re.findall(r"^## (.*)$", markdown, re.M) == [
            "Policies",
            "Settings and times of the policies",
            "Reward against KL",
            "Length and diversity of the responses",
            "True score by kind of prompt",
            "Held-out prompts over steps",
            "Reward models",
            "Settings and times of the reward models",
            "Reliability of the reward models",
            "Worst mistakes of the reward models",
        ]
        assert "| 0.625 \\[0.515, 0.695\\] |" in markdown
        for block in re.findall(r"(?:^\|.*\n)+", markdown, re.M):
            counts = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
            assert len(counts) == 1, "every row of a table has as many cells as its head"


class TestDerived:
    def point(self, run: str, kl: float, reward: float, setting: str = "same", half_widths=(None, None)):
        ends = [
            {} if half is None else {"low": value - half, "high": value + half}
            for value, half in zip((kl, reward), half_widths, strict=True)
        ]
        return {
            "run": run,
            "setting": setting,
            "kl": {"value": kl, **ends[0]},
            "reward": {"value": reward, **ends[1]},
        }

    @pytest.mark.parametrize("intervals", [False, True])
    def test_pareto_front_by_hand(self, intervals):
        """b has more reward than c at less KL; d has as much as b at more; e has another base, so nothing beats it.

        A figure without an interval is its own interval.
        """
        points = [
            self.point("a", 1.0, 0.2),
            self.point("b", 2.0, 0.5),
            self.point("c", 3.0, 0.4),
            self.point("d", 2.5, 0.5),
            self.point("e", 9.0, 0.1, "other"),
        ]
        assert pareto_front(points, intervals=intervals) == {"a", "b", "e"}
        equal = [self.point("a", 1, 1), self.point("b", 1, 1)]
        assert pareto_front(equal, intervals=intervals) == {"a", "b"}, "equals both stay"

    def test_figures_that_are_printed_alike_are_equal(self):
        """a and b both read 0.200 at KL 1.00, so both stay; c reads 0.199, below both; d reads 0.201 and 1.01."""
        points = [
            self.point("a", 1.001, 0.2001),
            self.point("b", 1.002, 0.1999),
            self.point("c", 0.999, 0.1994),
            self.point("d", 1.006, 0.2009),
        ]
        for intervals in (False, True):
            assert pareto_front(points, intervals=intervals) == {"a", "b", "d"}

    def test_the_front_of_intervals_by_hand(self):
        """Half-widths of .25 in KL and .125 in reward, so that one must be better by .5 and by .25 to dominate.

        a at (1, .5). b at (2, .375) is worse by 1 and .125: within the intervals of the reward, so it stays. c at
        (1.25, .125) is worse by .25 and .375: within those of the KL, so it stays. d at (2, .25) is worse by 1 and
        .25, where the intervals touch; e at (3, 0) is far worse. f and g are equal. By the figures only a is left.
        """
        half = {"half_widths": (0.25, 0.125)}
        points = [
            self.point("a", 1.0, 0.5, **half),
            self.point("b", 2.0, 0.375, **half),
            self.point("c", 1.25, 0.125, **half),
            self.point("d", 2.0, 0.25, **half),
            self.point("e", 3.0, 0.0, **half),
        ]
        assert pareto_front(points, intervals=True) == {"a", "b", "c"}
        assert pareto_front(points, intervals=False) == {"a"}
        touching = [self.point("f", 1, 1, half_widths=(0.0, 0.0)), self.point("g", 1, 1, half_widths=(0.0, 0.0))]
        assert pareto_front(touching, intervals=True) == {"f", "g"}

    def test_front_of_the_example(self, page, html):
        """Gains .25, .125, .375 at KL 1.5, 2.5, 2.5, to .03 and .2: alpha has more than beta at less KL in any case.

        Of the figures, beta has less than gamma at the same KL as well. In the learned reward, to .125, alpha's lowest
        gain of .125 is below beta's highest of .25, so that beta may be on the front.
        """
        charts = {chart["title"]: chart["points"] for chart in page.data["trade_offs"]}

        def marked(chart: str, key: str) -> set[str]:
            return {point["run"] for point in charts[chart] if point[key]}

        assert marked("true score gain", "front") == marked("true score gain", "best") == {"alpha", "gamma"}
        assert marked("gain in judge-rm", "front") == {"alpha", "beta", "gamma"}
        assert marked("gain in judge-rm", "best") == {"alpha", "gamma"}
        rows = zip(*(page.column("table-trade-offs", name) for name in ("reward", "run")), strict=True)
        fronts = zip(
            *(
                page.column("table-trade-offs", name)
                for name in ("may be on the Pareto front", "front of the figures")
            ),
            strict=True,
        )
        told = dict(zip(rows, fronts, strict=True))
        assert told["gain in judge-rm", "beta"] == ("yes", "no")
        assert told["true score gain", "beta"] == ("no", "no")
        for text in (html.read_text(encoding="utf-8"), html.with_suffix(".md").read_text(encoding="utf-8")):
            assert (
                "A run may be on the Pareto front unless the intervals of another of the same model and data" in text
            )

    def test_shares_without_an_interval_get_wilsons(self, tmp_path):
        """5 of 8 right: z^2 = 3.8415; centre (.625 + z^2/16) / (1 + z^2/8) = .8651/1.4802 = .5845, half-width
        1.96 sqrt(.625 * .375 / 8 + z^2 / 256) / 1.4802 = 1.96 * .2104 / 1.4802 = .2786: [.3057, .8632]."""
        write_reward_model(tmp_path / "rm")
        results = json.loads((tmp_path / "rm" / "results.json").read_text())
        del results["pairs"]["low"], results["pairs"]["high"]
        (tmp_path / "rm" / "results.json").write_text(json.dumps(results))
        row = write_report(tmp_path, tmp_path / "report.html")["reward_models"][0]
        assert (row["accuracy"]["low"], row["accuracy"]["high"]) == pytest.approx((0.3057, 0.8632), abs=1e-4)

    def test_bins_of_the_reliability_have_wilsons_interval(self, page):
        """4 of 5 right: centre (.8 + z^2/10) / (1 + z^2/5) = 1.1841/1.7683 = .6697, half-width
        1.96 sqrt(.16 / 5 + z^2 / 100) / 1.7683 = 1.96 * .2653 / 1.7683 = .2941: [.376, .964]."""
        assert page.column("table-reliability", "accuracy")[1] == "0.800 [0.376, 0.964]"
        confidence, accuracy, pairs, low, high = page.data["reliability"][0]["bins"][1]
        assert (confidence, accuracy, pairs) == (0.97, 0.8, 5)
        assert (low, high) == pytest.approx((0.376, 0.964), abs=5e-4)

    def test_the_picture_of_a_reward_model_has_the_intervals(self, tmp_path, monkeypatch):
        """A line for each bin that holds pairs, from its lower to its upper end, and the accuracy with its own."""
        from trl_ext.evaluation import plot_reward_run, plots

        drawn = []
        figure = plots.new_figure
        monkeypatch.setattr(plots, "new_figure", lambda *size: drawn.append(figure(*size)) or drawn[-1])
        write_reward_model(tmp_path / "rm")
        pairs = json.loads((tmp_path / "rm" / "results.json").read_text())["pairs"]
        plot_reward_run([], pairs, [], tmp_path / "report.png")
        (axis,) = drawn[0][1]
        assert axis.get_title().startswith("Reliability"), "what has no data has no panel"
        lines = [
            segment for lines in axis.collections if hasattr(lines, "get_segments") for segment in lines.get_segments()
        ]
        assert [segment[0][0] for segment in lines] == [0.53, 0.97]
        assert [end for _, end in lines[1]] == pytest.approx([0.376, 0.964], abs=5e-4)
        assert "accuracy 0.625 [0.310, 0.860], n = 8" in axis.texts[0].get_text()

    def test_methods_stay_together_in_the_order_of_their_first_runs(self, tmp_path):
        """By path dpo, aot, dpo: the second dpo follows the first, in every table and chart."""
        for name, method in (("seed-1-b", "aot"), ("seed-1-a", "dpo"), ("seed-2-a", "dpo")):
            write_policy(
                tmp_path / name, objective=method, responses=["x"] * 4, outcomes=["candidate"] * 4, seed=int(name[5])
            )
        summary = write_report(tmp_path, tmp_path / "report.html")
        assert [row["run"] for row in summary["policies"]] == ["seed-1-a", "seed-2-a", "seed-1-b"]
        page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
        assert [run["label"] for run in page.data["runs"]] == ["seed-1-a", "seed-2-a", "seed-1-b"]

    def test_over_seeds_by_hand(self, tmp_path):
        """Gains .1, .2, .6: mean .3. A second run of seed 2 does not count again; one seed alone makes no row."""
        for name, seed, gain in (("a", 0, 0.1), ("b", 1, 0.2), ("c", 2, 0.6), ("d", 2, 9.0)):
            write_policy(
                tmp_path / name, objective="dpo", responses=["x"] * 4, outcomes=["candidate"] * 4, seed=seed, gain=gain
            )
        write_policy(tmp_path / "e", objective="aot", responses=["x"] * 4, outcomes=["candidate"] * 4)
        rows = write_report(tmp_path, tmp_path / "report.html")["methods"]
        assert [(row["method"], row["runs"]) for row in rows] == [("dpo", ["a", "b", "c"])]
        assert rows[0]["score_gain"] == {"mean": pytest.approx(0.3), "low": 0.1, "high": 0.6, "n": 3}
        assert over_seeds([]) == []

    def test_thinning_keeps_ends_and_extremes(self):
        """1000 points thinned to 10: first, last, and the lowest and highest of 4 stretches of 998 / 4 points."""
        points = [(step, None, float((step * 37) % 1000)) for step in range(1000)]
        points[500] = (500, None, 1e6)
        thinned = thin(points, 10)
        assert len(thinned) == 10
        assert thinned[0] == points[0] and thinned[-1] == points[-1]
        assert (500, None, 1e6) in thinned
        assert min(points[1:250], key=lambda point: point[2]) in thinned
        assert thinned == sorted(thinned) and set(thinned) <= set(points)
        assert thin(points[:10], 10) == points[:10]


def write_two_tasks(folder: Path) -> Path:
    """Two runs on preferences and two on verified problems of data with the same name, as both embedded sets have."""
    for name, objective in (("a-dpo", "dpo"), ("b-sum", "grpo"), ("c-grpo", "grpo"), ("d-sum", "sft")):
        write_policy(folder / "runs" / name, objective=objective, responses=["x"] * 4, outcomes=["candidate"] * 4)
        if name.endswith("sum"):
            results = json.loads((folder / "runs" / name / "results.json").read_text())
            accuracy = {"accuracy": {"mean": 0.75, "low": 0.5, "high": 0.875, "n": 4}}
            results |= {"win_rate": None, "kl": None, "rewards": None}
            results["reasoning"] = {"before": {"sampled": accuracy}, "after": {"sampled": accuracy}}
            (folder / "runs" / name / "results.json").write_text(json.dumps(results))
    write_report(folder / "runs", folder / "report.html")
    return folder


@pytest.fixture(scope="module")
def two_tasks(tmp_path_factory) -> Path:
    return write_two_tasks(tmp_path_factory.mktemp("tasks"))


class TestTasks:
    def test_each_has_its_own_tables_and_charts(self, two_tasks):
        page = Page((two_tasks / "report.html").read_text(encoding="utf-8"))
        assert page.data["tasks"] == {"-1": "Preferences on pairs", "-2": "Verified problems on pairs"}
        assert page.column("table-policies-1", "run") == ["a-dpo", "c-grpo"]
        assert page.column("table-policies-1", "gain in true score") == ["0.250 [0.220, 0.280]"] * 2
        assert page.column("table-policies-2", "run") == ["b-sum", "d-sum"]
        assert page.column("table-policies-2", "accuracy, sampled") == ["0.750 [0.500, 0.875]"] * 2
        for name in ("panels", "dots", "trade_offs"):
            for chart in page.data[name]:
                runs = chart.get("curves") or [row["run"] for row in chart.get("rows") or chart["points"]]
                assert set(runs) <= {"-1": {"a-dpo", "c-grpo"}, "-2": {"b-sum", "d-sum"}}[chart["task"]], name
        names = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
        assert len(names) == len(set(names))
        links = [attributes["href"] for _, attributes in page.tags if attributes.get("href", "").startswith("#")]
        assert {"#task-1", "#summary-2", "#generations"} <= set(links)
        assert {link[1:] for link in links} <= set(names)
        assert {chart["place"] + chart["task"] for chart in page.data["dots"]} <= set(names)

    def test_in_the_markdown_and_the_terminal(self, two_tasks, capsys):
        markdown = (two_tasks / "report.md").read_text(encoding="utf-8")
        headings = re.findall(r"^#+ .*$", markdown, re.M)
        place = headings.index("## Verified problems on pairs")
        assert headings[1:3] == ["## Preferences on pairs", "### Policies"] and headings[place + 1] == "### Policies"
        main([str(two_tasks / "runs"), "--out", str(two_tasks / "again.html")])
        printed = capsys.readouterr().out
        assert printed.index("Policies: Preferences on pairs") < printed.index("Policies: Verified problems on pairs")

    def test_one_alone_has_no_index(self, page, html):
        assert page.data["tasks"] == {"": "Preferences on pairs"}
        assert "Preferences on pairs" not in re.sub(r"<script.*?</script>", "", html.read_text(), flags=re.S)


class TestNothingToShow:
    """A run of two steps on data without held-out rows: one row of metrics, and no figures."""

    METRICS = ({"step": 2, "seconds": 1.8, "train_loss": 0.69, "entropy": 1.5, "rewards/margins": 0.0},)

    def test_the_report_has_no_empty_section(self, tmp_path, capsys):
        (tmp_path / "run").mkdir()
        run = {"objective": "dpo (beta 0.1)", "model": "small", "dataset": "pairs", "optimizer_steps": 2}
        results = dict.fromkeys(("win_rate", "score", "rewards", "preferences", "kl", "generations"))
        (tmp_path / "run" / "results.json").write_text(json.dumps({"run": run, **results}))
        write_rows(tmp_path / "run" / "metrics.jsonl", self.METRICS)
        main([str(tmp_path), "--out", str(tmp_path / "report.html")])
        page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
        assert [a["id"] for tag, a in page.tags if tag == "section"] == ["summary"]
        assert list(page.tables) == ["table-policies-settings"] and not page.data["panels"]
        assert capsys.readouterr().out.startswith("These runs have no figures of held-out rows: ")

    def test_the_picture_has_no_empty_panel(self, tmp_path, monkeypatch):
        """The title leaves the settings out where they are too long for the one panel, and the folder of the data."""
        from trl_ext.evaluation import plot_run, plots

        drawn = []
        figure = plots.new_figure
        monkeypatch.setattr(plots, "new_figure", lambda *size: drawn.append(figure(*size)) or drawn[-1])
        run = {"objective": f"dpo ({'long ' * 9})", "model": "small", "dataset": "/home/me/pairs"}
        plot_run(self.METRICS, {"run": run, "win_rate": None}, tmp_path / "report.png")
        assert not drawn and not (tmp_path / "report.png").exists()
        losses = [{"step": step, "loss": 0.5} for step in (1, 2)]
        plot_run([*losses, *self.METRICS], {"run": run, "win_rate": None}, tmp_path / "report.png")
        ((picture, axes),) = drawn
        assert [axis.get_title() for axis in axes] == ["Loss"]
        assert picture.get_suptitle() == "dpo, model small, data pairs"


class TestUntrustedText:
    def test_the_page_has_only_its_own_elements(self, page):
        tags = [tag for tag, _ in page.tags]
        assert tags.count("script") == 2
        assert tags.count("form") == 1
        assert not {"img", "b", "iframe", "textarea", "object"} & set(tags)
        assert not [attributes for _, attributes in page.tags if any(name.startswith("on") for name in attributes)]

    def test_texts_come_back_as_they_were(self, page):
        data = page.data["generations"]
        assert HOSTILE in data["texts"]
        prompt, response, base, figures = data["rows"]["alpha"][3]
        row_id, text, kind = data["prompts"][prompt]
        assert (row_id, data["texts"][text], data["kinds"][kind]) == ("row-3", HOSTILE, "say")
        assert (data["texts"][response], data["texts"][base]) == (HOSTILE, HOSTILE)
        assert figures["outcome"] == "win"
        assert HOSTILE in page.column("table-mistakes", "prompt")
        assert page.column("table-policies", "method")[2] == "grpo <b>"

    def test_embedded_json(self):
        value = {"a</script>": ["<!--", "\u2028\u2029", "{{style}}", "]]>", "\\u003c", "\x00"]}
        source = embed(value)
        assert not set(source) & set("<>&\u2028\u2029")
        assert json.loads(source) == value

    def test_markdown_stays_text(self, html):
        markdown = html.with_suffix(".md").read_text(encoding="utf-8")
        assert not re.search(r"(?<!\\)[<>]|(?<!\\)!\[|(?<!\\)`", markdown)
        assert not set(markdown) & set("\u2028\u2029")
        assert escape_markdown("a|b\n<c> [d](e) *f* &amp;") == r"a\|b &lt;c\> \[d\]\(e\) \*f\* &amp;amp;"

    def test_nothing_but_the_pages_own_script_and_style_may_run_or_load(self, page):
        policy = next(a["content"] for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
        rules = dict(rule.split(" ", 1) for rule in policy.split("; "))

        def digest(text: str) -> str:
            return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

        assert rules == {
            "default-src": "'none'",
            "script-src": digest(page.texts["script"][1]),
            "style-src": digest(page.texts["style"][0]),
            "img-src": "data:",
            "base-uri": "'none'",
            "form-action": "'none'",
        }
        links = [a.get("src") or a.get("href") or "" for _, a in page.tags if "src" in a or "href" in a]
        assert all(link.startswith("#") or link == "data:," for link in links)

    def test_half_a_surrogate_pair_is_written(self, tmp_path):
        write_policy(tmp_path / "run", objective="dpo", responses=["\ud83d"] * 4, outcomes=["candidate"] * 4)
        write_report(tmp_path, tmp_path / "report.html")
        data = Page((tmp_path / "report.html").read_text(encoding="utf-8")).data
        assert "?" in data["generations"]["texts"]


class TestGenerations:
    def test_shared_texts_are_held_once(self, page):
        data = page.data["generations"]
        assert len(data["texts"]) == len(set(data["texts"]))
        assert len(data["prompts"]) == 4, "three runs of the same four prompts"
        assert data["kinds"] == ["name", "say", "sort"]
        assert data["left_out"] == 0

    def test_figures_by_row(self, page):
        assert page.data["generations"]["rows"]["beta"][2][3] == {
            "outcome": "loss",
            "tokens": 7,
            "base_tokens": 6,
            "score": 0.625,
            "base_score": 0.5,
            "cut": True,
            "rewards": {"judge-rm": [1.75, 1.5]},
        }

    def test_a_limit_of_prompts_is_said(self, example, tmp_path):
        write_report(example, tmp_path / "report.html", max_prompts=2)
        data = Page((tmp_path / "report.html").read_text(encoding="utf-8")).data["generations"]
        assert (len(data["prompts"]), data["left_out"]) == (2, 2)
        assert all(row[0] < 2 for rows in data["rows"].values() for row in rows)
        assert "Sort 2 1." not in data["texts"]

    def test_kinds_of_the_embedded_benchmark_are_known(self, tmp_path):
        """Its rows do not carry them; a prompt that is none of the benchmark's has none."""
        (tmp_path / "run").mkdir()
        results = {"run": {"objective": "dpo", "dataset": "toy"}}
        (tmp_path / "run" / "results.json").write_text(json.dumps(results))
        rows = [{"row_id": p, "prompt_text": p, "response_text": "x"} for p in ("Sort these numbers: 3 1 2.", "What?")]
        write_rows(tmp_path / "run" / "generations.jsonl", rows)
        write_report(tmp_path, tmp_path / "report.html")
        data = Page((tmp_path / "report.html").read_text(encoding="utf-8")).data["generations"]
        assert (data["kinds"], [prompt[2] for prompt in data["prompts"]]) == (["sort"], [0, None])


class TestFindingRuns:
    def test_labels_are_the_shortest_ends_that_differ(self, tmp_path):
        for path in ("one/aot", "two/aot", "two/dpo", "two/aot-10", "two/aot-9", "two/checkpoint-5/x", "two/.hidden"):
            (tmp_path / path).mkdir(parents=True)
            (tmp_path / path / "results.json").write_text('{"run": {}}')
        runs, incomplete = find_runs([tmp_path, tmp_path / "two"])
        assert [run.label for run in runs] == ["one/aot", "two/aot", "aot-9", "aot-10", "dpo"]
        assert incomplete == []

    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            ("{", "results.json is damaged: Expecting property name"),
            ("[1]", "results.json has no `run`"),
            ('{"run": 3}', "results.json has no `run`"),
            ("[" * 100_000, "results.json is damaged"),
            ('{"a": ' + "9" * 5000 + "}", "results.json is damaged"),
        ],
    )
    def test_damaged_results_are_listed(self, example, tmp_path, content, reason):
        (tmp_path / "bad").mkdir()
        (tmp_path / "bad" / "results.json").write_text(content)
        summary = write_report([example, tmp_path / "bad"], tmp_path / "report.html")
        assert [row["run"] for row in summary["incomplete"]] == ["bad"]
        assert summary["incomplete"][0]["reason"].startswith(reason)
        page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
        assert page.column("table-incomplete", "run") == ["bad"]

    def test_results_of_any_shape_are_read(self, tmp_path):
        """Wherever a dictionary or a number should be, something else."""
        shapes = ["text", 3, None, [], {}, True, {"mean": "x", "rate": [], "low": float("nan")}, {"half": 1}, [[]]]
        for index, shape in enumerate(shapes):
            keys = ("win_rate", "score", "rewards", "preferences", "kl", "generations", "true_order", "reasoning")
            results = {"run": {"objective": shape, "model": shape, "seed": shape}, **dict.fromkeys(keys, shape)}
            for name, more in (("policy", {}), ("rm", {"pairs": shape}), ("rm2", {"pairs": {"calibration": shape}})):
                folder = tmp_path / f"{index}-{name}"
                folder.mkdir()
                (folder / "results.json").write_text(json.dumps({**results, **more}))
                for file in ("metrics.jsonl", "generations.jsonl", "reward_mistakes.jsonl"):
                    (folder / file).write_text(json.dumps(shape))
        summary = write_report(tmp_path, tmp_path / "report.html")
        assert (len(summary["policies"]), len(summary["reward_models"])) == (9, 18)
        assert Page((tmp_path / "report.html").read_text(encoding="utf-8")).data["panels"] == []

    def test_damaged_lines_are_left_out_and_said(self, tmp_path):
        write_policy(tmp_path / "run", objective="dpo", responses=["x"] * 4, outcomes=["candidate"] * 4)
        with (tmp_path / "run" / "metrics.jsonl").open("ab") as file:
            file.write(b'{"step": 41, "loss": NaN}\n{"loss": 1}\n\xff\xfe\n{"step": 42, "lo')
        write_report(tmp_path, tmp_path / "report.html")
        text = (tmp_path / "report.html").read_text(encoding="utf-8")
        assert "3 of 11 lines cannot be read and are left out, the first is line 9; each must hold step" in text
        assert "3 of 11 lines cannot be read" in (tmp_path / "report.md").read_text(encoding="utf-8")

    def test_a_run_that_goes_on_is_incomplete(self, example, tmp_path):
        (tmp_path / "now").mkdir()
        write_rows(tmp_path / "now" / "metrics.jsonl", [{"step": 5, "loss": 1.0}, {"step": 10, "loss": 0.5}])
        (tmp_path / "begun").mkdir()
        (tmp_path / "begun" / "config.yaml").write_text("a: 1\n")
        summary = write_report([example, tmp_path], tmp_path / "report.html")
        assert [(row["run"], row["reason"]) for row in summary["incomplete"]] == [
            ("begun", "no results.json, nothing logged"),
            ("now", "no results.json, last logged at step 10"),
        ]


class TestCommand:
    def test_prints_a_table_and_names_the_files(self, example, tmp_path, capsys):
        main([str(example), "--out", str(tmp_path / "a" / "report.html")])
        printed = capsys.readouterr().out
        assert "0.625 [0.515, 0.695]" in printed and "Reward models" in printed
        assert f"{tmp_path / 'a' / 'report.html'} and {tmp_path / 'a' / 'report.md'}" in printed
        assert {path.name for path in (tmp_path / "a").iterdir()} == {"report.html", "report.md"}

    def test_json_is_the_summary(self, example, tmp_path, capsys):
        main([str(example), "--out", str(tmp_path / "report.html"), "--json"])
        summary = json.loads(capsys.readouterr().out)
        alpha = json.loads((example / "alpha" / "results.json").read_text())
        assert summary["policies"][0]["win_rate"]["half"]["value"] == alpha["win_rate"]["half"]["rate"]
        assert summary["policies"][0]["kl"]["low"] == alpha["kl"]["low"]
        assert summary["reward_models"][0]["ece"] == 0.18

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["nowhere"], "error: no folder nowhere; give folders that hold runs"),
            (["."], "error: no finished run in .: a run folder holds a results.json; begun: no results.json, nothing"),
            (["file"], "error: file is a file; give folders that hold runs"),
            ([".", "--out", "x.txt"], "error: --out x.txt: must end in .html"),
            ([".", "--max_prompts", "-1"], "error: --max_prompts must be at least 0, got -1"),
        ],
    )
    def test_errors_are_one_line(self, tmp_path, monkeypatch, capsys, arguments, message):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "begun").mkdir()
        (tmp_path / "begun" / "metrics.jsonl").write_text("")
        (tmp_path / "file").write_text("")
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        error = capsys.readouterr().err
        assert stopped.value.code == 2
        assert error.startswith(message) and error.count("\n") == 1
        assert not list(tmp_path.glob("*.html"))

    def test_loads_neither_torch_nor_matplotlib(self, example, tmp_path):
        code = (
            "import sys; from trl_ext.evaluation import write_report; "
            f"write_report({str(example)!r}, {str(tmp_path / 'report.html')!r}); "
            "print(sorted({'torch', 'transformers', 'trl', 'matplotlib', 'numpy'} & set(sys.modules)))"
        )
        assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_assets_are_in_the_package():
    patterns = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"][
        "trl_ext"
    ]
    package = REPOSITORY / "trl_ext"
    assets = [
        path.relative_to(package).as_posix() for path in (package / "evaluation" / "reporting" / "assets").iterdir()
    ]
    assert len(assets) >= 3
    for asset in assets:
        assert any(fnmatch.fnmatch(asset, pattern) for pattern in patterns), asset


def luminance(color: str) -> float:
    """Relative luminance of WCAG 2."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_colours_are_readable_in_light_and_dark():
    """WCAG AA: 4.5 for text, 3 for lines of charts. Black on white is 21."""
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    css = (REPOSITORY / "trl_ext" / "evaluation" / "reporting" / "assets" / "report.css").read_text()
    light, dark = re.findall(r":root \{([^}]*--page[^}]*)\}", css)
    for block in (light, dark):
        colors = dict(re.findall(r"--(\w+): (#[0-9a-f]{6});", block))
        for name in ("text", "faint", "link", "win", "loss", "tie"):
            assert min(contrast(colors[name], colors[ground]) for ground in ("page", "raised")) >= 4.5, name
        for index in range(10):
            assert contrast(colors[f"c{index}"], colors["page"]) >= 3, index
