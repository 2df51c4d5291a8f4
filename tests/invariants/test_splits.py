"""The split does not change the result: parameters, what is logged, and a held-out evaluation, for every trainer.

Five optimizer steps on one batch of eight pairs, responses or demonstrations: whole, accumulated, in passes, and on
two processes. A difference of updates is the norm of the difference over the norm of the whole change of the
parameters. Everything is in float64, where only a mistake makes a difference of more than 1e-9.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.support import rollout_once, train_once
from tests.support.rollout_once import OWN_RECIPES, REPLAY
from tests.support.tiny import pairs, save_tiny_model
from tests.support.train_once import Run
from trl_ext.trainers.metrics import StepMetrics

STEPS = 5
BATCH = 8
PER_LAUNCH = 20
# processes, rows of a micro-batch, accumulated micro-batches, tokens of a pass
SPLITS = {"1 x 8": (1, 8, 1), "1 x 2 x 4": (1, 2, 4), "2 x 2 x 2": (2, 2, 2)}
SPLITS = {name: (*split, "off") for name, split in SPLITS.items()}
SPLITS |= {"1 x 2 x 4 in passes": (1, 2, 4, "160"), "2 x 1 x 4 in passes": (2, 1, 4, "110")}
# A reference so far from the policy that which pairs are sorted together matters.
REFERENCE = {"reference_seed": 1, "reference_scale": 0.3, "data_seed": 6}
# Logged values that are of a run's speed, or of the configuration.
NOT_COMPARED = ("epoch", "step", "step_time", "runtime", "per_second", "learning_rate", "total_flos")


def _preference(trainer: str, learning_rate: float = 0.02, **args) -> dict:
    return {"trainer": trainer, **REFERENCE, "args": {"learning_rate": learning_rate, **args}}


def _policy(algorithm: str, learning_rate: float = 0.05, **args) -> dict:
    return {"trainer": "PolicyTrainer", "args": {"algorithm": algorithm, "learning_rate": learning_rate, **args}}


def _ppo(value_model: str, **args) -> dict:
    args |= {"num_generations": 1, "num_iterations": 2, "learning_rate": 0.01, "value_learning_rate": 0.5}
    args |= {"value_model": value_model, "value_clip": 0.001, "kl_target": 0.5, "kl_horizon": 50}
    return {"trainer": "PPOTrainer", "args": args}


def _online(**args) -> dict:
    """Pairs made of 16 responses, 4 to a prompt, whose rewards have many ties."""
    case = {"trainer": "OnlinePreferenceTrainer", "rewards": ["evens"], "scale": 2}
    return {**case, "args": {"learning_rate": 0.02, **args}}


def _on_pairs(trainer: str, **args) -> dict:
    return {"trainer": trainer, "data_seed": REFERENCE["data_seed"], "args": {"learning_rate": 0.02, **args}}


_OFF_POLICY = {"num_iterations": 2, "epsilon": 0.01}
# Responses of 1 or 2 tokens to most prompts, and of up to 40 to the others.
_UNEVEN = {"max_completion_length": 40}
CASES: dict[str, dict] = {
    "dpo": {**_preference("DPOTrainer", beta=0.1), "win_rate": True},
    "dpo, shuffled": _preference("DPOTrainer", beta=0.1, train_sampling_strategy="random"),
    "dpo, wpo weights": _preference("DPOTrainer", beta=0.1, weighting=["wpo"]),
    "dpo, confidence": _preference(
        "DPOTrainer", beta=0.1, weighting=["confidence"], weighting_kwargs={"power": 4.0, "floor": 0.05}
    ),
    "ipo": _preference("IPOTrainer", 1e-5, beta=0.1),
    "ipo, per token": _preference("IPOTrainer", 1e-3, beta=0.5, length_normalized=True),
    "aot": _preference("AOTTrainer", beta=0.2),
    "aot_paired": _preference("AOTPairedTrainer", beta=0.2),
    "simpo": {**_preference("SimPOTrainer"), "reference_seed": None},
    "orpo": {**_preference("ORPOTrainer"), "reference_seed": None},
    "reward": _on_pairs("RewardTrainer"),
    "reward, centred": _on_pairs("RewardTrainer", center_rewards_coefficient=0.01),
    "reward, margins": _on_pairs("RewardTrainer", margin_column="avg_confidence"),
    "grpo": _policy("grpo", 0.01, **_OFF_POLICY),
    "grpo, kl in the loss": _policy("grpo", 0.002, beta=0.1),
    "dr_grpo": _policy("dr_grpo", 0.2, **_OFF_POLICY),
    "dapo": _policy("dapo", **_OFF_POLICY, epsilon_high=0.02),
    "gspo": _policy("gspo", num_iterations=2, epsilon=1e-3, epsilon_high=2e-3),
    "reinforce++ baseline": _policy("reinforce_plus_plus_baseline", 0.01, **_OFF_POLICY),
    "rloo, kl in the reward": _policy("rloo", 0.005, beta=0.1),
    "dr_grpo, kl in the loss": _policy("dr_grpo", 0.1, **_OFF_POLICY, beta=0.1),
    "grpo, kl over tokens": _policy("grpo", 0.002, **_OFF_POLICY, beta=0.2, kl_aggregation="token_mean"),
    "opo": _policy("opo", 0.01),
    "vespo": _policy(f"{OWN_RECIPES}/vespo.py:vespo", 0.01, num_iterations=2),
    "sapo": _policy("sapo", 0.01, num_iterations=2),
    "remax": _policy("remax", 0.002, num_generations=2),
    # With two processes of four, the group of eight straddles them.
    "grpo, one group": _policy("grpo", 0.01, **_OFF_POLICY, num_generations=8, aggregation="token_mean"),
    # Three groups, the second of which lies on both processes.
    "dapo, resampled": {
        **_policy("dapo", 0.01, beta=0.1, num_iterations=2, overlong_share=0.5, resample_groups=8),
        "rewards": ["at_odd_rows"],
        "scale": 2,
    },
    # All rewards of row2, in the second rollout, are NaN: its update is skipped.
    "grpo, a reward not finite": {**_policy("grpo", 0.01, **_OFF_POLICY), "rewards": ["not_a_number"]},
    "ppo, shared": _ppo("shared"),
    "ppo, separate": _ppo("separate"),
    "grpo, uneven": {**_policy("grpo", 0.002, **_OFF_POLICY, **_UNEVEN, beta=0.01), "scale": 4, "uneven": True},
    "dapo, uneven": {**_policy("dapo", 0.02, **_OFF_POLICY, **_UNEVEN), "scale": 4, "uneven": True},
    "gspo, uneven": {**_policy("gspo", num_iterations=2, epsilon=1e-4, **_UNEVEN), "scale": 4, "uneven": True},
    "ppo, uneven": {**_ppo("shared", **_UNEVEN), "scale": 2, "uneven": True},
    "online": _online(),
    "online, all pairs": _online(pairs="all", loss="ipo"),
    "online, aot": _online(pairs="all", loss="aot", beta=0.2),
    "online, replay": _online(loss="ipo", **REPLAY),
    "online, replay weights": _online(**REPLAY, replay_weights="sequence", pairs="all"),
    "online, replay, temperature": _online(**REPLAY, replay_weights="sequence", temperature=0.5),
    "online, replay, aot": _online(**REPLAY, replay_weights="length_normalized", loss="aot", beta=0.2),
    "sft": _on_pairs("SFTTrainer"),
    "sft, whole texts": _on_pairs("SFTTrainer", completion_only_loss=False),
}
# TRL's own trainers where what they do depends on the split, by which the measure is seen to measure something.
STOCK: dict[str, dict] = {
    "trl: aot_unpaired": _preference("trl.DPOTrainer", beta=0.2, loss_type=["aot_unpaired"]),
    "trl: grpo, bnpo": {
        "trainer": "trl.GRPOTrainer",
        "args": {"loss_type": "bnpo", "learning_rate": 0.05, "num_iterations": 2, "epsilon": 0.01},
    },
}
CASES |= STOCK


def specification(name: str, split: str, models: Path) -> dict:
    """Of a case for `train_once.complete`; `models` holds the tiny model, and the policy made of it."""
    processes, rows, accumulation, budget = SPLITS[split]
    case = dict(CASES[name])
    scale = case.pop("scale", 1)
    batch = BATCH * scale
    args = {**case["args"], "optim": "sgd", "max_steps": STEPS, "gradient_accumulation_steps": accumulation}
    args["per_device_train_batch_size"] = args["per_device_eval_batch_size"] = batch // processes // accumulation
    if budget != "off":
        args["tokens_per_pass"] = str(int(budget) * scale)
    spec = {**case, "model": str(models / "model"), "args": args}
    if {"GRPOTrainer", "PolicyTrainer", "PPOTrainer", "OnlinePreferenceTrainer"} & {case["trainer"].split(".")[-1]}:
        # A group must fit into an evaluation batch.
        args["per_device_eval_batch_size"] = batch // processes
        if args.get("value_model") == "separate":
            args["value_model_name_or_path"] = str(models / "policy")
        # Four prompts or more, of which whole batches are made.
        groups = batch // args.get("num_generations", 4)
        held_out = rollout_once.prompts(max(8, groups))[-math.ceil(4 / groups) * groups :]
        policy = {"model": str(models / "policy"), "fixed": True, "perturb": 1, "prompts": 16}
        return {**spec, **policy, "held_out": held_out}
    return {**spec, "pairs": STEPS * BATCH, "held_out": pairs(BATCH, seed=99)}


# ---- What two runs differ by ----


def metric_differences(run: Run, expected: Run) -> dict[str, float]:
    """Largest difference of each logged and each held-out figure, relative to the larger of the two.

    Or to 0.01 where both are smaller: a policy's loss is a sum of much larger terms that cancel.
    """
    largest: dict[str, float] = {}
    for entry, other in zip([*run.logs, run.evaluation], [*expected.logs, expected.evaluation], strict=True):
        for key in entry.keys() | other.keys():
            if any(part in key for part in NOT_COMPARED):
                continue
            values = entry.get(key), other.get(key)
            difference = math.inf if None in values else abs(values[0] - values[1])
            scale = max(1e-2, *(abs(value) for value in values if value is not None))
            largest[key] = max(largest.get(key, 0.0), difference / scale)
    return largest


OWN = [name for name in CASES if name not in STOCK]
# Not your own losses, and not sampled pairs.
WITH_BUDGET = [name for name in OWN if not name.startswith(("online", "sft", "vespo"))]
# One of each way in which rows are coupled; the others are slow tests.
FAST = ["dpo", "dpo, confidence", "aot", "reward", "dapo", "gspo", "reinforce++ baseline", "sft"]
FAST += ["ppo, shared", "online, all pairs", "online, aot"]
pytestmark = pytest.mark.usefixtures("registries_as_before", "own_tables")


@pytest.fixture(scope="module")
def run(tmp_path_factory, request):
    """A function that trains a case under a split, each only once; those on two processes in launches of many."""
    models, known = tmp_path_factory.mktemp("models"), {}
    save_tiny_model(models / "model")
    rollout_once.save_policy(str(models / "model"), models / "policy")

    def of(name: str, split: str) -> Run:
        if (name, split) not in known and SPLITS[split][0] == 1:
            known[name, split] = train_once.complete(
                specification(name, split, models), tmp_path_factory.mktemp("run")
            )
        elif (name, split) not in known:
            items = [item for item in request.session.items if item.module is request.module]
            asked = [item.callspec.params for item in items if hasattr(item, "callspec")]
            names = [params["name"] for params in asked if params.get("split") == split]
            for start in range(0, len(names), PER_LAUNCH):
                part = names[start : start + PER_LAUNCH]
                specs = {each: specification(each, split, models) for each in part}
                runs = train_once.train_under(None, specs, tmp_path_factory.mktemp("spread"))
                known.update({(each, split): one for each, one in runs.items()})
        return known[name, split]

    return of


def marked(name: str, split: str):
    marks = [] if name in FAST and SPLITS[split][0] == 1 else pytest.mark.slow
    return pytest.param(name, split, marks=marks, id=f"{name}-{split}")


@pytest.mark.parametrize(
    ("name", "split"),
    [
        marked(name, split)
        for split, (*_, budget) in SPLITS.items()
        for name in (OWN if budget == "off" else WITH_BUDGET)
        if split != "1 x 8"
    ],
)
def test_the_split_changes_nothing(name, split, run):
    """Accumulated, on two processes, and in passes, of which there are fewer than micro-batches."""
    split_run, whole = run(name, split), run(name, "1 x 8")
    # A column of the dataset, such as the confidence, reaches the trainer in float32.
    assert train_once.relative_difference(split_run.change, whole.change) < (1e-6 if "confidence" in name else 1e-9)
    different = {name: value for name, value in metric_differences(split_run, whole).items() if value > 1e-7}
    assert not different
    assert len(whole.logs) == STEPS and len(whole.evaluation) > 4
    if name.endswith("uneven") and split == "2 x 1 x 4 in passes":
        # Processes have exchanged groups of responses, which stay whole.
        (groups,), (first, second) = whole.facts["groups"], split_run.facts["groups"]
        assert sorted(first + second) == groups and groups[: len(groups) // 2] not in (first, second)


# One of each way in which passes are divided, and in which a step scores its rows ahead.
UNDER_FSDP2 = ["dpo", "dpo, confidence", "aot", "reward", "grpo, uneven", "dapo, uneven", "gspo, uneven"]


@pytest.mark.slow
def test_passes_under_fsdp2_change_nothing(tmp_path):
    """Parameters, gradient norms and whatever else is logged; gradients are clipped, and models are packed."""
    save_tiny_model(tmp_path / "model")
    rollout_once.save_policy(str(tmp_path / "model"), tmp_path / "policy")

    def clipped(name: str, split: str) -> dict:
        spec = specification(name, split, tmp_path)
        spec = {key: value for key, value in spec.items() if key not in ("held_out", "win_rate")}
        return {**spec, "args": {**spec["args"], "max_grad_norm": 1.0}}

    specs = {name: clipped(name, "2 x 1 x 4 in passes") for name in UNDER_FSDP2}
    sharded = train_once.train_under(train_once.FSDP2_ON_THE_CPU, specs, tmp_path / "sharded")
    for name, split_run in sharded.items():
        whole = train_once.complete(clipped(name, "1 x 8"), tmp_path / name)
        facts = split_run.facts
        assert facts["engine"] == "FSDP2" and facts["shards"] == len(split_run.parameters)
        assert 0 < facts["packed_tokens"] < facts["padded_tokens"]
        # Before the division into passes, processes exchange groups of responses.
        assert facts["groups"] != [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert train_once.relative_difference(split_run.change, whole.change) < (
            1e-6 if "confidence" in name else 1e-9
        )
        different = {key: value for key, value in metric_differences(split_run, whole).items() if value > 1e-7}
        assert not different, name
        assert max(entry["grad_norm"] for entry in whole.logs) > 1


def test_the_cases_can_tell(run):
    """Lengths that differ, a win rate that is not 0, 1/2 or 1, rewards that vary: with less, all splits agree."""
    logs = run("dapo", "1 x 8").logs
    assert logs[0]["completions/min_length"] < logs[0]["completions/max_length"]
    assert logs[0]["reward_std"] > 0.05
    assert max(entry["clip_ratio/region_mean"] for entry in logs) > 0.1
    assert run("dpo", "1 x 8").evaluation["win_rate"] not in (0.0, 0.5, 1.0)
    skipped = [entry["skipped_updates"] for entry in run("grpo, a reward not finite", "1 x 8").logs]
    assert skipped == [0, 0, 1, 2, 2]
    shuffled = run("dpo, shuffled", "1 x 8").logs
    assert shuffled[0]["loss"] != pytest.approx(run("dpo", "1 x 8").logs[0]["loss"], rel=1e-3)


@pytest.mark.parametrize("name", ["trl: aot_unpaired", "trl: grpo, bnpo"])
def test_the_measure_sees_a_dependence(name, run):
    """TRL sorts, and takes means over tokens, within a micro-batch."""
    whole, split = run(name, "1 x 8"), run(name, "1 x 2 x 4")
    assert train_once.relative_difference(split.change, whole.change) > 0.05


# ---- The pieces ----


class OneProcess:
    """What `StepMetrics` sees of accelerate on one process."""

    device = torch.device("cpu")
    sync_gradients = False

    @staticmethod
    def gather(tensor):
        return tensor


class Base:
    """A trainer of TRL's, as far as its metrics go."""

    def __init__(self):
        self.model = torch.nn.Linear(1, 1)
        self.accelerator = OneProcess()
        self._metrics = {"train": {}, "eval": {}}
        self.logged = []

    def training_step(self, *args, **kwargs):
        self.add_metrics(*args, **kwargs)

    def log(self, logs, start_time=None):
        mode = "train" if self.model.training else "eval"
        self.logged.append({**logs, **{name: sum(v) / len(v) for name, v in self._metrics[mode].items()}})
        self._metrics[mode].clear()


class Counted(StepMetrics, Base):
    pass


def add_step(trainer, *micro_batches: tuple[float, float], name: str = "entropy") -> None:
    for index, numbers in enumerate(micro_batches):
        trainer.accelerator.sync_gradients = index == len(micro_batches) - 1
        step = trainer.training_step if trainer.model.training else trainer.add_metrics
        step({name: tuple(map(torch.tensor, numbers))})


def test_extremes_are_of_the_whole_step_and_leave_out_what_is_not_a_number():
    trainer, nothing = Counted(), (torch.tensor(0.0), torch.tensor(0.0))
    for low, high, last in ((0.2, math.nan, False), (math.nan, 0.4, False), (0.1, 0.3, True)):
        trainer.accelerator.sync_gradients = last
        extremes = {"low_min": torch.tensor(low), "high_max": torch.tensor(high)}
        trainer.training_step({"entropy": nothing}, extremes=extremes)
    trainer.log({"loss": 1.0})
    assert (trainer.logged[0]["low_min"], trainer.logged[0]["high_max"]) == pytest.approx((0.1, 0.4))


def test_a_step_counts_once_however_many_micro_batches_it_has():
    """Sums 1 of 2 tokens and 1.6 of 8 are .26, where the mean of the means .5 and .2 is .35. A further step of .6 in
    one micro-batch: .43 is logged. So it is of a held-out loss.
    """
    trainer = Counted()
    add_step(trainer, (1.0, 2.0), (1.6, 8.0))
    add_step(trainer, (3.0, 5.0))
    trainer.log({"loss": 1.0})
    # And nothing is left for the next. The mean over nothing is TRL's 0.
    add_step(trainer, (0.5, 5.0), (1.5, 5.0))
    trainer.log({"loss": 1.0})
    add_step(trainer, (0.0, 0.0))
    trainer.log({"loss": 1.0})
    assert [entry["entropy"] for entry in trainer.logged] == pytest.approx([0.43, 0.2, 0])
    trainer.model.eval()
    add_step(trainer, (1.0, 2.0), (1.6, 8.0), name="loss")
    trainer.log({"eval_loss": 0.35, "eval_runtime": 7.0})
    assert trainer.logged[-1] == pytest.approx({"eval_loss": 0.26, "eval_runtime": 7.0})


@pytest.mark.slow
def test_repeated_rows_count_once(tmp_path):
    """Of five held-out rows, two processes repeat three or five; a short last batch of one process repeats none."""
    save_tiny_model(tmp_path / "model")

    def spec(name: str, rows: int) -> dict:
        args = {**CASES[name]["args"], "max_steps": 1, "per_device_eval_batch_size": rows}
        return {**CASES[name], "win_rate": False, "model": str(tmp_path / "model"), "args": args}

    names, held_out = ("dpo", "aot", "reward", "sft"), pairs(5, seed=9)
    specs = {f"{name}-{rows}": {**spec(name, rows), "held_out": held_out} for name in names for rows in (2, 5)}
    for rows in (2, 5):
        smoothed = {**specs[f"sft-{rows}"]["args"], "label_smoothing_factor": 0.1}
        specs[f"sft, smoothed-{rows}"] = {**specs[f"sft-{rows}"], "args": smoothed}
    names = (*names, "sft, smoothed")
    spread = train_once.train_under(None, specs, tmp_path / "spread")
    for name in names:
        whole, alone = ({**specs[f"{name}-{rows}"]} for rows in (5, 2))
        for one in (whole, alone):
            one["args"] = {**one["args"], "gradient_accumulation_steps": 2}
        expected = train_once.complete(whole, tmp_path / f"whole-{name}")
        for run in (spread[f"{name}-2"], spread[f"{name}-5"], train_once.complete(alone, tmp_path / f"alone-{name}")):
            assert not {key: value for key, value in metric_differences(run, expected).items() if value > 1e-7}, name
