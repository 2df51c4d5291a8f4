"""What weighs the tokens of a policy loss, and how far the sampler and the trainer disagree."""

from __future__ import annotations

import functools
import operator

import torch
from torch import Tensor

from trl_ext.losses import PolicyScores, mismatch_weights
from trl_ext.losses.mismatch import CORRECTIONS, disagreement
from trl_ext.processes import warn_once_per_run
from trl_ext.trainers.defaults import check_choice

# Where the effective sample size of a micro-batch's tokens is below this share of them, it is said once.
LOW_SAMPLE_SIZE = 0.9


def check_sampler_correction(args, objective) -> None:
    """Reject an unknown correction, bounds that do not fit it, and one for which a sampler records nothing.

    Args:
        args: a `PolicyConfig`.
        objective: its algorithm.

    Raises:
        ValueError: names the setting and what to use instead.
    """
    low, high = bounds = (args.sampler_correction_min, args.sampler_correction_max)
    if args.sampler_correction is None:
        if bounds != (None, None):
            raise ValueError("sampler_correction_min and _max bound nothing without sampler_correction: name one")
        return
    check_choice("sampler_correction", args.sampler_correction, tuple(CORRECTIONS))
    if objective.reads_sampler:
        raise ValueError(
            f"sampler_correction {args.sampler_correction} would count the sampler twice: the ratio of "
            f"{args.algorithm} is already to the sampler's probabilities; leave it out"
        )
    _, _, lowest, highest = CORRECTIONS[args.sampler_correction]
    low, high = lowest if low is None else low, highest if high is None else high
    if low is None or high is None:
        raise ValueError(
            f"sampler_correction {args.sampler_correction} has no default bounds: give sampler_correction_min and "
            "sampler_correction_max, such as 0.999 and 1.001"
        )
    if not 0 <= low < high:
        raise ValueError(f"sampler_correction keeps ratios from {low} to {high}: give 0 <= min < max")
    if args.fast_rollouts == "off" and not args.use_vllm:
        raise ValueError(
            "sampler_correction reads what the sampler recorded, and transformers records nothing: leave "
            "fast_rollouts auto, or use vLLM"
        )


def surrogate_weights(trainer, inputs: dict, scores: PolicyScores, entropy_mask: Tensor | None) -> Tensor | None:
    """Factors of the surrogate: TRL's masks of tokens and sequences, and importance weights of the sampler."""
    factors = [] if entropy_mask is None else [entropy_mask]
    args, sampled = trainer.args, inputs.get("sampling_per_token_logps")
    if trainer.off_policy_mask_threshold is not None:
        factors.append(
            trainer.get_off_policy_mask(
                advantages=scores.advantages,
                per_token_logps=scores.log_probs,
                sampling_per_token_logps=scores.old_log_probs if sampled is None else sampled,
                mask=scores.mask,
                off_policy_threshold=trainer.off_policy_mask_threshold,
            )
        )
    if args.sampler_correction is not None and sampled is not None:
        bounds = {"low": args.sampler_correction_min, "high": args.sampler_correction_max}
        factors.append(mismatch_weights(scores.old_log_probs, sampled, scores.mask, args.sampler_correction, **bounds))
    elif trainer.use_vllm and trainer.vllm_importance_sampling_correction and not trainer.objective.reads_sampler:
        factors.append(inputs["importance_sampling_ratio"])
    return functools.reduce(operator.mul, factors) if factors else None


def log_disagreement(trainer, inputs: dict, scores: PolicyScores, mode: str) -> None:
    """Log how far the log-probabilities recorded at sampling are from the trainer's, over a micro-batch's tokens.

    Nothing is logged for a sampler that records none.
    """
    sampled, args = inputs.get("sampling_per_token_logps"), trainer.args
    if sampled is None:
        if args.sampler_correction is not None:
            _tell_once(
                trainer,
                f"sampler_correction {args.sampler_correction} does nothing: no log-probabilities were recorded at "
                "sampling, as is the case for generation by transformers, and with top_p, top_k or penalties",
            )
        return
    found = disagreement(scores.old_log_probs, sampled, scores.mask)
    largest = trainer.accelerator.gather(found.pop("largest").float()).max().item()
    sums = trainer.accelerator.reduce(torch.stack([*found.values()]).double(), reduction="sum").tolist()
    tokens, absolute, weights, squared_weights = sums
    metrics, share = trainer._metrics[mode], 1.0
    if tokens:
        share = weights**2 / (tokens * squared_weights)
    metrics["sampling/log_ratio_mean"].append(absolute / max(tokens, 1))
    metrics["sampling/log_ratio_max"].append(largest)
    metrics["sampling/effective_sample_size"].append(share)
    if share < LOW_SAMPLE_SIZE and args.sampler_correction is None:
        _tell_once(
            trainer,
            f"the sampler's probabilities differ from the trainer's: by {absolute / tokens:.2g} in the logarithm on "
            f"average and by {largest:.2g} at most, which leaves {share:.0%} of the tokens as an effective sample; "
            "sampler_correction token_truncate weighs by the ratio",
        )


def _tell_once(trainer, line: str) -> None:
    if not trainer.has_told_of_sampler:
        trainer.has_told_of_sampler = True
        warn_once_per_run(line)
