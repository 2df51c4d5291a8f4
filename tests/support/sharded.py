"""Trainings under DeepSpeed ZeRO and under FSDP2, and what they save for plain transformers."""

from __future__ import annotations

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.support.train_once import Run, largest_difference

# Models are given by path, as ZeRO-3 divides their parameters among the processes while they are loaded. Adam has so
# large an epsilon that an update is a smooth function of the gradient: rounding stays rounding.
COMMON = {"dtype": None, "pairs": 12, "shift": True, "saves": True}
ADAM = {"optim": "adamw_torch", "adam_epsilon": 0.01, "max_steps": 3, "learning_rate": 0.01, "max_grad_norm": 1.0}


def specification(trainer: str, **keys) -> dict:
    """An optimizer step takes 4 pairs, or 8 responses to 2 prompts."""
    own = {"per_device_train_batch_size": 4, "beta": 0.05} if trainer == "PolicyTrainer" else {}
    return {**COMMON, "trainer": trainer, **keys, "args": {**ADAM, **own, **keys.get("args", {})}}


TRAINED = {
    "dpo": specification("PreferenceTrainer", args={"loss": "dpo"}),
    # An optimizer step takes 8 pairs.
    "aot": specification(
        "PreferenceTrainer", lora=True, pairs=24, args={"loss": "aot", "gradient_accumulation_steps": 2}
    ),
    "reward": specification("RewardTrainer"),
    "reward_adapter": specification("RewardTrainer", lora=True),
    "policy": specification("PolicyTrainer", fixed=True),
    "policy_adapter": specification("PolicyTrainer", fixed=True, lora=True),
}
ADAPTERS = [name for name, spec in TRAINED.items() if spec.get("lora")]


def with_arguments(spec: dict, **arguments) -> dict:
    return {**spec, "args": {**spec["args"], **arguments}}


def _load(name: str, path: str):
    kind, options = AutoModelForCausalLM, {}
    if name.startswith("reward"):
        kind, options = AutoModelForSequenceClassification, {"num_labels": 1}
    return kind.from_pretrained(path, dtype=torch.float32, **options)


def check_saved_model(name: str, run: Run) -> None:
    assert largest_difference(dict(_load(name, run.folder).named_parameters()), run.parameters) == 0.0


def check_saved_adapter(name: str, run: Run, base_path: str) -> None:
    """The merged weight is W + 8 / 4 B A, from A and B as they were gathered after training."""
    base = _load(name, base_path)
    before = {name: weight.clone() for name, weight in base.state_dict().items()}
    merged = PeftModel.from_pretrained(base, run.folder).merge_and_unload().state_dict()
    for layer in (0, 1):
        for target in ("q_proj", "v_proj"):
            module = f"model.layers.{layer}.self_attn.{target}"
            a, b = (run.parameters[f"base_model.model.{module}.lora_{side}.default.weight"] for side in "AB")
            added = 2 * b @ a
            assert added.abs().max() > 0.01
            expected = before[f"{module}.weight"] + added
            torch.testing.assert_close(merged[f"{module}.weight"], expected, rtol=0, atol=1e-6)
    if name.startswith("reward"):
        (head,) = (weight for key, weight in run.parameters.items() if "score" in key)
        assert torch.equal(merged["score.weight"], head)
