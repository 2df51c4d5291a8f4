"""The split does not change the result: parameters, what is logged, and a held-out evaluation, for every trainer.

Five optimizer steps on one batch of eight pairs, responses or demonstrations, as 1 process x 8 rows, 1 x 2 x 4
accumulated, 2 processes x 4 and 2 x 2 x 2. A difference of updates is the norm of the difference over the norm of the
whole change of the parameters. Everything is in float64, where only a mistake makes a difference of more than 1e-9.
"""

from __future__ import annotations

import math

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM

from tests.support import train_once
from tests.support.splits_once import CASES, STOCK, metric_differences, run_all, save_models, update_difference
from tests.support.tiny import independent_scores, pairs, perturbed, response_log_prob, token_ids
from trl_ext.losses import PreferenceScores
from trl_ext.trainers.metrics import StepMetrics
from trl_ext.trainers.preference.whole_batch import map_scores

OWN = [name for name in CASES if name not in STOCK]
# Not your own losses, and not sampled pairs.
WITH_BUDGET = [name for name in OWN if not name.startswith(("online", "sft", "vespo"))]
# One of each way in which rows are coupled; the others are slow tests.
FAST = ["dpo", "dpo, confidence", "aot", "reward", "dapo", "gspo", "reinforce++ baseline", "sft"]
FAST += ["ppo, shared", "online, all pairs", "online, aot"]
pytestmark = pytest.mark.usefixtures("registries_as_before", "own_tables")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    save_models(folder)
    return folder


@pytest.fixture(scope="module")
def alone(models, tmp_path_factory):
    """A function that trains a case in this process under a split, each only once."""
    known = {}

    def of(name: str, split: str):
        if (name, split) not in known:
            folder = tmp_path_factory.mktemp("alone")
            (known[name, split],) = run_all([(name, "sgd", split)], folder, models).values()
        return known[name, split]

    return of


def on_two_processes(test, split: str, models, tmp_path_factory, request):
    """The cases that a test asks for on two processes by name, in few launches."""
    items = [item for item in request.session.items if item.name.startswith(f"{test.__name__}[")]
    names = [item.callspec.params["name"] for item in items]
    runs = run_all([(name, "sgd", split) for name in names], tmp_path_factory.mktemp("spread"), models)
    return {name: run for (name, *_), run in runs.items()}


@pytest.fixture(scope="module")
def spread(models, tmp_path_factory, request):
    return on_two_processes(test_processes_change_nothing, "2 x 2 x 2", models, tmp_path_factory, request)


@pytest.fixture(scope="module")
def spread_in_passes(models, tmp_path_factory, request):
    test = test_token_budgets_on_processes_change_nothing
    return on_two_processes(test, "2 x 1 x 4 in passes", models, tmp_path_factory, request)


def check(name, run, whole) -> None:
    # A column of the dataset, such as the confidence, reaches the trainer in float32.
    assert update_difference(run, whole) < (1e-6 if "confidence" in name else 1e-9)
    different = {name: value for name, value in metric_differences(run, whole).items() if value > 1e-7}
    assert not different
    assert len(whole.logs) == 5 and len(whole.evaluation) > 4


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in FAST else pytest.mark.slow) for n in OWN])
def test_accumulation_changes_nothing(name, alone):
    check(name, alone(name, "1 x 2 x 4"), alone(name, "1 x 8"))


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_processes_change_nothing(name, alone, spread):
    check(name, spread[name], alone(name, "1 x 8"))


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in FAST else pytest.mark.slow) for n in WITH_BUDGET])
def test_token_budgets_change_nothing(name, alone):
    """Of four micro-batches, fewer passes are made."""
    check(name, alone(name, "1 x 2 x 4 in passes"), alone(name, "1 x 8"))


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_BUDGET)
def test_token_budgets_on_processes_change_nothing(name, alone, spread_in_passes):
    check(name, spread_in_passes[name], alone(name, "1 x 8"))


def test_the_cases_can_tell(alone):
    """Lengths that differ, a win rate that is not 0, 1/2 or 1, rewards that vary: with less, all splits agree."""
    logs = alone("dapo", "1 x 8").logs
    assert logs[0]["completions/min_length"] < logs[0]["completions/max_length"]
    assert logs[0]["reward_std"] > 0.05
    assert max(entry["clip_ratio/region_mean"] for entry in logs) > 0.1
    assert alone("dpo", "1 x 8").evaluation["win_rate"] not in (0.0, 0.5, 1.0)
    skipped = [entry["skipped_updates"] for entry in alone("grpo, a reward not finite", "1 x 8").logs]
    assert skipped == [0, 0, 1, 2, 2]
    shuffled = alone("dpo, shuffled", "1 x 8").logs
    assert shuffled[0]["loss"] != pytest.approx(alone("dpo", "1 x 8").logs[0]["loss"], rel=1e-3)


@pytest.mark.parametrize("name", ["trl: aot_unpaired", "trl: grpo, bnpo"])
def test_the_measure_sees_a_dependence(name, alone):
    """TRL sorts, and takes means over tokens, within a micro-batch."""
    whole, split = alone(name, "1 x 8"), alone(name, "1 x 2 x 4")
    assert update_difference(split, whole) > 0.05


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

    def log(self, logs, start_time=None):
        mode = "train" if self.model.training else "eval"
        self.logged.append({**logs, **{name: sum(v) / len(v) for name, v in self._metrics[mode].items()}})
        self._metrics[mode].clear()


class Counted(StepMetrics, Base):
    pass


def add_step(trainer, *micro_batches: tuple[float, float], name: str = "entropy") -> None:
    for index, numbers in enumerate(micro_batches):
        trainer.accelerator.sync_gradients = index == len(micro_batches) - 1
        trainer.add_metrics({name: tuple(map(torch.tensor, numbers))})


def test_extremes_are_of_the_whole_step_and_leave_out_what_is_not_a_number():
    trainer, nothing = Counted(), (torch.tensor(0.0), torch.tensor(0.0))
    for low, high, last in ((0.2, math.nan, False), (math.nan, 0.4, False), (0.1, 0.3, True)):
        trainer.accelerator.sync_gradients = last
        extremes = {"low_min": torch.tensor(low), "high_max": torch.tensor(high)}
        trainer.add_metrics({"entropy": nothing}, extremes=extremes)
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


# ---- Held-out losses of objectives that see a whole batch ----


@pytest.mark.parametrize(
    "arguments", [{"loss": "aot"}, {"loss": "aot_paired"}, {"weighting": ["confidence"]}], ids=str
)
def test_held_out_loss_is_of_all_pairs_as_one_batch(arguments, tiny_model_path, tmp_path):
    """Seven pairs in batches of three, of which none is sorted or normalised by itself; and the scores are let go."""
    rows = pairs(7, seed=6)
    spec = {"model": tiny_model_path, "reference_seed": 1, "reference_scale": 0.3}
    spec["args"] = {"beta": 0.2, "per_device_eval_batch_size": 3, **arguments}
    trainer = train_once.build(spec, str(tmp_path), eval_dataset=Dataset.from_list(rows))
    models = [AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32) for _ in range(2)]
    perturbed(models[1], seed=1, scale=0.3)
    scores = independent_scores(trainer.processing_class, *(model.double() for model in models), rows)
    scores.columns["avg_confidence"] = torch.tensor([row["avg_confidence"] for row in rows])
    expected = trainer.objective(scores).mean().item()
    apart = [trainer.objective(take(scores, part)).mean().item() for part in ([0, 1, 2], [3, 4, 5], [6])]
    assert abs((3 * apart[0] + 3 * apart[1] + apart[2]) / 7 - expected) > 1e-3 * expected
    for _ in range(2):
        metrics = trainer.evaluate()
        assert metrics["eval_loss"] == pytest.approx(expected, rel=1e-4)
        assert trainer.state.log_history[-1]["eval_loss"] == metrics["eval_loss"]
    assert trainer._held_out == []
    # Accuracy is over pairs as well, where the mean of three batches' means would count the last pair three times.
    accuracy = (scores.margin > 0).double().mean().item()
    assert metrics["eval_rewards/accuracies"] == pytest.approx(accuracy)


def take(scores: PreferenceScores, rows: list[int]) -> PreferenceScores:
    return map_scores(lambda tensor: tensor[rows], scores)


def test_held_out_loss_of_demonstrations_is_the_mean_over_their_tokens(tiny_model_path, tmp_path):
    """Five completions of different lengths in batches of two, against one unpadded row at a time."""
    rows = pairs(5, seed=3)
    spec = {"trainer": "SFTTrainer", "model": tiny_model_path, "dtype": "float32", "rows": rows, "held_out": rows}
    trainer = train_once.build({**spec, "args": {"per_device_eval_batch_size": 2}}, str(tmp_path))
    metrics = trainer.evaluate()
    plain = AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32).double()
    ids = [token_ids(trainer.processing_class, row) for row in rows]
    with torch.no_grad():
        sums = [response_log_prob(plain, prompt, chosen).item() for prompt, chosen, _ in ids]
    lengths = [len(chosen) for _, chosen, _ in ids]
    assert metrics["eval_loss"] == pytest.approx(-sum(sums) / sum(lengths), rel=1e-5)
    by_batch = [-sum(sums[i : i + 2]) / sum(lengths[i : i + 2]) for i in (0, 2, 4)]
    assert (2 * by_batch[0] + 2 * by_batch[1] + by_batch[2]) / 5 != pytest.approx(metrics["eval_loss"], rel=1e-3)
