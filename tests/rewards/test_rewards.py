"""Saved reward models: scores are those of plain passes, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.files import user
from tests.support.float64 import float64_throughout
from tests.support.reward_adapters import (
    COMPLETIONS,
    PROMPTS,
    load_adapter,
    load_base,
    load_policy,
    plain_scores,
    save_adapter,
    save_full_model,
    save_reward_models,
    turns,
)
from trl_ext.models import SharedBackbone
from trl_ext.rewards import RewardEnsemble, RewardModel, share_or_load


@pytest.fixture(scope="module")
def folders(tiny_model_path, tmp_path_factory) -> dict[str, str]:
    return save_reward_models(tiny_model_path, tmp_path_factory.mktemp("rewards"))


def plain_model(base: str, folder: str):
    """As transformers and PEFT load it, with nothing of this library."""
    if (Path(folder) / "adapter_config.json").is_file():
        return load_adapter(base, folder)
    return load_base(folder).eval()


@pytest.mark.parametrize("kind", ["adapter", "full"])
def test_scores_are_those_of_plain_passes(kind, tiny_model_path, folders):
    """Each conversation alone, rendered by the chat template: the last hidden state times the head."""
    reward = RewardModel(folders[kind])
    expected = plain_scores(plain_model(tiny_model_path, folders[kind]), turns(reward.tokenizer))
    scores = reward.score(PROMPTS, COMPLETIONS)
    assert scores.dtype == torch.float32
    assert (scores - expected).abs().max() <= 2e-6
    assert expected.std() > 0.05
    as_messages = [[{"role": "assistant", "content": text}] for text in COMPLETIONS]
    assert torch.equal(reward.score(PROMPTS, as_messages), scores)
    assert reward(PROMPTS, COMPLETIONS, completion_ids=[[1]] * 4, column=[0] * 4) == scores.tolist()
    assert reward.score([], []).shape == (0,)


@pytest.mark.parametrize("shared", [False, True])
def test_a_cut_completion_is_scored_at_its_last_token(shared, tiny_model_path, folders):
    reward = RewardModel(folders["adapter"])
    if shared:
        reward.share(SharedBackbone(load_policy(tiny_model_path)))
    model = plain_model(tiny_model_path, folders["adapter"])
    ended = plain_scores(model, turns(reward.tokenizer))
    cut = plain_scores(model, turns(reward.tokenizer, finished=False))
    scores = reward.score(PROMPTS, COMPLETIONS, finished=[True, False, False, True])
    expected = torch.stack([ended[0], cut[1], cut[2], ended[3]])
    assert (scores - expected).abs().max() <= 2e-6
    assert (ended - cut).abs().min() > 0.01, "the end token must matter, or this would prove nothing"


TURN = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ CONTENT }}<|im_end|>AFTER{% endfor %}"
TURN += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("content", "after", "response", "rendered"),
    [
        ("m['content'] | trim", "\n", "good\n", "good"),
        ("m['content'].split('</think>')[-1]", "\n", "<think>a</think>good", "good"),
        ("m['content'].split('</think>')[-1]", "\n", "<think>not yet", "<think>not yet"),
        ("m['content'].split() | join(' ')", "\n\n", "so  \n good", "so good"),
        ("m['content']", "\n", "good\n", "good\n"),
        ("m['content']", "\n", "says <|im_end|>\n", "says <|im_end|>\n"),
    ],
)
def test_a_truncated_response_is_rendered_without_its_end(
    content, after, response, rendered, shared, tiny_model_path, folders
):
    reward = RewardModel(folders["adapter"])
    reward.tokenizer.chat_template = TURN.replace("CONTENT", content).replace("AFTER", after)
    if shared:
        reward.share(SharedBackbone(load_policy(tiny_model_path)))
    text = f"<|im_start|>user\nWhy?<|im_end|>{after}<|im_start|>assistant\n{rendered}"
    model = plain_model(tiny_model_path, folders["adapter"])
    ids = [reward.tokenizer(text + end)["input_ids"] for end in ("", f"<|im_end|>{after}")]
    scores = reward.score([[user("Why?")]] * 2, [response] * 2, finished=[False, True])
    assert (scores - plain_scores(model, ids)).abs().max() <= 2e-6
    ensemble = RewardEnsemble([reward, reward])
    members = ensemble.member_scores([[user("Why?")]], [response], finished=[False])
    assert (members - scores[0]).abs().max() <= 2e-6


def test_plain_text(tiny_model_path, folders):
    """Prompt and completion join as they are; the end token follows where the completion ended."""
    reward = RewardModel(folders["adapter"])
    tokenizer, model = reward.tokenizer, plain_model(tiny_model_path, folders["adapter"])
    end = tokenizer.eos_token_id
    prompts, completions = ["Once upon", "2 + 2 ="], [" a time", " 4"]
    ids = [tokenizer(p + c)["input_ids"] for p, c in zip(prompts, completions, strict=True)]
    scores = reward.score(prompts, completions, finished=[True, False])
    assert (scores - plain_scores(model, [[*ids[0], end], ids[1]])).abs().max() <= 2e-6
    only_end = reward.score([""], [""])
    assert (only_end - plain_scores(model, [[end]])).abs().max() <= 2e-6


@pytest.mark.parametrize("shared", [False, True])
def test_truncation(shared, tiny_model_path, folders, tmp_path, caplog):
    """The last 7 tokens of the prompt and the first 5 of the completion, its end token only if it fits; two lines."""
    shutil.copytree(folders["adapter"], tmp_path / "short")
    (tmp_path / "short" / "reward_model.json").write_text('{"max_prompt_tokens": 7, "max_response_tokens": 5}')
    reward = RewardModel(tmp_path / "short")
    if shared:
        reward.share(SharedBackbone(load_policy(tiny_model_path)))
    tokenizer = reward.tokenizer
    sequences = []
    for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True):
        rendered = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(completion)["input_ids"] + [tokenizer.eos_token_id]
        sequences.append(tokenizer(rendered)["input_ids"][-7:] + ids[:5])
    expected = plain_scores(plain_model(tiny_model_path, folders["adapter"]), sequences)
    assert (reward.score(PROMPTS, COMPLETIONS) - expected).abs().max() <= 2e-6
    assert "reads no more than 7 tokens: its max_prompt_tokens" in caplog.text
    assert "reads no more than 5 tokens: its max_response_tokens" in caplog.text


def test_without_limits_a_model_reads_as_much_as_it_has_positions(folders, tmp_path, caplog):
    """The last tokens of 400, of which the first 144 have no position; a shorter text is read as a whole."""
    shutil.copytree(folders["full"], tmp_path / "hub")
    (tmp_path / "hub" / "reward_model.json").unlink(missing_ok=True)
    reward = RewardModel(tmp_path / "hub")
    positions = reward.load().model.config.max_position_embeddings
    long, other = ("x" * positions + " and " + end for end in ("good", "bad"))
    scores = reward.score(["q"] * 2, [long, other])
    assert scores[0] != scores[1]
    assert f"reads no more than {positions} tokens: its positions" in caplog.text
    ids = [*reward.tokenizer("q" + long)["input_ids"], reward.tokenizer.eos_token_id]
    assert (scores[:1] - plain_scores(reward.model, [ids[-positions:]])).abs().max() <= 2e-6


def test_neither_batch_size_nor_order_nor_company_matters(folders):
    reward = RewardModel(folders["adapter"], batch_size=4)
    scores = reward.score(PROMPTS, COMPLETIONS)
    one_by_one = RewardModel(folders["adapter"], batch_size=1).score(PROMPTS, COMPLETIONS)
    assert (scores - one_by_one).abs().max() <= 1e-6
    assert (reward.score(PROMPTS[::-1], COMPLETIONS[::-1]).flip(0) - scores).abs().max() <= 1e-6
    assert (reward.score(PROMPTS[1:2], COMPLETIONS[1:2]) - scores[1]).abs() <= 1e-6


def with_end_as_padding(folder: str, target: Path) -> Path:
    """A copy of a reward model that pads with the end-of-turn token."""
    from transformers import AutoTokenizer

    shutil.copytree(folder, target)
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(target)
    config = target / "config.json"
    if config.is_file():
        config.write_text(json.dumps(json.loads(config.read_text()) | {"pad_token_id": tokenizer.eos_token_id}))
    return target


@pytest.mark.parametrize("kind", ["adapter", "full"])
def test_padding_that_is_the_end_token(kind, tiny_model_path, folders, tmp_path, caplog):
    """The score is then read before the end token, as transformers does: alone, shared, and by hand.

    A truncated completion scores as a finished one, which is said once, when the first one is scored.
    """
    folder = with_end_as_padding(folders[kind], tmp_path / kind)
    reward = RewardModel(folder)
    expected = plain_scores(plain_model(tiny_model_path, str(folder)), turns(reward.tokenizer, finished=False))
    said = {None: 0, (True, True, True, True): 0, (True, False, False, True): 1, (False, False, False, False): 1}
    for finished, count in said.items():
        assert (reward.score(PROMPTS, COMPLETIONS, finished=finished) - expected).abs().max() <= 2e-6
        assert caplog.text.count("pads with its end-of-turn token") == count
    if kind == "adapter":
        shared = RewardModel(folder).share(SharedBackbone(load_policy(tiny_model_path)))
        assert (shared.score(PROMPTS, COMPLETIONS) - expected).abs().max() <= 2e-6
        RewardModel(folders["adapter"]).score(PROMPTS, COMPLETIONS, finished=[False] * 4)
        assert caplog.text.count("pads with its end-of-turn token") == 1


def test_loading_is_lazy_idempotent_and_draws_no_random_numbers(folders):
    for kind in ("adapter", "full"):
        before = torch.get_rng_state()
        reward = RewardModel(folders[kind])
        scores = reward.score(PROMPTS, COMPLETIONS)
        model = reward.model
        assert reward.load() is reward
        assert reward.load("cpu").model is model
        assert torch.equal(reward.score(PROMPTS, COMPLETIONS), scores)
        assert torch.equal(torch.get_rng_state(), before)
        assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("kind", ["full", "adapter"])
def test_scores_in_bfloat16_are_not_rounded_to_it(kind, folders):
    """Hidden states have relative steps of 0.4%, and the head is in float32."""
    half, exact = RewardModel(folders[kind], dtype="bfloat16"), RewardModel(folders[kind])
    scores, expected = (reward.score(PROMPTS, COMPLETIONS) for reward in (half, exact))
    assert exact.dtype == torch.float32 and 0 < (scores - expected).abs().max() < 0.05 * expected.abs().max()
    assert not scores.equal(scores.bfloat16().float())
    types = {name: parameter.dtype for name, parameter in half.model.named_parameters() if "lora_" not in name}
    assert {name for name, dtype in types.items() if dtype != torch.bfloat16} == {n for n in types if "score" in n}


def test_what_it_says_of_itself(tiny_model_path, folders, tmp_path):
    adapter, full = RewardModel(folders["adapter"]), RewardModel(folders["full"], name="helpfulness")
    assert adapter.adapter.base == tiny_model_path and full.adapter is None
    assert (adapter.name, adapter.__name__) == ("adapter-run", "adapter-run")
    assert (full.name, full.__name__) == ("helpfulness", "helpfulness")
    for inside, name in (("run/best/", "run-best"), ("run/checkpoint-50", "run-checkpoint-50"), ("run/rm", "rm")):
        shutil.copytree(folders["full"], tmp_path / inside)
        assert RewardModel(f"{tmp_path}/{inside}").name == name


def test_a_base_that_has_moved(tiny_model_path, folders, tmp_path):
    """An adapter without a tokenizer has that of its base."""
    shutil.copytree(tiny_model_path, tmp_path / "base")
    folder = save_adapter(str(tmp_path / "base"), tmp_path / "adapter", tokenizer=False)
    expected = RewardModel(folder).score(PROMPTS, COMPLETIONS)
    assert torch.equal(expected, RewardModel(folders["adapter"]).score(PROMPTS, COMPLETIONS))
    shutil.move(tmp_path / "base", tmp_path / "moved")
    with pytest.raises(FileNotFoundError, match="its base .*base is not on this machine; say with base= where it is"):
        RewardModel(folder)
    moved = RewardModel(folder, base=str(tmp_path / "moved"))
    assert moved.adapter.base == str(tmp_path / "moved")
    assert torch.equal(moved.score(PROMPTS, COMPLETIONS), expected)
    policy = load_policy(str(tmp_path / "moved"))
    shared = RewardModel(folder, base=str(tmp_path / "moved")).share(SharedBackbone(policy))
    # A copy of its own is packed, a policy's backbone as the trainer has it: the last bits differ.
    assert (shared.score(PROMPTS, COMPLETIONS) - expected).abs().max() < 1e-6


def no_reward_models(tmp_path: Path, folders: dict[str, str], base: str) -> dict:
    """What makes each folder that is no reward model, and what the error must say."""

    def copy(kind: str, **settings) -> Path:
        target = tmp_path / kind
        shutil.copytree(folders[kind], target)
        config = target / ("config.json" if kind == "full" else "adapter_config.json")
        config.write_text(json.dumps(json.loads(config.read_text()) | settings))
        return target

    def without(files: str) -> Path:
        target = copy("full")
        for file in target.glob(files):
            file.unlink()
        return target

    def with_head(**head) -> Path:
        target = copy("adapter")
        file = target / "adapter_model.safetensors"
        kept = {name: tensor for name, tensor in load_file(file).items() if "score" not in name}
        save_file(kept | {f"base_model.model.score.{name}": tensor for name, tensor in head.items()}, file)
        return target

    def half_a_file() -> Path:
        weights = copy("full") / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
        return weights.parent

    two_labels = "the head gives 2 labels; a reward model gives one"
    return {
        "missing": (
            lambda: tmp_path / "nowhere",
            "no model folder '.*nowhere': give a folder, .*; recipes/reward_model.py trains a reward model",
        ),
        "no such hub name": (lambda: "nobody/no-such-reward-model", "no reward model 'nobody/no-such-reward-model'"),
        "no weights or settings": (lambda: without("*"), "holds no config.json: it is not a saved model"),
        "no head": (with_head, "no score head, so the scores would be random"),
        "not LoRA": (lambda: copy("adapter", peft_type="IA3"), "peft_type is IA3; only LoRA"),
        "no base": (
            lambda: copy("adapter", base_model_name_or_path=None),
            "names no base_model_name_or_path; say which with base=",
        ),
        "two-label adapter": (lambda: with_head(weight=torch.zeros(2, 16)), two_labels),
        "two-label model": (lambda: save_full_model(base, tmp_path / "two", num_labels=2), two_labels),
        "policy": (lambda: base, "no score head, so the scores would be random"),
        "half a file": (half_a_file, "model.safetensors: no complete safetensors file"),
        "no weights": (lambda: without("model.safetensors"), r"no \*.safetensors with weights"),
    }


@pytest.mark.parametrize("name", no_reward_models(Path(), {}, ""))
def test_what_is_no_reward_model_is_refused_in_one_line(name, folders, tiny_model_path, tmp_path):
    make, message = no_reward_models(tmp_path, folders, tiny_model_path)[name]
    with pytest.raises((FileNotFoundError, ValueError), match=message) as caught:
        RewardModel(make())
    assert "\n" not in str(caught.value)


def test_arguments_and_texts_that_are_refused(folders):
    for arguments, message in (
        ({"dtype": "int8"}, "dtype 'int8'.* float32, bfloat16, float16"),
        ({"base": "toy"}, "base=toy is for adapters, and this is a full model"),
    ):
        with pytest.raises(ValueError, match=message):
            RewardModel(folders["full"], **arguments)
    reward = RewardModel(folders["full"])
    with pytest.raises(ValueError, match="argument 2 is longer"):
        reward.score(PROMPTS[:3], COMPLETIONS)
    with pytest.raises(ValueError, match="sequence 1 is empty"):
        reward.score(["a", ""], ["b", ""], finished=[True, False])
    with pytest.raises(ValueError, match="reward model full-run: completion 0: a response is one assistant message"):
        reward.score(PROMPTS[:1], [[]])


# ---- Sharing a base ----


def copies(models: list[RewardModel], policy=None) -> int:
    """How many different embeddings of the base the models and the policy hold together."""
    held = [model.backbone.model if model.backbone else model.model for model in models]
    held = [*held, policy] if policy is not None else held
    return len({model.get_input_embeddings().weight.data_ptr() for model in held})


@float64_throughout()
def test_share_or_load(tiny_model_path, folders, tmp_path):
    biased = save_adapter(tiny_model_path, tmp_path / "biased", bias="lora_only", seed=4)
    paths = [folders["adapter"], folders["full"], folders["rank6"], biased]
    alone = [RewardModel(path).score(PROMPTS, COMPLETIONS) for path in paths]

    def check(models) -> None:
        for model, expected in zip(models, alone, strict=True):
            assert (model.score(PROMPTS, COMPLETIONS) - expected).abs().max() <= 1e-9

    policy = load_policy(tiny_model_path).double()
    models = [RewardModel(path) for path in paths]
    lines = share_or_load(models, policy)
    assert lines == [
        f"adapter-run: on the policy's backbone, {tiny_model_path}",
        "full-run: a copy of its own: it is a full model, not an adapter",
        f"rank6: on the policy's backbone, {tiny_model_path}",
        "biased: a copy of its own: the adapter cannot share a base with bias='lora_only'",
    ]
    assert models[0].backbone is models[2].backbone
    assert copies(models, policy) == 3
    check(models)
    assert share_or_load(models, policy)[0] == f"adapter-run: on a shared backbone, {tiny_model_path}"

    models = [RewardModel(path) for path in paths]
    lines = share_or_load(models, policy, policy_reason="the policy is sharded by an engine")
    frozen = f"on one frozen copy of {tiny_model_path} with others"
    assert lines[0] == f"adapter-run: {frozen}: the policy is sharded by an engine"
    assert lines[1] == "full-run: a copy of its own: it is a full model, not an adapter"
    assert copies(models, policy) == 4
    check(models)

    models = [RewardModel(path) for path in paths]
    assert share_or_load(models)[2] == f"rank6: {frozen}: there is no policy"
    assert copies(models) == 3
    check(models)

    models = [RewardModel(path) for path in paths]
    assert set(share_or_load(models, policy, "never")) == {
        f"{model.name}: a copy of its own: sharing is switched off" for model in models
    }
    assert copies(models, policy) == 5
    check(models)
    # One adapter that cannot share the policy's base gains nothing from a frozen one.
    single = [RewardModel(folders["adapter"])]
    assert share_or_load(single) == ["adapter-run: a copy of its own: there is no policy"]
    # A copy that was loaded before is given up for the shared one.
    loaded = RewardModel(folders["adapter"]).load()
    share_or_load([loaded], policy)
    assert loaded.model is None
    assert loaded.load().model is None


def test_share_or_load_always(tiny_model_path, folders):
    from transformers import AutoModelForCausalLM

    policy = load_policy(tiny_model_path)
    assert len(share_or_load([RewardModel(folders["adapter"])], policy, "always")) == 1
    plain = AutoModelForCausalLM.from_pretrained(tiny_model_path)
    for kind, base, message in (
        ("full", policy, "full-run cannot sit on the policy's backbone: it is a full model"),
        ("adapter", None, "adapter-run cannot sit .*: there is no policy"),
        ("adapter", plain, "the policy is a Qwen2ForCausalLM, not a model with a LoRA adapter"),
    ):
        with pytest.raises(ValueError, match=message):
            share_or_load([RewardModel(folders[kind])], base, "always")
    with pytest.raises(ValueError, match="backbone: the engine shards it"):
        share_or_load([RewardModel(folders["adapter"])], policy, "always", policy_reason="the engine shards it")


def test_an_adapter_that_turns_out_not_to_fit_the_policy(tiny_model_path, tmp_path):
    """Its targets match the policy's output layer, which a reward model lacks: known only when it is attached."""
    folder = save_adapter(tiny_model_path, tmp_path / "pattern", target_modules=".*(q_proj|lm_head)")
    expected = RewardModel(folder).score(PROMPTS, COMPLETIONS)
    policy = load_policy(tiny_model_path)
    reward = RewardModel(folder)
    (line,) = share_or_load([reward], policy)
    assert line.startswith("pattern: a copy of its own: ")
    assert line.endswith("the adapter lacks 2 tensors, such as base_model.model.lm_head.lora_A.reward0.weight")
    assert list(policy.peft_config) == ["default"]
    assert torch.equal(reward.score(PROMPTS, COMPLETIONS), expected)


@pytest.mark.parametrize("damage", ["missing", "misshapen"])
def test_an_adapter_with_damaged_tensors_never_scores(damage, tiny_model_path, folders, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(folders["adapter"], folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"
    if damage == "missing":
        del tensors[name]
    else:
        tensors[name] = torch.zeros(9, 4)
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="damaged: the adapter does not fit its base .*v_proj.lora_B") as caught:
        share_or_load([RewardModel(folder)], load_policy(tiny_model_path))
    assert "\n" not in str(caught.value)


def test_a_copy_is_whole_where_zero3_would_shard_it(folders):
    """With the flag up, transformers asks DeepSpeed to shard what it loads; here the copy never does."""
    from transformers.integrations import deepspeed

    class Settings:
        config: dict = {}

        def is_zero3(self):
            return True

    settings = Settings()
    deepspeed.set_hf_deepspeed_config(settings)
    try:
        for kind in ("adapter", "full"):
            inner = RewardModel(folders[kind]).load().model
            head = [parameter for name, parameter in inner.named_parameters() if "score" in name]
            assert {tuple(parameter.shape) for parameter in head} == {(1, 16)}
            assert not any(hasattr(parameter, "ds_id") for parameter in inner.parameters())
            assert deepspeed.is_deepspeed_zero3_enabled(), "the flag is up again for the policy"
    finally:
        deepspeed.unset_hf_deepspeed_config()


@pytest.mark.slow
def test_stock_trl_trains_with_them(tiny_model_path, folders, tmp_path):
    """GRPO of TRL with an ensemble and a single model as reward functions: logs, checkpoints, and equal runs."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    def train(sharing: str, folder: Path):
        members = [RewardModel(folders["adapter"]), RewardModel(folders["rank6"])]
        single = RewardModel(folders["rank6"], name="single")
        settings = {"max_steps": 2, "save_steps": 2, "logging_steps": 1, "report_to": "none", "use_cpu": True}
        settings |= {"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 8}
        trainer = GRPOTrainer(
            tiny_model_path,
            reward_funcs=[RewardEnsemble(members, aggregate="uwo"), single],
            args=GRPOConfig(str(folder), **settings, learning_rate=1e-2, beta=0.1, bf16=False, seed=3),
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS * 2]),
            peft_config=LoraConfig(r=2, target_modules=["q_proj", "o_proj"]),
        )
        share_or_load([*members, single], trainer.model, sharing)
        trainer.train()
        assert trainer.reward_func_names == ["ensemble", "single"]
        return trainer

    trainer = train("always", tmp_path / "run")
    logged = trainer.state.log_history[0]
    for name in ("adapter-run", "rank6", "ensemble", "single"):
        assert f"rewards/{name}/mean" in logged
    assert logged["ensemble_std"] > 0
    assert logged["rewards/single/mean"] == pytest.approx(logged["rewards/rank6/mean"], abs=1e-5)
    checkpoint = tmp_path / "run" / "checkpoint-2"
    assert [path.parent.name for path in checkpoint.rglob("adapter_model.safetensors")] == ["checkpoint-2"]
    saved = load_file(checkpoint / "adapter_model.safetensors")
    assert len(saved) == 8, "A and B of two modules in two layers"
    separate = train("never", tmp_path / "separate")
    expected = load_file(tmp_path / "separate" / "checkpoint-2" / "adapter_model.safetensors")
    assert max((saved[name] - expected[name]).abs().max().item() for name in expected) <= 1e-6
    rewards = [[entry["rewards/ensemble/mean"] for entry in t.state.log_history[:2]] for t in (trainer, separate)]
    assert rewards[0] == pytest.approx(rewards[1], abs=1e-6)
