"""The names and behaviours of TRL and transformers, some private, that the seams of `PolicyTrainer` stand on.

When one of these fails after an upgrade, its message says what moved and what in `trl_ext` stands on it.
"""

from __future__ import annotations

import inspect

import pytest
import torch
import trl
from trl.trainer.utils import shuffle_sequence_dict, split_tensor_dict

from tests.support.rollout_once import build, prompts, thirds
from trl_ext.trainers.policy.trainer import _OF_IMAGES

pytestmark = pytest.mark.usefixtures("in_float64")

TRAINER = "trl_ext.trainers.policy.trainer.PolicyTrainer"
REWARDS = f"{TRAINER}._calculate_rewards"
ADVANTAGES = f"{TRAINER}._generate_and_score_completions"
SCORE = f"{TRAINER}.score"
LOSS = f"{TRAINER}._compute_loss"
GREEDY = "trl_ext.trainers.policy.generation"
OPTIMIZER = "trl_ext.trainers.ppo.trainer.PPOTrainer.create_optimizer"


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


# ---- Seam one: rewards and advantages ----


def test_calculate_rewards(stock):
    ids = [[5, 6, 9]] * 8
    texts = [[{"role": "assistant", "content": "x"}]] * 8
    found = stock._calculate_rewards(rows(), [row["prompt"] for row in rows()], texts, ids)
    assert found.shape == (8, 2) and found[:, 0].tolist() == pytest.approx(thirds(ids)), (
        f"GRPOTrainer._calculate_rewards returns {found} and not rewards per response and function: {REWARDS}"
    )


def test_keys_of_a_rollout(rollout):
    expected = {"prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "num_items_in_batch"}
    expected |= {"old_per_token_logps", "ref_per_token_logps"}
    assert rollout.keys() == expected, f"the keys of a rollout of GRPOTrainer: {ADVANTAGES} and {LOSS} read them"
    assert rollout["advantages"].shape == (8,), f"advantages are {rollout['advantages'].shape}: {ADVANTAGES}"
    assert rollout["num_items_in_batch"] == rollout["completion_mask"].sum(), (
        f"num_items_in_batch is no longer the rollout's tokens over all processes: {TRAINER} divides by it"
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


def test_tokenize_prompts(stock):
    found = stock._tokenize_prompts([row["prompt"] for row in prompts(2)])
    assert len(found) == 3 and [type(ids[0]) for ids in found[0]] == [int, int] and found[1] is None, (
        f"GRPOTrainer._tokenize_prompts returns {found} and not ids, images and further fields: "
        f"{TRAINER}._tokenize_prompts cuts the first, {GREEDY} hands all three on"
    )


def test_generate_single_turn(stock):
    """Lists of ids, in which a response that ended ends with an end token, and their log-probabilities."""
    assert stock.eos_token_ids == [stock.processing_class.eos_token_id], (
        f"GRPOTrainer.eos_token_ids is {stock.eos_token_ids}: {REWARDS} tells by it which responses are finished"
    )
    ids, images, fields = stock._tokenize_prompts([row["prompt"] for row in rows()])
    found = stock._generate_single_turn(ids, images, fields, 4)
    assert len(found) == 2 and len(found[0]) == 8 and isinstance(found[0][0], list), (
        f"GRPOTrainer._generate_single_turn returns {found} and not lists of ids and their log-probabilities: {GREEDY}"
    )
    responses, _ = found
    end = stock.eos_token_ids[0]
    assert any(end in response for response in responses)
    assert all(end not in response[:-1] for response in responses), f"what follows the end is kept: {REWARDS}"


# ---- Seam two: the loss ----


def test_the_forward_pass(stock, rollout):
    """Log-probabilities and entropies of the tokens, with a gradient; and what images add to the arguments."""
    takes = list(inspect.signature(trl.GRPOTrainer._get_per_token_logps_and_entropies).parameters)
    expected = ["self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy"]
    expected += ["compute_aux_loss", *_OF_IMAGES]
    assert sorted(takes) == sorted(expected), (
        f"GRPOTrainer._get_per_token_logps_and_entropies takes {takes}: {SCORE} passes {expected[1:]}"
    )
    ids, masks = ([rollout[f"{part}_{name}"] for part in ("prompt", "completion")] for name in ("ids", "mask"))
    count = rollout["completion_ids"].size(1)
    found = stock._get_per_token_logps_and_entropies(
        stock.model, torch.cat(ids, 1), torch.cat(masks, 1), count, compute_entropy=True
    )
    assert len(found) == 3, f"GRPOTrainer._get_per_token_logps_and_entropies returns {len(found)} things: {SCORE}"
    log_probs, entropies, auxiliary = found
    assert log_probs.shape == entropies.shape == rollout["completion_ids"].shape and auxiliary is None, SCORE
    assert log_probs.requires_grad, f"the forward pass has no gradient any more: {SCORE}"


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


# ---- What PPO stands on beside the seams ----


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
