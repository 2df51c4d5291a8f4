"""Rows of the golden values for the tables of the library: preference losses, algorithms and advantages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from tests.golden import inputs as given
from tests.golden.inputs import LOG_PROBS, MASK, OLD_LOG_PROBS, REF_LOG_PROBS, RESPONSE_ADVANTAGES, REWARDS
from trl_ext import losses
from trl_ext.advantages import ADVANTAGES
from trl_ext.algorithms import algorithms
from trl_ext.losses.reductions import AGGREGATIONS, KL_ESTIMATORS
from trl_ext.registry import preference_losses

# A row: `kind/name/settings`, a function, and the inputs that it is called with and that have a gradient.
Row = tuple[str, Callable[..., Any], dict[str, Tensor]]

# Tokens of the responses whose rewards are scored.
LENGTHS = torch.arange(16) * 5 % 16 + 1

LOSS_OPTIONS: dict[str, list[dict[str, Any]]] = {
    "cdpo": [{"label_smoothing": 0.25}, {"label_smoothing": 0.0}],
    "robust_dpo": [{"label_smoothing": 0.25}, {"label_smoothing": 0.0}],
    "ipo": [{"length_normalized": True}],
    "dpop": [{"penalty": 2.0}],
    "sppo": [
        {"chosen_win_probability": "win", "rejected_win_probability": "loss"},
        {"chosen_win_probability": 0.75, "rejected_win_probability": 0.375},
    ],
    "simpo": [{"gamma": 0.75}, {"gamma_beta_ratio": 0.25}],
    "repo": [{"gamma": 0.25}],
    "cpo": [{"nll_weight": 0.5}, {"nll_weight": 0.0}],
}
ADVANTAGE_OPTIONS: dict[str, list[dict[str, Any]]] = {
    "group_normalized": [{"std_ddof": 1, "eps": 1e-4}, {"std_ddof": 1, "eps": 0.0}],
    "group_rank": [{"scale": 2.0}],
    "batch_normalized": [{"std_ddof": 1}, {"std_of": "advantages"}, {"baseline": "batch"}],
    "mean_normalized": [{"eps": 0.0625}],
}
# KL terms, with which each algorithm is computed in addition to its own. The last two need a ratio.
KL_TERMS: dict[str, dict[str, Any]] = {
    **{kind: {"beta": 0.125, "kl_in": "loss", "kl_estimator": kind} for kind in KL_ESTIMATORS},
    "k3 averaged apart": {"beta": 0.125, "kl_in": "loss", "kl_estimator": "k3", "kl_aggregation": "token_mean"},
    "k1 in the reward": {"beta": 0.125, "kl_in": "reward", "kl_estimator": "k1", "kl_aggregation": "inside"},
    "none": {"beta": 0.0},
    "k1 with ratio": {"beta": 0.125, "kl_in": "loss", "kl_estimator": "k1", "kl_ratio_correction": True},
    "k3 with ratio": {"beta": 0.125, "kl_in": "loss", "kl_estimator": "k3", "kl_ratio_correction": True},
}
# Other changes of an algorithm's settings.
OVERRIDES: dict[str, list[dict[str, Any]]] = {
    "grpo": [
        *({"aggregation": kind, "beta": beta} for kind, beta in product(AGGREGATIONS, (0.0, 0.125))),
        {"ratio": "sequence"},
        {"epsilon": 0.0625, "epsilon_high": 0.5, "dual_clip": 1.5},
        {"surrogate": "cispo", "ratio_cap": 1.25},
        {"std_ddof": 1, "advantage_eps": 0.0625, "advantage_clip": 0.5},
        *({"advantage": name} for name in ("leave_one_out", "batch_normalized", "no_baseline")),
    ],
    "dr_grpo": [{"aggregation": "sum"}, {"loss_constant": 16.0}, {"advantage": "leave_one_out"}],
    **{name: [{"aggregation": kind} for kind in AGGREGATIONS] for name in ("reinforce", "remax")},
}


def built_in(names: Any) -> list[str]:
    """The names of a table, without those that the user's own files define."""
    return [n for n in names if not hasattr(names, "find") or names[n].function.__module__.startswith("trl_ext.")]


def label(kind: str, name: str, settings: dict[str, Any]) -> str:
    shown = {key: "given" if isinstance(value, Tensor) else value for key, value in settings.items()}
    return f"{kind}/{name}/" + ", ".join(f"{key} {value}" for key, value in shown.items())


# ---- Preference losses ----


def preference_rows() -> Iterator[Row]:
    both = {"chosen": given.CHOSEN, "rejected": given.REJECTED}
    for name in built_in(preference_losses):
        for settings in ({}, {"beta": 0.5}, {"beta": 1 / 64}, *LOSS_OPTIONS.get(name, [])):
            yield label("preference", name, settings), partial(_preference, name, [slice(None)], settings), both
        if preference_losses[name].batch_coupled:
            halves = [slice(0, 6), slice(6, 12)]
            yield label("preference", name, {"in": "halves"}), partial(_preference, name, halves, {}), both
    for weightings, options in (
        (["wpo"], {}),
        (["wpo"], {"max_weight": 1.25}),
        (["wpo"], {"max_weight": None}),
        (["confidence"], {}),
        (["confidence"], {"power": 2.0, "floor": 0.125}),
        (["wpo", "confidence"], {"column": "win"}),
    ):
        for name in ("dpo", "aot"):
            objective = losses.PreferenceObjective(name, weightings=weightings, weighting_options=options)
            settings = {"loss": name, **{key: str(value) for key, value in options.items()}}
            yield label("weighting", "+".join(weightings), settings), partial(_weighted, objective), both


def _preference(name: str, parts: list[slice], settings: dict[str, Any], chosen: Tensor, rejected: Tensor) -> Tensor:
    loss = preference_losses[name].function
    return torch.cat([loss(given.pairs(chosen, rejected, part), **settings) for part in parts])


def _weighted(objective: losses.PreferenceObjective, chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    scores = given.pairs(chosen, rejected)
    return {"value": objective(scores), "of a larger batch": objective(scores, mean_raw_weight=0.75)}


# ---- Algorithms and advantages ----


def algorithm_rows() -> Iterator[Row]:
    of_tokens, far = {"log_probs": LOG_PROBS}, {"log_probs": given.FAR_LOG_PROBS}
    for name in built_in(algorithms):
        for kl, settings in KL_TERMS.items():
            if algorithms[name].ratio != "none" or not kl.endswith("with ratio"):
                yield label("algorithm", name, {"KL": kl}), partial(_loss, name, settings), of_tokens
        for settings in ({}, *OVERRIDES.get(name, [])):
            yield label("algorithm", name, settings), partial(_loss, name, settings), of_tokens
            if not settings or "advantage" in settings or "advantage_clip" in settings:
                yield label("advantages of algorithm", name, settings), partial(_advantages, name, settings), {}
        for kl in ("none", "k3"):
            function = partial(_loss, name, KL_TERMS[kl], given.FAR_REF_LOG_PROBS)
            yield label("algorithm", name, {"KL": kl, "ratios": "extreme"}), function, far
    for name, arguments in (("grpo", {"weights": given.WEIGHTS}), ("dapo", {"token_count": 32.0})):
        yield label("algorithm", name, arguments), partial(_loss, name, {}, **arguments), of_tokens


def _loss(
    name: str, settings: dict[str, Any], reference: Tensor = REF_LOG_PROBS, *, log_probs: Tensor, **arguments: Any
) -> dict[str, Tensor]:
    algorithm = algorithms[name].replace(**settings)
    scores = losses.PolicyScores(log_probs, OLD_LOG_PROBS, MASK, RESPONSE_ADVANTAGES, ref_log_probs=reference)
    loss, _ = algorithm.loss(scores, constant=8.0, **arguments)
    if settings.get("kl_in") == "reward":
        return {"penalty": algorithm.reward_penalty(log_probs, reference, MASK), "value": loss}
    return {"value": loss}


def _advantages(name: str, settings: dict[str, Any]) -> dict[str, Tensor]:
    algorithm = algorithms[name].replace(**settings)
    scored = {"value": REWARDS, "unscored": given.UNSCORED}
    known = {"greedy_rewards": given.GREEDY_REWARDS, "lengths": LENGTHS}
    return {n: algorithm.advantages(r, 4, **known) for n, r in scored.items()}


def advantage_rows() -> Iterator[Row]:
    batches = {"rewards": REWARDS, "unscored": given.UNSCORED, "negative": REWARDS - 2, "pairs": REWARDS[:6]}
    for name in built_in(ADVANTAGES):
        # Groups of four, or of two in the last batch.
        for options in ({}, *ADVANTAGE_OPTIONS.get(name, [])):
            for of, rewards in batches.items():
                # The mean by which it divides must not be negative.
                if of != "negative" or name != "mean_normalized":
                    function = partial(_advantage, name, 2 if of == "pairs" else 4, options)
                    yield label("advantage", name, {**options, "of": of}), function, {"rewards": rewards}


def _advantage(name: str, group_size: int, options: dict[str, Any], rewards: Tensor) -> Tensor:
    inputs = {
        "greedy_baseline": {"greedy_rewards": given.GREEDY_REWARDS[: len(rewards) // group_size]},
        "length_weighted": {"lengths": LENGTHS[: len(rewards)]},
    }
    return ADVANTAGES[name](rewards, group_size, **options, **inputs.get(name, {}))
