"""Tiny reward models: pairs with further columns, trainers of this library and of TRL, scores one at a time."""

from __future__ import annotations

import torch
from peft import LoraConfig

from tests.support import train_once
from tests.support.tiny import pairs, token_ids

THREE_STEPS = {"max_steps": 3, "gradient_accumulation_steps": 2, "learning_rate": 0.1}


def lora(**options) -> LoraConfig:
    # B is zero otherwise, and the first gradients of A with it.
    options = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, **options}
    return LoraConfig(**options)


def rows_with(count: int, seed: int = 0, **columns) -> list[dict]:
    """Pairs with further columns, each `f(row) -> value`."""
    return [{**row, **{name: f(row) for name, f in columns.items()}} for row in pairs(count, seed=seed)]


def build(
    model, folder, rows=None, *, stock=False, peft_config=None, eval_rows=None, processing_class=None, **arguments
):
    """A `RewardTrainer` on `rows`, eight pairs by default; TRL's if `stock`. `arguments` are its configuration's."""
    spec = {"trainer": "trl.RewardTrainer" if stock else "RewardTrainer", "model": model, "dtype": None}
    spec |= {} if rows is None else {"rows": rows}
    spec |= {} if eval_rows is None else {"held_out": eval_rows}
    given = {"peft_config": peft_config, "processing_class": processing_class}
    return train_once.build({**spec, "args": arguments}, str(folder), **given)


def train(*arguments, **keywords):
    trainer = build(*arguments, **keywords)
    trainer.train()
    return trainer


def scores_one_by_one(model, tokenizer, rows: list[dict]) -> list[tuple[float, float]]:
    """Scores of both sides of each row, from the last token of one unpadded sequence at a time, in float64."""
    model = model.double().eval()
    scores = []
    with torch.no_grad():
        for row in rows:
            prompt, chosen, rejected = token_ids(tokenizer, row)
            scores.append(tuple(model(torch.tensor([prompt + side])).logits.item() for side in (chosen, rejected)))
    return scores
