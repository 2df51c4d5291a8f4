"""What trainers and recipes refuse before they train: a wrong model, wrong rows, rows beyond the context."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace

import pytest
from datasets import Dataset, DatasetDict
from transformers import AutoTokenizer

import trl_ext
from tests.support.files import write_rows
from trl_ext.models import resolve_model_path
from trl_ext.runs.loading import load_rows
from trl_ext.runs.offline import OfflineArguments
from trl_ext.runs.results import _show
from trl_ext.trainers.context import (
    PAIRS,
    PROMPTS,
    check_dataset,
    check_inputs,
    check_rows,
    check_template,
    quiet_about_length,
)
from trl_ext.trainers.policy.reward_functions import as_reward_functions
from trl_ext.trainers.policy.rollout_metrics import _warn_of_empty


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
    check_rows(model_of(7), rows, limits)
    with pytest.raises(ValueError, match="up to 7 tokens.*holds 6: lower --max_resp"):
        check_rows(model_of(6), rows, limits)


@pytest.mark.parametrize(
    ("prompt", "lengths", "told"),
    [
        ("text", [1] * 9 + [4], "9 of the 10 responses of the first rollout are a single token"),
        ("text", [1] * 10, "call their column prompt_text"),
        ([{"role": "user", "content": "text"}], [1] * 10, "check that the model can continue"),
        ("text", [1] * 8 + [4] * 2, None),
    ],
)
def test_a_first_rollout_that_ends_at_once(tokenizer, caplog, prompt, lengths, told):
    rows = Dataset.from_dict({"prompt": [prompt]})
    trainer = SimpleNamespace(max_completion_length=8, processing_class=tokenizer, train_dataset=rows)
    with caplog.at_level(logging.WARNING):
        _warn_of_empty(trainer, lengths)
    assert told in caplog.text if told else not caplog.text


USER, ASSISTANT = ([{"role": role, "content": "a"}] for role in ("user", "assistant"))
# Trainer -> a right row; the last column is the response that a wrong row changes.
ROWS = {
    "DPO": {"prompt": USER, "chosen": ASSISTANT, "rejected": ASSISTANT},
    "KTO": {"prompt": USER, "label": True, "completion": ASSISTANT},
    "Reward": {"prompt": USER, "chosen": ASSISTANT, "rejected": ASSISTANT},
    "SFT": {"prompt": USER, "completion": ASSISTANT},
    "GRPO": {"prompt": USER},
}
KIND = r"must be text or messages such as .*, got"


def _datasets(row: dict) -> dict[str, object]:
    """Wrong data, under what the message says about it after `train_dataset` or `eval_dataset`."""
    response = list(row)[-1]
    data = {
        " has no rows": Dataset.from_list([row]).select([]),
        " has no column 'prompt': give rows of prompt.*; it has question$": [{"question": "b"}],
        " holds several data sets, train_prefs: give one": DatasetDict(train_prefs=Dataset.from_list([row])),
        " must be a Dataset, got str: ": "toy",
        " must be a Dataset, got tuple: ": (row,),
        rf", row 1 \(row_id 7\): {response} {KIND} None": [{**row, "row_id": 6}, {**row, response: None, "row_id": 7}],
        rf", row 0: {response} {KIND} \[\]": [{**row, response: []}],
        rf", row 0: prompt {KIND} \['hi'\]": [{**row, "prompt": ["hi"]}],
        rf", row 0: prompt {KIND} \[{{'from': ": [{**row, "prompt": [{"from": "human", "value": "a"}]}],
    }
    if response != "prompt":
        data[f" (holds prompts and no pairs|has no column '{response}'): give rows of"] = [{"prompt": USER}]
    if response == "rejected":
        data[" has no column 'rejected'"] = [{"prompt": USER, "chosen": ASSISTANT}]
        data[" holds labelled responses and no pairs: they are for KTOTrainer"] = [ROWS["KTO"]]
    if response == "rejected" or "label" in row:
        data[", row 0: prompt is text.*: give all of them as messages, or all as text"] = [{**row, "prompt": "b"}]
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
        for given in ({"train_dataset": wrong}, {"train_dataset": right, "eval_dataset": {"a": wrong}}):
            where = r"eval_dataset\['a'\]" if "eval_dataset" in given else "train_dataset"
            with pytest.raises((ValueError, TypeError), match=f"^{where}{message}") as caught:
                trainer(str(tmp_path), args=arguments, **given, **options)
            assert "\n" not in str(caught.value)
    wrong_models = {
        "no model folder 'runs/aot-tyo'": "runs/aot-tyo",
        "^no model 'tooy'; did you mean 'toy'": "tooy",
        "^model must be a model, got NoneType": None,
    }
    for message, model in wrong_models.items():
        with pytest.raises((OSError, TypeError), match=message):
            trainer(model, args=arguments, train_dataset=right, **options)
    if name in ("DPO", "KTO"):
        with pytest.raises(TypeError, match="^ref_model must be a model, got str"):
            trainer(str(tmp_path), "toy", args=arguments, train_dataset=right)
    tokenizer = SimpleNamespace(chat_template=None, name_or_path="mine")
    with pytest.raises(ValueError, match="the model mine has no chat template .*: put a chat_template.jinja into"):
        check_template(tokenizer, right)


def test_plain_prompts_are_pointed_out_and_not_rejected(tokenizer, caplog):
    check_template(tokenizer, Dataset.from_dict({"prompt": ["Name a fruit."]}))
    assert "the model's chat template is not applied" in caplog.text


def test_what_a_trainer_does_not_read_is_not_checked():
    pair = {"prompt": "p", "chosen": "c", "rejected": "r"}
    check_dataset("train_dataset", Dataset.from_list([{**pair, "completion": 3}]), PAIRS, one_kind=True)
    check_dataset("train_dataset", Dataset.from_list([{"prompt": "p", "chosen": 1}]), PROMPTS)
    check_dataset("train_dataset", Dataset.from_list([{"prompt": USER}]).with_format("numpy"), PROMPTS)
    assert check_inputs("toy", {"train_dataset": Dataset.from_list([pair]), "eval_dataset": {}}, PAIRS)


def test_pairs_without_a_prompt_need_a_common_beginning(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    rows = Dataset.from_list([{"question": "q", "chosen": "c", "rejected": "r"}])
    args = trl_ext.DPOConfig(str(tmp_path / "run"), use_cpu=True, report_to="none")
    with pytest.raises(ValueError, match="^train_dataset has no column 'prompt', .*; it has question,"):
        trl_ext.DPOTrainer(str(tmp_path), args=args, train_dataset=rows)


def test_wrong_reward_functions():
    for given, message in {"missing.py:f": "no file 'missing.py'", 3: "reward_funcs holds 3: give functions"}.items():
        with pytest.raises((ValueError, TypeError), match=message):
            as_reward_functions(given)
    assert as_reward_functions("math:sqrt") == [math.sqrt]


def test_identical_responses_are_said(capsys):
    parts = ("win_rate", "score", "rewards", "preferences", "kl", "generations")
    for response, told in (("a", True), ("b", False)):
        row = {"prompt_text": "p", "response_text": response, "base_response_text": "a"}
        _show(dict.fromkeys(parts), [row] * 12)
        assert ("responses are identical, all 12 of them" in capsys.readouterr().out) == told


def test_an_alarm_without_a_cause_is_turned_off(tokenizer, caplog):
    tokenizer.model_max_length = 4
    quiet_about_length(tokenizer)
    tokenizer("one two three four five six")
    assert "indexing errors" not in caplog.text


def rows_of(path, *, train_split: str = "train_gen", **splits: str) -> SimpleNamespace:
    """A recipe's arguments as far as `load_rows` reads them."""
    given = {"dataset_name": str(path), "train_split": train_split, "skip_bad_rows": False, "eval_fraction": None}
    return SimpleNamespace(**given, **splits)


def test_one_file_is_the_split_to_train_on(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "p", "chosen": "c", "rejected": "r"}\n')
    rows = load_rows(rows_of(path), 42)
    assert list(rows) == ["train_gen"] and rows["train_gen"]["prompt"][:] == ["p"]
    path.rename(tmp_path / "test_gen.jsonl")
    with pytest.raises(
        ValueError, match=r"only test_gen. Name one .*, call the file of prompts \(prompt\) train_gen.jsonl"
    ):
        load_rows(rows_of(tmp_path), 42)


def test_a_fraction_of_the_prompts_is_held_out(tmp_path, capsys):
    """Of 20 prompts of two rows, 0.1: two prompts, which no training row has, in both held-out splits."""
    path = tmp_path / "mine.jsonl"
    rows = [{"prompt": f"p{n % 20}", "chosen": f"c{n}", "rejected": "r"} for n in range(40)]
    write_rows(path, rows)
    given = rows_of(path, train_split="train_prefs", eval_split="test_prefs", prompt_split="test_gen")
    given.eval_fraction = 0.1
    loaded = [load_rows(given, seed) for seed in (42, 42, 43)]
    chosen = [{*splits["test_gen"]["prompt"]} for splits in loaded]
    assert len(chosen[0]) == 2 and chosen[0] == chosen[1] != chosen[2]
    assert "held out: 2 of 20 prompts, in 4 rows, as test_prefs and test_gen" in capsys.readouterr().out
    for splits, prompts in zip(loaded, chosen, strict=True):
        counts = {name: len(split) for name, split in splits.items()}
        assert counts == {"train_prefs": 36, "test_prefs": 4, "test_gen": 2}
        assert {*splits["test_prefs"]["prompt"]} == prompts
        assert not prompts & {*splits["train_prefs"]["prompt"]}
    given.eval_fraction = 0.01
    with pytest.raises(ValueError, match="eval_fraction 0.01 holds out 0 of the 20 prompts"):
        load_rows(given, 42)
    given.dataset_name = "toy"
    with pytest.raises(ValueError, match="eval_fraction makes the held-out rows, and test_prefs is there already"):
        load_rows(given, 42)
    with pytest.raises(ValueError, match="eval_fraction must lie between 0 and 1, got 10"):
        OfflineArguments(eval_fraction=10)
