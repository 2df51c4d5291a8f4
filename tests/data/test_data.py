"""The rows of each kind, truncation, and what importing `trl_ext.data` loads."""

import subprocess
import sys

import pytest
from transformers import AutoTokenizer

from tests.support.files import LOADED_PAIR, PAIR, assistant, user, write_rows
from trl_ext.data import encode_turn, load_benchmark
from trl_ext.data.schemas import convert_row
from trl_ext.models import resolve_model_path

LABELLED = {"prompt": "Q", "completion": "A", "label": True}


class TestLabelled:
    @pytest.mark.parametrize(
        ("row", "prompt", "completion"),
        [
            # Both strings by TRL's names stay strings; by any other name the prompt is a user's message.
            ({"prompt_text": "Q", "completion": "A"}, [user("Q")], [assistant("A")]),
            ({"prompt": "Q", "completion": "A"}, "Q", "A"),
            ({"prompt": [user("Q")], "completion": [assistant("A")]}, [user("Q")], [assistant("A")]),
        ],
    )
    def test_chat_and_plain(self, row, prompt, completion):
        found = convert_row("labelled", {**row, "label": False, "source": "us"})
        assert found == {"prompt": prompt, "completion": completion, "label": False, "source": "us"}

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


TURN = user("Name a fruit.")
CONVERSATIONS = {"chosen": [TURN, assistant("An apple.")], "rejected": [TURN, assistant("A stone.")]}
FORMATS = {
    "texts": PAIR,
    "messages first, without other keys": {**PAIR, "prompt_messages": [{**TURN, "n": 1}], "prompt_text": "another"},
    "TRL": LOADED_PAIR,
    "text prompt": {"prompt": "Name a fruit.", "chosen_text": "An apple.", "rejected_text": "A stone."},
    "implicit prompt": CONVERSATIONS,
    "prompt beside conversations": {"prompt": "Name a fruit.", **CONVERSATIONS},
}


class TestPair:
    @pytest.mark.parametrize("form", FORMATS)
    def test_one_row_in_every_format(self, form):
        assert convert_row("pair", FORMATS[form]) == LOADED_PAIR

    def test_implicit_prompt_of_several_turns(self):
        turns = [user("a"), assistant("b"), user("c")]
        row = convert_row("pair", {"chosen": [*turns, assistant("d")], "rejected": [*turns, assistant("e")]})
        assert row == {"prompt": turns, "chosen": [assistant("d")], "rejected": [assistant("e")]}

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
        with pytest.raises(ValueError, match=field):
            convert_row("pair", {**PAIR, field: rows[field]})
        empty = {"role": "assistant", "content": "5", "tool_calls": None, "thinking": ""}
        assert convert_row("pair", {**PAIR, "chosen_text": [empty]})["chosen"] == [assistant("5")]


class TestPrompt:
    def test_messages_and_plain(self):
        for fields in ({"prompt_text": "Hi"}, {"prompt_messages": [user("Hi")]}, {"prompt": [user("Hi")]}):
            assert convert_row("prompt", fields) == {"prompt": [user("Hi")]}
        assert convert_row("prompt", {"prompt": "Once upon"}) == {"prompt": "Once upon"}

    def test_a_completion_without_a_label_is_the_reference_response(self):
        row = {"prompt": [user("q")], "reward": 0.5}
        for completion in ([assistant("yes")], "yes"):
            found = convert_row("prompt", {**row, "completion": completion})
            assert found == {**row, "reference_response_text": "yes"}
        for other in (3, "", [assistant("a"), user("b"), assistant("c")]):
            assert "reference_response_text" not in convert_row("prompt", {**row, "completion": other})


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("pair", {"prompt_text": " \n"}, "prompt_text: empty"),
        ("pair", {"prompt_messages": []}, "prompt_messages: must be text or a non-empty list"),
        (
            "pair",
            {"prompt_messages": [user("a"), assistant("b")]},
            "prompt_messages: last message is from 'assistant'",
        ),
        ("pair", {"chosen_text": ""}, "chosen_text: empty"),
        ("pair", {"rejected_text": None}, "rejected: missing"),
        ("pair", {"chosen_text": "A stone."}, "chosen_text: equal to rejected_text"),
        ("pair", {"chosen_text": [user("x")]}, "chosen_text: must be one assistant message"),
        ("pair", {"prompt_text": "b", **CONVERSATIONS}, "prompt_text: differs from the turns"),
        ("labelled", {"label": 1}, "label: must be true or false, got 1"),
        ("labelled", {"label": None}, "label: missing"),
        ("labelled", {"completion": ""}, "completion: empty"),
        ("labelled", {"completion": [user("A")]}, "completion: must be one assistant message"),
        ("labelled", {"prompt": None}, "prompt: missing"),
        ("prompt", {"prompt_messages": [{"role": "system", "content": "Be brief."}]}, "last message is from 'system'"),
    ],
)
def test_errors_name_the_field(kind, changes, message):
    # Of a pair, texts would be read before conversations.
    base = {"pair": {} if "chosen" in changes else PAIR, "labelled": LABELLED, "prompt": {}}[kind]
    with pytest.raises(ValueError, match=message):
        convert_row(kind, {**base, **changes})


def test_a_prompt_keeps_its_end_and_a_response_its_start():
    tokenizer = AutoTokenizer.from_pretrained(resolve_model_path("toy"))
    turn = [user("Say axe three times.")], "axe, axe, axe."
    prompt, response = encode_turn(tokenizer, *turn)
    limits = {"max_prompt_tokens": 3, "max_response_tokens": 2}
    assert encode_turn(tokenizer, *turn, **limits) == (prompt[-3:], response[:2])
    for name in limits:
        assert encode_turn(tokenizer, *turn, **{name: 1000}) == (prompt, response)
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            encode_turn(tokenizer, *turn, **{name: 0})


def test_torch_is_loaded_by_what_needs_it_alone():
    """In a process of its own: this one has loaded torch long since."""
    script = "import sys; from trl_ext.data import load_benchmark, load_math; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
