"""Credit per step in a trainer: where steps end, and the update against plain arithmetic in float64."""

from __future__ import annotations

import json
import math
import zlib

import pytest
import torch

from tests.support.rollout_once import build, by_step, prompts, train, train_in_processes
from tests.support.tiny import build_tokenizer
from tests.support.train_once import largest_difference, parameters, result
from trl_ext.advantages import reward_decoupled
from trl_ext.resilience.reward_guard import RewardError
from trl_ext.trainers.policy.reward_functions import reward_columns
from trl_ext.trainers.policy.step_credit import split_by_text, split_by_turns

TOKENIZER = build_tokenizer()
END = TOKENIZER.eos_token_id
(NEWLINE,) = TOKENIZER("\n")["input_ids"]


# ---- Where steps end ----


def decode(ids):
    return TOKENIZER.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    "text, separator, texts, ends",
    [
        ("ab\ncd", "\n", ["ab", "cd"], [3, 5]),
        # The last step goes on to the end of the response; blank pieces belong to the step that follows.
        ("ab\n", "\n", ["ab"], [3]),
        ("\nab\n\n \ncd\n\n", "\n", ["ab", "cd"], [4, 11]),
        ("", "\n", [""], [0]),
        (" \n\n", "\n", [" "], [3]),
        ("ab\n\ncd\nef", "\n\n", ["ab", "cd\nef"], [4, 9]),
        # Letters of two to four bytes, and a separator of three.
        ("é\n🙂→\nü", "\n", ["é", "🙂→", "ü"], [3, 11, 13]),
        ("é→🙂→ü", "→", ["é", "🙂", "ü"], [5, 12, 14]),
    ],
)
def test_steps_by_text(text, separator, texts, ends):
    assert split_by_text(TOKENIZER(text)["input_ids"], decode, separator) == (texts, ends)


def test_a_token_that_completes_a_separator_ends_the_step():
    pieces = ["a", ".\n\n", "b\nc", "\nd\n", "e"]
    texts, ends = split_by_text(list(range(5)), lambda ids: "".join(pieces[token] for token in ids), "\n")
    assert texts == ["a.", "b", "c", "d", "e"]
    # Of "a.", "b", "c" and "d": token 2 ends b with a line break that has c behind it.
    assert ends == [2, 3, 4, 4, 5]


@pytest.mark.parametrize(
    "chosen, texts, ends",
    [
        ([1] * 6, ["abcdef"], [6]),
        ([1, 1, 0, 0, 1, 1], ["ab", "ef"], [2, 6]),
        ([1, 0, 1, 0, 0, 1], ["a", "c", "f"], [1, 3, 6]),
        ([1, 1, 1, 1, 0, 0], ["abcd"], [6]),
        ([1, 0, 1, 1, 0, 0], ["a", "cd"], [1, 6]),
        ([0] * 6, [""], [6]),
    ],
)
def test_steps_by_turns(chosen, texts, ends):
    assert split_by_turns(TOKENIZER("abcdef")["input_ids"], decode, chosen) == (texts, ends)


# ---- In a trainer ----

ARGS = {"algorithm": "grpo", "beta": 0.0, "advantage": "process_normalized", "max_completion_length": 12}
TURNS = {**ARGS, "algorithm": "mt_grpo", "advantage": None, "step_separator": "turns"}
GROUP = 4


def response(prompt, place) -> list[int]:
    """A response of 1 to 12 tokens, a third of which are line breaks; it follows from the prompt and its place."""
    digits = zlib.crc32(f"{prompt} {place}".encode())
    draws = [zlib.crc32(f"{digits} {index}".encode()) for index in range(digits % 12)]
    return [*(NEWLINE if draw % 3 == 0 else 70 + draw % 9 for draw in draws), END]


def rollout_func(prompts, trainer) -> dict:
    encode = trainer.processing_class.apply_chat_template
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
    completions = [response(prompt, index % GROUP) for index, prompt in enumerate(prompts)]
    found = {
        "prompt_ids": [encode(prompt, **options)["input_ids"] for prompt in prompts],
        "completion_ids": completions,
        "logprobs": [[-0.5] * len(ids) for ids in completions],
    }
    if trainer.args.step_separator == "turns":
        found["env_mask"] = [[int(token % 3 > 0) for token in ids] for ids in completions]
    return found


def length(completion_ids, **_) -> list[float]:
    return [len(ids) / 10 for ids in completion_ids]


def step_of_tokens(ids, separator) -> tuple[list[str], list[int]]:
    """Texts of the steps, and the step of each token, by a walk over the tokens."""
    texts, places, current, last = [""], [], 0, None
    for token in ids:
        if separator == "turns":
            own = token % 3 > 0
            if own and last is False and texts[current]:
                texts.append("")
                current += 1
            last = own
            texts[current] += decode([token]) if own else ""
            places.append(current)
            continue
        places.append(current)
        if token != NEWLINE:
            texts[current] += decode([token])
        elif texts[current]:
            texts.append("")
            current += 1
    if separator != "turns" and current and not texts[current]:
        # Only blanks and the end token follow: they belong to the last step.
        texts.pop()
        places = [min(place, current - 1) for place in places]
    return texts, places


def advantages_by_loops(ids_of_group, weights, settings) -> list[list[float]]:
    """Advantages of the tokens of a group's responses; the second reward function rewards whole responses."""
    found = [step_of_tokens(ids, settings.get("step_separator")) for ids in ids_of_group]
    steps = [[weights[0] * number for number in by_step([texts])[0]] for texts, _ in found]
    whole = [weights[1] * number for number in length(ids_of_group)]

    def statistics(values, ddof):
        mean = sum(values) / len(values)
        return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - ddof))

    advantages = []
    if settings["algorithm"] == "grpo":
        for row, extra in zip(steps, whole, strict=True):
            row[-1] += extra
        mean, deviation = statistics([number for row in steps for number in row], 0)
        for row, (_, places) in zip(steps, found, strict=True):
            normal = [(number - mean) / (deviation + 1e-6) for number in row]
            advantages.append([sum(normal[place:]) for place in places])
        return advantages
    turn = [row[0] for row in steps]
    outcome = [sum(row[1:]) + extra for row, extra in zip(steps, whole, strict=True)]
    normal = []
    for values in (turn, outcome, [a + b for a, b in zip(turn, outcome, strict=True)]):
        mean, deviation = statistics(values, 1)
        normal.append([(value - mean) / (deviation + 1e-4) for value in values])
    for index, (texts, places) in enumerate(found):
        of_turn, of_outcome, both = (values[index] for values in normal)
        first = of_outcome + of_turn if len(texts) > 1 else both
        advantages.append([of_outcome if place else first for place in places])
    return advantages


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("settings", [ARGS, TURNS], ids=["process", "turns"])
def test_the_update_is_that_of_plain_arithmetic(settings, policy_path, tmp_path):
    """-A_t log p, averaged over a response's own tokens and over responses: its value and its gradient.

    The same with and without packing, for any split into micro-batches, and for any order of the prompts.
    """
    spec = {"model": policy_path, "perturb": 1, "prompts": 2}
    args = {**settings, "learning_rate": 1.0, "reward_weights": [2.0, 0.5]}
    splits = [
        {"packing": "off"},
        {"packing": "auto"},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "packing": "off"},
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
        {"shuffle_dataset": True, "seed": 3},
    ]
    options = {"reward_funcs": [by_step, length], "rollout_func": rollout_func}
    model = build({**spec, "args": args}, str(tmp_path / "fresh"), **dict(options)).model
    encode, total, expected, most = TOKENIZER.apply_chat_template, 0.0, 0.0, 0
    for row in prompts(2):
        prompt = encode(row["prompt"], add_generation_prompt=True, tokenize=True, return_dict=True)["input_ids"]
        group = [response(row["prompt"], place) for place in range(GROUP)]
        for ids, advantages in zip(group, advantages_by_loops(group, [2.0, 0.5], settings), strict=True):
            logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
            own = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
            chosen = [settings is ARGS or token % 3 > 0 for token in ids]
            kept = torch.tensor(advantages)[chosen]
            most = max(most, len(kept.unique()))
            if len(kept):
                total = total - (kept * own[chosen]).mean() / (2 * GROUP)
                expected -= kept.mean().item() / (2 * GROUP)
    assert most > 1
    total.backward()
    for index, split in enumerate(splits):
        trainer = train({**spec, "args": {**args, **split}}, str(tmp_path / str(index)), **dict(options))
        assert result(trainer).losses[0] == pytest.approx(expected, abs=1e-6)
        after = parameters(trainer)
        for name, parameter in model.named_parameters():
            # TRL holds rewards in single precision.
            torch.testing.assert_close(parameter.detach() - after[name], parameter.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.usefixtures("in_float64")
def test_one_step_is_plain_grpo(policy_path, tmp_path):
    """With a separator that no response has, all tokens have the advantage of the response."""
    spec = {"model": policy_path, "perturb": 1}
    options = {"rollout_func": rollout_func}
    plain = train({**spec, "args": {**ARGS, "advantage": None}}, str(tmp_path / "a"), reward_funcs=length, **options)
    steps = {**ARGS, "step_separator": "~~"}
    in_steps = train({**spec, "args": steps}, str(tmp_path / "b"), reward_funcs=lambda completion_ids, **_: [
        [reward] for reward in length(completion_ids)
    ], **options)  # fmt: skip
    assert largest_difference(parameters(plain), parameters(in_steps)) < 1e-6
    names = ("reward", "reward_std", "frac_reward_zero_std", "advantages/std", "advantages/max")
    logs = [{name: result(run).logs[0][name] for name in names} for run in (plain, in_steps)]
    assert logs[0] == pytest.approx(logs[1], abs=1e-6)


def rollout(policy_path, tmp_path, reward, **args):
    spec = {"model": policy_path, "prompts": 8, "args": {**ARGS, **args}}
    trainer = build(spec, str(tmp_path), reward_funcs=reward, rollout_func=rollout_func)
    trainer.model.train()
    return trainer, trainer._generate_and_score_completions([dict(row) for row in prompts(2) for _ in range(GROUP)])


def test_dynamic_sampling_carries_the_steps(policy_path, tmp_path):
    """The groups of the first two prompts are replaced: their sums are equal. What replaces them keeps its steps."""
    first = {json.dumps(row["prompt"]) for row in prompts(2)}

    def reward(prompts, steps, **_):
        return [
            [1.0] + [0.0] * (len(texts) - 1) if json.dumps(prompt) in first else by_step([texts])[0]
            for prompt, texts in zip(prompts, steps, strict=True)
        ]

    trainer, output = rollout(policy_path, tmp_path, reward, resample_groups=3, per_device_train_batch_size=8)
    assert trainer._metrics["train"]["resampling/replaced"] == [1.0]
    assert {"step_rewards", "step_of", "whole_rewards"}.isdisjoint(output)
    ids = [
        row[mask.bool()].tolist()
        for row, mask in zip(output["completion_ids"], output["completion_mask"], strict=True)
    ]
    for start in (0, GROUP):
        expected = advantages_by_loops(ids[start : start + GROUP], [1.0, 0.0], ARGS)
        for row, own in zip(output["advantages"][start : start + GROUP], expected, strict=True):
            assert row[: len(own)].tolist() == pytest.approx(own, abs=1e-4)
    means = (output["advantages"] * output["completion_mask"]).sum(1) / output["completion_mask"].sum(1)
    assert list(trainer._logs["advantages"]) == pytest.approx(means.tolist(), abs=1e-6)


def test_a_failing_step_reward_leaves_its_response_out(policy_path, tmp_path):
    """None is no reward, nor is an infinite step; the other responses keep their steps."""

    def reward(completion_ids, steps, **_):
        rewards = by_step(steps)
        for index, (ids, numbers) in enumerate(zip(completion_ids, rewards, strict=True)):
            if ids == response(prompts(2)[0]["prompt"], 1):
                rewards[index] = None
            if ids == response(prompts(2)[1]["prompt"], 2):
                numbers[0] = math.inf
        return rewards

    trainer, output = rollout(policy_path, tmp_path, reward, reward_errors="skip")
    assert output["bad_reward"].tolist() == [index == 6 for index in range(8)]
    assert not output["advantages"][[1, 6]].any() and trainer._metrics["train"]["unscorable"] == [0.25]
    kept = [response(prompts(2)[0]["prompt"], place) for place in (0, 2, 3)]
    expected = advantages_by_loops(kept, [1.0, 0.0], ARGS)
    for row, own in zip(output["advantages"][[0, 2, 3]], expected, strict=True):
        assert row[: len(own)].tolist() == pytest.approx(own, abs=1e-4)


def test_rewards_of_steps_by_an_environment(policy_path, tmp_path):
    """TRL appends an environment's reward to the functions, so that it is not among those that were given."""
    trainer, output = rollout(policy_path, tmp_path, by_step)
    trainer.plain_reward_functions = {}
    again = trainer._generate_and_score_completions([dict(row) for row in prompts(2) for _ in range(GROUP)])
    assert torch.equal(again["advantages"], output["advantages"])


def test_what_a_reward_function_must_return(policy_path, tmp_path):
    with pytest.raises(
        RewardError, match="one number for each of the [0-9] texts in steps, and returned 9 for row_id"
    ):
        rollout(policy_path, tmp_path, lambda steps, **_: [[0.0] * 9 for _ in steps])
    with pytest.raises(RewardError, match="a list with one number per step or None for each of 8 responses"):
        rollout(policy_path, tmp_path, lambda steps, **_: ["good"] * len(steps))
    with pytest.raises(RewardError, match="rewards of steps take an --advantage of steps"):
        rollout(policy_path, tmp_path, lambda prompts, **_: [[0.0, 1.0] for _ in prompts], advantage=None)


def test_reward_columns_outside_of_a_rollout(policy_path, tmp_path):
    trainer, _ = rollout(policy_path, tmp_path, by_step)
    texts = ["ab\ncd", "ef"]
    ids = [TOKENIZER(text)["input_ids"] for text in texts]
    columns = reward_columns(trainer, prompts(2), texts, [True, True], ids)
    assert columns["by_step"] == pytest.approx([sum(by_step([text.split("\n")])[0]) for text in texts])


def test_gdpo_in_a_trainer(policy_path, tmp_path):
    """Advantages follow from the rewards of each function; TRL's setting selects the same."""
    rewards = [length, lambda completion_ids, **_: [float(sum(ids) % 5) for ids in completion_ids]]
    settings = {"reward_weights": [1.0, 0.3]}
    trainer, output = rollout(policy_path, tmp_path, rewards, algorithm="gdpo", advantage=None, **settings)
    components = torch.tensor([list(trainer._logs["rewards"][name]) for name in trainer.reward_func_names]).T
    weights = torch.tensor([1.0, 0.3])
    expected = reward_decoupled(components.sum(1), GROUP, components, weights, std_ddof=1, eps=1e-4)
    torch.testing.assert_close(output["advantages"], expected.to(output["advantages"]))
    settings["multi_objective_aggregation"] = "normalize_then_sum"
    trainer, same = rollout(policy_path, tmp_path, rewards, algorithm="grpo", advantage=None, **settings)
    assert same["advantages"].equal(output["advantages"])


@pytest.mark.slow
@pytest.mark.usefixtures("in_float64")
def test_two_processes_make_the_update_of_one(policy_path, tmp_path):
    """One group lies on each process, whose responses have different numbers of steps at most."""
    spec = {"model": policy_path, "fixed": True, "perturb": 1, "prompts": 2, "rewards": ["by_step"]}
    spec |= {"fault": "line_breaks"}
    args = {**ARGS, "max_steps": 2, "learning_rate": 0.05}
    whole = result(train({**spec, "args": args}, str(tmp_path / "whole")))
    (spread,) = train_in_processes([{**spec, "args": {**args, "per_device_train_batch_size": 4}}], 2, tmp_path)
    assert largest_difference(spread.parameters, whole.parameters) < 1e-12
    assert whole.logs[0]["advantages/std"] > 0
    for entry, expected in zip(spread.logs, whole.logs, strict=True):
        names = [name for name in expected if name.startswith(("advantages/", "reward"))]
        assert {name: entry[name] for name in names} == pytest.approx({name: expected[name] for name in names})
