"""Reward models that share the policy's backbone or a frozen base, and that stock TRL trains with."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.float64 import float64_throughout
from tests.support.reward_adapters import COMPLETIONS, PROMPTS, load_policy, save_adapter, save_reward_models
from trl_ext.rewards import RewardEnsemble, RewardModel, share_or_load


@pytest.fixture(scope="module")
def folders(tiny_model_path, tmp_path_factory) -> dict[str, str]:
    return save_reward_models(tiny_model_path, tmp_path_factory.mktemp("rewards"))


def copies(models: list[RewardModel], policy=None) -> int:
    """How many different embeddings of the base the models and the policy hold together."""
    held = [model.backbone.model if model.backbone else model.model for model in models]
    held = [*held, policy] if policy is not None else held
    return len({model.get_input_embeddings().weight.data_ptr() for model in held})


@float64_throughout()
def test_share_or_load(tiny_model_path, folders, tmp_path):
    biased = save_adapter(tiny_model_path, tmp_path / "biased", bias="lora_only", seed=4)
    paths = [folders["adapter"], folders["full"], folders["rank6"], biased]
    alone = [RewardModel(path).score(PROMPTS, COMPLETIONS) for path in paths]

    def check(models) -> None:
        for model, expected in zip(models, alone, strict=True):
            assert (model.score(PROMPTS, COMPLETIONS) - expected).abs().max() <= 1e-9

    policy = load_policy(tiny_model_path).double()
    models = [RewardModel(path) for path in paths]
    lines = share_or_load(models, policy)
    assert lines == [
        f"adapter-run: on the policy's backbone, {tiny_model_path}",
        "full-run: a copy of its own: it is a full model, not an adapter",
        f"rank6: on the policy's backbone, {tiny_model_path}",
        "biased: a copy of its own: the adapter cannot share a base with bias='lora_only'",
    ]
    assert models[0].backbone is models[2].backbone
    assert copies(models, policy) == 3
    check(models)
    assert share_or_load(models, policy)[0] == "adapter-run: where it was, on a shared backbone"

    models = [RewardModel(path) for path in paths]
    lines = share_or_load(models, policy, policy_reason="the policy is sharded by an engine")
    assert lines[0] == (
        f"adapter-run: on one frozen copy of {tiny_model_path} with others: the policy is sharded by an engine"
    )
    assert lines[1] == "full-run: a copy of its own: it is a full model, not an adapter"
    assert copies(models, policy) == 4
    check(models)

    models = [RewardModel(path) for path in paths]
    assert (
        share_or_load(models)[2] == f"rank6: on one frozen copy of {tiny_model_path} with others: there is no policy"
    )
    assert copies(models) == 3
    check(models)

    models = [RewardModel(path) for path in paths]
    assert set(share_or_load(models, policy, "never")) == {
        f"{model.name}: a copy of its own: sharing is switched off" for model in models
    }
    assert copies(models, policy) == 5
    check(models)
    # One adapter that cannot share the policy's base gains nothing from a frozen one.
    single = [RewardModel(folders["adapter"])]
    assert share_or_load(single) == ["adapter-run: a copy of its own: there is no policy"]
    # A copy that was loaded before is given up for the shared one.
    loaded = RewardModel(folders["adapter"]).load()
    share_or_load([loaded], policy)
    assert loaded.model is None
    assert loaded.load().model is None


def test_share_or_load_always(tiny_model_path, folders):
    from transformers import AutoModelForCausalLM

    policy = load_policy(tiny_model_path)
    assert len(share_or_load([RewardModel(folders["adapter"])], policy, "always")) == 1
    for arguments, message in (
        (([RewardModel(folders["full"])], policy), "full-run cannot sit on the policy's backbone: it is a full model"),
        (([RewardModel(folders["adapter"])], None), "adapter-run cannot sit .*: there is no policy"),
        (
            ([RewardModel(folders["adapter"])], AutoModelForCausalLM.from_pretrained(tiny_model_path)),
            "the policy is a Qwen2ForCausalLM, not a model with a LoRA adapter",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            share_or_load(*arguments, "always")
    with pytest.raises(ValueError, match="backbone: the engine shards it"):
        share_or_load([RewardModel(folders["adapter"])], policy, "always", policy_reason="the engine shards it")
    with pytest.raises(ValueError, match="mode must be auto, always or never, got 'sometimes'"):
        share_or_load([], None, "sometimes")


def test_an_adapter_that_turns_out_not_to_fit_the_policy(tiny_model_path, tmp_path):
    """Its targets match the policy's output layer, which a reward model lacks: known only when it is attached."""
    folder = save_adapter(tiny_model_path, tmp_path / "pattern", target_modules=".*(q_proj|lm_head)")
    expected = RewardModel(folder).score(PROMPTS, COMPLETIONS)
    policy = load_policy(tiny_model_path)
    reward = RewardModel(folder)
    (line,) = share_or_load([reward], policy)
    assert line.startswith("pattern: a copy of its own: ")
    assert line.endswith("the adapter lacks 2 tensors, such as base_model.model.lm_head.lora_A.reward0.weight")
    assert list(policy.peft_config) == ["default"]
    assert torch.equal(reward.score(PROMPTS, COMPLETIONS), expected)


@pytest.mark.parametrize("damage", ["missing", "misshapen"])
def test_an_adapter_with_damaged_tensors_never_scores(damage, tiny_model_path, folders, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(folders["adapter"], folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"
    if damage == "missing":
        del tensors[name]
    else:
        tensors[name] = torch.zeros(9, 4)
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="damaged: the adapter does not fit its base .*v_proj.lora_B") as caught:
        share_or_load([RewardModel(folder)], load_policy(tiny_model_path))
    assert "\n" not in str(caught.value)


def test_a_copy_is_whole_where_zero3_would_shard_it(folders):
    """With the flag up, transformers asks DeepSpeed to shard what it loads; here the copy never does."""
    from transformers.integrations import deepspeed

    class Settings:
        config: dict = {}

        def is_zero3(self):
            return True

    settings = Settings()
    deepspeed.set_hf_deepspeed_config(settings)
    try:
        for kind in ("adapter", "full"):
            inner = RewardModel(folders[kind]).load().model
            head = [parameter for name, parameter in inner.named_parameters() if "score" in name]
            assert {tuple(parameter.shape) for parameter in head} == {(1, 16)}
            assert not any(hasattr(parameter, "ds_id") for parameter in inner.parameters())
            assert deepspeed.is_deepspeed_zero3_enabled(), "the flag is up again for the policy"
    finally:
        deepspeed.unset_hf_deepspeed_config()


@pytest.mark.slow
def test_stock_trl_trains_with_them(tiny_model_path, folders, tmp_path):
    """GRPO of TRL with an ensemble and a single model as reward functions: logs, checkpoints, and equal runs."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    def train(sharing: str, folder: Path):
        members = [RewardModel(folders["adapter"]), RewardModel(folders["rank6"])]
        single = RewardModel(folders["rank6"], name="single")
        trainer = GRPOTrainer(
            tiny_model_path,
            reward_funcs=[RewardEnsemble(members, aggregate="uwo"), single],
            args=GRPOConfig(
                str(folder),
                max_steps=2,
                save_steps=2,
                logging_steps=1,
                per_device_train_batch_size=4,
                num_generations=2,
                max_completion_length=8,
                learning_rate=1e-2,
                beta=0.1,
                report_to="none",
                use_cpu=True,
                bf16=False,
                seed=3,
            ),
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS * 2]),
            peft_config=LoraConfig(r=2, target_modules=["q_proj", "o_proj"]),
        )
        share_or_load([*members, single], trainer.model, sharing)
        trainer.train()
        assert trainer.reward_func_names == ["ensemble", "single"]
        return trainer

    trainer = train("always", tmp_path / "run")
    logged = trainer.state.log_history[0]
    for name in ("adapter-run", "rank6", "ensemble", "single"):
        assert f"rewards/{name}/mean" in logged
    assert logged["ensemble_std"] > 0
    assert logged["rewards/single/mean"] == pytest.approx(logged["rewards/rank6/mean"], abs=1e-5)
    checkpoint = tmp_path / "run" / "checkpoint-2"
    assert [path.parent.name for path in checkpoint.rglob("adapter_model.safetensors")] == ["checkpoint-2"]
    saved = load_file(checkpoint / "adapter_model.safetensors")
    assert len(saved) == 8, "A and B of two modules in two layers"
    separate = train("never", tmp_path / "separate")
    expected = load_file(tmp_path / "separate" / "checkpoint-2" / "adapter_model.safetensors")
    assert max((saved[name] - expected[name]).abs().max().item() for name in expected) <= 1e-6
    rewards = [[entry["rewards/ensemble/mean"] for entry in t.state.log_history[:2]] for t in (trainer, separate)]
    assert rewards[0] == pytest.approx(rewards[1], abs=1e-6)
