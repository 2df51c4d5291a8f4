"""Named pairs of configuration and trainer, one for each preference method: `PreferenceTrainer` with its loss."""

from __future__ import annotations

from dataclasses import dataclass

from trl_ext.trainers.preference import PreferenceTrainer
from trl_ext.trainers.preference_config import PreferenceConfig


@dataclass
class DPOConfig(PreferenceConfig):
    """Direct preference optimisation."""

    _method = "dpo"
    loss: str = "dpo"


class DPOTrainer(PreferenceTrainer):
    """Direct preference optimisation: `trl_ext.losses.dpo`."""

    _config_class = DPOConfig
    _name = "DPO"
    _paper = {
        "title": "Direct Preference Optimization: Your Language Model is Secretly a Reward Model",
        "id": "2305.18290",
    }


@dataclass
class IPOConfig(PreferenceConfig):
    """Identity preference optimisation; `length_normalized` for TRL's form, in which beta means another thing."""

    _method = "ipo"
    loss: str = "ipo"
    length_normalized: bool | None = None


class IPOTrainer(PreferenceTrainer):
    """Identity preference optimisation: `trl_ext.losses.ipo`."""

    _config_class = IPOConfig
    _name = "IPO"
    _paper = {
        "title": "A General Theoretical Paradigm to Understand Learning from Human Preferences",
        "id": "2310.12036",
    }


@dataclass
class AOTConfig(PreferenceConfig):
    """Alignment via optimal transport, on unpaired quantiles; `aot_scope` says what they are taken over."""

    _method = "aot"
    loss: str = "aot"


class AOTTrainer(PreferenceTrainer):
    """Alignment via optimal transport: `trl_ext.losses.aot`, over the whole optimizer batch.

    With `aot_scope="global"`, the default, an optimizer step costs one more forward pass of the policy, without
    gradients, when micro-batches are accumulated: about a quarter more time with a reference model, and nothing when
    each step is one micro-batch per device. `"device"` sorts within a micro-batch, as TRL does, at no cost.
    """

    _config_class = AOTConfig
    _name = "AOT"
    _paper = {"title": "Distributional Preference Alignment of LLMs via Optimal Transport", "id": "2406.05882"}


@dataclass
class AOTPairedConfig(PreferenceConfig):
    """Alignment via optimal transport, on the quantiles of paired margins."""

    _method = "aot_paired"
    loss: str = "aot_paired"


class AOTPairedTrainer(PreferenceTrainer):
    """Alignment via optimal transport on paired margins: `trl_ext.losses.aot_paired`."""

    _config_class = AOTPairedConfig
    _name = "AOT (paired)"
    _paper = AOTTrainer._paper


@dataclass
class CDPOConfig(PreferenceConfig):
    """Conservative DPO; `label_smoothing` defaults to 0.1."""

    _method = "cdpo"
    loss: str = "cdpo"


class CDPOTrainer(PreferenceTrainer):
    """Conservative DPO, with smoothed labels: `trl_ext.losses.cdpo`."""

    _config_class = CDPOConfig
    _name = "Conservative DPO"


@dataclass
class RobustDPOConfig(PreferenceConfig):
    """Robust DPO; `label_smoothing`, the rate of flipped labels, defaults to 0.1."""

    _method = "robust_dpo"
    loss: str = "robust_dpo"


class RobustDPOTrainer(PreferenceTrainer):
    """DPO that is unbiased under flipped labels: `trl_ext.losses.robust_dpo`."""

    _config_class = RobustDPOConfig
    _name = "Robust DPO"
    _paper = {"title": "Provably Robust DPO: Aligning Language Models with Noisy Feedback", "id": "2403.00409"}


@dataclass
class HingeConfig(PreferenceConfig):
    """Hinge loss on the reference-corrected margin."""

    _method = "hinge"
    loss: str = "hinge"


class HingeTrainer(PreferenceTrainer):
    """Hinge on the margin: `trl_ext.losses.hinge`."""

    _config_class = HingeConfig
    _name = "Hinge"
    _paper = {"title": "Statistical Rejection Sampling Improves Preference Optimization", "id": "2309.06657"}


@dataclass
class APOZeroConfig(PreferenceConfig):
    """Anchored preference optimisation for chosen responses better than the model's own."""

    _method = "apo_zero"
    loss: str = "apo_zero"


class APOZeroTrainer(PreferenceTrainer):
    """Anchored preference optimisation: `trl_ext.losses.apo_zero`."""

    _config_class = APOZeroConfig
    _name = "APO-zero"
    _paper = {
        "title": "Anchored Preference Optimization and Contrastive Revisions: "
        "Addressing Underspecification in Alignment",
        "id": "2408.06266",
    }


@dataclass
class APODownConfig(PreferenceConfig):
    """Anchored preference optimisation for chosen responses worse than the model's own."""

    _method = "apo_down"
    loss: str = "apo_down"


class APODownTrainer(PreferenceTrainer):
    """Anchored preference optimisation: `trl_ext.losses.apo_down`."""

    _config_class = APODownConfig
    _name = "APO-down"
    _paper = APOZeroTrainer._paper


@dataclass
class SimPOConfig(PreferenceConfig):
    """SimPO; give `gamma_beta_ratio`, which the paper tabulates, or `gamma`."""

    _method = "simpo"
    loss: str = "simpo"
    gamma: float | None = None
    gamma_beta_ratio: float | None = None


class SimPOTrainer(PreferenceTrainer):
    """Reference-free preference optimisation on mean log-probabilities: `trl_ext.losses.simpo`."""

    _config_class = SimPOConfig
    _name = "SimPO"
    _paper = {"title": "SimPO: Simple Preference Optimization with a Reference-Free Reward", "id": "2405.14734"}


@dataclass
class RePOConfig(PreferenceConfig):
    """ReLU-based preference optimisation, with the margin `gamma` as its one knob."""

    _method = "repo"
    loss: str = "repo"
    gamma: float | None = None


class RePOTrainer(PreferenceTrainer):
    """ReLU-based preference optimisation: `trl_ext.losses.repo`."""

    _config_class = RePOConfig
    _name = "RePO"
    _paper = {"title": "RePO: ReLU-based Preference Optimization", "id": "2503.07426"}


@dataclass
class CPOConfig(PreferenceConfig):
    """Contrastive preference optimisation; `nll_weight` defaults to 1."""

    _method = "cpo"
    loss: str = "cpo"
    nll_weight: float | None = None


class CPOTrainer(PreferenceTrainer):
    """Contrastive preference optimisation: `trl_ext.losses.cpo`."""

    _config_class = CPOConfig
    _name = "CPO"
    _paper = {
        "title": "Contrastive Preference Optimization: "
        "Pushing the Boundaries of LLM Performance in Machine Translation",
        "id": "2401.08417",
    }


@dataclass
class ORPOConfig(PreferenceConfig):
    """Odds-ratio preference optimisation; `beta` is the paper's lambda."""

    _method = "orpo"
    loss: str = "orpo"


class ORPOTrainer(PreferenceTrainer):
    """Odds-ratio preference optimisation: `trl_ext.losses.orpo`."""

    _config_class = ORPOConfig
    _name = "ORPO"
    _paper = {"title": "ORPO: Monolithic Preference Optimization without Reference Model", "id": "2403.07691"}


@dataclass
class DPOPConfig(PreferenceConfig):
    """DPO-Positive; `penalty` defaults to 50."""

    _method = "dpop"
    loss: str = "dpop"
    penalty: float | None = None


class DPOPTrainer(PreferenceTrainer):
    """DPO that does not lower the chosen likelihood: `trl_ext.losses.dpop`."""

    _config_class = DPOPConfig
    _name = "DPO-Positive"
    _paper = {
        "title": "Smaug: Fixing Failure Modes of Preference Optimisation with DPO-Positive",
        "id": "2402.13228",
    }


@dataclass
class SPPOConfig(PreferenceConfig):
    """Self-play preference optimisation; the win probabilities default to the hard labels 1 and 0."""

    _method = "sppo"
    loss: str = "sppo"
    chosen_win_probability: float | None = None
    rejected_win_probability: float | None = None


class SPPOTrainer(PreferenceTrainer):
    """Self-play preference optimisation: `trl_ext.losses.sppo`."""

    _config_class = SPPOConfig
    _name = "SPPO"
    _paper = {"title": "Self-Play Preference Optimization for Language Model Alignment", "id": "2405.00675"}


@dataclass
class NCAConfig(PreferenceConfig):
    """Noise contrastive alignment."""

    _method = "nca"
    loss: str = "nca"


class NCATrainer(PreferenceTrainer):
    """Noise contrastive alignment: `trl_ext.losses.nca`."""

    _config_class = NCAConfig
    _name = "NCA"
    _paper = {"title": "Noise Contrastive Alignment of Language Models with Explicit Rewards", "id": "2402.05369"}
