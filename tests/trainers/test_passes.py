"""Token budgets: which rows are in which pass, and that the update and the log are those of the micro-batches."""

from __future__ import annotations

import json
import math
import random
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from accelerate import PartialState
from accelerate.data_loader import BatchSamplerShard
from accelerate.utils import operations
from datasets import Dataset
from peft import LoKrConfig, LoraConfig, get_peft_model
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.support.float64 import float64_throughout, precision
from tests.support.train_once import in_processes
from trl_ext import (
    GRPOConfig,
    GRPOTrainer,
    PPOConfig,
    PPOTrainer,
    PreferenceConfig,
    PreferenceTrainer,
    RewardConfig,
    RewardTrainer,
    load_benchmark,
)
from trl_ext.models import resolve_model_path
from trl_ext.models.packing import packed_inputs, share_prefixes
from trl_ext.models.packing.plan import plan_batch
from trl_ext.resilience.training import ResilientTraining
from trl_ext.trainers import token_budget
from trl_ext.trainers.passes import (
    balance_groups,
    balance_ranks,
    divide,
    passes_of_groups,
    passes_of_pairs,
    place_groups,
)

ALONE = SimpleNamespace(num_processes=1)


def of_ranks(*others: tuple[int, int]):
    """Accelerate on several processes, of which the others need so many passes and have so many units."""

    def gather(own):
        return torch.cat([own, torch.tensor([list(other) for other in others])])

    return SimpleNamespace(num_processes=1 + len(others), device=torch.device("cpu"), gather=gather)


@pytest.mark.parametrize("seed", range(200))
def test_every_unit_is_in_one_pass_and_passes_are_few(seed):
    draw = random.Random(seed)
    costs = [draw.randint(1, 50) for _ in range(draw.randint(1, 20))]
    budget = draw.randint(1, 200)
    passes = divide(costs, budget, 99, ALONE)
    assert [unit for one in passes for unit in one] == list(range(len(costs)))
    assert all(sum(costs[unit] for unit in one) <= budget or len(one) == 1 for one in passes)
    # There are no more than micro-batches. Another process needs more, and has enough units; a third has few.
    most, wanted = draw.randint(1, 5), len(passes) + draw.randint(0, 5)
    agreed = divide(costs, budget, 99, of_ranks((wanted, 99)))
    for one, number in ((divide(costs, budget, most, ALONE), min(most, len(passes))), (agreed, wanted)):
        assert len(one) == min(number, len(costs)) and all(one)
        assert [unit for units in one for unit in units] == list(range(len(costs)))
    assert len(divide(costs, budget, 99, of_ranks((1, 1)))) == 1


def test_the_padded_size_of_the_largest_micro_batch_as_the_budget():
    """Pairs of 6 + 2, 5 + 1, 3 + 3 and 2 + 2 tokens, one in a micro-batch: 2 x 6 tokens take 8, 6 and 6 + 4 in a pass.

    Micro-batches of two responses of at most 4 tokens to a prompt of 3 are padded to 14. Two passes of at most that
    take 3 + 4 + 1 tokens, and 3 + 1 + 1 with 3 + 2 + 2.
    """

    def up_to(*lengths: int) -> torch.Tensor:
        return (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()

    pairs = [
        {"input_ids": mask, "attention_mask": mask} for mask in (up_to(6, 2), up_to(5, 1), up_to(3, 3), up_to(2, 2))
    ]
    found = passes_of_pairs(pairs, 12, ALONE, pad_token_id=0, shares=False)
    assert [one["attention_mask"].sum().item() for one in found] == [8, 6, 10]

    def groups(rows: int, shares: bool = True) -> list[list[int]]:
        rollout = []
        for mask, own in zip(
            up_to(4, 1, 1, 1, 2, 2).split(rows), torch.tensor([0, 0, 1, 1, 2, 2]).split(rows), strict=True
        ):
            prompts = torch.ones(rows, 3)
            batch = {"prompt_ids": prompts, "prompt_mask": prompts, "completion_ids": mask, "completion_mask": mask}
            rollout.append(batch | {"group": own})
        return [one["group"].tolist() for one in passes_of_groups(rollout, 7 * rows, ALONE, shares=shares)]

    assert groups(2) == [[0, 0], [1, 1, 2, 2]]
    # Where each row encodes its prompt, of 7, 4, 4, 4, 5 and 5 tokens: in three passes, 11, 8 and 10.
    assert groups(2, shares=False) == [[0, 0], [1, 1], [2, 2]]
    # A group that is larger than a micro-batch of one row, which has 7 tokens, is divided: 7, 4, 5 and 7 tokens.
    assert groups(1) == [[0], [0], [1, 1], [2, 2]]


@pytest.mark.parametrize("ranks, micro_batches, rows", [(2, 2, 24), (2, 3, 31), (4, 1, 40), (3, 2, 11), (1, 4, 9)])
def test_ranks_get_as_many_tokens_and_a_step_keeps_its_rows(ranks, micro_batches, rows):
    """Batches of 2 rows, of which a third is long; the rest of an epoch, and a single rank's, stay as they are."""
    draw = random.Random(0)
    lengths = [draw.choice([5, 10, 400]) for _ in range(rows)]
    dataset = Dataset.from_dict({"prompt_ids": [[0]] * rows, "chosen_ids": [[0] * (length - 1) for length in lengths]})

    def of_rank(rank: int, columns: list[str]) -> list[list[int]]:
        batches = BatchSampler(SequentialSampler(range(rows)), 2, drop_last=False)
        loader = DataLoader(dataset, batch_sampler=BatchSamplerShard(batches, ranks, rank) if ranks > 1 else batches)
        return [[*batch] for batch in balance_ranks(loader, columns, micro_batches).batch_sampler]

    plain = [of_rank(rank, ["other"]) for rank in range(ranks)]
    balanced = [of_rank(rank, ["prompt_ids", "chosen_ids"]) for rank in range(ranks)]
    assert [[*map(len, one)] for one in balanced] == [[*map(len, one)] for one in plain]
    if ranks == 1:
        assert balanced == plain
    for step in range(rows // (2 * ranks * micro_batches)):
        steps = []
        for found in (plain, balanced):
            steps.append([sum(one[step * micro_batches : (step + 1) * micro_batches], []) for one in found])
        before, after = ([sum(lengths[row] for row in one) for one in step] for step in steps)
        assert sorted(sum(steps[0], [])) == sorted(sum(steps[1], []))
        assert max(after) <= max(before) and max(after) - min(after) <= max(lengths)


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("seed", range(50))
def test_groups_go_to_the_rank_with_the_fewest_tokens(seed, shares):
    """Of two to four ranks with as many rows each, where a group may begin on one rank and end on the next."""
    draw = random.Random(seed)
    ranks, size, groups = draw.randint(2, 4), draw.choice([1, 3, 4]), draw.randint(1, 12)
    prompts = [draw.randint(1, 60) for _ in range(groups)]
    longest = draw.choice([5, 300])
    rows = [(row // size, prompts[row // size], draw.randint(0, longest)) for row in range(groups * size)]
    rows = rows[: len(rows) // ranks * ranks]
    per_rank = [rows[rank * len(rows) // ranks : (rank + 1) * len(rows) // ranks] for rank in range(ranks)]

    def tokens(own: list[tuple[int, int, int]]) -> int:
        encoded = {group: prompt for group, prompt, _ in own}.values() if shares else [prompt for _, prompt, _ in own]
        return sum(encoded) + sum(response for *_, response in own)

    before, rank_of = [tokens(own) for own in per_rank], place_groups(per_rank, shares=shares)
    if rank_of is None:
        return
    assert rank_of.keys() == {group for group, *_ in rows} and {*rank_of.values()} == {*range(ranks)}
    after = [tokens([row for row in rows if rank_of[row[0]] == rank]) for rank in range(ranks)]
    largest = max(tokens([row for row in rows if row[0] == group]) for group in rank_of)
    assert max(before) > 1.05 * sum(before) / ranks and max(after) < max(before)
    assert max(after) - min(after) <= largest


def test_groups_by_hand():
    """Prompts of 10 tokens with two responses each. Rank 0 has 10 + 40 + 40 and 10 + 20 + 20, rank 1 twice 10 + 5 + 5:
    140 and 40 tokens become 90 and 90. Where each response encodes its prompt, 160 and 60 become 100 and 120.
    """
    uneven = [[(0, 10, 40), (0, 10, 40), (1, 10, 20), (1, 10, 20)], [(2, 10, 5), (2, 10, 5), (3, 10, 5), (3, 10, 5)]]
    assert place_groups(uneven, shares=True) == place_groups(uneven, shares=False) == {0: 0, 1: 1, 2: 1, 3: 1}
    # 21 and 19 tokens are 5% off the mean, and 22 and 18 are 10% off.
    assert place_groups([[(0, 1, 20)], [(1, 1, 9), (2, 1, 8)]], shares=True) is None
    assert place_groups([[(0, 1, 9), (1, 1, 11)], [(2, 1, 8), (3, 1, 8)]], shares=True) == {1: 0, 0: 1, 2: 1, 3: 0}
    # A group on both ranks stays there: whole, it would be 3 tokens for one and none for the other.
    assert place_groups([[(0, 1, 1)], [(0, 1, 2)]], shares=False) is None


def in_threads(rows: list[dict], monkeypatch, **settings) -> list[dict]:
    """`balance_groups` of processes with these rows, each of which is a thread here."""
    own, meets, parts = threading.local(), threading.Barrier(len(rows), timeout=60), [None] * len(rows)

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        parts[own.rank] = tensor
        meets.wait()
        whole = torch.cat(parts)
        meets.wait()
        return whole

    monkeypatch.setattr(operations, "gather", gather)

    def balanced(rank: int) -> dict:
        own.rank = rank
        methods = {"gather": gather, "pad_across_processes": operations.pad_across_processes}
        accelerator = SimpleNamespace(num_processes=len(rows), process_index=rank, **methods)
        return balance_groups(rows[rank], accelerator, **settings)

    with ThreadPoolExecutor(len(rows)) as threads:
        return [*threads.map(balanced, range(len(rows)))]


def test_rows_of_moved_groups_are_whole(monkeypatch):
    """Rank 0 has a group with a prompt of 2 tokens and one with 1, rank 1 two short ones with prompts of 3 and 1."""
    responses = {0: (6, 5), 1: (4, 4), 2: (1, 2), 3: (1, 1)}
    prompts = {0: 2, 1: 1, 2: 3, 3: 1}

    def rows(groups: list[int]) -> dict:
        lengths = torch.tensor([responses[group] for group in groups]).flatten()
        before = torch.tensor([prompts[group] for group in groups]).repeat_interleave(2)
        group = torch.tensor(groups).repeat_interleave(2)
        number = 10 * (1 + group) + torch.arange(2).repeat(len(groups))
        masks = {"prompt": (torch.arange(before.max()).flip(0) < before[:, None]).long()}
        masks["completion"] = (torch.arange(lengths.max()) < lengths[:, None]).long()
        # What is padding is 7.
        ids = {f"{name}_ids": number[:, None] * own + 7 * (1 - own) for name, own in masks.items()}
        found = ids | {f"{name}_mask": own for name, own in masks.items()} | {"group": group}
        found |= {"tool_mask": masks["completion"].bool(), "advantages": number.double()}
        found["old_per_token_logps"] = -(masks["completion"] * number[:, None]).double()
        return found | {"importance_sampling_ratio": number[:, None].double(), "num_items_in_batch": torch.tensor(9)}

    got = in_threads([rows([0, 1]), rows([2, 3])], monkeypatch, shares=True, pad_token_id=7)
    # 13 + 9 and 6 + 3 tokens become 13 + 3 and 9 + 6.
    for own, groups in zip(got, ([0, 3], [1, 2]), strict=True):
        expected = rows(groups)
        assert own.keys() == expected.keys()
        for name, value in own.items():
            assert value.dtype == expected[name].dtype and value.equal(expected[name]), name
    # Nothing moves if one process has a tensor that the other lacks.
    first, second = rows([0, 1]), rows([2, 3])
    second.pop("tool_mask")
    assert in_threads([first, second], monkeypatch, shares=True, pad_token_id=7) == [first, second]


def test_a_process_of_one_group_makes_as_many_passes_as_others():
    """It has one group of 4 + 3 x 2 tokens, which fits into a pass of 12, and another process needs three passes."""
    of_others = {2: torch.tensor([[3, 9]]), 4: torch.tensor([[1, 4, 2, 5]] * 3)}
    gather = lambda own: torch.cat([own, of_others[own.size(1)]])  # noqa: E731
    others = SimpleNamespace(num_processes=2, process_index=0, device=torch.device("cpu"), gather=gather)
    prompt, response = torch.ones(1, 4), torch.ones(1, 2)
    row = {"prompt_ids": prompt, "prompt_mask": prompt, "completion_ids": response, "completion_mask": response}
    batches = [row | {"group": torch.tensor([0])}] * 3
    for accelerator, rows in ((ALONE, [3]), (others, [1, 1, 1])):
        passes = passes_of_groups(batches, 12, accelerator, shares=True)
        assert [len(one["group"]) for one in passes] == rows


COMMON = {"max_steps": 3, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
COMMON |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "learning_rate": 1e-3}
PAIRS, PROMPTS = "train_prefs", "train_gen"
# One of each way in which passes are divided; tests/invariants/test_splits.py compares the others in float64.
CASES = {
    "dpo": (PreferenceTrainer, PreferenceConfig, {"loss": "dpo"}, PAIRS),
    "aot, of a device": (PreferenceTrainer, PreferenceConfig, {"loss": "aot", "aot_scope": "device"}, PAIRS),
    "aot": (PreferenceTrainer, PreferenceConfig, {"loss": "aot"}, PAIRS),
    "reward": (RewardTrainer, RewardConfig, {}, PAIRS),
    "grpo": (GRPOTrainer, GRPOConfig, {"beta": 0.1}, PROMPTS),
    "ppo": (PPOTrainer, PPOConfig, {"num_iterations": 2}, PROMPTS),
}


def trained(case: str, budget: str, folder, prepare=None, **given) -> tuple[torch.Tensor, list[dict], list[int]]:
    """What three updates change, the log, and which micro-batches are passes."""
    trainer_class, config_class, settings, split = CASES[case]
    rewards = {}
    if split == PROMPTS:
        size = 1 if case == "ppo" else 4
        settings = {**settings, "num_generations": size, "max_completion_length": 8}
        rewards["reward_funcs"] = lambda completions, **_: [float(len(str(one)) % 7) for one in completions]
    args = config_class(str(folder), tokens_per_pass=budget, **{**COMMON, **settings, **given})
    rows = load_benchmark("toy")[split].select(range(64))
    torch.manual_seed(0)
    trainer = trainer_class(resolve_model_path("toy"), args=args, train_dataset=rows, **rewards)
    step, losses = trainer.compute_loss, []

    def counted(model, inputs, **kwargs):
        losses.append("in_a_later_pass" not in inputs)
        return step(model, inputs, **kwargs)

    trainer.compute_loss = counted
    if prepare is not None:
        prepare(trainer)
    before = parameters_of(trainer)
    trainer.train()
    timed = ("runtime", "second", "step_time", "flos", "epoch")
    log = [{k: v for k, v in row.items() if not any(t in k for t in timed)} for row in trainer.state.log_history[:3]]
    return parameters_of(trainer) - before, log, losses


def parameters_of(trainer) -> torch.Tensor:
    return torch.cat([p.detach().double().flatten() for p in trainer.model.parameters()])


@pytest.mark.parametrize("case", CASES)
def test_the_update_and_the_log_are_those_of_the_micro_batches(case, tmp_path):
    """Of three optimizer steps of four micro-batches: the first checks packing, and the others take few passes."""
    expected, log, losses = trained(case, "off", tmp_path / "off")
    assert all(losses) and len(losses) == 12
    several = "450" if CASES[case][3] == PAIRS else "250" if case == "ppo" else "120"
    # PPO's groups of one response share no prompt, and these have little padding.
    for budget, fewest in ((several, 2), ("100000", 1), *([("auto", 1)] if case != "ppo" else [])):
        got, its_log, its_losses = trained(case, budget, tmp_path / budget)
        if case == "aot, of a device":
            # It compares the pairs of a micro-batch.
            assert all(its_losses) and got.equal(expected)
            continue
        assert len(its_losses) == 12 and 2 * fewest <= sum(its_losses[4:]) < 8
        assert not its_losses[4] and its_losses[7] and its_losses[11], "the passes come last"
        assert (got - expected).norm() <= 2e-3 * expected.norm() > 0
        for one, other in zip(its_log, log, strict=True):
            assert one.keys() == other.keys()
            for name, value in one.items():
                assert value == pytest.approx(other[name], rel=2e-3, abs=2e-4), name


# ---- Memory ----


class ShortOfMemory:
    """A device on which a pass of more than so many tokens does not fit: its forward, backward or reference pass, or
    the backward pass of the last of a step.

    Its backward pass fails at a layer in the middle, when the layers above have their gradients.
    """

    def __init__(self, trainer, most: float, where: str, *, once: bool = False, first_step: bool = False):
        self.most, self.where, self.once, self.failures = most, where, once, 0
        self.begins = 0 if first_step else 1
        backbone = trainer.model.base_model
        backbone.register_forward_pre_hook(self._in_forward, with_kwargs=True)
        if where == "reference":
            trainer.ref_model.base_model.register_forward_pre_hook(self._in_reference, with_kwargs=True)
        backbone.layers[len(backbone.layers) // 2].register_full_backward_pre_hook(self._in_backward)
        self.trainer, self.tokens = trainer, 0

    def fail(self, where: str) -> None:
        accelerator = self.trainer.accelerator
        # On several processes, one does not fit, and not where it exchanges gradients.
        if accelerator.num_processes > 1 and (
            accelerator.process_index == 0 or (where == "backward" and accelerator.sync_gradients)
        ):
            return
        if self.where == where and self.tokens > self.most and self.trainer.state.global_step >= self.begins:
            self.failures += 1
            self.most = math.inf if self.once else self.most
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def _in_forward(self, module, args, kwargs) -> None:
        if torch.is_grad_enabled():
            self.tokens = kwargs["input_ids"].numel()
            self.fail("forward")

    def _in_reference(self, module, args, kwargs) -> None:
        self.tokens = kwargs["input_ids"].numel()
        self.fail("reference")

    def _in_backward(self, module, gradients) -> None:
        self.fail("last" if self.where == "last" and self.trainer.accelerator.sync_gradients else "backward")


@pytest.mark.parametrize(
    ("case", "budget", "where"),
    [
        pytest.param("dpo", "100000", "backward", marks=pytest.mark.slow),
        ("dpo", "450", "backward"),
        ("dpo", "450", "last"),
        pytest.param("grpo", "120", "last", marks=pytest.mark.slow),
        pytest.param("aot", "450", "last", marks=pytest.mark.slow),
        ("aot", "100000", "forward"),
        pytest.param("aot", "100000", "backward", marks=pytest.mark.slow),
        pytest.param("aot", "450", "backward", marks=pytest.mark.slow),
        pytest.param("reward", "450", "backward", marks=pytest.mark.slow),
        pytest.param("grpo", "100000", "backward", marks=pytest.mark.slow),
        ("grpo", "120", "backward"),
        pytest.param("ppo", "100000", "forward", marks=pytest.mark.slow),
    ],
)
def test_a_pass_that_does_not_fit_is_repeated_in_smaller_ones(case, budget, where, tmp_path, caplog):
    """The update and the log stay those of the micro-batches: what has failed leaves nothing, and counts once."""
    # The score head of a reward model, and a value head, are in float32.
    exact = case not in ("reward", "ppo")
    # The last pass of a step fails once, when those before it are computed.
    found, most = [], 0 if where == "last" else 200 if CASES[case][3] == PAIRS else 60
    settings = {"prepare": lambda trainer: found.append(ShortOfMemory(trainer, most, where, once=where == "last"))}
    with precision("float64" if exact else "float32"):
        expected, log, _ = trained(case, "off", tmp_path / "off")
        got, its_log, _ = trained(case, budget, tmp_path / budget, **settings)
    assert found[0].failures and "from now on passes have at most" in caplog.text
    assert (got - expected).norm() <= (1e-9 if exact else 2e-3) * expected.norm() > 0
    for one, other in zip(its_log, log, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert value == pytest.approx(other[name], rel=1e-9 if exact else 2e-3, abs=1e-9 if exact else 2e-4), name


@pytest.mark.parametrize(
    ("case", "settings"),
    [
        ("dpo", {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1, "max_steps": 4}),
        pytest.param("grpo", {"num_iterations": 3, "max_steps": 9}, marks=pytest.mark.slow),
        pytest.param("aot", {"max_steps": 4}, marks=pytest.mark.slow),
    ],
)
def test_what_did_not_fit_is_not_tried_again(case, settings, tmp_path):
    """Where a step has one micro-batch, or passes of a rollout are those of its first update, too."""
    found, most = [], 200 if CASES[case][3] == PAIRS else 60
    with float64_throughout():
        expected, log, _ = trained(case, "off", tmp_path / "off", **settings)
        short = {"prepare": lambda trainer: found.append(ShortOfMemory(trainer, most, "backward"))}
        got, its_log, _ = trained(case, "100000", tmp_path / "100000", **short, **settings)
    # The second may be of a pass that is hardly smaller than half of the first.
    assert 1 <= found[0].failures <= 2
    assert (got - expected).norm() <= 1e-9 * expected.norm() > 0
    assert [one["loss"] for one in its_log] == pytest.approx([one["loss"] for one in log], rel=1e-9, abs=1e-9)


def test_a_budget_below_a_micro_batch(tmp_path, caplog):
    """Of the one micro-batch of a step: it is divided, and nothing fails."""
    found = []
    settings = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1, "max_steps": 4}
    with float64_throughout():
        expected, log, _ = trained("aot", "off", tmp_path / "off", **settings)
        got, its_log, _ = trained(
            "aot",
            "90",
            tmp_path / "90",
            lambda trainer: found.append(ShortOfMemory(trainer, 90, "backward")),
            **settings,
        )
    assert not found[0].failures
    assert "1 passes for 1 micro-batches by a budget of 90 tokens" in caplog.text
    assert (got - expected).norm() <= 1e-9 * expected.norm() > 0
    assert [one["loss"] for one in its_log] == pytest.approx([one["loss"] for one in log], rel=1e-9, abs=1e-9)


def write_differences(path: str) -> None:
    """In one of two processes: of the updates with passes that do not fit from those of the micro-batches."""
    torch.set_num_threads(1)
    apart = {}
    cases = [("dpo", "450", "backward"), ("aot", "100000", "forward"), ("grpo", "120", "forward")]
    cases += [("dpo", "100000", "reference"), ("dpo", "auto", "forward"), ("grpo", "auto", "forward")]
    for case, budget, where in cases:
        # In the first step, before memory decides.
        first_step = budget == "auto"
        found, sizes = [], {"dpo": (200, 110), "aot": (200, 110), "grpo": (60, 40)}
        most = sizes[case][first_step]

        def prepare(trainer):
            found.append(ShortOfMemory(trainer, most, where, first_step=first_step))  # noqa: B023
            if trainer.accelerator.is_main_process and not first_step:  # noqa: B023
                # As an examination of the trainer before its first step does.
                trainer.packing._settle()

        memory = mock.patch.object(token_budget, "free_memory", lambda device: GIB if first_step else None)  # noqa: B023
        with float64_throughout(), memory:
            given = {"precompute_ref_log_probs": False} if where == "reference" else {}
            expected, *_ = trained(case, "off", f"{path}.{case}", **given)
            got, *_ = trained(case, budget, f"{path}.{case}", prepare, **given)
        failures = PartialState().num_processes * [0]
        torch.distributed.all_gather_object(failures, found[0].failures)
        apart[f"{case}, {where}, {budget}"] = [((got - expected).norm() / expected.norm()).item(), *failures]
    if PartialState().is_main_process:
        Path(path).write_text(json.dumps(apart))


@pytest.mark.slow
def test_one_of_two_processes_repeats_its_passes(tmp_path):
    """The other waits for it where gradients are exchanged, as many times as it would without."""
    in_processes(2, "-m", __name__, str(tmp_path / "apart.json"))
    found = json.loads((tmp_path / "apart.json").read_text())
    assert len(found) == 6
    for name, (apart, other, own) in found.items():
        assert apart < 1e-9 and other == 0 < own, name


GIB = 2**30


@pytest.mark.parametrize(
    ("free", "given", "recomputes", "by_default", "expected"),
    [
        # 0.8 x 10 GiB, less 1 GiB of gradients and 2 GiB of weights in half precision: (0.8 x 9 - 2) GiB = 5.2 GiB.
        # 1 MiB a token takes 5,324 tokens, and 0.25 MiB takes 21,299.
        (10 * GIB, "auto", True, True, (5324, True)),
        (10 * GIB, "auto", True, False, (21299, False)),
        (10 * GIB, "auto", False, False, (5324, True)),
        # Not so many tokens fit as the micro-batch has, 4,000: 3.6 GiB take 3,686 and 14,745.
        (8 * GIB, "auto", True, True, (14745, False)),
        # 1.2 GiB take 4,915. With 0.4 GiB, packed passes are still as large as padded ones.
        (5 * GIB, "auto", True, True, (4915, False)),
        (4 * GIB, "auto", True, True, (4000, False)),
        (2 * GIB, "auto", True, True, (4000, False)),
        (10 * GIB, "5000", True, True, (5000, True)),
        (10 * GIB, "6000", True, True, (6000, False)),
        (10 * GIB, "6000", True, False, (6000, None)),
        (None, "auto", True, True, (4000, None)),
    ],
)
def test_memory_decides(free, given, recomputes, by_default, expected, monkeypatch):
    """Of a model of 256 Mi parameters in float32, before whose first step the budget is as large as a micro-batch."""
    weight = SimpleNamespace(numel=lambda: 2**28, element_size=lambda: 4, requires_grad=True)
    model = mock.Mock(spec=["parameters", "is_gradient_checkpointing", "gradient_checkpointing_disable"])
    model.parameters.return_value, model.is_gradient_checkpointing = [weight], recomputes
    trainer = SimpleNamespace(
        args=SimpleNamespace(recomputes_by_memory=by_default),
        accelerator=SimpleNamespace(num_processes=1, device=None, optimizer_step_was_skipped=False),
        state=SimpleNamespace(global_step=0),
        update_guard=SimpleNamespace(in_a_row=0),
        packing=SimpleNamespace(passes=""),
        is_fsdp_enabled=False,
        model=model,
    )
    monkeypatch.setattr(token_budget, "free_memory", lambda device: free)
    monkeypatch.setattr(token_budget, "activation_bytes", lambda trainer: (2 * GIB, 2**20, 2**18))
    monkeypatch.setattr(token_budget, "unwrapped", lambda model: model)
    budget = token_budget.TokenBudget(trainer, given)
    assert budget.of(4000) == (4000 if given == "auto" else int(given)) and budget.keeps is None
    # The first update was skipped.
    trainer.state.global_step = trainer.update_guard.in_a_row = 1
    assert budget.of(4000) == (4000 if given == "auto" else int(given)) and budget.keeps is None
    trainer.update_guard.in_a_row = 0
    assert (budget.of(4000), budget.keeps) == expected
    assert model.gradient_checkpointing_disable.called == (recomputes and expected[1] is True)
    # It decides once.
    monkeypatch.setattr(token_budget, "activation_bytes", lambda trainer: (0, 1, 1))
    assert (budget.of(4000), budget.keeps) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recomputes", [False, True])
def test_the_bytes_of_a_pass_are_those_that_it_allocates(dtype, recomputes):
    """By torch's profiler, on passes of 384 and 768 tokens."""
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=64, num_key_value_heads=2, **sizes)).to(dtype)
    ids = torch.ones(1, 16, dtype=torch.long)
    packing = share_prefixes(model, quiet=True)
    model(input_ids=ids, attention_mask=ids, use_cache=False)
    if recomputes:
        model.train().gradient_checkpointing_enable()
    accelerator = SimpleNamespace(autocast=nullcontext, device=torch.device("cpu"))
    trainer = SimpleNamespace(model=model, packing=packing, accelerator=accelerator)
    expected = token_budget.activation_bytes(trainer)[2 if recomputes else 1]
    assert model.is_gradient_checkpointing == recomputes
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    peaks = []
    for tokens in (384, 768):
        plan = plan_batch(torch.ones(1, tokens, dtype=torch.long), torch.ones(1, tokens, dtype=torch.long))
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            model.model(**packed_inputs(plan)).last_hidden_state.sum().backward()
        events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
        events.sort(key=lambda event: event.start_ns())
        peaks.append(max(accumulate(event.nbytes() for event in events)))
    assert 0.8 < expected / ((peaks[1] - peaks[0]) / 384) < (1.6 if recomputes else 1.1)


def test_activations_are_kept_where_memory_holds_them(tmp_path, monkeypatch, caplog):
    """Until a pass does not fit; then layers are recomputed. The update stays that of the micro-batches."""
    monkeypatch.setattr(token_budget, "free_memory", lambda device: 1024 * GIB)
    found = []

    def prepare(trainer):
        trainer.args.recomputes_by_memory = trainer.token_budget.may_keep = True
        short, step = ShortOfMemory(trainer, math.inf, "backward", once=True), trainer.training_step

        def training_step(*args, **kwargs):
            if trainer.state.global_step == 2 and not short.failures:
                assert not trainer.model.is_gradient_checkpointing
                short.most = 0
            return step(*args, **kwargs)

        trainer.training_step = training_step
        found.extend([short, trainer])

    with float64_throughout():
        settings = {"gradient_checkpointing": True}
        expected, *_ = trained("dpo", "off", tmp_path / "off", **settings)
        got, *_ = trained("dpo", "auto", tmp_path / "auto", prepare=prepare, **settings)
    assert (got - expected).norm() <= 1e-9 * expected.norm() > 0
    short, trainer = found
    assert short.failures == 1 and trainer.model.is_gradient_checkpointing
    assert "with activations kept" in caplog.text and "its activations are recomputed" in caplog.text
    # It was noted when the step began.
    assert "(sdpa attention, 1 passes for 4 micro-batches by a budget of " in trainer.packing.describe()
    assert "tokens, activations kept; differs" in trainer.packing.describe()


# ---- Recomputation ----


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"use_reentrant": False, "preserve_rng_state": False}),
        (
            {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
            {"use_reentrant": True, "preserve_rng_state": False},
        ),
        (
            {"gradient_checkpointing_kwargs": {"preserve_rng_state": True}},
            {"use_reentrant": False, "preserve_rng_state": True},
        ),
        ({"gradient_checkpointing": False}, None),
        ({"attention_dropout": 0.1}, None),
        ({"lora_dropout": 0.1}, None),
        ({"module_dropout": 0.1}, None),
    ],
)
def test_recomputation_saves_random_states_only_if_something_draws(settings, expected):
    """Of dropout that attention, LoRA or LoKr draws; the caller's arguments stay as they were."""
    config = Qwen2Config(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    config.attention_dropout = settings.get("attention_dropout", 0.0)
    model = Qwen2ForCausalLM(config)
    adapter = {"target_modules": ["q_proj"], "r": 2}
    if "lora_dropout" in settings:
        model = get_peft_model(model, LoraConfig(**adapter, lora_dropout=0.1))
    if "module_dropout" in settings:
        model = get_peft_model(model, LoKrConfig(**adapter, module_dropout=0.1))
    args = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": None}
    args = SimpleNamespace(**{name: settings.get(name, value) for name, value in args.items()})
    before = args.gradient_checkpointing_kwargs
    with ResilientTraining._recomputation(SimpleNamespace(args=args, model=model)):
        assert args.gradient_checkpointing_kwargs == expected
    assert args.gradient_checkpointing_kwargs is before


# ---- How often a training step would wait for a GPU: once for each forward pass, and for one exchange a step ----

# Counted on a CPU are the calls that would block with a CUDA device: reads of a number, searches for places, pageable
# copies. Waits that a library makes of its own accord, as for memory, are not seen.

ATEN = torch.ops.aten
# Their result has a size, or a value, that only the device knows.
READS = {ATEN._local_scalar_dense, ATEN.nonzero, ATEN.masked_select, ATEN.equal, ATEN.unique_consecutive}
READS |= {ATEN._unique2, ATEN.unique_dim}
INDEXED = {ATEN.index, ATEN.index_put, ATEN.index_put_, ATEN._index_put_impl_}
PACKAGES = ("/trl_ext/", "/trl/", "/transformers/", "/accelerate/", "/torch/optim/")


class _Mode(TorchDispatchMode):
    def __init__(self, found: Counter):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        packet = func.overloadpacket
        by_mask = packet in INDEXED and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if packet in READS or by_mask:
            self.found[_where(str(packet))] += 1
        return func(*args, **(kwargs or {}))


def _where(what: str) -> str:
    for frame in reversed(traceback.extract_stack()):
        if any(package in frame.filename for package in PACKAGES) and "/tests/" not in frame.filename:
            return f"{what} at {'/'.join(frame.filename.split('/')[-3:])}:{frame.lineno}"
    return f"{what} in the backward pass"


@contextmanager
def counting() -> Iterator[Counter]:
    """Count within the block, by operation and place."""
    found: Counter = Counter()

    def noted(name):
        original = getattr(torch.Tensor, name)

        def call(self, *args, **kwargs):
            found[_where(name)] += 1
            # The read inside is the same one.
            with mock.patch.object(mode, "found", Counter()):
                return original(self, *args, **kwargs)

        return call

    mode = _Mode(found)
    copies = {name: noted(name) for name in ("tolist", "cpu")}
    with mock.patch.multiple(torch.Tensor, **copies), mode:
        yield found


SHORT = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 3, "report_to": "none"}
SHORT |= {"disable_tqdm": True, "save_strategy": "no", "logging_steps": 100}


def counts_of_the_last_step(trainer) -> list[Counter]:
    """What each micro-batch of the last step waits for; the first steps check packing, and sample."""
    step, found = trainer.training_step, []

    def counted(*args, **kwargs):
        with counting() as points:
            loss = step(*args, **kwargs)
        found.append(points)
        return loss

    trainer.training_step = counted
    trainer.train()
    assert trainer.packing.packed_tokens
    return found[-2:]


@pytest.mark.parametrize("loss", ["dpo", "aot"])
def test_of_preferences(loss, tmp_path):
    """The policy's and the reference's pass; a batch-coupled loss scores both micro-batches ahead, in four more."""
    args = PreferenceConfig(str(tmp_path), loss=loss, precompute_ref_log_probs=False, **SHORT)
    rows = load_benchmark("toy")["train_prefs"].select(range(24))
    first, last = counts_of_the_last_step(PreferenceTrainer(resolve_model_path("toy"), args=args, train_dataset=rows))
    assert sum(first.values()) <= 2 + 4 * (loss == "aot"), first
    assert sum(last.values()) <= 2 + 1, last


def test_of_a_policy(tmp_path):
    """A micro-batch of a rollout that an earlier step has sampled."""
    args = GRPOConfig(str(tmp_path), num_generations=4, max_completion_length=8, num_iterations=2, beta=0.0, **SHORT)
    rows = load_benchmark("toy")["train_gen"].select(range(24))
    reward = lambda completions, **_: [float(len(str(one))) for one in completions]  # noqa: E731
    trainer = GRPOTrainer(resolve_model_path("toy"), reward_funcs=reward, args=args, train_dataset=rows)
    trainer.args.max_steps = 4
    first, last = counts_of_the_last_step(trainer)
    assert sum(first.values()) <= 1, first
    assert sum(last.values()) <= 1 + 1, last


if __name__ == "__main__":
    write_differences(sys.argv[1])
