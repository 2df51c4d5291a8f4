"""A reward model and DPO on human preferences, against chance, length and the base model's log-probabilities.

`python -m benchmarks.human_preferences --data FOLDER` reads `FOLDER/hh_harmless/test.jsonl`, the pairs of HH-RLHF's
harmless-base. Part of them trains a reward model (`recipes/reward_model.py`) and a policy (`recipes/dpo.py`); other
conversations are held out. A DPO policy prefers the response whose log-probability it raised more, its implicit
reward. `length` prefers the shorter or the longer response, whichever is right more often on the training pairs.
Prints a table and writes `results.json`. What is finished is kept, so an interrupted run goes on by the same command.
Flags that are not listed go to both recipes.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

from benchmarks._pretrained import DATA, flags_of, train
from benchmarks.toy_seeds import figure, print_table
from trl_ext.data.formats import convert_file
from trl_ext.data.rows import read_jsonl
from trl_ext.evaluation import mean_with_interval
from trl_ext.files import write_json, write_json_lines

LIMITS = {"max_prompt_tokens": 192, "max_response_tokens": 96}
SETTINGS = {
    "reward_model": {"learning_rate": 2e-5, "select_best": "none"},
    "dpo": {"learning_rate": 5e-6, "beta": 0.1, "generation_eval_every": 0},
}


def split_pairs(rows: list[dict[str, Any]], sizes: tuple[int, int], seed: int) -> list[list[dict[str, Any]]]:
    """Rows to train on and held-out rows; conversations that begin with the same message are on the same side."""
    conversations: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        conversations.setdefault(row["prompt"][0]["content"], []).append(row)
    order = list(conversations.values())
    random.Random(seed).shuffle(order)
    parts: list[list[dict[str, Any]]] = []
    for size in sizes:
        part: list[dict[str, Any]] = []
        while len(part) < size:
            if not order:
                raise SystemExit(
                    f"error: {len(rows)} pairs cannot be split into {sizes[0]} and {sizes[1]}: ask for fewer"
                )
            part += order.pop()
        parts.append(part[:size])
    return parts


def length_margins(rows: list[dict[str, Any]], sign: int = 1) -> list[float]:
    """How many characters longer each chosen response is; shorter, for a sign of -1."""
    return [sign * (len(row["chosen"][0]["content"]) - len(row["rejected"][0]["content"])) for row in rows]


def compare(margins: dict[str, list[float]]) -> dict[str, Any]:
    """Each one's accuracy, what it is more than that of length, and how both fare where they disagree."""
    right = {name: [margin > 0 for margin in own] for name, own in margins.items()}
    results = {}
    for name, own in right.items():
        both = list(zip(own, right["length"], strict=True))
        results[name] = {
            "accuracy": mean_with_interval(own),
            "minus_length": mean_with_interval([float(a) - float(b) for a, b in both], gains=True),
            "only_this_right": both.count((True, False)),
            "only_length_right": both.count((False, True)),
        }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--folder", type=Path, default=Path("runs/human-preferences"))
    parser.add_argument("--train_pairs", type=int, default=600)
    parser.add_argument("--test_pairs", type=int, default=500)
    given = flags_of(parser, "hh_harmless/test.jsonl")
    rows = convert_file(given.source, "hh_rlhf", skip_bad_rows=True)
    trained, held_out = split_pairs(rows, (given.train_pairs, given.test_pairs), given.seed)
    data = given.folder / "data"
    write_json_lines(data / "train_prefs.jsonl", trained)
    write_json_lines(data / "test_prefs.jsonl", held_out)

    longer, shorter = (sum(margin > 0 for margin in length_margins(trained, sign)) for sign in (1, -1))
    sign = 1 if longer > shorter else -1
    reward_model = train("reward_model", given, data, SETTINGS["reward_model"] | LIMITS)
    policy = train("dpo", given, data, SETTINGS["dpo"] | LIMITS)
    scored = [row for _, row in read_jsonl(policy / "scores.jsonl").rows]
    own, base = (
        [row[f"{who}chosen_log_prob"] - row[f"{who}rejected_log_prob"] for row in scored] for who in ("", "base_")
    )
    margins = {
        "length": length_margins(held_out, sign),
        "base, log-probability": base,
        "DPO, log-probability": own,
        "DPO, implicit reward": [after - before for after, before in zip(own, base, strict=True)],
        "reward model": [row["margin"] for _, row in read_jsonl(reward_model / "scores.jsonl").rows],
    }
    results = compare(margins)
    described = {
        "train_pairs": len(trained),
        "test_pairs": len(held_out),
        "prefers": "longer" if sign > 0 else "shorter",
    }
    write_json(given.folder / "results.json", {**described, "results": results})
    print_table(
        f"{len(held_out)} held-out pairs | accuracy | minus length | only this right | only length right",
        [[n, figure(r["accuracy"]), figure(r["minus_length"]), *[*r.values()][2:]] for n, r in results.items()],
    )
    print(f"\nlength prefers the {described['prefers']} response")


if __name__ == "__main__":
    main()
