"""`load_benchmark`: folders, files and hub data sets, bad rows, and the embedded and the real benchmark."""

from __future__ import annotations

import gzip
import json
import logging

import datasets
import pytest
from trl.data_utils import is_conversational

from tests.support.files import LOADED_PAIR, assistant, pair, user, write_rows
from trl_ext.data import load_benchmark
from trl_ext.data.formats import convert_file, main

GOOD = pair("a")
PLAIN = {"row_id": "x", "prompt": "p", "chosen": "c", "rejected": "r"}


class TestFolder:
    def test_columns_and_format(self, tmp_path):
        columns = {"avg_confidence": 1, "avg_preference_strength": 2, "kind": "list", "count": 3, "good": True}
        rows = [pair("a", **columns, score=1), pair("b", **columns, score=1.5)]
        write_rows(tmp_path / "train_prefs.jsonl", rows)
        prompt = {"row_id": "g", "prompt_text": "Hi", "reference_response_text": "Yo"}
        write_rows(tmp_path / "test_gen.jsonl", [prompt])
        write_rows(tmp_path / "notes.jsonl", ["not read"])
        benchmark = load_benchmark(tmp_path)
        assert list(benchmark) == ["train_prefs", "test_gen"]
        assert benchmark["train_prefs"][0] == {"row_id": "a", **LOADED_PAIR, **columns, "score": 1.0}
        assert benchmark["train_prefs"]["score"][:] == [1.0, 1.5]
        assert benchmark["test_gen"][0] == {"row_id": "g", "prompt": [user("Hi")], "reference_response_text": "Yo"}
        assert all(is_conversational(split[0]) for split in benchmark.values())

    def test_splits_may_name_any_file(self, tmp_path):
        write_rows(tmp_path / "mine.jsonl", [pair("a")])
        write_rows(tmp_path / "questions.jsonl", [{"prompt_text": "2 + 2?", "answer": "4"}])
        benchmark = load_benchmark(str(tmp_path), splits=["questions", "mine"])
        assert list(benchmark) == ["questions", "mine"]
        assert benchmark["mine"].column_names == ["row_id", "prompt", "chosen", "rejected"]
        assert benchmark["questions"][0] == {"row_id": "questions:1", "prompt": [user("2 + 2?")], "answer": "4"}
        assert list(load_benchmark(tmp_path, splits="mine")) == ["mine"]

    def test_plain_strings_and_row_ids_from_file_and_line(self, tmp_path):
        row = {"prompt": "The sky is", "chosen": " blue.", "rejected": " red."}
        write_rows(tmp_path / "train_prefs.jsonl", [row, "", row])
        rows = load_benchmark(tmp_path)["train_prefs"].to_list()
        assert rows == [{"row_id": f"train_prefs:{line}", **row} for line in (1, 3)]
        assert not is_conversational(rows[0])

    def test_text_survives(self, tmp_path):
        """A byte-order mark, Windows line ends and line separators inside a string."""
        text = "é 😀 \u2028 \\n"
        line = json.dumps({"row_id": "a", "prompt_text": text}, ensure_ascii=False)
        (tmp_path / "test_gen.jsonl").write_bytes(b"\xef\xbb\xbf" + (line + "\r\n\r\n").encode())
        assert load_benchmark(tmp_path)["test_gen"][0]["prompt"] == [user(text)]

    def test_columns_that_are_dropped(self, tmp_path, caplog):
        rows = [pair(name, tags=["x"], mixed=1, messages="m") for name in "abc"]
        rows[0] |= {"score": 1.0}
        rows[1] |= {"score": None, "mixed": "1"}
        write_rows(tmp_path / "train_prefs.jsonl", rows)
        with caplog.at_level(logging.WARNING):
            benchmark = load_benchmark(tmp_path)
        assert benchmark["train_prefs"].column_names == ["row_id", "prompt", "chosen", "rejected"]
        assert "dropped columns: tags, mixed, messages, score" in caplog.text


class TestBadRows:
    def error(self, path, **arguments):
        with pytest.raises(ValueError) as error:
            load_benchmark(path, **arguments)
        return str(error.value)

    @pytest.mark.parametrize(
        ("name", "lines", "expected"),
        [
            ("train_prefs", [GOOD, '{"row_id": x}'], "1 bad row: line 2: bad JSON: Expecting value at column 12 ("),
            ("train_prefs", [GOOD, pair("x", chosen_text="")], "1 bad row: line 2: row_id x: chosen_text: empty ("),
            ("train_prefs", [GOOD, {"prompt_text": "p"}], "1 bad row: line 2: chosen: missing (or chosen_text) ("),
            ("train_prefs", [GOOD, GOOD], "1 bad row: line 2: row_id a: row_id: already used on line 1 ("),
            ("train_prefs", [GOOD, PLAIN], "some prompts are plain strings and others messages"),
            ("train_prefs", ["[1]"], "1 bad row: line 1: bad JSON: expected an object, got list"),
            (
                "mine",
                [{"prompt_text": "Q", "completion": "A", "label": True}, PLAIN],
                "line 2: row_id x: completion: miss",
            ),
            ("mine", [{}], "1 bad row: line 1: prompt: missing (or prompt_text or prompt_messages)"),
            ("train_prefs", [], "empty"),
            ("train_prefs", [{"question": "q", "best": "a"}] * 8, "8 bad rows: line 1: chosen: missing"),
        ],
    )
    def test_the_place_and_the_field_are_named(self, tmp_path, name, lines, expected):
        path = write_rows(tmp_path / f"{name}.jsonl", lines)
        message = self.error(path if name == "mine" else tmp_path)
        assert message.startswith(f"{path}: ") and expected in message, message

    def test_compressed_rows_and_a_file_that_is_not_utf_8(self, tmp_path):
        packed, latin = tmp_path / "rows.jsonl.gz", tmp_path / "latin.jsonl"
        packed.write_bytes(gzip.compress(b'{"prompt": "p"}\n{"prompt": "q"}\n'))
        assert load_benchmark(packed)["train_gen"]["prompt"][:] == ["p", "q"]
        latin.write_bytes(b'{"prompt_text": "a"}\n{"prompt_text": "\xff"}\n')
        assert str(latin) in self.error(latin)

    def test_skipped_rows_are_named(self, tmp_path, caplog):
        bad = ["{", pair("b", chosen_text=""), pair("c", rejected_text=" "), pair("a", prompt_text="another")]
        path = write_rows(tmp_path / "train_prefs.jsonl", [pair("a"), *bad, pair("d")])
        with caplog.at_level(logging.WARNING):
            benchmark = load_benchmark(path, skip_bad_rows=True)
        assert benchmark["train_prefs"]["row_id"][:] == ["a", "d"]
        assert benchmark["train_prefs"][0]["prompt"] == [user("Name a fruit.")]
        [record] = caplog.records
        assert record.getMessage().startswith(f"{path}: 4 bad rows: line 2: bad JSON: ")
        assert "; line 5: row_id a: row_id: already used on line 1 (dropped of 6)" in record.getMessage()

        write_rows(path, [pair("a", chosen_text=""), "{"])
        assert "2 bad rows: line 1" in self.error(path, skip_bad_rows=True), "nothing remains"


class TestSources:
    def test_file_of_pairs_or_of_prompts(self, tmp_path):
        pairs = write_rows(tmp_path / "test_gen.jsonl", [pair("a")])
        prompts = write_rows(tmp_path / "anything.jsonl", [{"prompt_text": "p"}])
        assert list(load_benchmark(pairs)) == ["train_prefs"]
        assert list(load_benchmark(str(prompts))) == ["train_gen"]
        with pytest.raises(ValueError, match="loads as the split 'train_gen'; it has no split 'test_gen'"):
            load_benchmark(prompts, splits=["test_gen"])

    def test_missing_file_lists_what_is_there(self, tmp_path):
        write_rows(tmp_path / "train_prefs.jsonl", [pair("a")])
        with pytest.raises(FileNotFoundError, match=r"train\.jsonl; .* holds train_prefs\.jsonl"):
            load_benchmark(tmp_path / "train.jsonl")
        with pytest.raises(FileNotFoundError, match=r"no file test_gen\.jsonl .* holds train_prefs\.jsonl"):
            load_benchmark(tmp_path, splits=["test_gen"])
        (tmp_path / "train_prefs.jsonl").rename(tmp_path / "mine.jsonl")
        with pytest.raises(FileNotFoundError, match=r"holds mine\.jsonl"):
            load_benchmark(tmp_path)

    @pytest.mark.parametrize("name", ["no_such.jsonl", "./no_such", "/no/such", "a/b/c", "~/no_such_folder"])
    def test_path_like_names_do_not_go_to_the_hub(self, name, monkeypatch):
        monkeypatch.setattr(datasets, "load_dataset", lambda *_: pytest.fail("asked the hub"))
        with pytest.raises(FileNotFoundError, match="no such benchmark file or folder: .*such|a/b/c"):
            load_benchmark(name)


class TestHub:
    def serve(self, monkeypatch, **rows_of_split):
        splits = {name: datasets.Dataset.from_list(rows) for name, rows in rows_of_split.items()}
        monkeypatch.setattr(datasets, "load_dataset", lambda name: datasets.DatasetDict(splits))

    def test_train_and_test_are_named_by_content(self, monkeypatch):
        sides = {side: LOADED_PAIR["prompt"] + LOADED_PAIR[side] for side in ("chosen", "rejected")}
        row = {"prompt": "Name a fruit.", **sides, "score_chosen": 6.0}
        self.serve(monkeypatch, train=[row], test=[row], train_gen=[{"prompt": [user("Hi")]}], sft=[{"text": "x"}])
        benchmark = load_benchmark("someone/pairs")
        assert list(benchmark) == ["train_prefs", "test_prefs", "train_gen"]
        assert benchmark["test_prefs"][0] == {"row_id": "test:0", **LOADED_PAIR, "score_chosen": 6.0}

    def test_splits_by_either_name(self, monkeypatch):
        self.serve(monkeypatch, train=[{"prompt": "p"}], other=[{"prompt": "q"}])
        benchmark = load_benchmark("someone/prompts", splits=["train_gen", "other", "train"])
        prompts = [(name, *split["prompt"]) for name, split in benchmark.items()]
        assert prompts == [("train_gen", "p"), ("other", "q"), ("train", "p")]
        with pytest.raises(ValueError, match="no split 'test'; its splits are train, other"):
            load_benchmark("someone/prompts", splits=["test"])

    def test_errors_give_the_row(self, monkeypatch):
        self.serve(monkeypatch, train=[{"prompt": "p", "chosen": "a", "rejected": "b"}] * 2)
        assert len(load_benchmark("x/y")["train_prefs"]) == 2
        self.serve(monkeypatch, train=[{"prompt": "p", "chosen": "a", "rejected": text} for text in "ba"])
        with pytest.raises(ValueError, match=r"x/y\[train\]: 1 bad row: row 1: chosen: equal to rejected"):
            load_benchmark("x/y")

    def test_unknown_name(self, monkeypatch):
        def fail(name):
            raise datasets.exceptions.DatasetNotFoundError(name)

        monkeypatch.setattr(datasets, "load_dataset", fail)
        with pytest.raises(FileNotFoundError, match="'tou' is neither a benchmark of the library .* nor a local file"):
            load_benchmark("tou")


# ---- Other formats ----


DOLLY = {"instruction": "Who wrote it?", "context": "Hamlet is a play by Shakespeare."}
DOLLY |= {"response": "Shakespeare.", "category": "closed_qa"}
# Two exchanges; only the last answer differs.
HH = {
    "chosen": "\n\nHuman: Hi\n\nAssistant: Hello.\n\nHuman: Why?\n\nAssistant: Because\n\nit is.",
    "rejected": "\n\nHuman: Hi\n\nAssistant: Hello.\n\nHuman: Why?\n\nAssistant: No.",
}
TRANSCRIPTS = {"chosen": "\n\nHuman: Hi\n\nAssistant: Good", "rejected": "\n\nHuman: Hi\n\nAssistant: Bad"}


def test_dolly_as_messages_and_as_text(tmp_path):
    (row,) = convert_file(write_rows(tmp_path / "dolly.jsonl", [DOLLY]), "dolly")
    assert row == {
        "row_id": "dolly:1",
        "prompt": [user("Who wrote it?\n\nHamlet is a play by Shakespeare.")],
        "reference_response_text": "Shakespeare.",
        "category": "closed_qa",
    }
    (row,) = convert_file(write_rows(tmp_path / "dolly.jsonl", [{**DOLLY, "context": ""}]), "dolly", plain=True)
    assert row["prompt"] == "\n\nHuman: Who wrote it?\n\nAssistant:"
    assert row["reference_response_text"] == " Shakespeare."


def test_hh_rlhf_as_messages_and_as_text(tmp_path):
    path = write_rows(tmp_path / "hh.jsonl", [HH])
    (row,) = convert_file(path, "hh_rlhf")
    assert row["prompt"] == [user("Hi"), assistant("Hello."), user("Why?")]
    # A blank line within a turn begins none.
    assert (row["chosen"], row["rejected"]) == ([assistant("Because\n\nit is.")], [assistant("No.")])
    (plain,) = convert_file(path, "hh_rlhf", plain=True)
    # Prompt and response together are the transcript that there was.
    for side in ("chosen", "rejected"):
        assert plain["prompt"] + plain[side] == HH[side]
    assert plain["prompt"].endswith("\n\nHuman: Why?\n\nAssistant:")


@pytest.mark.parametrize(
    ("form", "record", "expected"),
    [
        ("hh_rlhf", {**TRANSCRIPTS, "chosen": "\n\nHuman: Hi"}, "chosen: the last turn must be the Assistant's"),
        ("hh_rlhf", {**TRANSCRIPTS, "chosen": HH["chosen"]}, "chosen and rejected differ before the last turn"),
        ("hh_rlhf", {"chosen": TRANSCRIPTS["chosen"]}, "rejected: missing; the row has chosen"),
        ("dolly", {**DOLLY, "response": " \n"}, "response: empty"),
    ],
)
def test_a_bad_record_is_named_by_file_and_line(form, record, expected, tmp_path, capsys):
    good = {"dolly": [DOLLY, {**DOLLY, "response": "Him."}], "hh_rlhf": [TRANSCRIPTS, HH]}[form]
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
    other = {side: text.replace("Hi", "Ho") for side, text in TRANSCRIPTS.items()}
    again = {**TRANSCRIPTS, "rejected": TRANSCRIPTS["rejected"] + " indeed"}
    path = write_rows(tmp_path / "hh.jsonl", [TRANSCRIPTS, other, again, {**other, "chosen": other["chosen"] + "!"}])
    folder = tmp_path / "benchmark"
    main([str(path), str(folder / "train_prefs.jsonl"), "--format", "hh_rlhf", "--plain"])
    main([str(path), str(folder / "test_gen.jsonl"), "--format", "hh_rlhf", "--plain", "--prompts"])
    benchmark = load_benchmark(folder)
    assert benchmark["train_prefs"]["rejected"] == [" Bad", " Bad", " Bad indeed", " Bad"]
    assert benchmark["train_prefs"]["row_id"] == ["hh:1", "hh:2", "hh:3", "hh:4"]
    assert benchmark["test_gen"]["prompt"] == ["\n\nHuman: Hi\n\nAssistant:", "\n\nHuman: Ho\n\nAssistant:"]
    assert benchmark["test_gen"]["reference_response_text"] == [" Good", " Good"]
