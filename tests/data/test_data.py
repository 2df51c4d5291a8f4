"""Row schemas and truncation, and what importing `trl_ext.data` loads."""

import subprocess
import sys

import pytest
from pydantic import ValidationError

from tests.support.files import LOADED_PAIR, PAIR, assistant, user, write_rows
from trl_ext.data import PreferenceRow, PromptRow, UnpairedRow, load_benchmark, truncate_pair


class TestTruncatePair:
    def test_prompt_keeps_its_end_and_responses_their_start(self):
        truncated = truncate_pair([1, 2, 3, 4], [5, 6, 7], [8, 9], max_prompt_tokens=3, max_response_tokens=2)
        assert truncated == ([2, 3, 4], [5, 6], [8, 9])

    def test_each_limit_alone(self):
        assert truncate_pair([1, 2], [3, 4], [5, 6], max_prompt_tokens=1) == ([2], [3, 4], [5, 6])
        assert truncate_pair([1, 2], [3, 4], [5, 6], max_response_tokens=1) == ([1, 2], [3], [5])

    @pytest.mark.parametrize("name", ["max_prompt_tokens", "max_response_tokens"])
    def test_limit_below_one(self, name):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            truncate_pair([1], [2], [3], **{name: 0})


class TestUnpairedRow:
    def test_chat_and_plain(self):
        """Both strings by TRL's names stay strings; by any other name the prompt is a user's message."""
        chat = UnpairedRow.model_validate({"prompt_text": "Q", "completion": "A", "label": False, "source": "us"})
        assert (chat.prompt, chat.completion, chat.label) == ([user("Q")], [assistant("A")], False)
        assert chat.model_dump()["source"] == "us"
        plain = UnpairedRow.model_validate({"prompt": "Q", "completion": "A", "label": True})
        assert (plain.prompt, plain.completion, plain.label) == ("Q", "A", True)
        mixed = UnpairedRow.model_validate({"prompt": [user("Q")], "completion": [assistant("A")], "label": True})
        assert (mixed.prompt, mixed.completion) == ([user("Q")], [assistant("A")])

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"label": 1}, "label\n  Input should be a valid boolean"),
            ({"label": None}, "label\n  Field required"),
            ({"completion": ""}, "completion: empty"),
            ({"completion": [user("A")]}, "completion: must be one assistant message"),
            ({"prompt": None}, "prompt: missing"),
        ],
    )
    def test_bad(self, changes, message):
        with pytest.raises(ValidationError, match=message):
            UnpairedRow.model_validate({"prompt": "Q", "completion": "A", "label": True, **changes})

    def test_a_file_of_them_is_known_by_its_first_row(self, tmp_path):
        rows = [{"prompt": f"Q{i}", "completion": f"A{i}", "label": i == 0, "score": i} for i in range(3)]
        loaded = load_benchmark(write_rows(tmp_path / "rows.jsonl", rows))
        assert {name: split.column_names for name, split in loaded.items()} == {
            "train_prefs": ["row_id", "prompt", "completion", "label", "score"]
        }
        assert loaded["train_prefs"]["label"] == [True, False, False]
        write_rows(tmp_path / "train_prefs.jsonl", rows)
        write_rows(tmp_path / "test_prefs.jsonl", [PAIR, {**PAIR, "prompt_text": "another"}])
        columns = {name: split.column_names for name, split in load_benchmark(tmp_path).items()}
        assert "label" in columns["train_prefs"] and "chosen" in columns["test_prefs"]

    def test_a_pair_among_them_is_a_bad_row(self, tmp_path):
        path = write_rows(tmp_path / "rows.jsonl", [{"prompt_text": "Q", "completion": "A", "label": True}, PAIR])
        with pytest.raises(ValueError, match="line 2: completion: missing"):
            load_benchmark(path)


TURN = user("Name a fruit.")
CONVERSATIONS = {"chosen": [TURN, assistant("An apple.")], "rejected": [TURN, assistant("A stone.")]}
FORMATS = {
    "texts": PAIR,
    "messages first": {**PAIR, "prompt_messages": [TURN], "prompt_text": "another rendering"},
    "TRL": LOADED_PAIR,
    "text prompt": {"prompt": "Name a fruit.", "chosen_text": "An apple.", "rejected_text": "A stone."},
    "implicit prompt": CONVERSATIONS,
    "prompt beside conversations": {"prompt": "Name a fruit.", **CONVERSATIONS},
}


class TestPreferenceRow:
    @pytest.mark.parametrize("form", FORMATS)
    def test_one_row_in_every_format(self, form):
        assert PreferenceRow.model_validate(FORMATS[form]).model_dump(exclude_none=True) == LOADED_PAIR

    def test_implicit_prompt_of_several_turns(self):
        turns = [user("a"), assistant("b"), user("c")]
        row = PreferenceRow(chosen=[*turns, assistant("d")], rejected=[*turns, assistant("e")])
        assert (row.prompt, row.chosen, row.rejected) == (turns, [assistant("d")], [assistant("e")])

    def test_what_validation_returns_is_valid(self):
        row = PreferenceRow.model_validate({**PAIR, "row_id": 7, "avg_confidence": 1, "kind": "list", "extra": None})
        assert (row.row_id, row.avg_confidence, row.kind) == ("7", 1.0, "list")
        assert PreferenceRow.model_validate(row.model_dump()) == row

    def test_other_keys_of_a_message_are_left_out(self):
        row = PreferenceRow.model_validate({**PAIR, "prompt_messages": [{**user("Hi"), "language": "English"}]})
        assert row.prompt == [user("Hi")]

    @pytest.mark.parametrize(
        "turn",
        [
            {"content": "5", "tool_calls": [{"function": {}}]},
            {"content": "5", "reasoning_content": "2 + 3"},
            {"content": [{"type": "image", "image": "a.png"}]},
        ],
    )
    @pytest.mark.parametrize("field", ["prompt_messages", "chosen_text"])
    def test_what_a_message_carries_besides_a_text_is_refused(self, field, turn):
        turns = [{"role": "assistant", **turn}]
        rows = {"prompt_messages": [user("Add."), *turns, user("And?")], "chosen_text": turns}
        with pytest.raises(ValidationError, match=field):
            PreferenceRow.model_validate({**PAIR, field: rows[field]})
        empty = {"role": "assistant", "content": "5", "tool_calls": None, "thinking": ""}
        assert PreferenceRow.model_validate({**PAIR, "chosen_text": [empty]}).chosen == [assistant("5")]

    @pytest.mark.parametrize(
        "changes, message",
        [
            ({"prompt_text": " \n"}, "prompt_text: empty"),
            ({"prompt_messages": []}, "prompt_messages: must be text or a non-empty list"),
            ({"prompt_messages": [user("a"), assistant("b")]}, "prompt_messages: last message is from 'assistant'"),
            ({"chosen_text": ""}, "chosen_text: empty"),
            ({"rejected_text": None}, "rejected: missing"),
            ({"chosen_text": "A stone."}, "chosen_text: equal to rejected_text"),
            ({"chosen_text": [user("x")]}, "chosen_text: must be one assistant message"),
            *(
                ({"avg_confidence": value}, "avg_confidence\n  Input should be")
                for value in (1.1, float("nan"), "high")
            ),
        ],
    )
    def test_errors_name_the_field(self, changes, message):
        with pytest.raises(ValidationError, match=message):
            PreferenceRow.model_validate({**PAIR, **changes})

    def test_prompt_that_contradicts_the_conversations(self):
        with pytest.raises(ValidationError, match="prompt: differs from the turns"):
            PreferenceRow(prompt="b", chosen=[user("a"), assistant("c")], rejected=[user("a"), assistant("d")])


class TestPromptRow:
    def test_messages_and_plain(self):
        for fields in ({"prompt_text": "Hi"}, {"prompt_messages": [user("Hi")]}, {"prompt": [user("Hi")]}):
            assert PromptRow.model_validate(fields).prompt == [user("Hi")]
        assert PromptRow(prompt="Once upon").prompt == "Once upon"

    def test_system_message_may_not_end_it(self):
        with pytest.raises(ValidationError, match="last message is from 'system', must be from 'user'"):
            PromptRow(prompt_messages=[{"role": "system", "content": "Be brief."}])


def test_torch_is_loaded_by_what_needs_it_alone():
    """In a process of its own: this one has loaded torch long since."""
    script = "import sys; from trl_ext.data import load_benchmark, load_math; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
