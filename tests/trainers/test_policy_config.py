"""`PolicyConfig`: what it refuses and what it says then, group sizes and batches, and its command line."""

from __future__ import annotations

import dataclasses
import logging
import re

import pytest
from transformers import HfArgumentParser, TrainingArguments
from trl import TrlParser

import trl_ext
from tests.support.rollout_once import DEFAULTS, build, train
from trl_ext import PolicyConfig
from trl_ext.registry import policy_algorithms
from trl_ext.rollouts.generation import prompt_tokens
from trl_ext.trainers.policy import config as policy_config
from trl_ext.trainers.trl_settings import refuse_given

NAMED = {
    "GRPOConfig": "grpo",
    "DrGRPOConfig": "dr_grpo",
    "GSPOConfig": "gspo",
    "RLOOConfig": "rloo",
    "ReMaxConfig": "remax",
}
BUILT_IN = list(policy_algorithms)


pytestmark = pytest.mark.usefixtures("registries_as_before")


@pytest.fixture
def configure(tmp_path):
    def config(name: str = "PolicyConfig", **settings):
        return getattr(trl_ext, name)(**{**DEFAULTS, **settings}, output_dir=str(tmp_path))

    return config


# ---- Refusals: the flag, what is wrong, and a way out ----


def test_a_configuration_in_trls_words(configure):
    """Each says what our setting says; what a named algorithm is anyway may be said again."""

    def settings(name: str, **given) -> dict:
        return configure(name, num_generations=4, **given).build_objective().to_dict()

    assert settings("GRPOConfig", loss_type="grpo") == settings("GRPOConfig")
    said = settings("DrGRPOConfig", loss_type="dr_grpo", scale_rewards=False, importance_sampling_level="token")
    assert said == settings("DrGRPOConfig")
    assert settings("GSPOConfig", importance_sampling_level="sequence") == settings("GSPOConfig")
    assert settings("GRPOConfig", loss_type="dapo") == {**settings("GRPOConfig"), "aggregation": "token_mean"}
    said = settings("GRPOConfig", scale_rewards=True, use_bias_correction_kl=True, delta=3.0)
    own = {"std_ddof": 1, "advantage_eps": 1e-4, "kl_ratio_correction": True, "dual_clip": 3.0}
    assert said == {**settings("GRPOConfig"), **own}


@pytest.mark.parametrize("name, method", NAMED.items())
def test_a_named_configuration_is_its_algorithm(name, method, configure):
    assert configure(name, num_generations=4).algorithm == method
    other = "gspo" if method != "gspo" else "grpo"
    with pytest.raises(
        ValueError, match=f"{name} is the algorithm '{method}' and cannot be '{other}': use PolicyConfig"
    ):
        configure(name, algorithm=other)


def test_the_budgets_must_fit_the_context(policy_path, tmp_path):
    """The tiny model has 4096 positions: what the longest prompt leaves of them fits, one more does not."""
    trainer = build({"model": policy_path}, str(tmp_path))
    longest = max(len(prompt_tokens(trainer.processing_class, row["prompt"], 512)) for row in trainer.train_dataset)
    assert 0 < longest < 512
    build({"model": policy_path, "args": {"max_completion_length": 4096 - longest}}, str(tmp_path))
    with pytest.raises(ValueError, match="up to 4097 tokens, and the model's context holds 4096: lower --max_c"):
        build({"model": policy_path, "args": {"max_completion_length": 4097 - longest}}, str(tmp_path))


def test_a_configuration_of_another_trainer_is_refused(policy_path, tmp_path):
    trainer = build({"model": policy_path}, str(tmp_path))
    with pytest.raises(TypeError, match="GSPOTrainer takes a GSPOConfig, got PolicyConfig of trl_ext"):
        trl_ext.GSPOTrainer(trainer.model, len, args=trainer.args)


# ---- Group sizes and batches ----


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_group_of_one(name, configure):
    """Only where nothing is compared within a group; the default group size is the algorithm's."""
    if name in ("remax", "reinforce"):
        config = configure(algorithm=name, num_generations=1)
        assert (config.num_generations, config.num_generations_eval) == (1, 1)
        assert config.generation_batch_size == 8
        return
    with pytest.raises(
        ValueError, match=rf"'{name}' compares the responses to one prompt.*at least 2, or --algorithm"
    ):
        configure(algorithm=name, num_generations=1)


def test_the_group_size_is_the_algorithms(configure):
    sizes = {
        name: configure(algorithm=name, num_generations=None, per_device_train_batch_size=16).num_generations
        for name in ("grpo", "rloo", "remax", "dapo")
    }
    assert sizes == {"grpo": 8, "rloo": 4, "remax": 1, "dapo": 16}


def as_if_in_processes(count: int, monkeypatch) -> None:
    monkeypatch.setattr(policy_config, "world_size", lambda: count)
    monkeypatch.setattr(TrainingArguments, "world_size", property(lambda self: count))


def _accepted(configure, **settings) -> bool:
    try:
        configure(**settings)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(
    "rows, group, batch, nearest",
    [
        # Multiples of lcm(rows x processes, group), in one process and in two.
        (8, 4, 20, (24, 16)),
        (8, 4, 12, (16, 16)),
        (6, 4, 22, (24, 24)),
        (8, 3, 8, (24, 48)),
        (8, 6, 64, (72, 48)),
    ],
)
def test_a_batch_that_does_not_divide_names_the_nearest_that_does(
    rows, group, batch, nearest, processes, configure, monkeypatch
):
    """And it is: it is accepted, and nothing nearer is."""
    as_if_in_processes(processes, monkeypatch)
    settings = {"per_device_train_batch_size": rows, "num_generations": group}
    with pytest.raises(ValueError, match="generation_batch_size|num_generations") as caught:
        configure(**settings, generation_batch_size=batch)
    named = int(re.search(r"(?:nearest that does is|generation_batch_size) (\d+)(?:$|,)", str(caught.value)).group(1))
    assert _accepted(configure, **settings, generation_batch_size=named), caught.value
    distance = abs(named - batch)
    nearer = [size for size in range(batch - distance + 1, batch + distance) if size > 0]
    assert not [size for size in nearer if _accepted(configure, **settings, generation_batch_size=size)]
    if nearest[processes - 1] != named:
        assert abs(nearest[processes - 1] - batch) == distance


def test_a_greedy_baseline_needs_whole_groups_on_every_process(configure, monkeypatch):
    """Two processes of two rows hold one group of four together, but neither holds it whole."""
    as_if_in_processes(2, monkeypatch)
    settings = {"per_device_train_batch_size": 2, "num_generations": 4}
    assert configure(algorithm="grpo", **settings).generation_batch_size == 4
    with pytest.raises(ValueError, match="2 responses per process do not divide into groups of 4: .*nearest.* is 4"):
        configure(algorithm="remax", **settings)
    assert configure(algorithm="remax", **settings, generation_batch_size=8).steps_per_generation == 2


def test_fewer_prompts_than_a_rollout_holds_are_refused(policy_path, tmp_path):
    """A rollout of 16 responses in groups of 4 is of four prompts; three would train nothing at all."""
    spec = {"model": policy_path, "args": {"steps_per_generation": 2}}
    train({**spec, "prompts": 4}, str(tmp_path))
    with pytest.raises(ValueError, match="prompts"):
        train({**spec, "prompts": 3}, str(tmp_path))


# ---- What is not exact ----

OFF_POLICY = "has no importance ratio, and a rollout serves {} updates: all but the first are off-policy"
SEVERAL_ROLLOUTS = "an update spans several rollouts"


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"algorithm": "reinforce", "num_iterations": 2}, [f"reinforce {OFF_POLICY.format(2)}"]),
        ({"algorithm": "rloo", "steps_per_generation": 4}, [f"rloo {OFF_POLICY.format(4)}"]),
        ({"algorithm": "rloo", "gradient_accumulation_steps": 4}, []),
        ({"algorithm": "grpo", "num_iterations": 2}, []),
        ({"algorithm": "dapo", "gradient_accumulation_steps": 2, "steps_per_generation": 1}, [SEVERAL_ROLLOUTS]),
        ({"algorithm": "dapo", "gradient_accumulation_steps": 2, "steps_per_generation": 3}, [SEVERAL_ROLLOUTS]),
        ({"algorithm": "dapo", "gradient_accumulation_steps": 2, "steps_per_generation": 4}, []),
        (
            {"kl_aggregation": "token_mean", "gradient_accumulation_steps": 2, "steps_per_generation": 1},
            [SEVERAL_ROLLOUTS],
        ),
        ({"algorithm": "dr_grpo", "gradient_accumulation_steps": 2, "steps_per_generation": 1}, []),
        (
            # 3 micro-batches, in updates of 2: three updates of two rollouts, one of which holds parts of both.
            {"algorithm": "opo", "gradient_accumulation_steps": 2, "steps_per_generation": 3},
            [f"opo {OFF_POLICY.format(3)}", SEVERAL_ROLLOUTS],
        ),
        pytest.param(
            {
                "algorithm": "berkeley_grpo",
                "beta": 0.0,
                "gradient_accumulation_steps": 2,
                "steps_per_generation": 1,
            },
            [],
        ),
    ],
)
def test_what_is_not_exact_is_said(settings, said, configure, caplog):
    caplog.set_level(logging.WARNING)
    configure(**settings)
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("trl_ext")]
    assert len(lines) == len(said)
    assert all(text in line and "\n" not in line for text, line in zip(said, lines, strict=True))


# ---- Command line ----


@pytest.mark.parametrize("parser_class", [HfArgumentParser, TrlParser])
@pytest.mark.parametrize("name", ["PolicyConfig", *NAMED])
def test_command_line(parser_class, name, tmp_path):
    arguments = ["--output_dir", str(tmp_path), "--beta", "0.2", "--learning_rate", "1e-5", "--num_generations", "4"]
    arguments += ["--advantage_clip", "5", "--min_new_tokens", "3", "--missing_eos_penalty", "0.5", "--use_cpu"]
    arguments += ["--generation_kwargs", '{"top_k": 9}', "--max_prompt_tokens", "9", "--share_backbone", "never"]
    (config,) = parser_class(getattr(trl_ext, name)).parse_args_into_dataclasses(arguments)
    assert type(config) is getattr(trl_ext, name)
    assert config.algorithm == NAMED.get(name, "grpo")
    objective = config.build_objective()
    assert (config.beta, objective.beta, objective.advantage_clip) == (0.2, 0.2, 5.0)
    assert config.generation_kwargs == {"top_k": 9, "min_new_tokens": 3}
    assert (config.max_prompt_tokens, config.share_backbone, config.missing_eos_penalty) == (9, "never", 0.5)
    assert (config.bf16, config.gradient_checkpointing, config.disable_dropout) == (False, False, True)


def test_yaml_with_mappings(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        f"output_dir: {tmp_path}\nalgorithm: grpo\nsurrogate: sapo\nalgorithm_kwargs:\n  temperature_pos: 0.5\n"
        "generation_kwargs:\n  top_k: 5\nmax_prompt_tokens: null\nuse_cpu: true\n"
    )
    (config,) = TrlParser(PolicyConfig).parse_args_and_config(["--config", str(path)])
    assert config.build_objective().options == {"temperature_pos": 0.5}
    assert config.generation_kwargs == {"top_k": 5}
    assert config.max_prompt_tokens is None


# Each rollout serves four updates.
FOUR_UPDATES = {"per_device_train_batch_size": 4, "steps_per_generation": 2, "num_iterations": 2, "max_steps": 40}


def test_the_best_checkpoint_must_be_evaluated_where_it_is_saved(configure):
    """Saving every 3 steps becomes every 4, which evaluations every 3 steps miss; the named way out is taken."""
    best = {"save_strategy": "steps", "eval_strategy": "steps", "load_best_model_at_end": True}
    with pytest.raises(
        ValueError, match="save_steps 3 would become 4, .*multiple of eval_steps 3: give both as multiples of 4$"
    ):
        configure(**FOUR_UPDATES, **best, save_steps=3, eval_steps=3)
    for asked, evaluated, saved in ((4, 4, 4), (8, 4, 8), (6, 2, 8)):
        config = configure(**FOUR_UPDATES, **best, save_steps=asked, eval_steps=evaluated)
        assert (config.save_steps, config.eval_steps) == (saved, evaluated)
    # Without a choice among them, checkpoints need no evaluation.
    assert configure(**FOUR_UPDATES, **{**best, "load_best_model_at_end": False}, save_steps=3, eval_steps=3)


def test_a_field_whose_default_is_made_may_be_refused():
    @dataclasses.dataclass
    class Config:
        names: list = dataclasses.field(default_factory=list)

    refuse_given(Config(), {"names": "say it otherwise"})
    with pytest.raises(ValueError, match="^names is not used by Config: say it otherwise"):
        refuse_given(Config(["a"]), {"names": "say it otherwise"})
