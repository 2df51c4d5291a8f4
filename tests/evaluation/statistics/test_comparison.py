"""A policy against its base, and a reward model against labels: values worked by hand, and who the base is."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from tests.support.refusals import assert_refused
from tests.support.tiny import pairs
from tests.support.train_once import build, parameters
from trl_ext.evaluation import (
    approximate_kl,
    best_of_n,
    compare_generations,
    join_pair_scores,
    preference_metrics,
    reward_metrics,
    true_order_metrics,
    wilson_interval,
)
from trl_ext.evaluation.judging.score_judges import GroundTruthJudge
from trl_ext.held_out.generations import GenerationEvaluation, GenerationSettings, pair_metrics, score_pairs
from trl_ext.rollouts import Generation
from trl_ext.trainers.policies import base_policy, remember_base, trained_policy


def test_preference_metrics_by_hand():
    """Token log-probabilities of three pairs; sums and means disagree on pair 0, and pair 2 is a tie by both.

    pair  chosen              rejected        sums        means
    0     -1 -1 -1 (3 tokens) -2              -3 < -2     -1 > -2
    1     -1                  -4 -2           -1 > -6     -1 > -3
    2     -1 -3               -2 -2           -4 = -4     -2 = -2

    Log-ratios: chosen -3+4=1, -1+1=0, -4+6=2; rejected -2+2=0, -6+5=-1, -4+3=-1; margins 1, 1, 3.
    """
    chosen, rejected, ref_chosen, ref_rejected = (
        [torch.tensor([float(value) for value in values]) for values in side]
        for side in (
            ([-1, -1, -1], [-1], [-1, -3]),
            ([-2], [-4, -2], [-2, -2]),
            ([-2, -1, -1], [-1], [-3, -3]),
            ([-2], [-3, -2], [-1, -2]),
        )
    )
    metrics = preference_metrics(join_pair_scores(chosen, rejected, ref_chosen, ref_rejected))
    assert metrics["n"] == 3
    for name, accuracy, margin, ties in (
        ("summed", 1 / 3, (-1 + 5 + 0) / 3, 1),
        ("mean", 2 / 3, (1 + 2 + 0) / 3, 1),
        ("reference_corrected", 1.0, (1 + 1 + 3) / 3, 0),
    ):
        found = metrics[name]
        assert (found["accuracy"], found["margin"]) == pytest.approx((accuracy, margin)), "ties count as wrong"
        assert found["ties"] == ties
    # Wilson for 3 of 3: n / (n + z^2) = 3 / (3 + 3.841459).
    assert metrics["reference_corrected"]["low"] == pytest.approx(3 / 6.841459, abs=1e-6)
    assert "reference_corrected" not in preference_metrics(join_pair_scores(chosen, rejected))


class TestApproximateKL:
    def test_by_hand(self):
        """Two responses. Token differences d: (ln 2, 0) and (-ln 2); k3 = e^-d - 1 + d.

        d = ln 2: 1/2 - 1 + 0.693147 = 0.193147; d = 0: 0; d = -ln 2: 2 - 1 - 0.693147 = 0.306853.
        Totals 0.193147 and 0.306853: mean 0.25, sample standard deviation 0.0804, half width 12.7062 * 0.0804 /
        sqrt 2.
        """
        ln2 = math.log(2)
        policy = [torch.tensor([-1.0, -2.0]), torch.tensor([-3.0])]
        base = [torch.tensor([-1.0 - ln2, -2.0]), torch.tensor([-3.0 + ln2])]
        estimate = approximate_kl(policy, base)
        assert estimate["mean"] == pytest.approx(0.25, abs=1e-6)
        assert estimate["per_token"] == pytest.approx(0.5 / 3, abs=1e-6)
        half_width = 12.7062 * (0.306853 - 0.193147) / math.sqrt(2) / math.sqrt(2)
        assert estimate["high"] - estimate["mean"] == pytest.approx(half_width, abs=1e-4)
        assert estimate["n"] == 2

    def test_expected_value_is_the_divergence_of_the_whole_response(self):
        """Two tokens, the second drawn depending on the first: enumerate all four responses and weigh them."""
        policy_first, base_first = [0.7, 0.3], [0.4, 0.6]
        policy_second, base_second = [[0.2, 0.8], [0.5, 0.5]], [[0.3, 0.7], [0.9, 0.1]]
        truth = expected = 0.0
        for a in (0, 1):
            for b in (0, 1):
                p = [policy_first[a], policy_second[a][b]]
                q = [base_first[a], base_second[a][b]]
                probability = p[0] * p[1]
                truth += probability * (math.log(p[0] * p[1]) - math.log(q[0] * q[1]))
                one = approximate_kl([torch.tensor(p).double().log()], [torch.tensor(q).double().log()])
                expected += probability * one["mean"]
        assert expected == pytest.approx(truth, rel=1e-6)

    @pytest.mark.parametrize(
        ("log_ratios", "mean", "half_width", "estimator"),
        [
            # k3 is 1.135 three times and e^3 - 4 = 16.086: k1 varies less, with a deviation of 5/2; t is 3.182446.
            ([2.0, 2.0, 2.0, -3.0], 0.75, 3.182446 * 2.5 / 2, "k1"),
            # The policy gives 1 to a token to which the base gives 1/2: log 2, where k3 says log 2 - 1/2.
            ([math.log(2)] * 8, math.log(2), 0.0, "k1"),
            # k3 is e^-0.1 - 0.9 = 0.004837 and e^0.1 - 1.1 = 0.005171, and k1 varies far more.
            ([0.1, -0.1] * 2, 0.005004, None, "k3"),
            ([0.0, 0.0], 0.0, 0.0, None),
        ],
    )
    def test_the_estimator_is_the_one_that_varies_less(self, log_ratios, mean, half_width, estimator):
        policy = [torch.tensor([-1.0])] * len(log_ratios)
        estimate = approximate_kl(policy, [torch.tensor([-1.0 - log_ratio]) for log_ratio in log_ratios])
        assert estimate["mean"] == pytest.approx(mean, abs=1e-6)
        assert estimator in (None, estimate["estimator"])
        if half_width is not None:
            bounds = mean - half_width, mean + half_width
            assert (estimate["low"], estimate["high"]) == pytest.approx(bounds, abs=1e-5)


def test_compared_generations_by_hand():
    """Scored by length, less 2 if cut: 3 to 1, 2 to 2, and 4 - 2 = 2 to 3: a win, a tie, a loss."""

    def score(prompt: str, response: str, finished: bool = True) -> float:
        return len(response) - (0 if finished else 2)

    def generations(*texts: str) -> list[Generation]:
        return [Generation([1], list(range(len(text))), text, text != "cccc") for text in texts]

    texts = generations("aaa", "bb", "cccc"), generations("a", "bb", "ccc")
    rows = [
        {"row_id": str(i), "prompt": [{"role": "user", "content": f"q{i}"}], "kind": "odd" if i % 2 else "even"}
        for i in range(3)
    ]
    judged = {"judge": GroundTruthJudge(score), "score_function": score}
    comparison = compare_generations(rows, *texts, **judged)
    assert [row["outcome"] for row in comparison.rows] == ["candidate", "tie", "base"]
    assert [row["score"] for row in comparison.rows] == [3, 2, 2]
    summary = comparison.summary
    assert summary["win_rate"]["half"]["rate"] == pytest.approx(0.5)
    assert (summary["win_rate"]["agreed"]["rate"], summary["win_rate"]["agreed"]["n"]) == (0.5, 2)
    assert summary["score"]["policy"] == pytest.approx(7 / 3) and summary["score"]["base"] == pytest.approx(2)
    # Gains 2, 0, -1: mean 1/3, sample variance (25/9 + 1/9 + 16/9) / 2 = 7/3; t with two degrees is 4.302653.
    gain = summary["score"]["gain"]
    assert gain["mean"] == pytest.approx(1 / 3)
    assert gain["high"] - gain["mean"] == pytest.approx(4.302653 * math.sqrt(7 / 3 / 3))
    kinds = {"even": {"policy": 2.5, "base": 2.0}, "odd": {"policy": 2.0, "base": 2.0}}
    assert summary["score"]["by_kind"] == kinds
    assert summary["generations"]["policy"]["truncated_fraction"] == pytest.approx(1 / 3)
    summary = compare_generations([{**row, "prompt": "q"} for row in rows], *texts).summary
    assert summary["win_rate"] is summary["score"] is None, "without a judge and a score"


class TestBasePolicy:
    """Whatever was trained, `base_policy` answers as the model that training began from, and leaves the policy be."""

    @pytest.mark.parametrize(
        "spec",
        [
            {"trainer": "DPOTrainer"},
            {"trainer": "DPOTrainer", "args": {"precompute_ref_log_probs": True}},
            {"trainer": "SimPOTrainer"},
            {"trainer": "DPOTrainer", "args": {"sync_ref_model": True, "ref_model_sync_steps": 1}},
            {"trainer": "DPOTrainer", "lora": True},
        ],
        ids=["reference model", "precomputed", "reference-free", "synchronised reference", "adapter"],
    )
    def test_is_the_model_before_training(self, spec, tiny_model_path, tmp_path):
        from transformers import AutoModelForCausalLM

        spec = {**spec, "model": tiny_model_path, "args": {"learning_rate": 0.1, "beta": 0.5, **spec.get("args", {})}}
        trainer = build(spec, str(tmp_path))
        remember_base(trainer)
        trainer.train()
        ids = torch.arange(3, 40).unsqueeze(0)
        logits = lambda model: model.eval()(input_ids=ids).logits.detach()  # noqa: E731
        original = logits(AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float64))
        with trained_policy(trainer) as policy:
            trained = logits(policy)
        with base_policy(trainer) as base:
            assert torch.equal(logits(base), original)
        with trained_policy(trainer) as policy:
            assert torch.equal(logits(policy), trained)
        assert (trained - original).abs().max() > 1e-3

    def test_an_error_leaves_the_policy_as_it_was(self, tiny_model_path, tmp_path):
        trainer = build({"trainer": "SimPOTrainer", "model": tiny_model_path}, str(tmp_path))
        with pytest.raises(ValueError, match="call remember_base"), base_policy(trainer):
            pass
        remember_base(trainer)
        trainer.train()
        before = parameters(trainer)
        with pytest.raises(RuntimeError, match="in between"), base_policy(trainer):
            raise RuntimeError("in between")
        after = parameters(trainer)
        assert all(torch.equal(before[name], after[name]) for name in before)

    @pytest.mark.slow
    @pytest.mark.parametrize("spec", [{"trainer": "SimPOTrainer"}, {"trainer": "DPOTrainer", "lora": True}])
    def test_compiled(self, spec, tiny_model_path, tmp_path):
        compiled = {"torch_compile": True, "torch_compile_backend": "eager"}
        trainer = build({**spec, "model": tiny_model_path, "args": compiled}, str(tmp_path))
        remember_base(trainer)
        ids = torch.arange(3, 40).unsqueeze(0)
        with base_policy(trainer) as base:
            before = base.eval()(input_ids=ids).logits.detach()
        trainer.train()
        with base_policy(trainer) as base:
            assert torch.equal(base.eval()(input_ids=ids).logits, before)

    @pytest.mark.parametrize(
        "spec",
        [
            {"trainer": "DPOTrainer", "args": {"bf16": True}},
            {"trainer": "SimPOTrainer", "args": {"bf16": True}},
            {"trainer": "SimPOTrainer", "lora": True, "args": {"bf16": True}},
        ],
        ids=["reference model", "reference-free", "adapter"],
    )
    def test_before_training_there_is_nothing_between_them(self, spec, tiny_model_path, tmp_path):
        """In mixed precision too: both models are run alike, so that the KL is 0 and every prompt is a tie.

        The sampler's log-probabilities are those of a plain pass up to rounding.
        """

        trainer = build({**spec, "model": tiny_model_path, "pairs": 4}, str(tmp_path))
        if spec.get("lora"):
            for name, parameter in trainer.model.named_parameters():
                if "lora_B" in name:
                    parameter.data.zero_()
        remember_base(trainer)
        prompts = [{"row_id": row["row_id"], "prompt": row["prompt"]} for row in pairs(4)]
        settings = GenerationSettings(max_prompt_tokens=None, max_new_tokens=6)
        comparison = GenerationEvaluation(trainer, prompts, settings, judge=GroundTruthJudge(lambda p, r, **k: len(r)))
        summary = comparison.compare().summary
        assert summary["kl"]["mean"] == pytest.approx(0.0, abs=1e-9)
        assert summary["win_rate"]["n_ties"] == 4
        pairs_metrics = pair_metrics(score_pairs(trainer, trainer.train_dataset))
        assert pairs_metrics["before"]["summed"] == pairs_metrics["after"]["summed"]
        assert pairs_metrics["after"]["reference_corrected"]["margin"] == 0.0

    def test_prompts_and_stop_strings_are_those_of_rollouts(self, tiny_model_path, tmp_path):
        """The template's arguments reach the held-out prompts, and responses end where rollouts end."""
        spec = {"trainer": "GRPOTrainer", "model": tiny_model_path, "args": {"chat_template_kwargs": {"shout": True}}}
        trainer = build(spec, str(tmp_path))
        trainer.processing_class.chat_template = (
            "{% for message in messages %}{{ message.content | upper if shout else message.content }}{% endfor %}"
        )
        prompt = pairs(1)[0]["prompt"]
        settings = GenerationSettings(max_prompt_tokens=None, max_new_tokens=40, temperature=1.0, stop=("a", "e"))
        evaluation = GenerationEvaluation(trainer, [{"row_id": "0", "prompt": prompt}], settings)
        found = evaluation._generate(trainer.model, [prompt] * 8, 1.0, "", False)
        assert found[0].prompt_ids == trainer._tokenize_prompts([prompt])[0][0]
        assert trainer.processing_class.decode(found[0].prompt_ids) == prompt[-1]["content"].upper()
        stopped = [one.text for one in found if "a" in one.text or "e" in one.text]
        assert stopped and all(text[-1] in "ae" and not {*text[:-1]} & {*"ae"} for text in stopped)

    def test_the_base_answers_each_prompt_once(self, tiny_model_path, tmp_path, monkeypatch):
        spec = {"trainer": "DPOTrainer", "model": tiny_model_path, "args": {"learning_rate": 0.05}}
        trainer = build(spec, str(tmp_path))
        remember_base(trainer)
        prompts = [{"row_id": row["row_id"], "prompt": row["prompt"]} for row in pairs(4)]
        arguments = trainer, prompts, GenerationSettings(max_prompt_tokens=None, max_new_tokens=6, num_kl_prompts=3)
        evaluation = GenerationEvaluation(*arguments)
        generate, calls = evaluation._generate, []

        def counted(model, prompts, temperature, *rest):
            calls.append((len(prompts), temperature))
            return generate(model, prompts, temperature, *rest)

        def called(count):
            calls.clear()
            return evaluation.compare(count).summary, list(calls)

        monkeypatch.setattr(evaluation, "_generate", counted)
        summary, made = called(2)
        assert made == [(2, 0.0)] and summary["kl"]["mean"] == 0, "the base's, which are the policy's too"
        trainer.train()
        summary, made = called(2)
        assert made == [(2, 0.0), (2, 1.0)] and summary["kl"]["mean"] != 0
        whole, made = called(4)
        assert made == [(2, 0.0), (4, 0.0), (3, 1.0)] and whole["kl"]["n"] == 3, "two more of the base"
        assert GenerationEvaluation(*arguments).compare(4).summary == whole, "as if nothing had been kept"


# ---- Reward models ----

# P(the response with the higher score wins), and whether that is the chosen one.
CONFIDENCES = [(0.55, True), (0.62, False), (0.71, True), (0.78, True), (0.88, True), (0.93, True)]


def scores_of(confidences) -> tuple[list[float], list[float]]:
    """Scores with the given confidences: a margin of log(p / (1 - p)), negative where the wrong side is ahead."""
    margins = [math.log(p / (1 - p)) * (1 if correct else -1) for p, correct in confidences]
    return [5 + margin for margin in margins], [5.0] * len(margins)


def test_six_pairs_by_hand():
    """NLL: -(ln .55 + ln .38 + ln .71 + ln .78 + ln .88 + ln .93) / 6
        = (.597837 + .967584 + .342490 + .248461 + .127833 + .072571) / 6 = 2.356776 / 6.
    Brier: (.45^2 + .62^2 + .29^2 + .22^2 + .12^2 + .07^2) / 6
        = (.2025 + .3844 + .0841 + .0484 + .0144 + .0049) / 6 = .7387 / 6.
    ECE, bins of .1: |.55 - 1| + |.62 - 0| + |(.71 + .78) / 2 - 1| * 2 + |.88 - 1| + |.93 - 1|, over 6:
        (.45 + .62 + .51 + .12 + .07) / 6 = 1.77 / 6.
    """
    metrics = reward_metrics(*scores_of(CONFIDENCES), bins=5)
    assert metrics["n"] == 6
    assert metrics["accuracy"] == pytest.approx(5 / 6)
    assert (metrics["low"], metrics["high"]) == wilson_interval(5, 6)
    assert metrics["ties"] == 0
    assert metrics["nll"] == pytest.approx(0.392796, abs=1e-6)
    assert metrics["brier"] == pytest.approx(0.123117, abs=1e-6)
    assert metrics["ece"] == pytest.approx(0.295, abs=1e-6)
    assert [row["n"] for row in metrics["calibration"]] == [1, 1, 2, 1, 1]
    third = metrics["calibration"][2]
    assert (third["low"], third["high"]) == pytest.approx((0.7, 0.8))
    assert (third["confidence"], third["accuracy"]) == pytest.approx((0.745, 1.0))
    # Ten bins of .05, the default, have at most one pair each: the mean of |p - correct| is the same.
    metrics = reward_metrics(*scores_of([(p + 1e-9, correct) for p, correct in CONFIDENCES]))
    assert [row["n"] for row in metrics["calibration"]] == [0, 1, 1, 0, 1, 1, 0, 1, 1, 0]
    empty = metrics["calibration"][0]
    assert (empty["low"], empty["high"], empty["confidence"], empty["accuracy"]) == (0.5, 0.55, None, None)
    assert metrics["ece"] == pytest.approx(0.295, abs=1e-6)


def test_ties_count_as_wrong_and_certainty_is_finite():
    """Margins 0, 800 and -800: log 2, 0 and 800 nats; squares .25, 0 and 1."""
    metrics = reward_metrics(torch.tensor([1.0, 800.0, -400.0]), torch.tensor([1.0, 0.0, 400.0]), bins=10)
    assert (metrics["accuracy"], metrics["ties"]) == (pytest.approx(1 / 3), 1)
    assert metrics["margin"] == pytest.approx(0)
    assert metrics["nll"] == pytest.approx((math.log(2) + 800) / 3)
    assert metrics["brier"] == pytest.approx(1.25 / 3)
    # The tie is half certain and wrong; of the two certain ones half are right.
    assert metrics["ece"] == pytest.approx((0.5 + 2 * 0.5) / 3)


def test_refusals_and_a_warning(caplog):
    assert_refused(lambda: reward_metrics([1.0, math.nan], [0.0, 0.0]), "pair 1", "nan and 0.0")
    assert_refused(lambda: best_of_n([0.1, 0.2], [0.1, 0.2], 3), "n must lie between 1", "2, got 3")
    reward_metrics([1.0, 2.0], [0.0, 3.0])
    assert not caplog.records, "exactly one half is chance"
    reward_metrics([1.0, 2.0, 3.0], [0.0, 3.0, 4.0])
    assert "worse than chance" in caplog.text


def test_true_order():
    """True margins +, +, -, 0: the labels are right on 2 of 3; the scores on pairs 0 and 2, so also on 2 of 3."""
    metrics = true_order_metrics([2, 1, 1, 5], [1, 2, 3, 0], [0.9, 0.8, 0.2, 0.5], [0.1, 0.3, 0.6, 0.5])
    assert metrics == {
        "n": 3,
        "ties": 1,
        "accuracy": pytest.approx(2 / 3),
        "low": wilson_interval(2, 3)[0],
        "high": wilson_interval(2, 3)[1],
        "label_agreement": pytest.approx(2 / 3),
    }
    # A tie in the scores is wrong, too; and where the truth has only ties there is no rate.
    assert true_order_metrics([1.0], [1.0], [0.9], [0.1])["accuracy"] == 0
    assert true_order_metrics([1.0], [0.0], [0.5], [0.5])["accuracy"] is None


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_best_of_n_is_the_mean_over_all_subsets(n):
    """Also with equal proxy scores, of which one is picked at random; and several prompts are averaged."""
    generator = random.Random(n)
    proxy = [[generator.choice([0.0, 0.5, 1.0]) for _ in range(5)] for _ in range(3)]
    gold = [[generator.random() for _ in range(5)] for _ in range(3)]
    picks = []
    for own_proxy, own_gold in zip(proxy, gold, strict=True):
        for subset in itertools.combinations(range(5), n):
            best = max(own_proxy[i] for i in subset)
            tied = [own_gold[i] for i in subset if own_proxy[i] == best]
            picks.append(sum(tied) / len(tied))
    assert best_of_n(proxy, gold, n)["gold"] == pytest.approx(sum(picks) / len(picks))
    tensors = torch.tensor(proxy, requires_grad=True), torch.tensor(gold)
    assert best_of_n(*tensors, n)["gold"] == pytest.approx(sum(picks) / len(picks))
    assert best_of_n(*(one.bfloat16() for one in tensors), n)["proxy"] == best_of_n(proxy, gold, n)["proxy"]


@pytest.mark.parametrize(("count", "n"), [(1040, 520), (2048, 1024)])
def test_best_of_n_of_more_subsets_than_a_double_holds(count, n):
    """Gold 0 and 1 in equal parts, the ones on top by proxy: all but the C(N / 2, n) subsets of zeros pick a one.

    Of ranks 1 to N without ties, the best of n is (N + 1) n / (n + 1) on average.
    """
    half = count // 2
    zeros = math.comb(half, n) / math.comb(count, n)
    figures = best_of_n([0.0] * half + [1.0] * half, [0.0] * half + [1.0] * half, n)
    assert figures["gold"] == pytest.approx(1 - zeros, abs=1e-12)
    ranks = list(range(1, count + 1))
    assert best_of_n(ranks, ranks, n)["gold"] == pytest.approx((count + 1) * n / (n + 1), rel=1e-12)
