"""`OnlinePreferenceTrainer` against float64 arithmetic, however its batch is divided, and across a resumption."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.rollout_once import build, prompts, save_policy, thirds, train, train_in_processes
from tests.tiny import perturbed, response_log_prob
from tests.train_once import largest_difference, parameters, relative_difference, result
from trl_ext import OnlinePreferenceConfig
from trl_ext.losses import PreferenceScores, aot, dpo, ipo, simpo
from trl_ext.trainers import online_preference
from trl_ext.trainers.online_preference import REPLAY_FILE

LOSSES = {"dpo": dpo, "ipo": ipo, "simpo": simpo, "aot": aot}


@pytest.fixture(scope="module")
def policy_path(tiny_model_path, tmp_path_factory) -> str:
    return save_policy(tiny_model_path, tmp_path_factory.mktemp("policy"))


def specification(policy_path: str, **args) -> dict:
    return {
        "trainer": "OnlinePreferenceTrainer",
        "model": policy_path,
        "perturb": 1,
        "fixed": True,
        "args": {"per_device_train_batch_size": 16, **args},
    }


class Recorder:
    """A reward function that keeps what it is given."""

    __name__ = "thirds"

    def __init__(self):
        self.responses: list[tuple[list, list[int], float]] = []

    def __call__(self, prompts, completion_ids, **_):
        rewards = thirds(completion_ids)
        self.responses += zip(prompts, completion_ids, rewards, strict=True)
        return rewards


def initial_model(policy_path: str):
    return perturbed(AutoModelForCausalLM.from_pretrained(policy_path, dtype=torch.float32), seed=1, scale=0.02)


def expected_pairs(responses: list, kind: str) -> list[tuple]:
    """Chosen and rejected response of each pair, of groups of 4, by sorting and comparing."""
    found = []
    for start in range(0, len(responses), 4):
        group = responses[start : start + 4]
        if kind == "best_worst":
            ranked = sorted(group, key=lambda response: response[2])
            found.append((ranked[-1], ranked[0]))
        else:
            found += [(one, other) for one, other in itertools.permutations(group, 2) if one[2] > other[2]]
    return found


def expected_scores(policy_path: str, model, pairs: list[tuple]) -> PreferenceScores:
    """Scores in float64, one response at a time, without padding."""
    tokenizer = AutoTokenizer.from_pretrained(policy_path)
    reference = AutoModelForCausalLM.from_pretrained(policy_path, dtype=torch.float64)

    def sums(scorer, side: int):
        values = []
        for pair in pairs:
            text = tokenizer.apply_chat_template(pair[side][0], tokenize=False, add_generation_prompt=True)
            values.append(response_log_prob(scorer, tokenizer(text)["input_ids"], list(pair[side][1])))
        return torch.stack(values)

    with torch.no_grad():
        ref_chosen, ref_rejected = sums(reference, 0), sums(reference, 1)
    lengths = [torch.tensor([len(pair[side][1]) for pair in pairs]) for side in (0, 1)]
    return PreferenceScores(sums(model, 0), sums(model, 1), ref_chosen, ref_rejected, *lengths)


# ---- Loss and gradient ----


@pytest.mark.parametrize(
    ("loss", "pairs", "accumulation"),
    [("dpo", "best_worst", 1), ("ipo", "best_worst", 4), ("dpo", "all", 2), ("simpo", "all", 1), ("aot", "all", 2)],
)
def test_loss_and_gradient(loss, pairs, accumulation, policy_path, tmp_path):
    """One step of SGD at learning rate 1 on a recorded rollout: the update is minus the gradient of the mean loss."""
    recorder = Recorder()
    split = {"per_device_train_batch_size": 16 // accumulation, "gradient_accumulation_steps": accumulation}
    spec = specification(policy_path, loss=loss, pairs=pairs, **split)
    trainer = train(spec, str(tmp_path), reward_funcs=[recorder])
    run = result(trainer)

    model = initial_model(policy_path).double()
    expected = expected_pairs(recorder.responses, pairs)
    scores = expected_scores(policy_path, model, expected)
    value = LOSSES[loss](scores).mean()
    value.backward()
    gradient = {name: parameter.grad for name, parameter in model.named_parameters()}
    start = dict(initial_model(policy_path).named_parameters())
    moved = torch.cat([(start[name].detach() - run.parameters[name]).flatten() for name in gradient]).double()
    assert relative_difference(moved, torch.cat([g.flatten() for g in gradient.values()])) < 1e-4
    assert run.losses == pytest.approx([value.item()], rel=1e-5)

    log = run.logs[0]
    assert log["pairs/count"] == len(expected)
    assert log["pairs/reward_margin"] == pytest.approx(sum(c[2] - r[2] for c, r in expected) / len(expected), rel=1e-5)
    assert log["logps/chosen"] == pytest.approx(scores.chosen.mean().item(), rel=1e-5)
    if loss == "simpo":
        assert trainer.ref_model is None
        assert "kl" not in log
    else:
        ratios = (scores.chosen_log_ratio, scores.rejected_log_ratio)
        tokens = scores.chosen_length.sum() + scores.rejected_length.sum()
        margin = trainer.args.beta * scores.margin.mean().item()
        assert log["rewards/margins"] == pytest.approx(margin, rel=1e-4)
        assert log["kl"] == pytest.approx((sum(r.sum() for r in ratios) / tokens).item(), rel=1e-4)


def test_reference_is_the_model_without_its_adapter(policy_path, tmp_path):
    """With an adapter off its start the margin is to the base, which carries no adapter."""
    recorder = Recorder()
    spec = {**specification(policy_path), "lora": True}
    del spec["perturb"]
    untrained = train({**spec, "args": {**spec["args"], "learning_rate": 0.0}}, str(tmp_path), reward_funcs=[recorder])
    model = copy.deepcopy(untrained.model).double()
    scores = expected_scores(policy_path, model, expected_pairs(recorder.responses, "best_worst"))
    assert untrained.ref_model is None
    assert abs(scores.margin.mean().item()) > 0.01
    logged = result(untrained).logs[0]["rewards/margins"]
    assert logged == pytest.approx(0.1 * scores.margin.mean().item(), rel=1e-3)


def test_held_out_loss(policy_path, tmp_path):
    """Two prompts of 4 responses: the mean loss of their two pairs, of the trained policy."""
    recorder = Recorder()
    spec = specification(policy_path, per_device_eval_batch_size=8, learning_rate=0.1)
    trainer = train(spec, str(tmp_path), reward_funcs=[recorder], eval_dataset=Dataset.from_list(prompts(2)))
    recorder.responses.clear()
    metrics = trainer.evaluate()
    model = copy.deepcopy(trainer.model).double()
    expected = dpo(expected_scores(policy_path, model, expected_pairs(recorder.responses, "best_worst"))).mean()
    assert metrics["eval_loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert metrics["eval_pairs/count"] == 2


# ---- However the batch is divided ----

# Three updates; a rollout of 16 responses, 4 to a prompt. The reward `evens` has many ties.
REPLAY = {"replay_capacity": 100, "replay_fraction": 0.5, "replay_max_age": 2}
DIVIDED = {
    "dpo": {},
    "all pairs, ties": {"pairs": "all", "loss": "ipo"},
    "batch-coupled": {"loss": "aot", "pairs": "all", "beta": 0.2},
    "replay": {"loss": "ipo", **REPLAY},
    "replay, weights": {**REPLAY, "replay_weights": "sequence", "pairs": "all"},
    "replay, length-normalized": {**REPLAY, "replay_weights": "length_normalized", "loss": "aot", "beta": 0.2},
}


def divided(policy_path: str, name: str, rows: int, accumulation: int) -> dict:
    steps = {"max_steps": 3, "learning_rate": 0.02, "gradient_accumulation_steps": accumulation}
    args = {**steps, **DIVIDED[name], "per_device_train_batch_size": rows}
    return {**specification(policy_path, **args), "rewards": ["evens"], "prompts": 12}


@pytest.fixture(scope="module")
def whole(policy_path, tmp_path_factory):
    runs = {}

    def run(name: str):
        if name not in runs:
            runs[name] = result(train(divided(policy_path, name, 16, 1), str(tmp_path_factory.mktemp("whole"))))
        return runs[name]

    return run


@pytest.mark.parametrize("name", DIVIDED)
def test_accumulated_micro_batches(name, whole, policy_path, tmp_path):
    """4 micro-batches of 4 responses update as one of 16, padding where pairs do not divide."""
    run = result(train(divided(policy_path, name, 4, 4), str(tmp_path)))
    check_equal(run, whole(name), policy_path)


def check_equal(run, expected, policy_path: str) -> None:
    start = dict(initial_model(policy_path).named_parameters())
    moved, should = (
        torch.cat([(start[name].detach() - other.parameters[name]).flatten() for name in start]).double()
        for other in (run, expected)
    )
    assert relative_difference(moved, should) < 1e-4
    assert run.losses == pytest.approx(expected.losses, rel=1e-4)
    for entry, other in zip(run.logs, expected.logs, strict=True):
        names = [key for key in other if key.startswith(("pairs/", "replay/", "rewards/", "logps/"))]
        names += ["entropy", "kl"]
        expected_log = {key: other[key] for key in names}
        assert {key: entry[key] for key in names} == pytest.approx(expected_log, rel=1e-4, abs=1e-5)


@pytest.mark.slow
def test_two_processes(whole, policy_path, tmp_path):
    """Two processes of 8 or of 2 x 4 responses update as one of 16."""
    specs = [divided(policy_path, name, rows, acc) for name in DIVIDED for rows, acc in ((8, 1), (4, 2))]
    runs = train_in_processes(specs, 2, tmp_path)
    for index, name in enumerate(DIVIDED):
        for run in runs[2 * index : 2 * index + 2]:
            check_equal(run, whole(name), policy_path)


def test_ties_and_replay_are_counted(whole):
    logs = whole("all pairs, ties").logs
    assert all(entry["pairs/count"] + entry["pairs/ties_dropped"] == 24 for entry in logs), "4 groups of 6 pairs"
    assert sum(entry["pairs/ties_dropped"] for entry in logs) > 3
    first, second, third = whole("replay").logs
    assert (first["replay/size"], first["replay/fraction"]) == (0, 0)
    assert second["replay/size"] == first["pairs/count"]
    assert second["replay/fraction"] == 0.5
    assert (second["replay/age_mean"], second["replay/staleness"]) == (1, 0.5), "half of the pairs, of age 1"
    assert third["replay/age_max"] == 2
    weighted = whole("replay, weights").logs
    assert weighted[0]["replay/ess"] == pytest.approx(1, abs=1e-4), "all pairs are new"
    assert weighted[2]["replay/ess"] < 0.999


def test_nothing_is_learned_from_ties(policy_path, tmp_path):
    def alike(completions, **_):
        return [1.0] * len(completions)

    trainer = train(specification(policy_path, loss="ipo", max_steps=2), str(tmp_path), reward_funcs=[alike])
    run = result(trainer)
    assert run.losses == [0.0, 0.0]
    assert [entry["pairs/ties_dropped"] for entry in run.logs] == [4, 4]
    start = {name: p.detach() for name, p in initial_model(policy_path).named_parameters()}
    assert largest_difference(run.parameters, start) == 0


def test_several_updates_to_a_rollout(policy_path, tmp_path):
    """16 responses in two updates, twice over: the pairs of an update are its own, and the last is off-policy."""
    settings = {"per_device_train_batch_size": 8, "steps_per_generation": 2, "num_iterations": 2, "max_steps": 4}
    trainer = train(specification(policy_path, learning_rate=0.1, pairs="all", **settings), str(tmp_path))
    run = result(trainer)
    assert trainer.rollouts == 1
    assert run.losses[2] < run.losses[0]
    assert run.losses[3] < run.losses[1], "the same pairs again"


# ---- A judge ----


class Shorter:
    """Prefers the response of fewer characters."""

    sequential = True
    identity = None

    def judge(self, prompt, response_a, response_b):
        if len(response_a) == len(response_b):
            return "tie"
        return "A" if len(response_a) < len(response_b) else "B"


def test_a_judge_ranks_as_the_reward_that_it_stands_for(policy_path, tmp_path):
    """Wins against the others of a group order its responses as their lengths do."""

    def shorter(completions, **_):
        return [-float(len(completion[0]["content"])) for completion in completions]

    spec = specification(policy_path, max_completion_length=12)
    judged = result(train(spec, str(tmp_path), reward_funcs=None, judge=Shorter()))
    rewarded = result(train(spec, str(tmp_path), reward_funcs=[shorter]))
    assert judged.losses == rewarded.losses
    assert largest_difference(judged.parameters, rewarded.parameters) == 0
    assert judged.logs[0]["pairs/reward_margin"] > 0.5, "the best wins more than half of its comparisons"


# ---- Resumption ----


def replaying(policy_path: str, folder, **args) -> dict:
    settings = {"max_steps": 4, "learning_rate": 0.02, "save_strategy": "steps", "save_steps": 2, **REPLAY}
    return specification(policy_path, replay_weights="sequence", **{**settings, **args}, output_dir=str(folder))


def test_resumes_as_it_would_have_gone_on(policy_path, tmp_path):
    """Sampled, not fixed responses: replay, random state and all are those of the run that was not interrupted."""
    spec = {**replaying(policy_path, tmp_path), "fixed": False, "prompts": 16}
    straight = train(spec, str(tmp_path))
    resumed = train({**spec, "resume_from_checkpoint": str(tmp_path / "checkpoint-2")}, str(tmp_path))
    assert largest_difference(parameters(resumed), parameters(straight)) == 0
    assert list(map(repr, resumed.replay.pairs)) == list(map(repr, straight.replay.pairs))
    assert {pair.version for pair in resumed.replay.pairs} == {1, 2, 3}
    names = [key for key in result(straight).logs[3] if key.startswith(("pairs/", "replay/", "rewards/"))]
    assert len(names) > 10
    for key in names:
        assert result(resumed).logs[3][key] == result(straight).logs[3][key], key


def test_pairs_that_other_rewards_labelled_are_left_out(policy_path, tmp_path, caplog):
    spec = replaying(policy_path, tmp_path)
    train({**spec, "args": {**spec["args"], "max_steps": 2}}, str(tmp_path))
    assert (tmp_path / "checkpoint-2" / REPLAY_FILE).is_file()
    other = {**spec, "rewards": ["evens"], "resume_from_checkpoint": str(tmp_path / "checkpoint-2")}
    resumed = train({**other, "args": {**spec["args"], "max_steps": 3}}, str(tmp_path))
    assert "8 of 8 replayed pairs were labelled by other rewards" in caplog.text
    assert {pair.reward_version for pair in resumed.replay.pairs} == {"1 evens, missing end 0"}


# ---- What is refused ----

WRONG = {
    "num_generations must be at least 2, got 1: a pair takes two": {"num_generations": 1},
    "unknown preference loss 'ipoo'; did you mean 'ipo'": {"loss": "ipoo"},
    "pairs must be one of best_worst, all, got 'best'": {"pairs": "best"},
    "tie_tolerance must be a number from 0 up": {"tie_tolerance": -1.0},
    "epsilon is not used by OnlinePreferenceConfig: a preference loss has no importance ratio": {"epsilon": 0.2},
    "mask_truncated_completions is not used .* missing_eos_penalty": {"mask_truncated_completions": True},
    "is the algorithm 'online_preference' and cannot be 'grpo'": {"algorithm": "grpo"},
    "replay_fraction must lie between 0 and 1, got 1": {"replay_capacity": 8, "replay_fraction": 1.0},
    "replay_max_age 1 leaves nothing to replay: .* 2 updates old": {
        "replay_capacity": 8,
        "replay_max_age": 1,
        "num_iterations": 2,
    },
    "replay_weights must be one of none, sequence": {"replay_capacity": 8, "replay_weights": "token"},
    "replay_weights sequence is of a replay: set replay_capacity": {"replay_weights": "sequence"},
    "replay_weight_cap 3.0 is of a replay: set replay_capacity": {"replay_weight_cap": 3.0},
    "replay_fraction 0.3 is of a replay: set replay_capacity": {"replay_fraction": 0.3},
    "replay_max_age 9 is of a replay: set replay_capacity": {"replay_max_age": 9},
    "replay_weight_cap must be a number from 1": {"replay_capacity": 8, "replay_weight_cap": 0.5},
    "replay_capacity must be at least 0": {"replay_capacity": -1},
    "replay does not go with sync_ref_model": {"replay_capacity": 8, "sync_ref_model": True},
    "gradient_accumulation_steps 2 does not divide the 1 micro-batches": {
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 1,
    },
    "beta must be positive": {"beta": 0.0},
    "reads the column 'p'": {"loss": "sppo", "loss_kwargs": {"chosen_win_probability": "p"}},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_configuration(message, tmp_path):
    settings = {"per_device_train_batch_size": 8, "use_cpu": True, **WRONG[message]}
    with pytest.raises(ValueError, match=message):
        OnlinePreferenceConfig(str(tmp_path), **settings)


def test_wrong_trainer_arguments(policy_path, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="no reward function"):
        train(specification(policy_path), str(tmp_path), reward_funcs=None)
    with pytest.raises(ValueError, match=r"replay larger than memory allows: replay_capacity 1000000000000 "):
        train(specification(policy_path, replay_capacity=10**12), str(tmp_path))
    # A copy for each process of this machine, whose memory it is.
    checked = []
    monkeypatch.setattr(online_preference, "check_memory", lambda *about: checked.append(about[3]))
    for local in (None, "2"):
        if local:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
        build(specification(policy_path, replay_capacity=8), str(tmp_path))
    assert checked == [1, 2]
    monkeypatch.undo()
    with pytest.raises(ValueError, match="2 responses per process do not divide into groups of num_generations 4"):
        spec = specification(policy_path, per_device_train_batch_size=2, generation_batch_size=4)
        spec["args"]["steps_per_generation"] = None
        # As on two processes: half of a group of 4 on each.
        from trl_ext.trainers.judge_rewards import JudgeRewards

        args = OnlinePreferenceConfig(str(tmp_path), per_device_train_batch_size=4, use_cpu=True)
        args.per_device_train_batch_size = 2
        JudgeRewards(Shorter(), lambda: 4, args)


def test_description():
    args = OnlinePreferenceConfig("unused", loss="ipo", per_device_train_batch_size=8, use_cpu=True)
    objective = args.build_objective()
    assert objective.describe().startswith("online ipo (beta 0.1, length_normalized False), pairs best_worst")
    assert objective.to_dict()["loss"] == "ipo"
    assert args.beta == 0.1
    assert OnlinePreferenceConfig("unused", loss="simpo", per_device_train_batch_size=8, use_cpu=True).beta == 2.0
