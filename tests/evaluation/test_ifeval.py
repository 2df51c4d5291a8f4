"""IFEval: the functions that check instructions, and the figures.

The tests of the data read `ifeval/input_data.jsonl` in the folder that TRL_EXT_BENCHMARK_DATA names.
"""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import pytest

from tests.support import REPOSITORY
from trl_ext.evaluation.tasks import ifeval as instructions
from trl_ext.evaluation.tasks.checks import make_check
from trl_ext.evaluation.tasks.evaluate import _metrics, difference, summarize
from trl_ext.evaluation.tasks.task import read_rows, read_task

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


def results_of(responses: dict[int, str]) -> list[dict]:
    """Rows as an evaluation saves them."""
    rows = {one["key"]: one for one in ROWS}
    checked = {key: instructions.metrics(rows[key], text) for key, text in responses.items()}
    return [{"row_id": key, **{f"reward/{name}": v for name, v in own.items()}} for key, own in checked.items()]


class TestFigures:
    def test_by_hand(self, no_languages):
        """Three prompts, of which the third asks for a language that is not detected.

        Response 7 has no comma: 1 of 1. Response 8 has none and is not quoted, but is without its first line: 1 of 2,
        loosely 2 of 2. Response 9 has a comma: 0 of 1, and its prompt is not counted.
        """
        after = results_of({7: "Yes", 8: 'Sure:\n"Yes"', 9: "Ja, ja"})
        found = summarize(map(_metrics, after))
        assert {name: (own["n"], own["mean"]) for name, own in found.items()} == {
            "strict prompts": (2, 0.5),
            "loose prompts": (2, 1.0),
            "strict instructions": (4, 0.5),
            "loose instructions": (4, 0.75),
            f"strict {COMMA}": (3, pytest.approx(2 / 3)),
            f"loose {COMMA}": (3, pytest.approx(2 / 3)),
            f"strict {QUOTED}": (1, 0.0),
            f"loose {QUOTED}": (1, 1.0),
        }
        bounds = [found["strict prompts"][name] for name in ("low", "high")]
        assert bounds == pytest.approx((0.0945, 0.9055), abs=1e-4)

        change = difference(results_of({8: "No, no", 9: "Nein"}), after)
        # On prompts 8 and 9: prompt 8 fails both times; its comma is gone, and prompt 9 gained one.
        assert (change["strict prompts"]["mean"], change["loose prompts"]["mean"]) == (0, 1)
        assert (change["strict instructions"]["n"], change["strict instructions"]["mean"]) == (3, 0)
        assert change["loose instructions"]["mean"] == pytest.approx(1 / 3)

    def test_wrong_data(self):
        with pytest.raises(ValueError, match="count:numbers is no instruction of IFEval"):
            instructions.check_rows([row(1, "count:numbers")])
        with pytest.raises(ValueError, match="needs instruction_id_list and kwargs"):
            make_check(read_task("ifeval")[1], [{"prompt": "Q"}])


def test_every_row_of_the_data_can_be_checked(no_languages):
    data = Path(os.environ.get("TRL_EXT_BENCHMARK_DATA", REPOSITORY.parent / "shared" / "data"))
    _, task, _ = read_task("ifeval")
    if not (data / task.data).is_file():
        pytest.skip("IFEval's prompts are not here")
    rows = read_rows(task, [data])
    assert len(rows) == len({one["row_id"] for one in rows}) == 541
    assert {name for one in rows for name in one["instruction_id_list"]} == set(instructions.CHECKS)
    found = [instructions.metrics(one, one["prompt"]) for one in rows]
    assert [one["strict prompts"] for one in found].count(None) == 31
    strict, loose = ([m for one in found for m in one[f"{kind} instructions"]] for kind in ("strict", "loose"))
    assert len(strict) == 834 - 31
    # What the strict accuracy counts, the loose one does too.
    assert all(a <= b for a, b in zip(strict, loose, strict=True))
