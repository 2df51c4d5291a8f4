"""Saved reward models: what is refused, and that scores are those of plain passes, wherever the weights sit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.float64 import float64_throughout
from tests.reward_adapters import (
    COMPLETIONS,
    PROMPTS,
    load_adapter,
    load_base,
    load_policy,
    plain_scores,
    save_adapter,
    save_full_model,
    turns,
)
from trl_ext.models import SharedBackbone
from trl_ext.rewards import RewardEnsemble, RewardModel, share_or_load

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def folders(tiny_model_path, tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("rewards")
    return {
        "adapter": save_adapter(tiny_model_path, folder / "adapter-run"),
        "rank6": save_adapter(tiny_model_path, folder / "rank6", seed=1, r=6, target_modules="all-linear"),
        "full": save_full_model(tiny_model_path, folder / "full-run", seed=2),
    }


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
def test_truncation(shared, tiny_model_path, folders):
    """The last 7 tokens of the prompt and the first 5 of the completion, its end token only if it fits."""
    reward = RewardModel(folders["adapter"], max_prompt_tokens=7, max_response_tokens=5)
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


def test_neither_batch_size_nor_order_nor_company_matters(folders):
    reward = RewardModel(folders["adapter"], batch_size=4)
    scores = reward.score(PROMPTS, COMPLETIONS)
    one_by_one = RewardModel(folders["adapter"], batch_size=1).score(PROMPTS, COMPLETIONS)
    assert (scores - one_by_one).abs().max() <= 1e-6
    assert (reward.score(PROMPTS[::-1], COMPLETIONS[::-1]).flip(0) - scores).abs().max() <= 1e-6
    assert (reward.score(PROMPTS[1:2], COMPLETIONS[1:2]) - scores[1]).abs() <= 1e-6


@pytest.mark.parametrize("kind", ["adapter", "full"])
def test_padding_that_is_the_end_token(kind, tiny_model_path, folders, tmp_path):
    """The score is then read before the end token, as transformers does: alone, shared, and by hand."""
    folder = tmp_path / kind
    shutil.copytree(folders[kind], folder)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    if kind == "full":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"pad_token_id": tokenizer.eos_token_id}))
    reward = RewardModel(folder)
    expected = plain_scores(plain_model(tiny_model_path, str(folder)), turns(tokenizer, finished=False))
    assert (reward.score(PROMPTS, COMPLETIONS) - expected).abs().max() <= 2e-6
    if kind == "adapter":
        shared = RewardModel(folder).share(SharedBackbone(load_policy(tiny_model_path)))
        assert (shared.score(PROMPTS, COMPLETIONS) - expected).abs().max() <= 2e-6


def with_end_as_padding(folder: str, target: Path) -> Path:
    """A copy of a reward model whose tokenizer pads with the end-of-turn token."""
    from transformers import AutoTokenizer

    shutil.copytree(folder, target)
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(target)
    return target


def test_that_ends_do_not_show_is_said_once(folders, tmp_path, caplog):
    """Where padding is the end token, a cut completion scores as a finished one: said when one is to be scored."""

    def lines() -> list[str]:
        return [r.getMessage() for r in caplog.records if "scores as if it had ended; said once" in r.getMessage()]

    padded = RewardModel(with_end_as_padding(folders["adapter"], tmp_path / "padded"))
    scores = padded.score(PROMPTS, COMPLETIONS)
    padded.score(PROMPTS, COMPLETIONS, finished=[True] * 4)
    assert not lines()
    for _ in range(2):
        assert (padded.score(PROMPTS, COMPLETIONS, finished=[True, False, False, True]) - scores).abs().max() <= 2e-6
        (line,) = lines()
    assert line.startswith("reward model padded: its padding token is the end-of-turn token")
    RewardModel(folders["adapter"]).score(PROMPTS, COMPLETIONS, finished=[False] * 4)
    assert len(lines()) == 1


def with_limits(folder: str, target: Path, text: str) -> Path:
    shutil.copytree(folder, target)
    (target / "reward_model.json").write_text(text)
    return target


@pytest.mark.parametrize("kind", ["adapter", "full"])
def test_limits_are_those_of_training_unless_given(kind, folders, tmp_path):
    saved = with_limits(folders[kind], tmp_path / "short", '{"max_prompt_tokens": 7, "max_response_tokens": 5}')
    given = RewardModel(folders[kind], max_prompt_tokens=7, max_response_tokens=5)
    short = RewardModel(saved)
    assert short.limits == given.limits == {"max_prompt_tokens": 7, "max_response_tokens": 5}
    scores = short.score(PROMPTS, COMPLETIONS)
    assert torch.equal(scores, given.score(PROMPTS, COMPLETIONS))
    whole = RewardModel(saved, max_prompt_tokens=None, max_response_tokens=512)
    assert whole.limits == {"max_prompt_tokens": None, "max_response_tokens": 512}
    assert torch.equal(whole.score(PROMPTS, COMPLETIONS), RewardModel(folders[kind]).score(PROMPTS, COMPLETIONS))
    assert (whole.score(PROMPTS, COMPLETIONS) - scores).abs().max() > 0.01
    assert RewardModel(saved, max_response_tokens=9).limits == {"max_prompt_tokens": 7, "max_response_tokens": 9}
    assert RewardModel(folders[kind]).limits == {"max_prompt_tokens": 512, "max_response_tokens": 512}
    unlimited = with_limits(
        folders[kind], tmp_path / "unlimited", '{"max_prompt_tokens": null, "max_response_tokens": 5}'
    )
    assert RewardModel(unlimited).limits == {"max_prompt_tokens": None, "max_response_tokens": 5}


@pytest.mark.parametrize(
    "text", ["", "{", "[7, 5]", "null", '"512"', '{"max_prompt_tokens": 7}', '{"max_response_tokens": 7}'], ids=repr
)
def test_damaged_limits_are_refused_in_one_line(text, folders, tmp_path):
    folder = with_limits(folders["adapter"], tmp_path / "damaged", text)
    message = "reward_model.json is damaged: it must hold max_prompt_tokens and max_response_tokens; save it"
    with pytest.raises(ValueError, match=message) as caught:
        RewardModel(folder)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


@pytest.mark.parametrize("value", ['"many"', "0", "-3", "2.5", "true", "[512]"])
def test_limits_that_are_no_numbers_of_tokens_are_refused_with_their_file(value, folders, tmp_path):
    text = f'{{"max_prompt_tokens": {value}, "max_response_tokens": 5}}'
    folder = with_limits(folders["adapter"], tmp_path / "damaged", text)
    with pytest.raises(ValueError, match="reward_model.json"):
        RewardModel(folder)


@pytest.mark.slow
def test_a_fresh_process_gives_the_same_scores(tiny_model_path, folders):
    code = (
        "import json, sys\n"
        "from tests.reward_adapters import COMPLETIONS, PROMPTS, load_policy\n"
        "from trl_ext.models import SharedBackbone\n"
        "from trl_ext.rewards import RewardModel\n"
        "base, *folders = sys.argv[1:]\n"
        "scores = [RewardModel(folder).score(PROMPTS, COMPLETIONS).tolist() for folder in folders]\n"
        "shared = RewardModel(folders[0]).share(SharedBackbone(load_policy(base)))\n"
        "print(json.dumps([*scores, shared.score(PROMPTS, COMPLETIONS).tolist()]))\n"
    )
    command = [sys.executable, "-c", code, tiny_model_path, folders["adapter"], folders["full"]]
    output = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, env=os.environ, check=True)
    adapter, full, shared = torch.tensor(json.loads(output.stdout.splitlines()[-1]))
    assert (adapter - RewardModel(folders["adapter"]).score(PROMPTS, COMPLETIONS)).abs().max() <= 1e-6
    assert (full - RewardModel(folders["full"]).score(PROMPTS, COMPLETIONS)).abs().max() <= 1e-6
    assert (shared - adapter).abs().max() <= 1e-6


def test_making_one_loads_no_weights(folders, monkeypatch):
    import safetensors.torch
    import transformers

    def refuse(*args, **kwargs):
        raise AssertionError("weights were read")

    monkeypatch.setattr(safetensors.torch, "load_file", refuse)
    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", refuse)
    for folder in folders.values():
        assert RewardModel(folder).model is None


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
    half = RewardModel(folders["full"], dtype="bfloat16").load()
    assert {parameter.dtype for parameter in half.model.parameters()} == {torch.bfloat16}


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


def test_what_it_says_of_itself(tiny_model_path, folders, tmp_path):
    adapter, full = RewardModel(folders["adapter"]), RewardModel(folders["full"], name="helpfulness")
    assert (adapter.is_adapter, adapter.base_name_or_path) == (True, tiny_model_path)
    assert (full.is_adapter, full.base_name_or_path) == (False, None)
    assert (adapter.name, adapter.__name__) == ("adapter-run", "adapter-run")
    assert (full.name, full.__name__) == ("helpfulness", "helpfulness")
    for inside, name in (("run/best", "run-best"), ("run/checkpoint-50", "run-checkpoint-50"), ("run/rm", "rm")):
        shutil.copytree(folders["full"], tmp_path / inside)
        assert RewardModel(tmp_path / inside).name == name
        assert RewardModel(f"{tmp_path / inside}/").name == name


def test_the_tokenizer_comes_from_the_model_or_else_from_its_base(tiny_model_path, folders, tmp_path):
    bare = save_adapter(tiny_model_path, tmp_path / "bare", tokenizer=False)
    expected = RewardModel(folders["adapter"])
    assert torch.equal(RewardModel(bare).score(PROMPTS, COMPLETIONS), expected.score(PROMPTS, COMPLETIONS))
    given = RewardModel(bare, tokenizer=expected.tokenizer)
    assert given.tokenizer is expected.tokenizer


def test_a_base_that_has_moved(tiny_model_path, tmp_path):
    shutil.copytree(tiny_model_path, tmp_path / "base")
    folder = save_adapter(str(tmp_path / "base"), tmp_path / "adapter")
    expected = RewardModel(folder).score(PROMPTS, COMPLETIONS)
    shutil.move(tmp_path / "base", tmp_path / "moved")
    with pytest.raises(FileNotFoundError, match="its base .*base is not on this machine; say with base= where it is"):
        RewardModel(folder)
    moved = RewardModel(folder, base=str(tmp_path / "moved"))
    assert moved.base_name_or_path == str(tmp_path / "moved")
    assert torch.equal(moved.score(PROMPTS, COMPLETIONS), expected)
    policy = load_policy(str(tmp_path / "moved"))
    shared = RewardModel(folder, base=str(tmp_path / "moved")).share(SharedBackbone(policy))
    # A copy of its own is packed, a policy's backbone as the trainer has it: the last bits differ.
    assert (shared.score(PROMPTS, COMPLETIONS) - expected).abs().max() < 1e-6


def broken(tmp_path: Path, folders: dict[str, str], base: str) -> dict:
    """Folders that are no reward models, each with what the error must say."""

    def copy(kind: str, **settings) -> Path:
        target = tmp_path / kind
        shutil.copytree(folders[kind], target)
        name = "adapter_config.json" if kind != "full" else "config.json"
        (target / name).write_text(json.dumps(json.loads((target / name).read_text()) | settings))
        return target

    def missing():
        return tmp_path / "nowhere"

    def no_such_hub_name():
        return "nobody/no-such-reward-model"

    def empty():
        (tmp_path / "empty").mkdir()
        return tmp_path / "empty"

    def run_folder():
        shutil.copytree(folders["adapter"], tmp_path / "run" / "best")
        shutil.copytree(folders["adapter"], tmp_path / "run" / "checkpoint-50")
        return tmp_path / "run"

    def headless_adapter():
        target = copy("adapter")
        tensors = load_file(target / "adapter_model.safetensors")
        kept = {name: tensor for name, tensor in tensors.items() if "score" not in name}
        save_file(kept, target / "adapter_model.safetensors")
        return target

    def not_lora():
        return copy("adapter", peft_type="IA3")

    def unnamed_head():
        return copy("adapter", task_type=None, modules_to_save=None)

    def no_base():
        return copy("adapter", base_model_name_or_path=None)

    def two_label_adapter():
        target = copy("adapter")
        tensors = load_file(target / "adapter_model.safetensors")
        tensors["base_model.model.score.weight"] = torch.zeros(2, 16)
        save_file(tensors, target / "adapter_model.safetensors")
        return target

    def two_label_model():
        return save_full_model(base, tmp_path / "two", num_labels=2)

    def policy():
        return base

    def half_a_file():
        target = copy("full")
        content = (target / "model.safetensors").read_bytes()
        (target / "model.safetensors").write_bytes(content[: len(content) // 2])
        return target

    def pickled():
        target = copy("adapter")
        (target / "adapter_model.safetensors").rename(target / "adapter_model.bin")
        return target

    def no_weights():
        target = copy("full")
        (target / "model.safetensors").unlink()
        return target

    def no_tokenizer():
        target = copy("full")
        for file in target.glob("*token*"):
            file.unlink()
        return target

    return {
        missing: "no model folder '.*nowhere': give a folder, .*; recipes/reward_model.py trains a reward model",
        no_such_hub_name: "no reward model 'nobody/no-such-reward-model'",
        empty: "neither config.json nor adapter_config.json: no saved model$",
        run_folder: "neither config.json nor .* did you mean .*run/best",
        headless_adapter: "the adapter holds no score head, so its scores would be random",
        not_lora: "peft_type is IA3; only LoRA",
        unnamed_head: "names no head, so PEFT would not load the one in the file",
        no_base: "names no base_model_name_or_path; say which with base=",
        two_label_adapter: "the head gives 2 labels; a reward model gives one",
        two_label_model: "the head gives 2 labels; a reward model gives one",
        policy: "a Qwen2ForCausalLM without a score head",
        half_a_file: "model.safetensors: not a complete safetensors file",
        pickled: "holds no adapter_model.safetensors .pickled weights are not read",
        no_weights: r"no \*.safetensors with weights",
        no_tokenizer: "no tokenizer_config.json here; save the tokenizer there, or give one",
    }


@pytest.mark.parametrize("name", [case.__name__ for case in broken(Path(), {}, "")])
def test_what_is_no_reward_model_is_refused_in_one_line(name, folders, tiny_model_path, tmp_path):
    cases = broken(tmp_path, folders, tiny_model_path)
    make, message = next((case, text) for case, text in cases.items() if case.__name__ == name)
    with pytest.raises((FileNotFoundError, ValueError), match=message) as caught:
        RewardModel(make())
    assert "\n" not in str(caught.value)


def test_arguments_and_texts_that_are_refused(folders):
    for arguments, message in (
        ({"dtype": "int8"}, "dtype must be one of float32, bfloat16, float16, got 'int8'"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens must be at least 1, got 0"),
        ({"base": "toy"}, "base=toy is for adapters, and this is a full model"),
    ):
        with pytest.raises(ValueError, match=message):
            RewardModel(folders["full"], **arguments)
    reward = RewardModel(folders["full"])
    with pytest.raises(ValueError, match="prompts: 3 for 4 completions"):
        reward.score(PROMPTS[:3], COMPLETIONS)
    with pytest.raises(ValueError, match="finished: 1 for 4 completions"):
        reward.score(PROMPTS, COMPLETIONS, finished=[True])
    with pytest.raises(ValueError, match="completion 1 and its prompt are empty"):
        reward.score(["a", ""], ["b", ""], finished=[True, False])
    with pytest.raises(ValueError, match="reward model full-run: completion 0: a response is one assistant message"):
        reward.score(PROMPTS[:1], [[]])


def test_can_share(tiny_model_path, folders, tmp_path):
    from transformers import AutoModelForCausalLM

    policy = load_policy(tiny_model_path)
    assert RewardModel(folders["adapter"]).can_share(policy) is None
    assert RewardModel(folders["full"]).can_share(policy) == "it is a full model, not an adapter"
    full_policy = AutoModelForCausalLM.from_pretrained(tiny_model_path)
    assert "not a model with a LoRA adapter" in RewardModel(folders["adapter"]).can_share(full_policy)
    biased = save_adapter(tiny_model_path, tmp_path / "biased", bias="lora_only")
    assert "trains biases" in RewardModel(biased).can_share(policy)
    with pytest.raises(ValueError, match="full-run: a full model cannot share"):
        RewardModel(folders["full"]).share(SharedBackbone(policy))


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
        "biased: a copy of its own: the adapter cannot share a base: bias='lora_only' trains biases of the base",
    ]
    assert models[0].backbone is models[2].backbone
    assert copies(models, policy) == 3
    check(models)
    assert share_or_load(models, policy)[0] == "adapter-run: where it was, on a shared backbone"

    models = [RewardModel(path) for path in paths]
    lines = share_or_load(models, policy, policy_reason="the policy is sharded by an engine")
    assert lines[0] == (
        f"adapter-run: on one frozen copy of {tiny_model_path} with others: the policy is sharded by an engine"
    )
    assert lines[1] == "full-run: a copy of its own: it is a full model, not an adapter"
    assert copies(models, policy) == 4
    check(models)

    models = [RewardModel(path) for path in paths]
    assert (
        share_or_load(models)[2] == f"rank6: on one frozen copy of {tiny_model_path} with others: there is no policy"
    )
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
    policy = load_policy(tiny_model_path)
    assert len(share_or_load([RewardModel(folders["adapter"])], policy, "always")) == 1
    for arguments, message in (
        (([RewardModel(folders["full"])], policy), "full-run cannot sit on the policy's backbone: it is a full model"),
        (([RewardModel(folders["adapter"])], None), "adapter-run cannot sit .*: there is no policy"),
    ):
        with pytest.raises(ValueError, match=message):
            share_or_load(*arguments, "always")
    with pytest.raises(ValueError, match="backbone: the engine shards it"):
        share_or_load([RewardModel(folders["adapter"])], policy, "always", policy_reason="the engine shards it")
    with pytest.raises(ValueError, match="mode must be auto, always or never, got 'sometimes'"):
        share_or_load([], None, "sometimes")


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
    for attempt in (
        lambda: RewardModel(folder).score(PROMPTS, COMPLETIONS),
        lambda: share_or_load([RewardModel(folder)], load_policy(tiny_model_path)),
    ):
        with pytest.raises(ValueError, match="damaged: the adapter does not fit its base .*v_proj.lora_B") as caught:
            attempt()
        assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["always", "never"])
def test_stock_trl_trains_with_them(mode, tiny_model_path, folders, tmp_path):
    """GRPO of TRL with an ensemble and a single model as reward functions: logs, checkpoints, and equal runs."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    def train(sharing: str, folder: Path):
        members = [RewardModel(folders["adapter"]), RewardModel(folders["rank6"])]
        single = RewardModel(folders["rank6"], name="single")
        trainer = GRPOTrainer(
            tiny_model_path,
            reward_funcs=[RewardEnsemble(members, aggregate="uwo"), single],
            args=GRPOConfig(
                str(folder),
                max_steps=2,
                save_steps=2,
                logging_steps=1,
                per_device_train_batch_size=4,
                num_generations=2,
                max_completion_length=8,
                learning_rate=1e-2,
                beta=0.1,
                report_to="none",
                use_cpu=True,
                bf16=False,
                seed=3,
            ),
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS * 2]),
            peft_config=LoraConfig(r=2, target_modules=["q_proj", "o_proj"]),
        )
        share_or_load([*members, single], trainer.model, sharing)
        trainer.train()
        assert trainer.reward_func_names == ["ensemble", "single"]
        return trainer

    trainer = train(mode, tmp_path / "run")
    logged = trainer.state.log_history[0]
    for name in ("adapter-run", "rank6", "ensemble", "single"):
        assert f"rewards/{name}/mean" in logged
    assert logged["ensemble_std"] > 0
    assert logged["rewards/single/mean"] == pytest.approx(logged["rewards/rank6/mean"], abs=1e-5)
    checkpoint = tmp_path / "run" / "checkpoint-2"
    assert [path.parent.name for path in checkpoint.rglob("adapter_model.safetensors")] == ["checkpoint-2"]
    saved = load_file(checkpoint / "adapter_model.safetensors")
    assert len(saved) == 8, "A and B of two modules in two layers"
    if mode == "always":
        separate = train("never", tmp_path / "separate")
        expected = load_file(tmp_path / "separate" / "checkpoint-2" / "adapter_model.safetensors")
        assert max((saved[name] - expected[name]).abs().max().item() for name in expected) <= 1e-6
        rewards = [[entry["rewards/ensemble/mean"] for entry in t.state.log_history[:2]] for t in (trainer, separate)]
        assert rewards[0] == pytest.approx(rewards[1], abs=1e-6)
