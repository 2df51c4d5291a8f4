"""Settings that configurations refuse: each message names the option, what is wrong, and a way out, in one line."""

from __future__ import annotations

import math
import re

import pytest

import trl_ext
from tests.support.rollout_once import DEFAULTS, OWN_RECIPES

GDPO = f"{OWN_RECIPES}/gdpo.py:gdpo"
BASE = {"PolicyConfig": DEFAULTS, "OnlinePreferenceConfig": {"per_device_train_batch_size": 8}}
# Configuration -> settings, and parts of the message.
REFUSED = {
    "PolicyConfig": [
        (
            {"algorithm": "gspo", "aggregation": "token_mean"},
            "--algorithm gspo and --aggregation token_mean contradict.*sequence_mean.*--algorithm grpo",
        ),
        ({"loss_type": "bnpo"}, "loss_type 'bnpo' has no equivalent in PolicyConfig", "grpo, dapo, dr_grpo, luspo"),
        ({"loss_type": "sapo", "epsilon": 0.2}, r"--epsilon 0\.2 and --surrogate sapo contradict", "loss_type 'sapo'"),
        ({"loss_type": "dapo", "aggregation": "sum"}, "'dapo' selects aggregation token_mean", "sum: give"),
        (
            {"algorithm": "dr_grpo", "scale_rewards": "group"},
            "contradict.*without the standard deviation",
            "'group' selects --advantage group_normalized --std_ddof 1",
        ),
        (
            {"algorithm": "gspo", "importance_sampling_level": "token"},
            "contradict.*ratio per sequence",
            "importance_sampling_level 'token' selects --ratio token: --",
        ),
        ({"algorithm": "rloo", "loss_type": "grpo"}, "--ratio none and --surrogate clip contradict", "loss_type"),
        ({"delta": 1.1}, r"delta must be at least 1 \+ epsilon_high, 1\.2", r"1\.1"),
        ({"sapo_temperature_pos": 2.0}, "sapo_temperature_pos is not used", "--loss_type sapo"),
        ({"algorithm": "sapo", "vespo_k_neg": 2.0}, "vespo_k_neg is not used", r"recipes/own/vespo\.py"),
        (
            {"multi_objective_aggregation": "normalize_then_sum"},
            "multi_objective_aggregation 'normalize_then_sum' has no equivalent in PolicyConfig",
        ),
        ({"loss_type": "vespo"}, "loss_type 'vespo' has no equivalent in PolicyConfig"),
        ({"algorithm": "dapo_full", "resample_groups": 0}, "dapo_full and --resample_groups 0", "dynamic sampling"),
        ({"algorithm": "dapo_full", "overlong_share": 0.0}, r"--overlong_share 0\.0", "--algorithm dapo"),
        ({"overlong_share": 1.5}, "overlong_share is a share of max_completion_length", r"1\.5"),
        ({"advantage": GDPO, "missing_eos_penalty": 1.0}, "each reward function by itself", "missing_eos_penalty"),
        ({"advantage": GDPO, "overlong_share": 0.2}, "each reward function by itself", "overlong_share"),
        (
            {"advantage": GDPO, "beta": 0.1, "kl_in": "reward", "kl_estimator": "k1"},
            "each reward function by itself",
            "kl_in reward",
        ),
        ({"temperature": 0.0}, "temperature must be positive", r"0\.0", "alike"),
        ({"temperature": math.inf}, "temperature must be positive", "inf"),
        ({"min_p": 1.5}, r"min_p must lie in \[0, 1\]", r"1\.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be positive", r"0\.0", "1 is none"),
        ({"top_k": -1}, "top_k must be a number from 0 up", "-1"),
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\]", r"0\.0"),
        ({"top_k": 1}, "top_k 1", "alike"),
        ({"min_new_tokens": 9}, "min_new_tokens", r"max_completion_length \(8\)", "9"),
        ({"reward_errors": "ignore"}, "reward_errors", "raise, skip", "'ignore'"),
        ({"missing_eos_penalty": -1.0}, "missing_eos_penalty", "from 0 up", r"-1\.0"),
        ({"max_completion_length": None}, "max_completion_length must be at least 1", "None"),
        ({"num_generations": 0}, "num_generations must be at least 1", "0"),
        ({"max_steps": 0}, "max_steps must be at least 1", "0", "num_train_epochs"),
        ({"learning_rate": -1.0}, "learning_rate", "from 0 up", r"-1\.0"),
        ({"algorithm_kwargs": "gamma"}, "algorithm_kwargs must be a JSON object", "'gamma'"),
        ({"resample_groups": -1}, "resample_groups must be a number from 0 up"),
        ({"resample_groups": 1, "algorithm": "remax"}, "'remax' learns from them too: leave it 0"),
        ({"resample_groups": 1, "algorithm": "reinforce"}, "'reinforce' learns from them too"),
        ({"group_filter": "f.py:hard"}, "set resample_groups"),
        ({"group_filter": "none.py:hard", "resample_groups": 1}, "no file 'none.py'"),
    ],
    "PreferenceConfig": [
        (
            {"loss_type": "ipo", "loss": "dpo"},
            "loss_type 'ipo' selects loss ipo, which conflicts with loss dpo: give one",
        ),
        ({"loss_type": ["sigmoid", "sft"]}, r"\('sigmoid', 'sft'\) has no equivalent in PreferenceConfig, where .*"),
        ({"loss_weights": [1.0]}, r"loss_weights is not used .*`loss=file\.py:function`"),
        ({"ld_alpha": 0.5}, r"ld_alpha is not used .*stock `trl\.DPOTrainer` for LD-DPO"),
        ({"use_weighting": True}, r"use_weighting is not used .*`weighting=\['wpo'\]`"),
        ({"f_divergence_type": "js_divergence"}, r"f_divergence_type is not used .*stock `trl\.DPOTrainer` for f-DPO"),
        ({"max_length": 1024}, "max_length is not used .*max_prompt_tokens and max_response_tokens"),
        ({"aot_scope": "rank"}, "aot_scope must be one of global, device, got 'rank'"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens must be at least 1, got 0"),
        ({"max_response_tokens": -3}, "max_response_tokens must be at least 1, got -3"),
        ({"beta": 0.0}, r"beta must be positive, got 0\.0"),
        ({"loss": "aott"}, r"unknown preference loss 'aott'; did you mean 'aot'\?"),
        ({"loss": "nowhere.py:mine"}, r"no file 'nowhere\.py' to take a function from"),
        ({"loss_kwargs": {"gama": 1}, "loss": "simpo"}, r"'simpo' has no option 'gama'.*did you mean 'gamma'\?"),
        ({"weighting": ["wp"]}, r"unknown preference weighting 'wp'; did you mean 'wpo'\?"),
        ({"weighting_kwargs": {"power": 2}}, "unknown weighting option 'power': no weighting is on"),
        ({"weighting": ["confidence"], "weighting_kwargs": {"powr": 2}}, r"option 'powr'.*did you mean 'power'\?"),
        ({"label_smoothing": 0.1}, "'dpo' has no label smoothing.*use cdpo or robust_dpo, or leave it out"),
        ({"loss_kwargs": "gamma=1"}, "loss_kwargs must be a JSON object such as .*, got 'gamma=1': "),
        ({"weighting_kwargs": "3"}, "weighting_kwargs must be a JSON object with one entry per option, got '3'"),
    ],
    "PPOConfig": [
        ({"algorithm": "grpo"}, "PPOConfig is the algorithm 'ppo' and cannot be 'grpo'"),
        ({"advantage": "group_centered"}, "PPO's advantages are those of its value function"),
        ({"std_ddof": 1}, "std_ddof is not used by PPOConfig"),
        ({"ratio": "sequence", "aggregation": "sequence_mean"}, "clipped token ratio"),
        ({"surrogate": "cispo"}, "clipped token ratio"),
        ({"value_model": "seperate"}, "value_model must be one of shared, separate.*separate"),
        ({"value_model": "separate"}, "needs value_model_name_or_path"),
        ({"value_model_name_or_path": "gpt2"}, "a value head on the policy's own base cannot have another base"),
        ({"lam": 1.1}, r"lam must lie in \[0, 1\], got 1.1"),
        ({"value_clip": 0.0}, "value_clip must be positive, got 0.0; leave it None for none"),
        ({"value_coefficient": -1.0}, "value_coefficient must be a number from 0 up, got -1.0"),
        ({"kl_target": 6.0, "beta": 0.0}, "kl_target 6.0 has no coefficient to adapt"),
        ({"kl_horizon": 20}, "kl_horizon 20 is of kl_target, which is not set"),
        # 0.2 x 40 = 8: the coefficient could become 0.
        ({"kl_target": 6.0, "kl_horizon": 8, "generation_batch_size": 40}, "set it to 9 at least"),
        ({"use_vllm": True}, "use_vllm is not used by PPOConfig: the value head would be sent to vLLM"),
        ({"torch_compile": True}, "torch_compile is not used by PPOConfig"),
        ({"kl_estimator": "k3"}, "a detached k3 in the reward"),
        ({"resample_groups": 1}, "a value function learns from groups of equal rewards too"),
    ],
    "OnlinePreferenceConfig": [
        ({"num_generations": 1}, "num_generations must be at least 2, got 1: a pair takes two"),
        ({"temperature": -1.0}, "temperature must be positive, got -1.0"),
        ({"missing_eos_penalty": -1.0}, "missing_eos_penalty must be a number from 0 up, got -1.0"),
        ({"max_steps": 0}, "max_steps must be at least 1, got 0"),
        ({"loss": "ipoo"}, "unknown preference loss 'ipoo'; did you mean 'ipo'"),
        ({"pairs": "best"}, "pairs must be one of best_worst, all, got 'best'"),
        ({"tie_tolerance": -1.0}, "tie_tolerance must be a number from 0 up"),
        ({"epsilon": 0.2}, "epsilon is not used by OnlinePreferenceConfig: a preference loss does not read it"),
        ({"mask_truncated_completions": True}, "mask_truncated_completions is not used .* missing_eos_penalty"),
        ({"algorithm": "grpo"}, "is the algorithm 'online_preference' and cannot be 'grpo'"),
        ({"replay_capacity": 8, "replay_fraction": 1.0}, "replay_fraction must lie between 0 and 1, got 1"),
        (
            {"replay_capacity": 8, "replay_max_age": 1, "num_iterations": 2},
            "replay_max_age 1 leaves nothing to replay: .* 2 updates old",
        ),
        ({"replay_capacity": 8, "replay_weights": "token"}, "replay_weights must be one of none, sequence"),
        ({"replay_weight_cap": 3.0}, "replay_weight_cap 3.0 needs a replay: set replay_capacity"),
        ({"replay_fraction": 0.3}, "replay_fraction 0.3 needs a replay: set replay_capacity"),
        (
            {"replay_capacity": 8, "replay_weight_cap": 3.0},
            "replay_weight_cap 3.0 caps nothing with replay_weights none",
        ),
        ({"replay_capacity": 8, "replay_weight_cap": 0.5}, "replay_weight_cap must be at least 1"),
        ({"replay_capacity": 8, "sync_ref_model": True}, "replay does not go with sync_ref_model"),
        (
            {"gradient_accumulation_steps": 2, "steps_per_generation": 1},
            "gradient_accumulation_steps 2 does not divide the 1 micro-batches",
        ),
        ({"temperature": math.nan}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"reward_timeout": -1.0}, "reward_timeout"),
        ({"overlong_share": 2.0}, "overlong_share"),
        ({"max_completion_length": 0}, "max_completion_length"),
        ({"reward_errors": "ignore"}, "reward_errors"),
        ({"resample_groups": 1}, "prompts whose responses tie make no pair"),
    ],
    "KTOConfig": [
        ({"per_device_train_batch_size": 1}, "per_device_train_batch_size must be at least 2, got 1"),
        ({"max_length": 100}, "max_length is not used by KTOConfig: use max_prompt_tokens"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens must be at least 1"),
        ({"beta": 0}, "beta must be a positive number, got 0"),
        ({"undesirable_weight": -1.0}, "undesirable_weight must be a positive number"),
        ({"packing": "on"}, "packing must be one of auto, off"),
    ],
    "RewardConfig": [
        ({"max_length": 1024}, "max_length is not used by RewardConfig.*max_prompt_tokens and max_response_tokens"),
        ({"label_smoothing": 0.5}, r"label_smoothing must lie in \[0, 0\.5\), got 0\.5"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor is not used by RewardConfig: use label_smoothing"),
        ({"margin_scale": math.nan}, "margin_scale must be a number, got nan"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens must be at least 1, got 0"),
        ({"center_rewards_coefficient": -0.01}, r"center_rewards_coefficient must be a number from 0 up, got -0\.01"),
    ],
    "ExpertIterationConfig": [
        ({"n_steps": 0}, "n_steps must be at least 1"),
        ({"max_per_question": 0}, "max_per_question must be at least 1"),
        ({"max_steps": 10}, "max_steps and num_train_epochs are not used"),
        ({"num_train_epochs": 7}, "max_steps and num_train_epochs are not used"),
        ({"save_strategy": "steps"}, "save_strategy .* not used"),
    ],
    "SFTConfig": [
        ({"learning_rate": -1.0}, "learning_rate"),
        ({"max_length": 1}, "max_length"),
        ({"max_steps": 0}, "max_steps"),
    ],
}


@pytest.mark.parametrize(
    ("name", "settings", "parts"), [(name, s, parts) for name, rows in REFUSED.items() for s, *parts in rows]
)
def test_refused(name, settings, parts, tmp_path):
    settings = {"report_to": "none", "use_cpu": True, **BASE.get(name, {}), **settings}
    with pytest.raises(ValueError) as caught:
        getattr(trl_ext, name)(**settings, output_dir=str(tmp_path))
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert re.search(part, message), message
