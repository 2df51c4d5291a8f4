"""Dolly, HH-RLHF and prompt-completion rows as rows of this library: what becomes of each, how a bad one is named."""

from __future__ import annotations

import pytest

from tests.support.files import write_rows
from trl_ext.data import load_benchmark
from trl_ext.data.formats import convert_file, main

DOLLY = {
    "instruction": "Who wrote it?",
    "context": "Hamlet is a play by Shakespeare.",
    "response": "Shakespeare.",
    "category": "closed_qa",
}
# Two exchanges; only the last answer differs.
HH = {
    "chosen": "\n\nHuman: Hi\n\nAssistant: Hello.\n\nHuman: Why?\n\nAssistant: Because\n\nit is.",
    "rejected": "\n\nHuman: Hi\n\nAssistant: Hello.\n\nHuman: Why?\n\nAssistant: No.",
}
PAIR = {"chosen": "\n\nHuman: Hi\n\nAssistant: Good", "rejected": "\n\nHuman: Hi\n\nAssistant: Bad"}


def test_dolly_as_messages_and_as_text(tmp_path):
    (row,) = convert_file(write_rows(tmp_path / "dolly.jsonl", [DOLLY]), "dolly")
    assert row == {
        "row_id": "dolly:1",
        "prompt": [{"role": "user", "content": "Who wrote it?\n\nHamlet is a play by Shakespeare."}],
        "reference_response_text": "Shakespeare.",
        "category": "closed_qa",
    }
    (row,) = convert_file(write_rows(tmp_path / "dolly.jsonl", [{**DOLLY, "context": ""}]), "dolly", plain=True)
    assert row["prompt"] == "\n\nHuman: Who wrote it?\n\nAssistant:"
    assert row["reference_response_text"] == " Shakespeare."


def test_hh_rlhf_as_messages_and_as_text(tmp_path):
    path = write_rows(tmp_path / "hh.jsonl", [HH])
    (row,) = convert_file(path, "hh_rlhf")
    assert row["prompt"] == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Why?"},
    ]
    # A blank line within a turn begins none.
    assert row["chosen"] == [{"role": "assistant", "content": "Because\n\nit is."}]
    assert row["rejected"] == [{"role": "assistant", "content": "No."}]
    (plain,) = convert_file(path, "hh_rlhf", plain=True)
    # Prompt and response together are the transcript that there was.
    for side in ("chosen", "rejected"):
        assert plain["prompt"] + plain[side] == HH[side]
    assert plain["prompt"].endswith("\n\nHuman: Why?\n\nAssistant:")


def test_prompt_and_completion_become_a_prompt_with_its_response(tmp_path):
    prompt = [{"role": "user", "content": "q"}]
    message = {"row_id": "a", "prompt": prompt, "completion": [{"role": "assistant", "content": "yes"}], "reward": 0.5}
    plain = {"row_id": "b", "prompt": prompt, "completion": "no", "reward": 0.25}
    assert convert_file(write_rows(tmp_path / "sft.jsonl", [message, plain]), "prompt_completion") == [
        {"row_id": "a", "prompt": prompt, "reference_response_text": "yes", "reward": 0.5},
        {"row_id": "b", "prompt": prompt, "reference_response_text": "no", "reward": 0.25},
    ]


@pytest.mark.parametrize(
    ("form", "record", "expected"),
    [
        ("prompt_completion", {"prompt": "q"}, "completion: must be text, got None"),
        ("hh_rlhf", {**PAIR, "chosen": "\n\nHuman: Hi"}, "chosen: the last turn must be the Assistant's"),
        (
            "hh_rlhf",
            {**PAIR, "chosen": "\n\nHuman: Hi\n\nAssistant:  "},
            "chosen: the last turn must be the Assistant's",
        ),
        ("hh_rlhf", {**PAIR, "chosen": HH["chosen"]}, "chosen and rejected differ before the last turn"),
        ("hh_rlhf", {**PAIR, "rejected": PAIR["chosen"]}, "chosen: equal to rejected"),
        ("hh_rlhf", {**PAIR, "chosen": "Human: Hi"}, "chosen: must begin with a blank line and Human:"),
        ("hh_rlhf", {"chosen": PAIR["chosen"]}, "rejected: missing; the row has chosen"),
        ("dolly", {**DOLLY, "response": " \n"}, "response: empty"),
    ],
)
def test_a_bad_record_is_named_by_file_and_line(form, record, expected, tmp_path, capsys):
    good = {
        "dolly": [DOLLY, {**DOLLY, "response": "Him."}],
        "hh_rlhf": [PAIR, HH],
        "prompt_completion": [{"prompt": "q", "completion": "yes"}, {"prompt": "r", "completion": "no"}],
    }[form]
    path = write_rows(tmp_path / "train.jsonl", [good[0], record, good[1]])
    # The command says it in one line, writes nothing, and can leave the row out.
    out = tmp_path / "out" / "train_prefs.jsonl"
    with pytest.raises(SystemExit) as stopped:
        main([str(path), str(out), "--format", form])
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and said.count("\n") == 1
    assert f"{path}: 1 bad row: line 2: {expected}" in said and "skip_bad_rows" in said
    assert not out.exists()
    main([str(path), str(out), "--format", form, "--skip_bad_rows"])
    assert capsys.readouterr().out == f"{out}: 2 rows\n"


def test_what_the_command_writes_is_a_benchmark(tmp_path):
    """Four pairs over two prompts: `--prompts` keeps the first of each."""
    other = {side: text.replace("Hi", "Ho") for side, text in PAIR.items()}
    again = {**PAIR, "rejected": PAIR["rejected"] + " indeed"}
    path = write_rows(tmp_path / "hh.jsonl", [PAIR, other, again, {**other, "chosen": other["chosen"] + "!"}])
    folder = tmp_path / "benchmark"
    main([str(path), str(folder / "train_prefs.jsonl"), "--format", "hh_rlhf", "--plain"])
    main([str(path), str(folder / "test_gen.jsonl"), "--format", "hh_rlhf", "--plain", "--prompts"])
    benchmark = load_benchmark(folder)
    assert benchmark["train_prefs"]["rejected"] == [" Bad", " Bad", " Bad indeed", " Bad"]
    assert benchmark["train_prefs"]["row_id"] == ["hh:1", "hh:2", "hh:3", "hh:4"]
    assert benchmark["test_gen"]["prompt"] == ["\n\nHuman: Hi\n\nAssistant:", "\n\nHuman: Ho\n\nAssistant:"]
    assert benchmark["test_gen"]["reference_response_text"] == [" Good", " Good"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nope.jsonl", "out.jsonl", "--format", "dolly"], "no file nope.jsonl"),
        (["nope.jsonl", "out.jsonl", "--format", "doly"], "invalid choice: 'doly'"),
    ],
)
def test_a_wrong_command_is_refused(arguments, expected, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and "error: " in said and expected in said
