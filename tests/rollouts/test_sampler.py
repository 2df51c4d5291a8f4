"""`fast_rollouts` samples what transformers does: its greedy tokens, its distribution, its settings."""

from __future__ import annotations

import functools
import re

import pytest
import torch
import trl
from datasets import Dataset
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import AutoTokenizer, GenerationConfig, LogitsProcessorList

from tests.support.packing import VOCABULARY, tiny_model
from tests.support.sampling import END, batch, decoder, settings
from tests.support.tiny import pairs
from tests.support.trl_private import attention_of
from trl_ext import ReMaxConfig, ReMaxTrainer
from trl_ext.rollouts.sampler import evaluation_sampler, fast_rollouts, loop, rows, sampler_of, weights
from trl_ext.rollouts.sampler.loop import draw


def seeded(model, seed: int, given: dict, **options):
    torch.manual_seed(seed)
    return model.generate(**given, generation_config=settings(do_sample=True, **options))


def greedy(model, given: dict, *, logits_processor=None, stopping_criteria=None, **options):
    own = {"logits_processor": logits_processor, "stopping_criteria": stopping_criteria}
    return model.generate(**given, generation_config=settings(**options), **own)


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [
        *((architecture, torch.float64) for architecture in ("llama", "qwen2", "qwen3", "olmo2", "gpt_neox", "phi3")),
        # torch groups the products of experts in single precision only.
        *((architecture, torch.float32) for architecture in ("llama", "qwen2_moe", "mixtral")),
    ],
)
def test_greedy_responses_are_those_of_transformers(architecture, dtype):
    model, given = decoder(architecture, dtype), batch()
    expected = greedy(model, given)
    sampler = fast_rollouts(model)
    assert torch.equal(greedy(model, given), expected)
    assert sampler.log_probs is not None and sampler.largest_difference < (1e-4 if dtype == torch.float32 else 1e-9)


def plain_log_probs(model, sequence, mask, count: int, temperature: float = 1.0):
    """Log-probabilities of the first tokens of a response, in a forward pass of its row without padding."""
    width = len(mask)
    prompt, response = sequence[:width][mask != 0], sequence[width : width + count]
    logits = model(input_ids=torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(1, response[:, None])[:, 0]


@pytest.mark.parametrize("dtype,bound", [(torch.float64, 1e-6), (torch.float32, 1e-4)])
@pytest.mark.parametrize("prefill", [1, 20, 4096])
def test_log_probs_are_those_of_a_plain_forward_pass(monkeypatch, prefill, dtype, bound):
    model, given = decoder(dtype=dtype), batch()
    sampler = fast_rollouts(model)
    monkeypatch.setattr(loop, "PREFILL_TOKENS", prefill)
    sequences = seeded(model, 0, given, temperature=0.7, top_k=0)
    width, lengths = given["input_ids"].shape[1], set()
    for row, (sequence, mask) in enumerate(zip(sequences, given["attention_mask"], strict=True)):
        response = sequence[width:].tolist()
        ends = [place for place, token in enumerate(response) if token in (END, 50, 60)]
        count = ends[0] + 1 if ends else len(response)
        lengths.add(count)
        plain = plain_log_probs(model, sequence, mask, count, 0.7)
        assert (plain - sampler.log_probs[row, :count]).abs().max() < bound
        assert not sampler.log_probs[row, count:].any() and not any(response[count:])
    assert len(lengths) > 3 and max(lengths) == 24
    # They can take part in a loss.
    weight = torch.ones((), requires_grad=True)
    (weight * sampler.log_probs).sum().backward()
    assert weight.grad == sampler.log_probs.sum()


def test_a_row_does_not_depend_on_the_rows_beside_it():
    model, given = decoder(), batch()
    fast_rollouts(model)
    together = seeded(model, 3, given)
    few = seeded(model, 3, {name: values[:5] for name, values in given.items()})
    assert torch.equal(few, together[:5, : few.shape[1]])
    assert not torch.equal(seeded(model, 4, given), together)
    # Copies of a prompt have numbers of their own.
    assert not torch.equal(together[0], together[4])


def test_prompts_leave_when_their_rows_have_ended():
    """Six prompts with two rows each. The next logits of five rows of the second, fifth and sixth prompt are plain."""
    model, generator = decoder(), torch.Generator().manual_seed(0)
    prompts = [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in (13, 12, 11, 10, 9, 8)]
    tokens = torch.randint(VOCABULARY, (2, 12), generator=generator)
    alive = torch.tensor([False, False, True, True, False, False, False, False, True, False, True, True])
    with torch.inference_mode():
        own = loop.Decoder(weights.prepared(model, None, 12), prompts * 2, 4)
        own.encode()
        own.step(tokens[0])
        own.keep(alive)
        found = own.step(tokens[1, alive])
        rows = [(prompts[number % 6], tokens[:, row]) for row, number in enumerate(own.order) if alive[row]]
        expected = [model(torch.tensor([[*prompt, *more]])).logits[0, -1] for prompt, more in rows]
    torch.testing.assert_close(found, torch.stack(expected))


def test_frequencies_are_the_softmax():
    """Chi-square of 20,000 first tokens at temperature 1.3; its 99.9% quantile at 96 degrees of freedom is 144.6."""
    model = decoder(dtype=torch.float32)
    prompt = torch.tensor([[5, 9, 33]])
    fast_rollouts(model)
    given = {"input_ids": prompt.repeat(20_000, 1), "attention_mask": torch.ones(20_000, 3, dtype=torch.long)}
    torch.manual_seed(0)
    config = GenerationConfig(
        max_new_tokens=1, do_sample=True, temperature=1.3, top_k=0, pad_token_id=0, eos_token_id=1
    )
    tokens = model.generate(**given, generation_config=config)[:, -1]
    expected = 20_000 * (model(input_ids=prompt).logits[0, -1] / 1.3).softmax(-1).detach()
    observed = tokens.bincount(minlength=VOCABULARY)
    kept = expected >= 5
    assert kept.sum() > 40
    rest = (observed[~kept].sum() - expected[~kept].sum()) ** 2 / expected[~kept].sum().clamp(min=5)
    assert ((observed - expected)[kept] ** 2 / expected[kept]).sum() + rest < 144.6


def test_draw_by_hand():
    """Masses 1, 2, 4, 1 over 8: cumulative 1/8, 3/8, 7/8, 1."""
    scores = torch.tensor([1.0, 2.0, 4.0, 1.0]).log().repeat(6, 1)
    uniform = torch.tensor([0.0, 0.124, 0.126, 0.38, 0.874, 0.9], dtype=torch.float64)
    tokens, log_probs = draw(scores.clone(), uniform)
    assert tokens.tolist() == [0, 0, 1, 2, 2, 3]
    torch.testing.assert_close(log_probs.exp(), torch.tensor([1, 1, 2, 4, 4, 1]) / 8)
    tokens, log_probs = draw(scores[:1], None)
    assert tokens.tolist() == [2] and log_probs.exp().item() == pytest.approx(0.5)


def test_draw_never_takes_a_removed_token_and_refuses_nan():
    scores = torch.full((1000, 512), float("-inf"))
    scores[:, [3, 300, 510]] = 0.0
    uniform = torch.cat([torch.linspace(0, 1, 999, dtype=torch.float64), torch.tensor([1.0], dtype=torch.float64)])
    assert set(draw(scores, uniform)[0].tolist()) == {3, 300, 510}
    with pytest.raises(RuntimeError, match="logits are NaN"):
        draw(torch.full((1, 64), float("nan")), torch.zeros(1, dtype=torch.float64))


@pytest.mark.parametrize("prompts", ["padded", "of equal length"])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"repetition_penalty": 1.5},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 10},
        {"do_sample": True, "top_k": 1},
        {"do_sample": True, "top_p": 1e-6, "top_k": 0},
        {"num_return_sequences": 1, "suppress_tokens": [4, 7, 50]},
    ],
    ids=lambda given: next(reversed(given), "greedy"),
)
def test_settings_are_those_of_transformers(given, prompts):
    """Responses end at different steps, and rows that have ended leave the sampler's batch."""
    model, rows_given = decoder(), batch()
    if prompts == "of equal length":
        # The longest prompt and its copies, and that prompt with other beginnings; transformers may drop the mask.
        full = rows_given["input_ids"][rows_given["attention_mask"].all(1)]
        ids = torch.cat([full, full.roll(3, dims=1), full.roll(7, dims=1)])
        rows_given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    expected = greedy(model, rows_given, **given)
    sampler = fast_rollouts(model)
    assert torch.equal(greedy(model, rows_given, **given), expected)
    assert sampler.log_probs is not None


def test_a_forward_pass_that_a_trainer_has_wrapped():
    """accelerate's wrapper computes in another precision than the sampler, outside the trainer's autocast."""
    model = decoder(dtype=torch.float32)
    forward = model.forward
    model.forward = torch.autocast("cpu", dtype=torch.bfloat16)(forward)
    sampler = fast_rollouts(model)
    model.generate(**batch(), generation_config=settings())
    assert sampler.reason is None and sampler.largest_difference < 1e-4


def test_without_private_operators(monkeypatch):
    model, given = decoder(dtype=torch.float32), batch()
    fast_rollouts(model)
    expected = seeded(model, 0, given)
    monkeypatch.setattr(weights, "packs", lambda dtype: False)
    assert torch.equal(seeded(model, 0, given), expected)


def test_the_model_stays_as_it_is(monkeypatch):
    """Its parameters too, to which DistributedDataParallel's hooks belong, and after an error."""
    model, given = tiny_model("qwen2", head=False), batch()
    model.generation_config = GenerationConfig()
    parameters, state = list(model.parameters()), {name: value.clone() for name, value in model.state_dict().items()}
    model.model.layers[0].eval()
    forward = model.forward
    # As accelerate does, whose functions keep the signature.
    model.forward = replaced = functools.wraps(forward)(lambda *args, **kwargs: forward(*args, **kwargs))
    before, attention = [dict(vars(module)) for module in model.modules()], attention_of(model)
    sampler = fast_rollouts(model, dtype=torch.bfloat16)
    greedy(model, given)
    monkeypatch.setattr(loop, "draw", lambda *given, **more: {}["no such entry"])
    with pytest.raises(KeyError):
        greedy(model, given)
    assert sampler.reason is None and model.forward is replaced and "generate" in vars(model)
    sampler.remove()
    assert [dict(vars(module)) for module in model.modules()] == before and attention_of(model) == attention
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_updates_are_seen():
    model, given = decoder(), batch()
    fast_rollouts(model)
    before = greedy(model, given)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    after = greedy(model, given)
    assert not torch.equal(before, after)
    assert torch.equal(after, type(model).generate(model, **given, generation_config=settings()))


def test_adapters():
    model = get_peft_model(decoder(), LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    model.double()
    given = batch()
    expected = greedy(model, given)
    sampler = fast_rollouts(model)
    assert torch.equal(greedy(model, given), expected)
    with model.disable_adapter():
        assert not torch.equal(greedy(model, given), expected)
    assert sampler.log_probs is not None
    # Adapters keep parameters of their own precision, to which they cast their input.
    rounded = fast_rollouts(model.float(), dtype=torch.bfloat16)
    greedy(model, given)
    assert rounded.reason is None and rounded.log_probs is not None


def test_bfloat16():
    """Mean difference of log-probabilities from float32: a product rounds to 2**-9 of its value."""
    model, given = decoder(dtype=torch.float32), batch()
    sampler = fast_rollouts(model, dtype=torch.bfloat16)
    sequences = seeded(model, 0, given, top_k=0)
    assert next(model.parameters()).dtype == torch.float32 and sampler.reason is None
    differences = []
    for row in range(4):
        count = int((sampler.log_probs[row] != 0).sum())
        plain = plain_log_probs(model, sequences[row], given["attention_mask"][row], count)
        differences.append((plain - sampler.log_probs[row, :count]).abs())
    assert torch.cat(differences).mean() < 0.05


def place_in_the_batch(ids, scores):
    """The sampler groups the rows of a prompt, and rows that have ended leave it."""
    place = torch.arange(len(scores))[:, None]
    return torch.full_like(scores, -torch.inf).scatter(1, 5 + place, 0.0)


def first_in_the_batch(ids, scores):
    return torch.arange(len(ids)) == 0


def with_a_learned_prompt():
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    return get_peft_model(decoder(dtype=torch.float32), config)


@pytest.mark.parametrize(
    ("model", "given", "reason"),
    [
        ("gpt2", {}, "its positions are not rotary"),
        ("mistral", {}, "responses can exceed the sliding window"),
        (with_a_learned_prompt, {}, "its adapter learns a prompt"),
        ("llama", {"num_beams": 2}, "the call asks for beam_search"),
        ("llama", {"guidance_scale": 1.5}, "the call sets guidance_scale"),
        ("llama", {"logits_processor": LogitsProcessorList([place_in_the_batch])}, "the call takes logits_processor"),
        ("llama", {"stopping_criteria": [first_in_the_batch]}, "the call takes stopping_criteria"),
    ],
)
def test_what_is_left_to_transformers(caplog, model, given, reason):
    model, rows_given = decoder(model) if isinstance(model, str) else model(), batch()
    expected = greedy(model, rows_given, **given)
    sampler = fast_rollouts(model)
    for _ in range(2):
        assert torch.equal(greedy(model, rows_given, **given), expected)
    assert len(re.findall(f"transformers generates: .*{reason}", caplog.text)) == 1 and sampler.log_probs is None


def test_a_model_that_differs_is_left_to_transformers(caplog, monkeypatch):
    model, given = decoder(), batch()
    expected = greedy(model, given)
    monkeypatch.setattr(rows, "_mask", lambda outside: torch.zeros(outside.shape)[:, None, None])
    sampler = fast_rollouts(model)
    assert torch.equal(greedy(model, given), expected)
    assert "off a plain forward pass" in sampler.reason and sampler.reason in caplog.text


@pytest.mark.parametrize("own", [False, True], ids=["stock", "ours"])
def test_trainers(policy_path, tmp_path, own, caplog):
    """The stock trainer, and this library's with stop strings and a greedy rollout beside the sampled one."""
    lengths: list[int] = []

    def reward(completions, completion_ids, **columns):
        lengths.extend(map(len, completion_ids))
        return [float(len(ids)) for ids in completion_ids]

    options = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none", "max_steps": 2, "logging_steps": 1}
    options |= {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 16, "bf16": False}
    rows = Dataset.from_list([{"prompt": row["prompt"]} for row in pairs(8)])
    config, trainer_class = (ReMaxConfig, ReMaxTrainer) if own else (trl.GRPOConfig, trl.GRPOTrainer)
    trainer = trainer_class(
        policy_path,
        reward_funcs=reward,
        args=config(**options, **({"stop": ["e"]} if own else {})),
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(policy_path),
    )
    sampler = fast_rollouts(trainer)
    trainer.train()
    assert "transformers generates" not in caplog.text and sampler.reason is None and len(set(lengths)) > 3
    assert trainer.state.log_history[0]["completions/clipped_ratio"] < 1
    assert sampler.log_probs.any()


def test_evaluation_follows_autocast_and_keeps_the_trainers_sampler():
    model, given = decoder(dtype=torch.float32), batch()
    earlier, own = fast_rollouts(model), fast_rollouts(model)
    assert own is not earlier and sampler_of(model) is own
    for dtype, enabled in ((torch.bfloat16, True), (torch.float32, False)):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            sampler = evaluation_sampler(model)
            sampler.generate(**given, generation_config=settings())
            assert evaluation_sampler(model) is sampler, "it is checked once"
        assert sampler.dtype == dtype and sampler.log_probs is not None
    assert sampler_of(model) is own and model.generate == own.generate and own.log_probs is None


def test_a_replaced_generate_stays():
    model = decoder()
    model.generate = replaced = model.generate
    assert fast_rollouts(model).reason == "its generate method has been replaced"
    assert vars(model)["generate"] is replaced and evaluation_sampler(model) is None
