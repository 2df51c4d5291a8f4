"""Results files: what recipes write is read back, damage is named in one line, and runs are found in folders."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.files import write_rows
from tests.support.refusals import assert_one_line
from tests.support.report_runs import LOSS, TIE, WIN, change, report, write_example, write_policy, write_reward_model
from trl_ext.evaluation import (
    GroundTruthJudge,
    compare_generations,
    reward_metrics,
    true_order_metrics,
    wilson_interval,
    write_report,
)
from trl_ext.evaluation.reasoning import summarize_reasoning
from trl_ext.evaluation.report import main
from trl_ext.evaluation.reporting.runs import find_runs
from trl_ext.rollouts import Generation


class TestWhatTheLibraryWrites:
    PAIRS = reward_metrics([2.0, 1.0, 0.5], [1.0, 2.0, 0.0])

    @pytest.mark.parametrize(
        "results",
        [
            {"pairs": PAIRS, "true_order": true_order_metrics([2.0], [1.0], [1.0], [1.0]), "selection": None},
            {"pairs": None, "true_order": None},
            dict.fromkeys(("win_rate", "score", "rewards", "preferences", "kl", "generations")),
            {"best": None, "sft": {}, "best_of_n": {"curve": []}},
            {"score": {"policy": 0.5}, "rewards": {"rm": {"policy": None, "reference": 1.5}}},
        ],
    )
    def test_it_is_read(self, tmp_path, results):
        results = {"run": {"objective": "a"}, **results}
        (tmp_path / "results.json").write_text(json.dumps(results))
        assert report(tmp_path)[0]["problems"] == []

    def test_a_comparison(self, tmp_path):
        """The win rate again from the outcomes of the rows: of 5 prompts 3 wins, a loss and a tie."""

        def score(prompt, response, finished=True):
            return float(response == "good")

        answers = (["good"] * 3 + ["bad"] * 2, ["bad"] * 3 + ["good", "bad"])
        texts = ([Generation([0], [0] * len(text), text, True) for text in of] for of in answers)
        prompts = [{"row_id": str(i), "prompt": [{"role": "user", "content": f"p{i}"}]} for i in range(5)]
        judged = {"judge": GroundTruthJudge(score), "score_function": score}
        comparison = compare_generations(prompts, *texts, max_new_tokens=8, **judged)
        comparison.write(tmp_path / "policy", objective="dpo")
        assert [row["outcome"] for row in comparison.rows] == [WIN] * 3 + [LOSS, TIE]
        summary, _ = report(tmp_path / "policy")
        (row,) = summary["policies"]
        low, high = wilson_interval(3, 4)
        assert row["win_rate"]["agreed"] == {"value": 0.75, "low": low, "high": high, "n": 4}
        assert row["win_rate"]["half"]["value"] == 0.7
        assert row["score_gain"]["value"] == pytest.approx((3 - 1) / 5)
        assert row["tokens"] == {"base": (3 * 3 + 4 + 3) / 5, "policy": (3 * 4 + 2 * 3) / 5}
        assert summary["problems"] == []

    @pytest.mark.parametrize(("temperature", "decoding"), [(0, "greedy"), (1.0, "sampled")])
    def test_an_evaluation_on_verified_problems(self, tmp_path, temperature, decoding):
        graded = {"category": "correct", "answer_reward": 1.0, "format_reward": 1.0, "generated_num_tokens": 3}
        rows = [{"row_id": name, "finished": True, "sample": 0, "reward": 1.0, **graded} for name in "ab"]
        found = {"run": {"sampling": {"temperature": temperature}}, "reasoning": summarize_reasoning(rows)}
        (tmp_path / "results.json").write_text(json.dumps(found))
        (row,) = report(tmp_path)[0]["policies"]
        assert {name for name, value in row["accuracy"].items() if value} == {decoding}
        assert row["accuracy"][decoding]["value"] == 1.0


class TestDamage:
    def test_damage_is_named_and_the_run_is_left_out(self, tmp_path, capsys):
        """Fields by the keys that lead to them, and whole files; the other run is shown."""
        number, expected = "Input should be a valid number, got", {}
        for place, (keys, value, reason) in enumerate(
            (
                (("win_rate", "half", "rate"), float("nan"), "Input should be a finite number, got NaN"),
                (("score", "gain", "mean"), "0.25", f'{number} "0.25"'),
                (("generations", "base", "distinct_2"), "x" * 50, f'{number} "{"x" * 39}...'),
            )
        ):
            change(write_policy(tmp_path / "runs" / f"bad-{place}"), *keys, to=value)
            expected[f"bad-{place}"] = f"results.json: {'.'.join(keys)}: {reason}"
        for name, content, reason in (
            ("cut", '{"run": {"seed', "Invalid JSON: EOF while parsing"),
            ("empty", "", "Invalid JSON: EOF while parsing a value at line 1 column 0"),
            ("own", '{"recipe": "own"}', "run: Field required"),
        ):
            (tmp_path / "runs" / name).mkdir()
            (tmp_path / "runs" / name / "results.json").write_text(content)
            expected[name] = f"results.json: {reason}"
        write_policy(tmp_path / "runs" / "good")
        summary, page = report(tmp_path / "runs")
        assert [row["run"] for row in summary["policies"]] == ["good"]
        told = {row["run"]: row["reason"] for row in summary["incomplete"]}
        assert list(told.values()) == page.column("incomplete", "why") and told.keys() == expected.keys()
        assert all(told[name].startswith(reason) for name, reason in expected.items()), told
        with pytest.raises(SystemExit):
            main([str(tmp_path / "runs" / "bad-0"), "--out", str(tmp_path / "r.html")])
        assert_one_line(capsys.readouterr().err, ["a results.json", f"bad-0: {expected['bad-0']}"])

    def test_damaged_lines_are_left_out_and_said(self, tmp_path, capsys):
        run = write_policy(tmp_path / "run")
        with (run / "metrics.jsonl").open("ab") as file:
            file.write(
                b'{"step": 41, "loss": NaN}\n{"step": 42, "loss": null}\n{"loss": 1}\n\xff\xfe\n{"step": 43, "lo'
            )
        row = {"prompt_text": "p", "response_text": "r"}
        write_rows(run / "generations.jsonl", [row, {**row, "outcome": "draw"}, {**row, "score": "high"}])
        main([str(tmp_path), "--out", str(tmp_path / "report.html")])
        expected = [
            "3 of 12 lines cannot be read and are left out; line 10: step: Field required",
            "loss: not a finite number 2 times, first at step 41",
            "2 of 3 lines cannot be read and are left out; line 2: outcome: Input should be 'candidate', 'base' or "
            "'tie', got \"draw\"",
        ]
        printed = capsys.readouterr().out
        assert all(text in printed for text in expected)
        summary, page = report(run)
        assert [row["problem"] for row in summary["problems"]] == page.column("problems", "problem") == expected
        assert 'href="#problems">3 problems in the files of 1 run</a>' in page.source
        assert "2 of 3 lines cannot be read" in (tmp_path / "report.md").read_text(encoding="utf-8")


class TestFindingRuns:
    def test_labels_are_paths_below_the_common_folder(self, tmp_path):
        """Links are followed, also to the folder that holds the link, and a run counts once."""
        for path in ("one/aot", "two/aot", "two/dpo", "two/aot-10", "two/aot-9", "two/checkpoint-5/x", "two/.hidden"):
            (tmp_path / path).mkdir(parents=True)
            (tmp_path / path / "results.json").write_text('{"run": {}}')
        runs, incomplete = find_runs([tmp_path, tmp_path / "two"])
        assert [run.label for run in runs] == ["one/aot", "two/aot", "two/aot-9", "two/aot-10", "two/dpo"]
        assert incomplete == []
        for link, target in {"linked": "../two/aot-9", "aot/up": "..", "three": "aot"}.items():
            (tmp_path / "one" / link).symlink_to(target)
        assert [run.label for run in find_runs([tmp_path / "one"] * 2)[0]] == ["aot", "linked"]

    def test_a_run_that_goes_on_is_incomplete(self, tmp_path):
        write_policy(tmp_path / "done")
        for name in ("now", "begun"):
            (tmp_path / name).mkdir()
        write_rows(tmp_path / "now" / "metrics.jsonl", [{"step": 5, "loss": 1.0}, {"step": 10, "loss": 0.5}])
        (tmp_path / "begun" / "config.yaml").write_text("a: 1\n")
        summary = write_report([tmp_path], tmp_path / "report.html")
        assert [(row["run"], row["reason"]) for row in summary["incomplete"]] == [
            ("begun", "no results.json, nothing logged"),
            ("now", "no results.json, last logged at step 10"),
        ]


class TestCommand:
    def test_prints_a_table_and_names_the_files_or_prints_json(self, tmp_path, capsys):
        example = write_example(tmp_path / "runs")
        main([str(example), "--out", str(tmp_path / "a" / "report.html")])
        printed = capsys.readouterr().out
        assert "0.625 [0.515, 0.695]" in printed and "Reward models" in printed
        assert f"{tmp_path / 'a' / 'report.html'} and {tmp_path / 'a' / 'report.md'}" in printed
        assert {path.name for path in (tmp_path / "a").iterdir()} == {"report.html", "report.md"}
        main([str(example), "--out", str(tmp_path / "report.html"), "--json"])
        summary = json.loads(capsys.readouterr().out)
        assert summary["policies"][0]["kl"] == {"value": 1.5, "low": 1.3, "high": 1.7, "n": 4}
        assert summary["reward_models"][0]["ece"] == 0.18

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["nowhere"], ["no folder nowhere", "folders that hold runs"]),
            (["."], ["no finished run in .", "results.json", "begun: no results.json"]),
            ([".", "--out", "x.txt"], ["--out x.txt", ".html"]),
            ([".", "--max_prompts", "-1"], ["--max_prompts", "at least 0", "-1"]),
        ],
    )
    def test_refusals(self, tmp_path, monkeypatch, capsys, arguments, words):
        monkeypatch.chdir(tmp_path)
        write_rows(tmp_path / "begun" / "metrics.jsonl", [])
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 2
        assert_one_line(capsys.readouterr().err, ["error: ", *words])
        assert not list(tmp_path.glob("*.html"))

    def test_loads_neither_torch_nor_matplotlib(self, tmp_path):
        write_reward_model(tmp_path / "rm")
        code = (
            "import sys; from trl_ext.evaluation import write_report; "
            f"write_report({str(tmp_path)!r}, {str(tmp_path / 'report.html')!r}); "
            "print(sorted({'torch', 'transformers', 'trl', 'matplotlib'} & set(sys.modules)))"
        )
        assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
