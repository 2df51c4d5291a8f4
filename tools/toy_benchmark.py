"""Build the embedded benchmark from the base model: `python -m tools.toy_benchmark [--output FOLDER]`.

Preference pairs are samples of the base model, labelled by simulated annotators who see the true scores with noise.
The build runs on one CPU thread. The same seed gives the same files on the same machine with the same torch (checked
by two full builds with torch 2.13.0); other versions or processors may round differently and sample other responses.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import random
import statistics
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.toy_demonstrations import training_trace
from tools.toy_prompts import INSTRUCTION_KINDS, prompt_pool
from trl_ext.files import write_json_lines
from trl_ext.toy import DATA_DIR, MAX_NEW_TOKENS, MODEL_DIR, kind_of, score
from trl_ext.toy.prompts import parse

SEED = 0
SAMPLES_PER_PROMPT = 4
ANNOTATORS = 3
ANNOTATION_NOISE = 0.15
PREFERENCE_ROWS = {"train": 2000, "validation": 200, "test": 400}
PROMPT_ROWS = {"train": 1500, "validation": 200, "test": 400}
MATH_ROWS = {"train": 400, "validation": 200, "test": 200}


class Response(NamedTuple):
    """The text of a response and whether it reached its end token within the limit."""

    text: str
    finished: bool


@torch.inference_mode()
def respond(
    model,
    tokenizer,
    prompts: list[str],
    *,
    temperature: float = 0.0,
    seed: int = 0,
    max_new_tokens: int = MAX_NEW_TOKENS,
    batch_size: int = 100,
) -> list[Response]:
    """Answer each prompt once at a temperature; 0 decodes greedily. The same seed gives the same answers."""
    torch.manual_seed(seed)
    if temperature > 0:
        options = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    else:
        options = {"do_sample": False}
    responses: list[Response] = []
    for begin in range(0, len(prompts), batch_size):
        texts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
            )
            for prompt in prompts[begin : begin + batch_size]
        ]
        encoded = tokenizer(
            texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False
        ).to(model.device)
        output = model.generate(**encoded, max_new_tokens=max_new_tokens, use_cache=True, **options)
        completions = output[:, encoded["input_ids"].shape[1] :]
        finished = (completions == tokenizer.eos_token_id).any(dim=1).tolist()
        decoded = tokenizer.batch_decode(completions, skip_special_tokens=True)
        responses += [Response(*pair) for pair in zip(decoded, finished, strict=True)]
    return responses


def row_id_of(*texts: str) -> str:
    """Return 32 hexadecimal digits that depend only on the texts."""
    return hashlib.sha256("\x1f".join(texts).encode()).hexdigest()[:32]


def choose_prompts(pool: str, count: int, seed: int) -> list[str]:
    """Choose distinct instructions from a pool, taking the kinds in turn until each runs out; shuffle them."""
    generator = random.Random(f"{pool} {seed}")
    remaining = {kind: generator.sample(prompts, len(prompts)) for kind, prompts in prompt_pool(pool).items()}
    available = sum(len(remaining[kind]) for kind in INSTRUCTION_KINDS)
    if count > available:
        raise ValueError(f"pool {pool!r} has {available} instructions, {count} were asked for: ask for fewer")
    chosen: list[str] = []
    while len(chosen) < count:
        chosen += [remaining[kind].pop() for kind in INSTRUCTION_KINDS if remaining[kind]]
    chosen = chosen[:count]
    generator.shuffle(chosen)
    return chosen


def choose_pair(responses: list[Response], generator: random.Random) -> tuple[str, str] | None:
    """Choose two different responses from the samples, ignoring empty and cut ones; None if there are none."""
    texts = sorted({response.text for response in responses if response.finished and response.text.strip()})
    return tuple(generator.sample(texts, 2)) if len(texts) > 1 else None


def annotate(prompt: str, first: str, second: str, generator: random.Random) -> dict:
    """Let simulated annotators compare two responses.

    Each sees the gap between the true scores plus normal noise; the majority decides. The confidence that the chosen
    response is better (0.5 to 1), the strength of the preference and the quality of the chosen response (ratings of
    1 to 5) are averages over the annotators.
    """
    gap = score(prompt, first) - score(prompt, second)
    seen = [gap + generator.gauss(0, ANNOTATION_NOISE) for _ in range(ANNOTATORS)]
    first_wins = sum(value > 0 for value in seen) > ANNOTATORS / 2
    chosen, rejected = (first, second) if first_wins else (second, first)
    toward_chosen = [value if first_wins else -value for value in seen]
    confidence = statistics.mean(1 / (1 + math.exp(-value / ANNOTATION_NOISE)) for value in toward_chosen)
    quality = [score(prompt, chosen) + generator.gauss(0, ANNOTATION_NOISE) for _ in range(ANNOTATORS)]
    return {
        "chosen_text": chosen,
        "rejected_text": rejected,
        "avg_confidence": round(max(0.5, confidence), 3),
        "avg_preference_strength": round(statistics.fmean(_rating(abs(value)) for value in seen), 3),
        "avg_training_quality": round(statistics.fmean(_rating(value) for value in quality), 3),
    }


def _rating(value: float) -> int:
    return 1 + round(4 * min(1.0, max(0.0, value)))


def _prompt_columns(prompt: str) -> dict:
    return {"prompt_messages": [{"role": "user", "content": prompt}], "prompt_text": prompt}


def build_preferences(model, tokenizer, pool: str, count: int, *, seed: int = SEED) -> list[dict]:
    """Sample four responses to each prompt at temperature 1 and label two different ones of them."""
    # Some prompts do not yield two different responses, so more prompts are sampled than needed.
    prompts = choose_prompts(pool, count + count // 10 + 5, seed)
    repeated = [prompt for prompt in prompts for _ in range(SAMPLES_PER_PROMPT)]
    samples = respond(model, tokenizer, repeated, temperature=1.0, seed=seed)
    generator = random.Random(f"annotators {pool} {seed}")
    rows = []
    for number, prompt in enumerate(prompts):
        own = samples[number * SAMPLES_PER_PROMPT : (number + 1) * SAMPLES_PER_PROMPT]
        pair = choose_pair(own, generator)
        if pair is not None and len(rows) < count:
            label = annotate(prompt, *pair, generator)
            row_id = row_id_of("preference", prompt, label["chosen_text"], label["rejected_text"])
            rows.append({"row_id": row_id, **_prompt_columns(prompt), **label, "kind": kind_of(prompt)})
    if len(rows) < count:
        raise ValueError(f"only {len(rows)} of {count} pairs in pool {pool!r}: the model's samples do not differ")
    return rows


def build_prompts(model, tokenizer, pool: str, count: int, *, seed: int = SEED) -> list[dict]:
    """Choose prompts and answer each greedily with the base model; skip prompts whose answer was cut."""
    prompts = choose_prompts(pool, count + count // 20 + 5, seed + 1)
    responses = respond(model, tokenizer, prompts)
    answered = [
        (prompt, one.text) for prompt, one in zip(prompts, responses, strict=True) if one.finished and one.text.strip()
    ]
    if len(answered) < count:
        raise ValueError(f"only {len(answered)} of {count} responses in pool {pool!r} end within the token limit")
    return [
        {
            "row_id": row_id_of("prompt", prompt),
            **_prompt_columns(prompt),
            "reference_response_text": text,
            "kind": kind_of(prompt),
        }
        for prompt, text in answered[:count]
    ]


def build_math(pool: str, count: int) -> list[dict]:
    """Choose additions, each with its answer and, for training, a worked response."""
    return [
        {
            "row_id": row_id_of("math", prompt),
            **_prompt_columns(prompt),
            "answer": str(sum(parse(prompt).numbers)),
            **({"response": training_trace(prompt)} if pool == "train" else {}),
        }
        for prompt in prompt_pool(pool)["add"][:count]
    ]


def build_benchmark(model, tokenizer) -> dict[str, list[dict]]:
    """Build all splits by name; prompts of pretraining and of the train, validation and test splits are disjoint."""
    splits = {}
    for pool, count in PREFERENCE_ROWS.items():
        splits[f"{pool}_prefs"] = build_preferences(model, tokenizer, pool, count)
    for pool, count in PROMPT_ROWS.items():
        splits[f"{pool}_gen"] = build_prompts(model, tokenizer, pool, count)
    for pool, count in MATH_ROWS.items():
        splits[f"{pool}_math"] = build_math(pool, count)
    return splits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=DATA_DIR, help="folder to write (default: the embedded data)")
    parser.add_argument("--model", type=Path, default=MODEL_DIR, help="base model (default: the embedded model)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(arguments.model).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    splits = build_benchmark(model, tokenizer)
    for name, rows in splits.items():
        write_json_lines(arguments.output / f"{name}.jsonl", rows)
        print(f"{name}: {len(rows)} rows")


if __name__ == "__main__":
    main()
