"""Checks of the labels of preference pairs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit

from trl_ext.doctor.data import sides_of
from trl_ext.doctor.patient import Patient
from trl_ext.doctor.report import Found
from trl_ext.doctor.rows import as_text, is_tokens, plain_text
from trl_ext.doctor.table import check
from trl_ext.models.log_probs import score_responses

_PAIRS = "preference reward"
_SCORES = ("score", "rating", "reward")
# Columns that say where a row comes from.
_SOURCES = {"source", "subset", "dataset"}
# Of a classifier of pairs: the tokens that it knows, those that it reads of a response, the strength of its prior, and
# the parts of the data it tries.
_FEATURES, _TOKENS, _PRIOR, _FOLDS, _PARTS = 300, 256, 100.0, 5, (0.05, 0.1, 0.2, 0.4)


@check("labels-against-scores", "warning", "data", _PAIRS)
def labels_against_scores(patient: Patient) -> Found | None:
    for name, other in _score_columns(patient.many_rows[:1]):
        scores = [(row[name], row[other]) for row in patient.many_rows if None not in (row[name], row[other])]
        against = sum(chosen < rejected for chosen, rejected in scores)
        if against < max(3, 0.03 * len(scores)):
            continue
        return Found(
            f"the chosen response has the lower score in {against} of {len(scores)} pairs ({name} and {other})",
            "swap or drop these pairs; if lower scores are better, or other annotators gave them, all is well",
            severity="error" if against > 0.4 * len(scores) else None,
        )
    return None


def _score_columns(rows: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Columns of numbers that score the two responses, such as `score_chosen` and `score_rejected`."""
    row = rows[0] if rows else {}
    pairs = [(name, name.replace("chosen", "rejected")) for name in row if any(word in name for word in _SCORES)]
    return [pair for pair in pairs if pair[0] != pair[1] and all(isinstance(row.get(n), int | float) for n in pair)]


@check("pairs-contradict", "warning", "data", _PAIRS)
def pairs_contradict(patient: Patient) -> Found | None:
    rows = [row for row in patient.many_rows if "chosen" in row and "rejected" in row]
    pairs = [tuple(as_text(row.get(name, "")) for name in ("prompt", "chosen", "rejected")) for row in rows]
    known = set(pairs)
    against = sum((prompt, rejected, chosen) in known for prompt, chosen, rejected in pairs if chosen != rejected)
    if against < max(4, 0.02 * len(pairs)):
        return None
    return Found(
        f"{against} of {len(pairs)} pairs occur with both labels: what one row chooses, another rejects",
        "keep one label for each pair, such as that of most annotators; swapped files often cause this",
    )


@check("labels-swapped-in-part", "warning", "data", _PAIRS)
def labels_swapped_in_part(patient: Patient) -> Found | None:
    """A classifier of tokens and lengths, fitted to four fifths of the pairs, judges the last one.

    It finds a part of the data in which it is wrong more often than by chance. Labels that are swapped here and there
    look like the disagreement of annotators, and are not found.
    """
    rows = [row for row in patient.many_rows if sides_of(row) is not None]
    pairs = [sides_of(row) for row in rows]
    if len(pairs) < 200:
        return None
    start, share, score, others = _most_contrary_part(_predicted(pairs))
    first = round(start * len(pairs))
    if score > -3.5 or others < 3 or _is_another_source(rows, slice(first, first + int(share * len(pairs)))):
        return None
    return Found(
        f"what tells chosen from rejected in the other pairs is turned around in a part of {share:.0%} of the data, "
        f"near pair {first} of {len(pairs)} (z {score:.1f}, and {others:.1f} elsewhere)",
        "compare a few pairs of this part with others: one of the files may have its labels swapped; if its pairs are "
        "of another kind, such as safety beside helpfulness, all is well",
    )


def _is_another_source(rows: Sequence[dict[str, Any]], part: slice) -> bool:
    """Whether a column says that most rows of a part come from another source than most others."""
    for name in _SOURCES & rows[0].keys():
        values = [as_text(row.get(name)) for row in rows]
        inside, outside = Counter(values[part]), Counter(values[: part.start] + values[part.stop :])
        if inside.most_common(1)[0][0] != outside.most_common(1)[0][0]:
            return True
    return False


def _predicted(pairs: Sequence[tuple[Any, Any]]) -> np.ndarray:
    """The log-odds that each pair's label is as it is, by a classifier fitted without the pair; [N]."""
    sides = [[side if is_tokens(side) else plain_text(side) for side in pair] for pair in pairs]
    tokens = [[_first_tokens(side) for side in pair] for pair in sides]
    differ = Counter(token for chosen, rejected in tokens for token in set(chosen) ^ set(rejected))
    index = {token: place for place, (token, _) in enumerate(differ.most_common(_FEATURES))}
    x = np.zeros((len(pairs), len(index) + 1))
    for row, pair, (chosen, rejected) in zip(x, tokens, sides, strict=True):
        for side, sign in zip(pair, (1, -1), strict=True):
            row[[index[token] for token in set(side) if token in index]] += sign
        row[-1] = np.log1p(len(chosen)) - np.log1p(len(rejected))
    x /= np.maximum(x.std(axis=0), 1e-9)
    # Every label says that the chosen response is first.
    folds = np.random.default_rng(0).permutation(len(x)) % _FOLDS
    odds = np.zeros(len(x))
    for fold in range(_FOLDS):
        odds[folds == fold] = x[folds == fold] @ _fit(x[folds != fold])
    return odds


def _first_tokens(side: list[int] | str) -> list:
    return side.split(maxsplit=_TOKENS)[:_TOKENS] if isinstance(side, str) else side[:_TOKENS]


def _fit(x: np.ndarray) -> np.ndarray:
    """Weights of a logistic regression without intercept, for rows [N, F] whose labels are all 1."""

    def loss(weights: np.ndarray) -> tuple[float, np.ndarray]:
        odds = x @ weights
        return np.logaddexp(0, -odds).sum() + _PRIOR / 2 * weights @ weights, _PRIOR * weights - expit(-odds) @ x

    return minimize(loss, np.zeros(x.shape[1]), jac=True, method="L-BFGS-B", options={"maxiter": 100}).x


def _most_contrary_part(odds: np.ndarray) -> tuple[float, float, float, float]:
    """Start and share of the consecutive part that is predicted worst, and the z scores of it and of all others."""
    sums, squares = (np.concatenate([[0], np.cumsum(values)]) for values in (odds, odds**2))
    found = []
    for share in _PARTS:
        size = int(len(odds) * share)
        for start in range(0, len(odds) - size + 1, max(size // 4, 1)):
            part, square = sums[start + size] - sums[start], squares[start + size] - squares[start]
            z, rest = part / np.sqrt(square + 1e-12), (sums[-1] - part) / np.sqrt(squares[-1] - square + 1e-12)
            found.append((start / len(odds), share, float(z), float(rest)))
    return min(found, key=lambda one: one[2])


@check("preferences-satisfied", "warning", "probe", "preference")
def preferences_satisfied(patient: Patient) -> Found | None:
    """Scores of 24 pairs by the model before its first update."""
    patient.require_whole_model()
    by_side = [[one for one in patient.examples if one.side == side][:24] for side in ("chosen", "rejected")]
    split = [[(one, one.learned.index(True)) for one in side if any(one.learned[1:])] for side in by_side]
    if len(split[0]) < 20 or len(split[0]) != len(split[1]):
        return None
    means = []
    for side in split:
        prompts, responses = [one.ids[:at] for one, at in side], [one.ids[at:] for one, at in side]
        scores = score_responses(patient.model, prompts, responses, batch_size=patient.batch_size)
        means.append([(score.sum().item(), score.mean().item()) for score in scores])
    satisfied = [
        all(a > b for a, b in zip(chosen, rejected, strict=True)) for chosen, rejected in zip(*means, strict=True)
    ]
    if sum(satisfied) < 0.95 * len(satisfied):
        return None
    return Found(
        f"the model prefers the chosen response before training in {sum(satisfied)} of {len(satisfied)} pairs, by the "
        "sum and by the mean of its log-probabilities: there is little to learn",
        "choose rejected responses that the model might give, such as its own samples",
    )
