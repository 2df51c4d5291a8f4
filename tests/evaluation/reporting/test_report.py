"""The report of runs: every figure in it is in a run's files, and no text of a model becomes markup."""

from __future__ import annotations

import base64
import fnmatch
import hashlib
import json
import re
import tomllib
from html import escape
from pathlib import Path

import pytest

from tests.support import REPOSITORY
from tests.support.files import read_rows, write_rows
from tests.support.report_runs import (
    BASE,
    HOSTILE,
    TIE,
    Page,
    change,
    report,
    write_example,
    write_policy,
    write_two_tasks,
)
from trl_ext.evaluation import plot_run, write_report
from trl_ext.evaluation.report import main
from trl_ext.evaluation.reporting import plots
from trl_ext.evaluation.reporting.page import embed
from trl_ext.evaluation.reporting.summary import over_seeds, pareto_front
from trl_ext.files import markdown_line

PACKAGE = REPOSITORY / "trl_ext"


def numbers_in(value) -> set[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return {number for entry in value for number in numbers_in(entry)}
    return {float(value)} if isinstance(value, (int, float)) and not isinstance(value, bool) else set()


@pytest.fixture(scope="module")
def example(tmp_path_factory) -> Path:
    return write_example(tmp_path_factory.mktemp("example") / "runs")


@pytest.fixture(scope="module")
def page(example) -> Page:
    return report(example)[1]


@pytest.fixture(scope="module")
def markdown(page, example) -> str:
    return (example.parent / "report.md").read_text(encoding="utf-8")


class TestFigures:
    def test_every_figure_of_a_table_is_in_the_runs_files(self, page, example):
        """Derived are only how many of something there are, and whether a run is on the front."""
        known = set()
        for folder in example.iterdir():
            known |= numbers_in(json.loads((folder / "results.json").read_text()))
            for name in ("metrics.jsonl", "reward_mistakes.jsonl"):
                if (folder / name).exists():
                    known |= numbers_in(read_rows(folder / name))
        cells = [cell for rows in page.tables.values() for row in rows for cell in row if cell[1] is not None]
        assert len(cells) > 100
        assert {value for _, value in cells if float(value) not in known} <= {"0.0", "1.0"}
        for text, value in cells:
            for shown in re.findall(r"-?\d+\.\d+", re.sub(r"^judge-rm|\([+-][\d.]+\)", "", text))[:1]:
                digits = len(shown.partition(".")[2])
                assert shown == f"{float(value):.{digits}f}", f"{text} is not {value}"

    @pytest.mark.parametrize(
        ("table", "column", "expected"),
        [
            ("policies", "run", ["alpha", "beta", "gamma"]),
            ("policies", "win rate, ties as half", ["0.625 [0.515, 0.695]"]),
            ("policies", "win rate, ties dropped", ["0.667 [0.557, 0.737]"]),
            ("policies", "n without ties", ["3", "3", "4"]),
            ("policies", "gain in true score", ["0.250 [0.220, 0.280]", "0.125 [0.095, 0.155]"]),
            ("policies", "gain in learned reward", ["judge-rm 0.250 [0.125, 0.375]"]),
            ("policies", "n", ["4", "4", "4"]),
            ("policies", "KL to the base (nats per response)", ["1.50 [1.30, 1.70]"]),
            ("trade-offs", "KL to the base (nats per response)", ["1.50 [1.30, 1.70]"]),
            ("policies", "accuracy on held-out pairs", ["0.750 [0.410, 0.930]"]),
            ("policies", "n pairs", ["8", "8", "8"]),
            ("reward-models", "accuracy", ["0.625 [0.310, 0.860]"]),
            ("reward-models", "accuracy, true order", ["0.714 [0.360, 0.920]"]),
            ("kinds", "all prompts", ["0.750 (+0.250)", "0.625 (+0.125)", "0.875 (+0.375)"]),
            ("kinds", "kind: say", ["0.625 (+0.125)"] * 3),
        ],
    )
    def test_the_tables_by_hand(self, page, table, column, expected):
        """Alpha: two wins, one tie, one loss: (2 + 1/2) / 4 = .625 and 2/3; .625 - .11 = .515, .625 + .07 = .695."""
        assert page.column(table, column)[: len(expected)] == expected

    def test_ties_alone_are_no_rate_without_ties(self, tmp_path):
        write_policy(tmp_path / "even", outcomes=(TIE,) * 4)
        row = write_report(tmp_path, tmp_path / "report.html")["policies"][0]
        assert row["win_rate"]["agreed"] is None and row["win_rate"]["half"]["value"] == 0.5

    def test_each_figure_has_its_n_and_identical_responses_are_said(self, tmp_path):
        """Without win rates, the n of the gain; of the KL if it is another; the base's responses, to all but one."""
        for name, responses in (("same", tuple(BASE)), ("other", (*BASE[:3], "no"))):
            run = write_policy(tmp_path / "runs" / name, responses=responses)
            for keys, to in {("win_rate",): None, ("score", "gain", "n"): 64, ("kl", "n"): 16}.items():
                change(run, *keys, to=to)
        _, page = report(tmp_path / "runs")
        assert (page.column("policies", "n"), page.column("policies", "n of the KL")) == (["64"] * 2, ["16"] * 2)
        says = "All 4 responses of same are identical to its base's."
        assert [text.count("identical") for text in (page.source, (tmp_path / "report.md").read_text())] == [1, 1]
        assert escape(says) in page.source

    def test_markdown_has_the_tables(self, markdown):
        assert re.findall(r"^## (.*)$", markdown, re.M) == [
            "Policies",
            "Settings and times of the policies",
            "Reward against KL",
            "Length and diversity of the responses",
            "True score by kind of prompt",
            "Reward models",
            "Settings and times of the reward models",
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
        kl, reward = {"value": kl, **ends[0]}, {"value": reward, **ends[1]}
        return {"run": run, "setting": setting, "kl": kl, "reward": reward}

    @pytest.mark.parametrize("intervals", [False, True])
    @pytest.mark.parametrize(
        ("points", "front"),
        [
            # b has more reward than c at less KL; d has as much as b at more; e has another base: nothing beats it.
            ([("a", 1, 0.2), ("b", 2, 0.5), ("c", 3, 0.4), ("d", 2.5, 0.5), ("e", 9, 0.1, "other")], {"a", "b", "e"}),
            ([("a", 1, 1), ("b", 1, 1)], {"a", "b"}),
            # a and b both read 0.200 at KL 1.00, so both stay; c reads 0.199, below both; d reads 0.201 and 1.01.
            (
                [("a", 1.001, 0.2001), ("b", 1.002, 0.1999), ("c", 0.999, 0.1994), ("d", 1.006, 0.2009)],
                {"a", "b", "d"},
            ),
        ],
    )
    def test_pareto_front_by_hand(self, points, front, intervals):
        """A figure without an interval is its own interval."""
        assert pareto_front([self.point(*point) for point in points], intervals=intervals) == front

    def test_the_front_of_intervals_by_hand(self):
        """Half-widths of .25 in KL and .125 in reward, so that one must be better by .5 and by .25 to dominate.

        a at (1, .5). b at (2, .375) is worse by 1 and .125: within the intervals of the reward, so it stays. c at
        (1.25, .125) is worse by .25 and .375: within those of the KL, so it stays. d at (2, .25) is worse by 1 and
        .25, where the intervals touch; e at (3, 0) is far worse. By the figures only a is left.
        """
        places = {"a": (1.0, 0.5), "b": (2.0, 0.375), "c": (1.25, 0.125), "d": (2.0, 0.25), "e": (3.0, 0.0)}
        points = [self.point(name, *place, half_widths=(0.25, 0.125)) for name, place in places.items()]
        assert pareto_front(points, intervals=True) == {"a", "b", "c"}
        assert pareto_front(points, intervals=False) == {"a"}

    def test_front_of_the_example(self, page, markdown):
        """Gains .25, .125, .375 at KL 1.5, 2.5, 2.5, to .03 and .2: alpha has more than beta at less KL in any case.

        Of the figures, beta has less than gamma at the same KL as well. In the learned reward, to .125, alpha's lowest
        gain of .125 is below beta's highest of .25, so that beta may be on the front.
        """
        columns = ("reward", "run", "may be on the Pareto front", "front of the figures")
        rows = zip(*(page.column("trade-offs", name) for name in columns), strict=True)
        told = {row[:2]: row[2:] for row in rows}
        assert told["gain in judge-rm", "beta"] == ("yes", "no")
        assert told["true score gain", "beta"] == ("no", "no")
        assert told["true score gain", "alpha"] == told["true score gain", "gamma"] == ("yes", "yes")
        assert all("A run may be on the Pareto front unless the intervals" in text for text in (page.source, markdown))

    def test_methods_stay_together_in_the_order_of_their_first_runs(self, tmp_path):
        """By path dpo, aot, dpo: the second dpo follows the first, in every table and chart."""
        for name, method in (("seed-1-b", "aot"), ("seed-1-a", "dpo"), ("seed-2-a", "dpo")):
            write_policy(tmp_path / "runs" / name, objective=method, seed=int(name[5]))
        summary, page = report(tmp_path / "runs")
        expected = ["seed-1-a", "seed-2-a", "seed-1-b"]
        assert [row["run"] for row in summary["policies"]] == [run["label"] for run in page.data["runs"]] == expected

    def test_over_seeds_by_hand(self, tmp_path):
        """Gains .1, .2, .6: mean .3. A second run of seed 2 does not count again; one seed alone makes no row."""
        for name, seed, gain in (("a", 0, 0.1), ("b", 1, 0.2), ("c", 2, 0.6), ("d", 2, 9.0)):
            write_policy(tmp_path / name, seed=seed, gain=gain)
        write_policy(tmp_path / "e", objective="aot")
        rows = write_report(tmp_path, tmp_path / "report.html")["methods"]
        assert [(row["method"], row["runs"]) for row in rows] == [("dpo", ["a", "b", "c"])]
        assert rows[0]["score_gain"] == {"mean": pytest.approx(0.3), "low": 0.1, "high": 0.6, "n": 3}
        assert over_seeds([]) == []


class TestTasks:
    def test_each_has_its_own_tables_and_charts(self, tmp_path, capsys):
        _, page = report(write_two_tasks(tmp_path / "runs"))
        assert page.data["tasks"] == {"-1": "Preferences on pairs", "-2": "Verified problems on pairs"}
        assert page.column("policies-1", "run") == ["a-dpo", "c-grpo"]
        assert page.column("policies-1", "gain in true score") == ["0.250 [0.220, 0.280]"] * 2
        assert page.column("policies-2", "run") == ["b-sum", "d-sum"]
        assert page.column("policies-2", "accuracy, sampled") == ["0.750 [0.500, 0.875]"] * 2
        assert len(page.charts("true score")) == len(page.charts("accuracy")) == 2, "over steps and over seconds"
        assert [row.get("aria-label", "")[:5] for row in page.charts("Gain in accuracy")] == ["b-sum", "d-sum", ""]
        links = [attributes["href"] for _, attributes in page.tags if attributes.get("href", "").startswith("#")]
        assert len(page.ids) == len(set(page.ids))
        assert {"#task-1", "#summary-2", "#generations"} <= set(links) <= {f"#{name}" for name in page.ids}
        headings = re.findall(r"^#+ .*$", (tmp_path / "report.md").read_text(encoding="utf-8"), re.M)
        place = headings.index("## Verified problems on pairs")
        assert headings[1:3] == ["## Preferences on pairs", "### Policies"] and headings[place + 1] == "### Policies"
        main([str(tmp_path / "runs"), "--out", str(tmp_path / "again.html")])
        printed = capsys.readouterr().out
        assert printed.index("Policies: Preferences on pairs") < printed.index("Policies: Verified problems on pairs")


def test_a_run_without_figures_leaves_no_empty_section_and_no_empty_panel(tmp_path, capsys):
    """A run of two steps on data without held-out rows has one row of metrics."""
    metrics = [{"step": 2, "seconds": 1.8, "train_loss": 0.69, "entropy": 1.5, "rewards/margins": 0.0}]
    run = {"objective": "dpo (beta 0.1)", "model": "small", "dataset": "/home/me/pairs", "optimizer_steps": 2}
    results = dict.fromkeys(("win_rate", "score", "rewards", "preferences", "kl", "generations"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "results.json").write_text(json.dumps({"run": run, **results}))
    write_rows(tmp_path / "run" / "metrics.jsonl", metrics)
    main([str(tmp_path), "--out", str(tmp_path / "report.html")])
    page = Page(tmp_path / "report.html")
    assert [a["id"] for tag, a in page.tags if tag == "section"] == ["summary"]
    assert list(page.tables) == ["table-policies-settings"] and "<figure>" not in page.source
    assert capsys.readouterr().out.startswith("These runs have no figures of held-out rows: ")
    plot_run(metrics, {"run": run, "win_rate": None}, tmp_path / "report.png")
    assert not (tmp_path / "report.png").exists()
    assert plots.run_title(run) == "dpo (beta 0.1), model small, data pairs"


class TestUntrustedText:
    def test_names_of_runs_and_methods_are_text_in_charts_and_tables(self, tmp_path):
        """As the name of a folder, an objective, a model, a reward and a kind of prompt."""
        bad = '"><script>window.pwned = 1<\u2215script>'
        run = write_policy(tmp_path / "runs" / bad, objective=bad)
        results = json.loads((run / "results.json").read_text())
        results["run"]["model"] = results["run"]["dataset"] = bad
        results["rewards"] = {bad: results["rewards"]["judge-rm"]}
        results["score"]["by_kind"] = {bad: {"policy": 1.0}}
        (run / "results.json").write_text(json.dumps(results))
        write_policy(tmp_path / "runs" / "other", objective="aot")
        write_rows(run / "metrics.jsonl", [{"step": step, f"eval_rewards/{bad}/mean": 1.0} for step in (1, 2)])
        _, page = report(tmp_path / "runs")
        assert [tag for tag, _ in page.tags].count("script") == 2
        assert len(page.charts(escape(f"reward, {bad}"))) == 1

    def test_texts_come_back_as_they_were(self, page):
        data = page.data["generations"]
        prompt, outcome, base, response = data["rows"]["alpha"][3]
        row_id, text, kind = data["prompts"][prompt]
        assert (row_id, data["texts"][text], data["kinds"][kind], outcome) == ("row-3", HOSTILE, "say", "win")
        assert data["texts"][response[0]] == data["texts"][data["bases"][base][0]] == HOSTILE
        assert HOSTILE in page.column("mistakes", "prompt")
        assert page.column("policies", "method")[2] == "grpo <b>"

    def test_embedded_json(self):
        value = {"a</script>": ["<!--", "\u2028\u2029", "{{style}}", "]]>", "\\u003c", "\x00"]}
        source = embed(value)
        assert not set(source) & set("<>&\u2028\u2029") and json.loads(source) == value

    def test_markdown_stays_text(self, markdown):
        assert not re.search(r"(?<!\\)[<>]|(?<!\\)!\[|(?<!\\)`", markdown)
        assert not set(markdown) & set("\u2028\u2029")
        assert markdown_line("Commit: 1fc 2:3 a@b $5 ~x :up: http://a.b") == (
            "Commit: 1fc 2:3 a&#64;b &#36;5 &#126;x &#58;up: http&#58;//a.b"
        )
        assert markdown_line("a|b\n<c> [d](e) *f* &amp;") == r"a&#124;b &lt;c\> \[d\]\(e\) \*f\* &amp;amp;"

    def test_nothing_but_the_pages_own_script_and_style_may_run_or_load(self, page):
        tags = [tag for tag, _ in page.tags]
        assert (tags.count("script"), tags.count("form")) == (2, 1)
        assert not {"img", "b", "iframe", "textarea", "object"} & set(tags)
        assert not [attributes for _, attributes in page.tags if any(name.startswith("on") for name in attributes)]
        policy = next(a["content"] for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")

        def digest(text: str) -> str:
            return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

        assert dict(rule.split(" ", 1) for rule in policy.split("; ")) == {
            "default-src": "'none'",
            "script-src": digest(page.texts["script"][1]),
            "style-src": digest(page.texts["style"][0]),
            "img-src": "data:",
            "base-uri": "'none'",
            "form-action": "'none'",
        }
        links = [a.get("src") or a.get("href") or "" for _, a in page.tags if "src" in a or "href" in a]
        assert all(link.startswith("#") or link == "data:," for link in links)
        assert not [a for _, a in page.tags if "style" in a], "the policy would ignore it"


class TestGenerations:
    def test_shared_texts_are_held_once_and_figures_by_row(self, page):
        """Three runs of the same four prompts."""
        data = page.data["generations"]
        assert len(data["texts"]) == len(set(data["texts"]))
        assert (len(data["prompts"]), len(data["bases"])) == (4, 4)
        assert (data["kinds"], data["left_out"]) == (["name", "say", "sort"], 0)
        _, outcome, base, response = data["rows"]["beta"][2]
        assert (outcome, response[1:]) == ("loss", [7, 0.625, 1, [["judge-rm", 1.75]]])
        assert data["bases"][base][1:] == [6, 0.5, None, [["judge-rm", 1.5]]]

    def test_a_limit_of_prompts_is_said(self, example, tmp_path):
        write_report(example, tmp_path / "report.html", max_prompts=2)
        data = Page(tmp_path / "report.html").data["generations"]
        assert (len(data["prompts"]), data["left_out"]) == (2, 2)
        assert all(row[0] < 2 for rows in data["rows"].values() for row in rows)
        assert "Sort 2 1." not in data["texts"]


def test_assets_are_in_the_package():
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["trl_ext"]
    folder = PACKAGE / "evaluation" / "reporting" / "assets"
    assets = [path.relative_to(PACKAGE).as_posix() for path in folder.iterdir()]
    assert len(assets) >= 3
    assert all(any(fnmatch.fnmatch(asset, pattern) for pattern in patterns) for asset in assets)
