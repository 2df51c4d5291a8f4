"""What PPO's checkpoints and final models hold, resumed runs, and when the value function learns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.support.ppo_once import move_value_head, of_kind, specification
from tests.support.rollout_once import build, train
from tests.support.train_once import largest_difference, parameters, result

SAVING = {"save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch", "learning_rate": 0.01, "max_steps": 4}


@pytest.mark.parametrize("kind", ["shared", "separate"])
def test_a_resumed_run_is_the_straight_one(kind, policy_path, tmp_path):
    spec = of_kind(kind, policy_path, SAVING)
    straight = train(spec, str(tmp_path))
    checkpoint = tmp_path / "checkpoint-2"
    resumed = build(spec, str(tmp_path / "again"))
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert largest_difference(parameters(resumed), parameters(straight)) == 0.0
    # Adapted at each of two rollouts.
    assert resumed.objective.beta == straight.objective.beta != resumed.args.beta
    names = ("loss", "value_loss", "explained_variance", "value/mean", "kl_coef")
    expected, found = (
        [entry.get(name) for name in names] for entry in (result(straight).logs[-1], result(resumed).logs[-1])
    )
    assert found == expected

    straight.save_model(str(tmp_path / "final"))
    own = {name for name, _ in straight.model.named_parameters() if "value_head" in name}
    saved = load_file(tmp_path / "final" / "value_head.safetensors")
    assert saved.keys() == own
    weights = dict(straight.model.named_parameters())
    assert all(saved[name].equal(weights[name]) for name in own)
    for folder in (checkpoint, tmp_path / "final"):
        assert not any("value" in key for key in load_file(folder / "model.safetensors"))
    plain, info = AutoModelForCausalLM.from_pretrained(tmp_path / "final", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    own_weights = dict(plain.named_parameters())
    if kind == "separate":
        assert own_weights.keys() == {name for name in weights if name not in own}
        assert all(weight.equal(weights[name]) for name, weight in own_weights.items())


@pytest.mark.usefixtures("in_float64")
def test_the_coefficient_adapts(policy_path, tmp_path):
    """8 responses to a rollout, horizon 50: it changes by the factor 1 + clip(KL / target - 1) 8 / 50."""
    args = {"kl_target": 0.4, "kl_horizon": 50, "max_steps": 8, "beta": 0.2}
    trainer = train(specification(policy_path, args=args), str(tmp_path))
    logs = [entry for entry in trainer.state.log_history if "kl_coef" in entry]
    coefficients = [*[entry["kl_coef"] for entry in logs], trainer.objective.beta]
    assert len(logs) == 4 and coefficients[0] == 0.2
    for entry, now, then in zip(logs, coefficients[:-1], coefficients[1:], strict=True):
        error = max(-0.2, min(0.2, entry["kl/sequence"] / 0.4 - 1))
        assert then == pytest.approx(now * (1 + error * 8 / 50))
    assert len(set(coefficients)) > 2


def test_the_value_function_has_its_learning_rate(policy_path, tmp_path):
    """Plain SGD: twice the learning rate moves the value function twice as far, and the policy as before."""
    moves = []
    for rate in (None, 0.4):
        args = {"value_learning_rate": rate, "max_steps": 1, "max_grad_norm": 0.0}
        trainer = move_value_head(build(specification(policy_path, args=args, fixed=True), str(tmp_path)))
        before = {name: weight.clone() for name, weight in parameters(trainer).items()}
        trainer.train()
        moves.append({name: weight - before[name] for name, weight in parameters(trainer).items()})
    for name, move in moves[0].items():
        factor = 2 if name.startswith("value_head") else 1
        assert move.abs().max() > 0, name
        torch.testing.assert_close(moves[1][name], factor * move, rtol=1e-3, atol=1e-6)


def test_a_checkpoint_of_another_value_function_is_refused(policy_path, tmp_path):
    trainer = train(specification(policy_path, args=SAVING), str(tmp_path))
    file = tmp_path / "checkpoint-2" / "value_head.safetensors"
    other = build(of_kind("separate", policy_path), str(tmp_path / "other"))
    refused = "its value function is not of this run's value_model"
    with pytest.raises(ValueError, match=f"{refused} separate"):
        other.value_model.load(file.parent)
    save_file({**load_file(file), "value_head.weight": torch.zeros(1, 24)}, file)
    with pytest.raises(ValueError, match=f"{refused} shared, or of another base"):
        trainer.value_model.load(file.parent)
    file.unlink()
    with pytest.raises(FileNotFoundError, match="there is no value function to go on with"):
        trainer.value_model.load(file.parent)


# ---- A model of its own ----


@pytest.fixture(scope="module")
def reward_model_path(policy_path, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("reward-model")
    torch.manual_seed(2)
    AutoModelForSequenceClassification.from_pretrained(policy_path, num_labels=1).save_pretrained(path)
    AutoTokenizer.from_pretrained(policy_path).save_pretrained(path)
    return path


@pytest.mark.parametrize("adapter", [False, True])
def test_values_begin_as_the_rewards(adapter, policy_path, reward_model_path, tmp_path):
    """Before any update, the value after a text's last token is the reward model's score of the text."""
    folder = reward_model_path
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    if adapter:
        folder = tmp_path / "adapter"
        lora = LoraConfig(r=2, target_modules=["q_proj", "up_proj"], task_type="SEQ_CLS", init_lora_weights=False)
        model = get_peft_model(model, lora)
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(policy_path).save_pretrained(folder)
    spec = of_kind("separate", policy_path)
    spec["args"]["value_model_name_or_path"] = str(folder)
    trainer = build(spec, str(tmp_path / "run"))
    ids = torch.tensor([[0, 0, 20, 30, 40, 50], [9, 8, 7, 6, 5, 4]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    values = trainer.value_model.values(ids, mask, 2, 1)
    assert values.requires_grad and all(weight.requires_grad for weight in trainer.value_model.parameters().values())
    with torch.no_grad():
        for row, attended, value in zip(ids, mask, values, strict=True):
            # The value before the last token is that of the text without it.
            text = row[attended.bool()][None, :-1]
            score = model.eval()(input_ids=text, attention_mask=torch.ones_like(text)).logits
            assert value[-1].item() == pytest.approx(score.item(), abs=1e-5)
