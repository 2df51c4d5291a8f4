"""`PreferenceConfig`: TRL's `DPOConfig` with a named loss and device-dependent defaults."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from transformers.hf_argparser import HfArg
from trl import DPOConfig as TRLDPOConfig

from trl_ext.losses.objective import PreferenceObjective
from trl_ext.names import check_choice
from trl_ext.registry import preference_losses
from trl_ext.trainers.defaults import TruncatedFields, check_training, parse_json_option, resolve_device_defaults
from trl_ext.trainers.trl_settings import PREFERENCE_SETTINGS, merge, refuse_given, translate

# DPOConfig options that act inside TRL's own loss, which `loss` replaces: option -> what to use.
_NOT_CARRIED = {
    "loss_weights": "write the sum as a loss of your own and name it with `loss=file.py:function`",
    "use_weighting": "use `weighting=['wpo']`, which composes with every loss",
    **dict.fromkeys(
        ("ld_alpha", "f_divergence_type", "f_alpha_divergence_coef", "discopop_tau"),
        "it acts inside TRL's loss: train stock `trl.DPOTrainer`",
    ),
    "label_smoothing_factor": "use `label_smoothing` with cdpo or robust_dpo",
    "truncation_mode": "prompts keep their end and responses their start",
    "padding_free": "TRL has it switched off at present",
}


@dataclass
class PreferenceConfig(TruncatedFields, TRLDPOConfig):
    """Configuration of `PreferenceTrainer`: the fields of `trl.DPOConfig` except its loss, those of `TruncatedFields`,
    and those below.

    Raises:
        ValueError: an unknown loss or option, a beta that is not positive, or a TRL option that acts inside the
            replaced loss; the message names the option and what to use instead.
    """

    # The loss of a named configuration; None if `loss` may be chosen.
    _method: ClassVar[str | None] = None

    loss: str | None = HfArg(
        default=None, help="Preference loss: a registered name, or your own as file.py:function. Default: dpo."
    )
    loss_type: list[str] | None = HfArg(
        default=None, help=f"TRL's name for a loss: {', '.join(PREFERENCE_SETTINGS['loss_type'])}. Default: see loss."
    )
    loss_kwargs: dict[str, Any] | str | None = HfArg(
        default=None, help="Options of the loss beside beta, as JSON: '{\"label_smoothing\": 0.2}'."
    )
    beta: float | None = HfArg(
        default=None, help="Strength of the preference signal. Default: the loss's own, which is its paper's."
    )
    label_smoothing: float | None = HfArg(
        default=None, help="Probability that a label is wrong, for the losses that take it. Default: the loss's own."
    )
    weighting: list[str] | None = HfArg(
        default=None, help="Weightings of the pairs: any of wpo, confidence, or your own as file.py:function."
    )
    weighting_kwargs: dict[str, Any] | str | None = HfArg(
        default=None, help='Options of the weightings, as JSON: \'{"power": 2, "floor": 0.3}\'.'
    )
    aot_scope: str = HfArg(
        default="global",
        help="What a batch-coupled loss such as AOT sorts over: global, the whole optimizer batch, or device, "
        "one device's micro-batch, as TRL does. Global costs one more forward pass of the policy without "
        "gradients when micro-batches are accumulated, and nothing otherwise.",
    )
    loss_columns: list[str] | None = HfArg(
        default=None, help="Dataset columns to pass to the loss, beside those that it declares."
    )
    precompute_ref_log_probs: bool | None = HfArg(
        default=None,
        help="Compute the reference's log-probabilities once, before training, and keep them in the cache of "
        "datasets. True does without the reference model after that, as in TRL. Default: where training goes over "
        "the data more than once and the reference stays as it is; the model stays, to evaluate other data.",
    )

    def __post_init__(self):
        # TRL also accepts a single loss type as text.
        self.loss_type = [self.loss_type] if isinstance(self.loss_type, str) else self.loss_type
        translated = translate(self, PREFERENCE_SETTINGS)
        self.loss = merge({"loss": self.loss or self._method}, translated)["loss"] or "dpo"
        refuse_given(self, _NOT_CARRIED)
        if self._method is not None and self.loss != self._method:
            raise ValueError(
                f"{type(self).__name__} is the loss {self._method!r} and not {self.loss!r}: use PreferenceConfig"
            )
        check_choice("aot_scope", self.aot_scope, ("global", "device"))
        check_training(self)
        self.loss_kwargs = parse_json_option("loss_kwargs", self.loss_kwargs)
        self.weighting_kwargs = parse_json_option("weighting_kwargs", self.weighting_kwargs)
        self.beta = self.build_objective().beta
        resolve_device_defaults(self)
        super().__post_init__()

    def build_objective(self) -> PreferenceObjective:
        """The loss, its options and its weightings as one function of `PreferenceScores`."""
        return PreferenceObjective(
            self.loss,
            beta=self.beta,
            loss_options=self._loss_options(preference_losses.find(self.loss).options),
            weightings=self.weighting or (),
            weighting_options=self.weighting_kwargs,
            columns=self.loss_columns or (),
        )

    def _loss_options(self, known: dict[str, Any]) -> dict[str, Any]:
        """Options from `loss_kwargs`, and from a named configuration's own fields and `label_smoothing`."""
        if self.label_smoothing and "label_smoothing" not in known:
            raise ValueError(f"the loss {self.loss!r} has no label_smoothing: use cdpo or robust_dpo")
        options = dict(self.loss_kwargs or {})
        # Fields of other names are the trainer's, even if a loss has an option of that name.
        own = {f.name for f in fields(self)} - {f.name for f in fields(PreferenceConfig)} | {"label_smoothing"}
        for name in own & set(known):
            value = getattr(self, name)
            if value is not None and options.setdefault(name, value) != value:
                raise ValueError(f"{name} is given twice, as {value} and in loss_kwargs as {options[name]}")
        options = merge(options, translate(self, PREFERENCE_SETTINGS))
        options.pop("loss", None)
        return options
