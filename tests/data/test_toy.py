"""The embedded benchmark: scores worked by hand, the committed data and model, and their recipes."""

from __future__ import annotations

import random

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.files import read_rows
from tools.toy_benchmark import (
    MATH_ROWS,
    PREFERENCE_ROWS,
    PROMPT_ROWS,
    build_math,
    build_preferences,
    build_prompts,
    respond,
)
from tools.toy_prompts import prompt_pool
from trl_ext.toy import DATA_DIR, MODEL_DIR, kind_of, score, score_parts

LIST = "List four animals. Use commas."
STARTS = "Name three words that start with b."
SENTENCE = "Write a sentence about a fox using the words quiet and river."
ASK = "Ask Anna for a hammer politely."
SORT = "Sort these numbers: 7 2 9 4."
SAY = "Say happy three times."
DESCRIBE = "Describe a brave teacher in seven words."
ADD = "What is 47 + 38?"
GOOD = {
    LIST: "cat, dog, fox, bear.",
    STARTS: "bear, blue, brave.",
    SENTENCE: "The quiet fox slept near the river.",
    ASK: "Hello Anna, may I please have a hammer? Thank you.",
    SORT: "2 4 7 9.",
    SAY: "happy, happy, happy.",
    DESCRIBE: "The brave teacher slept near the river.",
    ADD: "<think>7+8=15 4+3+1=8</think> <answer>85</answer>",
}
KINDS = dict(zip(GOOD, ("list", "starts", "sentence", "ask", "sort", "say", "describe", "add"), strict=True))


@pytest.fixture(scope="module")
def splits() -> dict[str, list[dict]]:
    return {path.stem: read_rows(path) for path in sorted(DATA_DIR.glob("*.jsonl"))}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL_DIR)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(MODEL_DIR).eval()


@pytest.mark.parametrize("prompt", GOOD)
def test_a_good_answer_of_each_kind_scores_one(prompt):
    assert kind_of(prompt) == KINDS[prompt]
    assert score(prompt, GOOD[prompt]) == 1.0


# Each list-like kind: credit 0.6 (say: 0.8) shared by the items, half of an item's share lost per wrong, repeated or
# surplus item, 0.2 by the share of right separators, 0.2 for the final full stop.
@pytest.mark.parametrize(
    ("prompt", "response", "expected"),
    [
        # three of four items 0.6 * 3/4 = 0.45; separators 0.2; no full stop
        (LIST, "cat, dog, fox", 0.65),
        # cat and dog 0.3; the second cat and apple cost 2 * 0.075; separators 0.2; full stop 0.2
        (LIST, "cat, cat, apple, dog.", 0.55),
        # all four 0.6; the two surplus items cost 2 * 0.075; separators 0.2; full stop 0.2
        (LIST, "cat, dog, fox, bear, wolf, lion.", 0.85),
        # all four 0.6; one of three separators right 0.2/3; full stop 0.2
        (LIST, "cat, dog; fox bear.", 0.6 + 0.2 / 3 + 0.2),
        # "and" is a wrong item, -0.075; the separators are ", " twice and " " twice, 0.1
        (LIST, "cat, dog, fox and bear.", 0.6 - 0.075 + 0.1 + 0.2),
        # 0.6; semicolons were not asked for
        (LIST, "cat; dog; fox; bear", 0.6),
        # bear and blue 0.4; bread is no word of the vocabulary, -0.1; one of two separators 0.1; full stop 0.2
        (STARTS, "bear; blue, bread.", 0.6),
        # a word of another letter: 0.4 - 0.1 + separators 0.2
        (STARTS, "bear, cat, blue", 0.5),
        # two of three 0.8 * 2/3
        (SAY, "happy, happy", 1.6 / 3),
        # three 0.8; five words, so two are wrong or surplus: -2 * 0.4/3; full stop 0.2
        (SAY, "happy happy sad happy happy.", 1.0 - 0.8 / 3),
        # all there 0.3; 2 and 9 stand in their places 0.6 * 2/4
        (SORT, "2 7 4 9", 0.6),
        # 7 is missing: 0.3 * 3/4; 2 and 4 placed 0.6 * 2/4; full stop 0.1
        (SORT, "2 4 9.", 0.225 + 0.3 + 0.1),
        # all there 0.3; 2 and 4 placed 0.3; the surplus 5 costs 0.1
        (SORT, "2 4 9 7 5", 0.5),
        # a long run-on is worth nothing: 0.3 + 0.6 - 0.1 * 9
        (SORT, "2 4 7 9 1 1 1 1 1 1 1 1 1", 0.0),
        # fox and river 0.4, no "quiet"; fluency 0.25; capital 0.05; full stop 0.1
        (SENTENCE, "The fox slept near the river.", 0.8),
        # the three words 0.6; start-noun, noun-adjective and adjective-noun, noun-end: 2 of 4 permitted, so no
        # fluency; three words are two short of five: -0.2
        (SENTENCE, "fox quiet river", 0.4),
        # 14 words: fox and river 0.4, fluency 0.25 make 0.65; of 13 word pairs "and the", "the dog", "dog ran" come
        # twice, so 10 are distinct: -0.65 * 3/13 = -0.15; two words over twelve: -0.2
        (SENTENCE, "the fox slept near the river and the dog ran and the dog ran", 0.3),
        # the object alone 0.25; four words are two short of six: -0.2
        (ASK, "I want a hammer", 0.05),
        # object 0.25, request 0.1, please 0.15, "?" 0.1; name, greeting and thanks are missing
        (ASK, "May I please have a hammer?", 0.6),
        # name 0.15, greeting 0.1, request 0.1, thanks 0.15, full stop 0.1; wrong object, no please
        (ASK, "Hello Anna, may I have a lamp? Thank you.", 0.6),
        # subject, adjective and fluency 0.6; four words of seven: 1 - 3/3 leaves no credit for the count
        (DESCRIBE, "the brave teacher slept", 0.6),
        # six words: 0.25 * 2/3 for the count; subject and adjective 0.4, fluency 0.2, capital 0.05, full stop 0.1
        (DESCRIBE, "The brave teacher found the hat.", 0.75 + 0.5 / 3),
        # 12 words with the right subject and adjective 0.4, fluency 0.2; "and the" comes twice among 11 pairs,
        # -0.6 / 11; 12 is two over 7 + 3: -0.2
        (DESCRIBE, "the brave teacher slept and the fox ran and the cat sang", 0.6 - 0.6 / 11 - 0.2),
        # the format alone
        (ADD, "<think>7+8=15 4+3=7</think> <answer>75</answer>", 0.2),
        (ADD, "85", 0.0),
        (ADD, "<think>7+8=15</think><answer>85</answer>", 0.0),
    ],
)
def test_partial_credit(prompt, response, expected):
    assert score(prompt, response) == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    # 1 less the credit for the ending (0.2 list, starts, say, add's format; 0.1 elsewhere) less 0.2 for the cut
    [(LIST, 0.6), (STARTS, 0.6), (SAY, 0.6), (ADD, 0.6), (SENTENCE, 0.7), (ASK, 0.7), (DESCRIBE, 0.7), (SORT, 0.7)],
)
def test_a_cut_response_is_not_graded_as_if_it_had_ended(prompt, expected):
    assert score(prompt, GOOD[prompt], finished=False) == pytest.approx(expected)
    assert score_parts(prompt, GOOD[prompt], finished=False)["unfinished"] == -0.2


@pytest.mark.parametrize("response", ["", "  \n", "🙂", "...", "日本語 " * 30])
def test_empty_and_foreign_text_scores_at_most_its_ending(response):
    for prompt in GOOD:
        assert 0 <= score(prompt, response) <= 0.2
        assert response.strip() or score_parts(prompt, response) == {"empty": 0.0}


def test_score_is_the_sum_of_its_parts_within_the_interval():
    generator = random.Random(0)
    fragments = " ".join(GOOD.values()).split() + ["and", "7", "fox", ";"]
    for _ in range(500):
        prompt = generator.choice(list(GOOD))
        response = " ".join(generator.choices(fragments, k=generator.randint(1, 25)))
        finished = generator.random() < 0.5
        total = sum(score_parts(prompt, response, finished=finished).values())
        assert score(prompt, response, finished=finished) == pytest.approx(min(1, max(0, total)), abs=1e-8)


@pytest.mark.parametrize("prompt", ["", "Write a poem.", "List four dragons. Use commas.", "user: " + LIST])
def test_an_unknown_prompt_is_refused(prompt):
    for function in (kind_of, lambda prompt: score(prompt, "cat")):
        with pytest.raises(ValueError, match="unknown prompt .*pass the text of the user message alone"):
            function(prompt)


def test_splits_have_their_sizes_and_no_prompt_is_in_two(splits):
    sizes = {"prefs": PREFERENCE_ROWS, "gen": PROMPT_ROWS, "math": MATH_ROWS}
    expected = {f"{split}_{kind}": count for kind, rows in sizes.items() for split, count in rows.items()}
    assert {name: len(rows) for name, rows in splits.items()} == expected
    pools = {"pretrain": {prompt for prompts in prompt_pool("pretrain").values() for prompt in prompts}}
    for name, rows in splits.items():
        pools.setdefault(name.split("_")[0], set()).update(row["prompt_text"] for row in rows)
    assert sum(map(len, pools.values())) == len(set.union(*pools.values()))


def test_tokenizer_splits_digits_and_has_nonzero_end_and_pad(tokenizer):
    assert len(tokenizer) == 1024
    assert tokenizer.convert_ids_to_tokens(tokenizer("47+385")["input_ids"]) == ["4", "7", "+", "3", "8", "5"]
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert 0 != tokenizer.eos_token_id != tokenizer.pad_token_id != 0


@pytest.mark.parametrize("response", ["cat, dog.", "\n\n leading newlines", " 7", "<answer>", "\n", "é"])
def test_the_prompt_is_a_prefix_of_the_conversation_and_the_completion_ends_at_the_end_token(tokenizer, response):
    turns = [{"role": "user", "content": LIST}, {"role": "assistant", "content": response}]
    turns = [{"role": "system", "content": "Be brief."}, *turns, *turns]
    for end in (3, 5):
        prompt = tokenizer.apply_chat_template(turns[: end - 1], add_generation_prompt=True)["input_ids"]
        whole = tokenizer.apply_chat_template(turns[:end])["input_ids"]
        assert whole[: len(prompt)] == prompt
        assert whole[len(prompt) :] == tokenizer(response)["input_ids"] + [tokenizer.eos_token_id]


def test_model_is_a_small_imperfect_base(model, tokenizer, splits):
    assert model.config.model_type == "qwen2" and model.config.max_position_embeddings == 2048
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (1, 2)
    assert model.num_parameters() == 403_680
    prompts = [row["prompt_text"] for row in splits["test_gen"][:64]]
    responses = respond(model, tokenizer, prompts)
    scores = [score(prompt, one.text, finished=one.finished) for prompt, one in zip(prompts, responses, strict=True)]
    assert 0.4 <= sum(scores) / 64 <= 0.65


def test_building_rows_twice_gives_the_same_rows(model, tokenizer, splits):
    first, second = (build_preferences(model, tokenizer, "train", 12, seed=3) for _ in range(2))
    assert first == second and len(first) == 12
    assert build_preferences(model, tokenizer, "train", 12, seed=4) != first
    assert build_prompts(model, tokenizer, "test", 8) == build_prompts(model, tokenizer, "test", 8)
    assert all(build_math(pool, count) == splits[f"{pool}_math"] for pool, count in MATH_ROWS.items())
