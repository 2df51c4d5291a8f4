"""PPO's settings: the paper's by default, contradictions refused, and the recipes' files."""

from __future__ import annotations

import pytest

from tests.support import recipes
from trl_ext import PPOConfig

BASE = {"output_dir": "unused", "use_cpu": True, "report_to": "none"}


def test_defaults():
    config = PPOConfig(**BASE)
    settings = config.build_objective().to_dict()
    expected = {"algorithm": "ppo", "advantage": "gae", "ratio": "token", "surrogate": "clip", "epsilon": 0.2}
    expected |= {"epsilon_high": 0.2, "aggregation": "token_mean", "beta": 0.05, "kl_estimator": "k1"}
    expected["kl_in"] = "reward"
    assert {name: settings[name] for name in expected} == expected
    assert (config.num_generations, config.num_iterations, config.gamma, config.lam) == (1, 4, 1.0, 0.95)
    assert (config.value_clip, config.value_coefficient, config.value_model) == (0.2, 0.1, "shared")
    assert config.ddp_find_unused_parameters is False


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"algorithm": "grpo"}, "PPOConfig is the algorithm 'ppo' and cannot be 'grpo'"),
        ({"advantage": "group_centered"}, "PPO's advantages are those of its value function"),
        ({"std_ddof": 1}, "std_ddof is not used by PPOConfig"),
        ({"ratio": "sequence", "aggregation": "sequence_mean"}, "PPO's ratio is that of each token"),
        ({"surrogate": "cispo"}, "PPO clips its ratio"),
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
    ],
)
def test_refusals(settings, message):
    with pytest.raises(ValueError, match=message):
        PPOConfig(**{**BASE, **settings})


@pytest.mark.parametrize("name", ["toy", "wildchat/part2", "gpt2_hh"])
def test_recipe_files(name, monkeypatch):
    path = recipes.RECIPES / "configs" / name / "ppo.yaml"
    _, model, training = recipes.parse(monkeypatch, "ppo", "--config", str(path), "--reward_model", "unused")
    assert isinstance(training, PPOConfig) and training.algorithm == "ppo"
    base = {"toy": "toy", "wildchat/part2": "Qwen/Qwen2.5-1.5B-Instruct", "gpt2_hh": "openai-community/gpt2"}
    assert model.model_name_or_path == base[name]
