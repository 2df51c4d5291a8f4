"""What weighs the tokens of a policy loss, and how far the sampler and the trainer disagree."""

from __future__ import annotations

import functools
import operator

import torch
from torch import Tensor

from trl_ext.losses import PolicyScores, mismatch_weights
from trl_ext.losses.masking import masked_sum
from trl_ext.losses.mismatch import CORRECTIONS, bounds_of, disagreement
from trl_ext.processes import warn_once_per_run
from trl_ext.trainers.defaults import check_choice

# Where the effective sample size of a micro-batch's tokens is below this share of them, it is said once.
LOW_SAMPLE_SIZE = 0.9


def check_sampler_correction(args, objective) -> None:
    """Raise ValueError for an unknown correction, bounds that do not fit it, or one for which nothing is recorded."""
    low, high = bounds = (args.sampler_correction_min, args.sampler_correction_max)
    if args.sampler_correction is None:
        if bounds != (None, None):
            raise ValueError("sampler_correction_min and sampler_correction_max need sampler_correction: name one")
        return
    check_choice("sampler_correction", args.sampler_correction, tuple(CORRECTIONS))
    if objective.reads_sampler:
        raise ValueError(
            f"sampler_correction {args.sampler_correction} would weigh the sampler twice: {args.algorithm} already "
            "compares with its probabilities. Leave sampler_correction out"
        )
    try:
        bounds_of(args.sampler_correction, low, high)
    except ValueError as error:
        raise ValueError(f"sampler_correction (and its _min and _max): {error}") from None
    if args.fast_rollouts == "off" and not args.use_vllm:
        raise ValueError(
            "sampler_correction reads what the sampler recorded, and transformers records nothing: leave "
            "fast_rollouts auto, or use vLLM"
        )


def correction_weights(trainer, inputs: dict, scores: PolicyScores) -> Tensor | None:
    """The weights of `sampler_correction`, [B, T] or [B, 1]; None without one, or if the sampler recorded nothing."""
    args, sampled = trainer.args, inputs.get("sampling_per_token_logps")
    if args.sampler_correction is None or sampled is None:
        return None
    bounds = {"low": args.sampler_correction_min, "high": args.sampler_correction_max}
    return mismatch_weights(scores.old_log_probs, sampled, scores.mask, args.sampler_correction, **bounds)


def surrogate_weights(
    trainer, inputs: dict, scores: PolicyScores, correction: Tensor | None, entropy_mask: Tensor | None
) -> Tensor | None:
    """Factors of the surrogate: TRL's masks of tokens and sequences, and importance weights of the sampler."""
    factors = [factor for factor in (entropy_mask, correction) if factor is not None]
    if trainer.off_policy_mask_threshold is not None:
        sampled = inputs.get("sampling_per_token_logps")
        factors.append(
            trainer.get_off_policy_mask(
                advantages=scores.advantages,
                per_token_logps=scores.log_probs,
                sampling_per_token_logps=scores.old_log_probs if sampled is None else sampled,
                mask=scores.mask,
                off_policy_threshold=trainer.off_policy_mask_threshold,
            )
        )
    by_trl = trainer.use_vllm and trainer.vllm_importance_sampling_correction and not trainer.objective.reads_sampler
    if by_trl and correction is None:
        factors.append(inputs["importance_sampling_ratio"])
    return functools.reduce(operator.mul, factors) if factors else None


def log_disagreement(trainer, inputs: dict, scores: PolicyScores, correction: Tensor | None, mode: str) -> None:
    """Log how far the log-probabilities recorded at sampling are from the trainer's, over a micro-batch's tokens.

    Nothing is logged for a sampler that records none. With a sampler correction, its mean weight and the share of
    dropped tokens are logged as well.
    """
    args, sampled, mask = trainer.args, inputs.get("sampling_per_token_logps"), scores.mask
    if sampled is None:
        if args.sampler_correction is not None:
            _tell_once(
                trainer,
                f"sampler_correction {args.sampler_correction} does nothing: no log-probabilities were recorded at "
                "sampling, as is the case for generation by transformers, and with top_p, top_k or penalties",
            )
        if trainer.accelerator.num_processes == 1:
            return
        # Each process has a sampler of its own, and the others may have recorded theirs.
        sampled, mask = scores.old_log_probs, torch.zeros_like(mask)
    found = disagreement(scores.old_log_probs, sampled, mask)
    if args.sampler_correction is not None:
        given = torch.ones_like(scores.old_log_probs) if correction is None else correction
        found["given"], found["dropped"] = masked_sum(given, mask), masked_sum((given == 0).to(given), mask)
    largest = trainer.accelerator.gather(found.pop("largest").float()).max().item()
    sums = trainer.accelerator.reduce(torch.stack([*found.values()]).double(), reduction="sum").tolist()
    total = dict(zip(found, sums, strict=True))
    if not total["tokens"]:
        return
    mean, metrics = total["absolute"] / total["tokens"], trainer._metrics[mode]
    # Rounding may exceed 1.
    share = min(total["weights"] ** 2 / (total["tokens"] * total["squared_weights"]), 1.0)
    metrics["sampling/effective_sample_size"].append(share)
    corrected_by_trl = trainer.use_vllm and trainer.vllm_importance_sampling_correction
    if not corrected_by_trl:
        # Else TRL has logged both for the rollout.
        metrics["sampling/sampling_logp_difference/mean"].append(mean)
        metrics["sampling/sampling_logp_difference/max"].append(largest)
    if args.sampler_correction is not None:
        metrics["sampling/weight_mean"].append(total["given"] / total["tokens"])
        metrics["sampling/dropped"].append(total["dropped"] / total["tokens"])
    elif share < LOW_SAMPLE_SIZE and not corrected_by_trl and not trainer.objective.reads_sampler:
        _tell_once(
            trainer,
            f"the sampler's probabilities differ from the trainer's: by {mean:.2g} in the logarithm on average and by "
            f"{largest:.2g} at most, which leaves {share:.0%} of the tokens as an effective sample; "
            "sampler_correction token_truncate weighs by the ratio",
        )


def _tell_once(trainer, line: str) -> None:
    if not trainer.has_told_of_sampler:
        trainer.has_told_of_sampler = True
        warn_once_per_run(line)
