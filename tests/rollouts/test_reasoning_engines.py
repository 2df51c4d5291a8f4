"""The engines that sample for the evaluation of reasoning: vLLM's settings, and entropies."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from trl_ext.rollouts import Generation, SamplingSettings, VLLMEngine, generate_responses, response_entropies

# ---- Engines ----


def test_the_settings_are_the_courses():
    settings = SamplingSettings()
    assert (settings.temperature, settings.top_p, settings.max_new_tokens) == (1.0, 1.0, 1024)
    assert settings.stop == ("</answer>",)
    for field, value in (("temperature", -1), ("top_p", 0), ("top_p", 1.1), ("max_new_tokens", 0), ("batch_size", 0)):
        with pytest.raises(ValueError, match=field):
            SamplingSettings(**{field: value})


def test_vllm_is_an_extra(monkeypatch, toy):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match=r"pip install 'trl_ext\[vllm\]'"):
        VLLMEngine("model", toy[1], SamplingSettings())


@pytest.mark.parametrize("on_cpu", [False, True])
def test_vllm_is_asked_for_the_same_thing(monkeypatch, toy, additions, on_cpu):
    """What goes to vLLM and what comes of its answer, with a stand-in for it; tests/with_vllm runs vLLM itself."""
    calls = {}

    class LLM:
        def __init__(self, **options):
            calls["options"] = options

        def generate(self, requests, sampling, use_tqdm):
            calls["requests"], calls["sampling"] = requests, sampling
            answer = {"token_ids": (5, 6), "text": "so </answer>"}
            reasons = ["stop", "length"]
            return [
                SimpleNamespace(outputs=[SimpleNamespace(**answer, finish_reason=reason)])
                for reason in reasons[: len(requests)]
            ]

    stand_in = SimpleNamespace(LLM=LLM, SamplingParams=lambda **options: options)
    monkeypatch.setitem(sys.modules, "vllm", stand_in)
    platform = SimpleNamespace(is_cpu=lambda: on_cpu)
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform))
    engine = VLLMEngine("a model", toy[1], SamplingSettings(max_prompt_tokens=7), dtype="bfloat16")
    prompts = additions[1][:1] * 2
    first, second = engine(prompts, seed=3)
    whole_prompts = {"enable_chunked_prefill": False} if on_cpu else {}
    assert calls["options"] == {"model": "a model", "dtype": "bfloat16", **whole_prompts}
    expected = generate_responses(*toy, prompts, max_new_tokens=1, max_prompt_tokens=7)[0].prompt_ids
    assert [request["prompt_token_ids"] for request in calls["requests"]] == [expected] * 2
    for sampling in calls["sampling"]:
        assert sampling["include_stop_str_in_output"] and sampling["stop"] == ["</answer>"]
        assert (sampling["max_tokens"], sampling["temperature"], sampling["top_p"]) == (1024, 1.0, 1.0)
    assert calls["sampling"][0]["seed"] != calls["sampling"][1]["seed"], "equal prompts must differ"
    assert first == Generation(expected, [5, 6], "so </answer>", True)
    assert not second.finished


def test_entropies_are_those_of_each_response_by_itself(toy, additions):
    model, tokenizer = toy
    generations = generate_responses(model, tokenizer, additions[1][:5], max_new_tokens=12)
    generations[1] = Generation(generations[1].prompt_ids, generations[1].response_ids[:3], "", False)
    generations.insert(2, Generation(generations[0].prompt_ids, [], "", False))
    found = response_entropies(model, generations, batch_size=4, pad_token_id=tokenizer.pad_token_id)
    assert found.pop(2) is None
    del generations[2]
    for generation, entropy in zip(generations, found, strict=True):
        ids = torch.tensor([generation.prompt_ids + generation.response_ids])
        with torch.no_grad():
            probs = model(ids).logits[0, len(generation.prompt_ids) - 1 : -1].double().softmax(-1)
        assert entropy == pytest.approx(-(probs * probs.log()).sum(-1).mean().item(), abs=1e-5)
