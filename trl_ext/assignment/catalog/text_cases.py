"""Test inputs for functions of texts, tokens and models: builders as in `cases`."""

from __future__ import annotations

from trl_ext.assignment.catalog.cases import Arguments, Builder
from trl_ext.assignment.catalog.drawing import Draw, fake

WORDS = ["red", "green", "blue", "one", "two", "three", "four", "five", "cats", "dogs", "sing", "run"]


def _text(draw: Draw, low: int, high: int) -> str:
    return " ".join(WORDS[draw.integer(0, len(WORDS) - 1)] for _ in range(draw.integer(low, high)))


def tokenize(draw: Draw) -> Arguments:
    rows = draw.turn(3, 4)
    # Outputs of different lengths; every third case has an empty one.
    outputs = [_text(draw, 1 + row, 2 + row) for row in range(rows)]
    if draw.index % 3 == 2:
        outputs[0] = ""
    return {
        "prompt_strs": [_text(draw, 2, 5) for _ in range(rows)],
        "output_strs": outputs,
        "tokenizer": fake("tokenizer", **draw.turn({}, {"pad_token_id": None})),
    }


def log_probs(draw: Draw) -> Arguments:
    ids = {name: draw.integers(2, 5, low=0, high=8) for name in ("input_ids", "labels")}
    return {"model": fake("model", seed=draw.integer(0, 99), size=9, width=3, grad=True), **ids}


def group_rewards(draw: Draw) -> Arguments:
    if draw.special == "equal":
        return _equal_rewards(draw)
    group_size, groups = draw.turn(4, 3), 3
    truths = [truth for _ in range(groups) for truth in [WORDS[draw.integer(0, 11)]] * group_size]
    # The first of a group is correct, the second almost, the others are random.
    responses = []
    for number, truth in enumerate(truths):
        said = {0: f"{_text(draw, 1, 3)} {truth}", 1: f"{truth} {truth} {_text(draw, 1, 1)}"}
        responses.append(said.get(number % group_size, _text(draw, 1, 4)))
    return {
        "reward_fn": fake("reward"),
        "rollout_responses": responses,
        "repeated_ground_truths": truths,
        "group_size": group_size,
        "advantage_eps": draw.turn(1e-6, 0.1),
        "normalize_by_std": draw.turn(True, True, False),
    }


def _equal_rewards(draw: Draw) -> Arguments:
    """A group with equal rewards whose float32 mean is not exactly that reward."""
    truth, others = WORDS[draw.integer(0, 5)], WORDS[6 + draw.integer(0, 5)]
    return {
        "reward_fn": fake("reward", scale=0.7),
        "rollout_responses": [f"it is {truth}"] * 7 + [truth, others] * 3 + [others],
        "repeated_ground_truths": [truth] * 14,
        "group_size": 7,
        "advantage_eps": 1e-6,
        "normalize_by_std": True,
    }


def instance_dpo(draw: Draw) -> Arguments:
    return {
        "lm": fake("model", seed=draw.integer(0, 99), grad=True),
        "lm_ref": fake("model", seed=draw.integer(100, 199)),
        "tokenizer": fake("tokenizer"),
        "prompt": _text(draw, 2, 4),
        "response_chosen": _text(draw, 2, 4),
        "response_rejected": _text(draw, 2, 5),
    }


def gsm8k_text(draw: Draw) -> Arguments:
    one, two = draw.integer(3, 60), draw.integer(3, 60)
    price = f"{draw.integer(1, 9)},{draw.integer(100, 999)}.{draw.integer(10, 99)}"
    texts = (
        f"She has {one} + {two} = {one + two} apples.",
        f"It costs ${price} in all, so the answer is {price}.",
        f"I cannot say: {_text(draw, 1, 3)}.",
        f"The loss is -{one}",
        f"First {one}, then {two}, so {one + 2 * two} of them.",
        f"The answer is {one}",
        f"{one} from {one + two} leaves {two}.",
        f"about 0.{two}",
    )
    return {"model_output": draw.turn(*texts)}


def mmlu_text(draw: Draw) -> Arguments:
    options = [WORDS[number] for number in draw.permutation(len(WORDS))[:4].tolist()]
    # One of the texts begins with the letter B.
    own, other = ("AC"[draw.integer(0, 1)], "BD"[draw.integer(0, 1)])
    texts = (
        f"The answer is {other}, no, the answer is {own}.",
        f"({own}) is what I choose, and not the rest",
        f"I would take option {own} of these",
        options["ABCD".index(own)],
        f"Because of it the answer is {own}.",
        "I do not know.",
        f"The correct answer is {own}. {other} is wrong.",
        f"{own}.",
    )
    example = {"question": f"Which one, {_text(draw, 1, 2)}?", "options": options, "subject": "colours"}
    return {"mmlu_example": example, "model_output": draw.turn(*texts)}


def answered(*responses: str) -> Builder:
    """Responses in turn, with {right} and {wrong} answers and {words}, and the right answer."""

    def build(draw: Draw) -> Arguments:
        right, wrong = draw.integer(1000, 5400), draw.integer(5500, 9900)
        response = draw.turn(*responses).format(right=right, wrong=wrong, words=_text(draw, 1, 2))
        return {"response": response, "ground_truth": str(right)}

    return build


tagged = answered(
    "so it is {words} </think> <answer> {right} </answer>",
    "so it is less </think> <answer> {wrong} </answer>",
    "</think><answer> {right} </answer>",
    "it is {right}",
    "{words} </think> <answer> \\boxed{{{right}}} </answer>",
    "first </think> <answer> {wrong} </answer> no <answer> {right} </answer>",
)
boxed = answered(
    "so \\boxed{{{right}}}",
    "so \\boxed{{{wrong}}}",
    "it is {right}",
    "\\boxed{{{wrong}}} or rather \\boxed{{{right}}}",
    "so \\boxed{{{right}",
)
last_number = answered("so {wrong} - 2 = {right}", "{right}, or is it {wrong}", "{words}", "it costs ${right:,}")


def countdown(draw: Draw) -> Arguments:
    one, two, three = draw.integer(2, 4), draw.integer(5, 7), draw.integer(8, 12)
    target = one * two + three
    formulas = (
        f"{one} * {two} + {three}",
        f"({one} + {two}) * {three}",
        f"{three} + {one} * {two} = {target}",
        f"{three} + {two} + {two} * ({one} - 1)",
        f"{target}",
    )
    return {
        "response": f"I try {_text(draw, 1, 2)} </think> <answer> {draw.turn(*formulas)} </answer>",
        "numbers": [one, two, three],
        "target": target,
    }
