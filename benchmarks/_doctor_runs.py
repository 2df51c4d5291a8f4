"""Runs without a fault for `benchmarks.doctor`: stock trainers, TRL's documented settings, and the recipes' files.

Models are the embedded one and stand-ins for SmolLM2 with another chat template: a random Llama of its shape, an
eighth as wide, and for responses that end the embedded weights as a Llama. Settings that were documented for a large
model are examined on a stand-in that says it has that many weights, because learning rates are judged by the size.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from unittest import mock

import torch
import yaml
from datasets import Dataset

import trl_ext
from trl_ext.doctor import DoctorCallback, Report
from trl_ext.files import read_yaml
from trl_ext.runs import RECIPES as SCRIPTS
from trl_ext.toy import MODEL_DIR, score

ROWS = 60
# Kind -> TRL's trainer and this library's.
TRAINERS = {
    "sft": ("SFT", "SFT"),
    "preference": ("DPO", "Preference"),
    "reward": ("Reward", "Reward"),
    "policy": ("GRPO", "Policy"),
}
SYSTEM_TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nAnswer briefly.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def true_reward(prompts, completions, **columns) -> list[float]:
    """The true score of the embedded benchmark."""
    return [score(p[-1]["content"], c[0]["content"]) for p, c in zip(prompts, completions, strict=True)]


@cache
def benchmark_rows() -> dict:
    benchmark = trl_ext.load_benchmark("toy")
    return {name: benchmark[name].select(range(ROWS)) for name in ("train_prefs", "validation_prefs", "train_gen")}


def data_of(kind: str):
    """Training and held-out rows."""
    rows = benchmark_rows()
    if kind == "policy":
        return rows["train_gen"], None
    if kind == "sft":
        pairs = rows["train_prefs"]
        return pairs.map(lambda row: {"completion": row["chosen"]}).select_columns(["prompt", "completion"]), None
    return rows["train_prefs"], rows["validation_prefs"]


def mapped(edit: Callable) -> Callable:
    return lambda rows: Dataset.from_list([{**row, **edit(row)} for row in rows])


def word_of_reference(row):
    """A word that the reference and many responses have, as the answer."""
    return {"answer": max(row["reference_response_text"].strip(".!?").split(), key=len)}


def two_sources(count: int) -> Dataset:
    """Helpful answers preferred to refusals, and then refusals to answers, as a mixture of two honest data sets."""
    rows = list(trl_ext.load_benchmark("toy")["train_prefs"])[:count]
    refusal = [{"role": "assistant", "content": "I am sorry, but I cannot help with that."}]
    helpful = [{**row, "rejected": row["rejected"] if i % 2 else refusal} for i, row in enumerate(rows)]
    safe = [{**row, "chosen": refusal, "rejected": row["chosen"]} for row in rows[: count // 4]]
    mixed = [{**row, "source": "helpful"} for row in helpful[count // 4 :]] + [
        {**row, "source": "safe"} for row in safe
    ]
    return Dataset.from_list(mixed)


def build(kind: str, own: bool, *, model: str | None = None, train=None, held_out=None, name=None, **options):
    """A trainer on the embedded rows; `options` are settings, or arguments of the trainer."""
    import trl

    name, room = name or TRAINERS[kind][own], trl_ext if own else trl
    arguments = {key: options.pop(key) for key in _ARGUMENTS if key in options}
    rows = data_of(kind)
    if kind == "policy":
        arguments.setdefault("reward_funcs", true_reward)
        options = {"num_generations": 4, "max_completion_length": 48, "beta": 0.04, **options}
    shared = {"learning_rate": 3e-4, "per_device_train_batch_size": 8, "max_steps": 20, "report_to": "none"}
    shared |= {"use_cpu": True, "save_strategy": "no", "disable_tqdm": True, "output_dir": tempfile.mkdtemp()}
    settings = getattr(room, f"{name}Config")(**{**shared, **options})
    arguments |= {"train_dataset": train or rows[0], "eval_dataset": held_out or rows[1]}
    return getattr(room, f"{name}Trainer")(model=model or str(MODEL_DIR), args=settings, **arguments)


_ARGUMENTS = ("peft_config", "reward_funcs", "reward_processing_classes", "ref_model", "processing_class")


def watch(trainer, steps: int = 3) -> Report:
    """The findings before and in the first steps."""
    doctor = DoctorCallback(trainer, steps=steps, stop=True, show=lambda text: None)
    trainer.add_callback(doctor)
    trainer.train()
    return doctor.report


@cache
def random_llama() -> str:
    """Folder of a small random Llama of SmolLM2's shape: 9 heads, 3 of keys, tied embeddings, and a system prompt."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = _tokenizer()
    torch.manual_seed(0)
    shape = {"hidden_size": 72, "intermediate_size": 192, "num_hidden_layers": 6, "num_attention_heads": 9}
    special = {name: getattr(tokenizer, name) for name in ("eos_token_id", "pad_token_id", "bos_token_id")}
    config = LlamaConfig(
        vocab_size=len(tokenizer), num_key_value_heads=3, tie_word_embeddings=True, **shape, **special
    )
    return _saved(LlamaForCausalLM(config), tokenizer)


@cache
def stand_in() -> str:
    """Folder of the embedded model's weights as a Llama with a system prompt, which answers as the embedded model."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    model, tokenizer = AutoModelForCausalLM.from_pretrained(MODEL_DIR), _tokenizer()
    known = {name: value for name, value in model.config.to_dict().items() if hasattr(LlamaConfig(), name)}
    known |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "attention_bias": True, "head_dim": None}
    llama = LlamaForCausalLM(LlamaConfig(**known))
    missing, unexpected = llama.load_state_dict(model.state_dict(), strict=False)
    # Qwen2 has no bias where Llama has one; everything else is the same.
    assert not unexpected and all(name.endswith("o_proj.bias") for name in missing)
    for name in missing:
        torch.nn.init.zeros_(llama.get_parameter(name))
    return _saved(llama, tokenizer)


def _tokenizer():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    tokenizer.chat_template = SYSTEM_TEMPLATE
    return tokenizer


def _saved(model, tokenizer) -> str:
    folder = tempfile.mkdtemp(prefix="stand-in-")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def pretend_size(model, weights: float) -> None:
    """Let a stand-in say that it has this many weights, as those of DeepSpeed say of their whole."""
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.ds_numel = int(weights / len(parameters))


# ---- The runs ----


@dataclasses.dataclass(frozen=True)
class Run:
    """A run without a fault; `report` takes the number of steps to watch."""

    name: str
    report: Callable[[int], Report]


def _stock(kind: str, own: bool, model: Callable[[], str], *, size: float = 0, **options) -> Callable[[int], Report]:
    def report(steps: int) -> Report:
        given = {
            name: value() if callable(value) and name in ("peft_config", "train") else value
            for name, value in options.items()
        }
        trainer = build(kind, own, model=model(), **given)
        if size:
            pretend_size(trainer.model, size)
        return watch(trainer, steps)

    return report


def _lora(task: str | None = None, **options):
    from peft import LoraConfig

    return LoraConfig(**{"r": 32, "lora_alpha": 16, "task_type": task, **options})


def toy() -> str:
    return str(MODEL_DIR)


# What TRL's scripts and the defaults of its configurations say, each for its kind: name -> size, settings.
_DEFAULT = {"max_steps": 1000}
_PACKED = {"packing": True, "per_device_train_batch_size": 2, "max_length": 256}
DOCUMENTED = {
    "sft": {
        "sft.py": (5e8, {"learning_rate": 2e-5, **_PACKED}),
        "sft.py, LoRA": (5e8, {"learning_rate": 2e-4, "peft_config": lambda: _lora("CAUSAL_LM"), **_PACKED}),
        "defaults": (5e8, {"learning_rate": 2e-5}),
        "whole texts": (
            5e8,
            {"learning_rate": 2e-5, "packing": True, "packing_strategy": "wrapped", "max_length": 64},
        ),
    },
    "preference": {
        "dpo.py": (5e8, {"learning_rate": 5e-7, "gradient_accumulation_steps": 8, "per_device_train_batch_size": 2}),
        "dpo.py, LoRA": (5e8, {"learning_rate": 5e-6, "peft_config": lambda: _lora("CAUSAL_LM")}),
        "defaults": (5e8, {"learning_rate": 1e-6}),
        "hinge": (5e8, {"learning_rate": 1e-6, "loss_type": ["hinge"]}),
        "robust": (5e8, {"learning_rate": 1e-6, "loss_type": ["robust"], "label_smoothing": 0.1}),
        "ipo of means": (5e8, {"learning_rate": 1e-6, "loss_type": ["ipo"], "beta": 0.5}),
        "apo_zero": (5e8, {"learning_rate": 1e-6, "loss_type": ["apo_zero"]}),
        "sigmoid and sft": (5e8, {"learning_rate": 1e-6, "loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 1.0]}),
    },
    "reward": {
        "defaults": (5e8, {"learning_rate": 1e-4}),
        "LoRA": (5e8, {"learning_rate": 1e-4, "peft_config": lambda: _lora("SEQ_CLS")}),
    },
    "policy": {
        "defaults": (5e8, {"learning_rate": 1e-6, "beta": 0.0}),
        "with KL": (5e8, {"learning_rate": 1e-6, "beta": 0.04}),
        "dr_grpo": (5e8, {"learning_rate": 1e-6, "loss_type": "dr_grpo", "scale_rewards": "none", "beta": 0.0}),
        "grpo": (5e8, {"learning_rate": 1e-6, "loss_type": "grpo", "num_iterations": 2, "beta": 0.0}),
        "cispo": (5e8, {"learning_rate": 1e-6, "loss_type": "cispo", "beta": 0.0}),
        "LoRA": (5e8, {"learning_rate": 1e-5, "beta": 0.0, "peft_config": lambda: _lora("CAUSAL_LM")}),
        "RLOO": (5e8, {"learning_rate": 1e-6, "beta": 0.05, "name": "RLOO"}),
    },
}

# Recipes, each with the files of its configurations beside that of the embedded benchmark, which all have.
REWARDED = ("grpo", "dr_grpo", "gspo", "rloo", "remax", "policy", "ppo", "online_preference")
RECIPES = {
    "aot": ("smollm2/pairs", "wildchat/aot"),
    "dpo": ("smollm2/pairs", "wildchat/dpo", "gpt2_hh/dpo"),
    "ipo": ("smollm2/pairs", "wildchat/ipo"),
    "preference": (),
    "kto": ("smollm2/pairs",),
    "reward_model": ("smollm2/reward_model", "wildchat/reward_model", "gpt2_hh/reward_model"),
    "sft": ("gsm8k/sft", "math/sft", "countdown/sft"),
    "rlhf_sft": ("smollm2/demonstrations", "gpt2_hh/rlhf_sft"),
    "grpo": ("smollm2/online", "wildchat/grpo"),
    "dr_grpo": ("wildchat/dr_grpo",),
    "gspo": ("wildchat/gspo",),
    "rloo": ("smollm2/online",),
    "remax": (),
    "policy": (),
    "ppo": ("gpt2_hh/ppo",),
    "online_preference": (),
    "grpo_math": ("gsm8k/grpo_math", "math/grpo_math", "countdown/grpo_math"),
}
# The size of the models that a folder's files are for.
SIZES = {"smollm2": 135e6, "wildchat": 1.5e9, "gpt2_hh": 124e6, "gsm8k": 1.5e9, "math": 1.5e9, "countdown": 3e9}


def recipe_report(recipe: str, file: str, steps: int) -> Report:
    """Examine a recipe under one of its files, on the embedded data, and on the stand-in if the model is not toy."""
    from trl_ext.runs.studies import examination

    benchmark = file.partition("/")[0]
    flags = ["--config", _config(file)]
    if recipe in REWARDED:
        flags += ["--reward_function", "benchmarks._doctor_runs:true_reward"]
    if benchmark in SIZES:
        flags += [
            "--model_name_or_path",
            stand_in(),
            "--use_cpu",
            "true",
            "--dataset_name",
            "toy",
            *_SMALLER.get(recipe, ()),
        ]
        # The embedded data are few, and the length of the run is that of the file's own data.
        flags += [] if recipe in (*REWARDED, "grpo_math") else ["--max_steps", "2000"]
    original = examination._watch, examination.examine

    def sized(of: Callable) -> Callable:
        def examined(trainer, *arguments):
            if benchmark in SIZES:
                pretend_size(trainer.model, SIZES[benchmark])
            return of(trainer, *arguments)

        return examined

    with mock.patch.multiple(examination, _watch=sized(original[0]), examine=sized(original[1])):
        return examination.examine_recipe(recipe, flags, steps=steps)


def _config(file: str) -> str:
    """A recipe's file, without the models that only an earlier run would have trained."""
    config = read_yaml(SCRIPTS / "configs" / f"{file}.yaml")
    config.pop("reward_model", None)
    if "value_model_name_or_path" in config:
        config["value_model_name_or_path"] = stand_in()
    path = Path(tempfile.mkdtemp()) / "config.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return str(path)


# A processor takes minutes for the batches that these files are for.
_SMALLER = {
    "grpo_math": ["--rollout_batch_size", "32", "--train_batch_size", "32", "--max_completion_length", "48"]
    + ["--num_validation_prompts", "100"]
    + ["--use_vllm", "false", "--prompt_template", "chat", "--reward", "r1_zero"],
    "sft": ["--prompt_template", "chat", "--reward", "r1_zero"],
}


def answer_reward(prompts, completions, answer, **columns) -> list[float]:
    """1 for a response that holds the answer, as in the first steps of a run that will learn its form later."""
    return [float(word.lower() in one[0]["content"].lower()) for one, word in zip(completions, answer, strict=True)]


def form_reward(completions, **columns) -> list[float]:
    """1 for a response in the form that no model knows yet."""
    return [float("<answer>" in one[0]["content"]) for one in completions]


# What is unusual and no fault: name -> kind, whether the trainer is this library's, settings.
UNUSUAL = {
    "prompts that are cut": ("preference", True, {"max_prompt_tokens": 12}),
    "a reward of the form beside one of the answer": (
        "policy",
        False,
        {
            "train": lambda: mapped(word_of_reference)(data_of("policy")[0]),
            "reward_funcs": [answer_reward, form_reward],
        },
    ),
    "two sources of pairs": ("reward", False, {"train": lambda: two_sources(400)}),
}


def healthy_runs(recipes=tuple(RECIPES)) -> list[Run]:
    """All runs without a fault, in a fixed order."""
    runs = []
    for kind, names in TRAINERS.items():
        for own in (False, True):
            for model in (toy, stand_in if kind == "policy" else random_llama):
                name = f"{'trl_ext' if own else 'trl'}.{names[own]}Trainer, {model.__name__}"
                runs.append(Run(name, _stock(kind, own, model)))
        for index, (name, (size, options)) in enumerate(DOCUMENTED[kind].items()):
            model = (toy, stand_in if kind == "policy" else random_llama)[index // 2 % 2]
            report = _stock(kind, False, model, size=size, **_DEFAULT, **options)
            runs.append(Run(f"trl {kind}: {name}, {model.__name__}", report))
    for recipe in recipes:
        for file in (f"toy/{recipe}", *RECIPES[recipe]):
            runs.append(Run(f"{recipe} {file}.yaml", lambda steps, of=(recipe, file): recipe_report(*of, steps)))
    for name, (kind, own, options) in UNUSUAL.items():
        for model in (stand_in if kind == "policy" else random_llama, toy):
            runs.append(Run(f"{name}, {model.__name__}", _stock(kind, own, model, **options)))
    return runs
