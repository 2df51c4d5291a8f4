"""`DistillationConfig`: a `PolicyConfig` whose signal is a teacher instead of rewards."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from trl_ext.advantages import no_baseline
from trl_ext.algorithms import PolicyObjective
from trl_ext.losses import unclipped_surrogate
from trl_ext.models.batches import temporarily
from trl_ext.registry import Algorithm
from trl_ext.settings import LOSS_SETTINGS
from trl_ext.trainers.defaults import check_at_least, check_choice, parse_json_option
from trl_ext.trainers.policy.config import PolicyConfig
from trl_ext.trainers.trl_settings import refuse_given

DIVERGENCES = ("full", "sampled_token")
# Name -> divergence, which defines the method, its beta unless another is given, and fields that it needs.
PRESETS: dict[str, tuple[str, float, tuple[str, ...]]] = {
    "gkd": ("full", 0.5, ()),
    "opd": ("sampled_token", 1.0, ()),
    # The authors' teacher stays what the policy was before training.
    "opsd": ("full", 0.5, ("teacher_prompt", "teacher_model_name_or_path")),
    "sdft": ("full", 1.0, ("teacher_prompt",)),
    "sdpo": ("full", 0.5, ()),
}
# The prompt of a teacher that sees another attempt: the default of sdpo.
WITH_SUCCESS = "trl_ext.trainers.distillation.attempts:with_success"


def teacher(rewards: Tensor, group_size: int) -> Tensor:
    """The rewards of whole responses, [N], used until the trainer has compared their tokens with the teacher's."""
    return no_baseline(rewards, group_size)


# Not a row of the table, since `PolicyTrainer` has no teacher and could not use it.
DISTILLATION = Algorithm(
    "distillation",
    unclipped_surrogate,
    summary="Divergence from a teacher on the policy's own samples",
    paper="2306.13649",
    advantage=teacher,
    surrogate="no_clip",
    aggregation="token_mean",
    group_size=1,
)


class DistillationObjective(PolicyObjective):
    """The surrogate of the sampled tokens, which `full` leaves at 0, described with the teacher and the divergence.

    Args:
        objective: the surrogate.
        teaching: settings of the distillation.
    """

    def __init__(self, objective: PolicyObjective, teaching: dict[str, Any]):
        vars(self).update(vars(objective))
        self.teaching = teaching

    def describe(self) -> str:
        """One line for logs and reports."""
        settings = {**self.teaching, "aggregation": self.aggregation}
        if self.teaching["divergence"] == "full":
            del settings["discount"]
        else:
            settings |= {"ratio": self.ratio, "surrogate": self.surrogate}
        return (
            f"distillation ({', '.join(f'{name} {value}' for name, value in settings.items() if value is not None)})"
        )

    def to_dict(self) -> dict[str, Any]:
        """The resolved settings, ready for JSON."""
        return {**super().to_dict(), **self.teaching}


_NO_REWARDS = "the teacher takes the place of rewards, which are only logged; leave it out"
_NO_REFERENCE = "there is no KL term beside the teacher; leave it out"
# Settings of `PolicyConfig` without an effect: setting -> why.
_NOT_USED = {
    **dict.fromkeys(("advantage", "std_ddof", "advantage_eps", "scale_rewards", "missing_eos_penalty"), _NO_REWARDS),
    **dict.fromkeys(("resample_groups", "curriculum", "overlong_share"), _NO_REWARDS),
    **dict.fromkeys(("kl_estimator", "kl_in", "kl_ratio_correction", "kl_aggregation"), _NO_REFERENCE),
    "sync_ref_model": _NO_REFERENCE,
    "off_policy_mask_threshold": "it masks whole responses by one advantage, and here each token has its own",
    "torch_compile": "hidden states are read inside the forward pass",
}
# Those that a divergence over the vocabulary does not read either.
_OF_SAMPLED_TOKENS = (
    *(name for name in LOSS_SETTINGS if name not in ("beta", "aggregation", "loss_constant") and "kl_" not in name),
    *("loss_type", "advantage_clip", "importance_sampling_level", "delta", "top_entropy_quantile", "discount"),
    "cast_lm_head_to_fp32",
)


@dataclass
class DistillationConfig(PolicyConfig):
    """On-policy distillation from a teacher: the fields of `PolicyConfig`, and those below.

    `beta` is TRL's of `trl.DistillationConfig`: it selects the divergence, and is no coefficient.

    Raises:
        ValueError: as `PolicyConfig` does, and for settings that a teacher leaves without an effect; the message names
            the fields and what to use instead.
    """

    _method = "distillation"
    _row = DISTILLATION

    algorithm: str = "distillation"
    teacher_model_name_or_path: str | None = field(
        default=None,
        metadata={
            "help": "The teacher: a model, or an adapter. One on the policy's own base shares it. Default: the policy "
            "itself as it is now, which then needs teacher_prompt."
        },
    )
    teacher_model_init_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "Keywords of from_pretrained for the teacher, such as dtype or revision, as JSON."},
    )
    teacher_prompt: str | None = field(
        default=None,
        metadata={
            "help": "The prompt that the teacher sees, with a solution or a demonstration in it: a column, or your "
            "own file.py:function(row) -> prompt, or function(row, attempts) -> prompt or None, which also sees the "
            "group's responses and rewards. Default: the policy's; for sdpo, with a successful other response."
        },
    )
    preset: str | None = field(
        default=None, metadata={"help": f"A method's divergence and beta: {', '.join(PRESETS)}. Default: none."}
    )
    beta: float | None = field(
        default=None,
        metadata={
            "help": "The divergence: 0 the forward KL(teacher || policy), 1 the reverse KL(policy || teacher), "
            "between them the generalized Jensen-Shannon divergence, which is much smaller. Default: the "
            "preset's, else 1."
        },
    )
    divergence: str | None = field(
        default=None,
        metadata={
            "help": "full, the default: of the distributions over the vocabulary, at every sampled token. "
            "sampled_token: its estimate from the sampled token alone, as an advantage; the reverse KL."
        },
    )
    divergence_top_k: int | None = field(
        default=None,
        metadata={"help": "For full: the policy's k most likely tokens, and all others as one. Default: every token."},
    )
    discount: float = field(
        default=0.0, metadata={"help": "For sampled_token: weight of later tokens' terms in a token's advantage."}
    )

    def __post_init__(self):
        self._resolve_preset()
        check_choice("divergence", self.divergence, DIVERGENCES)
        check_at_least(self, {"divergence_top_k": 1})
        for name in ("beta", "discount"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie in [0, 1], got {getattr(self, name)}")
        refuse_given(self, _NOT_USED)
        if self.divergence == "full":
            refuse_given(self, dict.fromkeys(_OF_SAMPLED_TOKENS, "it is for --divergence sampled_token"))
        elif self.beta != 1 or self.divergence_top_k is not None:
            raise ValueError(
                f"divergence sampled_token estimates the reverse KL, beta 1, from one token, got beta {self.beta:g} "
                f"and divergence_top_k {self.divergence_top_k}: leave both out, or use divergence full"
            )
        self.teacher_model_init_kwargs = parse_json_option("teacher_model_init_kwargs", self.teacher_model_init_kwargs)
        beta = self.beta
        super().__post_init__()
        if self.teacher_prompt == WITH_SUCCESS and self.num_generations < 2:
            raise ValueError("the teacher is shown another response to the prompt: give num_generations of 2 or more")
        # Where TRL and the policy trainer look for a coefficient of a reference, the objective has 0.
        self.beta = beta

    def _resolve_preset(self) -> None:
        divergence, beta, needed = "full", 1.0, ()
        if self.preset is not None:
            check_choice("preset", self.preset, tuple(PRESETS))
            divergence, beta, needed = PRESETS[self.preset]
            if self.divergence not in (None, divergence):
                raise ValueError(
                    f"preset {self.preset} and divergence {self.divergence} contradict each other: it has divergence "
                    f"{divergence}; leave one of them out"
                )
        for name in needed:
            if getattr(self, name) is None:
                what = "COLUMN or file.py:function" if name == "teacher_prompt" else "MODEL"
                raise ValueError(f"preset {self.preset} needs --{name} {what}: see docs/distillation.md")
        if self.preset == "sdpo" and self.teacher_prompt is None:
            self.teacher_prompt = WITH_SUCCESS
        self.divergence = divergence if self.divergence is None else self.divergence
        self.beta = beta if self.beta is None else self.beta

    def build_objective(self) -> DistillationObjective:
        """The distillation's settings in the form that `PolicyTrainer` expects."""
        names = (
            "preset",
            "teacher_model_name_or_path",
            "teacher_prompt",
            "divergence",
            "divergence_top_k",
            "discount",
            "beta",
        )
        teaching = {name: getattr(self, name) for name in names}
        with temporarily(self, beta=None):
            return DistillationObjective(super().build_objective(), teaching)
