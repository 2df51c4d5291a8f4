"""Train the embedded tokenizer and base model: `python -m tools.toy_model [--output FOLDER] [--steps N]`.

Training runs on one CPU thread. The same seed gives the same files on the same machine with the same versions of torch
and tokenizers (checked by two full builds with torch 2.13.0 and tokenizers 0.23.3); other versions may round
differently and give another model of the same kind.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from tools.toy_demonstrations import demonstrate
from tools.toy_prompts import INSTRUCTION_KINDS, prompt_pool
from trl_ext.toy import MAX_NEW_TOKENS, MODEL_DIR

VOCABULARY_SIZE = 1024
# The end and pad tokens have nonzero ids, so that the idiom `token_id or default` keeps them.
START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
# ChatML. A newline precedes each turn but the first, so that a completion ends exactly at its end token and the
# prompt with the generation prompt is a prefix of the whole conversation.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ ('' if loop.first else '\\n') + '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\n<|im_start|>assistant\\n' }}{% endif %}"
)
SEED = 0
STEPS, BATCH_SIZE, WARMUP_STEPS, DECAY_STEPS = 2500, 64, 50, 500
LEARNING_RATE, WEIGHT_DECAY, BETAS, CLIP = 3e-3, 0.05, (0.9, 0.98), 1.0
ADDITION_SHARE = 0.22


class Corpus:
    """An endless seeded stream of (prompt, demonstration) pairs from the pretraining pool."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.pool = prompt_pool("pretrain")

    def draw(self) -> tuple[str, str]:
        kind = "add" if self.random.random() < ADDITION_SHARE else self.random.choice(INSTRUCTION_KINDS)
        prompt = self.random.choice(self.pool[kind])
        return prompt, demonstrate(prompt, self.random)

    def batches(self) -> Iterator[list[tuple[str, str]]]:
        """Yield batches of pairs of similar length, in shuffled groups of four; this saves a third of the padding."""
        while True:
            pairs = sorted((self.draw() for _ in range(4 * BATCH_SIZE)), key=lambda pair: len(pair[0]) + len(pair[1]))
            chunks = [pairs[begin : begin + BATCH_SIZE] for begin in range(0, len(pairs), BATCH_SIZE)]
            self.random.shuffle(chunks)
            yield from chunks


def train_tokenizer(seed: int = SEED) -> Qwen2Tokenizer:
    """Train a byte-level BPE with Qwen2's splitting rules: single digits, words with their leading space.

    `AutoTokenizer` builds a `Qwen2Tokenizer` for every Qwen2 model, whatever `tokenizer.json` says, so training uses
    the rules of that class. The corpus has no newlines, so none are merged and each turn starts at a fixed token.
    """
    corpus = Corpus(seed)
    rules = Qwen2Tokenizer().backend_tokenizer
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer, tokenizer.pre_tokenizer = rules.normalizer, rules.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[START, END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    roles = ["system", "user", "assistant"] * 100
    tokenizer.train_from_iterator(roles + [text for _ in range(20_000) for text in corpus.draw()], trainer)
    learned = json.loads(tokenizer.to_str())["model"]
    return Qwen2Tokenizer(
        vocab=learned["vocab"],
        merges=[tuple(merge) for merge in learned["merges"]],
        unk_token=None,
        eos_token=END,
        pad_token=PAD,
        extra_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


def new_model(tokenizer: Qwen2Tokenizer, seed: int = SEED) -> Qwen2ForCausalLM:
    """Return an untrained model of 404,000 parameters in the Qwen2 architecture."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, max_new_tokens=MAX_NEW_TOKENS
    )
    return model


def encode_batch(tokenizer, pairs: list[tuple[str, str]]) -> dict[str, torch.Tensor]:
    """Render and pad a batch; the labels cover only the completions, including their end token.

    A causal model padded on the right needs no attention mask.
    """
    sequences, prompt_lengths = [], []
    for prompt, response in pairs:
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
        before = tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True, tokenize=False)
        prompt_lengths.append(len(tokenizer.encode(before, add_special_tokens=False)))
        whole = tokenizer.apply_chat_template(turns, tokenize=False)
        sequences.append(tokenizer.encode(whole, add_special_tokens=False))
    width = max(map(len, sequences))
    input_ids = torch.full((len(pairs), width), tokenizer.pad_token_id)
    labels = torch.full((len(pairs), width), -100)
    for row, (sequence, prompt_length) in enumerate(zip(sequences, prompt_lengths, strict=True)):
        input_ids[row, : len(sequence)] = torch.tensor(sequence)
        labels[row, prompt_length : len(sequence)] = torch.tensor(sequence[prompt_length:])
    return {"input_ids": input_ids, "labels": labels}


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear warm-up, then constant, then linear decay to zero over the last fifth (500 of 2,500 steps)."""
    decay = max(1, DECAY_STEPS * steps // STEPS)
    return min((step + 1) / WARMUP_STEPS, 1.0, (steps - step) / decay)


def pretrain(model, tokenizer, *, steps: int = STEPS, seed: int = SEED) -> None:
    """Train the model in place on a fixed number of batches of demonstrations."""
    batches = Corpus(seed + 1).batches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, steps))
    model.train()
    for step in range(steps):
        batch = encode_batch(tokenizer, next(batches))
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if (step + 1) % 250 == 0:
            print(f"step {step + 1} of {steps}: loss {loss.item():.3f}, {time.process_time():.0f} CPU s", flush=True)
    model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=MODEL_DIR, help="folder to write (default: the embedded model)")
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps; fewer for a trial")
    parser.add_argument("--seed", type=int, default=SEED, help="of weights and batches; the tokenizer stays the same")
    arguments = parser.parse_args()
    if arguments.seed != SEED and arguments.output == MODEL_DIR:
        parser.error("another --seed needs an --output: the embedded model is that of the default seed")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    tokenizer = train_tokenizer()
    model = new_model(tokenizer, arguments.seed)
    pretrain(model, tokenizer, steps=arguments.steps, seed=arguments.seed)
    model.save_pretrained(arguments.output)
    tokenizer.save_pretrained(arguments.output)
    print(f"{model.num_parameters():,} parameters in {arguments.output}, {time.process_time():.0f} CPU s")


if __name__ == "__main__":
    main()
