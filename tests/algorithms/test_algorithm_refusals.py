"""Settings of an algorithm that contradict its name or one another, and values out of range."""

from __future__ import annotations

import pytest

from trl_ext.algorithms import PolicyObjective, algorithms

NAMES = list(algorithms)


@pytest.mark.parametrize(
    "name, overrides, flags",
    [
        ("gspo", {"epsilon": 0.2}, "--algorithm gspo and --epsilon 0.2"),
        ("grpo", {"surrogate": "reinforce"}, "--surrogate reinforce and --ratio token"),
        (
            "grpo",
            {"ratio": "sequence", "aggregation": "token_mean"},
            "--ratio sequence and --aggregation token_mean",
        ),
        ("grpo", {"ratio_cap": 5.0}, "--ratio_cap 5.0 and --surrogate clip"),
        ("cispo", {"epsilon": 0.2}, "--epsilon 0.2 and --surrogate cispo"),
        ("grpo_no_clip", {"dual_clip": 3.0}, "--dual_clip 3.0 and --surrogate no_clip"),
        ("dr_grpo", {"std_ddof": 1}, "--std_ddof 1 and --advantage group_centered"),
        ("grpo", {"loss_constant": 256}, "--loss_constant 256 and --aggregation sequence_mean"),
        ("dr_grpo", {"kl_in": "reward"}, "--kl_in reward and --beta 0.0"),
        ("dr_grpo", {"kl_estimator": "k1"}, "--kl_estimator k1 and --beta 0.0"),
        ("dapo", {"kl_ratio_correction": True}, "--kl_ratio_correction True and --beta 0.0"),
        ("dapo", {"kl_aggregation": "token_mean"}, "--kl_aggregation token_mean and --beta 0.0"),
        ("grpo", {"beta": 0.0, "kl_estimator": "k2"}, "--kl_estimator k2 and --beta 0.0"),
        ("rloo", {"beta": 0.0, "kl_in": "reward"}, "--kl_in reward and --beta 0.0"),
        ("grpo", {"kl_in": "reward"}, "--kl_in reward and --kl_estimator k3"),
        ("rloo", {"kl_estimator": "k2"}, "--kl_in reward and --kl_estimator k2"),
        (
            "grpo",
            {"kl_estimator": "k2", "kl_ratio_correction": True},
            "--kl_ratio_correction True and --kl_estimator k2",
        ),
    ],
)
def test_contradictions_name_both_flags(name, overrides, flags):
    with pytest.raises(ValueError) as refusal:
        PolicyObjective(name, **overrides)
    message = str(refusal.value)
    assert message.startswith(flags) and "contradict each other: " in message and "\n" not in message
    assert "use --" in message or "leave it out" in message or "give --epsilon_high" in message


@pytest.mark.parametrize("name", NAMES)
def test_what_a_refusal_suggests_is_possible(name):
    """Every value that a name rules out: the message's last suggestion is a combination that runs."""
    choices = {
        "advantage": ["group_normalized", "group_centered", "leave_one_out", "no_baseline"],
        "ratio": ["token", "sequence", "none"],
        "surrogate": ["clip", "no_clip", "cispo", "reinforce"],
        "aggregation": ["sequence_mean", "token_mean", "constant", "sum"],
    }
    for flag, (permitted, _) in algorithms[name].fixed.items():
        assert PolicyObjective(name).to_dict()[flag] in permitted
        for value in set(choices[flag]) - set(permitted):
            with pytest.raises(ValueError, match=f"--algorithm {name} and --{flag} {value} contradict") as refusal:
                PolicyObjective(name, **{flag: value})
            assert "contradict each other: " in str(refusal.value) and "\n" not in str(refusal.value)
            suggestion = str(refusal.value).split("or --algorithm ")[-1].split()
            settings = dict(zip([f.removeprefix("--") for f in suggestion[1::2]], suggestion[2::2], strict=True))
            assert PolicyObjective(suggestion[0], **settings).to_dict()[flag] == value


@pytest.mark.parametrize(
    "overrides, message",
    [
        ({"epsilon": -0.1}, "--epsilon must be a number from 0 up, got -0.1"),
        ({"beta": -1.0}, "--beta must be a number from 0 up, got -1.0"),
        ({"dual_clip": 1.0}, "--dual_clip must be above 1.*got 1.0"),
        ({"surrogate": "cispo", "ratio_cap": 0.2}, "--ratio_cap must be at least 1: it is the cap itself.*got 0.2"),
        ({"std_ddof": 2}, "--std_ddof must be 0 .population. or 1 .sample., got 2"),
        ({"advantage_clip": 0.0}, "--advantage_clip must be positive"),
        ({"aggregation": "constant", "loss_constant": 0}, "--loss_constant must be positive, got 0"),
        ({"aggregation": "token_maen"}, "unknown --aggregation 'token_maen'; did you mean 'token_mean'. Known: seq"),
        ({"advantage": "group_normalised"}, "unknown --advantage .* did you mean 'group_normalized'"),
        ({"ratio": "tokens"}, "unknown --ratio 'tokens'; did you mean 'token'. Known: token, sequence, none"),
        ({"epsilonn": 0.1}, "no setting 'epsilonn'; did you mean 'epsilon'"),
        ({"options": {"clip_high": 0.5}}, "reads 'clip_high' from the setting epsilon_high: give that"),
        ({"options": {"strength": 1.0}}, "'clip' has no option 'strength'"),
        ({"surrogate": "sapo", "options": {"temperature_pso": 1.0}}, "did you mean 'temperature_pos'"),
    ],
)
def test_values_out_of_range_and_unknown_names(overrides, message):
    with pytest.raises(ValueError, match=message):
        PolicyObjective("grpo", **overrides)


def test_an_unknown_algorithm():
    with pytest.raises(ValueError, match="unknown policy algorithm 'dr_grop'; did you mean 'dr_grpo'. Known: berkel"):
        PolicyObjective("dr_grop")


def test_combinations_that_no_name_rules_out():
    """GSPO with a sum, GSPO without its name, RLOO with PPO's clip, RLOO without KL."""
    assert PolicyObjective("grpo", ratio="sequence", aggregation="sum").ratio == "sequence"
    clipped = PolicyObjective("rloo", ratio="token", surrogate="clip")
    assert (clipped.epsilon, clipped.epsilon_high) == (0.2, 0.2)
    assert not PolicyObjective("rloo", beta=0.0).needs_reference
    assert PolicyObjective("dr_grpo", beta=0.01, kl_in="reward", kl_estimator="k1").kl_in == "reward"
    assert PolicyObjective("grpo", surrogate="cispo").ratio_cap == 5.0
    assert PolicyObjective("gspo", epsilon=0.2, epsilon_high=0.2).epsilon_high == 0.2
    assert PolicyObjective("grpo", epsilon=0.1).epsilon_high == 0.1
    assert PolicyObjective("dapo", epsilon=0.1).epsilon_high == 0.28
    assert PolicyObjective("grpo", surrogate="reinforce", ratio="none").epsilon is None
