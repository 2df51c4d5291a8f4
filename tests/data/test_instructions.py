"""The benchmark of instructions: checkers on hand-written responses, the score, the reward, and the committed rows."""

from __future__ import annotations

import json
from itertools import islice

import pytest

from tests.support.files import read_rows
from tools.instruction_pairs import pair_up
from tools.instruction_prompts import PROMPT_ROWS, REQUIREMENTS, build_rows, read_topics
from trl_ext import load_benchmark, toy
from trl_ext.data.benchmark import known_score
from trl_ext.instructions import DATA_DIR, requirements_met, score, score_parts, score_row
from trl_ext.instructions.requirements import meets, numbers_of, sentences_of, words_of
from trl_ext.names import load_function

ECHO = "Describe a wet day in a small town by the sea. Use the word rain. Do not use commas please."
RAIN = "Rain falls on the roof of the old house, and the street is wet."
# Of each requirement, its parameters, responses that meet it, and responses that do not.
CASES = {
    "at_most_words": (
        {"count": 3},
        ["One two three.", "one — two three\n", "- one\n- two\n- three", "**Don't** well-known 3.5"],
        ["one two three four", "one—two—three—four", "It is e.g. rain"],
    ),
    "at_least_words": (
        {"count": 3},
        ["One two three.", "one two three four"],
        ["one two", "one two - * ...", "don’t well-known", "3.5 e.g."],
    ),
    "sentences": (
        {"count": 2},
        ["It rains. We stay.\n", "It rains! “Stay here.” ", "We like fruit, e.g. apples. Dr. Lee and J. Bach agree."]
        + ["It costs 3.50 dollars... Do you pay?!", "**It rains.** We stay.", "So did I. We left.", "A title\nA text"]
        + ["It rains. We stay", "1. It rains.\n2. We stay.", "We ate apples, pears, etc.\nThen we slept."],
        ["It rains.", "It rains. We stay. We sleep.", "One\n\nTwo\n\nThree", "It rains, e.g. here."],
    ),
    "paragraphs": (
        {"count": 2},
        ["One.\n\nTwo.", "One.\n \nTwo.\n\n", "One.\n\n\n\nTwo.\nStill two.", "One\n\n***\n\nTwo"],
        ["One.\nTwo.", "One.", "One.\n\nTwo.\n\nThree."],
    ),
    "numbered": (
        {"count": 2},
        ["1. One\n2. Two", "Here:\n\n1) one\n\n2) two\n\nDone.", "**1.** one\n**2.** two", " 1. a\n - b\n 2. c"],
        ["- one\n- two", "1. One 2. Two", "1. a\n2. b\n3. c", "1. a\n3. b", "1. a\n2. ", "1.5 a\n2. b"],
    ),
    "include_word": (
        {"word": "river"},
        ["A green river.", '"River" is **green**', "GREEN\nriver"],
        ["riverside", "rivers are green", "green"],
    ),
    "question": (
        {},
        ["It rains. Do you stay?\n", "“Why?”", "It rains! Why not?)", "Is it 5 p.m.? or 6?", "**Why?**"],
        ["Why? It rains.", "It rains", "Do you stay", "It rains. ?", "Why? No!"],
    ),
    "exclamation": ({}, ["It rains! We stay.", "“Stay!”", "Yes!!"], ["It rains.", "! It rains."]),
    "digits": ({}, ["We have 3 dogs.", "In 1999"], ["We have three dogs.", "Ⅳ"]),
    "avoid_word": ({"word": "it"}, ["Its bits fit.", "It's fine."], ["I like it.", "IT!", "“It” rains", "*it*"]),
    "no_commas": ({}, ["It rains; we stay.", "it’s 'fine'"], ["It rains, we stay.", "1,000", "雨，雨"]),
}


@pytest.mark.parametrize("name", REQUIREMENTS)
def test_checker(name):
    parameters, met, not_met = CASES[name]
    for response in met:
        assert meets(response, name, parameters), response
    for response in [*not_met, "", " \n", "...", "- \n* ", '""', "—"]:
        assert not meets(response, name, parameters), response


def test_what_words_are():
    assert words_of("“Don’t” **stop** — well-known, e.g. 3.5 _x_!\n- & ...") == [
        *("don't", "stop", "well-known", "e.g", "3.5", "x")
    ]
    assert sentences_of("So did I. We met at 5 p.m. in St. Ives!") == ["So did I.", "We met at 5 p.m. in St. Ives!"]
    assert numbers_of("1. a\n\n 2) b\n3.c\n4. ") == [1, 2]


# ---- The score ----


def row(*requirements: dict, keywords: str = "rain wet") -> dict:
    return {"prompt_text": ECHO, "keywords": keywords, "requirements": json.dumps(requirements)}


def test_the_score_is_the_share_of_what_was_asked():
    asked = row({"name": "no_commas"}, {"name": "at_most_words", "count": 20})
    # The topic and the length, but there is a comma: two of three.
    assert score_parts(asked, RAIN) == pytest.approx({"topic": 1 / 3, "no_commas": 0, "at_most_words": 1 / 3})
    assert score_row(asked, RAIN) == pytest.approx(2 / 3)
    assert score_row(asked, RAIN.replace(",", "")) == 1.0
    # The same, cut at the limit: half of it.
    assert score_row(asked, RAIN, finished=False) == pytest.approx(1 / 3)
    assert score_parts(asked, RAIN, finished=False)["unfinished"] == pytest.approx(-1 / 3)


@pytest.mark.parametrize(
    "response",
    [
        "Rain.",
        ECHO,
        "Rain rain rain rain rain rain rain rain rain rain",
        # Eight different words in a loop: 8 of 23 pairs are distinct.
        "the rain falls on my old wet roof " * 3,
        "The sun shines on the roof of the old house and the street.",
    ],
)
def test_a_mere_word_a_loop_and_another_topic_do_not_answer(response):
    assert score_parts(row({"name": "no_commas"}), response) == {"topic": 0.0, "no_commas": 0.5}


def test_a_prompt_of_the_benchmark_is_known_by_its_text():
    asked = read("test")[0]
    text = asked["prompt_text"]
    for finished in (True, False):
        assert score(text, write(asked), finished=finished) == score_row(asked, write(asked), finished=finished) > 0
    with pytest.raises(ValueError, match="no prompt of the benchmark instructions: 'Say it.'"):
        score("Say it.", "It.")
    assert known_score("instructions") is score and known_score("toy") is toy.score and known_score("x.jsonl") is None


def test_the_reward_reads_the_columns_of_the_rows():
    asked = [row({"name": "no_commas"}), row({"name": "no_commas"}), row({"name": "no_commas"})]
    columns = {name: [one[name] for one in asked] for name in asked[0]}
    texts = [RAIN, RAIN.replace(",", ""), RAIN]
    prompts = columns.pop("prompt_text")
    for given in ((prompts, texts), ([[{"content": one}] for one in part] for part in (prompts, texts))):
        assert requirements_met(*given, **columns) == [0.5, 1.0, 0.5]
    finished = [True, False, False]
    assert requirements_met(prompts, texts, **columns, finished=finished, trainer_state=None) == [0.5, 0.5, 0.25]


def test_recipes_load_the_rows_and_the_reward():
    splits = load_benchmark("instructions")
    assert {k: len(splits[f"{k}_gen"]) for k in PROMPT_ROWS} == PROMPT_ROWS
    assert {k: len(splits[f"{k}_prefs"]) for k in PROMPT_ROWS} == {"train": 867, "validation": 52, "test": 107}
    assert {"row_id", "prompt", "topic", "keywords", "requirements"} <= {*splits["train_gen"].column_names}
    reward = load_function("trl_ext.instructions:requirements_met", "reward function")
    assert score_row(splits["test_gen"][0], write(splits["test_gen"][0])) == 1.0
    columns = splits["test_gen"][:4]
    assert reward(prompts=columns.pop("prompt"), completions=[""] * 4, **columns) == [0.0] * 4


# ---- The rows ----


def read(split: str) -> list[dict]:
    return read_rows(DATA_DIR / f"{split}_gen.jsonl")


@pytest.mark.parametrize("split", PROMPT_ROWS)
def test_rebuilding_gives_the_committed_rows_and_each_can_be_met(split):
    rows = read(split)
    assert rows == [*islice(build_rows(split), PROMPT_ROWS[split])]
    for one in rows:
        assert score_row(one, write(one)) == 1.0, (one["prompt_text"], write(one))


def test_no_topic_and_no_prompt_is_in_two_splits():
    topics = {split: {one["topic"] for one in read(split)} for split in PROMPT_ROWS}
    assert sum(map(len, topics.values())) == len(set.union(*topics.values())) == len(read_topics())
    assert len({one["row_id"] for split in PROMPT_ROWS for one in read(split)}) == sum(PROMPT_ROWS.values())


def write(asked: dict) -> str:
    """A response that meets all requirements of a row; they contradict each other if it fails."""
    wanted = {one["name"]: one for one in json.loads(asked["requirements"])}
    filler = ["everybody", "keeps", "humming", "while", "tired", "neighbours", "linger", "nearby", "calmly"]
    words = [*filler, asked["keywords"].split()[0]]
    words += [wanted["include_word"]["word"]] if "include_word" in wanted else []
    # Every word again with a letter, so that a long text is no loop.
    words += [f"{word}{letter}" for letter in "bcdefg" for word in filler] if "at_least_words" in wanted else []
    parts = next((wanted[name]["count"] for name in ("sentences", "paragraphs", "numbered") if name in wanted), 1)
    pieces = [f"{' '.join(words)}.", *(f"we add line {letter}." for letter in "bcdef"[: parts - 1])]
    if "numbered" in wanted:
        pieces = [f"{number}. {piece}" for number, piece in enumerate(pieces, start=1)]
    pieces[0] = f"5 {pieces[0]}" if "digits" in wanted else pieces[0]
    pieces[-1] = pieces[-1].removesuffix(".") + "?" * ("question" in wanted) + "!" * ("exclamation" in wanted)
    return ("\n" if "numbered" in wanted else "\n\n" if "paragraphs" in wanted else " ").join(pieces)


# ---- The pairs ----


def sampled(*rewards: float, cut: tuple[int, ...] = (), tokens: tuple[int, ...] = (20,) * 4) -> list[dict]:
    """Samples of one prompt; those in `cut` reached the token limit."""
    names = ("row_id", "response_text", "generated_num_tokens", "reward", "finished")
    rows = [("a", number, tokens[number], reward, number not in cut) for number, reward in enumerate(rewards)]
    return [dict(zip(names, row, strict=True)) for row in rows]


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        (sampled(0.5, 1.0, 0.0, 0.5), [(1, 2), (0, 2), (1, 0)]),
        (sampled(0.5, 0.5, 0.5), []),
        (sampled(1.0, 0.5, 0.0, cut=(0,)), [(1, 2)]),
        (sampled(1.0, 0.0, 0.5, tokens=(40, 19, 25)), [(0, 2), (2, 1)]),
    ],
    ids=["widest differences", "ties", "a cut response is left out", "length does not tell the chosen response"],
)
def test_samples_are_paired_by_their_difference(samples, expected):
    assert [tuple(one["response_text"] for one in pair) for pair in pair_up(samples)] == expected


@pytest.mark.parametrize(("split", "least"), [("train", 800), ("validation", 50), ("test", 100)])
def test_committed_pairs_are_ordered_by_the_score(split, least):
    prompts = {one["prompt_text"] for one in read(split)}
    rows = read_rows(DATA_DIR / f"{split}_prefs.jsonl")
    assert len({one["row_id"] for one in rows}) == len(rows) >= least
    for one in rows:
        assert one["prompt_text"] in prompts
        assert one["chosen_score"] > one["rejected_score"]
        assert one["chosen_score"] == score(one["prompt_text"], one["chosen_text"])
        assert one["rejected_score"] == score(one["prompt_text"], one["rejected_text"])
