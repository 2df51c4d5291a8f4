"""The benchmark of a verifier for GSM8K, here on `toy`."""

from __future__ import annotations

import json
import random
import sys

import pytest

from benchmarks import gsm8k_verifier
from trl_ext.files import write_json_lines

MODELS = ("small", "large")


def question(index: int, *right: bool) -> dict:
    """A question with one solution of each model, as GSM8K's file has it."""
    solutions = [f"It is {index} + 1 = <<{index}+1={index + 1}>>{index + 1}\nA: {index + (2 - ok)}" for ok in right]
    marked = [{"is_correct": ok, "solution": text} for ok, text in zip(right, solutions, strict=True)]
    return {
        "question": f"What is {index} + 1?",
        "ground_truth": f"A: {index + 1}",
        **dict(zip(MODELS, marked, strict=True)),
    }


def run(monkeypatch, benchmark, *flags: str) -> None:
    monkeypatch.setattr(sys, "argv", [benchmark.__name__, *map(str, flags)])
    benchmark.main()


class TestVerifier:
    def test_pairs_are_of_one_question_and_no_solution_is_in_two(self, tmp_path):
        path = tmp_path / "solutions.jsonl"
        write_json_lines(path, [question(1, True, False), question(2, True, True)])
        first, second = gsm8k_verifier.read_questions(path)
        (pair,) = gsm8k_verifier.pairs_of(first, random.Random(0))
        assert pair["prompt"] == [{"role": "user", "content": "What is 1 + 1?"}]
        assert pair["chosen"] == [{"role": "assistant", "content": "It is 1 + 1 = 2\nA: 2"}]
        assert pair["rejected"] == [{"role": "assistant", "content": "It is 1 + 1 = 2\nA: 3"}]
        assert gsm8k_verifier.pairs_of(second, random.Random(0)) == []
        four = {**first, "solutions": ["a", "b", "c", "d"], "right": [True, False, True, False]}
        texts = [
            row[side][0]["content"]
            for row in gsm8k_verifier.pairs_of(four, random.Random(0))
            for side in row
            if side != "prompt"
        ]
        assert sorted(texts) == ["a", "b", "c", "d"]

    def test_the_comparison_by_hand(self):
        """Three questions, answered by four models; the first model is right most often on the training part.

        The picks: one of four, the vote 7 (right; two votes to one and one), the first model's, the best-scored, any.
        1. right T F T F, answers 7 8 7 9, scores 1 2 3 0: random 1/2, majority 1, best model 1, verifier 1, oracle 1
        2. right F F F T, answers 5 5 6 7, scores 0 0 0 1: random 1/4, majority 0, best model 0, verifier 1, oracle 1
        3. all wrong: 0 for each.
        """
        models = ["a", "b", "c", "d"]
        train = [
            {"models": models, "right": [True, False, False, True]},
            {"models": models, "right": [True] + [False] * 3},
        ]
        answers = [[7, 8, 7, 9], [5, 5, 6, 7], [1, 2, 3, 4]]
        right = [[True, False, True, False], [False, False, False, True], [False] * 4]
        test = [
            {"models": models, "solutions": [f"A: {n}" for n in own], "right": marks}
            for own, marks in zip(answers, right, strict=True)
        ]
        found = gsm8k_verifier.compare(train, test, [[1, 2, 3, 0], [0, 0, 0, 1], [0] * 4])
        means = {name: row["mean"] for name, row in found["accuracy"].items()}
        assert means == pytest.approx(
            {"random": 0.25, "majority": 1 / 3, "best model": 1 / 3, "verifier": 2 / 3, "oracle": 2 / 3}
        )
        assert found["best_model"] == "a"
        assert found["gain"]["majority"]["mean"] == pytest.approx(1 / 3)
        assert found["gain"]["oracle"]["mean"] == 0
        # 1 beats 0 but not 2, 3 beats both, and 1 beats the three zeros: 6 of 7 pairs.
        assert (found["pairs"]["accuracy"], found["pairs"]["n"]) == (pytest.approx(6 / 7), 7)

    @pytest.mark.long
    def test_a_run_that_is_finished_is_read_again(self, tmp_path, monkeypatch, capfd):
        source = tmp_path / "gsm8k" / "example_model_solutions.jsonl"
        write_json_lines(source, [question(i, i % 2 == 0, i % 3 == 0) for i in range(24)])
        flags = ["--data", tmp_path, "--model", "toy", "--folder", tmp_path / "run", "--max_steps", 2]
        run(monkeypatch, gsm8k_verifier, *flags)
        table = capfd.readouterr().out
        results = json.loads((tmp_path / "run" / "results.json").read_text())
        assert results["questions"] == 12
        assert results["accuracy"]["random"]["mean"] <= results["accuracy"]["oracle"]["mean"]
        assert "| majority |" in table

        monkeypatch.setattr("benchmarks.toy_seeds.subprocess.run", lambda *_, **__: pytest.fail("it ran again"))
        run(monkeypatch, gsm8k_verifier, *flags)
        assert capfd.readouterr().out == table
        with pytest.raises(SystemExit):
            run(monkeypatch, gsm8k_verifier, *flags[:-1], 3)
        assert "holds a run with other flags: give another --folder" in capfd.readouterr().err

    def test_without_the_data(self, tmp_path, monkeypatch, capfd):
        with pytest.raises(SystemExit):
            run(monkeypatch, gsm8k_verifier, "--data", tmp_path, "--folder", tmp_path / "run")
        assert "example_model_solutions.jsonl: no such file; give the folder that holds" in capfd.readouterr().err
        assert not (tmp_path / "run").exists()
