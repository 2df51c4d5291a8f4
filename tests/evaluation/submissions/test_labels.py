"""Labels by hand: the order of rows and their weights, the weighted win rate, agreement, the command and the page."""

from __future__ import annotations

import io
import json
from functools import partial

import numpy
import pytest

from tests.evaluation.reporting.test_report_browser import ARGUMENTS, CHROMIUM
from tests.evaluation.submissions.test_grading import plan, response_rows, write_lines, write_policy
from tests.support.public_evaluation import flags_of_course, one_line_error, run_command
from trl_ext.evaluation import PairOutcome, prediction_powered
from trl_ext.evaluation.statistics.agreement import cohen_kappa
from trl_ext.evaluation.statistics.sampled_labels import (
    draw_order,
    draw_weights,
    uncertainty,
    weighted_prediction_powered,
)
from trl_ext.evaluation.submissions.candidates import with_human_labels
from trl_ext.evaluation.submissions.labelling import LabelSession
from trl_ext.evaluation.submissions.rows import HumanLabel, read_human_labels

LABELS = [1, 0, 1, 1, 0, 1, 0, 1]
JUDGED = [1, 0, 1, 0, 0, 1, 1, 1]
UNLABELLED = [1] * 14 + [0] * 6
HOSTILE = "<img src=x onerror='window.pwned=1'></script>\x1b[2J"


class TestDraws:
    def test_uncertainty(self):
        """Two agreeing verdicts are 2.5 of 3 wins, a disagreement 1.5 of 3, and no verdict 0.5 of 1."""
        assert uncertainty([2, 1, 0], [2, 2, 0]) == pytest.approx([(5 / 36) ** 0.5, 0.5, 0.5])

    def test_weights_by_hand(self):
        """After two rows the threshold is the third's priority, 3: 3/2 and 3/4, at least 1. After all it is 0."""
        sizes, order = {"a": 2, "b": 4, "c": 1, "d": 1}, {"a": 8, "b": 5, "c": 3, "d": 2}
        assert draw_weights(sizes, order, ["a", "b"]) == {"a": 1.5, "b": 1}
        assert draw_weights(sizes, order, ["a", "c"]) == {"a": 1, "c": 2}, "b was passed over"
        assert draw_weights(sizes, order, list(order)) == dict.fromkeys(order, 1)

    def test_sum_over_the_weighted_sample_is_unbiased(self):
        """Of each row, the mean of drawn * weight is 1; its standard deviation is at most sqrt(mean weight)."""
        sizes, seeds = {str(row): 0.2 + row % 5 for row in range(20)}, 4000
        totals = dict.fromkeys(sizes, 0.0)
        for seed in range(seeds):
            order = draw_order(sizes, seed)
            for row, weight in draw_weights(sizes, order, list(order)[:8]).items():
                totals[row] += weight / seeds
        assert max(abs(total - 1) for total in totals.values()) < 4 * (12 / seeds) ** 0.5


class TestWeightedWinRate:
    def test_equal_weights_are_prediction_powered_inference(self):
        """lambda counts the verdicts on all 28 prompts: in PPI, which leaves the labelled out, it is lambda 20/28."""
        found = weighted_prediction_powered(LABELS, JUDGED, UNLABELLED, [3.5] * 8, weight=0.7)
        assert found.rate == pytest.approx(prediction_powered(LABELS, JUDGED, UNLABELLED, weight=0.5).rate)
        alone = weighted_prediction_powered(LABELS, JUDGED, UNLABELLED, [3.5] * 8, weight=0)
        expected = prediction_powered(LABELS, JUDGED, UNLABELLED, weight=0)
        for name in ("rate", "low", "high", "standard_error", "effective_n"):
            assert getattr(alone, name) == pytest.approx(getattr(expected, name)), name
        assert alone.labels_only.low == pytest.approx(expected.labels_only.low)
        ties = weighted_prediction_powered([1, 0.5, 0.5, 0], [1, 1, 0, 0], [0] * 4, [2] * 4, weight=0)
        assert ties.effective_n == pytest.approx(4), "ties vary less than wins and losses"

    def test_by_hand(self):
        """Labels 1, 0, 1 with weights 1, 2, 1 are 1/2; verdicts 1, 1, 0 are 3/4; four prompts have 1, 1, 0, 0.

        At lambda 1/2: 0.5 * 0.5 + 0.5 - 0.5 * 0.75 = 0.375. Residuals 0.5, -0.5, 1 have the weighted mean 0.125. The
        terms of the variance are 0.375 + 0.25, 2 * -0.625 + 0.25, 0.875 - 0.25, and -0.25: squares 0.390625, 1,
        0.390625 and 0.0625, over 16.
        """
        found = weighted_prediction_powered([1, 0, 1], [1, 1, 0], [0], [1, 2, 1], weight=0.5)
        assert found.rate == pytest.approx(0.375)
        assert found.standard_error == pytest.approx((1.84375 / 16) ** 0.5)
        assert (found.judge_rate, found.labels_only.rate) == (0.5, 0.5)

    def test_the_weight_minimizes_the_variance(self):
        weights = [1.0, 2, 4, 8, 3, 2, 1, 7]
        best = weighted_prediction_powered(LABELS, JUDGED, UNLABELLED, weights)
        errors = [
            weighted_prediction_powered(LABELS, JUDGED, UNLABELLED, weights, weight=best.weight + step).standard_error
            for step in (-0.02, 0.02)
        ]
        assert 0 < best.weight < 1 and best.standard_error < min(errors)

    def test_bias_and_coverage_by_simulation(self):
        """The judge is right on 99% of the rows on which its orders agree, and on the others it says a tie.

        With 1,000 samples, a coverage of 95% is measured as 93% to 97%, and a bias as within four standard errors.
        """
        rng = numpy.random.default_rng(0)
        truth, samples, rows, n = 0.6, 1000, 400, 50
        errors, covered, widths = [], [], []
        for _ in range(samples):
            y, agree = rng.random(rows) < truth, rng.random(rows) < 0.7
            f = numpy.where(agree, y == (rng.random(rows) < 0.99), 0.5)
            sizes = numpy.where(agree, *uncertainty([2, 1], [2, 2]))
            priority = sizes / (1 - rng.random(rows))
            order = numpy.argsort(-priority)
            drawn, rest = order[:n], order[n:]
            weights = numpy.maximum(1, priority[rest[0]] / sizes[drawn])
            found = weighted_prediction_powered(y[drawn], f[drawn], f[rest], weights)
            uniform = prediction_powered(y[:n], f[:n], f[n:])
            errors.append(found.rate - truth)
            covered.append(found.low <= truth <= found.high)
            widths.append([found.high - found.low, uniform.high - uniform.low])
        assert abs(numpy.mean(errors)) < 4 * numpy.std(errors) / samples**0.5
        assert 0.93 <= numpy.mean(covered) <= 0.97
        own, uniform = numpy.mean(widths, axis=0)
        assert own < 0.97 * uniform, "labels go where the judge is uncertain"

    @pytest.mark.parametrize("weights", [[1] * 7, [0.5] * 8, [float("nan")] * 8])
    def test_errors(self, weights):
        with pytest.raises(ValueError, match="sampling weight of 1 or more"):
            weighted_prediction_powered(LABELS, JUDGED, UNLABELLED, weights)

    def test_with_outcomes_of_a_judge(self):
        outcomes = [PairOutcome(str(row), "candidate", "candidate") for row in range(4)]
        labels = {"0": HumanLabel(outcome="candidate", weight=1.0), "1": HumanLabel(outcome="base", weight=3.0)}
        assert with_human_labels(outcomes, labels).rate == pytest.approx(0.25)
        equal = {row_id: HumanLabel(outcome=label.outcome) for row_id, label in labels.items()}
        assert with_human_labels(outcomes, equal).rate == 0.5


class TestAgreement:
    def test_by_hand(self):
        """Of 50 rows 20 are yes, yes and 15 no, no; 5 and 10 differ: observed 0.7, by chance 0.5, kappa 0.4.

        Fleiss, Cohen and Everitt: (0.16 + 0.1125 * 2 - ...) gives the standard error 0.126996.
        """
        first, second = ["y"] * 25 + ["n"] * 25, ["y"] * 20 + ["n"] * 5 + ["y"] * 10 + ["n"] * 15
        found = cohen_kappa(first, second)
        assert (found["kappa"], found["observed"], found["n"]) == pytest.approx((0.4, 0.7, 50))
        p, (rows, columns) = numpy.array([[0.4, 0.1], [0.2, 0.3]]), (numpy.array([0.5, 0.5]), numpy.array([0.6, 0.4]))
        same = sum(p[i, i] * (1 - (rows[i] + columns[i]) * 0.6) ** 2 for i in (0, 1))
        other = 0.36 * (0.1 * (columns[0] + rows[1]) ** 2 + 0.2 * (columns[1] + rows[0]) ** 2)
        assert found["standard_error"] == pytest.approx(((same + other - (0.4 - 0.5 * 0.6) ** 2) / (50 * 0.25)) ** 0.5)
        assert (found["low"], found["high"]) == pytest.approx((0.1308, 0.6143), abs=1e-4)
        assert cohen_kappa(second, first)["standard_error"] == pytest.approx(found["standard_error"])

    def test_limits(self):
        """Perfect agreement has Wilson's lower bound, 3 / (3 + 1.959964^2) = 0.438503; one label has no kappa."""
        found = cohen_kappa(["a", "b", "tie"], ["a", "b", "tie"])
        assert (found["kappa"], found["high"]) == (1, 1)
        assert found["low"] == pytest.approx((0.438503 - 1 / 3) / (2 / 3), abs=1e-6)
        assert cohen_kappa(["a"], ["a"])["kappa"] is None
        assert cohen_kappa(["a", "b"], ["b", "a"])["kappa"] == -1
        with pytest.raises(ValueError, match="got 1 and 2"):
            cohen_kappa(["a"], ["a", "b"])


@pytest.fixture
def label(capsys, monkeypatch, tmp_path):
    """`public_eval.label` on ten prompts, with these answers."""
    monkeypatch.chdir(tmp_path)
    path = write_policy(tmp_path, "aot", response_rows(plan(win=5, tie=3, loss=2)))
    flags = ["--candidate", path, *flags_of_course(tmp_path)["judging"]]

    def run(answers: str, *more) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{answer}\n" for answer in answers)))
        return run_command(capsys, "label", *flags, *more)

    run.judge = partial(run_command, capsys, "judge", *flags)
    run.row_ids = [row["row_id"] for row in response_rows(plan(win=10))]
    return run


class TestCommand:
    def test_a_session_goes_on_and_the_judge_reads_it(self, label, tmp_path):
        code, out, err = label("12q")
        assert code == 0, err
        assert "2 of 10 pairs labelled; labels.jsonl" in out and "candidate" not in out.split("prompt ----", 1)[1]
        first = read_human_labels(tmp_path / "labels.jsonl", label.row_ids)
        assert label("tus?1", "--json")[0] == 0
        rows = [json.loads(line) for line in (tmp_path / "labels.jsonl").read_text().splitlines()]
        assert [row["outcome"] for row in rows[:2]] == [one.outcome for one in first.values()] and len(rows) == 3
        assert all(row.keys() == {"row_id", "outcome", "session"} for row in rows)
        code, out, err = label.judge("--human_labels", "labels.jsonl", "--json")
        assert code == 0 and json.loads(out)["candidates"][0]["human_labels"]["n_labels"] == 3, err
        message = one_line_error(label("", "--seed", 1))
        assert "of other responses, or of another --seed or --verdicts" in message

    def test_choices_name_the_shown_response(self, tmp_path):
        pairs = {str(row): {"prompt": "Q", "candidate": "own", "base": "other"} for row in range(30)}
        session = LabelSession(pairs, tmp_path / "l.jsonl", seed=3)
        for row_id in pairs:
            session.label(row_id, "1" if session.shown(row_id)[0] == "candidate" else "2")
        assert {row["outcome"] for row in session.rows()} == {"candidate"}
        first = [session.shown(row_id)[0] for row_id in pairs]
        assert 5 < first.count("base") < 25 and session.next() is None
        session.undo()
        assert session.next() == "29"

    def test_uncertain_rows_come_first_with_weights(self, label, tmp_path):
        """The judge's orders disagree on two rows, and the responses of three are equal; sizes are 0.5 and 0.373."""
        outcomes = ["disagree"] * 2 + ["candidate"] * 3 + ["tie"] * 3 + ["base"] * 2
        rows = [{"candidate": "aot", "row_id": i, "outcome": o} for i, o in zip(label.row_ids, outcomes, strict=True)]
        write_lines(tmp_path / "v.jsonl", rows)
        assert label("1" * 9 + "q", "--verdicts", "v.jsonl")[0] == 0
        labels = read_human_labels("labels.jsonl", label.row_ids)
        assert len(labels) == 9 and all(one.weight >= 1 for one in labels.values())
        sizes = dict(zip(label.row_ids, uncertainty([1, 1] + [2] * 8, [2] * 10), strict=True))
        order = draw_order(sizes, 0)
        assert list(labels) == list(order)[:9]
        assert {row: one.weight for row, one in labels.items()} == pytest.approx(
            draw_weights(sizes, order, list(labels))
        )
        code, out, _ = label.judge("--human_labels", "labels.jsonl", "--json")
        assert json.loads(out)["candidates"][0]["human_labels"]["n_unlabelled"] == 1
        assert label("1", "--verdicts", "v.jsonl")[0] == 0
        assert {one.weight for one in read_human_labels("labels.jsonl", label.row_ids).values()} == {1.0}
        write_lines(tmp_path / "v.jsonl", [{**row, "candidate": "dpo"} for row in rows])
        assert "no verdicts on aot" in one_line_error(label("1", "--verdicts", "v.jsonl"))

    def test_agreement_of_two_people(self, label, tmp_path, capsys):
        rows = [[("a", "candidate"), ("b", "base"), ("c", "tie")], [("b", "base"), ("a", "candidate"), ("d", "tie")]]
        files = [
            write_lines(tmp_path / f"{n}.jsonl", [{"row_id": i, "outcome": o} for i, o in own])
            for n, own in enumerate(rows)
        ]
        code, out, _ = run_command(capsys, "label", "--agreement", *files, "--json")
        assert (code, json.loads(out)["kappa"], json.loads(out)["n"]) == (0, 1, 2)
        code, out, _ = run_command(capsys, "label", "--agreement", *files)
        assert out.startswith("kappa 1.000  [") and "over 2 rows" in out
        lone = write_lines(tmp_path / "e.jsonl", [{"row_id": "e", "outcome": "tie"}])
        assert "share no row_id" in one_line_error(run_command(capsys, "label", "--agreement", files[0], lone))
        assert "give a --candidate to label" in one_line_error(run_command(capsys, "label"))

    def test_weights_of_some_rows_are_refused(self, tmp_path):
        rows = [{"row_id": "a", "outcome": "tie", "weight": 2.0}, {"row_id": "b", "outcome": "tie"}]
        with pytest.raises(ValueError, match="only some rows have a weight"):
            read_human_labels(write_lines(tmp_path / "l.jsonl", rows), ["a", "b"])

    def test_control_characters_are_shown_as_text(self, tmp_path, monkeypatch, capsys):
        from public_eval.label import ask

        monkeypatch.setattr("sys.stdin", io.StringIO("t\n"))
        ask(LabelSession({"a": {"prompt": HOSTILE, "candidate": HOSTILE, "base": " "}}, tmp_path / "l.jsonl"))
        out = capsys.readouterr().out
        assert "\\x1b[2J" in out and "\x1b" not in out and "(empty)" in out


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")
def test_page_in_a_browser(tmp_path):
    """The page keeps each label, takes one back, goes on after it was closed, and gives the terminal's file."""
    from playwright.sync_api import sync_playwright

    texts = {"prompt": HOSTILE, "candidate": HOSTILE}
    pairs = {str(row): {**texts, "base": f"other {row}"} for row in range(4)}
    sizes = {"0": 1.0, "1": 2.0, "2": 3.0, "3": 0.5}
    session = LabelSession(pairs, tmp_path / "expected.jsonl", seed=5, sizes=sizes)
    path = tmp_path / "labels.html"
    path.write_text(session.page("Which is better?"), encoding="utf-8")
    for choice in "1st":
        session.label(session.next(), choice)
    said = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        context = browser.new_context(accept_downloads=True)
        page = context.new_page()
        for event in ("console", "pageerror"):
            page.on(event, lambda message: said.append(str(message)))
        page.goto(path.as_uri())
        for key in "1s2ux":
            page.keyboard.press(key)
        assert page.locator("#count").inner_text() == "1 labelled, 2 left"
        page.close()
        page = context.new_page()
        page.goto(path.as_uri())
        page.get_by_role("button", name="Tie").click()
        with page.expect_download() as download:
            page.get_by_role("button", name="Download").click()
        rows = download.value.path().read_text().splitlines()
        assert page.evaluate("window.pwned") is None and page.locator("#pair img").count() == 0
        assert HOSTILE in page.locator(".prompt-text .words").evaluate("node => node.textContent")
        browser.close()
    assert [json.loads(row) for row in rows] == session.rows() and len(rows) == 2
    assert said == []
