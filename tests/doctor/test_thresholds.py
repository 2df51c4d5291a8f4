"""Each threshold, by one value just above it and one just below."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from trl_ext.doctor import CHECKS
from trl_ext.doctor.examine import run_checks
from trl_ext.doctor.patient import Example, Patient, Sampled
from trl_ext.doctor.setup import frequency_loss

GAP, CUT = "sampling/sampling_logp_difference/mean", "completions/clipped_ratio"


def found(kind: str, rows: list[dict], moved=None, **settings) -> list[str]:
    """The names of what three logged steps and a configuration show."""
    logs = [{"step": step, "learning_rate": 1e-4, "grad_norm": 1.5, **row} for step, row in enumerate(rows, start=1)]
    patient = Patient(args=SimpleNamespace(learning_rate=1e-4, **settings), kind=kind, logs=logs)
    patient.moved = moved or {}
    report = run_checks(patient, ("settings", "steps"))
    return report.names + [note.name for note in report.notes]


@pytest.mark.parametrize(
    ("name", "kind", "metric", "above", "below"),
    [
        ("rewards-equal", "policy", "frac_reward_zero_std", (1.0, 0.9, 0.9), (1.0, 0.89, 0.9)),
        ("rewards-equal", "policy", "reward_std", (0.0, 1e-7, 0.0), (0.0, 2e-7, 0.0)),
        ("responses-truncated", "policy", CUT, (0.97, 0.9, 0.97), (0.97, 0.89, 0.97)),
        ("start-off-reference", "policy", "kl", (0.01, 10.1, 10.1), (0.01, 10.1, 9.9)),
        ("start-off-reference", "policy", "kl", (0.021, 0.5, 0.5), (0.02, 0.5, 0.5)),
        ("start-off-reference", "preference", "rewards/chosen", (-0.021, 0.5, 0.5), (-0.02, 0.5, 0.5)),
        ("reference-moves", "policy", "kl", (0.0, 0.0, 0.0), (0.0, 0.0, 1e-9)),
        ("reference-moves", "preference", "rewards/margins", (0.0, 1e-7, 1e-7), (0.0, 1e-7, 2e-7)),
        ("ratio-not-one", "policy", "clip_ratio/region_mean", (0.0011, 0.3, 0.3), (0.001, 0.3, 0.3)),
        ("ratio-not-one", "policy", GAP, (0.1, 0.21, 0.1), (0.1, 0.2, 0.1)),
        ("ratio-not-one", "policy", GAP, (0.01, 0.03, 0.051), (0.01, 0.03, 0.05)),
        ("ratio-not-one", "policy", GAP, (0.03, 0.1, 0.121), (0.03, 0.1, 0.12)),
        ("loss-is-zero", "policy", "loss", (1e-3, 0.5, 0.5), (1.1e-3, 0.5, 0.5)),
        ("weights-do-not-move", "sft", "grad_norm", (0.0, 0.0, 0.0), (0.0, 0.0, 1e-9)),
        ("weights-do-not-move", "sft", "grad_norm", (math.inf, math.nan, math.inf), (math.inf, math.nan, 1.0)),
    ],
)
def test_metrics(name, kind, metric, above, below):
    assert found(kind, [{metric: value} for value in above]) == [name]
    assert found(kind, [{metric: value} for value in below]) == []


@pytest.mark.parametrize(
    ("name", "kind", "above", "below"),
    [
        ("identical-samples", "policy", {"temperature": 0.05}, {"temperature": 0.06}),
        ("identical-samples", "policy", {"top_k": 1}, {"top_k": 2}),
        ("sampling-differs", "policy", {"top_p": 0.99}, {"top_p": 1.0}),
        ("sampling-differs", "policy", {"top_k": 20}, {"top_k": 0}),
        ("sampling-differs", "policy", {"min_p": 0.01}, {"min_p": None}),
        ("beta-off", "policy", {"beta": 3.1}, {"beta": 3.0}),
        ("beta-off", "preference", {"beta": 5.1}, {"beta": 5.0}),
        ("beta-off", "preference", {"beta": 0.0019}, {"beta": 0.002}),
    ],
)
def test_settings(name, kind, above, below):
    engine = {
        "num_generations": 4,
        "use_vllm": name == "sampling-differs",
        "vllm_importance_sampling_correction": True,
    }
    assert found(kind, [], **{**engine, **above}) == [name]
    assert found(kind, [], **{**engine, **below}) == []
    if name == "sampling-differs":
        assert found(kind, [], **{**engine, **above, "vllm_importance_sampling_correction": False}) == []


def test_watched_weights():
    assert found("sft", [{}] * 3, {"policy": 0.0}) == ["weights-do-not-move"]
    assert found("sft", [{}] * 3, {"policy": 1e-9}) == []
    assert found("preference", [{}] * 3, {"reference": 1e-9}) == ["reference-moves"]
    # In float16, steps without a finite gradient are skipped.
    assert found("sft", [{"grad_norm": math.inf}] * 3, {"policy": 0.0}, fp16=True) == []
    assert found("policy", [{"reward": 0.5, "reward_std": 0.0}] * 3) == ["rewards-equal"]


@pytest.mark.parametrize(("responses", "severity"), [(299, "warning"), (300, "error")])
def test_few_rewards_of_zero_are_a_warning(responses, severity):
    logs = [{"step": step, "reward": 0.0, "reward_std": 0.0} for step in (1, 2)]
    patient = Patient(args=None, kind="policy", logs=logs)
    patient.sampled = [Sampled(1, "p", str(index), {}) for index in range(responses)]
    (finding,) = run_checks(patient, ("steps",)).findings
    assert (finding.name, finding.severity) == ("rewards-equal", severity)


def test_rewards_of_right_responses():
    right = "1" * 3 + "0" * 10

    def parser(accuracy: str, form: str = "0" * 13, right: str = right) -> bool:
        patient = Patient(kind="policy")
        patient.answers = {"2 + 2": "4"}
        for answer, one, two in zip(right, accuracy, form, strict=True):
            rewards = {"accuracy": float(one), "format": float(two)}
            patient.sampled.append(Sampled(1, "2 + 2", f"It is {4 if answer == '1' else 5}.", rewards))
        return "parser-never-matches" in run_checks(patient, ("steps",)).names

    assert parser("0" * 13) and not parser("0" * 13, right="11" + "0" * 11)
    # A reward of the form is 0 in the first steps, and another one recognises a right response.
    assert not parser("1" + "0" * 12)


def rows_found(kind: str = "preference", count: int = 200, **columns) -> list[str]:
    """Findings in rows that are read in order; columns are functions of the index."""

    class Trainer(SimpleNamespace):
        def get_train_dataloader(self):
            return SimpleNamespace(batch_sampler=SimpleNamespace(sampler=range(count)))

    columns = {
        "prompt": lambda i: f"{i:03}",
        "chosen": lambda i: f"a{i:03}",
        "rejected": lambda i: f"b{i:03}",
        **columns,
    }
    rows = [{name: column(i) for name, column in columns.items()} for i in range(count)]
    patient = Patient(Trainer(train_dataset=rows, args=None), kind=kind)
    patient.examples = []
    return run_checks(patient, ("trainer",)).names


def test_pairs():
    def said(i):
        return [{"role": "assistant", "content": f"{i:03}"}]

    def repeated(period):
        return {"prompt": lambda i: "", "chosen": lambda i: f"{i % period:03}", "rejected": lambda i: "___"}

    def both_ways(count):
        return {
            "prompt": lambda i: f"{min(i, 199 - i) if i < count or i >= 200 - count else i:03}",
            "chosen": lambda i: "ab"[i < 100],
            "rejected": lambda i: "ab"[i >= 100],
        }

    assert rows_found() == []
    assert rows_found(rejected=lambda i: f"a{i:03}" if i % 50 == 0 else "b___") == ["pairs-contradict"]
    assert rows_found(rejected=lambda i: f"a{i:03}" if i % 51 == 1 else "b___") == ["pairs-contradict"]
    assert rows_found(rejected=lambda i: f"a{i:03}" if i % 70 == 0 else "b___") == []
    assert rows_found(chosen=lambda i: said(10**200) if i % 10 else "", rejected=said) == ["length-predicts-label"]
    assert rows_found(chosen=lambda i: said(10**200) if i % 9 else "", rejected=said) == []
    scores = {"score_rejected": lambda i: 0.5}
    assert rows_found(score_chosen=lambda i: float(i % 33 > 0), **scores) == ["labels-against-scores"]
    assert rows_found(score_chosen=lambda i: float(i % 40 > 0), **scores) == []
    assert rows_found(**repeated(159)) == ["duplicate-rows"]
    assert rows_found(**repeated(160)) == []
    assert "pairs-contradict" in rows_found(**both_ways(2))
    assert "pairs-contradict" not in rows_found(**both_ways(1))


def test_the_order_of_the_rows():
    # Random numbers, in a random order and with a drift; a source in two halves.
    noise = np.random.default_rng(0).normal(size=1000)
    for drift, names in ((0.0, []), (0.8, []), (1.6, ["rows-in-order"])):
        assert rows_found(count=1000, quality=lambda i, d=drift: float(noise[i] + d * i / 1000)) == names
    assert rows_found(source=lambda i: "ab"[i % 2]) == []
    assert rows_found(source=lambda i: "ab"[i // 100]) == ["rows-in-order"]
    assert rows_found(source=lambda i: "ab"[i // 25 % 2]) == ["rows-in-order"], "it is no trend"


def test_a_second_beginning_token_before_the_response():
    patient, begin = Patient(kind="sft"), 7
    patient.tokenizer = SimpleNamespace(bos_token_id=begin, bos_token="<s>", decode=str, eos_token_id=2)
    patient.stop_ids = {2}
    for ids, doubled in (
        ([7, 4, 7, 5, 2], True),
        ([7, 7, 4, 5, 2], True),
        ([7, 4, 5, 7, 2], False),
        ([4, 7, 5], False),
    ):
        patient.examples = [Example(ids, [index > 1 for index in range(len(ids))], False, {})]
        assert (CHECKS["begin-token-doubled"][3](patient) is not None) is doubled


def test_the_loss_by_frequencies():
    # The first response is scored by the counts of the second, 3 ones and 1 two, plus one each of 4 tokens.
    expected = -(2 * math.log(4 / 8) + math.log(2 / 8) + 3 * math.log(3 / 7) + math.log(2 / 7)) / 7
    assert frequency_loss([[1, 1, 2], [1, 1, 1, 2]], 4) == pytest.approx(expected)
