"""The report's charts: what is drawn is what the runs' files hold, at the places that the axes say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.files import read_rows, write_rows
from tests.support.report_runs import Page, change, report, write_example, write_policy, write_reward_model
from trl_ext.evaluation import plot_reward_run
from trl_ext.evaluation.reporting import plots
from trl_ext.evaluation.reporting.curves import panels, thin
from trl_ext.evaluation.reporting.runs import find_runs
from trl_ext.evaluation.reporting.tables import estimate, figure


@pytest.fixture(scope="module")
def example(tmp_path_factory) -> Path:
    return write_example(tmp_path_factory.mktemp("example") / "runs")


@pytest.fixture(scope="module")
def page(example) -> Page:
    return report(example)[1]


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
            assert found[title]["alpha"] == [(r["step"], r["seconds"], r[key]) for r in rows if key in r], title
        assert [point[1] for point in found["loss, grpo <b>"]["gamma"]] == [None] * 4
        assert found["accuracy"] == {"rm": [(10, 4.0, 0.6), (20, 7.5, 0.63)]}

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
            "KL to the base (nats per response)": [(0, None, 0.75), (2, None, 0.75)],
            "reward, rm": [(0, None, 2.5), (2, None, 2.5)],
            "reward of the rollouts": [(1, None, 9.0), (2, None, 9.0)],
        }

    def test_a_curve_ends_in_its_run_and_its_n(self, tmp_path):
        """Of 32 prompts during training, 16 of them for the KL, and of 8 pairs; a training curve has no n."""
        run = write_policy(tmp_path / "runs" / "a-name-that-is-long")
        change(run, "kl", "n", to=16)
        pairs = [{"step": step, "eval_loss": 0.5, "eval_rewards/accuracies": 0.5} for step in (20, 40)]
        write_rows(run / "metrics.jsonl", read_rows(run / "metrics.jsonl") + pairs)
        (run / "samples").mkdir()
        for step, n in ((0, 4), (40, 32)):
            write_rows(run / "samples" / f"step_{step:06}.jsonl", [{}] * n)
        page = report(tmp_path / "runs")[1]
        titles = ("true score", "KL to the base (nats per response)", "loss", "preference accuracy")
        assert [[text.text for text in page.charts(title)[0].findall("g/text")] for title in titles] == [
            ["a-nam…long, n 32"],
            ["a-nam…long, n 16"],
            ["a-name-t…is-long", "a-nam…long, n 8"],
            ["a-nam…long, n 8"],
        ]

    def test_no_scale_flattens_another(self, tmp_path):
        """Each method's loss and implicit reward have panels, which its held-out rows share."""
        for name, scale in (("ipo", 100), ("dpo", 1), ("dpo-2", 1)):
            write_policy(tmp_path / name, objective=name.split("-")[0])
            row = {"loss": scale * 0.25, "grad_norm": scale * 0.5, "eval_loss": scale * 0.75}
            row |= {"rewards/margins": scale, "rewards/accuracies": 0.5}
            write_rows(tmp_path / name / "metrics.jsonl", [{"step": step, **row} for step in (1, 2)])
        found = {panel.title: panel for panel in panels(find_runs([tmp_path])[0])}
        names = ["reward margin, dpo", "reward margin, ipo", "gradient norm, dpo", "gradient norm, ipo"]
        assert list(found) == ["loss, dpo", "loss, ipo", "preference accuracy", *names]
        assert list(found["loss, dpo"].curves) == ["dpo", "dpo-2"]
        assert found["loss, ipo"].held_out == {"ipo": [(1, None, 75.0), (2, None, 75.0)]}

    def test_no_reward_function_flattens_another(self, tmp_path):
        """Runs with other reward functions have other panels; a run without rewards changes no title."""
        for name, function, scale in (("rl", "exact", 1), ("rl-2", "exact", 2), ("learned", "rm", 50)):
            write_policy(tmp_path / name, objective="grpo")
            row = {"reward": scale, f"rewards/{function}/mean": scale}
            write_rows(tmp_path / name / "metrics.jsonl", [{"step": step, **row} for step in (1, 2)])
        write_policy(tmp_path / "sft", objective="sft")
        write_rows(tmp_path / "sft" / "metrics.jsonl", [{"step": step, "entropy": 1.0} for step in (1, 2)])
        runs, _ = find_runs([tmp_path])
        found = {panel.title: list(panel.curves) for panel in panels(runs)}
        assert found["reward of the rollouts, exact"] == ["rl", "rl-2"]
        assert found["reward of the rollouts, rm"] == ["learned"]
        alone = {panel.title for panel in panels([run for run in runs if run.label != "learned"])}
        assert "reward of the rollouts" in alone


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
            ends = [ends for ends in self.numbers(group, "line[@class='whisker']", "x1", "x2") if ends[0] != ends[1]]
            assert read_x(ends[0][1]) - read_x(ends[0][0]) == pytest.approx(0.4, abs=0.01)
        assert found == {
            "alpha": (pytest.approx(1.5, abs=0.01), pytest.approx(0.25, abs=1e-3), "dot"),
            "beta": (pytest.approx(2.5, abs=0.01), pytest.approx(0.125, abs=1e-3), "dominated"),
            "gamma": (pytest.approx(2.5, abs=0.01), pytest.approx(0.375, abs=1e-3), "dot"),
        }
        points = [tuple(map(float, point.split(","))) for point in svg.find("polyline").get("points").split()]
        assert [(read_x(x), read_y(y)) for x, y in points] == [found["alpha"][:2], found["gamma"][:2]]
        names = sorted(float(node.get("y")) for node in svg.findall("g/text"))
        assert min(b - a for a, b in zip(names, names[1:], strict=False)) >= 13, "no name covers another"

    def test_curves_over_steps_and_over_seconds(self, page):
        """Alpha's steps 0, 20 and 40 are at 0, 70 and 140 seconds, with win rates .5, .6, .7; gamma has no times."""
        steps, seconds = page.charts("win rate, ties as half")[:2]
        assert (len(steps.findall("g")), len(seconds.findall("g"))) == (3, 2)
        for svg, expected in ((steps, (0, 20, 40)), (seconds, (0, 70, 140))):
            read_x, read_y = self.axis(svg, "x", "x"), self.axis(svg, "y", "y")
            line = svg.find("g/polyline").get("points").split()
            points = [tuple(map(float, point.split(","))) for point in line]
            assert [read_x(x) for x, _ in points] == pytest.approx(expected, abs=0.5)
            assert [read_y(y) for _, y in points] == pytest.approx((0.5, 0.6, 0.7), abs=1e-3)
        assert "not drawn: gamma.</p>" in page.source
        assert steps.find("g/title").text == "alpha: 0.7 at 40 steps"

    def test_dots_with_their_intervals_and_the_base(self, page):
        *rows, axis = page.charts("Win rate against the base, ties as half")
        labels = ["alpha: 0.625 [0.515, 0.695]", "beta: 0.625 [0.515, 0.695]", "gamma: 0.5 [0.39, 0.57]"]
        assert [row.get("aria-label") for row in rows] == labels
        at = re.match(r"M([\d.]+) ", rows[0].find("path[@class='reference']").get("d"))[1]
        assert [node.text for node in axis if node.get("x") == at] == ["0.5"]
        for row in rows:
            ((x1, x2),), ((x,),) = self.numbers(row, "g/line", "x1", "x2"), self.numbers(row, "g/circle", "cx")
            assert (x - x1) / (x2 - x) == pytest.approx(0.11 / 0.07, rel=0.02)
        lengths = page.charts("Response length (tokens), hollow: the base")
        assert lengths[0].get("aria-label") == "alpha: 10.5, base 14.25"

    def test_thinning_keeps_ends_and_extremes(self):
        """1000 points thinned to 10: first, last, and the lowest and highest of 4 stretches of 998 / 4 points."""
        points = [(step, None, float((step * 37) % 1000)) for step in range(1000)]
        points[500] = (500, None, 1e6)
        thinned = thin(points, 10)
        assert len(thinned) == 10 and thinned[0] == points[0] and thinned[-1] == points[-1]
        assert (500, None, 1e6) in thinned and min(points[1:250], key=lambda point: point[2]) in thinned
        assert thinned == sorted(thinned) and set(thinned) <= set(points)

    def test_the_picture_of_a_reward_model_has_the_intervals(self, tmp_path, monkeypatch):
        """A line for each bin that holds pairs, from its lower to its upper end, and the accuracy with its own.

        4 of 5 right: centre (.8 + z^2/10) / (1 + z^2/5) = 1.1841/1.7683 = .6697, half-width
        1.96 sqrt(.16 / 5 + z^2 / 100) / 1.7683 = 1.96 * .2653 / 1.7683 = .2941: [.376, .964].
        """
        drawn = []
        figure = plots.new_figure
        monkeypatch.setattr(plots, "new_figure", lambda *size: drawn.append(figure(*size)) or drawn[-1])
        pairs = json.loads((write_reward_model(tmp_path / "rm") / "results.json").read_text())["pairs"]
        plot_reward_run([], pairs, [], tmp_path / "report.png")
        ((_, (axis,)),) = drawn
        lines = [one for lines in axis.collections if hasattr(lines, "get_segments") for one in lines.get_segments()]
        assert axis.get_title().startswith("Reliability"), "what has no data has no panel"
        assert [segment[0][0] for segment in lines] == [0.53, 0.97]
        assert [end for _, end in lines[1]] == pytest.approx([0.376, 0.964], abs=5e-4)
        assert "accuracy 0.625 [0.310, 0.860], n = 8" in axis.texts[0].get_text()

    @pytest.mark.parametrize("methods", [6, 18])
    def test_panels_of_many_curves_share_a_legend(self, tmp_path, monkeypatch, methods):
        """It names every curve once, and no panel is left without room, of which matplotlib would warn."""
        drawn = []
        figure = plots.new_figure
        monkeypatch.setattr(plots, "new_figure", lambda *size: drawn.append(figure(*size)) or drawn[-1])
        names = {f"method_{number:02}": f"m{number}" for number in range(methods)}
        rows = [{"step": step, **dict.fromkeys(names.values(), 0.5)} for step in (0, 1)]
        own = dict([*names.items()][1:])
        plots.save_panels(plots.curve_panels({"all": names, "but one": own}, rows), tmp_path / "report.png")
        ((picture, axes),) = drawn
        shared = [text.get_text() for legend in picture.legends for text in legend.get_texts()]
        assert shared == ([*names] if methods > 6 else [])
        assert [axis.get_legend() is None for axis in axes] == [methods > 6] * 2
