"""The report of runs: it shows what is in the runs' files, names damage, and no text of a model becomes markup."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from markupsafe import escape

from tests.support.files import read_rows, write_rows
from tests.support.refusals import assert_one_line
from tests.support.report_runs import (
    HOSTILE,
    LOSS,
    TIE,
    WIN,
    Page,
    change,
    report,
    write_example,
    write_policy,
    write_reward_model,
    write_two_tasks,
)
from trl_ext.evaluation import (
    GroundTruthJudge,
    compare_generations,
    plot_run,
    wilson_interval,
    write_report,
)
from trl_ext.evaluation.reasoning import summarize_reasoning
from trl_ext.evaluation.report import main
from trl_ext.evaluation.reporting import charts, plots
from trl_ext.evaluation.reporting.curves import panels
from trl_ext.evaluation.reporting.page import embed
from trl_ext.evaluation.reporting.runs import find_runs
from trl_ext.evaluation.reporting.summary import KL, pareto_front
from trl_ext.evaluation.reporting.tables import shown
from trl_ext.evaluation.statistics.intervals import Estimate
from trl_ext.files import markdown_line
from trl_ext.rollouts import Generation


@pytest.fixture(scope="module")
def example(tmp_path_factory) -> Path:
    return write_example(tmp_path_factory.mktemp("example") / "runs")


@pytest.fixture(scope="module")
def page(example) -> Page:
    return report(example)[1]


@pytest.fixture(scope="module")
def markdown(page, example) -> str:
    return (example.parent / "report.md").read_text(encoding="utf-8")


# ---- Figures ----


def test_the_tables_by_hand(page):
    """Alpha: two wins, one tie, one loss: (2 + 1/2) / 4 = .625 and 2/3; .625 - .11 = .515, .625 + .07 = .695.

    Gains .25, .125, .375 at KL 1.5, 2.5, 2.5, to .03 and .2: alpha has more than beta at less KL in any case. In the
    learned reward, to .125, alpha's lowest gain of .125 is below beta's highest of .25, so that beta may be on the
    front.
    """
    fronts = "win rate, ties as half; gain in judge-rm"
    for table, column, expected in (
        ("policies", "run", ["alpha", "beta", "gamma"]),
        ("policies", "method", ["dpo", "aot", "grpo <b>"]),
        ("policies", "win rate, ties as half", ["0.625 [0.515, 0.695]"]),
        ("policies", "win rate, ties dropped", ["0.667 [0.557, 0.737]"]),
        ("policies", "n without ties", ["3", "3", "4"]),
        ("policies", "gain in true score", ["0.250 [0.220, 0.280]", "0.125 [0.095, 0.155]"]),
        ("policies", "gain in judge-rm", ["0.250 [0.125, 0.375]"]),
        ("policies", "n", ["4", "4", "4"]),
        ("policies", "KL to the base (nats per response)", ["1.50 [1.30, 1.70]"]),
        ("policies", "accuracy on held-out pairs", ["0.750 [0.410, 0.930]"]),
        ("policies", "n pairs", ["8", "8", "8"]),
        ("policies", "may be on the Pareto front", [f"true score gain; {fronts}", fronts]),
        ("reward-models", "accuracy", ["0.625 [0.310, 0.860]"]),
        ("reward-models", "accuracy, true order", ["0.714 [0.360, 0.920]"]),
    ):
        assert page.column(table, column)[: len(expected)] == expected, (table, column)


def test_each_figure_has_its_n(tmp_path):
    """Without win rates, the n of the gain; of the KL if it is another."""
    run = write_policy(tmp_path / "runs" / "run")
    for keys, to in {("win_rate",): None, ("score", "gain", "n"): 64, ("kl", "n"): 16}.items():
        change(run, *keys, to=to)
    _, page = report(tmp_path / "runs")
    assert (page.column("policies", "n"), page.column("policies", "n of the KL")) == (["64"], ["16"])


def test_markdown_has_the_tables_and_stays_text(markdown):
    headings = re.findall(r"^## (.*)$", markdown, re.M)
    assert len(headings) == 3 and {"Policies", "Reward models"} < set(headings)
    assert "| 0.625 \\[0.515, 0.695\\] |" in markdown
    for block in re.findall(r"(?:^\|.*\n)+", markdown, re.M):
        counts = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
        assert len(counts) == 1, "every row of a table has as many cells as its head"
    assert not re.search(r"(?<!\\)[<>]|(?<!\\)!\[|(?<!\\)`", markdown)
    assert not set(markdown) & set("\u2028\u2029")
    assert markdown_line("Commit: 1fc 2:3 a@b $5 ~x :up: http://a.b") == (
        "Commit: 1fc 2:3 a&#64;b &#36;5 &#126;x &#58;up: http&#58;//a.b"
    )
    assert markdown_line("a|b\n<c> [d](e) *f* &amp;") == r"a&#124;b &lt;c\> \[d\]\(e\) \*f\* &amp;amp;"


def test_a_figure_that_rounds_to_zero_has_no_sign():
    assert [shown(value, KL) for value in (-0.004, 0.004, -0.006, None)] == ["0.00", "0.00", "-0.01", "-"]
    assert shown(Estimate(-0.0001, -0.076, -0.0002)) == "0.000 [-0.076, 0.000]"
    assert f"{Estimate(0.25, -0.1, 0.6):+.2f}" == "+0.25 [-0.10, +0.60]"
    assert (f"{Estimate(12.5):.1f}", f"{Estimate(None, 0, 1):.1f}") == ("12.5", "-")


def point(run: str, kl: float, reward: float, setting: str = "same", half_widths=None):
    estimates = [Estimate(kl), Estimate(reward)]
    if half_widths:
        estimates = [Estimate(x, x - half, x + half) for x, half in zip((kl, reward), half_widths, strict=True)]
    return {"run": run, "setting": setting, "kl": estimates[0], "reward": estimates[1]}


@pytest.mark.parametrize(
    ("points", "half_widths", "front"),
    [
        # b has more reward than c at less KL; d has as much as b at more; e has another base: nothing beats it.
        (
            [("a", 1, 0.2), ("b", 2, 0.5), ("c", 3, 0.4), ("d", 2.5, 0.5), ("e", 9, 0.1, "other")],
            None,
            "abe",
        ),
        ([("a", 1, 1), ("b", 1, 1)], None, "ab"),
        # a and b both read 0.200 at KL 1.00, so both stay; c reads 0.199, below both; d reads 0.201 and 1.01.
        ([("a", 1.001, 0.2001), ("b", 1.002, 0.1999), ("c", 0.999, 0.1994), ("d", 1.006, 0.2009)], None, "abd"),
        # To dominate, one must be better by .5 in KL and by .25 in reward. b is worse than a by 1 and .125, within the
        # intervals of the reward, c by .25 and .375, within those of KL, d by 1 and .25, where the intervals touch.
        (
            [("a", 1.0, 0.5), ("b", 2.0, 0.375), ("c", 1.25, 0.125), ("d", 2.0, 0.25), ("e", 3.0, 0.0)],
            (0.25, 0.125),
            "abc",
        ),
    ],
)
def test_pareto_front_by_hand(points, half_widths, front):
    """A figure without an interval is its own interval."""
    points = [point(*one, half_widths=half_widths) for one in points]
    assert pareto_front(points) == set(front)


def test_each_task_has_its_own_tables_and_charts(tmp_path):
    _, page = report(write_two_tasks(tmp_path / "runs"))
    assert page.data["tasks"] == {"-1": "Preferences on pairs", "-2": "Verified problems on pairs"}
    for number, runs, column, value in (
        (1, ["a-dpo", "c-grpo"], "gain in true score", "0.250 [0.220, 0.280]"),
        (2, ["b-sum", "d-sum"], "accuracy, sampled", "0.750 [0.500, 0.875]"),
    ):
        assert page.column(f"policies-{number}", "run") == runs
        assert page.column(f"policies-{number}", column) == [value] * 2
    assert len(page.charts("true score")) == len(page.charts("accuracy")) == 1
    links = {attributes["href"] for _, attributes in page.tags if attributes.get("href", "").startswith("#")}
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {"#task-1", "#summary-2", "#generations"} <= links <= {f"#{name}" for name in ids}
    headings = re.findall(r"^#+ .*$", (tmp_path / "report.md").read_text(encoding="utf-8"), re.M)
    place = headings.index("## Verified problems on pairs")
    assert headings[1:3] == ["## Preferences on pairs", "### Policies"] and headings[place + 1] == "### Policies"


def test_a_run_without_figures_leaves_no_empty_section_and_no_empty_panel(tmp_path):
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
    assert list(page.tables) == ["table-settings"] and "<figure>" not in page.source
    assert "These runs have no figures of held-out rows: " in page.source
    plot_run(tmp_path / "run", tmp_path / "report.png")
    assert not (tmp_path / "report.png").exists()


# ---- Text of models ----


def test_names_of_runs_and_methods_are_text_in_charts_and_tables(tmp_path):
    """As the name of a folder, an objective, a model and a reward."""
    bad = '"><script>window.pwned = 1<\u2215script>'
    run = write_policy(tmp_path / "runs" / bad, objective=bad)
    results = json.loads((run / "results.json").read_text())
    results["run"]["model"] = results["run"]["dataset"] = bad
    results["rewards"] = {bad: results["rewards"]["judge-rm"]}
    (run / "results.json").write_text(json.dumps(results))
    write_policy(tmp_path / "runs" / "other", objective="aot")
    write_rows(run / "metrics.jsonl", [{"step": step, f"eval_rewards/{bad}/mean": 1.0} for step in (1, 2)])
    _, page = report(tmp_path / "runs")
    assert [tag for tag, _ in page.tags].count("script") == 2
    assert len(page.charts(str(escape(f"reward, {bad}")))) == 1


def test_generations_are_held_once_and_come_back_as_they_were(page, example, tmp_path):
    """Three runs of the same four prompts."""
    data = page.data["generations"]
    assert len(data["texts"]) == len(set(data["texts"]))
    assert (len(data["prompts"]), len(data["bases"])) == (4, 4)
    assert (data["kinds"], data["left_out"]) == (["name", "say", "sort"], 0)
    _, outcome, base, response = data["rows"]["beta"][2]
    assert (outcome, response[1:]) == ("loss", [7, 0.625, 1, [["judge-rm", 1.75]]])
    assert data["bases"][base][1:] == [6, 0.5, None, [["judge-rm", 1.5]]]
    prompt, outcome, base, response = data["rows"]["alpha"][3]
    row_id, text, kind = data["prompts"][prompt]
    assert (row_id, data["texts"][text], data["kinds"][kind], outcome) == ("row-3", HOSTILE, "say", "win")
    assert data["texts"][response[0]] == data["texts"][data["bases"][base][0]] == HOSTILE
    value = {"a</script>": ["<!--", "\u2028\u2029", "{{style}}", "]]>", "\\u003c", "\x00"]}
    source = embed(value)
    assert not set(source) & set("<>&\u2028\u2029") and json.loads(source) == value
    write_report(example, tmp_path / "report.html", max_prompts=2)
    data = Page(tmp_path / "report.html").data["generations"]
    assert (len(data["prompts"]), data["left_out"], "Sort 2 1." in data["texts"]) == (2, 2, False)
    assert all(row[0] < 2 for rows in data["rows"].values() for row in rows)


def test_nothing_but_the_pages_own_script_and_style_may_run_or_load(page):
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


# ---- Curves and charts ----


def test_curves_are_the_rows_of_the_metrics(example):
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


def test_the_picture_of_a_run_has_its_curves(example, tmp_path, monkeypatch):
    made, new_figure = [], plots.new_figure
    monkeypatch.setattr(plots, "new_figure", lambda *size: made.append(new_figure(*size)) or made[-1])
    plot_run(example / "alpha", tmp_path / "report.png")
    ((_, axes),) = made
    drawn = {axis.get_title(): axis.lines[0].get_xydata().tolist() for axis in axes if axis.lines}
    found = panels(find_runs([example / "alpha"])[0])
    assert drawn == {panel.title: [list(point) for point in panel.curves["alpha"]] for panel in found}


def test_an_online_run_logs_both_its_rollouts_and_its_evaluations(tmp_path):
    """`kl` of a training step is per token and of rollouts, and is no KL of held-out responses; `eval_kl` is.

    What is left of the last rollouts is logged behind the last evaluation, in the row of the run's times and
    without a `loss`: their response length of 10, for one, is no held-out one.
    """
    write_policy(tmp_path / "run", objective="grpo")
    evaluated = {"eval_kl": 0.75, "eval_collapsed": 0.0, "eval_rewards/rm/mean": 2.5}
    rollouts = {"kl": 0.01, "collapsed": 0.0, "rewards/rm/mean": 9.0, "reward": 9.0, "completions/mean_length": 10.0}
    rows = [{"step": 0, **evaluated}, {"step": 1, "loss": 0.5, **rollouts}, {"step": 2, **evaluated}]
    rows.append({"step": 2, "train_runtime": 4.0, "train_loss": 0.5, **rollouts})
    write_rows(tmp_path / "run" / "metrics.jsonl", rows)
    assert {panel.title: panel.curves["run"] for panel in panels(find_runs([tmp_path])[0])} == {
        "KL to the base (nats per response)": [(0, 0.75), (2, 0.75)],
        "reward, rm": [(0, 2.5), (2, 2.5)],
        "reward of the rollouts": [(1, 9.0), (2, 9.0)],
    }


def test_no_scale_flattens_another(tmp_path):
    """Each method's loss and implicit reward have panels, which its held-out rows share; so has each reward."""

    def drawn(folder: str, **runs: dict) -> dict:
        for name, row in runs.items():
            run = write_policy(tmp_path / folder / name, objective=name.split("_")[0])
            write_rows(run / "metrics.jsonl", [{"step": step, **row} for step in (1, 2)])
        return {panel.title: panel for panel in panels(find_runs([tmp_path / folder])[0])}

    def pairs(scale: float) -> dict:
        row = {"loss": scale * 0.25, "grad_norm": scale * 0.5, "eval_loss": scale * 0.75}
        return row | {"rewards/margins": scale, "rewards/accuracies": 0.5}

    found = drawn("offline", ipo=pairs(100), dpo=pairs(1), dpo_2=pairs(1))
    names = ["reward margin, dpo", "reward margin, ipo", "gradient norm, dpo", "gradient norm, ipo"]
    assert list(found) == ["loss, dpo", "loss, ipo", "preference accuracy", *names]
    assert list(found["loss, dpo"].curves) == ["dpo", "dpo_2"]
    assert found["loss, ipo"].held_out == {"ipo": [(1, 75.0), (2, 75.0)]}
    exact, learned = ({"reward": 1, f"rewards/{function}/mean": 1} for function in ("exact", "rm"))
    found = drawn("online", rl=exact, rl_2=exact, learned=learned)
    assert list(found["reward of the rollouts, exact"].curves) == ["rl", "rl_2"]
    assert list(found["reward of the rollouts, rm"].curves) == ["learned"]


def test_charts(page, example, tmp_path, monkeypatch):
    """Alpha has (KL, gain) (1.5, .25), beta (2.5, .125) and gamma (2.5, .375); beta is dominated by alpha.

    The KL is known to .2 and the gain to .03. Alpha has win rates of .5, .6 and .7 at the steps 0, 20 and 40.
    """
    made: dict[str, list] = {}
    monkeypatch.setattr(charts, "_inline", lambda figure, title, look: made.setdefault(title, []).append(figure) or "")
    write_report(example, tmp_path / "report.html")
    (axis,) = made["true score gain"][0].axes
    found = []
    for points, _, (across, along) in (container.lines for container in axis.containers):
        found.append((points.get_xdata()[0], points.get_ydata()[0], points.get_fillstyle()))
        ((left, right),), ((bottom, top),) = across.get_segments(), along.get_segments()
        assert (right - left)[0] == pytest.approx(0.4) and (top - bottom)[1] == pytest.approx(0.06)
    assert found == [(1.5, 0.25, "full"), (2.5, 0.125, "none"), (2.5, 0.375, "full")]
    assert [text.get_text() for text in axis.texts] == ["alpha", "beta", "gamma"]
    curves, _ = made["win rate, ties as half"]
    assert curves.axes[0].lines[0].get_xydata().tolist() == [[0, 0.5], [20, 0.6], [40, 0.7]]
    for svg in page.charts("win rate, ties as half"):
        assert {node.get("data-run") for node in svg.iter()} == {None, "0", "1", "2"}


# ---- The runs' files ----


@pytest.mark.parametrize(
    "results",
    [
        {"pairs": None, "true_order": None},
        {"best": None, "sft": {}, "best_of_n": {"curve": []}},
        {"score": {"policy": 0.5}, "rewards": {"rm": {"policy": None, "reference": 1.5}}},
    ],
)
def test_what_the_library_writes_is_read(tmp_path, results):
    (tmp_path / "results.json").write_text(json.dumps({"run": {"objective": "a"}, **results}))
    assert report(tmp_path)[0]["problems"] == []


def test_a_comparison_is_read(tmp_path):
    """The win rate again from the outcomes of the rows: of 5 prompts 3 wins, a loss and a tie."""

    def score(prompt, response, finished=True):
        return float(response == "good")

    answers = (["good"] * 3 + ["bad"] * 2, ["bad"] * 3 + ["good", "bad"])
    texts = ([Generation([0], [0] * len(text), text, True) for text in of] for of in answers)
    prompts = [{"row_id": str(i), "prompt": [{"role": "user", "content": f"p{i}"}]} for i in range(5)]
    judged = {"judge": GroundTruthJudge(score), "score_function": score}
    comparison = compare_generations(prompts, *texts, **judged)
    comparison.write(tmp_path / "policy", objective="dpo")
    assert [row["outcome"] for row in comparison.rows] == [WIN] * 3 + [LOSS, TIE]
    summary, _ = report(tmp_path / "policy")
    (row,) = summary["policies"]
    low, high = wilson_interval(3, 4)
    found = row["figures"]
    assert found["win rate, ties dropped"] == Estimate(0.75, low, high, 4)
    assert found["win rate, ties as half"].value == 0.7
    assert found["gain in true score"].value == pytest.approx((3 - 1) / 5)
    assert found["tokens"] == (3 * 4 + 2 * 3) / 5
    assert summary["problems"] == []


@pytest.mark.parametrize(("temperature", "decoding"), [(0, "greedy"), (1.0, "sampled")])
def test_an_evaluation_on_verified_problems_is_read(tmp_path, temperature, decoding):
    graded = {"category": "correct", "answer_reward": 1.0, "format_reward": 1.0, "generated_num_tokens": 3}
    rows = [{"row_id": name, "finished": True, "sample": 0, "reward": 1.0, **graded} for name in "ab"]
    found = {"run": {"sampling": {"temperature": temperature}}, "reasoning": summarize_reasoning(rows)}
    (tmp_path / "results.json").write_text(json.dumps(found))
    (row,) = report(tmp_path)[0]["policies"]
    found = {name: row["figures"][f"accuracy, {name}"] for name in ("sampled", "greedy")}
    assert found.pop(decoding).value == 1.0 and list(found.values()) == [None]


def test_damaged_results_are_named_and_the_run_is_left_out(tmp_path, capsys):
    """Fields by the keys that lead to them, and whole files; the other run is shown."""
    number, expected = "Input should be a valid number, got", {}
    for place, (keys, value, reason) in enumerate(
        (
            (("win_rate", "half", "rate"), float("nan"), "Input should be a finite number, got NaN"),
            (("score", "gain", "mean"), "0.25", f'{number} "0.25"'),
            (("generations", "policy", "mean_tokens"), "x" * 50, f'{number} "{"x" * 39}...'),
        )
    ):
        change(write_policy(tmp_path / "runs" / f"bad-{place}"), *keys, to=value)
        expected[f"bad-{place}"] = f"results.json: {'.'.join(keys)}: {reason}"
    for name, content, reason in (
        ("cut", '{"run": {"seed', "results.json: Invalid JSON: EOF while parsing"),
        ("own", '{"recipe": "own"}', "results.json: run: Field required"),
    ):
        (tmp_path / "runs" / name).mkdir()
        (tmp_path / "runs" / name / "results.json").write_text(content)
        expected[name] = reason
    write_policy(tmp_path / "runs" / "good")
    summary, page = report(tmp_path / "runs")
    assert [row["run"] for row in summary["policies"]] == ["good"]
    told = {row["run"]: row["reason"] for row in summary["incomplete"]}
    assert list(told.values()) == page.column("incomplete", "why") and told.keys() == expected.keys()
    assert all(told[name].startswith(reason) for name, reason in expected.items()), told
    with pytest.raises(SystemExit):
        main([str(tmp_path / "runs" / "bad-0"), "--out", str(tmp_path / "r.html")])
    assert_one_line(capsys.readouterr().err, ["a results.json", f"bad-0: {expected['bad-0']}"])


def test_damaged_lines_are_left_out_and_said(tmp_path):
    run = write_policy(tmp_path / "run")
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 42, "loss": null}\n{"loss": 1}\n\xff\xfe\n{"step": 43, "lo')
    row = {"prompt_text": "p", "response_text": "r"}
    write_rows(run / "generations.jsonl", [row, {**row, "outcome": "draw"}, {**row, "score": "high"}])
    summary, page = report(run)
    told = [row["problem"] for row in summary["problems"]]
    assert page.column("problems", "problem") == told
    for text, part in zip(told, ("line 9: step", "line 2: outcome"), strict=True):
        assert part in text
    assert "2 problems in the files of 1 run" in page.source


def test_runs_are_found_once_and_those_of_a_method_stay_together(tmp_path):
    """Links are followed, also to the folder that holds the link. Labels are paths below the common folder."""
    for path in ("one/aot", "two/aot", "two/dpo", "two/aot-10", "two/aot-9"):
        (tmp_path / path).mkdir(parents=True)
        (tmp_path / path / "results.json").write_text('{"run": {}}')
    runs, incomplete = find_runs([tmp_path, tmp_path / "two"])
    assert [run.label for run in runs] == ["one/aot", "two/aot", "two/aot-9", "two/aot-10", "two/dpo"]
    assert incomplete == []
    for link, target in {"linked": "../two/aot-9", "aot/up": "..", "three": "aot"}.items():
        (tmp_path / "one" / link).symlink_to(target)
    assert [run.label for run in find_runs([tmp_path / "one"] * 2)[0]] == ["aot", "linked"]
    for name, objective in (("a", "dpo"), ("b", "aot"), ("c", "dpo")):
        write_policy(tmp_path / "three" / name, objective=objective, outcomes=(TIE,) * 4)
    rows = write_report(tmp_path / "three", tmp_path / "report.html")["policies"]
    assert [row["run"] for row in rows] == ["a", "c", "b"]
    even = rows[0]["figures"]
    assert (even["win rate, ties dropped"], even["win rate, ties as half"].value) == (None, 0.5)


# ---- The command ----


def test_the_command_names_the_files_and_what_is_left_out(tmp_path, capsys):
    write_policy(tmp_path / "good")
    change(write_policy(tmp_path / "bad"), "run", to=None)
    main([str(tmp_path), "--out", str(tmp_path / "a" / "report.html")])
    out = tmp_path / "a" / "report"
    left_out, written = capsys.readouterr().out.splitlines()
    assert left_out.startswith("left out: bad: results.json: run: ") and written == f"{out}.html and {out}.md"
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"report.html", "report.md"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], ["no folder nowhere"]),
        (["."], ["no finished run in ."]),
        ([".", "--out", "x.txt"], ["--out x.txt", ".html"]),
    ],
)
def test_refusals(tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "begun" / "metrics.jsonl", [])
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert_one_line(capsys.readouterr().err, ["error: ", *words])
    assert not list(tmp_path.glob("*.html"))


def test_a_report_does_not_load_torch(tmp_path):
    write_reward_model(tmp_path / "rm")
    code = (
        "import sys; from trl_ext.evaluation import write_report; "
        f"write_report({str(tmp_path)!r}, {str(tmp_path / 'report.html')!r}); "
        "print(sorted({'torch', 'transformers', 'trl'} & set(sys.modules)))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
