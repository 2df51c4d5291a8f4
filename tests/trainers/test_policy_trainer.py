"""`PolicyTrainer` against TRL's own trainers, and its rollouts: reward functions and models, and the rows they get."""

from __future__ import annotations

import asyncio
import math
import statistics
from pathlib import Path

import pandas
import pytest
import torch
import trl
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from tests.support.reward_adapters import load_adapter, plain_scores, save_adapter, save_full_model, turns
from tests.support.rollout_once import DEFAULTS, build, prompts, thirds, train
from tests.support.train_once import entries, relative_difference, result
from tests.support.trl_private import logged_samples, rollout_batches
from trl_ext.resilience.reward_guard import RewardError, RewardGuard
from trl_ext.rewards import RewardEnsemble, RewardModel
from trl_ext.trainers.policy.reward_functions import reward_columns

pytestmark = pytest.mark.usefixtures("in_float64")

# ---- Equality with stock ----

# TRL's conventions, which an algorithm's row can be overridden with.
STOCK = {"std_ddof": 1, "advantage_eps": 1e-4}
KL = {"beta": 0.05, "kl_ratio_correction": True}
# With the random numbers of stock trainers, whose responses transformers samples.
SAME_SAMPLES = {"keep_groups": "off", "fast_rollouts": "off"}
# Each rollout serves four updates: two of its halves, twice. At epsilon 0.001 most tokens are clipped from the second.
OFF_POLICY = {
    "per_device_train_batch_size": 4,
    "steps_per_generation": 2,
    "num_iterations": 2,
    "max_steps": 8,
    "learning_rate": 0.1,
    "epsilon": 1e-3,
}
# The same with both halves in one update, so that TRL's rescaled token count is that of the update.
IN_ONE_UPDATE = {"gradient_accumulation_steps": 2, "max_steps": 4}
ALIGNED = {**OFF_POLICY, **IN_ONE_UPDATE}
PLAIN_GRPO = {"loss_type": "grpo", "beta": 0.0}
GRPO_WITH_KL = {"loss_type": "grpo", "beta": 0.05}
# Off-policy by the learning rate alone.
UNCLIPPED = {name: value for name, value in OFF_POLICY.items() if name != "epsilon"}
BY_SEQUENCE = {"importance_sampling_level": "sequence"}

# name -> (settings of both, of ours, of TRL's, further keys of the specification)
EQUAL = {
    "grpo": (OFF_POLICY, {**STOCK, **KL}, GRPO_WITH_KL, {}),
    "grpo, plain kl": (OFF_POLICY, {**STOCK, "beta": 0.05}, {**GRPO_WITH_KL, "use_bias_correction_kl": False}, {}),
    "dr_grpo": (
        OFF_POLICY, {"algorithm": "dr_grpo"}, {"loss_type": "dr_grpo", "scale_rewards": "none", "beta": 0.0}, {},
    ),
    "gspo": (
        {**OFF_POLICY, "epsilon": 1e-4, "epsilon_high": 2e-4},
        {"algorithm": "gspo", **STOCK, **KL}, {**GRPO_WITH_KL, **BY_SEQUENCE}, {},
    ),
    "dapo": ({**ALIGNED, "epsilon_high": 2e-3}, {"algorithm": "dapo", **STOCK}, {"beta": 0.0}, {}),
    # Said to both in TRL's words.
    "dapo, kl, by TRL's names": (
        {**ALIGNED, "epsilon_high": 2e-3, "delta": 1.003, "loss_type": "dapo", "scale_rewards": "batch", "beta": 0.05}
        | {"use_bias_correction_kl": True},
        {}, {}, {},
    ),
    "luspo": (
        {**OFF_POLICY, "epsilon": 1e-4, "loss_type": "luspo", **BY_SEQUENCE, "scale_rewards": "none", "beta": 0.0},
        {}, {}, {},
    ),
    # With a gate so narrow that it shows.
    "sapo": (
        {**UNCLIPPED, "loss_type": "sapo", "beta": 0.0, "scale_rewards": "group"},
        {"algorithm_kwargs": {"temperature_pos": 20.0, "temperature_neg": 30.0}},
        {"sapo_temperature_pos": 20.0, "sapo_temperature_neg": 30.0}, {},
    ),
    # Padded: of ratios that are 1 up to rounding, a cap at 1 counts those that rounding puts above.
    "cispo": (
        {**UNCLIPPED, **IN_ONE_UPDATE, "loss_type": "cispo", "epsilon_high": 1.0, "scale_rewards": "group"}
        | {"beta": 0.0},
        {"packing": "off"}, {}, {},
    ),
    "grpo, adapter": (OFF_POLICY, {**STOCK, **KL}, GRPO_WITH_KL, {"lora": True}),
    "top entropy": ({**OFF_POLICY, "top_entropy_quantile": 0.4}, {**STOCK, **KL}, GRPO_WITH_KL, {}),
    "reference follows": (
        {**OFF_POLICY, "sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5},
        {**STOCK, **KL}, GRPO_WITH_KL, {},
    ),
    "two rewards": (
        {**OFF_POLICY, "reward_weights": [1.0, 0.3], "temperature": 0.7, "learning_rate": 0.02},
        {**STOCK, "beta": 0.0}, PLAIN_GRPO, {"rewards": ["thirds", "evens"]},
    ),
}  # fmt: skip
EQUAL |= {
    name: ({**OFF_POLICY, **options}, {**STOCK, "beta": 0.0}, PLAIN_GRPO, {})
    for name, options in {
        "entropy bonus": {"entropy_coef": 0.1},
        "entropy bonus on top entropy": {"top_entropy_quantile": 0.4, "entropy_coef": 0.1},
        "truncated masked": {"mask_truncated_completions": True, "learning_rate": 0.02},
        "off-policy mask": {"off_policy_mask_threshold": 0.01},
    }.items()
}


# What `PolicyTrainer` logs beside TRL's metrics.
OF_OUR_OWN = {f"advantages/{name}" for name in ("mean", "std", "min", "max")}
OF_OUR_OWN |= {"reward_min", "reward_max", "unscorable", "distinct_2", "collapsed"}
OF_OUR_OWN |= {"log_ratio/clamped", "skipped_updates"}


def update(run, policy_path: str):
    """How far training moved the parameters; an adapter's own values."""
    initial = load_file(Path(policy_path) / "model.safetensors")
    return torch.cat([(p - initial.get(n, 0)).flatten() for n, p in sorted(run.parameters.items())]).double()


@pytest.mark.parametrize("name", EQUAL)
def test_equals_stock(name, policy_path, tmp_path):
    """Same seed, same rollouts, same updates: TRL's own objective, selected by name, and our metrics hold TRL's."""
    both, own, stock, further = EQUAL[name]
    spec = {"model": policy_path, "perturb": 1, **further}
    ours = result(train({**spec, "args": {**both, **own, **SAME_SAMPLES}}, str(tmp_path / "ours")))
    expected = result(
        train({**spec, "trainer": "trl.GRPOTrainer", "args": {**both, **stock}}, str(tmp_path / "stock"))
    )
    assert relative_difference(update(ours, policy_path), update(expected, policy_path)) < 1e-9
    assert ours.losses == pytest.approx(expected.losses, rel=1e-8, abs=1e-9)
    corrected = own.get("kl_ratio_correction") or both.get("use_bias_correction_kl")
    averaged = set()
    if both.get("gradient_accumulation_steps", 1) > 1:
        # Over a step's tokens here, and means of its micro-batches' means with TRL.
        averaged = {"kl", "entropy", *(key for key in expected.logs[0] if key.startswith(("clip_ratio", "cispo")))}
    for own_entry, entry in zip(ours.logs, expected.logs, strict=True):
        assert own_entry.keys() - entry.keys() <= OF_OUR_OWN
        for key in entry.keys() - {"step_time"} - ({"kl"} if corrected else set()) - averaged:
            # None where a mean has nothing to be of.
            expected_value = None if entry[key] is None else pytest.approx(entry[key], rel=1e-8, abs=1e-9)
            assert own_entry[key] == expected_value, key
    clipped = "cispo_clip_ratio" if "cispo" in name else "clip_ratio/region_mean"
    if name != "sapo":
        assert max(entry[clipped] for entry in ours.logs) > 0.05, "no token was clipped: the comparison shows little"
    assert 0 < ours.logs[0]["completions/clipped_ratio"] < 1, "all responses end alike"


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_rloo_equals_the_stock_rloo_trainer(beta, policy_path, tmp_path):
    """On-policy, TRL's product ratio is 1 and its gradient that of the log-probability: `sum` without a ratio."""
    spec = {"model": policy_path, "perturb": 1, "args": {"max_steps": 3, "learning_rate": 0.1, "beta": beta}}
    own = {"trainer": "RLOOTrainer", "args": {**spec["args"], "fast_rollouts": "off"}}
    ours = result(train({**spec, **own}, str(tmp_path / "ours")))
    reference = build({**spec, "trainer": "trl.GRPOTrainer"}, str(tmp_path / "unused"))
    trainer = trl.RLOOTrainer(
        reference.model,
        [thirds],
        args=trl.RLOOConfig(**{**DEFAULTS, **spec["args"]}, output_dir=str(tmp_path / "stock")),
        train_dataset=reference.train_dataset,
        processing_class=reference.processing_class,
    )
    trainer.train()
    expected = result(trainer)
    assert relative_difference(update(ours, policy_path), update(expected, policy_path)) < 1e-9
    if beta:
        assert [entry["shaped_reward"] for entry in ours.logs] != [entry["reward"] for entry in ours.logs]


# ---- Reward functions ----


def test_a_function_gets_the_rows_and_which_responses_ended(policy_path, tmp_path):
    """Rows 0 and 1, four times each; `finished` where the last id is the end of the turn."""
    calls = []

    def reward(**arguments):
        calls.append(arguments)
        return thirds(arguments["completion_ids"])

    trainer = train({"model": policy_path}, str(tmp_path), reward_funcs=reward)
    (call,) = calls
    assert call["row_id"] == ["row0"] * 4 + ["row1"] * 4
    assert call["bonus"] == [0.0] * 4 + [1 / 8] * 4
    assert call["prompts"] == [row["prompt"] for row in prompts(2) for _ in range(4)]
    end = trainer.processing_class.eos_token_id
    assert call["finished"] == [ids[-1] == end for ids in call["completion_ids"]]
    assert set(call["finished"]) == {True, False}
    texts = trainer.processing_class.batch_decode(call["completion_ids"], skip_special_tokens=True)
    assert call["completions"] == [[{"role": "assistant", "content": text}] for text in texts]


def test_none_is_unscorable(policy_path, tmp_path):
    """Responses with None: advantage 0, and the mean and deviation of the others; all None is as good as all equal."""

    def sometimes(completion_ids, row_id, **_):
        return [
            None if row == "row1" or index == 2 else reward
            for index, (row, reward) in enumerate(zip(row_id, thirds(completion_ids), strict=True))
        ]

    trainer = train({"model": policy_path, "args": {"beta": 0.0}}, str(tmp_path), reward_funcs=[sometimes])
    rewards = trainer.rewards.by_function[:, 0].tolist()
    known = [reward for reward in rewards if not math.isnan(reward)]
    assert len(known) == 3
    mean, deviation = statistics.fmean(known), statistics.pstdev(known)
    expected = [0.0 if math.isnan(r) else (r - mean) / (deviation + 1e-6) for r in rewards]
    assert list(logged_samples(trainer)["advantages"]) == pytest.approx(expected, rel=1e-4, abs=1e-5)
    (entry,) = entries(trainer)
    assert entry["unscorable"] == 5 / 8
    assert entry["reward"] == pytest.approx(mean, rel=1e-5)
    assert (entry["reward_min"], entry["reward_max"]) == pytest.approx((min(known), max(known)), rel=1e-6)
    assert entry["skipped_updates"] == 0


def test_a_function_without_a_reward_leaves_the_others(policy_path, tmp_path):
    """2 thirds + 0.5 where the second function gives 1 and not None: weights 2 and 0.5."""

    def one_for_the_first_row(row_id, **_):
        return [1.0 if row == "row0" else None for row in row_id]

    seen = []

    def recording(completion_ids, **_):
        seen.extend(thirds(completion_ids))
        return thirds(completion_ids)

    args = {"advantage": "group_centered", "reward_weights": [2.0, 0.5], "beta": 0.0}
    functions = [recording, one_for_the_first_row]
    trainer = train({"model": policy_path, "args": args}, str(tmp_path), reward_funcs=functions)
    (entry,) = entries(trainer)
    assert entry["reward"] == pytest.approx(statistics.fmean(2 * r for r in seen) + 0.25, rel=1e-5)
    assert entry["unscorable"] == 0
    expected = [2 * (r - statistics.fmean(seen[i : i + 4])) for i in (0, 4) for r in seen[i : i + 4]]
    assert list(logged_samples(trainer)["advantages"]) == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("returned", [None, ["good"] * 8, [[1.0]] * 8, [1.0] * 7, [float("nan")] * 9], ids=repr)
def test_what_a_function_must_return(returned):
    """One number or None for each response; whatever else is refused with the function's name."""

    def judge(**_):
        return returned

    with pytest.raises(RewardError, match="'judge' must return one number or None for each of 8 responses"):
        RewardGuard("skip").wrap(judge)(prompts=["a"] * 8)


def test_reports_are_of_the_sampled_responses(policy_path, tmp_path):
    """A greedy baseline is scored as well, and must add nothing to the table and the metrics of the next rollout."""
    called = []

    def judge(completion_ids, log_extra, log_metric, **_):
        lengths = [len(ids) for ids in completion_ids]
        called.append(lengths)
        log_extra("tokens", lengths)
        log_metric("mean_tokens", statistics.fmean(lengths))
        return thirds(completion_ids)

    args = {"algorithm": "remax", "log_completions": True, "beta": 0.0, "max_steps": 2}
    trainer = train({"model": policy_path, "args": args}, str(tmp_path), reward_funcs=[judge])
    assert [len(lengths) for lengths in called] == [8, 2, 8, 2]
    table = pandas.read_parquet(tmp_path / "completions" / "completions_00002.parquet")
    assert table["tokens"].tolist() == called[2]
    assert table["judge"].tolist() == pytest.approx(logged_samples(trainer)["rewards"]["judge"])
    batch = rollout_batches(trainer)[0]
    assert sorted(table["advantage"]) == pytest.approx(sorted(batch["advantages"].tolist()))
    means = [statistics.fmean(lengths) for lengths in called]
    assert [entry["mean_tokens"] for entry in entries(trainer)] == pytest.approx([means[0], means[2]])
    assert means[1] != means[2], "the comparison shows little"
    baseline = statistics.fmean(table["judge"]) - statistics.fmean(table["advantage"])
    assert entries(trainer)[1]["greedy/reward"] == pytest.approx(baseline, abs=1e-6)


@pytest.mark.parametrize("args", [{"missing_eos_penalty": 2.0}, {"overlong_share": 0.5}], ids=str)
def test_penalties_of_length(args, policy_path, tmp_path):
    """Off the reward of every truncated response, or of every token beyond 4 of 8 a quarter, before advantages;
    `reward` itself is without it."""
    # A seed with responses of 6 and 7 tokens.
    args = {**args, "advantage": "group_centered", "beta": 0.0, "seed": 1}
    trainer = train({"model": policy_path, "args": args}, str(tmp_path))
    rewards, finished = trainer.rewards.by_function, trainer.rewards.finished.tolist()
    penalties = [0.0 if ended else 2.0 for ended in finished]
    if "overlong_share" in args:
        penalties = [max(length - 4, 0) / 4 for length in trainer.rewards.lengths.tolist()]
    shaped = [r - penalty for r, penalty in zip(rewards[:, 0].tolist(), penalties, strict=True)]
    (entry,) = entries(trainer)
    assert 0 < sum(finished) < 8
    assert entry["reward"] == pytest.approx(statistics.fmean(rewards[:, 0].tolist()), rel=1e-5)
    assert entry["shaped_reward"] == pytest.approx(statistics.fmean(shaped), rel=1e-5)
    expected = [r - statistics.fmean(shaped[i : i + 4]) for i in (0, 4) for r in shaped[i : i + 4]]
    assert list(logged_samples(trainer)["advantages"]) == pytest.approx(expected, rel=1e-4, abs=1e-5)


# ---- Reward models ----


def scores_by_hand(trainer, model) -> list[float]:
    """Scores of the latest rollout row by row, from the logged prompts and texts."""
    logs, finished = logged_samples(trainer), trainer.rewards.finished.tolist()
    sequences = [
        turns(trainer.processing_class, [prompt], [message["content"]], finished=ended)[0]
        for prompt, (message,), ended in zip(logs["prompt"], logs["completion"], finished, strict=True)
    ]
    return plain_scores(model, sequences).tolist()


def test_reward_models_and_folders_give_their_true_scores(policy_path, tmp_path):
    """An adapter's folder as text, a full model, and an ensemble of both, against one forward pass per response.

    transformers 5.17 leaves the head of a folder with an adapter random where TRL would load it. Only printable ASCII
    is sampled, the ids 3 to 96: bytes that are no text would come back from text as other bytes, and more of them.
    """
    args = {"generation_kwargs": {"suppress_tokens": [0, 1, *range(97, 259)]}, "max_completion_length": 5}
    adapter = save_adapter(policy_path, tmp_path / "judge")
    full = save_full_model(policy_path, tmp_path / "full")
    ensemble = RewardEnsemble([RewardModel(adapter), RewardModel(full)], aggregate="min")
    functions = [adapter, RewardModel(full), ensemble]
    trainer = train({"model": policy_path, "args": args}, str(tmp_path / "run"), reward_funcs=functions)
    assert set(trainer.rewards.finished.tolist()) == {True, False}
    own = AutoModelForSequenceClassification.from_pretrained(full, dtype=torch.float32)
    expected = [scores_by_hand(trainer, load_adapter(policy_path, adapter)), scores_by_hand(trainer, own)]
    expected.append([min(pair) for pair in zip(*expected, strict=True)])
    rewards = trainer.rewards.by_function
    for column, scores in enumerate(expected):
        assert rewards[:, column].tolist() == pytest.approx(scores, rel=1e-4, abs=1e-5)
    (entry,) = entries(trainer)
    for name, column in (("judge", 0), ("full", 1), ("ensemble", 2)):
        assert entry[f"rewards/{name}/mean"] == pytest.approx(rewards[:, column].mean().item(), rel=1e-4, abs=1e-6)


def test_reward_columns_outside_of_a_rollout(policy_path, tmp_path):
    """Functions by name, an ensemble's members beside it, an async function, and None where there is no reward."""

    def length(completions, finished, bonus, **_):
        return [
            len(c[0]["content"]) + b if ended else None
            for c, b, ended in zip(completions, bonus, finished, strict=True)
        ]

    async def later(completion_ids, **_):
        return [float(len(ids)) for ids in completion_ids]

    def double(completions, **_):
        return [2.0 * len(c[0]["content"]) for c in completions]

    def flat(completions, **_):
        return [3.0] * len(completions)

    ensemble = RewardEnsemble([double, flat], aggregate="min")
    trainer = build({"model": policy_path}, str(tmp_path), reward_funcs=[length, later, ensemble])
    # Other token ids than the texts would be read as: bytes that are no text come back as several.
    columns = reward_columns(trainer, prompts(2), ["a", "bcd"], [True, False], [[7, 2], [8, 9, 200, 201, 202]])
    assert columns == {
        "length": [1.0, None],
        "later": [2.0, 5.0],
        "ensemble": [2.0, 3.0],
        "double": [2.0, 6.0],
        "flat": [3.0, 3.0],
    }

    async def cell():
        """In a notebook, whose event loop is running: async functions are awaited beside it."""
        return reward_columns(trainer, prompts(2), ["a", "bcd"], [True, False], [[7, 2], [8, 9, 200, 201, 202]])

    assert asyncio.run(cell()) == columns


# ---- Rollouts ----


def test_long_prompts_lose_their_beginning(policy_path, tmp_path, caplog):
    """The last 12 tokens, with the template's start of the answer at their end, and a line; rewards see the whole."""
    seen = []

    def reward(prompts, completion_ids, **_):
        seen.extend(prompts)
        return [float(len(ids)) for ids in completion_ids]

    trainer = train({"model": policy_path, "args": {"max_prompt_tokens": 12}}, str(tmp_path), reward_funcs=reward)
    batch = rollout_batches(trainer)[0]
    found = {
        tuple(ids[mask.bool()].tolist()) for ids, mask in zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)
    }
    rows = [row["prompt"] for row in prompts(2)]
    encode = trainer.processing_class.apply_chat_template
    whole = [encode(row, add_generation_prompt=True, tokenize=True, return_dict=True)["input_ids"] for row in rows]
    assert all(len(ids) > 12 for ids in whole)
    assert found == {tuple(ids[-12:]) for ids in whole}
    assert seen[0] == rows[0] and seen[-1] == rows[1]
    assert "tokens loses its beginning, with any system message: max_prompt_tokens is 12" in caplog.text
