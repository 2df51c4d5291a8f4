"""Best of four by a trained verifier on GSM8K, against a random pick, a majority vote and the best possible pick.

`python -m benchmarks.gsm8k_verifier --data FOLDER` reads `FOLDER/gsm8k/example_model_solutions.jsonl` of
openai/grade-school-math: solutions of four models to each test question, marked right or wrong. Pairs of a right and a
wrong solution to one half of the questions train a reward model (`recipes/reward_model.py`), which then picks one of
the four solutions to each question of the other half. The solutions of one of the four models are right most often, so
that always picking its solution is compared as well. Prints a table and writes `results.json`. What is finished is
kept, so an interrupted run goes on by the same command. Flags that are not listed go to the recipe.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from pathlib import Path
from typing import Any

from benchmarks._pretrained import DATA, flags_of, train
from benchmarks.toy_seeds import figure, print_table
from trl_ext.evaluation import best_of_n, mean_with_interval, wilson_interval
from trl_ext.evaluation.reasoning.samples import majority_at_k
from trl_ext.files import write_json, write_json_lines
from trl_ext.rewards import RewardModel, parse_gsm8k_response

# The recipe evaluates no split: the held-out questions are evaluated below.
SETTINGS = {
    "learning_rate": 2e-5,
    "max_prompt_tokens": 256,
    "max_response_tokens": 256,
    "select_best": "none",
    "eval_split": "none",
}
# As in `48/2 = <<48/2=24>>24`.
CALCULATION = re.compile(r"<<[^<>]*>>")


def read_questions(path: Path) -> list[dict[str, Any]]:
    """Each question with its solutions, without the calculator's notes, and whether they are right, by model."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    return [
        {
            "prompt": [{"role": "user", "content": row.pop("question")}],
            "models": [name for name in row if name != "ground_truth"],
            "solutions": [CALCULATION.sub("", s["solution"]) for s in row.values() if isinstance(s, dict)],
            "right": [s["is_correct"] for s in row.values() if isinstance(s, dict)],
        }
        for row in rows
    ]


def pairs_of(question: dict[str, Any], generator: random.Random) -> list[dict[str, Any]]:
    """Pairs of a right and a wrong solution, drawn so that no solution is in two of them."""
    right, wrong = (
        [text for text, correct in zip(question["solutions"], question["right"], strict=True) if correct == side]
        for side in (True, False)
    )
    generator.shuffle(right)
    generator.shuffle(wrong)
    return [
        {"prompt": question["prompt"], "chosen": [said(chosen)], "rejected": [said(rejected)]}
        for chosen, rejected in zip(right, wrong, strict=False)
    ]


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def compare(train: list[dict[str, Any]], test: list[dict[str, Any]], scores: list[list[float]]) -> dict[str, Any]:
    """Accuracies of the picks, and by how much the verifier's is better than each of the others, on each question."""
    count = len(test[0]["models"])
    best = max(range(count), key=lambda index: sum(question["right"][index] for question in train))
    picks: dict[str, list[float]] = {"random": [], "majority": [], "best model": [], "verifier": [], "oracle": []}
    ranked = []
    for question, own in zip(test, scores, strict=True):
        right = question["right"]
        votes = [parse_gsm8k_response(text) for text in question["solutions"]]
        picks["random"].append(sum(right) / count)
        picks["majority"].append(majority_at_k(votes, right, count))
        picks["best model"].append(float(right[best]))
        picks["verifier"].append(best_of_n(own, [float(value) for value in right], count)["gold"])
        picks["oracle"].append(float(any(right)))
        values = list(zip(own, right, strict=True))
        ranked += [good > bad for good, correct in values if correct for bad, other in values if not other]
    low, high = wilson_interval(sum(ranked), len(ranked))
    return {
        "questions": len(test),
        "best_model": test[0]["models"][best],
        "accuracy": {name: mean_with_interval(values) for name, values in picks.items()},
        "gain": {
            name: mean_with_interval([a - b for a, b in zip(picks["verifier"], values, strict=True)], gains=True)
            for name, values in picks.items()
            if name != "verifier"
        },
        # Pairs of one question are not independent, so that this interval is a little too narrow.
        "pairs": {"accuracy": sum(ranked) / len(ranked), "low": low, "high": high, "n": len(ranked)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--folder", type=Path, default=Path("runs/gsm8k-verifier"))
    parser.add_argument("--questions", type=int, help="half to train on and half held out; all by default")
    given = flags_of(parser, "gsm8k/example_model_solutions.jsonl")
    generator = random.Random(given.seed)
    questions = read_questions(given.source)
    generator.shuffle(questions)
    questions = questions[: given.questions]
    half = len(questions) // 2
    pairs = [pair for question in questions[:half] for pair in pairs_of(question, generator)]
    write_json_lines(given.folder / "pairs.jsonl", pairs)
    verifier = train("reward_model", given, given.folder / "pairs.jsonl", SETTINGS)

    held_out = questions[half:]
    kept = given.folder / "scores.json"
    if not kept.is_file():
        # Where all solutions are right, or all wrong, every pick is as good as any other.
        mixed = [index for index, question in enumerate(held_out) if len({*question["right"]}) == 2]
        rows = [(held_out[i]["prompt"], text) for i in mixed for text in held_out[i]["solutions"]]
        scores = RewardModel(verifier, batch_size=8).score(*zip(*rows, strict=True), progress="held-out solutions")
        write_json(kept, dict(zip(mixed, scores.view(len(mixed), -1).tolist(), strict=True)))
    found = json.loads(kept.read_text())
    scores = [found.get(str(index), [0.0] * len(question["right"])) for index, question in enumerate(held_out)]
    results = compare(questions[:half], held_out, scores)
    write_json(given.folder / "results.json", {"train_pairs": len(pairs), **results})
    gains = {name: figure(gain) for name, gain in results["gain"].items()}
    print_table(
        f"{len(held_out)} questions | accuracy | the verifier's minus it",
        [[name, figure(own), gains.get(name, "")] for name, own in results["accuracy"].items()],
    )
    print(f"\nbest model: {results['best_model']}; held-out pairs: {figure(results['pairs'], 'accuracy')}")


if __name__ == "__main__":
    main()
