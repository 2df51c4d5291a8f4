"""Tiny reward models for tests: LoRA adapters and full models with heads of random weights, and plain scores."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from trl_ext.models import score_sequences

SEQUENCES = [[5, 9, 33, 2], [7, 8], [100, 120, 4, 55, 66, 2], [3]]
VARIANTS = {
    "plain": {},
    "all linear, rank 6": {"r": 6, "target_modules": "all-linear", "lora_dropout": 0.1},
    "rslora": {"r": 4, "use_rslora": True, "target_modules": ["k_proj", "down_proj"]},
    "dora": {"use_dora": True},
    "one layer, ranks by module": {"layers_to_transform": [1], "rank_pattern": {"v_proj": 2}},
}


PROMPTS = [[{"role": "user", "content": text}] for text in ("one", "where is the cat?", "and now for a long one", "")]
COMPLETIONS = ["a", "on the mat, as it always is", "", "seven red birds in an old tree"]


def load_base(path: str, **keywords):
    keywords = {"num_labels": 1, "dtype": torch.float32, **keywords}
    return AutoModelForSequenceClassification.from_pretrained(path, **keywords)


def randomize(model, part: str, seed: int, scale: float = 0.3) -> None:
    """Give random values to the parameters with `part` in their name: B of a new LoRA is zero, a trained one not."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if part in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)


def save_adapter(base: str, folder: Path, *, seed: int = 0, tokenizer: bool = True, **settings) -> str:
    """Save a LoRA reward model on `base`; settings are LoraConfig's. Returns the folder."""
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "SEQ_CLS", **settings}
    model = get_peft_model(load_base(base), LoraConfig(**settings))
    for offset, part in enumerate(("lora_", "modules_to_save")):
        randomize(model, part, 10 * seed + offset)
    model.save_pretrained(folder)
    if tokenizer:
        AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return str(folder)


def save_full_model(base: str, folder: Path, *, seed: int = 0, **keywords) -> str:
    """Save a full reward model with a random head. Returns the folder."""
    model = load_base(base, **keywords)
    randomize(model, "score", seed)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return str(folder)


def load_adapter(base: str, folder: str):
    """A reward adapter on a base of its own, loaded with PEFT alone."""
    return PeftModel.from_pretrained(load_base(base), folder).eval()


def load_policy(base: str, *, seed: int = 3, **settings):
    """A causal language model with a LoRA adapter that is trained, random so that it changes the outputs."""
    settings = {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "up_proj"], "task_type": "CAUSAL_LM", **settings}
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    policy = get_peft_model(model, LoraConfig(**settings))
    randomize(policy, ".lora_", seed)
    return policy


def plain_scores(model, sequences: list[list[int]]):
    """Scores one row at a time and by hand: hidden state of the last token of the transformer, times the head."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = inner.score.modules_to_save["default"] if hasattr(inner.score, "modules_to_save") else inner.score
    scores = []
    with torch.no_grad():
        for sequence in sequences:
            hidden = inner.base_model(torch.tensor([sequence])).last_hidden_state[0, -1]
            scores.append((hidden * head.weight[0]).sum())
    return torch.stack(scores)


def turns(tokenizer, prompts=PROMPTS, completions=COMPLETIONS, *, finished: bool = True) -> list[list[int]]:
    """Token ids straight from the chat template; a cut completion goes without the end-of-turn token."""
    ids = []
    for prompt, completion in zip(prompts, completions, strict=True):
        message = {"role": "assistant", "content": completion}
        text = tokenizer.apply_chat_template([*prompt, message], tokenize=False)
        ids.append(tokenizer(text if finished else text.removesuffix("<|im_end|>"))["input_ids"])
    return ids


def save_reward_models(base: str, folder: Path) -> dict[str, str]:
    """Two adapters of different ranks and a full model."""
    return {
        "adapter": save_adapter(base, folder / "adapter-run"),
        "rank6": save_adapter(base, folder / "rank6", seed=1, r=6, target_modules="all-linear"),
        "full": save_full_model(base, folder / "full-run", seed=2),
    }


def separate_scores(base: str, folder: str, sequences=SEQUENCES) -> torch.Tensor:
    model = load_adapter(base, folder)
    model.config.pad_token_id = 0
    return score_sequences(model, sequences, batch_size=2, pad_token_id=0)
