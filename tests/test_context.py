"""What a recipe refuses before it trains: rows beyond the context, messages without a template, a hub out of reach."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import httpx
import pytest
from datasets import Dataset
from transformers import AutoTokenizer

from trl_ext.models import resolve_model_path
from trl_ext.runs import training_run
from trl_ext.trainers.context import check_rows
from trl_ext.trainers.policy.rollout_metrics import _warn_of_empty


@pytest.fixture
def training(monkeypatch):
    """The recipes' module."""
    from trl_ext.runs import loading as training

    return training


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(resolve_model_path("toy"))


def model_of(context: int | None) -> SimpleNamespace:
    config = SimpleNamespace() if context is None else SimpleNamespace(max_position_embeddings=context)
    config.get_text_config = lambda: config
    return SimpleNamespace(config=config)


class TestContext:
    @pytest.mark.parametrize(
        ("columns", "length"),
        [
            ({"prompt_ids": [[1] * 4, [1]], "chosen_ids": [[1], [1] * 2], "rejected_ids": [[1] * 3, [1]]}, 7),
            ({"prompt_ids": [[1] * 4], "completion_ids": [[1] * 3]}, 7),
            ({"chosen_ids": [[1] * 7], "rejected_ids": [[1]]}, 7),
            ({"input_ids": [[1], [1] * 7]}, 7),
        ],
    )
    def test_the_longest_row(self, columns, length):
        rows, limits = Dataset.from_dict(columns), {"max_response_tokens": 512, "max_prompt_tokens": None}
        check_rows(model_of(length), rows, limits)
        with pytest.raises(ValueError, match=f"up to {length} tokens.*holds {length - 1}: lower --max_resp"):
            check_rows(model_of(length - 1), rows, limits)


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


class TestRecipes:
    def test_messages_without_a_template(self, training, tmp_path):
        tokenizer = AutoTokenizer.from_pretrained(resolve_model_path("toy"))
        tokenizer.chat_template = None
        tokenizer.save_pretrained(tmp_path / "model")
        (tmp_path / "model" / "config.json").write_text("{}")
        model = training.ModelArguments(model_name_or_path=str(tmp_path / "model"))
        given = SimpleNamespace(output_dir=str(tmp_path / "run"), use_cpu=True, bf16=False, model_init_kwargs=None)
        rows = {"prompt": [[{"role": "user", "content": "q"}]]}
        with pytest.raises(ValueError, match="model has no chat template .*: put a chat_template.jinja into"):
            training.load_trainer(pytest.fail, model, given, train_dataset=Dataset.from_dict(rows))

    def test_plain_prompts_are_pointed_out_and_not_rejected(self, training, tmp_path, caplog):
        given = SimpleNamespace(output_dir=str(tmp_path / "run"), use_cpu=True, bf16=False, model_init_kwargs=None)
        rows = Dataset.from_dict({"prompt": ["Name a fruit."]})
        reached = []

        def build(*args, **kwargs):
            reached.append(True)
            raise OSError("far enough")

        with pytest.raises(ValueError, match="far enough"):
            training.load_trainer(build, training.ModelArguments(model_name_or_path="toy"), given, train_dataset=rows)
        assert reached and "the model's chat template is not applied" in caplog.text

    def test_one_file_is_the_split_to_train_on(self, training, tmp_path):
        path = tmp_path / "mine.jsonl"
        path.write_text('{"prompt": "p", "chosen": "c", "rejected": "r"}\n')
        rows = training.load_rows(str(path), "train_gen", skip_bad_rows=False)
        assert list(rows) == ["train_gen"] and rows["train_gen"]["prompt"][:] == ["p"]
        path.write_text('{"prompt": "p"}\n')
        with pytest.raises(ValueError, match="holds prompts and no pairs: name another --train_split, whose rows"):
            training.load_pairs(str(path), "train_prefs", skip_bad_rows=False)
        path.rename(tmp_path / "test_gen.jsonl")
        with pytest.raises(ValueError, match=r"only test_gen: call the file of prompts \(prompt\) train_gen.jsonl"):
            training.load_rows(str(tmp_path), "train_gen", skip_bad_rows=False)

    def test_a_hub_out_of_reach(self, training, monkeypatch):

        def whoami(token):
            raise httpx.ConnectError("Name or service not known")

        monkeypatch.setattr(training_run, "whoami", whoami)
        training_run.check_hub(SimpleNamespace(push_to_hub=False))
        with pytest.raises(ValueError, match="--push_to_hub needs the hub.*Name or service not known.*leave it out"):
            training_run.check_hub(SimpleNamespace(push_to_hub=True, hub_token=None))
