"""Runs without a fault: stock trainers, TRL's documented settings, the recipes' files, and unusual ones.

Models are the embedded one and stand-ins for SmolLM2 with another chat template: a random Llama of its shape, an
eighth as wide, and for responses that end the embedded weights as a Llama. Settings that were documented for a large
model are examined on a stand-in that says it has that many weights, because learning rates are judged by the size.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from unittest import mock

import torch
import yaml
from datasets import Dataset

import trl_ext
from trl_ext.doctor import Report, cli
from trl_ext.runs import RECIPES
from trl_ext.runs.configs import read_config
from trl_ext.toy import MODEL_DIR, score

# Kind -> TRL's trainer and this library's.
TRAINERS = {"sft": ("SFT", "SFT"), "preference": ("DPO", "Preference")}
TRAINERS |= {"reward": ("Reward", "Reward"), "policy": ("GRPO", "Policy")}
SYSTEM_TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nAnswer briefly.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_ARGUMENTS = ("peft_config", "reward_funcs", "reward_processing_classes", "ref_model", "processing_class")


def true_reward(prompts, completions, **columns) -> list[float]:
    """The true score of the embedded benchmark."""
    return [score(p[-1]["content"], c[0]["content"]) for p, c in zip(prompts, completions, strict=True)]


@cache
def data_of(kind: str) -> Dataset:
    name = "train_gen" if kind == "policy" else "train_prefs"
    rows = trl_ext.load_benchmark("toy")[name].select(range(60))
    if kind != "sft":
        return rows
    return rows.map(lambda row: {"completion": row["chosen"]}).select_columns(["prompt", "completion"])


def mapped(edit: Callable[[dict], dict]) -> Callable[[Dataset], Dataset]:
    return lambda rows: Dataset.from_list([{**row, **edit(row)} for row in rows])


def word_of_reference(row: dict) -> dict:
    """A word that the reference and many responses have, as the answer."""
    return {"answer": max(row["reference_response_text"].strip(".!?").split(), key=len)}


def build(kind: str, own: bool, *, model: str | None = None, rows: Callable | None = None, name=None, **options):
    """A trainer on the embedded rows; `options` are settings, or arguments of the trainer, which may be made here."""
    import trl

    name, room = name or TRAINERS[kind][own], trl_ext if own else trl
    options = {key: value() if key in _ARGUMENTS and callable(value) else value for key, value in options.items()}
    arguments = {key: options.pop(key) for key in _ARGUMENTS if key in options}
    if kind == "policy":
        arguments.setdefault("reward_funcs", true_reward)
        options = {"num_generations": 4, "max_completion_length": 48, "beta": 0.04, **options}
    shared = {"learning_rate": 3e-4, "per_device_train_batch_size": 8, "max_steps": 20, "report_to": "none"}
    shared |= {"use_cpu": True, "save_strategy": "no", "disable_tqdm": True, "output_dir": tempfile.mkdtemp()}
    settings = getattr(room, f"{name}Config")(**{**shared, **options})
    arguments["train_dataset"] = rows(data_of(kind)) if rows else data_of(kind)
    return getattr(room, f"{name}Trainer")(model=model or str(MODEL_DIR), args=settings, **arguments)


def toy() -> str:
    return str(MODEL_DIR)


@cache
def random_llama() -> str:
    """Folder of a small random Llama of SmolLM2's shape: 9 heads, 3 of keys, tied embeddings, and a system prompt."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = _tokenizer()
    torch.manual_seed(0)
    shape = {"hidden_size": 72, "intermediate_size": 192, "num_hidden_layers": 6, "num_attention_heads": 9}
    shape |= {name: getattr(tokenizer, name) for name in ("eos_token_id", "pad_token_id", "bos_token_id")}
    config = LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=3, tie_word_embeddings=True, **shape)
    return _saved(LlamaForCausalLM(config), tokenizer)


@cache
def stand_in() -> str:
    """Folder of the embedded model's weights as a Llama with a system prompt, which answers as the embedded model."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR)
    known = {name: value for name, value in model.config.to_dict().items() if hasattr(LlamaConfig(), name)}
    known |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "attention_bias": True, "head_dim": None}
    llama = LlamaForCausalLM(LlamaConfig(**known))
    missing, unexpected = llama.load_state_dict(model.state_dict(), strict=False)
    # Qwen2 has no bias where Llama has one; everything else is the same.
    assert not unexpected and all(name.endswith("o_proj.bias") for name in missing)
    for name in missing:
        torch.nn.init.zeros_(llama.get_parameter(name))
    return _saved(llama, _tokenizer())


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


def stock(kind: str, own: bool, model: Callable[[], str], *, size: float = 0, **options) -> Report:
    trainer = build(kind, own, model=model(), **options)
    if size:
        pretend_size(trainer.model, size)
    return cli.watch(trainer, 3)


def lora(task: str | None = None, **options):
    from peft import LoraConfig

    return LoraConfig(**{"r": 32, "lora_alpha": 16, "task_type": task, **options})


# What TRL's scripts and the defaults of its configurations say, each for its kind, for models of 500 million weights.
_PACKED = {"packing": True, "per_device_train_batch_size": 2, "max_length": 256}
_WRAPPED = {"packing": True, "packing_strategy": "wrapped", "max_length": 64}
_SMALL_BATCHES = {"gradient_accumulation_steps": 8, "per_device_train_batch_size": 2}
_LORA = {"peft_config": partial(lora, "CAUSAL_LM")}
DOCUMENTED = {
    "sft": [(2e-5, _PACKED), (2e-4, {**_LORA, **_PACKED}), (2e-5, {}), (2e-5, _WRAPPED)],
    "preference": [
        *[(5e-7, _SMALL_BATCHES), (5e-6, _LORA), (1e-6, {}), (1e-6, {"loss_type": ["hinge"]})],
        (1e-6, {"loss_type": ["robust"], "label_smoothing": 0.1}),
        *[(1e-6, {"loss_type": ["ipo"], "beta": 0.5}), (1e-6, {"loss_type": ["apo_zero"]})],
        (1e-6, {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 1.0]}),
    ],
    "reward": [(1e-4, {}), (1e-4, {"peft_config": partial(lora, "SEQ_CLS")})],
    "policy": [
        *[(1e-6, {"beta": 0.0}), (1e-6, {}), (1e-6, {"loss_type": "cispo", "beta": 0.0})],
        (1e-6, {"loss_type": "dr_grpo", "scale_rewards": "none", "beta": 0.0}),
        (1e-6, {"loss_type": "grpo", "num_iterations": 2, "beta": 0.0}),
        *[(1e-5, {**_LORA, "beta": 0.0}), (1e-6, {"beta": 0.05, "name": "RLOO"})],
    ],
}
ONLINE = ("grpo", "dr_grpo", "gspo", "rloo", "remax", "online", "ppo", "online_preference")
# Configurations -> the recipes that are examined with them; a folder alone has a file for each.
FILES = {
    "toy": "aot dpo ipo preference kto reward_model sft_math sft grpo_math " + " ".join(ONLINE),
    "wildchat": "aot dpo ipo reward_model grpo dr_grpo gspo",
    "gpt2_hh": "dpo reward_model sft ppo",
    **{"smollm2/pairs": "aot dpo ipo kto", "smollm2/online": "grpo rloo", "smollm2/demonstrations": "sft"},
    **{
        "smollm2": "reward_model",
        "gsm8k": "sft_math grpo_math",
        "math": "sft_math grpo_math",
        "countdown": "sft_math grpo_math",
    },
}
# The size of the models that a folder's files are for.
SIZES = {"smollm2": 135e6, "wildchat": 1.5e9, "gpt2_hh": 124e6, "gsm8k": 1.5e9, "math": 1.5e9, "countdown": 3e9}
# A processor takes minutes for the batches that these files are for.
_MATH = "--prompt_template chat --reward r1_zero "
_SMALLER = {"sft_math": _MATH, "grpo_math": _MATH + "--rollout_batch_size 32 --train_batch_size 32 --use_vllm false "}
_SMALLER["grpo_math"] += "--max_completion_length 48 --num_validation_prompts 100"


def recipe_report(recipe: str, file: str) -> Report:
    """Examine a recipe under one of its files, on the embedded data, and on the stand-in if the model is not toy."""
    size, config = SIZES.get(file.partition("/")[0]), read_config(RECIPES / "configs" / f"{file}.yaml")
    # Only an earlier run would have trained these models.
    config.pop("reward_model", None)
    if "value_model_name_or_path" in config:
        config["value_model_name_or_path"] = stand_in()
    path = Path(tempfile.mkdtemp()) / "config.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    flags = ["--config", str(path)]
    flags += ["--reward_function", "tests.doctor.runs:true_reward"] if recipe in ONLINE else []
    if size:
        flags += ["--model_name_or_path", stand_in(), "--use_cpu", "true", "--dataset_name", "toy"]
        flags += _SMALLER.get(recipe, "").split()
        # The embedded data are few, and the length of the run is that of the file's own data.
        flags += [] if recipe in (*ONLINE, "grpo_math") else ["--max_steps", "2000"]
    watch = cli.watch

    def sized(trainer, steps: int) -> Report:
        pretend_size(trainer.model, size) if size else None
        return watch(trainer, steps)

    with mock.patch.object(cli, "watch", sized):
        return cli.examine_recipe(recipe, flags, steps=3)


def _answer_reward(completions, answer, **columns) -> list[float]:
    return [float(word.lower() in one[0]["content"].lower()) for one, word in zip(completions, answer, strict=True)]


def _form_reward(completions, **columns) -> list[float]:
    """1 for a response in the form that no model knows yet."""
    return [float("<answer>" in one[0]["content"]) for one in completions]


def sorted_by_length(rows: Dataset) -> Dataset:
    return Dataset.from_list(sorted(rows, key=lambda row: len(str(row.get("chosen", row["prompt"])))))


# What is unusual and no fault, such as a file in an order that the loader shuffles.
UNUSUAL = {
    "truncated prompts": ("preference", True, {"max_prompt_tokens": 12}),
    "a reward of the form beside one of the answer": (
        *("policy", False),
        {"rows": mapped(word_of_reference), "reward_funcs": lambda: [_answer_reward, _form_reward]},
    ),
    "sorted rows": ("sft", False, {"rows": sorted_by_length}),
    "rows grouped by length": ("sft", True, {"train_sampling_strategy": "group_by_length"}),
}


def healthy_runs() -> dict[str, Callable[[], Report]]:
    runs = {}
    for kind, names in TRAINERS.items():
        models = (toy, stand_in if kind == "policy" else random_llama)
        for own, model in ((own, model) for own in (False, True) for model in models):
            runs[f"{'trl_ext' if own else 'trl'}-{names[own]}-{model.__name__}"] = partial(stock, kind, own, model)
        for index, (rate, options) in enumerate(DOCUMENTED[kind]):
            options = {"learning_rate": rate, "max_steps": 1000, "size": 5e8, **options}
            runs[f"documented-{kind}-{index}"] = partial(stock, kind, False, models[index // 2 % 2], **options)
        for name, (of, own, options) in UNUSUAL.items():
            if of == kind:
                runs |= {f"{name}-{m.__name__}": partial(stock, kind, own, m, **options) for m in models}
    for where, recipes in FILES.items():
        for recipe in recipes.split():
            file = where if "/" in where else f"{where}/{recipe}"
            runs[f"{recipe}-{file}"] = partial(recipe_report, recipe, file)
    return runs
