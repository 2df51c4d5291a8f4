"""IFEval's 25 types of instructions (Zhou et al. 2023, arXiv 2311.07911), each with a function that checks a response.

A function takes a response and the arguments of the data's row. Details that the paper leaves open are decided as in
the published evaluation, so that figures are comparable:

- A *word* is a run of letters, digits and underscores, so that `don't` is two.
- A keyword also counts within a longer word, as `war` in `award`; a forbidden word is looked for as a whole word.
- A line that begins with `-` or with a single `*` is a point of a list.
- Where the language is unclear, as in a response of digits, it counts as the right one.

Sentences are split by this library's rules, which need no downloaded model. The published evaluation uses NLTK's
splitter, and also NLTK's words to count words in capitals, so that counts at the limit may differ.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from trl_ext.instructions.requirements import sentences_of

ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
LANGUAGE = "language:response_language"


@cache
def detector() -> Callable[[str], str | None] | None:
    """`f(text)`, which gives the code of its language or None if it is unclear; None if langdetect is missing."""
    try:
        from langdetect import DetectorFactory, LangDetectException, detect
    except ImportError:
        return None
    # Without a seed, the language of a short text differs between calls.
    DetectorFactory.seed = 0

    def language_of(text: str) -> str | None:
        try:
            return detect(text)
        except LangDetectException:
            return None

    return language_of


def speaks(text: str, language: str) -> bool | None:
    """Whether a text is in this language; None if no detector is installed."""
    language_of = detector()
    return None if language_of is None else language_of(text) in (None, language)


def in_english(text: str) -> bool:
    """Whether a text is in English, as far as it can be detected."""
    return speaks(text, "en") is not False


def counted(count: int, relation: str, number: int) -> bool:
    """Whether a count is `at least` or `less than` a number."""
    return {"at least": operator.ge, "less than": operator.lt}[relation](count, number)


def parts_of(text: str, mark: str) -> list[str]:
    """The parts between marks, which may also begin and end the text; no parts if one of them is empty."""
    parts = [part.strip() for part in text.split(mark)]
    parts = parts[not parts[0] : len(parts) - (not parts[-1])]
    return parts if all(parts) else []


def are_two_responses(text: str) -> bool:
    parts = parts_of(text, "******")
    return len(parts) == 2 and parts[0] != parts[1]


def highlights(text: str) -> int:
    """The number of parts in `*emphasis*` or `**strong emphasis**`."""
    marked = re.findall(r"\*([^\n*]*)\*", text) + re.findall(r"\*\*([^\n*]*)\*\*", text)
    return sum(bool(part.strip()) for part in marked)


def is_json(text: str) -> bool:
    """Whether a text is a JSON value, which may be fenced as a block of code."""
    try:
        json.loads(re.sub(r"^```(?:json)?|```$", "", text.strip(), flags=re.IGNORECASE))
    # A model that repeats itself may open brackets without end.
    except (ValueError, RecursionError):
        return False
    return True


def has_postscript(text: str, postscript_marker: str) -> bool:
    """Whether the marker appears, in any case and perhaps with spaces after its full stops."""
    pattern = r"\.\s?".join(map(re.escape, postscript_marker.split(".")))
    return re.search(pattern, text, re.IGNORECASE) is not None


def begins_paragraph(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Whether the text has this many paragraphs between blank lines, and the nth begins with the word."""
    paragraphs = [part.strip() for part in text.split("\n\n") if part.strip()]
    if len(paragraphs) != num_paragraphs:
        return False
    return re.match(r"[\"']*([^\s.,?!\"']*)", paragraphs[nth_paragraph - 1])[1].lower() == first_word.lower()


def is_quoted(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


CHECKS: dict[str, Callable[..., bool | None]] = {
    "change_case:capital_word_frequency": lambda text, capital_relation, capital_frequency: counted(
        sum(word.isupper() for word in text.split()), capital_relation, capital_frequency
    ),
    "change_case:english_capital": lambda text: text.isupper() and in_english(text),
    "change_case:english_lowercase": lambda text: text.islower() and in_english(text),
    "combination:repeat_prompt": lambda text, prompt_to_repeat: (
        text.strip().lower().startswith(prompt_to_repeat.strip().lower())
    ),
    "combination:two_responses": are_two_responses,
    "detectable_content:number_placeholders": lambda text, num_placeholders: (
        len(re.findall(r"\[.*?\]", text)) >= num_placeholders
    ),
    "detectable_content:postscript": has_postscript,
    "detectable_format:constrained_response": lambda text: any(answer in text for answer in ANSWERS),
    "detectable_format:json_format": is_json,
    "detectable_format:multiple_sections": lambda text, section_spliter, num_sections: (
        len(re.findall(rf"{re.escape(section_spliter)}\s?\d+", text)) >= num_sections
    ),
    "detectable_format:number_bullet_lists": lambda text, num_bullets: (
        len(re.findall(r"^[ \t]*(?:-|\*[^*\n])", text, re.MULTILINE)) == num_bullets
    ),
    "detectable_format:number_highlighted_sections": lambda text, num_highlights: highlights(text) >= num_highlights,
    "detectable_format:title": lambda text: any(title.strip("<> \t") for title in re.findall(r"<<(.+)>>", text)),
    "keywords:existence": lambda text, keywords: all(keyword.lower() in text.lower() for keyword in keywords),
    "keywords:forbidden_words": lambda text, forbidden_words: (
        not any(re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in forbidden_words)
    ),
    "keywords:frequency": lambda text, relation, keyword, frequency: counted(
        text.lower().count(keyword.lower()), relation, frequency
    ),
    "keywords:letter_frequency": lambda text, let_relation, letter, let_frequency: counted(
        text.lower().count(letter.lower()), let_relation, let_frequency
    ),
    LANGUAGE: speaks,
    "length_constraints:nth_paragraph_first_word": begins_paragraph,
    "length_constraints:number_paragraphs": lambda text, num_paragraphs: len(parts_of(text, "***")) == num_paragraphs,
    "length_constraints:number_sentences": lambda text, relation, num_sentences: counted(
        # Lines without a full stop, as those of lists and titles, end no sentence.
        len(sentences_of(" ".join(text.split()))),
        relation,
        num_sentences,
    ),
    "length_constraints:number_words": lambda text, relation, num_words: counted(
        len(re.findall(r"\w+", text)), relation, num_words
    ),
    "punctuation:no_comma": lambda text: "," not in text,
    "startend:end_checker": lambda text, end_phrase: (
        text.strip().strip('"').lower().endswith(end_phrase.strip().lower())
    ),
    "startend:quotation": is_quoted,
}


def variants_of(text: str) -> list[str]:
    """What the loose accuracy accepts as well: a first or last line more, and emphasis."""
    lines = text.split("\n")
    texts = [text, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return [*texts, *(variant.replace("*", "") for variant in texts)]


def met(texts: Sequence[str], name: str, arguments: Mapping[str, Any]) -> bool | None:
    """Whether one of these texts follows an instruction; None if it cannot be checked. An empty one follows none."""
    if name == LANGUAGE and detector() is None:
        return None
    # Some copies of the data list the arguments of all types, empty where they do not belong.
    arguments = {key: value for key, value in arguments.items() if value is not None}
    return any(text.strip() and CHECKS[name](text, **arguments) for text in texts)


def follow(row: Mapping[str, Any], response: str, *, loose: bool = False) -> list[bool | None]:
    """Whether a response follows each instruction of a row of the data."""
    texts = variants_of(response) if loose else [response]
    instructions = zip(row["instruction_id_list"], row["kwargs"], strict=True)
    return [met(texts, name, arguments) for name, arguments in instructions]


def check_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """ValueError if an instruction of the rows is not known."""
    if unknown := {name for row in rows for name in row["instruction_id_list"]} - set(CHECKS):
        raise ValueError(f"{min(unknown)} is no instruction of IFEval")


def metrics(row: Mapping[str, Any], response: str) -> dict[str, Any]:
    """Strict and loose accuracy of a prompt and of its instructions, as published, and of each type of instruction.

    A prompt is followed if all its instructions are, and not counted (None) if one of them cannot be checked.
    """
    found: dict[str, Any] = {}
    for kind in ("strict", "loose"):
        marks = follow(row, response, loose=kind == "loose")
        known = [float(mark) for mark in marks if mark is not None]
        found[f"{kind} prompts"] = None if None in marks else float(all(marks))
        # Instructions of one prompt are not independent, so that their intervals are a little too narrow.
        found[f"{kind} instructions"] = known
        for name, mark in zip(row["instruction_id_list"], marks, strict=True):
            if mark is not None:
                found.setdefault(f"{kind} {name}", []).append(float(mark))
    return found
