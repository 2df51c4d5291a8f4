"""What the report says of damaged files, by file and field, and which folders it finds through links."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.test_report import Page, write_example, write_policy, write_reward_model, write_rows
from trl_ext.evaluation import write_report
from trl_ext.evaluation.report import main
from trl_ext.evaluation.reporting.runs import find_runs


def change(path: Path, *keys: str | int, to) -> None:
    """Set the value under the keys of a JSON file; NaN is written as Python writes it."""
    results = json.loads(path.read_text())
    inner = results
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = to
    path.write_text(json.dumps(results))


def problems(folder: Path) -> list[tuple[str, str, str]]:
    summary = write_report(folder, folder.parent / "report.html")
    return [(row["file"], row["field"], row["problem"]) for row in summary["problems"]]


@pytest.fixture
def policy(tmp_path) -> Path:
    folder = tmp_path / "runs" / "dpo"
    write_policy(folder, objective="dpo", responses=["x"] * 4, outcomes=["candidate", "base", "tie", "tie"])
    return folder


@pytest.fixture
def reward_model(tmp_path) -> Path:
    write_reward_model(tmp_path / "runs" / "rm")
    return tmp_path / "runs" / "rm"


class TestFieldsOfResults:
    @pytest.mark.parametrize(
        ("keys", "value", "problem"),
        [
            (("win_rate", "half", "rate"), float("nan"), "NaN, not a finite number"),
            (("win_rate", "half", "low"), float("-inf"), "-Infinity, not a finite number"),
            (("win_rate", "agreed"), "lost", '"lost", not an object'),
            (("score", "gain", "mean"), "0.25", '"0.25", not a finite number'),
            (("score", "by_kind", "say", "policy"), None, "null, not a finite number"),
            (("rewards", "judge-rm", "gain", "high"), [1], "a list, not a finite number"),
            (("kl", "mean"), True, "true, not a finite number"),
            (("preferences", "after", "n"), {}, "an object, not a finite number"),
            (("generations", "base", "distinct_2"), float("nan"), "NaN, not a finite number"),
            (("run", "training_seconds"), "fast", '"fast", not a finite number'),
            (("run", "model"), 3, "3, not text"),
        ],
    )
    def test_a_damaged_field_is_named(self, policy, keys, value, problem):
        change(policy / "results.json", *keys, to=value)
        assert problems(policy.parent) == [("results.json", ".".join(keys), problem)]

    def test_the_accuracy_on_verified_problems(self, policy):
        change(policy / "results.json", "reasoning", to={"after": {"greedy": {"accuracy": {"mean": "high"}}}})
        field = "reasoning.after.greedy.accuracy.mean"
        assert problems(policy.parent) == [("results.json", field, '"high", not a finite number')]

    def test_an_interval_beside_its_figure(self, policy):
        """The gain is .25; its interval then goes from .3 to .28."""
        change(policy / "results.json", "score", "gain", "low", to=0.3)
        assert problems(policy.parent) == [
            ("results.json", "score.gain", "0.25 is not in its interval, 0.3 to 0.28"),
        ]

    def test_an_interval_without_its_figure(self, policy):
        change(policy / "results.json", "kl", to={"low": 1.0, "high": 2.0})
        assert problems(policy.parent) == [("results.json", "kl.mean", "missing")]

    def test_fields_of_a_reward_model(self, reward_model):
        """The second bin is empty, so that its nulls are as they should be."""
        change(reward_model / "results.json", "pairs", "ece", to=float("inf"))
        change(reward_model / "results.json", "pairs", "calibration", 2, "accuracy", to=None)
        change(reward_model / "results.json", "true_order", "label_agreement", to=[])
        assert problems(reward_model.parent) == [
            ("results.json", "pairs.ece", "Infinity, not a finite number"),
            ("results.json", "pairs.calibration.2.accuracy", "null, not a finite number"),
            ("results.json", "true_order.label_agreement", "a list, not a finite number"),
        ]

    def test_what_a_run_does_not_have_is_no_problem(self, tmp_path, reward_model):
        """No judge, no known quality, no held-out pairs, pairs that are all ties in their true order."""
        (tmp_path / "runs" / "bare").mkdir()
        bare = {"run": {"objective": "dpo"}, "win_rate": None, "score": None, "rewards": None}
        (tmp_path / "runs" / "bare" / "results.json").write_text(json.dumps(bare))
        ties = {"n": 0, "ties": 8, "accuracy": None, "low": 0.0, "high": 1.0, "label_agreement": None}
        change(reward_model / "results.json", "true_order", to=ties)
        write_example(tmp_path / "runs" / "example")
        assert problems(tmp_path / "runs") == []

    def test_results_that_the_library_writes_have_no_problem(self, tmp_path):
        """Of a policy and a base of one response each, the same: no spread, no agreed verdict, no ordered pair."""
        from trl_ext.evaluation import GroundTruthJudge, compare_generations, reward_metrics, true_order_metrics
        from trl_ext.rollouts import Generation

        prompts = [{"row_id": "a", "prompt": [{"role": "user", "content": "p"}], "kind": "k"}]
        same = [Generation([0], [], "", False)]

        def score(prompt, response, finished=True):
            return 0.5

        comparison = compare_generations(
            prompts, same, same, max_new_tokens=8, judge=GroundTruthJudge(score), score_function=score
        )
        pairs = reward_metrics([2.0], [1.0])
        order = true_order_metrics([2.0], [1.0], [1.0], [1.0])
        for name, results in (("policy", comparison.summary), ("rm", {"pairs": pairs, "true_order": order})):
            (tmp_path / "runs" / name).mkdir(parents=True)
            (tmp_path / "runs" / name / "results.json").write_text(json.dumps({"run": {}, **results}))
        write_rows(tmp_path / "runs" / "policy" / "generations.jsonl", comparison.rows)
        assert problems(tmp_path / "runs") == []


class TestFieldsOfRows:
    def test_metrics(self, policy):
        """A metric that is logged as NaN is null, as the trainers write it; one that no chart shows counts as well."""
        rows = [
            {"step": 1, "loss": None, "grad_norm": 1.0, "own/metric": "any"},
            {"step": 2, "loss": float("nan"), "grad_norm": "big", "own/metric": float("inf")},
            {"step": 3, "loss": 0.5, "grad_norm": 1.5, "seconds": "late"},
        ]
        write_rows(policy / "metrics.jsonl", rows)
        assert problems(policy.parent) == [
            ("metrics.jsonl", "loss", "null, not a finite number; first of 2 at step 1"),
            ("metrics.jsonl", "grad_norm", '"big", not a finite number; at step 2'),
            ("metrics.jsonl", "own/metric", "Infinity, not a finite number; at step 2"),
            ("metrics.jsonl", "seconds", '"late", not a finite number; at step 3'),
        ]

    def test_generations_and_mistakes(self, policy, reward_model):
        row = {"row_id": "a", "prompt_text": "p", "response_text": "r"}
        bad = {"score": float("nan"), "outcome": "draw", "finished": "yes", "reward/rm": "high", "base_score": None}
        write_rows(policy / "generations.jsonl", [row, {**row, "row_id": "b", **bad}])
        row = {"row_id": "c", "prompt_text": "p", "chosen_text": "r", "rejected_text": "s", "margin": -1.0}
        write_rows(reward_model / "reward_mistakes.jsonl", [{**row, "chosen_score": None, "rejected_score": 2.0}])
        assert problems(policy.parent) == [
            ("generations.jsonl", "score", 'NaN, not a finite number; at row_id "b"'),
            ("generations.jsonl", "outcome", '"draw", none of candidate, base, tie; at row_id "b"'),
            ("generations.jsonl", "finished", '"yes", neither true nor false; at row_id "b"'),
            ("generations.jsonl", "reward/rm", '"high", not a finite number; at row_id "b"'),
            ("reward_mistakes.jsonl", "chosen_score", 'null, not a finite number; at row_id "c"'),
        ]

    @pytest.mark.parametrize("content", ["", "\n\n"])
    def test_an_emptied_file_of_responses(self, policy, reward_model, content):
        """A reward model without mistakes leaves an empty file of them."""
        (policy / "generations.jsonl").write_text(content)
        (reward_model / "reward_mistakes.jsonl").write_text("")
        assert problems(policy.parent) == [("generations.jsonl", "", "the file is empty")]

    def test_a_file_that_cannot_be_read(self, policy):
        (policy / "metrics.jsonl").unlink()
        (policy / "metrics.jsonl").mkdir()
        assert problems(policy.parent) == [("metrics.jsonl", "", "cannot be read: Is a directory")]


def test_problems_are_in_the_page_the_markdown_the_json_and_the_terminal(policy, tmp_path, capsys):
    change(policy / "results.json", "kl", "mean", to=float("nan"))
    change(policy / "results.json", "run", "objective", to="<b>" * 40)
    change(policy / "results.json", "run", "seed", to="<b>" * 40)
    main([str(policy), "--out", str(tmp_path / "report.html")])
    assert "Problems\n" in capsys.readouterr().out
    main([str(policy), "--out", str(tmp_path / "report.html"), "--json"])
    rows = json.loads(capsys.readouterr().out)["problems"]
    assert rows[1] == {"run": "dpo", "file": "results.json", "field": "kl.mean", "problem": "NaN, not a finite number"}
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert page.column("table-problems", "run") == ["dpo", "dpo"]
    assert page.column("table-problems", "field") == ["run.seed", "kl.mean"]
    assert page.column("table-problems", "problem")[0] == '"' + "<b>" * 13 + "..., not a finite number"
    assert ("a", {"href": "#problems"}) in page.tags
    assert 'href="#problems">2 problems in the files of 1 run</a>' in (tmp_path / "report.html").read_text()
    markdown = (tmp_path / "report.md").read_text()
    assert "## Problems" in markdown
    assert "| dpo | results.json | kl.mean | NaN, not a finite number |" in markdown


def test_a_report_without_problems_does_not_speak_of_them(policy, tmp_path):
    summary = write_report(policy, tmp_path / "report.html")
    assert summary["problems"] == []
    for name in ("report.html", "report.md"):
        assert "problem" not in (tmp_path / name).read_text(encoding="utf-8").lower()


class TestLinks:
    def run(self, folder: Path) -> Path:
        folder.mkdir(parents=True)
        (folder / "results.json").write_text('{"run": {}}')
        return folder

    def labels(self, *folders: Path) -> list[str]:
        return [run.label for run in find_runs(folders)[0]]

    def test_links_to_runs_and_to_folders_of_runs_are_followed(self, tmp_path):
        """A linked run goes by the name of its link, and lies where it lies."""
        self.run(tmp_path / "elsewhere" / "a1b2")
        self.run(tmp_path / "more" / "deep" / "grpo")
        (tmp_path / "runs").mkdir()
        (tmp_path / "runs" / "dpo").symlink_to(tmp_path / "elsewhere" / "a1b2")
        (tmp_path / "runs" / "group").symlink_to(os.path.join("..", "more"))
        runs, _ = find_runs([tmp_path / "runs"])
        assert [run.label for run in runs] == ["dpo", "grpo"]
        assert runs[0].folder == (tmp_path / "elsewhere" / "a1b2").resolve()

    def test_a_run_that_is_reached_twice_counts_once_by_its_own_name(self, tmp_path):
        self.run(tmp_path / "runs" / "z-run")
        (tmp_path / "runs" / "a-link").symlink_to("z-run")
        (tmp_path / "all").symlink_to("runs")
        assert self.labels(tmp_path / "all", tmp_path / "runs") == ["z-run"]
        assert self.labels(tmp_path / "runs") == ["z-run"]

    def test_loops_end(self, tmp_path):
        """Links to themselves, to each other, and to a folder that they lie in, from which nothing else is taken."""
        self.run(tmp_path / "other")
        inner = self.run(tmp_path / "runs" / "one") / "inner"
        inner.mkdir()
        (inner / "up").symlink_to(tmp_path / "runs")
        (inner / "top").symlink_to(tmp_path)
        (inner / "self").symlink_to("self")
        self.run(tmp_path / "runs" / "two")
        (inner / "two").symlink_to(tmp_path / "runs" / "two")
        (tmp_path / "runs" / "two" / "one").symlink_to(tmp_path / "runs" / "one")
        (tmp_path / "runs" / "gone").symlink_to("nowhere")
        assert self.labels(tmp_path / "runs") == ["one", "two"]

    def test_links_of_hidden_names_and_of_checkpoints_are_not_followed(self, tmp_path):
        self.run(tmp_path / "elsewhere")
        self.run(tmp_path / "runs" / "dpo")
        for name in (".hidden", "checkpoint-7"):
            (tmp_path / "runs" / name).symlink_to(tmp_path / "elsewhere")
        assert self.labels(tmp_path / "runs") == ["dpo"]

    def test_a_path_through_a_link_and_back_is_what_the_system_takes_it_for(self, tmp_path):
        """`link/..` is the folder that holds the link's target, not the one that holds the link."""
        self.run(tmp_path / "far" / "target")
        self.run(tmp_path / "far" / "beside")
        (tmp_path / "near").mkdir()
        (tmp_path / "near" / "link").symlink_to(tmp_path / "far" / "target")
        assert self.labels(tmp_path / "near" / "link" / "..") == ["beside", "target"]
