"""The names and behaviours of TRL and transformers, some private, that the seams of `PolicyTrainer` stand on.

When one of these fails after an upgrade, its message says what moved and what in `trl_ext` stands on it.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections import defaultdict
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers
import trl
from packaging.version import Version
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import AutoModelForCausalLM, TrainerCallback
from trl.trainer import grpo_trainer, kto_trainer
from trl.trainer.utils import add_fused_lm_head, shuffle_sequence_dict, split_tensor_dict

import trl_ext
from tests.rollout_once import build, prompts, save_policy, thirds
from tests.train_once import largest_difference, result

pytestmark = pytest.mark.usefixtures("in_float64")

TRAINER = "trl_ext.trainers.policy.PolicyTrainer"
REWARDS = f"{TRAINER}._calculate_rewards"
ADVANTAGES = f"{TRAINER}._generate_and_score_completions"
LOSS = f"{TRAINER}._compute_loss"
GREEDY = "trl_ext.trainers.greedy"
STOP = "trl_ext.trainers.stop_strings.StopStrings"
GUARD = "trl_ext.trainers.update_guard.UpdateGuard"
REPLAY = "trl_ext.trainers.online_preference.OnlinePreferenceTrainer._save_optimizer_and_scheduler"
OPTIMIZER = "trl_ext.trainers.ppo.PPOTrainer.create_optimizer"
SCORING = "trl_ext.trainers.scoring_temperature.ScoringTemperature"


@pytest.fixture(scope="module")
def policy_path(tiny_model_path, tmp_path_factory) -> str:
    return save_policy(tiny_model_path, tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def stock(policy_path, tmp_path_factory) -> trl.GRPOTrainer:
    """TRL's own trainer with a reference, old log-probabilities and two micro-batches to a rollout; not trained."""
    args = {"per_device_train_batch_size": 4, "steps_per_generation": 2, "num_iterations": 2, "beta": 0.1}
    spec = {"model": policy_path, "trainer": "trl.GRPOTrainer", "rewards": ["thirds", "evens"], "args": args}
    trainer = build(spec, str(tmp_path_factory.mktemp("stock")))
    # What Trainer sets before each optimizer step.
    trainer.current_gradient_accumulation_steps = 1
    return trainer


@pytest.fixture
def rollout(stock) -> dict:
    """Eight scored responses to two prompts, as they leave `_generate_and_score_completions`."""
    stock.model.train()
    return stock._generate_and_score_completions(rows())


def rows() -> list[dict]:
    return [dict(row) for row in prompts(2) for _ in range(4)]


def parameter_names(method) -> list[str]:
    return list(inspect.signature(method).parameters)


def test_trl_version():
    found = version("trl")
    assert Version("1.16") <= Version(found) < Version("1.17"), (
        f"trl is {found}: both seams of {TRAINER} were read from 1.16; run this file and move the pin"
    )


# ---- Seam one: rewards and advantages ----


def test_calculate_rewards(stock):
    names = parameter_names(trl.GRPOTrainer._calculate_rewards)
    assert names == ["self", "inputs", "prompts", "completions", "completion_ids_list"], (
        f"GRPOTrainer._calculate_rewards takes {names}: {REWARDS} and {GREEDY} call it with these"
    )
    ids = [[5, 6, 9]] * 8
    texts = [[{"role": "assistant", "content": "x"}]] * 8
    found = stock._calculate_rewards(rows(), [row["prompt"] for row in rows()], texts, ids)
    assert found.shape == (8, 2) and found[:, 0].tolist() == pytest.approx(thirds(ids)), (
        f"GRPOTrainer._calculate_rewards returns {found} and not rewards per response and function: {REWARDS}"
    )
    assert "gather(rewards_per_func)" in inspect.getsource(trl.GRPOTrainer._calculate_rewards), (
        f"GRPOTrainer._calculate_rewards no longer gathers over the processes: {ADVANTAGES} slices its own part"
    )


def test_keys_of_a_rollout(rollout):
    expected = {
        "prompt_ids",
        "prompt_mask",
        "completion_ids",
        "completion_mask",
        "advantages",
        "num_items_in_batch",
        "old_per_token_logps",
        "ref_per_token_logps",
    }
    assert rollout.keys() == expected, (
        f"a rollout of GRPOTrainer has gained {rollout.keys() - expected} and lost {expected - rollout.keys()}: "
        f"{ADVANTAGES} replaces `advantages`, and {LOSS} and _mean_tokens_of_window read the others"
    )
    assert rollout["advantages"].shape == (8,), f"advantages are {rollout['advantages'].shape}: {ADVANTAGES}"
    assert rollout["num_items_in_batch"] == rollout["completion_mask"].sum(), (
        f"num_items_in_batch is no longer the rollout's tokens over all processes: {TRAINER}._mean_tokens_of_window"
    )
    shape = rollout["completion_ids"].shape
    assert all(
        rollout[key].shape == shape for key in ("completion_mask", "old_per_token_logps", "ref_per_token_logps")
    )


def test_further_tensors_stay_with_their_rows(rollout):
    """`bad_reward` and the advantages must come out beside the responses that they are of."""
    sums = rollout["completion_ids"].sum(1)
    marked = {**rollout, "advantages": sums.float(), "bad_reward": sums % 2 == 0}
    for batch in split_tensor_dict(shuffle_sequence_dict(marked), 2):
        own = batch["completion_ids"].sum(1)
        assert torch.equal(batch["advantages"], own.float()) and torch.equal(batch["bad_reward"], own % 2 == 0), (
            f"shuffle_sequence_dict or split_tensor_dict separates rows from what belongs to them: {ADVANTAGES} adds "
            "bad_reward to a rollout"
        )


def test_the_log_of_advantages(stock, rollout):
    logged = stock._logs["advantages"]
    assert list(logged)[-8:] == rollout["advantages"].tolist(), (
        f"GRPOTrainer no longer ends its `_logs['advantages']` with the rollout's: {TRAINER}._log_advantages pops them"
    )
    assert logged.maxlen == stock.args.generation_batch_size, f"_logs['advantages'] has another length: {TRAINER}"


def test_pending_reports(stock):
    """Filled by reward functions, and flushed into the logs with the rollout's rows."""
    stock._log_completion_extra("column", list(range(8)))
    stock._log_metric("figure", 3.0)
    assert dict(stock._pending_extra_logs) == {"column": list(range(8))}, f"{GREEDY}._reports_discarded swaps it"
    assert dict(stock._pending_metrics) == {"figure": [3.0]}, f"{GREEDY}._reports_discarded swaps it"
    stock._generate_and_score_completions(rows())
    assert not stock._pending_extra_logs and not stock._pending_metrics, f"not flushed any more: {GREEDY}"
    assert list(stock._logs["extra"].pop("column")) == list(range(8))
    assert stock._metrics["train"].pop("figure") == [3.0]


def test_tokenize_prompts(stock):
    assert parameter_names(trl.GRPOTrainer._tokenize_prompts) == ["self", "prompts"]
    found = stock._tokenize_prompts([row["prompt"] for row in prompts(2)])
    assert len(found) == 3 and [type(ids[0]) for ids in found[0]] == [int, int] and found[1] is None, (
        f"GRPOTrainer._tokenize_prompts returns {found} and not ids, images and further fields: "
        f"{TRAINER}._tokenize_prompts cuts the first, {GREEDY} hands all three on"
    )


def test_generate_single_turn(stock):
    names = parameter_names(trl.GRPOTrainer._generate_single_turn)
    assert names == ["self", "prompt_ids", "images", "multimodal_fields", "num_generations", "has_tool_images"], (
        f"GRPOTrainer._generate_single_turn takes {names}: {GREEDY}.greedy_rewards calls it"
    )
    ids, images, fields = stock._tokenize_prompts([row["prompt"] for row in prompts(2)])
    found = stock._generate_single_turn(ids, images, fields, 1)
    assert len(found) == 2 and len(found[0]) == 2 and isinstance(found[0][0], list), (
        f"GRPOTrainer._generate_single_turn returns {found} and not lists of ids and their log-probabilities: {GREEDY}"
    )
    source = inspect.getsource(trl.GRPOTrainer._generate_single_turn)
    assert (
        "generation_kwargs=self.generation_kwargs" in source and "generation_config=self.generation_config" in source
    ), (
        f"GRPOTrainer._generate_single_turn no longer reads generation_config and generation_kwargs, which "
        f"{GREEDY}._greedy_generation replaces: greedy responses would be sampled"
    )


def test_a_response_that_ended_ends_with_an_end_token(stock):
    assert stock.eos_token_ids == [stock.processing_class.eos_token_id], (
        f"GRPOTrainer.eos_token_ids is {stock.eos_token_ids}: {REWARDS} tells by it which responses are finished"
    )
    ids, images, fields = stock._tokenize_prompts([row["prompt"] for row in rows()])
    responses, _ = stock._generate_single_turn(ids, images, fields, 4)
    end = stock.eos_token_ids[0]
    assert any(end in response for response in responses)
    assert all(end not in response[:-1] for response in responses), f"what follows the end is kept: {REWARDS}"


@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k", "min_p"])
def test_the_settings_of_vllm(name):
    """By reading: vLLM itself is not needed for it."""
    source = Path(find_spec("trl").origin).with_name("generation") / "vllm_generation.py"
    (engine,) = [
        node
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "VLLMGeneration"
    ]
    methods = {node.name: node for node in engine.body if isinstance(node, ast.FunctionDef)}

    def uses(method: str, context) -> bool:
        return any(
            isinstance(node, ast.Attribute)
            and node.attr == name
            and getattr(node.value, "id", None) == "self"
            and isinstance(node.ctx, context)
            for node in ast.walk(methods[method])
        )

    assert uses("__init__", ast.Store) and uses("generate", ast.Load), (
        f"VLLMGeneration no longer keeps {name} in __init__ and reads it in generate: {GREEDY}._GREEDY_VLLM sets it "
        "for greedy responses"
    )


def test_stop_strings_reach_the_call_of_generate(stock):
    """`StopStrings` gives the tokenizer to the model's `generate` for the while of TRL's one call of it."""
    assert stock._tokenizer is stock.processing_class, (
        f"GRPOTrainer._tokenizer is {type(getattr(stock, '_tokenizer', None)).__name__} and not the tokenizer of its "
        f"processing class: {STOP} decodes with it"
    )
    model = stock.accelerator.unwrap_model(stock.model_wrapped)
    calls, generate = [], model.generate

    def recorded(*arguments, **keywords):
        calls.append(keywords)
        return generate(*arguments, **keywords)

    ids, images, fields = stock._tokenize_prompts([row["prompt"] for row in prompts(2)])
    model.generate = recorded
    try:
        stock._generate_single_turn(ids, images, fields, 1)
    finally:
        del model.generate
    assert len(calls) == 1, (
        f"GRPOTrainer._generate_single_turn calls `generate` of accelerator.unwrap_model(self.model_wrapped) "
        f"{len(calls)} times and not once: {STOP}._generate_single_turn hands the tokenizer over there, without which "
        "transformers refuses stop_strings"
    )
    assert "tokenizer" not in calls[0], (
        f"GRPOTrainer._generate_single_turn gives generate a tokenizer itself: {STOP}._generate_single_turn need not"
    )


def test_what_generate_returns_and_logs(stock, monkeypatch):
    """Three responses of 3, 1 and 2 tokens, the first two of which end: a third is cut, and those that ended have
    (3 + 1) / 2 = 2 tokens."""
    assert parameter_names(trl.GRPOTrainer._generate) == ["self", "prompts"], (
        f"GRPOTrainer._generate takes {parameter_names(trl.GRPOTrainer._generate)}: {STOP}._generate overrides it"
    )
    end = stock.eos_token_ids[0]
    responses = [[5, 6, end], [end], [7, 8]]
    monkeypatch.setattr(stock, "_generate_single_turn", lambda *arguments: (responses, None))
    # The fixture's figures stay as they were.
    monkeypatch.setattr(stock, "_metrics", {"train": defaultdict(list), "eval": defaultdict(list)})
    stock.model.train()
    output = stock._generate([row["prompt"] for row in prompts(3)])
    assert output[1] == responses, (
        f"the second of what GRPOTrainer._generate returns is {output[1]} and not the responses: {STOP}._generate"
    )
    expected = {"clipped_ratio": 1 / 3}
    expected |= {f"{name}_terminated_length": value for name, value in (("mean", 2), ("min", 1), ("max", 3))}
    found = {name: stock._metrics["train"].get(f"completions/{name}") for name in expected}
    assert found == {name: [pytest.approx(value)] for name, value in expected.items()}, (
        f"GRPOTrainer._generate logs {found} and not each figure at the end of its list in `_metrics`: "
        f"{STOP}._log_what_ended replaces those ends, as a stop string ends a response too"
    )


# ---- Seam two: the loss ----


def test_the_forward_pass(stock, rollout):
    """A 3-tuple, and one pass with gradient for each loss, so that the seam's record of it is the loss's own."""
    calls = []

    class Recording(trl.GRPOTrainer):
        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            calls.append(super()._get_per_token_logps_and_entropies(*args, **kwargs))
            return calls[-1]

    (batch, _) = split_tensor_dict(rollout, 2)
    kind = type(stock)
    stock.__class__ = Recording
    try:
        loss = stock._compute_loss(stock.model, batch)
    finally:
        stock.__class__ = kind
    assert len(calls) == 1, f"GRPOTrainer._compute_loss makes {len(calls)} forward passes: {LOSS} keeps the last"
    assert len(calls[0]) == 3, f"GRPOTrainer._get_per_token_logps_and_entropies returns {len(calls[0])} things: {LOSS}"
    log_probs, entropies, auxiliary = calls[0]
    assert log_probs.shape == entropies.shape == batch["completion_ids"].shape and auxiliary is None, LOSS
    assert log_probs.requires_grad and loss.requires_grad, f"the forward pass has no gradient any more: {LOSS}"


@pytest.mark.parametrize("expand", [False, True])
def test_advantages_per_response_or_per_token(expand, stock, rollout):
    (batch, _) = split_tensor_dict(rollout, 2)
    expected = stock._compute_loss(stock.model, batch).item()
    if expand:
        batch = {**batch, "advantages": batch["advantages"][:, None].expand_as(batch["completion_ids"])}
    assert stock._compute_loss(stock.model, batch).item() == pytest.approx(expected, rel=1e-6), (
        f"GRPOTrainer._compute_loss no longer takes advantages of shape [B] and [B, T]: {LOSS}"
    )


def test_the_loss_is_divided_by_the_trainer_itself(stock, rollout):
    assert trl.GRPOTrainer.loss_is_scaled_for_ga is True, (
        f"GRPOTrainer.loss_is_scaled_for_ga moved: {LOSS} divides by current_gradient_accumulation_steps itself"
    )
    (batch, _) = split_tensor_dict(rollout, 2)
    found = []
    kind = stock.loss_type
    for steps in (1, 4):
        stock.current_gradient_accumulation_steps, stock.loss_type = steps, "grpo"
        found.append(stock._compute_loss(stock.model, batch).item())
    stock.current_gradient_accumulation_steps, stock.loss_type = 1, kind
    assert found[1] == pytest.approx(found[0] / 4, rel=1e-5), f"TRL divides its losses otherwise: {LOSS} follows it"


def test_attributes_that_describe_the_algorithm(stock):
    """Read when the loss is computed, so that setting them after the trainer is made is enough."""
    source = inspect.getsource(trl.GRPOTrainer._compute_loss)
    for name in ("loss_type", "importance_sampling_level", "epsilon_low", "epsilon_high", "top_entropy_quantile"):
        assert hasattr(stock, name) and f"self.{name}" in source, (
            f"GRPOTrainer._compute_loss does not read self.{name}: {TRAINER}._fit_trl_to_objective sets it for metrics"
        )
    for name in (
        "args.use_bias_correction_kl",
        "_entropy_bonus_enabled",
        "use_adaptive_entropy",
        "_last_world_entropy",
        "entropy_coef",
        "aux_loss_enabled",
        "router_aux_loss_coef",
        "off_policy_mask_threshold",
        "vllm_importance_sampling_correction",
    ):
        assert re.search(rf"self\.{name}\b", source), (
            f"GRPOTrainer._compute_loss does not read self.{name}: {LOSS} does"
        )
    assert stock.num_generations_eval == stock.num_generations == 4, (
        f"GRPOTrainer.num_generations_eval is no group size any more: {ADVANTAGES} groups rewards by it"
    )
    names = parameter_names(trl.GRPOTrainer.get_high_entropy_mask)
    assert names == ["self", "entropies", "mask", "threshold"], f"get_high_entropy_mask takes {names}: {LOSS}"
    names = parameter_names(trl.GRPOTrainer.get_off_policy_mask)
    assert names == [
        "advantages",
        "per_token_logps",
        "sampling_per_token_logps",
        "mask",
        "off_policy_threshold",
    ], f"get_off_policy_mask takes {names}: {TRAINER}._weights calls it"


# ---- The training loop ----


def test_the_buffer_and_the_step(policy_path, tmp_path):
    """Two micro-batches to a rollout, twice over, two to an update: a window is two in a row of the buffer."""
    seen = []

    class Recording(trl.GRPOTrainer):
        def _prepare_inputs(self, generation_batch):
            step = self._step
            inputs = super()._prepare_inputs(generation_batch)
            seen.append((step, len(self._buffered_inputs), inputs is self._buffered_inputs[step % 2]))
            return inputs

    args = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_iterations": 2, "max_steps": 4}
    spec = {"model": policy_path, "trainer": "trl.GRPOTrainer", "args": args}
    build(spec, str(tmp_path), trainer_class=Recording).train()
    assert seen == [(step, 2, True) for step in range(8)], (
        f"GRPOTrainer's `_step` and `_buffered_inputs` go otherwise, {seen}: {TRAINER}._mean_tokens_of_window reads "
        "the micro-batches of an update from them"
    )


def test_the_gradient_norm_comes_before_the_optimizer_step(policy_path, tmp_path):
    names = parameter_names(trl.GRPOTrainer._get_grad_norm)
    assert names == ["self", "model", "grad_norm"], f"Trainer._get_grad_norm takes {names}: {TRAINER} overrides it"
    order = []

    class Recording(trl.GRPOTrainer):
        def _get_grad_norm(self, model, grad_norm=None):
            norm = super()._get_grad_norm(model, grad_norm=grad_norm)
            total = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
            order.append(("norm", float(norm) == pytest.approx(total, rel=1e-5)))
            return norm

    class Order(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            order.append(("before", all(p.grad is not None for p in model.parameters())))

        def on_optimizer_step(self, args, state, control, **kwargs):
            order.append(("after", True))

    spec = {"model": policy_path, "trainer": "trl.GRPOTrainer", "args": {"max_steps": 1}}
    build(spec, str(tmp_path), trainer_class=Recording, callbacks=[Order()]).train()
    assert order == [("norm", True), ("before", True), ("after", True)], (
        f"Trainer's optimizer step goes {order}: {GUARD} learns the norm of all gradients, clipped or not, and then "
        "drops them before the step"
    )


def test_an_optimizer_without_gradients_does_nothing():
    parameter = torch.nn.Parameter(torch.ones(2))
    for kind in (torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad):
        optimizer = kind([parameter], lr=0.1, weight_decay=0.1)
        parameter.grad = torch.ones(2)
        optimizer.step()
        before, state = parameter.detach().clone(), repr(optimizer.state_dict())
        optimizer.zero_grad(set_to_none=True)
        optimizer.step()
        assert torch.equal(parameter, before) and repr(optimizer.state_dict()) == state, (
            f"{kind.__name__} changes parameters or its state without gradients: {GUARD} skips an update that way"
        )


# ---- What PPO, online preferences and KTO stand on beside the seams ----


def test_checkpoints_are_given_the_optimizers_folder():
    names = parameter_names(trl.GRPOTrainer._save_optimizer_and_scheduler)
    assert names == ["self", "output_dir"], (
        f"Trainer._save_optimizer_and_scheduler takes {names}: {REPLAY} overrides it"
    )
    source = inspect.getsource(transformers.Trainer._save_checkpoint)
    assert "self._save_optimizer_and_scheduler(output_dir)" in source, (
        f"Trainer._save_checkpoint no longer calls _save_optimizer_and_scheduler(output_dir): {REPLAY} saves the "
        "replay there, beside the optimizer"
    )


def test_the_optimizer_is_made_once_and_its_groups_can_be_divided(policy_path, tmp_path):
    trainer = build({"model": policy_path, "trainer": "trl.GRPOTrainer"}, str(tmp_path))
    assert trainer.optimizer is None, (
        f"Trainer has an optimizer before create_optimizer: {OPTIMIZER} would not divide it"
    )
    optimizer = trainer.create_optimizer()
    held = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    assert optimizer is trainer.optimizer and held == {id(weight) for weight in trainer.model.parameters()}, (
        f"Trainer.create_optimizer no longer returns the optimizer of all weights of self.model: {OPTIMIZER} moves "
        "those of the value function to a group of their own"
    )
    assert trainer.create_optimizer() is optimizer, f"Trainer.create_optimizer makes another: {OPTIMIZER} divides one"


@pytest.mark.parametrize("has_reference", [False, True])
def test_a_reference_is_the_policy_with_its_adapter_off_or_another_in_its_place(has_reference, policy_path, tmp_path):
    """TRL scores with the reference of a policy with an adapter through the policy itself."""
    states = []

    class Recording(trl.GRPOTrainer):
        def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
            layer = next(module for module in model.modules() if isinstance(module, BaseTunerLayer))
            states.append((model is self.model, layer.disable_adapters, list(model.active_adapters)))
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)

    spec = {
        "model": policy_path,
        "trainer": "trl.GRPOTrainer",
        "lora": True,
        "args": {"beta": 0.1, "num_iterations": 2},
    }
    trainer = build(spec, str(tmp_path), trainer_class=Recording)
    if has_reference:
        trainer.model.add_adapter("ref", trainer.model.peft_config["default"])
    elif "ref" in trainer.model.peft_config:
        trainer.model.delete_adapter("ref")
    trainer.model.train()
    trainer._generate_and_score_completions(rows())
    expected = (True, False, ["ref"]) if has_reference else (True, True, ["default"])
    assert states == [(True, False, ["default"]), expected], (
        f"GRPOTrainer scores with policy and reference in the states {states}, of (the policy, disable_adapters of "
        "PEFT's layers, active_adapters of its model): trl_ext.PPOTrainer._is_reference_pass tells them apart by these"
    )


def test_the_head_can_be_put_on_again_at_another_temperature(policy_path):
    """Logits over T are what a softmax at temperature T takes."""
    names = parameter_names(add_fused_lm_head)
    assert names == ["model", "temperature", "cast_lm_head_to_fp32", "outputs"], (
        f"add_fused_lm_head takes {names}: trl_ext.trainers.scoring_temperature calls it"
    )
    model = AutoModelForCausalLM.from_pretrained(policy_path, dtype=torch.float64)
    ids = torch.arange(5, 13)[None]
    with torch.no_grad():
        logits = model(ids).logits[:, :-1]
        for temperature in (0.5, 1.0):
            add_fused_lm_head(model, temperature=temperature, outputs=("log_probs", "entropy"))
            found = model(ids, labels=ids, fused_lm_head=True).log_probs
            expected = (logits / temperature).log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
            torch.testing.assert_close(
                found, expected, msg=f"a second fused head is not that in use: {SCORING} puts one over TRL's"
            )


def test_rollouts_say_how_many_tokens_they_have(rollout):
    assert rollout["num_items_in_batch"] == rollout["completion_mask"].sum(), (
        f"num_items_in_batch of GRPOTrainer's rollouts is not the number of tokens of all processes: {TRAINER} "
        "divides by it, and trl_ext.PPOTrainer puts the number of those scored in its place"
    )


def test_rows_of_kto_are_paired_by_a_column_of_token_ids():
    source = inspect.getsource(kto_trainer)
    assert source.count('"KL_completion_ids"') > 2, (
        "KTOTrainer's datasets have no column KL_completion_ids: trl_ext.KTOTrainer._prepare_dataset truncates it "
        "beside completion_ids"
    )


# ---- Both seams at once ----


def test_the_seams_leave_stock_training_as_it_is(policy_path, tmp_path):
    """TRL's own advantages and loss moved behind its methods, without trl_ext."""

    class Seam(trl.GRPOTrainer):
        def _calculate_rewards(self, *args):
            self.kept = super()._calculate_rewards(*args)
            return self.kept

        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            groups = self.kept[:, 0].view(-1, 4)
            normalized = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
            output["advantages"] = normalized.reshape(-1)
            return output

        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            self.forward_pass = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            return self.forward_pass

        def _compute_loss(self, model, inputs):
            super()._compute_loss(model, inputs)
            log_probs, mask = self.forward_pass[0], inputs["completion_mask"]
            ratio = (log_probs - inputs["old_per_token_logps"]).exp()
            advantages = inputs["advantages"][:, None]
            losses = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            loss = ((losses * mask).sum(1) / mask.sum(1)).mean()
            return loss / self.current_gradient_accumulation_steps

    args = {"loss_type": "grpo", "beta": 0.0, "num_iterations": 2, "max_steps": 4, "learning_rate": 0.1}
    args |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    spec = {"model": policy_path, "trainer": "trl.GRPOTrainer", "args": args}
    runs = []
    for kind in (trl.GRPOTrainer, Seam):
        trainer = build(spec, str(tmp_path), trainer_class=kind)
        trainer.train()
        runs.append(result(trainer))
    difference = largest_difference(runs[1].parameters, runs[0].parameters)
    assert difference < 1e-12, f"the seams themselves change stock training, by {difference}: trl_ext stands on them"
    assert runs[1].losses == pytest.approx(runs[0].losses, rel=1e-10, abs=1e-12)


def test_the_trainer_repeats_no_two_lines_of_trl():
    """TRL's methods are called, and not copied."""

    def pairs_of_lines(text: str) -> set[tuple[str, str]]:
        lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
        return {pair for pair in zip(lines, lines[1:], strict=False) if all(map(is_code, pair))}

    def is_code(line: str) -> bool:
        # Closing brackets, imports, and the signature of what is overridden are no code of anyone's.
        return any(map(str.isalpha, line)) and not re.match(r"(import|from|def) |\w+,$", line)

    folder = Path(trl_ext.__file__).parent / "trainers"
    files = ["policy", "policy_config", "greedy", "reward_guard", "reward_functions", "update_guard", "kto", "ppo"]
    files += [
        "ppo_config",
        "ppo_rollout",
        "value_head",
        "value_model",
        "online_preference",
        "online_preference_config",
    ]
    files += ["pair_batches", "judge_rewards", "reward_version", "scoring_temperature", "positions"]
    own = {pair for name in files for pair in pairs_of_lines((folder / f"{name}.py").read_text())}
    assert len(own) > 1500
    for module in (grpo_trainer, kto_trainer, transformers.trainer):
        copied = own & pairs_of_lines(inspect.getsource(module))
        assert not copied, f"trl_ext.trainers repeats lines of {module.__name__}: {sorted(copied)[0]}"
