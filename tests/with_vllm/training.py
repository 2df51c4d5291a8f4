"""A policy that trains on vLLM's responses, its model, and how far vLLM's log-probabilities are from its own."""

from __future__ import annotations

from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.support.trl_private import tokenized_prompts
from trl_ext import PolicyConfig, PolicyTrainer
from trl_ext.data.math import load_math, math_prompt
from trl_ext.toy import MODEL_DIR

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
    settings = {"max_completion_length": 24, "num_generations": 4, "max_steps": 3, "temperature": 0.7, **settings}
    settings |= {"per_device_train_batch_size": 16, "learning_rate": 1e-2 if peft else 1e-3, "beta": 0.0}
    settings |= {"lr_scheduler_type": "constant", "logging_steps": 1, "save_strategy": "no", "report_to": "none"}
    config = PolicyConfig(output_dir=str(folder), use_vllm=True, use_cpu=True, bf16=False, **settings)
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


# ---- The embedded model with heads of a size that vLLM's CPU attention supports ----


HEAD = 32
KEPT = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)


def save_wide_toy(path: str | Path) -> None:
    """Save the embedded Qwen2 as a Llama with heads of 32 numbers instead of 24, the same function but for rounding.

    The additional numbers of a head are zeros. The base of the rotary embedding is changed so that the frequencies of
    the other numbers stay the same, and the queries so that the scale of the scores does.
    """
    toy = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    config, weights = toy.config, toy.state_dict()
    grown = HEAD / (config.hidden_size // config.num_attention_heads)
    base = config.rope_parameters["rope_theta"] ** grown
    wide = LlamaForCausalLM(
        LlamaConfig(
            **{name: getattr(config, name) for name in KEPT},
            head_dim=HEAD,
            # Llama has it on the outputs too, where the embedded model has none.
            attention_bias=True,
            rope_parameters={"rope_type": "default", "rope_theta": base},
        )
    )
    for name in list(weights):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        if "o_proj" in name:
            weights[name] = _pad_heads(weights[name].T, config.num_attention_heads).T
            weights[name.replace("weight", "bias")] = torch.zeros(config.hidden_size)
        elif "self_attn" in name:
            weights[name] = _pad_heads(weights[name], heads) * (grown**0.5 if "q_proj" in name else 1)
    wide.load_state_dict(weights)
    wide.generation_config = toy.generation_config
    wide.save_pretrained(path)
    AutoTokenizer.from_pretrained(MODEL_DIR).save_pretrained(path)


def _pad_heads(tensor: Tensor, heads: int) -> Tensor:
    """Zeros behind each half of a head's rows, since the rotary embedding pairs the halves."""
    halves = tensor.unflatten(0, (heads, 2, -1))
    padding = [0, 0] * (tensor.dim() - 1) + [0, HEAD // 2 - halves.shape[2]]
    return torch.nn.functional.pad(halves, padding).flatten(0, 2)
