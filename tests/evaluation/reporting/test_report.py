"""The report of runs: what it tells and draws is in a run's files, and no text of a model becomes markup."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from pathlib import Path

import pytest
from markupsafe import escape

from tests.support.files import read_rows, write_rows
from tests.support.report_runs import (
    BASE,
    HOSTILE,
    Page,
    change,
    report,
    write_example,
    write_policy,
    write_reward_model,
    write_two_tasks,
)
from trl_ext.evaluation import plot_run, write_report
from trl_ext.evaluation.report import main
from trl_ext.evaluation.reporting import plots
from trl_ext.evaluation.reporting.curves import panels, thin
from trl_ext.evaluation.reporting.page import embed
from trl_ext.evaluation.reporting.runs import find_runs
from trl_ext.evaluation.reporting.summary import pareto_front
from trl_ext.evaluation.reporting.tables import estimate, figure
from trl_ext.files import markdown_line


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
        known = set()
        for folder in example.iterdir():
            known |= numbers_in(json.loads((folder / "results.json").read_text()))
            for name in ("metrics.jsonl", "reward_mistakes.jsonl"):
                if (folder / name).exists():
                    known |= numbers_in(read_rows(folder / name))
        cells = [cell for rows in page.tables.values() for row in rows for cell in row if cell[1] is not None]
        assert len(cells) > 90
        assert {float(value) for _, value in cells} <= known
        for text, value in cells:
            for shown in re.findall(r"-?\d+\.\d+", re.sub(r"^judge-rm|\([+-][\d.]+\)", "", text))[:1]:
                digits = len(shown.partition(".")[2])
                assert shown == f"{float(value):.{digits}f}", f"{text} is not {value}"

    def test_the_tables_by_hand(self, page):
        """Alpha: two wins, one tie, one loss: (2 + 1/2) / 4 = .625 and 2/3; .625 - .11 = .515, .625 + .07 = .695."""
        for table, column, expected in (
            ("policies", "run", ["alpha", "beta", "gamma"]),
            ("policies", "win rate, ties as half", ["0.625 [0.515, 0.695]"]),
            ("policies", "win rate, ties dropped", ["0.667 [0.557, 0.737]"]),
            ("policies", "n without ties", ["3", "3", "4"]),
            ("policies", "gain in true score", ["0.250 [0.220, 0.280]", "0.125 [0.095, 0.155]"]),
            ("policies", "gain in learned reward", ["judge-rm 0.250 [0.125, 0.375]"]),
            ("policies", "n", ["4", "4", "4"]),
            ("policies", "KL to the base (nats per response)", ["1.50 [1.30, 1.70]"]),
            ("policies", "accuracy on held-out pairs", ["0.750 [0.410, 0.930]"]),
            ("policies", "n pairs", ["8", "8", "8"]),
            ("reward-models", "accuracy", ["0.625 [0.310, 0.860]"]),
            ("reward-models", "accuracy, true order", ["0.714 [0.360, 0.920]"]),
            ("kinds", "all prompts", ["0.750 (+0.250)", "0.625 (+0.125)", "0.875 (+0.375)"]),
            ("kinds", "kind: say", ["0.625 (+0.125)"] * 3),
        ):
            assert page.column(table, column)[: len(expected)] == expected, (table, column)

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
        assert str(escape(says)) in page.source

    def test_markdown_has_the_tables(self, markdown):
        headings = re.findall(r"^## (.*)$", markdown, re.M)
        assert len(headings) == 7 and {"Policies", "Reward models"} < set(headings)
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
        .25, where the intervals touch; e at (3, 0) is far worse. Without intervals only a is left.
        """
        places = {"a": (1.0, 0.5), "b": (2.0, 0.375), "c": (1.25, 0.125), "d": (2.0, 0.25), "e": (3.0, 0.0)}
        points = [self.point(name, *place, half_widths=(0.25, 0.125)) for name, place in places.items()]
        assert pareto_front(points, intervals=True) == {"a", "b", "c"}
        assert pareto_front(points, intervals=False) == {"a"}

    def test_front_of_the_example(self, page):
        """Gains .25, .125, .375 at KL 1.5, 2.5, 2.5, to .03 and .2: alpha has more than beta at less KL in any case.

        In the learned reward, to .125, alpha's lowest gain of .125 is below beta's highest of .25, so that beta may be
        on the front.
        """
        alpha, beta, gamma = page.column("policies", "may be on the Pareto front")
        assert alpha == gamma == "true score gain; win rate, ties as half; gain in judge-rm"
        assert beta == "win rate, ties as half; gain in judge-rm"
        assert "unless the intervals of another run of the same model and data dominate" in page.source


class TestTasks:
    def test_each_has_its_own_tables_and_charts(self, tmp_path, capsys):
        _, page = report(write_two_tasks(tmp_path / "runs"))
        assert page.data["tasks"] == {"-1": "Preferences on pairs", "-2": "Verified problems on pairs"}
        assert page.column("policies-1", "run") == ["a-dpo", "c-grpo"]
        assert page.column("policies-1", "gain in true score") == ["0.250 [0.220, 0.280]"] * 2
        assert page.column("policies-2", "run") == ["b-sum", "d-sum"]
        assert page.column("policies-2", "accuracy, sampled") == ["0.750 [0.500, 0.875]"] * 2
        assert len(page.charts("true score")) == len(page.charts("accuracy")) == 1
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
    metrics = [{"step": 2, "train_loss": 0.69, "entropy": 1.5, "rewards/margins": 0.0}]
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
        assert len(page.charts(html.escape(f"reward, {bad}"))) == 1

    def test_texts_come_back_as_they_were(self, page):
        data = page.data["generations"]
        prompt, outcome, base, response = data["rows"]["alpha"][3]
        row_id, text, kind = data["prompts"][prompt]
        assert (row_id, data["texts"][text], data["kinds"][kind], outcome) == ("row-3", HOSTILE, "say", "win")
        assert data["texts"][response[0]] == data["texts"][data["bases"][base][0]] == HOSTILE
        assert HOSTILE in page.column("mistakes", "prompt")
        assert page.column("policies", "method")[2] == "grpo <b>"
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
        assert (len(data["prompts"]), data["left_out"], "Sort 2 1." in data["texts"]) == (2, 2, False)
        assert all(row[0] < 2 for rows in data["rows"].values() for row in rows)


# ---- Curves and charts ----


class TestCurves:
    def test_curves_are_the_rows_of_the_metrics(self, example):
        runs, _ = find_runs([example])
        found = {panel.title: panel.curves for panel in panels(runs)}
        rows = read_rows(example / "alpha" / "metrics.jsonl")
        for title, key in {
            "win rate, ties as half": "win_rate",
            "KL to the base (nats per response)": "kl",
            "loss, dpo": "loss",
            "gradient norm, dpo": "grad_norm",
        }.items():
            assert found[title]["alpha"] == [(row["step"], row[key]) for row in rows if key in row], title
        assert found["accuracy"] == {"rm": [(10, 0.6), (20, 0.63)]}

    def test_an_online_run_logs_both_its_rollouts_and_its_evaluations(self, tmp_path):
        """`kl` of a training step is per token and of rollouts, and is no KL of held-out responses; `eval_kl` is.

        What is left of the last rollouts is logged behind the last evaluation, in the row of the run's times and
        without a `loss`: their response length of 10, for one, is no held-out one.
        """
        write_policy(tmp_path / "run", objective="grpo")
        evaluated = {"eval_kl": 0.75, "eval_collapsed": 0.0, "eval_rewards/rm/mean": 2.5}
        rollouts = {"kl": 0.01, "collapsed": 0.0, "rewards/rm/mean": 9.0, "reward": 9.0}
        rollouts["completions/mean_length"] = 10.0
        write_rows(
            tmp_path / "run" / "metrics.jsonl",
            [
                {"step": 0, **evaluated},
                {"step": 1, "loss": 0.5, **rollouts},
                {"step": 2, **evaluated},
                {"step": 2, "train_runtime": 4.0, "train_loss": 0.5, **rollouts},
            ],
        )
        assert {panel.title: panel.curves["run"] for panel in panels(find_runs([tmp_path])[0])} == {
            "KL to the base (nats per response)": [(0, 0.75), (2, 0.75)],
            "reward, rm": [(0, 2.5), (2, 2.5)],
            "reward of the rollouts": [(1, 9.0), (2, 9.0)],
        }

    def test_no_scale_flattens_another(self, tmp_path):
        """Each method's loss and implicit reward have panels, which its held-out rows share; so has each reward."""
        for name, scale in (("ipo", 100), ("dpo", 1), ("dpo-2", 1)):
            write_policy(tmp_path / name, objective=name.split("-")[0])
            row = {"loss": scale * 0.25, "grad_norm": scale * 0.5, "eval_loss": scale * 0.75}
            row |= {"rewards/margins": scale, "rewards/accuracies": 0.5}
            write_rows(tmp_path / name / "metrics.jsonl", [{"step": step, **row} for step in (1, 2)])
        found = {panel.title: panel for panel in panels(find_runs([tmp_path])[0])}
        names = ["reward margin, dpo", "reward margin, ipo", "gradient norm, dpo", "gradient norm, ipo"]
        assert list(found) == ["loss, dpo", "loss, ipo", "preference accuracy", *names]
        assert list(found["loss, dpo"].curves) == ["dpo", "dpo-2"]
        assert found["loss, ipo"].held_out == {"ipo": [(1, 75.0), (2, 75.0)]}
        for name, function in (("rl", "exact"), ("rl-2", "exact"), ("learned", "rm")):
            write_policy(tmp_path / "online" / name, objective="grpo")
            row = {"reward": 1, f"rewards/{function}/mean": 1}
            write_rows(tmp_path / "online" / name / "metrics.jsonl", [{"step": step, **row} for step in (1, 2)])
        found = {panel.title: list(panel.curves) for panel in panels(find_runs([tmp_path / "online"])[0])}
        assert found["reward of the rollouts, exact"] == ["rl", "rl-2"]
        assert found["reward of the rollouts, rm"] == ["learned"]


def test_a_figure_that_rounds_to_zero_has_no_sign():
    assert [figure(value, 2).text for value in (-0.004, 0.004, -0.006)] == ["0.00", "0.00", "-0.01"]
    assert estimate({"value": -0.0001, "low": -0.076, "high": -0.0002}).text == "0.000 [-0.076, 0.000]"


class TestCharts:
    """What is drawn is read back from the SVG, between the first and the last tick of each axis."""

    def numbers(self, svg, path: str, *names: str) -> list[tuple[float, ...]]:
        return [tuple(float(node.get(name)) for name in names) for node in svg.findall(path)]

    def axis(self, svg, kind: str, name: str):
        ticks = [node for node in svg.findall(f"text[@class='{kind}']") if re.match(r"-?[\d.]", node.text)]
        values, places = [float(tick.text) for tick in ticks], [float(tick.get(name)) for tick in ticks]
        scale = (values[-1] - values[0]) / (places[-1] - places[0])
        assert len(values) >= 3
        # The text of a tick is 4 pixels below its line.
        return lambda place: values[0] + (place + (4 if name == "y" else 0) - places[0]) * scale

    def test_reward_against_kl(self, page):
        """Alpha has (KL, gain) (1.5, .25), beta (2.5, .125) and gamma (2.5, .375); beta is dominated by alpha."""
        (svg,) = page.charts("true score gain")
        read_x, read_y = self.axis(svg, "x", "x"), self.axis(svg, "y", "y")
        found = {}
        for group in svg.findall("g"):
            ((x, y),), (circle,) = self.numbers(group, "circle", "cx", "cy"), group.findall("circle")
            found[group.find("text").text] = (read_x(x), read_y(y), circle.get("class"))
            ends = [ends for ends in self.numbers(group, "line", "x1", "x2") if ends[0] != ends[1]]
            assert read_x(ends[0][1]) - read_x(ends[0][0]) == pytest.approx(0.4, abs=0.01)
        assert found == {
            "alpha": (pytest.approx(1.5, abs=0.01), pytest.approx(0.25, abs=1e-3), "dot"),
            "beta": (pytest.approx(2.5, abs=0.01), pytest.approx(0.125, abs=1e-3), "dominated"),
            "gamma": (pytest.approx(2.5, abs=0.01), pytest.approx(0.375, abs=1e-3), "dot"),
        }

    def test_curves(self, page):
        """Alpha has win rates of .5, .6 and .7 at the steps 0, 20 and 40."""
        svg, _ = page.charts("win rate, ties as half")
        read_x, read_y = self.axis(svg, "x", "x"), self.axis(svg, "y", "y")
        points = [tuple(map(float, point.split(","))) for point in svg.find("g/polyline").get("points").split()]
        assert [read_x(x) for x, _ in points] == pytest.approx((0, 20, 40), abs=0.5)
        assert [read_y(y) for _, y in points] == pytest.approx((0.5, 0.6, 0.7), abs=1e-3)
        assert len(svg.findall("g")) == 3 and svg.find("g/title").text == "alpha: 0.7 at step 40"

    def test_thinning_keeps_ends_and_extremes(self):
        """1000 points thinned to 10: first, last, and the lowest and highest of 4 stretches of 998 / 4 points."""
        points = [(step, float((step * 37) % 1000)) for step in range(1000)]
        points[500] = (500, 1e6)
        thinned = thin(points, 10)
        assert len(thinned) == 10 and {points[0], points[500], points[-1]} < set(thinned) <= set(points)
        assert thinned == sorted(thinned) and min(points[1:250], key=lambda point: point[1]) in thinned

    def test_the_picture_of_a_reward_model_has_the_intervals(self, tmp_path, monkeypatch):
        """A line for each bin that holds pairs, from its lower to its upper end, and the accuracy with its own.

        4 of 5 right: centre (.8 + z^2/10) / (1 + z^2/5) = 1.1841/1.7683 = .6697, half-width
        1.96 sqrt(.16 / 5 + z^2 / 100) / 1.7683 = 1.96 * .2653 / 1.7683 = .2941: [.376, .964].
        """
        results = json.loads((write_reward_model(tmp_path / "rm") / "results.json").read_text())
        made, figure = [], plots.new_figure
        monkeypatch.setattr(plots, "new_figure", lambda *size: made.append(figure(*size)) or made[-1])
        plot_run([], results, tmp_path / "report.png")
        ((_, (axis,)),) = made
        lines = [one for lines in axis.collections if hasattr(lines, "get_segments") for one in lines.get_segments()]
        assert axis.get_title().startswith("Reliability"), "what has no data has no panel"
        assert [segment[0][0] for segment in lines] == [0.53, 0.97]
        assert [end for _, end in lines[1]] == pytest.approx([0.376, 0.964], abs=5e-4)
        assert "accuracy 0.625 [0.310, 0.860], n = 8" in axis.texts[0].get_text()
