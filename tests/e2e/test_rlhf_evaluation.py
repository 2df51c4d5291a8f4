"""The pipeline's data and evaluation: demonstrations, noisy labels, and the report."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from datasets import Dataset

from tools.toy_prompts import pool_of
from trl_ext.data import load_benchmark
from trl_ext.evaluation.submissions.assets import load_prompts
from trl_ext.runs.offline import demonstrations, shared_prompts
from trl_ext.runs.reward import training_pairs
from trl_ext.runs.studies.pipeline_evaluation import find_adversarial
from trl_ext.runs.studies.pipeline_report import pareto_points
from trl_ext.toy.prompts import parse


def test_the_front_of_reward_against_kl():
    """SFT stands at no divergence. `b` has less reward at more KL than `a`; the base was no start of a policy."""

    def model(name, kl, reward, true):
        estimate = {key: {"mean": v, "low": v - 0.1, "high": v + 0.1} for key, v in (("kl", kl), ("r", reward))}
        return {
            "name": name,
            "kl": None if name == "sft" else estimate["kl"],
            "rewards": {"r": estimate["r"]},
            "true_score": {"mean": true, "low": true, "high": true, "n": 4},
        }

    models = [model("base", 0.3, 9, 9), model("sft", 0, 0.5, 0.5), model("b", 2, 0.9, 0.2), model("a", 1, 1.0, 0.4)]
    points = pareto_points(models, "r")
    assert [(p["run"], p["kl"]["value"], p["on_front"]) for p in points] == [("sft", 0, 1), ("a", 1, 1), ("b", 2, 0)]
    # By the true score no policy is worth its divergence.
    assert [p["on_front"] for p in pareto_points(models, "true score")] == [True, False, False]


def test_the_embedded_adversarial_prompts():
    """Five families; what is graded is a prompt of the benchmark's test pool, and none is its prompt as a whole."""
    rows = load_prompts(find_adversarial("recipes/configs/toy/rlhf_adversarial.jsonl"))
    assert len(rows) == 31
    families = {row["family"] for row in rows}
    assert families == {"length_hack", "long", "contradictory", "out_of_vocabulary", "near_empty"}
    known = {row["prompt"][-1]["content"] for split in load_benchmark("toy").values() for row in split}
    for row in rows:
        assert row["prompt_text"] not in known
        assert bool(row["graded_as"]) == (row["family"] in ("length_hack", "long"))
        if row["graded_as"]:
            assert row["graded_as"] in row["prompt_text"]
            assert pool_of(row["graded_as"]) == "test" and parse(row["graded_as"])
        with pytest.raises(ValueError, match="unknown prompt"):
            parse(row["prompt_text"])


def test_label_noise_turns_the_share_that_is_asked_for():
    """Of the first 10 pairs, 0.25 are 2.5, rounded to the even 2: two are turned round, the others as they were."""
    pairs = Dataset.from_list([{"chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(20)])
    given = SimpleNamespace(num_train_pairs=10, label_noise=0.25, train_split="train_prefs")
    found = training_pairs(pairs, given, seed=3)
    turned = [i for i, row in enumerate(found) if row["chosen"] == f"bad {i}" and row["rejected"] == f"good {i}"]
    kept = [i for i, row in enumerate(found) if row["chosen"] == f"good {i}" and row["rejected"] == f"bad {i}"]
    assert (len(turned), len(kept)) == (2, 8)
    assert training_pairs(pairs, given, seed=3)["chosen"] == found["chosen"]
    given = SimpleNamespace(num_train_pairs=None, label_noise=0.0, train_split="train_prefs")
    assert training_pairs(pairs, given, seed=3)["chosen"] == pairs["chosen"]
    with pytest.raises(ValueError, match="num_train_pairs 21: 'train_prefs' has 20 pairs"):
        training_pairs(pairs, SimpleNamespace(num_train_pairs=21, label_noise=0.0, train_split="train_prefs"), 0)


def test_demonstrations_are_chosen_responses_or_references():
    prompt, answer = [{"role": "user", "content": "q"}], [{"role": "assistant", "content": "a"}]
    pairs = Dataset.from_list([{"row_id": "1", "prompt": prompt, "chosen": answer, "rejected": prompt}])
    assert demonstrations(pairs, "x")[0] == {"row_id": "1", "prompt": prompt, "completion": answer}
    prompts = Dataset.from_list([{"row_id": "1", "prompt": prompt, "reference_response_text": "a"}])
    assert demonstrations(prompts, "x")[0]["completion"] == answer
    plain = Dataset.from_list([{"row_id": "1", "prompt": "q:", "reference_response_text": " a"}] * 2)
    assert demonstrations(plain, "x", 1)["completion"] == [" a"]
    with pytest.raises(ValueError, match="num_examples 3: 'x' has 2 rows"):
        demonstrations(plain, "x", 3)
    with pytest.raises(ValueError, match="the split 'x' holds no demonstrations"):
        demonstrations(plain.remove_columns("reference_response_text"), "x")


def test_prompts_that_are_trained_on_are_counted():
    prompts = [[{"role": "user", "content": text}] for text in "abc"]
    assert shared_prompts(Dataset.from_dict({"prompt": prompts[:2]}), Dataset.from_dict({"prompt": prompts[1:]})) == 1
