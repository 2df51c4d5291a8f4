"""`OnlinePreferenceTrainer` against float64 arithmetic, what it counts, and judges in the place of rewards."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.naive_policy import Steps
from tests.support.rollout_once import REPLAY, initial_model, online_preference_specification, prompts, thirds, train
from tests.support.tiny import response_log_prob
from tests.support.train_once import largest_difference, parameters, relative_difference, result
from tests.support.trl_private import rollout_batches
from trl_ext import OnlinePreferenceConfig, OnlinePreferenceTrainer
from trl_ext.evaluation.judging.protocol import JudgeError
from trl_ext.losses import PreferenceObjective, PreferenceScores, aot, dpo, ipo, simpo
from trl_ext.resilience.reward_guard import RewardGuard
from trl_ext.rollouts.replay import importance_weights
from trl_ext.trainers.online_preference import trainer as online_preference
from trl_ext.trainers.online_preference.judge_rewards import JudgeRewards
from trl_ext.trainers.online_preference.pairs import deal_pairs

pytestmark = pytest.mark.usefixtures("in_float64")


LOSSES = {"dpo": dpo, "ipo": ipo, "simpo": simpo, "aot": aot}


class Recorder:
    """A reward function that keeps what it is given."""

    __name__ = "thirds"

    def __init__(self):
        self.responses: list[tuple[list, list[int], float]] = []

    def __call__(self, prompts, completion_ids, **_):
        rewards = thirds(completion_ids)
        self.responses += zip(prompts, completion_ids, rewards, strict=True)
        return rewards


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
    ("loss", "pairs", "accumulation", "temperature"),
    [
        ("dpo", "best_worst", 1, 1.0),
        ("ipo", "best_worst", 4, 1.0),
        ("dpo", "all", 2, 1.0),
        ("simpo", "all", 1, 1.0),
        ("aot", "all", 2, 1.0),
        ("dpo", "best_worst", 1, 0.5),
        ("simpo", "all", 1, 2.0),
        ("aot", "all", 2, 0.7),
    ],
)
def test_loss_and_gradient(loss, pairs, accumulation, temperature, policy_path, tmp_path):
    """One step of SGD at learning rate 1 on a recorded rollout: the update is minus the gradient of the mean loss, of
    log-probabilities at temperature 1, whatever temperature responses are sampled at.
    """
    recorder = Recorder()
    split = {"per_device_train_batch_size": 16 // accumulation, "gradient_accumulation_steps": accumulation}
    spec = online_preference_specification(policy_path, loss=loss, pairs=pairs, temperature=temperature, **split)
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
    assert relative_difference(moved, torch.cat([g.flatten() for g in gradient.values()])) < 1e-9
    assert run.losses == pytest.approx([value.item()], rel=1e-8)

    log = run.logs[0]
    assert log["pairs/count"] == len(expected)
    assert log["pairs/reward_margin"] == pytest.approx(sum(c[2] - r[2] for c, r in expected) / len(expected), rel=1e-8)
    assert log["logps/chosen"] == pytest.approx(scores.chosen.mean().item(), rel=1e-8)
    if loss == "simpo":
        assert trainer.ref_model is None
        assert "kl" not in log
    else:
        ratios = (scores.chosen_log_ratio, scores.rejected_log_ratio)
        tokens = scores.chosen_length.sum() + scores.rejected_length.sum()
        margin = trainer.args.beta * scores.margin.mean().item()
        assert log["rewards/margins"] == pytest.approx(margin, rel=1e-8)
        assert log["kl"] == pytest.approx((sum(r.sum() for r in ratios) / tokens).item(), rel=1e-8)


def test_the_logged_divergence_is_of_new_pairs():
    """Log-ratios 1 + 2 of the new pair, of 3 + 1 tokens. A replayed pair and one that fills up do not count."""
    trainer = OnlinePreferenceTrainer.__new__(OnlinePreferenceTrainer)
    trainer.preference, trainer.aux_loss_enabled, trainer.model = PreferenceObjective("dpo"), False, torch.nn.ReLU()
    logged: dict = {}
    trainer.add_metrics = logged.update
    scores = PreferenceScores(*torch.tensor([[-1.0, -2, -9], [-3.0, -4, -9], [-2.0, -7, 0], [-5.0, -9, 0]]))
    mask = torch.tensor([[[1, 1, 1], [1, 0, 0]], [[1, 1, 0], [1, 1, 0]], [[1, 1, 1], [1, 1, 1]]])
    inputs = {"completion_mask": mask, "counted": torch.tensor([1.0, 1, 0]), "fresh": torch.tensor([1.0, 0, 1])}
    trainer._log(scores, torch.zeros(3), None, inputs, torch.tensor(0.0))
    assert [value.item() for value in logged["kl"]] == [3, 4]
    assert [value.item() for value in logged["rewards/chosen"]] == [pytest.approx(0.1 * (1 + 5)), 2]
    assert [value.item() for value in logged["entropy"]] == [0, 8]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_reference_is_the_model_without_its_adapter(temperature, policy_path, tmp_path):
    """With an adapter off its start the margin is to the base, which carries no adapter."""
    recorder = Recorder()
    spec = {**online_preference_specification(policy_path, temperature=temperature), "lora": True}
    del spec["perturb"]
    untrained = train({**spec, "args": {**spec["args"], "learning_rate": 0.0}}, str(tmp_path), reward_funcs=[recorder])
    model = copy.deepcopy(untrained.model).double()
    scores = expected_scores(policy_path, model, expected_pairs(recorder.responses, "best_worst"))
    assert untrained.ref_model is None
    assert abs(scores.margin.mean().item()) > 0.01
    logged = result(untrained).logs[0]["rewards/margins"]
    assert logged == pytest.approx(0.1 * scores.margin.mean().item(), rel=1e-8)


@pytest.mark.parametrize(("loss", "batch", "temperature"), [("dpo", 32, 1.0), ("aot", 4, 1.0), ("aot", 4, 0.5)])
def test_held_out_loss(loss, batch, temperature, policy_path, tmp_path):
    """Eight prompts of 4 responses: the mean loss of their pairs, of the trained policy; a batch-coupled one is that
    of the pairs of all batches.
    """
    recorder = Recorder()
    spec = online_preference_specification(
        policy_path, loss=loss, per_device_eval_batch_size=batch, learning_rate=0.1, temperature=temperature
    )
    trainer = train(spec, str(tmp_path), reward_funcs=[recorder], eval_dataset=Dataset.from_list(prompts(8)))
    recorder.responses.clear()
    metrics = trainer.evaluate()
    model = AutoModelForCausalLM.from_pretrained(policy_path, dtype=torch.float64)
    model.load_state_dict(trainer.model.state_dict())
    scores = expected_scores(policy_path, model, expected_pairs(recorder.responses, "best_worst"))
    assert metrics["eval_loss"] == pytest.approx(LOSSES[loss](scores).mean().item(), rel=1e-8)
    assert metrics["eval_pairs/count"] == batch // 4


@pytest.mark.parametrize("accumulation", [1, 2])
def test_importance_weights_are_of_the_distributions_that_are_sampled_from(
    accumulation, policy_path, tmp_path, monkeypatch
):
    """Responses are sampled at temperature 0.5: each pair's log-ratio is of the present policy at 0.5 to the one that
    sampled it at 0.5, in float64 without padding.
    """
    seen, steps = [], Steps()

    def recording(log_ratio, *args, **kwargs):
        seen.append(log_ratio)
        return importance_weights(log_ratio, *args, **kwargs)

    monkeypatch.setattr(online_preference, "importance_weights", recording)
    settings = {"max_steps": 2, "learning_rate": 0.02, "temperature": 0.5, "replay_weights": "sequence", **REPLAY}
    split = {"per_device_train_batch_size": 16 // accumulation, "gradient_accumulation_steps": accumulation}
    spec = {**online_preference_specification(policy_path, **settings, **split), "prompts": 16}
    trainer = train(spec, str(tmp_path), callbacks=[steps])
    model = AutoModelForCausalLM.from_pretrained(policy_path, dtype=torch.float64)

    def log_prob(version: int, prompt: list[int], response: list[int]) -> float:
        model.load_state_dict(steps.weights[version])
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
        return (logits / 0.5).log_softmax(-1).gather(1, torch.tensor(response)[:, None]).sum().item()

    pairs = {(tuple(pair.chosen.ids), tuple(pair.rejected.ids)): pair for pair in trainer.replay.pairs}
    assert {pair.version for pair in pairs.values()} == {0, 1}
    for pair in pairs.values():
        expected = log_prob(pair.version, pair.prompt_ids, pair.chosen.ids)
        assert pair.chosen.log_prob == pytest.approx(expected, rel=1e-4)
    found, ages = [], set()
    for batch in rollout_batches(trainer):
        for ids, mask in zip(batch["completion_ids"], batch["completion_mask"].bool(), strict=True):
            chosen, rejected = (tuple(row[kept].tolist()) for row, kept in zip(ids, mask, strict=True))
            pair = pairs[chosen, rejected]
            ages.add(1 - pair.version)
            own = [(pair.prompt_ids, side.ids) for side in (pair.chosen, pair.rejected)]
            found.append(sum(log_prob(1, *side) - log_prob(pair.version, *side) for side in own))
    assert ages == {0, 1} and max(map(abs, found)) > 0.05
    assert seen[1].tolist() == pytest.approx(found, rel=1e-8, abs=1e-9)


# ---- What is counted ----


def test_pairs_are_dealt_in_order():
    """5 pairs, 2 processes of 2 micro-batches: 4 places each, so that 3 of the second are filled."""
    assert deal_pairs("abcde", "x", 2, 0, 2) == (list("abcd"), [True] * 4)
    assert deal_pairs("abcde", "x", 2, 1, 2) == (list("exxx"), [True, False, False, False])


def test_ties_and_replay_are_counted(policy_path, tmp_path):
    """Three updates; the reward `evens` has many ties."""

    def logs(**args) -> list[dict]:
        spec = online_preference_specification(policy_path, max_steps=3, learning_rate=0.02, **args)
        return result(train({**spec, "rewards": ["evens"], "prompts": 12}, str(tmp_path))).logs

    all_pairs = logs(pairs="all", loss="ipo")
    assert all(entry["pairs/count"] + entry["pairs/ties_dropped"] == 24 for entry in all_pairs), "4 groups of 6 pairs"
    assert sum(entry["pairs/ties_dropped"] for entry in all_pairs) > 3
    first, second, third = logs(loss="ipo", **REPLAY)
    assert (first["replay/size"], first["replay/fraction"]) == (0, 0)
    assert second["replay/size"] == first["pairs/count"]
    assert second["replay/fraction"] == 0.5
    assert (second["replay/age_mean"], second["replay/staleness"]) == (1, 0.5), "half of the pairs, of age 1"
    assert third["replay/age_mean"] > 1
    weighted = logs(**REPLAY, replay_weights="sequence", pairs="all")
    assert weighted[0]["replay/ess"] == pytest.approx(1, abs=1e-4), "all pairs are new"
    assert weighted[2]["replay/ess"] < 0.999


def test_nothing_is_learned_from_ties(policy_path, tmp_path, caplog):
    def alike(completions, **_):
        return [1.0] * len(completions)

    trainer = train(
        online_preference_specification(policy_path, loss="ipo", max_steps=2), str(tmp_path), reward_funcs=[alike]
    )
    run = result(trainer)
    assert run.losses == [0.0, 0.0]
    assert [entry["pairs/ties_dropped"] for entry in run.logs] == [4, 4]
    assert "nothing was learned from rewards: no pair was made" in caplog.text
    start = {name: p.detach() for name, p in initial_model(policy_path).named_parameters()}
    assert largest_difference(run.parameters, start) == 0


# ---- Resumption ----


def replaying(policy_path: str, folder, **args) -> dict:
    settings = {"max_steps": 4, "learning_rate": 0.02, "save_strategy": "steps", "save_steps": 2, **REPLAY}
    return online_preference_specification(
        policy_path, replay_weights="sequence", **{**settings, **args}, output_dir=str(folder)
    )


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
    assert (tmp_path / "checkpoint-2" / online_preference.REPLAY_FILE).is_file()
    other = {**spec, "rewards": ["evens"], "resume_from_checkpoint": str(tmp_path / "checkpoint-2")}
    resumed = train({**other, "args": {**spec["args"], "max_steps": 3}}, str(tmp_path))
    assert "8 of 8 replayed pairs were labelled by other rewards" in caplog.text
    assert {pair.reward_version for pair in resumed.replay.pairs} == {"1 evens"}


# ---- A judge ----


class Shorter:
    """Prefers the response of fewer characters."""

    sequential, identity = True, None

    def judge(self, prompt, response_a, response_b):
        if len(response_a) == len(response_b):
            return "tie"
        return "A" if len(response_a) < len(response_b) else "B"


def test_a_judge_ranks_as_the_reward_that_it_stands_for(policy_path, tmp_path):
    """Wins against the others of a group order its responses as their lengths do."""

    def shorter(completions, **_):
        return [-float(len(completion[0]["content"])) for completion in completions]

    spec = online_preference_specification(policy_path, max_completion_length=12)
    judged = result(train(spec, str(tmp_path), reward_funcs=None, judge=Shorter()))
    rewarded = result(train(spec, str(tmp_path), reward_funcs=[shorter]))
    assert judged.losses == rewarded.losses
    assert largest_difference(judged.parameters, rewarded.parameters) == 0
    assert judged.logs[0]["pairs/reward_margin"] > 0.5, "the best wins more than half of its comparisons"


def test_a_judge_of_the_order_prefers_no_response():
    config = OnlinePreferenceConfig("unused", per_device_train_batch_size=6, num_generations=3, use_cpu=True)
    function = JudgeRewards(lambda *_: "A", lambda: 3, config)
    assert function(prompts=["p"] * 3, completions=["c", "bad", "ab"]) == [0.5, 0.5, 0.5]


def test_what_the_judge_could_not_compare_has_no_reward():
    """Whatever another function, the first, gives for it."""
    trainer = OnlinePreferenceTrainer.__new__(OnlinePreferenceTrainer)
    trainer._has_judge, trainer.reward_weights = True, torch.tensor([1.0, 2.0])
    total = trainer.weighted_sum(torch.tensor([[1.0, 0.5], [1.0, float("nan")]]))
    assert total[0] == 2 and total[1].isnan()


class Failing:
    """Judges as `Shorter`, and raises `error` where the response "bad" is compared."""

    sequential, identity, name = True, None, "failing"

    def __init__(self, error: Exception):
        self.error, self.calls = error, 0

    def judge(self, prompt, response_a, response_b):
        self.calls += 1
        if "bad" in (response_a, response_b):
            raise self.error
        return Shorter.judge(self, prompt, response_a, response_b)


def guarded(error: Exception, mode: str, completions: list[str], **settings):
    """What a judge brings behind the trainer's guard: rewards, the guard, and the judge."""
    args = {"per_device_train_batch_size": 6, "num_generations": 3, "use_cpu": True, **settings}
    config = OnlinePreferenceConfig("unused", reward_errors=mode, **args)
    judge, guard = Failing(error), RewardGuard(mode)
    function = guard.wrap(JudgeRewards(judge, lambda: 3, config))
    return function(prompts=["p"] * len(completions), completions=completions), guard, judge


def test_a_judge_that_fails_where_errors_are_skipped(caplog):
    """What is no verdict leaves out the response that cannot be compared; another error leaves out all of the call, as
    one by itself cannot be compared. "c" is shorter than "ab", and wins.
    """
    rewards, guard, judge = guarded(JudgeError("no verdict"), "skip", ["c", "bad", "ab"])
    assert (rewards, guard.failed) == ([1.0, None, 0.0], set())
    rewards, guard, judge = guarded(RuntimeError("HTTP 401"), "skip", ["c", "ab", "e", "bad", "x", "yy"])
    assert (rewards, guard.failed) == ([None] * 6, set(range(6)))
    assert "'failing' failed on the prompt 'p': RuntimeError: HTTP 401" in caplog.text
    assert "IndexError" not in caplog.text
    assert judge.calls <= 12, "six pairs, in both orders, once"


def test_groups_that_would_be_divided_are_refused():
    """Evaluation batches of 6 on two processes are 12 responses, three groups of 4, of which the second is divided."""
    args = OnlinePreferenceConfig("unused", per_device_train_batch_size=4, use_cpu=True)
    args.per_device_eval_batch_size, args.eval_strategy = 6, "steps"
    with pytest.raises(ValueError, match="6 responses per process do not divide into groups of 4"):
        JudgeRewards(Shorter(), lambda: 4, args)
    args.num_generations_eval = 3
    JudgeRewards(Shorter(), lambda: 4, args)
