"""`--print_plan`: counts against models that are built, updates against the trainers' own, memory against a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from accelerate.utils import DistributedType
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.support import REPOSITORY, recipes, rollout_once
from tests.support.tiny import pairs
from trl_ext import (
    KTOConfig,
    PolicyConfig,
    PolicyTrainer,
    PreferenceConfig,
    PreferenceTrainer,
    RewardConfig,
    RewardTrainer,
)
from trl_ext.runs import plan as planning
from trl_ext.runs import training_run
from trl_ext.runs.folder import config_text
from trl_ext.runs.plan import Engine, check_engine, engine_in_force, plan_run, plan_updates

ONE = Engine("none", "none", processes=1, device="cpu", mixed_precision="no")
COMMON = {"use_cpu": True, "report_to": "none", "save_strategy": "no"}

# ---- Parameters and memory ----

TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 99, "num_attention_heads": 4}
ARCHITECTURES = {
    "qwen2, tied": ("qwen2", {**TINY, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "llama": ("llama", {**TINY, "num_key_value_heads": 1, "tie_word_embeddings": False}),
    "qwen2_moe": ("qwen2_moe", {**TINY, "num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2}),
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99, "n_positions": 64}),
}


@pytest.fixture
def planned(tmp_path, monkeypatch):
    """A function that plans preference training of a model whose configuration alone is there."""

    def plan(kind: str = "llama", sizes: dict = TINY, engine: Engine = ONE, peft_config=None, config=None, **keys):
        saved = AutoConfig.for_model(kind, **sizes, pad_token_id=0)
        saved.save_pretrained(tmp_path / "model")
        monkeypatch.setattr(planning, "engine_in_force", lambda _: engine)
        training = {"dtype": keys.pop("dtype")} if "dtype" in keys else {}
        args = (config or PreferenceConfig)(output_dir=str(tmp_path / "run"), **{**COMMON, **keys})
        datasets = {"train_dataset": Dataset.from_list(pairs(4))}
        return plan_run(args, str(tmp_path / "model"), datasets=datasets, peft_config=peft_config, **training)

    return plan


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_parameters_are_those_of_the_model(name, planned):
    kind, sizes = ARCHITECTURES[name]
    config = AutoConfig.for_model(kind, **sizes, pad_token_id=0, num_labels=1)
    for own, builder in ((PreferenceConfig, AutoModelForCausalLM), (RewardConfig, AutoModelForSequenceClassification)):
        found = planned(kind, sizes, config=own)["parameters"]
        assert found["total"] == found["trained"] == builder.from_config(config).num_parameters()
    model = get_peft_model(AutoModelForCausalLM.from_config(config), LoraConfig(r=3, target_modules="all-linear"))
    found = planned(kind, sizes, peft_config=LoraConfig(r=3, target_modules="all-linear"))["parameters"]
    assert (found["trained"], found["total"]) == model.get_nb_trainable_parameters()


FSDP = Engine("FSDP2", "FSDP2", 4, "cuda:0", "bf16")
ZERO = Engine("ZeRO-2", "ZeRO-2", 4, "cuda:0", "bf16")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # Bytes of each parameter, its gradient, its two states, and the reference.
        ({}, (4, 4, 8, 4)),
        ({"loss": "simpo", "loss_kwargs": {"gamma": 0.5}}, (4, 4, 8, 0)),
        ({"dtype": "bfloat16"}, (2, 2, 4, 2)),
        # FSDP2 trains what it loads in bfloat16 in float32, all divided by 4.
        ({"engine": FSDP, "dtype": "bfloat16"}, (1, 1, 2, 1)),
        # DeepSpeed in bfloat16: 2 bytes, and 12 in the optimizer, with its copy in float32.
        ({"engine": ZERO}, (2, 0.5, 3, 2)),
        ({"engine": replace(ZERO, name="ZeRO-3")}, (0.5, 0.5, 3, 0.5)),
    ],
)
def test_memory_by_hand(settings, expected, planned):
    plan = planned(num_train_epochs=1, **settings)
    count, memory = plan["parameters"]["total"], plan["memory"]
    found = [memory[name] / count for name in ("weights", "gradients", "optimizer", "reference")]
    assert found == pytest.approx(expected, abs=1 / count)
    assert memory["total"] == sum(size for name, size in memory.items() if name != "total")


def test_memory_of_an_adapter_by_hand(planned):
    """LLaMA of 32 x 48 with 4 heads: linear layers of 2 x (4 x 32 x 32 + 3 x 32 x 48) = 17,408; an embedding and a
    head of 99 x 32 each, and 5 norms of 32: 6,496. Rank 2 on two 32 x 32 matrices of each layer: 2 x 2 x 2 x 64 = 512.
    """
    adapter = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    sizes = {**TINY, "tie_word_embeddings": False}
    plan = planned("llama", sizes, peft_config=adapter, dtype="bfloat16")
    assert plan["parameters"] == {"total": 24_416, "trained": 512, "dtype": "bfloat16", "reference": False}
    memory = plan["memory"]
    assert (memory["weights"], memory["gradients"], memory["optimizer"]) == (2 * 23_904 + 4 * 512, 2048, 4096)


def test_memory_of_a_pass_by_hand(planned):
    """2 sides of 3 pairs of 5 + 7 tokens are 72; a layer keeps 8 x 32 + 4 x 48 = 448 numbers of each."""
    keys = {"per_device_train_batch_size": 3, "max_prompt_tokens": 5, "max_response_tokens": 7}
    memory = planned(**keys, gradient_checkpointing=False)["memory"]
    assert memory["activations"] == 72 * 2 * 448 * 4
    assert memory["logits"] == 8 * 4 * 72 * 99
    memory = planned(**keys, gradient_checkpointing=True)["memory"]
    assert memory["activations"] == 72 * (2 * 32 + 448) * 4
    gpu = replace(ONE, device="cuda:0", mixed_precision="bf16")
    memory = planned(**{**keys, "per_device_train_batch_size": 300}, engine=gpu, gradient_checkpointing=True)["memory"]
    assert memory["activations"] == 7200 * (2 * 32 + 448) * 2
    assert memory["logits"] == 2 * 4 * 4096 * 99


MEASURE = """
import json, os, re, sys
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback
from tests.runs.test_plan import COMMON, long_pairs
from trl_ext import PreferenceConfig, PreferenceTrainer
from trl_ext.runs.plan import plan_run

torch.set_num_threads(1)
model, kind, folder = sys.argv[1:]
adapter = LoraConfig(r=8, target_modules=["q_proj", "v_proj"]) if kind == "lora" else None
args = PreferenceConfig(
    output_dir=folder, per_device_train_batch_size=4, max_steps=2, max_prompt_tokens=128, max_response_tokens=128,
    packing="off", precompute_ref_log_probs=False, gradient_checkpointing=False, disable_tqdm=True, **COMMON,
)
dataset, sizes = Dataset.from_list(long_pairs()), {}
plan = plan_run(args, model, datasets={"train_dataset": dataset}, peft_config=adapter)

class Measure(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        sizes["gradients"] = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)

before = int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
trainer = PreferenceTrainer(model, args=args, train_dataset=dataset, peft_config=adapter, callbacks=[Measure()])
trainer.train()
# ru_maxrss would count the process that started this one.
peak = 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
sizes["weights"] = sum(p.nbytes for p in trainer.model.parameters())
sizes["reference"] = 0 if trainer.ref_model is None else sum(p.nbytes for p in trainer.ref_model.parameters())
states = trainer.optimizer.state.values()
sizes["optimizer"] = sum(v.nbytes for s in states for v in s.values() if torch.is_tensor(v) and v.ndim)
print(json.dumps({"plan": plan, "sizes": sizes, "grown": peak - before, "steps": trainer.state.global_step}))
"""


def long_pairs() -> list[dict]:
    """Pairs as long as the limits."""
    rows = pairs(8)
    for row in rows:
        row["prompt"][0]["content"] = "a" * 300
        row["chosen"][0]["content"], row["rejected"][0]["content"] = "b" * 300, "c" * 300
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("trained", ["full", "lora"])
def test_memory_of_a_run(trained, tmp_path):
    """Tensors to the byte; the growth of the process, of which activations are the rough part, within 30%."""
    from tests.support.tiny import build_tokenizer

    tokenizer = build_tokenizer()
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 8, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 8000, "tie_word_embeddings": False}
    config = AutoConfig.for_model("qwen2", **sizes, pad_token_id=tokenizer.pad_token_id)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "model"), trained, str(tmp_path / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    told = json.loads(ran.stdout.splitlines()[-1])
    planned = told["plan"]["memory"]
    print(trained, planned["total"] / told["grown"])
    assert told["steps"] == told["plan"]["updates"]["updates"] == 2
    for name, size in told["sizes"].items():
        assert size == planned[name], name
    assert 0.7 < planned["total"] / told["grown"] < 1.3


# ---- Updates ----


def updates_of(trainer) -> int:
    """How many TRL and transformers will make."""
    return trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())[-1]


@pytest.mark.parametrize(
    ("rows", "settings", "expected"),
    [
        # 11 pairs in passes of 2 are 6, in windows of 4 are 2, in 2.5 epochs 5.
        (11, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "num_train_epochs": 2.5}, 5),
        # Without the last: 5 passes, 2 windows.
        (11, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "dataloader_drop_last": True}, 2),
        (11, {"max_steps": 7}, 7),
    ],
)
def test_updates_are_the_trainers(rows, settings, expected, tiny_model_path, tmp_path):
    defaults = {"num_train_epochs": 1, **COMMON, "output_dir": str(tmp_path)}
    dataset = Dataset.from_list(pairs(rows))
    for config, trainer_class in ((PreferenceConfig, PreferenceTrainer), (RewardConfig, RewardTrainer)):
        args = config(**{**defaults, **settings})
        trainer = trainer_class(tiny_model_path, args=args, train_dataset=dataset)
        found = plan_updates(args, 1, rows)
        assert found["updates"] == updates_of(trainer) == expected


ROLLOUTS = {"gradient_accumulation_steps": 2, "generation_batch_size": 16, "num_iterations": 2}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # 8 prompts of 4 responses in rollouts of 16: 4 prompts each. A rollout is 4 passes of 4, in windows of 2, gone
        # through twice: 4 updates. Two rollouts in an epoch.
        (
            {**ROLLOUTS, "num_train_epochs": 1},
            {"prompts_per_rollout": 4, "updates_per_rollout": 4, "rollouts": 2, "updates": 8},
        ),
        # 3 prompts fill 2 whole rollouts of 12 responses; the last 2 prompts are left.
        (
            {"generation_batch_size": 12, "num_train_epochs": 1},
            {"prompts_per_rollout": 3, "updates_per_rollout": 3, "rollouts": 2, "updates": 6},
        ),
        # Five updates need a second rollout.
        ({**ROLLOUTS, "max_steps": 5}, {"rollouts": 2, "updates": 5, "responses_per_update": 8}),
    ],
)
def test_rollouts_are_the_trainers(settings, expected, tiny_model_path, tmp_path):
    given = {**COMMON, "num_generations": 4, "per_device_train_batch_size": 4, "max_completion_length": 4, **settings}
    args = PolicyConfig(output_dir=str(tmp_path), **given)
    dataset = Dataset.from_list(rollout_once.prompts(8))
    trainer = PolicyTrainer(tiny_model_path, reward_funcs=rollout_once.thirds, args=args, train_dataset=dataset)
    found = plan_updates(args, 1, 8)
    assert {name: found[name] for name in expected} == expected
    assert found["updates"] == updates_of(trainer)


def test_whether_a_reference_is_kept(tiny_model_path, tmp_path):
    """Over more than one epoch its log-probabilities are computed ahead, and an adapter's base is the reference."""
    datasets = {"train_dataset": Dataset.from_list(pairs(4))}
    adapter = LoraConfig(r=2, target_modules=["q_proj"])

    def reference(peft_config=None, **settings) -> bool:
        args = PreferenceConfig(output_dir=str(tmp_path), **COMMON, **settings)
        plan = plan_run(args, tiny_model_path, datasets=datasets, peft_config=peft_config)
        return plan["parameters"]["reference"]

    kto = KTOConfig(output_dir=str(tmp_path), **COMMON)
    assert plan_run(kto, tiny_model_path, datasets=datasets)["parameters"]["reference"]
    assert plan_run(kto, tiny_model_path, datasets=datasets)["updates"]["updates"] is not None
    assert reference(num_train_epochs=1)
    assert not reference(num_train_epochs=2)
    assert not reference(num_train_epochs=1, loss="simpo")
    assert not reference(num_train_epochs=1, peft_config=adapter)


# ---- Engines that are not what was asked for ----


@pytest.mark.parametrize(("name", "phrase"), [("none", "nothing is sharded"), ("DDP", "DDP trains instead")])
def test_a_fallback_is_refused_or_said(name, phrase):
    engine = replace(ONE, name=name, asked="FSDP2", device="cpu:0")
    with pytest.raises(ValueError, match=f"FSDP2 was asked for, and on a CPU {phrase}.*--allow_engine_fallback"):
        check_engine(engine, allow_fallback=False)
    assert phrase in check_engine(engine, allow_fallback=True)
    assert check_engine(replace(ONE, name="FSDP2", asked="FSDP2"), allow_fallback=False) is None
    with pytest.raises(ValueError, match="one process sees several GPUs: start it with `accelerate launch"):
        check_engine(replace(ONE, name="DataParallel", asked="DataParallel"), allow_fallback=True)


def test_fsdp_on_a_cpu_is_a_fallback(monkeypatch, tmp_path):
    for name, value in (("ACCELERATE_USE_FSDP", "true"), ("FSDP_VERSION", "2")):
        monkeypatch.setenv(name, value)
    args = PreferenceConfig(output_dir=str(tmp_path), **COMMON)
    engine = engine_in_force(args)
    assert (engine.name, engine.asked) == ("none", "FSDP2")
    # What accelerate makes of several processes on GPUs, before the trainer is created and after.
    for kind in (DistributedType.MULTI_GPU, DistributedType.FSDP):
        monkeypatch.setattr(args, "distributed_state", SimpleNamespace(distributed_type=kind, num_processes=2))
        assert engine_in_force(args).name == "FSDP2"


# ---- The recipes ----

TRAINING = {"aot": [], "grpo": ["--reward_function=builtins:len"], "reward_model": [], "expert_iteration": []}


@pytest.mark.parametrize("script", TRAINING)
def test_recipes_print_a_plan_and_end(script, tmp_path, monkeypatch, capsys):
    """Without a weight being loaded, and without a trace on the disk."""
    import transformers

    def refuse(*args, **kwargs):
        raise AssertionError("weights are loaded")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", refuse)
    with pytest.raises(SystemExit) as stopped:
        recipes.run(monkeypatch, script, "--print_plan=json", *TRAINING[script])
    assert stopped.value.code == 0
    plan = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert plan["engine"]["name"] == "none" and plan["engine"]["processes"] == 1
    assert plan["parameters"]["total"] == 403_680 + 96 * (script == "reward_model")
    assert plan["memory"]["total"] > plan["memory"]["weights"] == 4 * plan["parameters"]["total"]
    assert not list(tmp_path.iterdir())


def test_a_plan_to_read(tmp_path, monkeypatch, capsys):
    """2,000 pairs in updates of 2 x 8: 125 of them."""
    monkeypatch.chdir(tmp_path)
    flags = ("--per_device_train_batch_size=8", "--gradient_accumulation_steps=2")
    with pytest.raises(SystemExit):
        recipes.run(monkeypatch, "aot", "--print_plan", *flags)
    printed = capsys.readouterr().out
    for phrase in ("engine: none", "pairs per update: 16", "updates: 125", "403,680 are trained", "left out: "):
        assert phrase in printed


@pytest.fixture
def begin(tmp_path, monkeypatch):
    """Begin a run of AOT in an empty folder, by flags."""

    def begin(*flags: str):
        monkeypatch.setattr(sys, "argv", ["aot.py", *flags])
        from trl_ext.runs.offline import OfflineArguments

        return training_run.begin_run(
            OfflineArguments, PreferenceConfig, config="aot", description=None, name=lambda training: training.loss
        )

    monkeypatch.chdir(tmp_path)
    return begin


def test_launch_flags_are_no_part_of_the_run(begin):
    """A run with them resumes without them: config.yaml must not hold them."""
    run = begin("--allow_engine_fallback")
    assert run.launch.allow_engine_fallback
    text = config_text(run.arguments, run.model, run.training)
    assert "fallback" not in text and "print_plan" not in text


def test_a_plan_of_a_model_that_is_nowhere_is_one_line(monkeypatch, tmp_path, capsys):
    given = ["--model_name_or_path", "nobody/nothing", "--output_dir", str(tmp_path / "run"), "--print_plan"]
    line = recipes.refused(monkeypatch, capsys, "dpo", *given)
    assert line.startswith("error: the model 'nobody/nothing' could not be read for its plan")
