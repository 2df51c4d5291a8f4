"""IFEval: the functions that check instructions, the figures, and a run on `toy`.

The tests of the data read `ifeval/input_data.jsonl` in the folder that TRL_EXT_BENCHMARK_DATA names.
"""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path

import pytest

from benchmarks import _ifeval_instructions as instructions
from benchmarks import ifeval
from tests.recipes import REPOSITORY
from trl_ext.files import write_json_lines

# Of each type: arguments, responses that follow it, and responses that do not.
CASES = {
    "change_case:capital_word_frequency": [
        ({"capital_relation": "at least", "capital_frequency": 2}, ["Go NOW, (PLEASE)!", "I am A"], ["GO Now", "Go"]),
        ({"capital_relation": "less than", "capital_frequency": 2}, ["GO now", "go"], ["GO NOW"]),
    ],
    "change_case:english_capital": [({}, ["YES, 2 OF THEM!"], ["YES, 2 OF Them!", "2!"])],
    "change_case:english_lowercase": [({}, ["yes, 2 of them!"], ["Yes, 2 of them!", "2!"])],
    "combination:repeat_prompt": [
        (
            {"prompt_to_repeat": "Say hello. "},
            ["\nSay hello.\n\nHello!", "say HELLO. Hi"],
            ["Hello! Say hello.", "Say"],
        )
    ],
    "combination:two_responses": [
        (
            {},
            ["One.\n******\nTwo.", "******\nOne.\n******\nTwo.\n******"],
            [
                "One.",
                "One.\n******\nOne.",
                "1\n******\n2\n******\n3",
                "One.\n******",
                "1 ****** ****** 2",
                "1\n***\n2",
            ],
        )
    ],
    "detectable_content:number_placeholders": [
        ({"num_placeholders": 2}, ["[name], [address]", "[a][b][c]"], ["[name]", "[name] address]", "[one\ntwo] [b]"])
    ],
    "detectable_content:postscript": [
        ({"postscript_marker": "P.S."}, ["Hi.\n\nP.S. Bye.", "hi. p. s. bye"], ["Hi.\n\nPS: Bye.", "Maps. P, S."]),
        ({"postscript_marker": "P.P.S"}, ["Hi.\nP.P.S Bye.", "P.P.S. Bye", "P. P. S. Bye"], ["Hi.\nP.S. Bye."]),
    ],
    "detectable_format:constrained_response": [
        (
            {},
            [" My answer is no.\n", "My answer is maybe. It depends."],
            ["My answer is no", "Yes.", "my answer is no."],
        )
    ],
    "detectable_format:json_format": [
        (
            {},
            ['{"a": [1, 2]}', '```json\n{"a": 1}\n```', "```JSON\n[1]\n```\n", "```\n[]\n```"],
            ["{'a': 1}", 'Here it is: {"a": 1}', '```json\n{"a": 1}\n```\nDone.', "[" * 100_000],
        )
    ],
    "detectable_format:multiple_sections": [
        (
            {"section_spliter": "SECTION", "num_sections": 2},
            ["SECTION 1\nA\nSECTION 2\nB", "SECTION1 A SECTION2 B SECTION3"],
            ["SECTION 1\nA", "Section 1\nA\nSection 2\nB", "SECTION one\nSECTION two"],
        )
    ],
    "detectable_format:number_bullet_lists": [
        (
            {"num_bullets": 2},
            ["* one\n* two", "Points:\n\n- one\n  - two\n\nDone.", "*one\n-two", "* one - a\n* two * b"],
            ["* one", "* one\n* two\n- three", "**one**\n**two**", "1. one\n2. two", "***\n* one\n***"],
        )
    ],
    "detectable_format:number_highlighted_sections": [
        (
            {"num_highlights": 2},
            ["*one* and *two*", "**one** and *two*", "*a* *b* *c*", "**one**\n\n**two**"],
            ["*one*", "* one\n* two", "** ** and *two*", "**one** and two", "*one\ntwo* *three"],
        )
    ],
    "detectable_format:title": [
        ({}, ["<<A song>>\nLa la.", "La <<a>>"], ["<A song>", "<< >>", "<<A\nsong>>", "<<>>"])
    ],
    "keywords:existence": [({"keywords": ["war", "Peace"]}, ["WAR and peace", "award, peaceful"], ["war", "peace"])],
    "keywords:forbidden_words": [
        ({"forbidden_words": ["rock", "Roll"]}, ["A rocky scroll", "Stone"], ["A ROCK.", "roll", "rock-solid"])
    ],
    "keywords:frequency": [
        ({"relation": "at least", "keyword": "war", "frequency": 2}, ["War, war", "a WAR award"], ["war", "wa r war"]),
        ({"relation": "less than", "keyword": "war", "frequency": 2}, ["war", "peace"], ["war, War"]),
    ],
    "keywords:letter_frequency": [
        ({"let_relation": "at least", "letter": "t", "let_frequency": 3}, ["Tomtit", "ttt"], ["tot"]),
        ({"let_relation": "less than", "letter": "!", "let_frequency": 1}, ["No."], ["No!"]),
    ],
    "length_constraints:nth_paragraph_first_word": [
        (
            {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "elm"},
            ["One.\n\nElm trees.", "One.\n\n\n\n'elm', he said.\n\n", 'One.\n\n"Elm."'],
            [
                "Elm trees.\n\nOne.",
                "One.\nElm trees.",
                "One.\n\nElms.",
                "One.\n\nElm trees.\n\nThree.",
                "One.\n\n**Elm**",
            ],
        )
    ],
    "length_constraints:number_paragraphs": [
        (
            {"num_paragraphs": 2},
            ["One.\n***\nTwo.", "***\nOne.\n\nStill one.\n***\nTwo.\n***"],
            ["One.\n\nTwo.", "One.\n***\n***\nTwo.", "1\n***\n2\n***\n3", "One.\n***"],
        )
    ],
    "length_constraints:number_sentences": [
        (
            {"relation": "at least", "num_sentences": 2},
            ["One. Two!", "Is it? Yes."],
            ["Dr. Who came, e.g. today.", "1"],
        ),
        ({"relation": "less than", "num_sentences": 2}, ["A title\n\nOne line,\nand another."], ["One. Two."]),
    ],
    "length_constraints:number_words": [
        (
            {"relation": "at least", "num_words": 4},
            ["one two three four", "I don't know"],
            ["one, two - three", "1 2 3"],
        ),
        ({"relation": "less than", "num_words": 4}, ["one two three"], ["one two three four"]),
    ],
    "punctuation:no_comma": [({}, ["One; two."], ["One, two."])],
    "startend:end_checker": [
        (
            {"end_phrase": "Is that all?"},
            ["Yes. Is that all?\n", '"Is THAT all?"'],
            ["Is that all? Yes.", "Is that all"],
        )
    ],
    "startend:quotation": [({}, ['"All of it."', '\n"a" and "b"\n'], ["'All of it.'", '"Half" of it', '"', "None"])],
}


def follows(name: str, response: str, arguments: dict, *, loose: bool = False) -> bool | None:
    (found,) = instructions.follow({"instruction_id_list": [name], "kwargs": [arguments]}, response, loose=loose)
    return found


@pytest.fixture
def languages(monkeypatch):
    """A detector in place of langdetect: of three texts it knows the language."""
    known = {"Hello there": "en", "HALLO": "de", "hola": "es"}
    monkeypatch.setattr(instructions, "detector", lambda: known.get)


@pytest.fixture
def no_languages(monkeypatch):
    monkeypatch.setattr(instructions, "detector", lambda: None)


class TestInstructions:
    @pytest.mark.parametrize("name", CASES)
    def test_examples(self, name, no_languages):
        for arguments, right, wrong in CASES[name]:
            for text in right:
                assert follows(name, text, arguments) is True, (arguments, text)
            for text in [*wrong, "", "\n"]:
                assert follows(name, text, arguments) is False, (arguments, text)

    def test_every_type_has_examples(self):
        assert {*CASES, "language:response_language"} == set(instructions.CHECKS)
        assert len(instructions.CHECKS) == 25

    def test_languages(self, languages):
        arguments = {"language": "en"}
        assert follows("language:response_language", "Hello there", arguments) is True
        assert follows("language:response_language", "hola", arguments) is False
        # Of unknown language, as digits are.
        assert follows("language:response_language", "123", arguments) is True
        assert follows("change_case:english_capital", "HALLO", {}) is False
        assert follows("change_case:english_lowercase", "hola", {}) is False
        assert follows("change_case:english_lowercase", "hello there", {}) is True

    def test_languages_without_a_detector(self, no_languages):
        assert follows("language:response_language", "Hello there", {"language": "en"}) is None
        assert follows("change_case:english_capital", "HALLO", {}) is True

    def test_langdetect_is_seeded_and_may_be_unsure(self, monkeypatch):
        class Unsure(Exception):
            pass

        def detect(text: str) -> str:
            if text == "123":
                raise Unsure
            return "en"

        seeds = types.SimpleNamespace(seed=None)
        fake = types.SimpleNamespace(DetectorFactory=seeds, LangDetectException=Unsure, detect=detect)
        monkeypatch.setitem(sys.modules, "langdetect", fake)
        language_of = instructions.detector.__wrapped__()
        assert (language_of("Hello"), language_of("123"), seeds.seed) == ("en", None, 0)
        monkeypatch.setitem(sys.modules, "langdetect", None)
        assert instructions.detector.__wrapped__() is None

    def test_the_loose_accuracy_forgives_lines_around_and_emphasis(self):
        name, arguments = "startend:quotation", {}
        for text in ('Sure:\n"Yes."', '"Yes."\nDone.', 'Sure:\n"Yes."\nDone.', '*"Yes."*'):
            assert follows(name, text, arguments) is False
            assert follows(name, text, arguments, loose=True) is True, text
        assert follows(name, 'Sure:\n\n"Yes."', arguments, loose=True) is True
        assert follows(name, 'Well,\nsure:\n"Yes."', arguments, loose=True) is False
        assert follows(name, "", arguments, loose=True) is False
        # A variant that is empty follows nothing.
        assert follows("punctuation:no_comma", "Yes, no", {}, loose=True) is False

    def test_empty_arguments_are_left_out(self):
        row = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{"num_words": None, "keywords": None}]}
        assert instructions.follow(row, "Yes.") == [True]


def row(key: int, *names: str, **arguments) -> dict:
    return {
        "key": key,
        "prompt": f"Question {key}",
        "instruction_id_list": list(names),
        "kwargs": [arguments.get(name.split(":")[1], {}) for name in names],
    }


COMMA, QUOTED, LANGUAGE = "punctuation:no_comma", "startend:quotation", "language:response_language"
ROWS = [
    row(7, COMMA),
    row(8, COMMA, QUOTED),
    row(9, COMMA, LANGUAGE, response_language={"language": "de"}),
]


class TestFigures:
    def test_by_hand(self, tmp_path, no_languages):
        """Three prompts, of which the third asks for a language that is not detected.

        Response 7 has no comma: 1 of 1. Response 8 has none and is not quoted, but is without its first line: 1 of 2,
        loosely 2 of 2. Response 9 has a comma: 0 of 1, and its prompt is not counted.
        """
        rows = [{**one, "row_id": one["key"]} for one in ROWS]
        texts = {7: "Yes", 8: 'Sure:\n"Yes"', 9: "Ja, ja"}
        followed = ifeval.check(rows, [{"row_id": key, "response_text": text} for key, text in texts.items()])
        found = ifeval.summarize(rows, followed)
        assert {name: (own["n"], own["strict"]["mean"], own["loose"]["mean"]) for name, own in found.items()} == {
            "prompts": (2, 0.5, 1.0),
            "instructions": (4, 0.5, 0.75),
            COMMA: (3, pytest.approx(2 / 3), pytest.approx(2 / 3)),
            QUOTED: (1, 0.0, 1.0),
        }
        assert (found["prompts"]["strict"]["low"], found["prompts"]["strict"]["high"]) == pytest.approx(
            (0.0945, 0.9055), abs=1e-4
        )

        before = ifeval.check(rows, [{"row_id": 8, "response_text": "No, no"}, {"row_id": 9, "response_text": "Nein"}])
        change = ifeval.compare(before, followed)
        # On prompts 8 and 9: prompt 8 fails both times; its comma is gone, and prompt 9 gained one.
        assert change["prompts"]["strict"]["mean"] == 0
        assert change["prompts"]["loose"]["mean"] == 1
        assert (change["instructions"]["n"], change["instructions"]["strict"]["mean"]) == (3, 0)
        assert change["instructions"]["loose"]["mean"] == pytest.approx(1 / 3)


def run(capsys, *flags) -> tuple[str, str]:
    """What the command prints and how it fails, if it does."""
    try:
        ifeval.main([str(flag) for flag in flags])
    except SystemExit as end:
        assert end.code == 2
    captured = capsys.readouterr()
    return captured.out, captured.err


class TestRun:
    @pytest.mark.slow
    def test_a_killed_run_goes_on_and_is_compared(self, tmp_path, monkeypatch, capsys):
        write_json_lines(tmp_path / "ifeval" / "input_data.jsonl", ROWS)
        flags = ["toy", "--data", tmp_path, "--max_new_tokens", 8, "--batch_size", 1, "--output_dir"]
        run(capsys, *flags, tmp_path / "all")
        whole = (tmp_path / "all" / "responses.jsonl").read_bytes()
        results = json.loads((tmp_path / "all" / "results.json").read_text())
        assert (results["prompts"], results["model"], results["results"]["prompts"]["n"] >= 2) == (3, "toy", True)

        # Two lines were written, and the third partly.
        folder = tmp_path / "killed"
        (folder).mkdir()
        first, second, third = whole.splitlines(keepends=True)
        (folder / "responses.jsonl").write_bytes(first + second + third[:20])
        (folder / "settings.json").write_bytes((tmp_path / "all" / "settings.json").read_bytes())
        table, _ = run(capsys, *flags, folder, "--compare", tmp_path / "all")
        assert (folder / "responses.jsonl").read_bytes() == whole
        assert "| prompts | " in table and f"| minus {tmp_path / 'all'} | n | strict | loose |" in table
        difference = json.loads((folder / "results.json").read_text())["difference"]
        assert difference["instructions"]["strict"]["mean"] == 0

        # A finished run is read again without the model.
        monkeypatch.setattr("trl_ext.models.loading.load_policy", lambda *_: pytest.fail("the model was loaded"))
        again, _ = run(capsys, *flags, folder, "--compare", tmp_path / "all")
        assert again == table
        _, error = run(capsys, "toy", "--data", tmp_path, "--max_new_tokens", 9, "--output_dir", folder)
        assert error.startswith("error: ") and "another model or length: give another --output_dir" in error
        other = ["toy", "--data", tmp_path, "--max_new_tokens", 9, "--output_dir", tmp_path / "new"]
        _, error = run(capsys, *other, "--compare", folder)
        assert "have up to 8 tokens: give --max_new_tokens 8" in error
        _, error = run(capsys, *other, "--compare", tmp_path)
        assert "--compare takes the --output_dir of an earlier call" in error
        assert not (tmp_path / "new").exists()

    def test_wrong_data_or_model(self, tmp_path, capsys):
        flags = ["--data", tmp_path, "--output_dir", tmp_path / "run"]
        _, error = run(capsys, "toy", *flags)
        assert "input_data.jsonl: no such file; give the folder that holds ifeval/input_data.jsonl" in error
        write_json_lines(tmp_path / "ifeval" / "input_data.jsonl", [row(1, "count:numbers")])
        _, error = run(capsys, "toy", *flags)
        assert "count:numbers is no instruction of IFEval" in error
        write_json_lines(tmp_path / "ifeval" / "input_data.jsonl", ROWS)
        _, error = run(capsys, tmp_path / "missing", *flags)
        assert error.startswith("error: ")
        assert not (tmp_path / "run").exists()


def test_every_row_of_the_data_can_be_checked(no_languages):
    data = Path(os.environ.get("TRL_EXT_BENCHMARK_DATA", REPOSITORY.parent / "shared" / "data"))
    if not (data / ifeval.SOURCE).is_file():
        pytest.skip("IFEval's prompts are not here")
    rows = ifeval.read_prompts(data / ifeval.SOURCE, None)
    assert len(rows) == len({one["row_id"] for one in rows}) == 541
    assert {name for one in rows for name in one["instruction_id_list"]} == set(instructions.CHECKS)
    responses = [{"row_id": one["row_id"], "response_text": one["prompt"]} for one in rows]
    followed = ifeval.check(rows, responses)
    assert sum(None in one["strict"] for one in followed.values()) == 31
    assert ifeval.summarize(rows, followed)["instructions"]["n"] == 834 - 31
    # What the strict accuracy counts, the loose one does too.
    for one in followed.values():
        assert all(loose or not strict for strict, loose in zip(one["strict"], one["loose"], strict=True))
