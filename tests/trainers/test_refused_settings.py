"""Settings that configurations refuse: each message is one line and names the settings that are at fault."""

from __future__ import annotations

import math

import pytest

import trl_ext
from tests.support.refusals import assert_refused
from tests.support.rollout_once import DEFAULTS, OWN_RECIPES

GDPO = f"{OWN_RECIPES}/gdpo.py:gdpo"
BASE = {"PolicyConfig": DEFAULTS, "OnlinePreferenceConfig": {"per_device_train_batch_size": 8}}
# Every configuration of a trainer that reads pairs or rows.
SHARED = [{"max_steps": 0}, {"learning_rate": -1.0}, {"fp16": True}, {"tf32": True}]
SHARED += [
    ({"max_steps": -1, "num_train_epochs": epochs}, "num_train_epochs") for epochs in (0, -1.0, math.nan, math.inf)
]
# Configuration -> settings, all of which the message names; or settings, and words that it has instead.
REFUSED = {
    "PolicyConfig": [
        *SHARED,
        ({"algorithm": "gspo", "aggregation": "token_mean"}, "--algorithm gspo", "sequence_mean", "--algorithm grpo"),
        ({"loss_type": "bnpo"}, "'bnpo' has no equivalent", "grpo, dapo, dr_grpo, luspo"),
        ({"loss_type": "sapo", "epsilon": 0.2}, "--epsilon 0.2 and --surrogate sapo", "loss_type 'sapo'"),
        ({"loss_type": "dapo", "aggregation": "sum"}, "'dapo' selects aggregation token_mean", "aggregation sum"),
        ({"algorithm": "dr_grpo", "scale_rewards": "group"}, "'group' selects --advantage group_normalized"),
        ({"algorithm": "gspo", "importance_sampling_level": "token"}, "'token' selects --ratio token", "sequence"),
        ({"algorithm": "rloo", "loss_type": "grpo"}, "--ratio none and --surrogate clip", "loss_type"),
        ({"delta": 1.1}, "delta", "1 + epsilon_high, 1.2"),
        ({"sapo_temperature_pos": 2.0}, "sapo_temperature_pos", "--algorithm_kwargs"),
        ({"vespo_k_neg": 2.0}, "vespo_k_neg", "recipes/own/vespo.py"),
        {"multi_objective_aggregation": "normalize_then_sum"},
        {"loss_type": "vespo"},
        {"algorithm": "dapo_full", "resample_groups": 0},
        {"algorithm": "dapo_full", "overlong_share": 0.0},
        {"overlong_share": 1.5},
        ({"advantage": GDPO, "missing_eos_penalty": 1.0}, "each reward function by itself", "missing_eos_penalty"),
        ({"advantage": GDPO, "overlong_share": 0.2}, "each reward function by itself", "overlong_share"),
        ({"advantage": GDPO, "beta": 0.1, "kl_in": "reward", "kl_estimator": "k1"}, "by itself", "kl_in reward"),
        *({"temperature": value} for value in (0.0, math.inf)),
        *({"top_k": value} for value in (-1, 1)),
        *({name: 0.0} for name in ("repetition_penalty", "top_p")),
        {"min_p": 1.5},
        {"min_new_tokens": 9},
        {"reward_errors": "ignore"},
        {"missing_eos_penalty": -1.0},
        {"max_completion_length": None},
        {"num_generations": 0},
        {"algorithm_kwargs": "gamma"},
        {"resample_groups": -1},
        *({"resample_groups": 1, "algorithm": name} for name in ("remax", "reinforce")),
    ],
    "PreferenceConfig": [
        *SHARED,
        ({"loss_type": "ipo", "loss": "dpo"}, "loss_type 'ipo' selects loss ipo", "loss dpo"),
        ({"loss_type": ["sigmoid", "sft"]}, "('sigmoid', 'sft') has no equivalent"),
        ({"loss_weights": [1.0]}, "loss_weights", "loss=file.py:function"),
        *({name: value} for name, value in {"ld_alpha": 0.5, "f_divergence_type": "js_divergence"}.items()),
        ({"use_weighting": True}, "use_weighting", "weighting=['wpo']"),
        ({"max_length": 1024}, "max_length", "max_prompt_tokens and max_response_tokens"),
        {"aot_scope": "rank"},
        {"max_prompt_tokens": 0},
        {"max_response_tokens": -3},
        {"beta": 0.0},
        ({"loss": "aott"}, "loss 'aott'; did you mean 'aot'?"),
        ({"loss": "nowhere.py:mine"}, "no file 'nowhere.py'"),
        ({"loss_kwargs": {"gama": 1}, "loss": "simpo"}, "'simpo' has no option 'gama'", "did you mean 'gamma'?"),
        ({"weighting": ["wp"]}, "weighting 'wp'; did you mean 'wpo'?"),
        ({"weighting_kwargs": {"power": 2}}, "weighting option 'power': no weighting is on"),
        ({"weighting": ["confidence"], "weighting_kwargs": {"powr": 2}}, "'powr'", "did you mean 'power'?"),
        ({"label_smoothing": 0.1}, "'dpo' has no label smoothing", "use cdpo or robust_dpo"),
        {"loss_kwargs": "gamma=1"},
        {"weighting_kwargs": "3"},
    ],
    "AOTConfig": [{"loss": "dpo"}, ({"loss_type": ["aot"]}, "loss_type 'aot' selects loss aot_paired", "loss aot:")],
    "IPOConfig": [
        ({"loss_type": "sigmoid"}, "loss_type 'sigmoid' selects loss dpo", "loss ipo"),
        ({"loss_type": "ipo", "length_normalized": False}, "'ipo' selects length_normalized True", "False"),
    ],
    "SimPOConfig": [({"gamma": 1.0, "loss_kwargs": {"gamma": 2.0}}, "gamma is given twice", "loss_kwargs")],
    "CDPOConfig": [({"label_smoothing": 0.1, "loss_kwargs": {"label_smoothing": 0.2}}, "label_smoothing", "twice")],
    "PPOConfig": [
        {"algorithm": "grpo"},
        {"advantage": "group_centered"},
        {"std_ddof": 1},
        ({"ratio": "sequence", "aggregation": "sequence_mean"}, "--algorithm ppo and --ratio sequence"),
        {"surrogate": "cispo"},
        {"value_model": "seperate"},
        ({"value_model": "separate"}, "needs value_model_name_or_path"),
        {"value_model_name_or_path": "gpt2"},
        {"lam": 1.1},
        {"value_clip": 0.0},
        {"value_coefficient": -1.0},
        ({"kl_target": 6.0, "beta": 0.0}, "kl_target 6.0 has no coefficient to adapt"),
        {"kl_horizon": 20},
        # 0.2 x 40 = 8: the coefficient could become 0.
        ({"kl_target": 6.0, "kl_horizon": 8, "generation_batch_size": 40}, "kl_horizon 8", "set it to 9 at least"),
        {"use_vllm": True},
        {"torch_compile": True},
        ({"kl_estimator": "k3"}, "a detached k3 in the reward"),
        {"resample_groups": 1},
    ],
    "OnlinePreferenceConfig": [
        {"num_generations": 1},
        *({"temperature": value} for value in (-1.0, math.nan)),
        {"max_steps": 0},
        ({"loss": "ipoo"}, "loss 'ipoo'; did you mean 'ipo'"),
        {"pairs": "best"},
        {"tie_tolerance": -1.0},
        {"epsilon": 0.2},
        ({"mask_truncated_completions": True}, "mask_truncated_completions", "missing_eos_penalty"),
        {"algorithm": "grpo"},
        ({"replay_capacity": 8, "replay_fraction": 1.0}, "replay_fraction"),
        ({"replay_capacity": 8, "replay_max_age": 1, "num_iterations": 2}, "replay_max_age 1", "2 updates old"),
        ({"replay_capacity": 8, "replay_weights": "token"}, "replay_weights"),
        *({"replay_capacity": 0, name: 1.5} for name in ("replay_weight_cap", "replay_fraction")),
        ({"replay_capacity": 8, "replay_weight_cap": 3.0}, "replay_weight_cap", "replay_weights none"),
        ({"replay_capacity": 8, "replay_weight_cap": 0.5}, "replay_weight_cap must be at least 1"),
        ({"replay_capacity": 8, "sync_ref_model": True}, "sync_ref_model", "replay"),
        {"gradient_accumulation_steps": 2, "steps_per_generation": 1},
        {"top_p": 1.5},
        {"reward_timeout": -1.0},
        {"resample_groups": 1},
    ],
    "KTOConfig": [
        *SHARED,
        {"per_device_train_batch_size": 1},
        {"max_length": 100},
        {"max_prompt_tokens": 0},
        {"beta": 0},
        {"undesirable_weight": -1.0},
        {"packing": "on"},
    ],
    "RewardConfig": [
        *SHARED,
        {"max_length": 1024},
        *({"label_smoothing": 0.5}, {"label_smoothing_factor": 0.1}),
        {"margin_scale": math.nan},
        {"max_prompt_tokens": 0},
        {"center_rewards_coefficient": -0.01},
    ],
    "ExpertIterationConfig": [
        *({name: 0} for name in ("n_steps", "max_per_question")),
        *({"max_steps": 10}, {"num_train_epochs": 7}),
        {"save_strategy": "steps"},
    ],
    "SFTConfig": [*SHARED, {"max_length": 1}],
}


@pytest.mark.parametrize(("name", "row"), [(name, row) for name, rows in REFUSED.items() for row in rows])
def test_refused(name, row, tmp_path):
    settings, *words = row if isinstance(row, tuple) else (row, *row)
    settings = {"output_dir": str(tmp_path), "report_to": "none", "use_cpu": True, **BASE.get(name, {}), **settings}
    assert_refused(lambda: getattr(trl_ext, name)(**settings), *words)
