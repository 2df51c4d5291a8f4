"""The gradient of an optimizer step is that of its whole batch: accumulated, distributed, ragged, sorted or not.

Runs take one step of SGD at learning rate 1 without clipping, so the change of the parameters is minus the gradient.
"""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch.nn.functional import logsigmoid

from tests.support.tiny import pairs, response_log_prob, save_tiny_model, token_ids
from tests.support.train_once import (
    build,
    largest_difference,
    load_models,
    relative_difference,
    result,
    train,
    train_under,
)
from trl_ext.losses import PreferenceObjective, PreferenceScores
from trl_ext.trainers import AOTTrainer
from trl_ext.trainers.preference.whole_batch import coupled_shares, loss_scale

pytestmark = pytest.mark.usefixtures("in_float64")

# A reference so far from the policy, and pairs such, that sorting in micro-batches of two differs from sorting all: by
# 20% of the gradient for `aot` and 64% for `aot_paired`. (Where policy and reference order pairs alike, by nothing.)
STRONG = {"reference_seed": 1, "reference_scale": 0.3, "data_seed": 6}
BETA = 0.2
AOT = {"trainer": "AOTTrainer", **STRONG}
PAIRED = {"trainer": "AOTPairedTrainer", **STRONG}
DPO = {"trainer": "DPOTrainer", **STRONG}
WHOLE = {"per_device_train_batch_size": 8}
ACCUMULATED = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
SPREAD_AND_ACCUMULATED = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
CONFIDENCE = {"weighting": ["confidence"], "weighting_kwargs": {"power": 4.0, "floor": 0.05}}

USER_LOSSES = '''
from torch.nn.functional import logsigmoid
from trl_ext import preference_loss


@preference_loss("mean_scaled_beta", batch_coupled=True)
def mean_scaled_beta(scores, *, beta: float = 0.1, rate: float = 0.3):
    """Beta grows with the mean margin of the batch, and gradients flow through that mean."""
    return -logsigmoid(beta * (1 + rate * scores.margin.mean()) * scores.margin)
'''


@pytest.fixture(scope="module")
def coupled(tmp_path_factory) -> dict[str, dict]:
    """Specifications of batch-coupled losses by name, one of them in a user's own file."""
    path = tmp_path_factory.mktemp("user") / "user_losses.py"
    path.write_text(USER_LOSSES)
    own = {"trainer": "PreferenceTrainer", **STRONG, "args": {"loss": f"{path}:mean_scaled_beta"}}
    return {"aot": AOT, "aot_paired": PAIRED, "own": own}


def with_args(spec: dict, **arguments) -> dict:
    return {**spec, "args": {"beta": BETA, **spec.get("args", {}), **arguments}}


@pytest.fixture(scope="module")
def run(tiny_model_path, tmp_path_factory):
    """A function that trains a specification in this process, each only once."""
    known = {}

    def train_once(spec: dict, **arguments):
        spec = {"model": tiny_model_path, **with_args(spec, **arguments)}
        key = json.dumps(spec, sort_keys=True)
        if key not in known:
            known[key] = result(train(spec, str(tmp_path_factory.mktemp("run"))))
        return known[key]

    return train_once


@pytest.fixture(scope="module")
def run_on_two(tiny_model_path, tmp_path_factory, coupled):
    """Runs on two processes by name, all in one launch."""
    specs = {f"{name} 2x2x2": with_args(spec, **SPREAD_AND_ACCUMULATED) for name, spec in coupled.items()}
    # 5 pairs over 2 processes: accelerate repeats the first pair, so that both have three micro-batches.
    uneven = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3}
    specs["confidence of 5"] = {**with_args(DPO, **uneven, **CONFIDENCE), "pairs": 5}
    # The second step's window has one micro-batch of two: pairs 4 and, repeated, 0.
    short = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "max_steps": 2}
    specs["short last window"] = {**with_args(DPO, **short), "pairs": 5}
    specs = {name: {"model": tiny_model_path, **spec} for name, spec in specs.items()}
    return train_under(None, specs, tmp_path_factory.mktemp("two-processes"))


@pytest.fixture(scope="module")
def exact(tiny_model_path):
    """Loss and gradient of the whole batch of 8 pairs by plain autograd in float64, for each coupled loss."""
    tokenizer, policy, reference = load_models(tiny_model_path, scale=STRONG["reference_scale"])
    rows = [token_ids(tokenizer, row) for row in pairs(8, seed=STRONG["data_seed"])]
    chosen, rejected, ref_chosen, ref_rejected = (
        torch.stack([response_log_prob(model, row[0], row[side]) for row in rows])
        for model in (policy, reference)
        for side in (1, 2)
    )
    margin = chosen - ref_chosen - rejected + ref_rejected
    differences = {
        "aot": (chosen - ref_chosen).sort().values - (rejected - ref_rejected).sort().values,
        "aot_paired": (chosen - rejected).sort().values - (ref_chosen - ref_rejected).sort().values,
        "own": (1 + 0.3 * margin.mean()) * margin,
    }
    found = {}
    for name, difference in differences.items():
        loss = -logsigmoid(BETA * difference).mean()
        policy.zero_grad()
        loss.backward(retain_graph=True)
        found[name] = loss.item(), torch.cat([p.grad.flatten() for _, p in sorted(policy.named_parameters())])
    return found


COUPLED = pytest.mark.parametrize("name", ["aot", "aot_paired", "own"])


# ---- Batch-coupled losses see the whole optimizer batch ----


@COUPLED
@pytest.mark.parametrize("split", ["1x8", "1x2x4", pytest.param("2x2x2", marks=pytest.mark.slow)])
def test_gradient_and_loss_are_those_of_the_whole_batch(name, split, run, coupled, exact, tiny_model_path, request):
    loss, gradient = exact[name]
    if split == "2x2x2":
        trained = request.getfixturevalue("run_on_two")[f"{name} 2x2x2"]
    else:
        trained = run(coupled[name], **{"1x8": WHOLE, "1x2x4": ACCUMULATED}[split])
    assert relative_difference(trained.gradient(tiny_model_path), gradient) < 1e-9
    assert trained.losses == pytest.approx([loss], rel=1e-8)


@COUPLED
def test_device_scope_depends_on_the_split(name, run, coupled, exact, tiny_model_path):
    trained = run(coupled[name], **ACCUMULATED, aot_scope="device")
    assert relative_difference(trained.gradient(tiny_model_path), exact[name][1]) > 0.01


@pytest.mark.parametrize("weighting", [CONFIDENCE, {"weighting": ["wpo"]}], ids=["confidence", "wpo"])
def test_weighted_aot_does_not_depend_on_the_split(weighting, run, tiny_model_path):
    whole = run(AOT, **WHOLE, **weighting).gradient(tiny_model_path)
    assert relative_difference(run(AOT, **ACCUMULATED, **weighting).gradient(tiny_model_path), whole) < 1e-9
    assert relative_difference(run(AOT, **WHOLE).gradient(tiny_model_path), whole) > 0.01


# ---- Pairs count equally, however they fall into micro-batches ----


@pytest.mark.parametrize("weighting", [{}, CONFIDENCE], ids=["plain", "confidence"])
@pytest.mark.parametrize("spec", [DPO, AOT], ids=["dpo", "aot"])
def test_ragged_last_window(spec, weighting, run, tiny_model_path):
    """5 pairs as 2, 2 and 1: the last pair has the weight of the others, not twice theirs."""
    spec = {**spec, "pairs": 5}
    whole = run(spec, per_device_train_batch_size=5, **weighting)
    split = run(spec, gradient_accumulation_steps=3, **weighting)
    assert relative_difference(split.gradient(tiny_model_path), whole.gradient(tiny_model_path)) < 1e-6
    assert split.losses == pytest.approx(whole.losses, rel=1e-6)


def test_confidence_weights_are_normalised_over_the_window(run, tiny_model_path):
    """`sum_i w_i loss_i / sum_i w_i` with w = max(0.05, confidence^4), from the losses of runs on one pair each."""
    alone = [run({**DPO, "rows": [index]}, per_device_train_batch_size=1) for index in range(5)]
    weights = [max(0.05, row["avg_confidence"] ** 4) for row in pairs(5, seed=STRONG["data_seed"])]
    shares = [weight / sum(weights) for weight in weights]
    trained = run({**DPO, "pairs": 5}, gradient_accumulation_steps=3, **CONFIDENCE)
    expected = sum(share * one.gradient(tiny_model_path) for share, one in zip(shares, alone, strict=True))
    assert relative_difference(trained.gradient(tiny_model_path), expected) < 1e-6
    loss = sum(share * one.losses[0] for share, one in zip(shares, alone, strict=True))
    assert trained.losses == pytest.approx([loss], rel=1e-6)


@pytest.mark.slow
def test_windows_over_two_processes(run, run_on_two, tiny_model_path):
    with_first_twice = {**DPO, "pairs": 5, "rows": [0, 1, 2, 3, 4, 0]}
    whole = run(with_first_twice, per_device_train_batch_size=6, **CONFIDENCE)
    spread = run_on_two["confidence of 5"]
    assert relative_difference(spread.gradient(tiny_model_path), whole.gradient(tiny_model_path)) < 1e-9
    steps = {"gradient_accumulation_steps": 2, "max_steps": 2}
    alone = run(with_first_twice, **steps)
    assert largest_difference(run_on_two["short last window"].parameters, alone.parameters) < 1e-6
    assert run_on_two["short last window"].losses == pytest.approx(alone.losses, rel=1e-6)


# ---- What scoring ahead costs and keeps ----


class WatchedTrainer(AOTTrainer):
    """Keeps the scores that were computed, and whether gradients were on."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.scored = []

    def _scores(self, output, inputs, reference):
        scores = super()._scores(output, inputs, reference)
        values = torch.cat([scores.chosen, scores.rejected])
        self.scored.append((torch.is_grad_enabled(), values.detach().clone()))
        return scores


@pytest.mark.parametrize(("lora", "checkpointing"), [(False, False), (True, True)])
def test_training_draws_the_dropout_masks_of_scoring_ahead(lora, checkpointing, tmp_path):
    save_tiny_model(tmp_path / "model", dropout=0.3)
    # A learning rate so small that the parameters do not change between the two steps' passes.
    arguments = {**SPREAD_AND_ACCUMULATED, "max_steps": 2, "disable_dropout": False, "learning_rate": 1e-12}
    spec = {"model": str(tmp_path / "model"), "trainer": "AOTTrainer", "lora": lora, "lora_dropout": 0.3}
    spec["args"] = {**arguments, "gradient_checkpointing": checkpointing}
    trainer = build(spec, str(tmp_path / "run"), trainer_class=WatchedTrainer)
    trainer.train()
    # Two windows of two micro-batches, each scored ahead and then trained on.
    assert [with_gradient for with_gradient, _ in trainer.scored] == [False, False, True, True] * 2
    ahead = [values for with_gradient, values in trainer.scored if not with_gradient]
    training = [values for with_gradient, values in trainer.scored if with_gradient]
    assert all(torch.equal(a, b) for a, b in zip(ahead, training, strict=True))


# ---- The pieces ----


class Ranks:
    """What `coupled_shares` sees of accelerate on the first of several ranks; `other` has the scores of the others."""

    process_index = 0

    def __init__(self, num_processes: int, other: dict[float, list[float]]):
        self.num_processes, self.other = num_processes, other

    def gather(self, tensor):
        others = self.other.get(tensor[0].item(), []) if self.num_processes > 1 else []
        return torch.cat([tensor, torch.tensor(others)])


def test_coupled_shares_by_hand():
    """Chosen log-ratios 1 and 3, rejected 2 and 0, beta 1.

    By rank 1 meets 0 and 3 meets 2, so both differences are 1: the loss is log(1 + 1/e) = 0.3132617, and its
    derivative by each difference -sigmoid(-1) / 2 = -0.1344707. In the order given, the differences are -1 and 3.
    The trainer divides by two micro-batches, or averages over two ranks, so the slopes come times 2.
    """
    objective = PreferenceObjective("aot", beta=1.0)
    zero = torch.zeros(1)
    parts = [
        PreferenceScores(torch.tensor([1.0]), torch.tensor([2.0]), zero, zero),
        PreferenceScores(torch.tensor([3.0]), torch.tensor([0.0]), zero, zero),
    ]
    for own, ranks in ((parts, Ranks(1, {})), (parts[:1], Ranks(2, {1.0: [3.0], 2.0: [0.0], 0.0: [0.0]}))):
        shares = coupled_shares(lambda scores: objective(scores).mean(), own, ranks)
        assert len(shares) == len(own)
        assert [share.loss.item() for share in shares] == pytest.approx([math.log(1 + math.exp(-1))] * len(own))
        assert [share.chosen_slope.item() for share in shares] == pytest.approx([2 * -0.1344707] * len(own))
        assert [share.rejected_slope.item() for share in shares] == pytest.approx([2 * 0.1344707] * len(own))

    chosen = torch.tensor([1.0], requires_grad=True)
    loss = shares[0].of(PreferenceScores(chosen, torch.tensor([2.0]), zero, zero))
    assert loss.item() == pytest.approx(0.3132617)
    loss.backward()
    assert chosen.grad.item() == pytest.approx(2 * -0.1344707)


def test_scale_undoes_the_division_by_micro_batches_and_ranks():
    """7 pairs on 2 ranks in 2 micro-batches: a summed loss times 4/7, divided by 2 and by 2, is a seventh of it."""
    assert loss_scale(2, 2, 7) / 2 / 2 == pytest.approx(1 / 7)
