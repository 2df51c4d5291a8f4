"""Dynamic sampling: which groups are kept, and the rollout made of them."""

from __future__ import annotations

import math
import zlib

import pytest
import torch
from datasets import Dataset, IterableDataset

from tests.support.rollout_once import build, prompts, train
from tests.support.train_once import largest_difference, parameters, result
from tests.support.trl_private import logged_metrics, logged_samples, score_rollout
from trl_ext.trainers.policy.resampling import fill_places, has_two_rewards

pytestmark = pytest.mark.usefixtures("in_float64")

GROUP, GROUPS, PROMPTS = 4, 3, 16
SIGNAL = (1, 4, 5, 8, 11)
ARGS = {"resample_groups": 8, "per_device_train_batch_size": GROUP * GROUPS, "num_generations": GROUP}


def lengthy(completion_ids, row_id, **_) -> list[float]:
    """The number of tokens for the prompts of `SIGNAL`, 1 for all others."""
    lengths = map(len, completion_ids)
    return [float(length) if int(row[3:]) in SIGNAL else 1.0 for length, row in zip(lengths, row_id, strict=True)]


def rollout_func(prompts, trainer) -> dict:
    """Responses, log-probabilities and masks of tool results that follow from the prompt and place in its group."""
    encode = trainer.processing_class.apply_chat_template
    found = {name: [] for name in ("prompt_ids", "completion_ids", "logprobs", "env_mask")}
    for index, prompt in enumerate(prompts):
        digits = zlib.crc32(repr((prompt, index % GROUP)).encode())
        ids = [3 + (digits >> place) % 250 for place in range(1 + digits % 7)]
        ids = [*ids, trainer.eos_token_ids[0]] if digits % 2 else ids
        found["prompt_ids"].append(
            encode(prompt, add_generation_prompt=True, tokenize=True, return_dict=True)["input_ids"]
        )
        found["completion_ids"].append(ids)
        found["logprobs"].append([-token / 100 for token in ids])
        found["env_mask"].append([int(token % 5 > 0) for token in ids])
    return found


def built(policy_path, folder, reward=lengthy, args=(), **arguments):
    spec = {"model": policy_path, "perturb": 1, "prompts": PROMPTS, "args": {**ARGS, **dict(args)}}
    trainer = build(spec, str(folder), reward_funcs=reward, **arguments)
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def rollout(trainer, indices) -> dict:
    rows = prompts(PROMPTS)
    return score_rollout(trainer, [dict(rows[index]) for index in indices for _ in range(GROUP)])


def logged(trainer) -> dict[str, float]:
    metrics = logged_metrics(trainer).items()
    return {name.removeprefix("resampling/"): values[-1] for name, values in metrics if name.startswith("resampling/")}


# ---- Which groups are kept ----


def test_the_first_groups_with_a_signal_are_kept():
    """The stream of the paper's rule: of six groups the second, fourth and fifth have a signal."""
    stream = [[1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]]
    signals = [has_two_rewards(torch.tensor(group)) for group in stream]
    assert signals == [False, True, False, True, True, False]
    # A response without a reward is none.
    for group, signal in (([math.nan] * 2, False), ([1, math.nan, 1], False), ([1, math.nan, 0], True)):
        assert has_two_rewards(torch.tensor(group)) is signal
    # Rollouts of two: a second round fills the first place, and what a third would have is not needed.
    assert fill_places([signals[:2], signals[2:4]]) == [(1, 1), (0, 1)]
    # Rollouts of three: two places are filled in order.
    assert fill_places([signals[:3], signals[3:]]) == [(1, 0), (0, 1), (1, 1)]
    # Too few: the last place keeps its group; too many: the last group is not used.
    assert fill_places([[False] * 3, [False, True, False], [True, False, False]]) == [(1, 1), (2, 0), (0, 2)]
    assert fill_places([[True, False], [True, True]]) == [(0, 0), (1, 0)]


# ---- The rollout ----


def test_the_rollout_is_that_of_the_kept_prompts(policy_path, tmp_path):
    """Every tensor equals that of a rollout of the kept prompts alone, log-probabilities of three models included."""
    seen, settings = [], {"beta": 0.1, "num_iterations": 2}

    def reward(prompts, completion_ids, row_id, bonus, **_):
        rows = {row["row_id"]: row for row in globals()["prompts"](PROMPTS)}
        assert all(rows[row]["prompt"] == prompt for row, prompt in zip(row_id, prompts, strict=True))
        assert [rows[row]["bonus"] for row in row_id] == bonus
        seen.append([int(row[3:]) for row in row_id[::GROUP]])
        assert row_id == [f"row{index}" for index in seen[-1] for _ in range(GROUP)]
        return lengthy(completion_ids, row_id)

    trainer = built(policy_path, tmp_path, reward, settings, rollout_func=rollout_func)
    output = rollout(trainer, [0, 1, 2])
    # No prompt is drawn twice, before the data has no other.
    drawn = [index for turn in seen for index in turn]
    assert seen[0] == [0, 1, 2] and len(seen) > 1 and len(set(drawn)) == len(drawn)
    further = [index for turn in seen[1:] for index in turn if index in SIGNAL]
    kept = [further[0], 1, further[1]]
    expected = {"rounds": len(seen) - 1, "prompts": len(drawn), "responses": GROUP * len(drawn), "dead": 0}
    assert logged(trainer) == {**expected, "replaced": pytest.approx(2 / 3)}
    tokens = trainer.state.num_input_tokens_seen

    plain = built(policy_path, tmp_path, args={**settings, "resample_groups": 0}, rollout_func=rollout_func)
    expected = rollout(plain, kept)
    # Nothing reads TRL's count of tokens.
    assert (
        output.keys()
        == expected.keys() - {"num_items_in_batch"}
        >= {"tool_mask", "sampling_per_token_logps", "ref_per_token_logps"}
    )
    assert tokens > plain.state.num_input_tokens_seen
    of_responses = {"advantages", "bad_reward", "group"}
    assert all(output[name].equal(expected[name]) for name in of_responses)
    for name in output.keys() - of_responses:
        mask = "prompt_mask" if name.startswith("prompt") else "completion_mask"
        assert output[name].shape == output[mask].shape
        for row in range(GROUP * GROUPS):
            own, other = (batch[name][row][batch[mask][row].bool()] for batch in (output, expected))
            torch.testing.assert_close(own, other, rtol=0, atol=1e-12)
    assert output["completion_ids"][~output["completion_mask"].bool()].eq(trainer._tokenizer.pad_token_id).all()
    # Prompts end, and responses begin, where they meet.
    assert output["prompt_mask"][:, -1].all() and output["completion_mask"][:, 0].all()
    assert trainer.rewards.by_function.equal(plain.rewards.by_function)
    assert trainer.rewards.finished.equal(plain.rewards.finished)
    for table in ("prompt", "completion", "advantages"):
        assert list(logged_samples(trainer)[table]) == list(logged_samples(plain)[table])
    assert list(logged_samples(trainer)["rewards"]["reward"]) == list(logged_samples(plain)["rewards"]["lengthy"])


def test_rounds_end_where_they_may(policy_path, tmp_path):
    """No group ever has a signal: the first rollout stays as it is."""
    held_out = Dataset.from_list(prompts(4))
    reward = lambda prompts, **_: [0.5] * len(prompts)  # noqa: E731
    trainer = built(policy_path, tmp_path, reward, {"resample_groups": 2}, eval_dataset=held_out)
    trainer.evaluate()
    assert not logged(trainer), "an evaluation takes no further round"
    trainer.model.train()
    output = rollout(trainer, [0, 1, 2])
    assert logged(trainer) == {"rounds": 2, "prompts": 9, "responses": 36, "replaced": 0, "dead": 1}
    assert trainer.sampled_responses == 36
    assert not output["advantages"].any()
    assert [prompt[0]["content"] for prompt in logged_samples(trainer)["prompt"]][::GROUP] == [
        row["prompt"][0]["content"] for row in prompts(3)
    ]


def test_a_rollout_with_enough_signal_takes_no_further_round(policy_path, tmp_path):
    """Nothing then differs from a run without the setting."""
    args = {"max_steps": 2, "learning_rate": 0.1, "per_device_train_batch_size": 8}
    spec = {"model": policy_path, "fixed": True, "args": args}
    runs = [
        train({**spec, "args": {**args, "resample_groups": rounds}}, str(tmp_path / str(rounds))) for rounds in (0, 3)
    ]
    assert largest_difference(*map(parameters, runs)) == 0.0
    logs = [result(run).logs for run in runs]
    assert all(entry.pop("resampling/rounds") == 0 for entry in logs[1])
    kept = [[{k: v for k, v in e.items() if "resampling" not in k and "time" not in k} for e in log] for log in logs]
    assert kept[0] == kept[1]


# ---- What a signal is ----


def test_penalties_of_length_are_no_signal(policy_path, tmp_path):
    """Wrong responses of different lengths differ in their rewards after penalties only."""
    wrong = lambda completions, **_: [0.0] * len(completions)  # noqa: E731
    for args in ({"missing_eos_penalty": 1.0}, {"overlong_share": 0.75}):
        trainer = built(policy_path, tmp_path, wrong, {**args, "resample_groups": 1}, rollout_func=rollout_func)
        rollout(trainer, [0, 1, 2])
        assert logged(trainer)["dead"] == 1
        assert logged_metrics(trainer)["shaped_reward"][-1] < 0


def test_what_resampling_cannot_use_is_refused(policy_path, tmp_path):
    stream = IterableDataset.from_generator(lambda: iter(prompts(PROMPTS)))
    images = Dataset.from_list([{**row, "images": []} for row in prompts(PROMPTS)])
    for given in ({"train_dataset": stream}, {"train_dataset": images}, {"environment_factory": object}):
        with pytest.raises(ValueError, match="resample_groups draws prompts from the training data by their index"):
            built(policy_path, tmp_path, **given)
