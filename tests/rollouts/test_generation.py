"""`generate_responses` against decoding by hand, stop strings, engines, and what a model was saved with."""

from __future__ import annotations

import copy
import sys
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support import REPOSITORY
from tests.support.rollout_once import build, lengths, prompts
from tests.support.sampling import batch, decoder, settings
from tests.support.tiny import build_tokenizer, pairs
from tests.support.train_once import in_processes
from tests.support.trl_private import rollout_batches, sampled_responses
from trl_ext import GRPOConfig, GRPOTrainer
from trl_ext.models.batches import temporarily
from trl_ext.models.packing import unwrapped
from trl_ext.rollouts import (
    Generation,
    SamplingSettings,
    VLLMEngine,
    generate_responses,
    map_over_ranks,
    response_entropies,
)
from trl_ext.rollouts.generation import without_template
from trl_ext.rollouts.sampler import fast_rollouts
from trl_ext.rollouts.stopping import StopInResponse, cut_at_stop

PROMPTS = [row["prompt"] for row in pairs(6, seed=2)]
LIMIT = 12
SAMPLED = {"temperature": 1.0, "seed": 3}


@pytest.fixture(scope="module")
def tokenizer(tiny_model_path):
    return AutoTokenizer.from_pretrained(tiny_model_path)


@pytest.fixture
def endless(tiny_model_path):
    """Random weights, with which greedy responses have no end token within `LIMIT`."""
    return AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32).eval()


@pytest.fixture
def model(endless):
    """With a larger row for the end token: of greedy responses to `PROMPTS` half end before `LIMIT`."""
    with torch.no_grad():
        end = endless.lm_head.weight[endless.config.eos_token_id]
        end.copy_(torch.randn(end.shape, generator=torch.Generator().manual_seed(0)) * 0.4)
    return endless


def template_ids(tokenizer, prompt) -> list[int]:
    text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    return tokenizer(text)["input_ids"]


@torch.no_grad()
def decode_by_hand(model, prompt_ids: list[int], limit: int, end: int) -> list[int]:
    """Greedy decoding without a cache: the whole text through the model for every token."""
    ids = list(prompt_ids)
    while len(ids) < len(prompt_ids) + limit:
        ids.append(model(torch.tensor([ids])).logits[0, -1].argmax().item())
        if ids[-1] == end:
            break
    return ids[len(prompt_ids) :]


@pytest.mark.parametrize("batch_size", [1, 4, 32])
def test_greedy_is_the_argmax_of_each_row_alone(batch_size, model, tokenizer):
    generated = generate_responses(model, tokenizer, PROMPTS, max_new_tokens=LIMIT, batch_size=batch_size)
    for prompt, generation in zip(PROMPTS, generated, strict=True):
        ids = template_ids(tokenizer, prompt)
        expected = decode_by_hand(model, ids, LIMIT, tokenizer.eos_token_id)
        assert generation.prompt_ids == ids
        assert generation.response_ids == expected
        assert generation.finished is (expected[-1] == tokenizer.eos_token_id)
        assert generation.text == tokenizer.decode([token for token in expected if token > 2])
    # Both ways to end are among them.
    assert {generation.finished for generation in generated} == {True, False}
    assert {len(generation.response_ids) for generation in generated if not generation.finished} == {LIMIT}
    assert min(len(generation.response_ids) for generation in generated) < LIMIT


def test_a_model_with_an_adapter(model, tokenizer):
    from peft import LoraConfig, get_peft_model

    plain = generate_responses(model, tokenizer, PROMPTS[:2], max_new_tokens=4)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False))
    adapted.generation_config.repetition_penalty = 1.3
    generated = generate_responses(adapted.eval(), tokenizer, PROMPTS[:2], max_new_tokens=4)
    for generation in generated:
        expected = decode_by_hand(adapted, generation.prompt_ids, 4, tokenizer.eos_token_id)
        assert generation.response_ids == expected
    assert generated != plain
    assert adapted.generation_config.repetition_penalty == 1.3


def test_long_prompts_lose_their_beginning_and_texts_have_no_template(model, tokenizer):
    texts = [*PROMPTS, "the cat"]
    expected = [*(template_ids(tokenizer, prompt)[-9:] for prompt in PROMPTS), tokenizer("the cat")["input_ids"]]
    generated = generate_responses(model, tokenizer, texts, max_new_tokens=4, max_prompt_tokens=9)
    for ids, generation in zip(expected, generated, strict=True):
        assert generation.prompt_ids == ids
        assert generation.response_ids == decode_by_hand(model, ids, 4, tokenizer.eos_token_id)
    assert generate_responses(model, tokenizer, [], max_new_tokens=3) == []


@pytest.mark.parametrize(
    ("settings", "shipped"),
    [
        ({}, {"repetition_penalty": 1.3}),
        ({}, {"do_sample": True, "temperature": 2.0, "top_k": 3}),
        (SAMPLED, {"top_k": 1}),
        (SAMPLED, {"min_p": 0.99}),
    ],
    ids=str,
)
def test_settings_that_the_model_ships_with_are_ignored(settings, shipped, model, tokenizer):
    expected = generate_responses(model, tokenizer, PROMPTS, max_new_tokens=LIMIT, **settings)
    for name, value in shipped.items():
        setattr(model.generation_config, name, value)
    assert generate_responses(model, tokenizer, PROMPTS, max_new_tokens=LIMIT, **settings) == expected
    assert {name: getattr(model.generation_config, name) for name in shipped} == shipped


def test_the_models_own_end_tokens_end_a_response(model, tokenizer):
    """A chat model ends its turn with one token and a document with another: both end a response."""
    (plain,) = generate_responses(model, tokenizer, PROMPTS[:1], max_new_tokens=LIMIT)
    other_end = plain.response_ids[1]
    first = plain.response_ids.index(other_end)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, other_end]
    (ended,) = generate_responses(model, tokenizer, PROMPTS[:1], max_new_tokens=LIMIT)
    assert ended.response_ids == plain.response_ids[: first + 1]
    assert ended.finished


def test_sampling_is_seeded_and_leaves_the_random_state(model, tokenizer):
    settings = {"max_new_tokens": LIMIT, "temperature": 1.0}
    torch.manual_seed(123)
    before = torch.get_rng_state()
    first = generate_responses(model, tokenizer, PROMPTS, seed=1, **settings)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(456)
    assert generate_responses(model, tokenizer, PROMPTS, seed=1, **settings) == first
    assert generate_responses(model, tokenizer, PROMPTS, seed=2, **settings) != first


@pytest.mark.parametrize(
    ("prompts", "settings", "phrases"),
    [
        (PROMPTS, {"temperature": -0.5}, "temperature .* got -0.5"),
        (PROMPTS, {"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        (PROMPTS, {"top_p": 1.1}, "top_p must lie in"),
        (PROMPTS, {"max_prompt_tokens": 0}, "max_prompt_tokens must be at least 1, got 0"),
        (["the cat", ""], {}, "prompt 1 "),
        ("the cat", {}, r"give \[prompt\]"),
        ([{"role": "user", "content": "the cat"}], {}, r"give \[prompt\]"),
        (PROMPTS, {"stop": "</answer>"}, "stop must be a list of texts"),
        (PROMPTS, {"stop": [""]}, "stop must be a list of texts"),
    ],
)
def test_refusals(prompts, settings, phrases, model, tokenizer):
    with pytest.raises(ValueError, match=phrases):
        generate_responses(model, tokenizer, prompts, **{"max_new_tokens": 4, **settings})


@pytest.mark.parametrize("training", [True, False])
def test_mode_of_the_model_is_restored(training, model, tokenizer):
    modes = []
    model.train(training).register_forward_pre_hook(lambda module, _: modes.append(module.training))
    generate_responses(model, tokenizer, PROMPTS[:1], max_new_tokens=2)
    assert set(modes) == {False}
    assert model.training is training


# ---- map_over_ranks ----


def test_every_rank_does_all_of_the_work_under_fsdp():
    from accelerate.utils import DistributedType

    accelerator = SimpleNamespace(num_processes=2, process_index=1, distributed_type=DistributedType.FSDP)
    assert map_over_ranks(lambda items: [item + 1 for item in items], [1, 2, 3], accelerator) == [2, 3, 4]


RANK_SCRIPT = """
import sys
from pathlib import Path

from accelerate import Accelerator
from trl_ext.rollouts import end_processes, map_over_ranks

accelerator = Accelerator(cpu=True)
assert accelerator.num_processes == 2
for count in (0, 1, 2, 5):
    seen = []
    found = map_over_ranks(lambda items: seen.extend(items) or [f"{i}!" for i in items], range(count), accelerator)
    assert found == [f"{i}!" for i in range(count)], found
    assert seen == list(range(accelerator.process_index, count, 2)), seen
Path(sys.argv[1], f"rank{accelerator.process_index}").touch()
end_processes(accelerator)
"""


@pytest.mark.slow
def test_two_processes_share_the_work(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    script = tmp_path / "ranks.py"
    script.write_text(RANK_SCRIPT)
    in_processes(2, str(script), str(tmp_path))
    assert (tmp_path / "rank0").exists() and (tmp_path / "rank1").exists()


@pytest.mark.parametrize(
    ("prompts", "told"),
    [
        (["Name a fruit.", "What is 2 + 3?", "The answer is:"], True),
        (["The answer is:"] * 2 + ["Name a fruit."], False),
        (["<|im_start|>user\nHi<|im_end|>"], False),
        (PROMPTS, False),
    ],
)
def test_plain_prompts_of_a_model_with_a_chat_template(prompts, told, tokenizer, monkeypatch):
    line = without_template(tokenizer, prompts)
    assert (line is not None) is told and (not told or "rename the column to prompt_text" in line)
    monkeypatch.setattr(tokenizer, "chat_template", None)
    assert without_template(tokenizer, prompts) is None


# ---- Engines and entropies ----


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
            outputs = [SimpleNamespace(**answer, finish_reason=reason) for reason in ("stop", "length")]
            return [SimpleNamespace(outputs=[output]) for output in outputs[: len(requests)]]

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


# ---- Settings that a model was saved with ----

# 259 tokens; the run's own settings are temperature 1, the whole vocabulary and 8 tokens a response.
SAVED = {
    "bad_words_ids": [[token] for token in range(3, 200)],
    "forced_eos_token_id": 2,
    "guidance_scale": 8.0,
    "min_length": 200,
    "min_p": 0.5,
    "num_beams": 2,
    "num_return_sequences": 2,
    "stop_strings": ["a"],
    "suppress_tokens": list(range(3, 250)),
}
# TRL itself gives these neutral values.
GIVEN_BY_TRL = {"repetition_penalty": 3.0, "temperature": 0.01, "top_k": 1, "top_p": 0.01}


def sampled(trainer, *, stock: bool = False) -> list[list[int]]:
    torch.manual_seed(5)
    return sampled_responses(trainer, [row["prompt"] for row in prompts()], stock=stock)


@pytest.fixture(scope="module", params=["auto", "off", "lora"])
def trainer(request, policy_path, tmp_path_factory):
    own = {"lora": True} if request.param == "lora" else {"args": {"fast_rollouts": request.param}}
    spec = {"model": policy_path, "dtype": "float32", **own}
    return build(spec, str(tmp_path_factory.mktemp("rollouts")))


@pytest.mark.parametrize("name", [*SAVED, *GIVEN_BY_TRL])
def test_rollouts_ignore_what_the_model_was_saved_with(name, trainer):
    """TRL's own generation, with the same settings, follows the model's where TRL does not give a value."""
    model = unwrapped(trainer.model)
    neutral, saved = model.generation_config, copy.deepcopy(model.generation_config)
    expected = sampled(trainer)
    setattr(saved, name, (SAVED | GIVEN_BY_TRL)[name])
    with temporarily(model, generation_config=saved):
        assert sampled(trainer) == expected
        assert model.generation_config is saved and getattr(saved, name) == (SAVED | GIVEN_BY_TRL)[name]
        if name in SAVED:
            try:
                stock = sampled(trainer, stock=True)
            except (AttributeError, TypeError, ValueError):
                stock = None
            assert stock != expected
    assert model.generation_config is neutral


def test_ends_stay_those_of_the_model(trainer):
    """The end tokens of a checkpoint are its own, and end rollouts."""
    assert set(trainer.generation_config.eos_token_id) == set(trainer.eos_token_ids)
    ended = [ids for ids in sampled(trainer) if ids[-1] in trainer.eos_token_ids]
    assert ended and all(token not in trainer.eos_token_ids for ids in ended for token in ids[:-1])


# ---- Stop strings ----


def test_stop_strings_end_a_response():
    tokenizer = build_tokenizer()
    model = decoder(vocab_size=len(tokenizer))
    given = batch()
    plain = model.generate(**given, generation_config=settings())[:, 17:]
    stop = [tokenizer.decode(plain[0, 3:5]), tokenizer.decode(plain[1, 6:7])]
    expected = model.generate(**given, generation_config=settings(stop_strings=stop), tokenizer=tokenizer)
    sampler = fast_rollouts(model)
    criteria = [StopInResponse(tokenizer, stop, 17)]
    found = model.generate(**given, generation_config=settings(), stopping_criteria=criteria)
    assert torch.equal(found, expected) and not torch.equal(found[:, 17:], plain) and sampler.log_probs is not None


@pytest.mark.parametrize("fast", [False, True])
def test_a_stop_string_that_begins_in_the_prompt_ends_nothing(fast, endless, tokenizer):
    """Greedy responses to prompts whose end and first response tokens together would be a stop string."""
    prompts = ["what is this", "what is that one"]
    plain = generate_responses(endless, tokenizer, prompts, max_new_tokens=LIMIT, fast=fast)
    stop = [tokenizer.decode([*row.prompt_ids[-2:], *row.response_ids[:1]]) for row in plain]
    assert all(one not in row.text for one in stop for row in plain)
    assert generate_responses(endless, tokenizer, prompts, max_new_tokens=LIMIT, stop=stop, fast=fast) == plain


def cut(text: str, stop: list[str]) -> str:
    """The text up to the first end of a stop string."""
    ends = [text.index(one) + len(one) for one in stop if one in text]
    return text[: min(ends, default=len(text))]


def test_a_stopped_response_has_no_padding(endless, tokenizer):
    prompts = ["a", "what is this", "so", "one more of them", "and that"]
    plain = generate_responses(endless, tokenizer, prompts, max_new_tokens=LIMIT)
    stop = [tokenizer.decode(plain[row].response_ids[at : at + 2]) for row, at in ((0, 2), (3, 6))]
    stopped = generate_responses(endless, tokenizer, prompts, max_new_tokens=LIMIT, stop=stop)
    assert any(row.finished for row in stopped)
    for one, whole in zip(stopped, plain, strict=True):
        count = len(one.response_ids)
        assert one.response_ids == whole.response_ids[:count] and len(one.log_probs) == count
        assert one.finished == (any(text in one.text for text in stop)) and (one.finished or count == LIMIT)
        assert one.text == cut(whole.text, stop)
        assert not any(text in tokenizer.decode(one.response_ids[:-1]) for text in stop), "no token more than it takes"


def test_rollouts_with_a_stop_string_that_begins_in_the_prompt(tmp_path, tiny_model_path, tokenizer):
    """No padding is trained on, and the sampler's log-probabilities are those of the trainer."""
    # The policy stays the one that has sampled.
    settings = {"max_completion_length": LIMIT, "max_steps": 1, "learning_rate": 0.0, "use_cpu": True, "bf16": False}
    settings |= {"per_device_train_batch_size": 8, "num_generations": 8, "report_to": "none", "save_strategy": "no"}
    # Each prompt ends with the first half of this text.
    stop = ["at" + tokenizer.decode([token]) for token in range(20, 60)]
    data = Dataset.from_dict({"prompt": ["what is that", "look at"]})
    arguments = GRPOConfig(str(tmp_path), stop=stop, **settings)
    trainer = GRPOTrainer(tiny_model_path, lengths, arguments, train_dataset=data)
    trainer.train()
    assert trainer.sampler.reason is None and trainer.sampler.log_probs is not None
    [rollout] = rollout_batches(trainer)
    difference = trainer.score(trainer.model, rollout).log_probs - rollout["sampling_per_token_logps"]
    difference = difference * rollout["completion_mask"]
    assert difference.abs().max() < 1e-4


def test_a_special_token_is_no_stop_string(endless, tokenizer, tmp_path, tiny_model_path):
    special = tokenizer.eos_token
    with pytest.raises(ValueError, match="add it to eos_token_id"):
        generate_responses(endless, tokenizer, ["so"], max_new_tokens=2, stop=[special])
    settings = GRPOConfig(str(tmp_path), stop=[special], num_generations=8, use_cpu=True, bf16=False, report_to="none")
    data = Dataset.from_dict({"prompt": ["so"] * 8})
    with pytest.raises(ValueError, match="add it to eos_token_id"):
        GRPOTrainer(tiny_model_path, lambda **columns: [0.0], settings, train_dataset=data)


def test_a_tokenizer_without_a_padding_token(endless, tokenizer, tiny_model_path):
    prompts = ["a", "what is this"]
    expected = generate_responses(endless, tokenizer, prompts, max_new_tokens=LIMIT)
    bare = AutoTokenizer.from_pretrained(tiny_model_path, pad_token=None)
    bare.pad_token = None
    assert generate_responses(endless, bare, prompts, max_new_tokens=LIMIT) == expected


# ---- The end of a stop string in a text ----


class Pieces:
    """A tokenizer whose tokens are the pieces of a text."""

    @staticmethod
    def decode(tokens, skip_special_tokens):
        return "".join(token for token in tokens if token != "<pad>")


@pytest.mark.parametrize(
    ("tokens", "stop", "expected"),
    [
        # The token that completes the string stays whole; the text ends with the string.
        (["a", "</ans", "wer>\n", "b", "<pad>"], ["</answer>"], (["a", "</ans", "wer>\n"], "a</answer>")),
        (["</answer>"], ["</answer>"], (["</answer>"], "</answer>")),
        # Of several the one that is complete first, and of one its first occurrence.
        (["a!", "b.", "c!"], [".", "!"], (["a!"], "a!")),
        (["x", "yz", "y"], ["yz", "y"], (["x", "yz"], "xy")),
        (["a", "</answer"], ["</answer>"], None),
        (["a"], [], None),
        ([], ["a"], None),
    ],
)
def test_responses_are_cut_behind_the_first_stop_string(tokens, stop, expected):
    assert cut_at_stop(Pieces, tokens, stop) == expected
