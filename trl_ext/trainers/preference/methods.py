"""`DPOTrainer`, `DPOConfig` and the other pairs: `PreferenceTrainer` with one loss each.

A configuration has the loss's options as fields; the loss's own values apply where they are None.
"""

from __future__ import annotations

from dataclasses import dataclass

from trl_ext.trainers.preference.config import PreferenceConfig
from trl_ext.trainers.preference.trainer import PreferenceTrainer


class DPOConfig(PreferenceConfig):
    """Configuration of `DPOTrainer`."""

    _method = "dpo"


class DPOTrainer(PreferenceTrainer):
    """Direct Preference Optimization (Rafailov et al. 2023, arXiv 2305.18290)."""

    _name = "DPO"
    _config_class = DPOConfig


@dataclass
class IPOConfig(PreferenceConfig):
    """Configuration of `IPOTrainer`."""

    _method = "ipo"
    length_normalized: bool | None = None


class IPOTrainer(PreferenceTrainer):
    """Identity Preference Optimization (Azar et al. 2023, arXiv 2310.12036)."""

    _name = "IPO"
    _config_class = IPOConfig


class AOTConfig(PreferenceConfig):
    """Configuration of `AOTTrainer`."""

    _method = "aot"


class AOTTrainer(PreferenceTrainer):
    """Distributional alignment of chosen over rejected responses (Melnyk et al. 2024, arXiv 2406.05882)."""

    _name = "AOT"
    _config_class = AOTConfig


class AOTPairedConfig(PreferenceConfig):
    """Configuration of `AOTPairedTrainer`."""

    _method = "aot_paired"


class AOTPairedTrainer(PreferenceTrainer):
    """Distributional alignment of the margins (Melnyk et al. 2024, arXiv 2406.05882)."""

    _name = "AOTPaired"
    _config_class = AOTPairedConfig


class CDPOConfig(PreferenceConfig):
    """Configuration of `CDPOTrainer`."""

    _method = "cdpo"


class CDPOTrainer(PreferenceTrainer):
    """Conservative DPO (Mitchell 2023, "A note on DPO with noisy preferences")."""

    _name = "CDPO"
    _config_class = CDPOConfig


class RobustDPOConfig(PreferenceConfig):
    """Configuration of `RobustDPOTrainer`."""

    _method = "robust_dpo"


class RobustDPOTrainer(PreferenceTrainer):
    """DPO corrected for flipped labels (Chowdhury et al. 2024, arXiv 2403.00409)."""

    _name = "RobustDPO"
    _config_class = RobustDPOConfig


class HingeConfig(PreferenceConfig):
    """Configuration of `HingeTrainer`."""

    _method = "hinge"


class HingeTrainer(PreferenceTrainer):
    """The hinge loss of RSO and SLiC (Liu et al. 2023, arXiv 2309.06657)."""

    _name = "Hinge"
    _config_class = HingeConfig


class APOZeroConfig(PreferenceConfig):
    """Configuration of `APOZeroTrainer`."""

    _method = "apo_zero"


class APOZeroTrainer(PreferenceTrainer):
    """Anchored Preference Optimization, zero (D'Oosterlinck et al. 2024, arXiv 2408.06266)."""

    _name = "APOZero"
    _config_class = APOZeroConfig


class APODownConfig(PreferenceConfig):
    """Configuration of `APODownTrainer`."""

    _method = "apo_down"


class APODownTrainer(PreferenceTrainer):
    """Anchored Preference Optimization, down (D'Oosterlinck et al. 2024, arXiv 2408.06266)."""

    _name = "APODown"
    _config_class = APODownConfig


@dataclass
class SimPOConfig(PreferenceConfig):
    """Configuration of `SimPOTrainer`."""

    _method = "simpo"
    gamma_beta_ratio: float | None = None
    gamma: float | None = None


class SimPOTrainer(PreferenceTrainer):
    """Simple Preference Optimization (Meng et al. 2024, arXiv 2405.14734)."""

    _name = "SimPO"
    _config_class = SimPOConfig


@dataclass
class RePOConfig(PreferenceConfig):
    """Configuration of `RePOTrainer`."""

    _method = "repo"
    gamma: float | None = None


class RePOTrainer(PreferenceTrainer):
    """ReLU-based Preference Optimization (Wu et al. 2025, arXiv 2503.07426)."""

    _name = "RePO"
    _config_class = RePOConfig


@dataclass
class CPOConfig(PreferenceConfig):
    """Configuration of `CPOTrainer`."""

    _method = "cpo"
    nll_weight: float | None = None


class CPOTrainer(PreferenceTrainer):
    """Contrastive Preference Optimization (Xu et al. 2024, arXiv 2401.08417)."""

    _name = "CPO"
    _config_class = CPOConfig


class ORPOConfig(PreferenceConfig):
    """Configuration of `ORPOTrainer`."""

    _method = "orpo"


class ORPOTrainer(PreferenceTrainer):
    """Odds Ratio Preference Optimization (Hong et al. 2024, arXiv 2403.07691)."""

    _name = "ORPO"
    _config_class = ORPOConfig


@dataclass
class DPOPConfig(PreferenceConfig):
    """Configuration of `DPOPTrainer`."""

    _method = "dpop"
    penalty: float | None = None


class DPOPTrainer(PreferenceTrainer):
    """DPO-Positive (Pal et al. 2024, arXiv 2402.13228)."""

    _name = "DPOP"
    _config_class = DPOPConfig


@dataclass
class SPPOConfig(PreferenceConfig):
    """Configuration of `SPPOTrainer`."""

    _method = "sppo"
    chosen_win_probability: float | None = None
    rejected_win_probability: float | None = None


class SPPOTrainer(PreferenceTrainer):
    """Self-Play Preference Optimization (Wu et al. 2024, arXiv 2405.00675)."""

    _name = "SPPO"
    _config_class = SPPOConfig


class NCAConfig(PreferenceConfig):
    """Configuration of `NCATrainer`."""

    _method = "nca"


class NCATrainer(PreferenceTrainer):
    """Noise Contrastive Alignment for pairs (Chen et al. 2024, arXiv 2402.05369)."""

    _name = "NCA"
    _config_class = NCAConfig
