"""What trainers, configurations and recipes refuse before they train: settings, models, rows and reward functions."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from datasets import Dataset, DatasetDict
from transformers import AutoTokenizer

import trl_ext
from tests.support.refusals import assert_refused
from tests.support.rollout_once import DEFAULTS, OWN_RECIPES
from trl_ext.models import resolve_model_path
from trl_ext.runs.loading import load_rows
from trl_ext.trainers.context import (
    PAIRS,
    PROMPTS,
    check_context,
    check_dataset,
    check_inputs,
    report_plain_prompts,
)
from trl_ext.trainers.policy.reward_functions import as_reward_functions

GDPO = f"{OWN_RECIPES}/gdpo.py:gdpo"
BASE = {"PolicyConfig": DEFAULTS, "OnlinePreferenceConfig": {"per_device_train_batch_size": 8}}


def singly(**settings) -> list[dict]:
    """Settings of which each is refused by itself."""
    return [{name: value} for name, value in settings.items()]


# Every configuration of a trainer that reads pairs or rows.
SHARED = singly(max_steps=0, fp16=True)
SHARED += [
    ({"max_steps": -1, "num_train_epochs": epochs}, "num_train_epochs") for epochs in (0, -1.0, math.nan, math.inf)
]
# Configuration -> settings, all of which the message names; or settings, and words that it has instead.
REFUSED = {
    "PolicyConfig": [
        *SHARED,
        ({"algorithm": "gspo", "aggregation": "token_mean"}, "--algorithm gspo", "sequence_mean", "--algorithm grpo"),
        ({"loss_type": "bnpo"}, "'bnpo' has no equivalent", "grpo, dapo, dr_grpo, luspo"),
        ({"loss_type": "sapo", "epsilon": 0.2}, "--epsilon 0.2 and --surrogate sapo", "loss_type 'sapo'"),
        ({"loss_type": "dapo", "aggregation": "sum"}, "'dapo' selects aggregation token_mean", "aggregation sum"),
        ({"algorithm": "dr_grpo", "scale_rewards": "group"}, "scale_rewards 'group'", "--advantage"),
        ({"algorithm": "gspo", "importance_sampling_level": "token"}, "sampling_level 'token'", "--ratio token"),
        ({"algorithm": "rloo", "loss_type": "grpo"}, "--ratio none and --surrogate clip", "loss_type"),
        ({"delta": 1.1}, "delta", "1 + epsilon_high, 1.2"),
        ({"sapo_temperature_pos": 2.0}, "sapo_temperature_pos", "--algorithm_kwargs"),
        ({"vespo_k_neg": 2.0}, "vespo_k_neg", "recipes/own/vespo.py"),
        ({"use_adaptive_entropy": True}, "use_adaptive_entropy", "trl.GRPOTrainer"),
        *singly(multi_objective_aggregation="normalize_then_sum", loss_type="vespo", overlong_share=1.5),
        {"algorithm": "dapo_full", "resample_groups": 0},
        {"algorithm": "dapo_full", "overlong_share": 0.0},
        *({"advantage": GDPO, **penalty} for penalty in singly(missing_eos_penalty=1.0, overlong_share=0.2)),
        ({"advantage": GDPO, "beta": 0.1, "kl_in": "reward", "kl_estimator": "k1"}, "kl_in reward"),
        *({"temperature": value} for value in (0.0, math.inf)),
        *singly(top_p=0.0, min_new_tokens=9, reward_errors="ignore"),
        *singly(missing_eos_penalty=-1.0, max_completion_length=None, num_generations=0, algorithm_kwargs="gamma"),
        {"resample_groups": -1},
        *({"resample_groups": 1, "algorithm": name} for name in ("remax", "reinforce")),
    ],
    "PreferenceConfig": [
        *SHARED,
        ({"loss_type": "ipo", "loss": "dpo"}, "loss_type 'ipo' selects loss ipo", "loss dpo"),
        ({"loss_type": ["sigmoid", "sft"]}, "('sigmoid', 'sft') has no equivalent"),
        ({"loss_weights": [1.0]}, "loss_weights", "loss=file.py:function"),
        *singly(ld_alpha=0.5, f_divergence_type="js_divergence", loss_kwargs="gamma=1", weighting_kwargs="3"),
        *singly(aot_scope="rank", max_prompt_tokens=0, max_response_tokens=-3, beta=0.0),
        ({"use_weighting": True}, "use_weighting", "weighting=['wpo']"),
        ({"max_length": 1024}, "max_length", "max_prompt_tokens and max_response_tokens"),
        ({"loss": "aott"}, "loss 'aott'; did you mean 'aot'?"),
        ({"loss": "nowhere.py:mine"}, "no file 'nowhere.py'"),
        ({"loss_kwargs": {"gama": 1}, "loss": "simpo"}, "'simpo' has no option 'gama'", "did you mean 'gamma'?"),
        ({"weighting": ["wp"]}, "weighting 'wp'; did you mean 'wpo'?"),
        ({"weighting_kwargs": {"power": 2}}, "weighting option 'power': no weighting is on"),
        ({"weighting": ["confidence"], "weighting_kwargs": {"powr": 2}}, "'powr'", "did you mean 'power'?"),
        ({"label_smoothing": 0.1}, "'dpo' has no label_smoothing", "use cdpo or robust_dpo"),
    ],
    "AOTConfig": [
        {"loss": "dpo"},
        ({"loss_type": ["aot"]}, "loss_type 'aot' selects loss aot_paired", "with loss aot"),
    ],
    "IPOConfig": [
        ({"loss_type": "sigmoid"}, "loss_type 'sigmoid' selects loss dpo", "loss ipo"),
        ({"loss_type": "ipo", "length_normalized": False}, "'ipo' selects length_normalized True", "False"),
    ],
    "SimPOConfig": [({"gamma": 1.0, "loss_kwargs": {"gamma": 2.0}}, "gamma is given twice", "loss_kwargs")],
    "CDPOConfig": [({"label_smoothing": 0.1, "loss_kwargs": {"label_smoothing": 0.2}}, "label_smoothing", "twice")],
    "PPOConfig": [
        *singly(algorithm="grpo", advantage="group_centered", std_ddof=1, surrogate="cispo", kl_horizon=20),
        *singly(value_model="seperate", value_model_name_or_path="gpt2", lam=1.1, value_clip=0.0, resample_groups=1),
        *singly(value_coefficient=-1.0, use_vllm=True, torch_compile=True),
        ({"ratio": "sequence", "aggregation": "sequence_mean"}, "--algorithm ppo and --ratio sequence"),
        ({"value_model": "separate"}, "value_model separate and value_model_name_or_path"),
        ({"kl_target": 6.0, "beta": 0.0}, "kl_target 6.0 has no coefficient to adapt"),
        # 0.2 x 40 = 8: the coefficient could become 0.
        ({"kl_target": 6.0, "kl_horizon": 8, "generation_batch_size": 40}, "kl_horizon must be above 8"),
        ({"kl_estimator": "k3"}, "a detached k3 in the reward"),
    ],
    "OnlinePreferenceConfig": [
        *({"temperature": value} for value in (-1.0, math.nan)),
        *singly(num_generations=1, max_steps=0, pairs="best", tie_tolerance=-1.0, epsilon=0.2, algorithm="grpo"),
        *singly(top_p=1.5, reward_timeout=-1.0, resample_groups=1, mask_truncated_completions=True),
        ({"loss": "ipoo"}, "loss 'ipoo'; did you mean 'ipo'"),
        ({"replay_capacity": 8, "replay_fraction": 1.0}, "replay_fraction"),
        ({"replay_capacity": 8, "replay_max_age": 1, "num_iterations": 2}, "replay_max_age 1", "2 updates old"),
        ({"replay_capacity": 8, "replay_weights": "token"}, "replay_weights"),
        *({"replay_capacity": 0, name: 1.5} for name in ("replay_weight_cap", "replay_fraction")),
        ({"replay_capacity": 8, "replay_weight_cap": 3.0}, "replay_weight_cap", "replay_weights none"),
        ({"replay_capacity": 8, "replay_weight_cap": 0.5}, "replay_weight_cap must be at least 1"),
        ({"replay_capacity": 8, "sync_ref_model": True}, "sync_ref_model", "replay"),
        {"gradient_accumulation_steps": 2, "steps_per_generation": 1},
    ],
    "KTOConfig": [
        *SHARED,
        *singly(per_device_train_batch_size=1, max_length=100, max_prompt_tokens=0, beta=0),
        *singly(undesirable_weight=-1.0, packing="on"),
    ],
    "RewardConfig": [
        *SHARED,
        *singly(max_length=1024, label_smoothing=0.5, label_smoothing_factor=0.1),
        *singly(max_prompt_tokens=0, center_rewards_coefficient=-0.01),
    ],
    "ExpertIterationConfig": singly(
        n_steps=0, max_per_question=0, max_steps=10, num_train_epochs=7, save_strategy="steps"
    ),
    "SFTConfig": [*SHARED, {"max_length": 1}],
}


@pytest.mark.parametrize(("name", "row"), [(name, row) for name, rows in REFUSED.items() for row in rows])
def test_refused(name, row, tmp_path):
    settings, *words = row if isinstance(row, tuple) else (row, *row)
    settings = {"output_dir": str(tmp_path), "report_to": "none", "use_cpu": True, **BASE.get(name, {}), **settings}
    assert_refused(lambda: getattr(trl_ext, name)(**settings), *words)


# ---- Models, rows and reward functions ----


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(resolve_model_path("toy"))


def model_of(context: int) -> SimpleNamespace:
    config = SimpleNamespace(max_position_embeddings=context)
    config.get_text_config = lambda: config
    return SimpleNamespace(config=config)


@pytest.mark.parametrize(
    "columns",
    [
        {"prompt_ids": [[1] * 4, [1]], "chosen_ids": [[1], [1] * 2], "rejected_ids": [[1] * 3, [1]]},
        {"prompt_ids": [[1] * 4], "completion_ids": [[1] * 3]},
        {"chosen_ids": [[1] * 7], "rejected_ids": [[1]]},
        {"input_ids": [[1], [1] * 7]},
    ],
)
def test_the_longest_row(columns):
    """Of 7 tokens, with its prompt."""
    rows, limits = Dataset.from_dict(columns), {"max_response_tokens": 512, "max_prompt_tokens": None}
    check_context(model_of(7), rows, limits)
    with pytest.raises(ValueError, match="up to 7 tokens.*holds 6: lower --max_resp"):
        check_context(model_of(6), rows, limits)


USER, ASSISTANT = ([{"role": role, "content": "a"}] for role in ("user", "assistant"))
# Trainer -> a right row; the last column is the response that a wrong row changes.
ROWS = {
    "DPO": {"prompt": USER, "chosen": ASSISTANT, "rejected": ASSISTANT},
    "KTO": {"prompt": USER, "label": True, "completion": ASSISTANT},
    "Reward": {"prompt": USER, "chosen": ASSISTANT, "rejected": ASSISTANT},
    "SFT": {"prompt": USER, "completion": ASSISTANT},
    "GRPO": {"prompt": USER},
}
KIND = "must be text or messages with roles, got"


def _datasets(row: dict) -> dict[str, object]:
    """Wrong data, under what the message says about it after the name of the dataset."""
    response = list(row)[-1]
    data = {
        " has no rows": Dataset.from_list([row]).select([]),
        " has no column 'prompt': give rows of prompt.*; it has question$": [{"question": "b"}],
        " must be a Dataset, got DatasetDict: ": DatasetDict(train_prefs=Dataset.from_list([row])),
        " must be a Dataset, got str: ": "toy",
        rf", row 0: {response} {KIND} \[\]": [{**row, response: []}],
        rf", row 0: prompt {KIND} \['hi'\]": [{**row, "prompt": ["hi"]}],
        rf", row 0: prompt {KIND} \[{{'from': ": [{**row, "prompt": [{"from": "human", "value": "a"}]}],
    }
    if response != "prompt":
        data[" has no column '(chosen|completion)': give rows of"] = [{"prompt": USER}]
    if response == "rejected":
        data[" has no column 'rejected'"] = [{"prompt": USER, "chosen": ASSISTANT}]
    return {message: Dataset.from_list(rows) if isinstance(rows, list) else rows for message, rows in data.items()}


@pytest.mark.parametrize("name", ROWS)
def test_wrong_inputs_to_a_trainer(name, tmp_path):
    """One line each, before a model is loaded: there are no weights in the folder."""
    (tmp_path / "config.json").write_text("{}")
    config, trainer = getattr(trl_ext, f"{name}Config"), getattr(trl_ext, f"{name}Trainer")
    options = {"reward_funcs": len} if name == "GRPO" else {}
    arguments = config(str(tmp_path / "run"), use_cpu=True, report_to="none")
    right = Dataset.from_list([ROWS[name]])
    for message, wrong in _datasets(ROWS[name]).items():
        for given in ({"train_dataset": wrong}, {"train_dataset": right, "eval_dataset": {"held_out": wrong}}):
            where = "held_out" if "eval_dataset" in given else "train_dataset"
            with pytest.raises((ValueError, TypeError), match=f"^{where}{message}") as caught:
                trainer(str(tmp_path), args=arguments, **given, **options)
            assert "\n" not in str(caught.value)
    for message, model in {"no model folder 'runs/aot-tyo'": "runs/aot-tyo", "did you mean 'toy'": "tooy"}.items():
        with pytest.raises(OSError, match=message):
            trainer(model, args=arguments, train_dataset=right, **options)
    if name in ("DPO", "KTO"):
        with pytest.raises(TypeError, match="^ref_model must be a model, got str"):
            trainer(str(tmp_path), "toy", args=arguments, train_dataset=right)


def test_plain_prompts_are_pointed_out_and_not_rejected(tokenizer, caplog):
    report_plain_prompts(tokenizer, Dataset.from_dict({"prompt": ["Name a fruit."]}))
    assert "the model's chat template is not applied" in caplog.text


def test_what_a_trainer_does_not_read_is_not_checked():
    pair = {"prompt": "p", "chosen": "c", "rejected": "r"}
    check_dataset("train_dataset", Dataset.from_list([{**pair, "completion": 3}]), PAIRS)
    check_dataset("train_dataset", Dataset.from_list([{"prompt": "p", "chosen": 1}]), PROMPTS)
    check_dataset("train_dataset", Dataset.from_list([{"prompt": USER}]).with_format("numpy"), PROMPTS)
    assert check_inputs("toy", {"train_dataset": Dataset.from_list([pair]), "eval_dataset": {}}, PAIRS)


def test_wrong_reward_functions():
    for given, message in {"missing.py:f": "no file 'missing.py'", 3: "reward_funcs holds 3: give functions"}.items():
        with pytest.raises((ValueError, TypeError), match=message):
            as_reward_functions(given)
    assert as_reward_functions("math:sqrt") == [math.sqrt]


def test_one_file_is_the_split_to_train_on(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "p", "chosen": "c", "rejected": "r"}\n')
    given = SimpleNamespace(dataset_name=str(path), train_split="train_gen", skip_bad_rows=False)
    rows = load_rows(given)
    assert list(rows) == ["train_gen"] and rows["train_gen"]["prompt"][:] == ["p"]
    path.rename(tmp_path / "test_gen.jsonl")
    with pytest.raises(ValueError, match="only test_gen.*--train_split"):
        load_rows(SimpleNamespace(**{**vars(given), "dataset_name": str(tmp_path)}))
