"""What a reward model's mistakes have in common: length, overlap, and where the two responses part."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trl_ext.evaluation.judge import last_user_text
from trl_ext.evaluation.reward_models import reward_mistakes
from trl_ext.files import numbered_lines, parse_json

# Statistic -> what it is, for the report.
PATTERNS = {
    "length": "words of the response that the model prefers minus those of the other, mean",
    "longer": "share of the pairs of unequal length in which it prefers the longer",
    "overlap": "words in both responses / words in either (Jaccard), mean",
    "position": "words before the two part / words of the shorter, mean; 1 where one begins with the other",
    "label_wrong": "share of the pairs whose label contradicts the true order; ties of it left out",
}


def mistakes_of(
    pairs: Sequence[Mapping[str, Any]],
    scores: str | Path,
    *,
    count: int,
    true_score: Callable[[str, str], float] | None = None,
) -> dict[str, Any]:
    """The worst mistakes of a reward model on held-out pairs, and how mistakes differ from the other pairs.

    Args:
        pairs: rows with `row_id`, `prompt`, `chosen` and `rejected`.
        scores: the scores.jsonl of the reward model's run, of these pairs.
        count: most mistakes to return.
        true_score: `f(prompt_text, response)`, a known quality; None for none.

    Returns:
        `n` pairs; `patterns`, statistics of the `wrong` and of the `right` pairs as `pattern_statistics` gives them;
        and `worst`, the worst mistakes as `reward_mistakes` gives them, each with its own statistics.

    Raises:
        FileNotFoundError: no such file of scores.
        ValueError: the scores are not of these pairs.
    """
    found = _read_scores(Path(scores))
    missing = next((row["row_id"] for row in pairs if row["row_id"] not in found), None)
    if missing is not None:
        raise ValueError(f"{scores}: no score of row_id {missing}: the reward model was evaluated on other pairs")
    chosen, rejected = zip(*(found[row["row_id"]] for row in pairs), strict=True)
    every = reward_mistakes(pairs, chosen, rejected)
    wrong_ids = {row["row_id"] for row in every}
    described = {
        row["row_id"]: describe_pair(
            last_user_text(row["prompt"]), _text(row["chosen"]), _text(row["rejected"]), c - r, true_score
        )
        for row, c, r in zip(pairs, chosen, rejected, strict=True)
    }
    groups = {
        "wrong": [one for row_id, one in described.items() if row_id in wrong_ids],
        "right": [one for row_id, one in described.items() if row_id not in wrong_ids],
    }
    return {
        "n": len(pairs),
        "patterns": {name: pattern_statistics(group) for name, group in groups.items()},
        "worst": [{**row, **described[row["row_id"]]} for row in every[:count]],
    }


def describe_pair(
    prompt: str, chosen: str, rejected: str, margin: float, true_score: Callable[[str, str], float] | None = None
) -> dict[str, Any]:
    """What a pair is like: `length`, `overlap` and `position` as `PATTERNS` has them, and `label_wrong`.

    Args:
        prompt: the text of its last message.
        chosen, rejected: the responses.
        margin: score of the chosen minus that of the rejected one; at 0 the model prefers neither, and `length` is 0.
        true_score: as for `mistakes_of`; without it, and where both are equally good, `label_wrong` is None.
    """
    one, other = (re.findall(r"\w+", text.lower()) for text in (chosen, rejected))
    sign = (margin > 0) - (margin < 0)
    shared = 0
    while shared < min(len(one), len(other)) and one[shared] == other[shared]:
        shared += 1
    either = set(one) | set(other)
    truth = 0.0 if true_score is None else true_score(prompt, chosen) - true_score(prompt, rejected)
    return {
        "length": sign * (len(one) - len(other)),
        "overlap": len(set(one) & set(other)) / len(either) if either else 1.0,
        "position": shared / min(len(one), len(other)) if one and other else 0.0,
        "label_wrong": None if truth == 0 else truth < 0,
    }


def pattern_statistics(described: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """`n` pairs and the statistics of `PATTERNS`; None for what no pair has."""
    unequal = [one["length"] > 0 for one in described if one["length"]]
    labels = [one["label_wrong"] for one in described if one["label_wrong"] is not None]
    return {
        "n": len(described),
        "length": _mean([one["length"] for one in described]),
        "longer": _mean(unequal),
        "overlap": _mean([one["overlap"] for one in described]),
        "position": _mean([one["position"] for one in described]),
        "label_wrong": _mean(labels),
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _read_scores(path: Path) -> dict[str, tuple[float, float]]:
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}: the reward model was not evaluated on held-out pairs")
    found = {}
    with open(path, "rb") as file:
        for line, content in numbered_lines(file):
            try:
                row = parse_json((content or b"").decode("utf-8"))
                found[row["row_id"]] = (float(row["chosen_score"]), float(row["rejected_score"]))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {line}: {error}") from None
    return found


def _text(response: Sequence[Mapping[str, Any]] | str) -> str:
    return response if isinstance(response, str) else response[-1]["content"]
