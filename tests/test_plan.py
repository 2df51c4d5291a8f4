"""`--print_plan`: counts against models that are built, updates against the trainers' own, memory against a run."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from tests import recipes, rollout_once
from tests.tiny import pairs
from trl_ext import (
    KTOConfig,
    PolicyConfig,
    PolicyTrainer,
    PreferenceConfig,
    PreferenceTrainer,
    RewardConfig,
    RewardTrainer,
)
from trl_ext.trainers.engine import Engine, check_engine, engine_in_force
from trl_ext.trainers.memory_estimate import Pass, Weights, estimate_checkpoint, estimate_memory
from trl_ext.trainers.model_size import ModelSize, model_size
from trl_ext.trainers.plan import plan_run, plan_updates

ONE = Engine("none", "none", processes=1, devices=1, device="cpu", mixed_precision="no")
ADAM = SimpleNamespace(optim="adamw_torch_fused", gradient_checkpointing=True, save_only_model=False)

# ---- Parameters ----

TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 99, "num_attention_heads": 4}
ARCHITECTURES = {
    "qwen2, tied": ("qwen2", {**TINY, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "llama": ("llama", {**TINY, "num_key_value_heads": 1, "tie_word_embeddings": False}),
    "qwen3, wide heads": ("qwen3", {**TINY, "num_key_value_heads": 2, "head_dim": 24}),
    "qwen2_moe": (
        "qwen2_moe",
        {**TINY, "num_key_value_heads": 2, "num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2},
    ),
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99, "n_positions": 64}),
    "gpt_neox": ("gpt_neox", TINY),
    "gemma2": ("gemma2", {**TINY, "num_key_value_heads": 2, "head_dim": 16}),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_parameters_are_those_of_the_model(name, tmp_path):
    kind, sizes = ARCHITECTURES[name]
    config = AutoConfig.for_model(kind, **sizes)
    config.pad_token_id = 0
    config.save_pretrained(tmp_path)
    for classifier, builder in ((False, AutoModelForCausalLM), (True, AutoModelForSequenceClassification)):
        config.num_labels = 1
        model = builder.from_config(config)
        found = model_size(str(tmp_path), classifier=classifier)
        assert found.total == found.trained == model.num_parameters()
        assert (found.adapter, found.layers, found.outputs) == (0, 2, 1 if classifier else 99)
    adapter = LoraConfig(r=3, target_modules="all-linear")
    model = get_peft_model(AutoModelForCausalLM.from_config(config), LoraConfig(r=3, target_modules="all-linear"))
    found = model_size(str(tmp_path), peft_config=adapter)
    assert (found.trained, found.total) == model.get_nb_trainable_parameters()
    assert found.adapter == found.trained


def test_parameters_of_a_model_by_hand(tmp_path):
    """Qwen2.5-0.5B. Embedding, which is the head as well: 151,936 x 896 = 136,134,656. A layer: queries 896 x 896 +
    896 = 803,712, keys and values 2 x (896 x 128 + 128) = 229,632, output 802,816, the three of the MLP 3 x 896 x 4864
    = 13,074,432, two norms 1,792: 14,912,384; 24 of them 357,897,216; and a norm of 896. In all 494,032,768.
    """
    AutoConfig.for_model(
        "qwen2",
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=151936,
        tie_word_embeddings=True,
        dtype="bfloat16",
    ).save_pretrained(tmp_path)
    found = model_size(str(tmp_path))
    assert found.total == 494_032_768
    assert found.key_values == 2 * 2 * 64
    assert found.quantizable == 24 * (896 * 896 + 2 * 896 * 128 + 896 * 896 + 3 * 896 * 4864)
    assert found.dtype == "bfloat16"


def test_an_adapters_folder_is_counted_by_its_base(tiny_model_path, tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": tiny_model_path}))
    assert model_size(str(tmp_path)) == model_size(tiny_model_path)


# ---- Memory ----

SIZE = ModelSize(
    total=1_000,
    trained=1_000,
    adapter=0,
    quantizable=600,
    layers=2,
    hidden=10,
    intermediate=20,
    outputs=100,
    key_values=8,
    dtype="float32",
)
LORA = replace(SIZE, total=1_100, trained=100, adapter=100)


def memory(size=SIZE, args=ADAM, dtype="float32", bits=None, reference=False, micro_batch=None, **engine) -> dict:
    engine = replace(ONE, **engine)
    micro_batch = micro_batch or Pass(0, 0)
    return estimate_memory(size, args, engine, Weights(dtype, bits), micro_batch, reference=reference)


def figures(found: dict, *names: str) -> tuple:
    return tuple(found[name] for name in names)


STATIC = ("weights", "gradients", "optimizer", "reference", "communication")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # 1,000 float32 of 4 bytes, as many gradients, two states each.
        ({}, (4000, 4000, 8000, 0, 0)),
        ({"reference": True}, (4000, 4000, 8000, 4000, 0)),
        ({"dtype": "bfloat16"}, (2000, 2000, 4000, 0, 0)),
        # DDP's buckets are a second copy of the gradients.
        ({"name": "DDP", "processes": 4}, (4000, 4000, 8000, 0, 4000)),
        # Loaded in bfloat16 and trained by FSDP2 in mixed precision: in float32, all divided by 4.
        (
            {
                "name": "FSDP2",
                "processes": 4,
                "dtype": "bfloat16",
                "mixed_precision": "bf16",
                "reference": True,
            },
            (1000, 1000, 2000, 1000, 0),
        ),
        # DeepSpeed in bfloat16: 2 bytes, and 12 in the optimizer, a copy in float32 with it.
        (
            {"name": "ZeRO-2", "processes": 4, "mixed_precision": "bf16", "reference": True},
            (2000, 500, 3000, 2000, 0),
        ),
        (
            {"name": "ZeRO-3", "processes": 4, "mixed_precision": "bf16", "reference": True},
            (500, 500, 3000, 500, 0),
        ),
        # An adapter of 100 in float32 on a base of 1,000 in bfloat16.
        ({"size": LORA, "dtype": "bfloat16"}, (2400, 400, 800, 0, 0)),
        # 600 in 4 bits and a scale of 4 bytes for each 64: 300 + 37.5; the other 400 in bfloat16; adapter in bfloat16.
        (
            {"size": LORA, "dtype": "bfloat16", "bits": 4, "mixed_precision": "bf16"},
            (math.ceil(337.5 + 800 + 200), 200, 400, 0, 0),
        ),
    ],
)
def test_memory_by_hand(settings, expected):
    found = memory(**settings)
    assert figures(found, *STATIC) == expected
    assert found["total"] == sum(expected)


@pytest.mark.parametrize(
    ("optimizer", "states"), [("sgd", 0), ("rmsprop", 4000), ("adamw_8bit", 2000), ("lion_8bit", 1000), ("adam", 8000)]
)
def test_memory_of_optimizers(optimizer, states):
    args = SimpleNamespace(**{**vars(ADAM), "optim": optimizer})
    assert memory(args=args)["optimizer"] == states


def test_memory_of_a_pass_by_hand():
    """A layer keeps 8 x 10 + 8 + 4 x 20 = 168 numbers of a token. With checkpointing: 2 inputs of 10 and one layer."""
    micro_batch = Pass(1, 5, generated_rows=3, generated_length=7)
    found = memory(micro_batch=micro_batch)
    assert found["activations"] == 5 * (2 * 10 + 168) * 4
    # A tile of logits in float32, and on a GPU its gradient; on a CPU in 8 copies.
    assert found["logits"] == 8 * 4 * 5 * 100
    assert memory(micro_batch=Pass(2, 2500), device="cuda:0")["logits"] == 2 * 4 * 4096 * 100
    # The first of several processes on a CPU has the device cpu:0, and needs as much as a single one.
    assert memory(micro_batch=micro_batch, device="cpu:0", name="DDP", processes=2)["logits"] == 8 * 4 * 5 * 100
    # 3 rows of 7 tokens, 8 numbers in each of 2 layers.
    assert found["generation"] == 3 * 7 * 2 * 8 * 4
    args = SimpleNamespace(**{**vars(ADAM), "gradient_checkpointing": False})
    assert memory(args=args, micro_batch=micro_batch)["activations"] == 5 * 2 * 168 * 4
    assert memory(micro_batch=micro_batch, mixed_precision="bf16")["activations"] == 5 * (2 * 10 + 168) * 2


def test_disk_by_hand():
    """The model of 4,000 bytes and two states; of an adapter only what is its own; of ZeRO the weights once more."""
    weights = Weights("float32")
    assert estimate_checkpoint(SIZE, ADAM, ONE, weights) == {"model": 4000, "checkpoint": 12000}
    assert estimate_checkpoint(LORA, ADAM, ONE, weights) == {"model": 400, "checkpoint": 1200}
    zero = replace(ONE, name="ZeRO-2", processes=2)
    assert estimate_checkpoint(SIZE, ADAM, zero, weights) == {"model": 4000, "checkpoint": 4000 + 4000 + 12000}


MEASURE = """
import json, os, resource, sys
import torch
from datasets import Dataset
from transformers import TrainerCallback
from tests.test_plan import measured_config, measured_rows
from trl_ext import PreferenceTrainer
from trl_ext.trainers.plan import plan_run

torch.set_num_threads(1)
model, lora = sys.argv[1], sys.argv[2] == "lora"
peft_config = None
if lora:
    from peft import LoraConfig
    peft_config = LoraConfig(r=8, target_modules=["q_proj", "v_proj"])
args = measured_config(sys.argv[3])
dataset = Dataset.from_list(measured_rows())
plan = plan_run(args, model, datasets={"train_dataset": dataset}, peft_config=peft_config)

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

sizes = {}
class Measure(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        sizes["gradients"] = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)

before = resident()
trainer = PreferenceTrainer(model, args=args, train_dataset=dataset, peft_config=peft_config, callbacks=[Measure()])
trainer.train()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
sizes["weights"] = sum(p.nbytes for p in trainer.model.parameters())
sizes["reference"] = 0 if trainer.ref_model is None else sum(p.nbytes for p in trainer.ref_model.parameters())
states = trainer.optimizer.state.values()
sizes["optimizer"] = sum(v.nbytes for s in states for v in s.values() if torch.is_tensor(v) and v.ndim)
print(json.dumps({"plan": plan, "sizes": sizes, "grown": peak - before, "steps": trainer.state.global_step}))
"""


def measured_config(output_dir: str) -> PreferenceConfig:
    return PreferenceConfig(
        output_dir=output_dir,
        per_device_train_batch_size=4,
        max_steps=2,
        max_prompt_tokens=128,
        max_response_tokens=128,
        packing="off",
        precompute_ref_log_probs=False,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def measured_rows() -> list[dict]:
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
    from tests.tiny import build_tokenizer

    tokenizer = build_tokenizer()
    config = AutoConfig.for_model(
        "qwen2",
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=8000,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    ran = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path / "model"), trained, str(tmp_path / "run")],
        cwd=recipes.REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    told = json.loads(ran.stdout.splitlines()[-1])
    planned = told["plan"]["memory"]
    print(trained, told["sizes"], planned, told["grown"], planned["total"] / told["grown"])
    assert told["steps"] == told["plan"]["updates"]["updates"] == 2
    for name, size in told["sizes"].items():
        assert size == planned[name], name
    assert 0.7 < planned["total"] / told["grown"] < 1.3


# ---- Updates ----


def updates_of(trainer) -> int:
    """How many TRL and transformers will make."""
    return trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())[-1]


COMMON = {"use_cpu": True, "report_to": "none", "save_strategy": "no"}


@pytest.mark.parametrize(
    ("rows", "settings", "expected"),
    [
        # 11 pairs in passes of 2 are 6, in windows of 4 are 2, in 2.5 epochs 5.
        (11, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "num_train_epochs": 2.5}, 5),
        # Without the last: 5 passes, 2 windows.
        (11, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "dataloader_drop_last": True}, 2),
        (3, {"per_device_train_batch_size": 8, "num_train_epochs": 2}, 2),
        (11, {"max_steps": 7}, 7),
    ],
)
def test_updates_are_the_trainers(rows, settings, expected, tiny_model_path, tmp_path):
    defaults = {"num_train_epochs": 1, **COMMON, "output_dir": str(tmp_path)}
    dataset = Dataset.from_list(pairs(rows))
    for config, trainer_class in ((PreferenceConfig, PreferenceTrainer), (RewardConfig, RewardTrainer)):
        args = config(**{**defaults, **settings})
        trainer = trainer_class(tiny_model_path, args=args, train_dataset=dataset)
        found = plan_updates(args, engine_in_force(args), rows)
        assert found["updates"] == updates_of(trainer) == expected
    per_update = settings.get("per_device_train_batch_size", 8) * settings.get("gradient_accumulation_steps", 1)
    assert found["pairs_per_update"] == per_update


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # 8 prompts of 4 responses in rollouts of 16: 4 prompts each. A rollout is 4 passes of 4, in windows of 2, gone
        # through twice: 4 updates. Two rollouts in an epoch.
        (
            {
                "gradient_accumulation_steps": 2,
                "generation_batch_size": 16,
                "num_iterations": 2,
                "num_train_epochs": 1,
            },
            {"prompts_per_rollout": 4, "updates_per_rollout": 4, "rollouts": 2, "responses": 32, "updates": 8},
        ),
        # 3 prompts fill 2 whole rollouts of 12 responses; the last 2 prompts are left.
        (
            {"generation_batch_size": 12, "num_train_epochs": 1},
            {"prompts_per_rollout": 3, "updates_per_rollout": 3, "rollouts": 2, "responses": 24, "updates": 6},
        ),
        # Five updates need a second rollout.
        (
            {"gradient_accumulation_steps": 2, "generation_batch_size": 16, "num_iterations": 2, "max_steps": 5},
            {"rollouts": 2, "updates": 5, "responses_per_update": 8},
        ),
    ],
)
def test_rollouts_are_the_trainers(settings, expected, tiny_model_path, tmp_path):
    args = PolicyConfig(
        **{
            **COMMON,
            "output_dir": str(tmp_path),
            "num_generations": 4,
            "per_device_train_batch_size": 4,
            "max_completion_length": 4,
            **settings,
        }
    )
    trainer = PolicyTrainer(
        tiny_model_path,
        reward_funcs=rollout_once.thirds,
        args=args,
        train_dataset=Dataset.from_list(rollout_once.prompts(8)),
    )
    found = plan_updates(args, engine_in_force(args), 8)
    assert {name: found[name] for name in expected} == expected
    assert found["updates"] == updates_of(trainer)


def test_updates_of_several_processes(tmp_path):
    """11 pairs in passes of 2 are 6 passes; 4 processes make 2 each, the last some twice: one window of 3."""
    args = PreferenceConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=3,
        num_train_epochs=1,
        **COMMON,
    )
    found = plan_updates(args, replace(ONE, name="DDP", processes=4), 11)
    assert (found["updates"], found["pairs_per_update"]) == (1, 24)


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
    # As a launcher numbers it.
    engine = replace(ONE, name=name, asked="FSDP2", device="cpu:0")
    assert "on a CPU" in check_engine(engine, allow_fallback=True)
    with pytest.raises(ValueError, match=f"FSDP2 was asked for.*{phrase}.*--allow_engine_fallback"):
        check_engine(engine, allow_fallback=False)
    assert phrase in check_engine(engine, allow_fallback=True)
    assert check_engine(replace(ONE, name="FSDP2", asked="FSDP2"), allow_fallback=False) is None
    with pytest.raises(ValueError, match="one process sees 4 GPUs: start it with `accelerate launch"):
        check_engine(replace(ONE, name="DataParallel", asked="DataParallel", devices=4), allow_fallback=True)


def test_fsdp_on_a_cpu_is_a_fallback(monkeypatch, tmp_path):
    """What `accelerate launch --config_file accelerate_configs/fsdp2.yaml` sets."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    engine = engine_in_force(PreferenceConfig(output_dir=str(tmp_path), **COMMON))
    assert (engine.name, engine.asked, engine.is_fallback) == ("none", "FSDP2", True)


# ---- The recipes ----

TRAINING = {"aot": [], "grpo": ["--reward_function=builtins:len"], "reward_model": [], "grpo_math": []}
TRAINING |= {"sft": [], "expert_iteration": []}


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
    """2,000 pairs in updates of 2 x 8: 125 of them, of which every 50th and the last are saved."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        recipes.run(
            monkeypatch,
            "aot",
            "--print_plan",
            "--per_device_train_batch_size=8",
            "--gradient_accumulation_steps=2",
            "--save_steps=50",
            "--eval_strategy=no",
            "--save_total_limit=9",
        )
    printed = capsys.readouterr().out
    for phrase in ("engine: none", "pairs per update: 16", "updates: 125", "403,680 are trained", "3 checkpoints of"):
        assert phrase in printed


def test_a_plan_says_that_the_run_would_be_refused(monkeypatch, tmp_path, caplog):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(recipes.RECIPES))
    (tmp_path / "taken").touch()
    monkeypatch.setattr(sys, "argv", ["aot.py", "--output_dir=taken", "--print_plan"])
    import run_folder
    from offline import RecipeArguments

    run = run_folder.begin_run(
        RecipeArguments, PreferenceConfig, config="aot", description=None, name=lambda training: training.loss
    )
    assert run.launch.print_plan == "text" and run.checkpoint is None
    assert "the run itself would be refused: --output_dir taken is a file: name a folder" in caplog.text


def test_a_plan_of_a_model_that_is_nowhere_is_one_line(monkeypatch, tmp_path, capsys):
    given = ["--model_name_or_path", "nobody/nothing", "--output_dir", str(tmp_path / "run"), "--print_plan"]
    with pytest.raises(SystemExit) as ended:
        recipes.run(monkeypatch, "dpo", *given)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert ended.value.code == 2
    assert line.startswith("error: the model 'nobody/nothing' could not be read for its plan")


def test_launch_flags_are_no_part_of_the_run(monkeypatch, tmp_path, capsys):
    """A run with them resumes without them: config.yaml must not hold them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(recipes.RECIPES))
    monkeypatch.setattr(sys, "argv", ["aot.py", "--allow_engine_fallback"])
    import run_folder
    from offline import RecipeArguments

    run = run_folder.begin_run(
        RecipeArguments, PreferenceConfig, config="aot", description=None, name=lambda training: training.loss
    )
    assert run.launch.allow_engine_fallback
    text = run_folder.config_text(run.arguments, run.model, run.training)
    assert "fallback" not in text and "print_plan" not in text
