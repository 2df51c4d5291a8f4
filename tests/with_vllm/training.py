"""A policy that trains on vLLM's responses, and how far vLLM's log-probabilities are from its own."""

from __future__ import annotations

from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.trl_private import tokenized_prompts
from trl_ext import PolicyConfig, PolicyTrainer
from trl_ext.data.math import load_math, math_prompt

# Of a log-probability, both in float32; 7e-6 was measured.
TOLERANCE = 1e-4
# A short run of recipes/grpo_math.py with vLLM.
FLAGS = (
    *("--use_vllm=true", "--use_cpu=true", "--max_steps=4", "--logging_steps=1", "--max_completion_length=24"),
    *("--rollout_batch_size=16", "--train_batch_size=16", "--per_device_train_batch_size=16", "--group_size=4"),
    *("--num_validation_prompts=6", "--num_eval_prompts=8", "--disable_tqdm=true"),
)


def lengths(completions, **_) -> list[float]:
    """Rewards short responses, so that every group has a signal."""
    return [-float(len(completion[-1]["content"])) for completion in completions]


def policy(model_path: str, folder: Path, *, peft: bool = False, **settings) -> PolicyTrainer:
    """A trainer of all parameters or of an adapter, in float32, not yet trained."""
    rows = load_math("toy", "train")[:16]
    config = PolicyConfig(
        output_dir=str(folder),
        use_vllm=True,
        per_device_train_batch_size=16,
        num_generations=4,
        max_steps=3,
        temperature=0.7,
        learning_rate=1e-2 if peft else 1e-3,
        lr_scheduler_type="constant",
        beta=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        **{"max_completion_length": 24, **settings},
    )
    return PolicyTrainer(
        AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32),
        reward_funcs=lengths,
        args=config,
        processing_class=AutoTokenizer.from_pretrained(model_path),
        train_dataset=Dataset.from_list([{"prompt": math_prompt(row, None)} for row in rows]),
        peft_config=LoraConfig(target_modules="all-linear", r=4) if peft else None,
    )


def assert_follows(trainer: PolicyTrainer) -> None:
    """Train, and check that vLLM has the trainer's weights in each rollout, and after the last update once it is sent.

    Without the last update, vLLM's log-probabilities are far off, so a weight that did not arrive would be seen.
    """
    trainer.train()
    name = "sampling/sampling_logp_difference/max"
    differences = [entry[name] for entry in trainer.state.log_history if name in entry]
    assert len(differences) == 3 and max(differences) < TOLERANCE
    assert largest_difference(trainer) > 0.1
    trainer.vllm_generation.sync_weights()
    assert largest_difference(trainer) < TOLERANCE


@torch.no_grad()
def largest_difference(trainer: PolicyTrainer) -> float:
    """The largest difference of a sampled token's log-probability in vLLM from a plain pass of the trainer's model."""
    prompt_ids = tokenized_prompts(trainer, list(trainer.train_dataset["prompt"]))
    _, completion_ids, log_probs, _ = trainer.vllm_generation.generate(prompt_ids, None, num_generations=1)
    model, differences = trainer.model.eval(), []
    for prompt, completion, found in zip(prompt_ids, completion_ids, log_probs, strict=True):
        logits = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1] / trainer.temperature
        own = logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])
        differences.append((torch.tensor(found) - own).abs().max().item())
    return max(differences)
