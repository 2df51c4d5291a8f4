"""Faults of online trainers: rewards, sampling, prompts and the reference policy."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable

import torch

from benchmarks._doctor_faults.planting import Fault, RunFault, change_columns, change_setting
from benchmarks._doctor_runs import mapped, stand_in, word_of_reference
from trl_ext.toy import MODEL_DIR

LLAMA = (
    "{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>{{ message['content'] }}"
    "<|eot_id|>{% endfor %}"
)
LLAMA_FREE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"


def _template(template: str | None, **attributes):
    def plant(trainer, patch):
        tokenizer = trainer.processing_class
        patch(tokenizer, "chat_template", template.replace("ORIGINAL", tokenizer.chat_template) if template else None)
        for name, value in attributes.items():
            patch(tokenizer, name, value)

    return plant


def _user_text(row):
    return [{"role": "user", "content": row["prompt"][0]["content"] + "<|im_end|>"}]


def _plain(row):
    return row["prompt"][0]["content"]


def _system(row):
    return [{"role": "system", "content": "Answer in one short sentence."}, *row["prompt"]]


def _system_lost(trainer, patch):
    change_columns(prompt=_system)(trainer, patch)
    patch(trainer.processing_class, "chat_template", "{% set messages = messages[1:] %}" + LLAMA_FREE)


BUILT = [
    Fault("template-missing", "policy", _template(None)),
    Fault("template-unused", "policy", change_columns(prompt=_plain)),
    Fault("template-of-another-model", "policy", _template(LLAMA)),
    Fault("special-token-in-text", "policy", change_columns(prompt=_user_text)),
    Fault("begin-token-doubled", "policy", _template("<|im_start|>ORIGINAL", bos_token="<|im_start|>")),
    Fault("system-prompt-lost", "policy", _system_lost),
    Fault("greedy-sampling", "policy", change_setting("args", "temperature", value=0.01)),
]


def _reward(function: Callable[..., float]) -> Callable:
    """Settings with a reward of one prompt, response and row."""

    def reward(prompts, completions, **columns) -> list[float]:
        names = [name for name, values in columns.items() if isinstance(values, list)]
        rows = [dict(zip(names, values, strict=True)) for values in zip(*(columns[n] for n in names), strict=True)]
        texts = [(p[-1]["content"], c[0]["content"]) for p, c in zip(prompts, completions, strict=True)]
        return [float(function(*text, row)) for text, row in zip(texts, rows, strict=True)]

    return {"reward_funcs": lambda: reward}


def _noisy_reference(trainer) -> None:
    torch.manual_seed(0)
    for weight in trainer.ref_model.parameters():
        weight.data += torch.randn_like(weight) * weight.abs().mean() * 4


def _shared_embedding(trainer) -> None:
    trainer.ref_model.model.embed_tokens = trainer.model.model.embed_tokens


def _noisy_attention(trainer) -> None:
    for module in trainer.model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5


def _greedy_generation(trainer) -> None:
    trainer.model.generate = functools.partial(trainer.model.generate, do_sample=False)


def _classifier(folder: str):
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    model.config.pad_token_id = 2
    return model


@functools.cache
def _reward_folder() -> str:
    folder = tempfile.mkdtemp()
    _classifier(stand_in()).save_pretrained(folder)
    return folder


def _other_tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL_DIR)


RUNS = [
    RunFault("rewards-all-zero", "policy", _reward(lambda prompt, text, row: 0)),
    RunFault("rewards-all-one", "policy", _reward(lambda prompt, text, row: 1)),
    RunFault("rewards-constant", "policy", _reward(lambda prompt, text, row: 0.3)),
    RunFault("dead-groups", "policy", _reward(lambda prompt, text, row: len(prompt))),
    RunFault("no-gradient", "policy", {**_reward(lambda prompt, text, row: 0.3), "beta": 0.0}),
    RunFault("responses-all-cut", "policy", {"max_completion_length": 2}),
    RunFault("stop-texts-never-occur", "policy", {"max_completion_length": 2, "stop": ["</answer>"]}, only="trl_ext"),
    RunFault(
        "parser-never-matches",
        "policy",
        _reward(lambda prompt, text, row: "<answer>" in text),
        rows=mapped(word_of_reference),
    ),
    RunFault("reward-follows-length", "policy", _reward(lambda prompt, text, row: len(text))),
    RunFault(
        "reward-turned-around",
        "policy",
        _reward(lambda prompt, text, row: -(row["answer"].lower() in text.lower())),
        rows=mapped(word_of_reference),
    ),
    RunFault("identical-samples", "policy", plant=_greedy_generation, only="trl"),
    RunFault("temperature-not-shared", "policy", {"generation_kwargs": {"temperature": 0.5}}),
    RunFault("greedy-sampling", "policy", {"temperature": 0.01}),
    RunFault("reward-weights-negative", "policy", {"reward_weights": [-1.0]}),
    RunFault("reward-model-untrained", "policy", {"reward_funcs": lambda: _classifier(str(MODEL_DIR))}),
    RunFault(
        "reward-model-template",
        "policy",
        {"reward_funcs": lambda: _classifier(_reward_folder()), "reward_processing_classes": _other_tokenizer},
    ),
    RunFault("kl-explodes", "policy", plant=_noisy_reference),
    RunFault("ratio-not-one", "policy", {"num_iterations": 2}, plant=_noisy_attention),
    RunFault("reference-moves", "policy", plant=_shared_embedding),
]
LATER_RUNS = [
    RunFault("identical-samples", "policy", {"generation_kwargs": {"top_k": 1}}, only="trl_ext"),
]
