"""Verified rewards: strict forms, hand-checked corpora, hostile answers, formulas, and the process of math-verify."""

from __future__ import annotations

import itertools
import os
import pickle
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import pytest

from tests.support import REPOSITORY
from tests.support.files import read_rows
from trl_ext.rewards import (
    VerifiedReward,
    countdown_reward,
    gsm8k_reward,
    is_correct,
    math_worker,
    parse_gsm8k_response,
    parse_mmlu_response,
    question_only_reward,
    r1_zero_reward,
)
from trl_ext.rewards.answers import last_boxed
from trl_ext.rewards.math_worker import MathWorker, _worker
from trl_ext.rewards.parsers import countdown_is_solved

CORPUS = read_rows(Path(__file__).with_name("math_corpus.jsonl"))
PARSER_CORPUS = read_rows(Path(__file__).with_name("parser_corpus.jsonl"))
TAGGED = "thoughts </think> <answer> {} </answer>"


def parts(reward: dict[str, float]) -> tuple[float, float, float]:
    assert set(reward) == {"reward", "format_reward", "answer_reward"}
    assert all(type(value) is float for value in reward.values())
    return reward["format_reward"], reward["answer_reward"], reward["reward"]


R1_ZERO = [
    ("</think> <answer> 5 </answer>", "5", (1, 1, 1)),
    ("</think><answer> 5 </answer>", "5", (0, 0, 0)),
    ("</think>\n<answer> 5 </answer>", "5", (0, 0, 0)),
    ("</think> <answer> 5", "5", (0, 0, 0)),
    ("", "5", (0, 0, 0)),
    (r"\boxed{5}", "5", (0, 0, 0)),
    ("</think> <answer> 5 </answer> trailing text", "5", (1, 0, 0)),
    ("</think> <answer> 6 </answer> <answer> 7 </answer>", "7", (1, 1, 1)),
    ("</think> <answer> 6 </answer> <answer> 7 </answer>", "6", (1, 0, 0)),
    (r"</think> <answer> \boxed{\frac{1}{2}} </answer>", r"\frac{1}{2}", (1, 1, 1)),
    (r"</think> <answer> \boxed{5 </answer>", "5", (1, 0, 0)),
    (r"</think> <answer> \boxed{4} or \boxed{5} </answer>", "5", (1, 1, 1)),
    ("</think> <answer>  </answer>", "5", (1, 0, 0)),
    (TAGGED.format("7"), 7, (1, 1, 1)),
    (TAGGED.format("7"), ["8", "7"], (1, 1, 1)),
    (TAGGED.format("7"), [8, 9], (1, 0, 0)),
    (TAGGED.format("7"), r"\boxed{7}", (1, 1, 1)),
    (TAGGED.format("7"), r"so it is \boxed{7}.", (1, 1, 1)),
]
QUESTION_ONLY = [
    (r"It is \boxed{5}.", "5", (1, 1, 1)),
    ("It is 5.", "5", (0, 0, 0)),
    (r"It is \boxed{5", "5", (0, 0, 0)),
    (r"It is \fbox{5}", "5", (0, 0, 0)),
    (r"It is \boxed 5", "5", (0, 0, 0)),
    ("</think> <answer> 5 </answer>", "5", (0, 0, 0)),
    (r"\boxed{}", "5", (1, 0, 0)),
    (r"\boxed{4} no, \boxed{5}", "5", (1, 1, 1)),
    (r"\boxed{5} no, \boxed{4}", "5", (1, 0, 0)),
    (r"\boxed{5} or \boxed{6", "5", (0, 0, 0)),
    (r"\boxed{\text{(B)}}", "B", (1, 1, 1)),
    (r"\boxed{\{1,2\}}", r"\{1,2\}", (1, 1, 1)),
    (r"\boxed{\frac{\sqrt{3}}{2}}", r"\frac{\sqrt3}{2}", (1, 1, 1)),
]
GSM8K = [
    # The last number counts, whatever stands around it.
    ("So 3 x 400 = $1,200.", "1200", (1, 1, 1)),
    ("It is 1200, or 12.", "1200", (1, 0, 0)),
    ("</think> <answer> 72 </answer>", 72, (1, 1, 1)),
    # The column `answer` of GSM8K itself.
    ("So the answer is 72", "48/2 = <<48/2=24>>24, and 48+24 = <<48+24=72>>72.\n#### 72", (1, 1, 1)),
    ("So the answer is 71", "48/2 = <<48/2=24>>24, and 48+24 = <<48+24=72>>72.\n#### 72", (1, 0, 0)),
    ("It is 1200.", "#### 1,200", (1, 1, 1)),
    ("None.", "5", (0, 0, 0)),
    ("", "5", (0, 0, 0)),
]
FORMS = [(r1_zero_reward, R1_ZERO), (question_only_reward, QUESTION_ONLY), (gsm8k_reward, GSM8K)]


@pytest.mark.parametrize(
    ("function", "response", "truth", "expected"), [(function, *row) for function, rows in FORMS for row in rows]
)
def test_forms(function, response, truth, expected):
    assert parts(function(response, truth)) == expected


def test_box_with_escaped_braces():
    r"""`\left\{ 1 \right.` opens a brace that is a sign of the formula, and no group."""
    assert last_boxed(r"so \boxed{\left\{ 1 \right.} indeed }") == r"\left\{ 1 \right."


def test_corpus():
    """One process serves all of it, without reaching a limit."""
    started = _worker.started
    for case in CORPUS:
        assert is_correct(case["answer"], case["truth"]) is case["verdict"], case
    assert _worker.started - started <= 1


def test_plain_numbers_never_reach_the_process(monkeypatch):
    monkeypatch.setattr("trl_ext.rewards.formulas.verify_in_worker", lambda *_: pytest.fail("asked"))
    same = [["7"], ["-3"], ["7.5"], ["1,234"], ["5\\text{ cm}"], ["$12"], ["2\\frac{1}{2}"], ["0.\\bar{3}"], ["75\\%"]]
    same += [["3/4", "\\frac{3}{4}", "0.75"]]
    for one, other in itertools.product(same, same):
        for answer, truth in itertools.product(one, other):
            assert is_correct(answer, truth) is (one is other)


@pytest.mark.parametrize("spelling", ["{}", " {} ", "${}$", "${}$.", r"\({}\).", "{}."])
def test_a_truth_compared_with_itself_is_correct(spelling):
    """Whatever delimiters and full stop are around either."""
    rows = [row for row in CORPUS if row["kind"] not in ("broken", "refused")]
    for text in {row[side] for row in rows for side in ("answer", "truth")}:
        spelled = spelling.replace("{}", text)
        assert is_correct(spelled, text) and is_correct(text, spelled), text
        assert parts(question_only_reward(rf"so \boxed{{{spelled}}}.", text)) == (1, 1, 1), text


@pytest.mark.parametrize("truth", ["", [], None, float("nan"), r"\boxed{7", "It is 7. ####"])
@pytest.mark.parametrize("response", [TAGGED.format("7"), "no form"])
def test_a_truth_that_is_none_is_refused(truth, response):
    with pytest.raises(ValueError, match="truth"):
        r1_zero_reward(response, truth)


def test_long_answers_are_compared_letter_for_letter():
    """1,000 characters is the limit for parsers; the same text is the same answer at any length."""
    text = "x + " * 1000 + "1"
    assert is_correct(text, text)
    assert not is_correct(text, text.replace(" ", ""))


HOSTILE = {
    "a megabyte of brackets": "(" * 500_000 + ")" * 500_000,
    "a megabyte of braces": "{" * 1_000_000,
    "deep fractions": r"\frac{" * 3000 + "1" + "}{2}" * 3000,
    "forty brackets": "(" * 40 + "7" + ")" * 40,
    "a tower": "9**9**9",
    "factorials of factorials": "((10!)!)!",
    "a long number": "9" * 100_000,
    "exponentials": "exp(exp(exp(exp(9))))",
    "roots": r"\sqrt[9999]{" + "9" * 300 + "}",
    "code": "__import__('os').system('false')",
    "units": "5 " + "cm " * 300,
    "conjunctions": "1 and " * 160,
    "a power's factorial": "10^{100}!",
    "a long repetition": r"0.\bar{" + "9" * 900 + "}",
    "matrices in matrices": r"\begin{matrix}" * 30 + r"\end{matrix}" * 30,
    "roots of variables": r"\sqrt{x}+" * 100 + "1",
}


@pytest.mark.parametrize("answer", HOSTILE.values(), ids=HOSTILE)
def test_hostile_answers_are_refused_quickly(answer):
    """Some milliseconds each in this process; a second leaves room for a machine under load."""
    started, begin = _worker.started, time.process_time()
    assert not r1_zero_reward(TAGGED.format(answer), "77")["reward"]
    assert not question_only_reward(f"\\boxed{{{answer}}}", r"\frac{77}{5}")["reward"]
    assert time.process_time() - begin < 1
    assert _worker.started - started <= 1


def test_as_a_reward_function_of_trl():
    """Correct, wrong, no form: the means of format and answer are 2/3 and 1/3."""
    reward = VerifiedReward("r1_zero", truth_column="truth")
    texts = [TAGGED.format("5"), TAGGED.format("6"), "5"]
    columns, metrics = {}, {}
    rewards = reward(
        prompts=["p"] * 3,
        completions=texts,
        truth=["5", 5, [5]],
        completion_ids=[[1]] * 3,
        trainer_state=None,
        log_extra=columns.__setitem__,
        log_metric=metrics.__setitem__,
    )
    assert rewards == [1.0, 0.0, 0.0]
    assert columns == {"reward/r1_zero/format": [1.0, 1.0, 0.0], "reward/r1_zero/answer": [1.0, 0.0, 0.0]}
    assert metrics == {f"rewards/r1_zero/{part}": pytest.approx(n / 3) for part, n in (("format", 2), ("answer", 1))}
    messages = [[{"role": "assistant", "content": text}] for text in texts]
    messages[0][0]["content"] = [{"type": "text", "text": texts[0]}]
    copy = pickle.loads(pickle.dumps(reward))
    assert copy(prompts=[[]] * 3, completions=messages, truth=["5"] * 3) == [1.0, 0.0, 0.0]
    assert copy.__name__ == "r1_zero"


def test_reward_functions_say_where_the_data_is_wrong():
    reward = VerifiedReward("question_only", truth_column="answr")
    with pytest.raises(ValueError, match="no column 'answr': give truth_column"):
        reward(prompts=["p"], completions=["c"], answer=["5"])
    with pytest.raises(ValueError, match="row 1, column 'answer': the truth must be .* got None"):
        VerifiedReward("question_only")(prompts=["p"] * 2, completions=["c"] * 2, answer=["5", None])
    with pytest.raises(ValueError, match="r1_zero, question_only, gsm8k, countdown, got 'gsm8'; did you mean 'gsm8k'"):
        VerifiedReward("gsm8")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("(25 - 5) * (3 + 1)", (1, 1, 1)),  # 20 * 4 = 80
        ("(25 - 5) * (3 + 1) = 80", (1, 1, 1)),
        (r"\boxed{(25-5) \times (3+1)}", (1, 1, 1)),
        ("(25 - 5) * 3 + 1", (1, 0, 0)),  # 61
        ("(25 - 5) * 4", (1, 0, 0)),  # 80, of other numbers
        ("80", (1, 0, 0)),
    ],
)
def test_countdown(answer, expected):
    assert parts(countdown_reward(TAGGED.format(answer), [25, 5, 3, 1], 80)) == expected
    assert parts(countdown_reward(answer, [25, 5, 3, 1], 80)) == (0, 0, 0)
    reward = VerifiedReward("countdown", truth_column="target")
    given = {"target": [80], "numbers": [[25, 5, 3, 1]]}
    assert reward(prompts=["p"], completions=[TAGGED.format(answer)], **given) == [expected[2]]


# ---- Answers in text, and formulas ----

OPTIONS = {"question": "Which?", "options": ["a dog", "a cat", "Paris", "none of them"], "answer": "B"}
PARSERS = {
    "number": lambda row: parse_gsm8k_response(row["text"]),
    "choice": lambda row: parse_mmlu_response(OPTIONS, row["text"]),
    "countdown": lambda row: countdown_is_solved(row["text"], [1, 2, 3, 4], 24),
}


@pytest.mark.parametrize(("kind", "row"), [(row["kind"], row) for row in PARSER_CORPUS])
def test_parser_corpus(kind, row):
    assert PARSERS[kind](row) == row["expected"]


@pytest.mark.parametrize("text", ["9" * 1_000_000, "1," * 500_000, "-" * 1_000_000, "." * 1_000_000, "$" * 1_000_000])
def test_a_megabyte_takes_no_time(text):
    start = time.process_time()
    parse_gsm8k_response(text)
    parse_mmlu_response(OPTIONS, text)
    assert time.process_time() - start < 2


@pytest.mark.parametrize("options", [None, [], "abcd", ["x"] * 27])
def test_a_row_without_options_is_refused(options):
    with pytest.raises(ValueError, match="options: a row must have a list of 1 to 26"):
        parse_mmlu_response({"options": options}, "B")


def test_countdown_is_exact():
    """8 / (3 - 8 / 3) = 8 / (1/3) = 24, which floating point misses by 2e-14."""
    assert 8 / (3 - 8 / 3) != 24
    assert countdown_is_solved("8/(3-8/3)", [3, 3, 8, 8], 24)
    assert not countdown_is_solved("8/(3-8/3)", [3, 8, 8], 24)
    assert not countdown_is_solved("1+" * 10_000 + "1", [1], 10_001)
    for numbers, target in (([], 24), (["a"], 24), ([1], None), ([1], float("nan"))):
        with pytest.raises(ValueError, match="number"):
            countdown_is_solved("1", numbers, target)


def random_formula(rng: random.Random, depth: int) -> tuple[str, Fraction]:
    """A formula in mixed notation, and its value by Python's fractions."""
    if depth == 0:
        number = rng.randint(1, 9)
        return rng.choice([(str(number), Fraction(number)), (f"{number}.25", Fraction(4 * number + 1, 4))])
    (left, one), (right, two) = random_formula(rng, depth - 1), random_formula(rng, depth - 1)
    forms = [
        (f"({left}+{right})", one + two),
        (f"({left} - {right})", one - two),
        (rf"{left} \cdot ({right})", one * two),
        (f"({left})({right})", one * two),
        (f"(-{left})^2", one**2),
        (f"({left})^{{3}}", one**3),
    ]
    if two:
        forms += [(rf"\frac{{{left}}}{{{right}}}", one / two), (f"({left})/({right})", one / two)]
    formula, value = rng.choice(forms)
    return formula if formula.startswith(("(", "\\")) and formula.endswith((")", "}")) else f"({formula})", value


def test_formulas_against_fractions():
    """With pi added, so that it is no rational number in another form; and with a digit changed."""
    rng = random.Random(0)
    formulas = [random_formula(rng, rng.randint(1, 3)) for _ in range(60)]
    for formula, value in formulas:
        numerator, denominator = value.as_integer_ratio()
        assert is_correct(rf"{formula}+\pi", rf"\frac{{{numerator}}}{{{denominator}}}+\pi"), formula
        assert not is_correct(rf"{formula}+\pi", rf"\frac{{{numerator + 1}}}{{{denominator}}}+\pi"), formula


NO_FORMULAS = [
    "",
    "1+",
    "5 6",
    "x2",
    "(1",
    "1)",
    "1/0",
    "abc",
    "0^{-1}",
    "1..2",
    "²",
    r"\ln 0",
    r"-\log 0",
    r"2^{\ln 0}",
]
NO_FORMULAS += [r"\frac{1}{2}+\frac{1}{\ln 0}", r"\ln 0-\ln 0"]


@pytest.mark.parametrize("formula", NO_FORMULAS)
def test_what_is_no_formula(formula):
    for truth in ("30", "2x", r"\frac12", r"\infty", r"2^{-\infty}"):
        assert not is_correct(formula, truth) and not is_correct(rf"{formula}+\pi", rf"{truth}+\pi")


# ---- GSM8K's labelled solutions ----


@pytest.fixture(scope="module")
def solutions() -> list[tuple[str, str, bool]]:
    """Each solution with the truth and its label."""
    data = os.environ.get("TRL_EXT_BENCHMARK_DATA", REPOSITORY.parent / "shared" / "data")
    path = os.path.join(data, "gsm8k", "example_model_solutions.jsonl")
    if not os.path.isfile(path):
        pytest.skip("GSM8K's example solutions are not here")
    found = [
        (answer["solution"], row["ground_truth"].rpartition("\nA: ")[2].replace(",", ""), answer["is_correct"])
        for row in read_rows(Path(path))
        for answer in row.values()
        if isinstance(answer, dict)
    ]
    assert len(found) == 4 * 1319
    return found


def disagreements(solutions, reward) -> list[tuple[str, str, bool]]:
    return [(text, truth, label) for text, truth, label in solutions if (reward(text, truth) == 1) != label]


def test_the_last_number_is_graded_as_the_labels_say(solutions):
    """Those cut before their answer, eleven of them, have a last number too, which is wrong as their label is."""
    assert disagreements(solutions, lambda text, truth: gsm8k_reward(text, truth)["reward"]) == []


def test_answers_in_a_box_and_in_tags_are_graded_as_the_labels_say(solutions):
    """Answers are spelled `18`, `18.0`, `2,125`, `-3`, `1/5`, `-1.8 billion` or `10+John's age`."""

    def boxed(text: str, truth: str) -> float:
        reasoning, mark, answer = text.rpartition("A: ")
        return question_only_reward(rf"{reasoning}\boxed{{{answer}}}" if mark else text, truth)["reward"]

    def tagged(text: str, truth: str) -> float:
        reasoning, mark, answer = text.rpartition("A: ")
        return r1_zero_reward(f"{reasoning}</think> <answer>{answer}</answer>" * bool(mark), truth)["reward"]

    assert disagreements(solutions, boxed) == []
    assert disagreements(solutions, tagged) == []


# ---- The process of math-verify: its limits, threads and forks, and that none is left behind ----


@pytest.fixture
def worker():
    worker = MathWorker(seconds=1.0)
    yield worker
    worker.close()


def seconds_of_children() -> float:
    """The processor time of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_a_question_without_end_ends_at_the_limit(worker):
    """Hours for a computer algebra system; asked past the checks that come before it."""
    assert worker.verify("2/4", r"\frac{1}{2}") is True
    process, start = worker.process, seconds_of_children()
    assert worker.verify("9^{9^{9^{9}}}", "9^{9^{9^{9}}}+1") is False
    assert process.poll() is not None and seconds_of_children() - start < 5
    assert worker.verify("2/4", r"\frac{1}{3}") is False and worker.verify("2/4", r"\frac{1}{2}") is True
    assert worker.started == 2


# In place of math-verify: what a question of each kind would do to the process, without the wait for it.
STUB = """
import dataclasses
import sympy
@dataclasses.dataclass
class Normalization:
    units: bool = True
@dataclasses.dataclass
class LatexExtractionConfig:
    normalization_config: Normalization = dataclasses.field(default_factory=Normalization)
def parse(text, **settings):
    print("0")
    if "memory" in text:
        bytearray(1 << 31)
    if "C code" in text:
        sum(range(10 ** 12))
    if "crash" in text:
        import os
        os.abort()
    return [sympy.Symbol(text)]
"""


@pytest.mark.parametrize("kind", ["memory", "C code", "crash"])
def test_a_question_that_takes_too_much_ends_the_process(kind, tmp_path, monkeypatch):
    """2 GiB where 1 GiB is allowed, C code that sees no signal handler, a crash."""
    (tmp_path / "math_verify.py").write_text(STUB)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    worker = MathWorker(seconds=1.0)
    try:
        assert worker.verify("1", "1") is True
        start = seconds_of_children()
        assert worker.verify(kind, "1") is False
        assert worker.process is None and seconds_of_children() - start < 10
        assert worker.verify("2", "2") is True and worker.verify("2", "1") is False
        assert worker.started == 2
    finally:
        worker.close()


def test_threads_share_the_process(worker):
    """signal.alarm, math-verify's own limit, raises in any thread but the main one."""
    worker.seconds = 30.0
    questions = [(f"{2 * n}/4", f"{n + n % 3}/2") for n in range(1, 61)]
    with ThreadPoolExecutor(8) as pool:
        verdicts = list(pool.map(lambda question: worker.verify(*question), questions))
    assert verdicts == [n % 3 == 0 for n in range(1, 61)]
    assert worker.started == 1


def test_a_killed_process_is_replaced_and_none_is_left(worker):
    assert worker.verify("2/4", "1/2")
    first = worker.process
    first.kill()
    first.wait()
    assert worker.verify("4/8", "1/2")
    assert worker.started == 2
    second = worker.process.pid
    worker.close()
    with pytest.raises(ProcessLookupError):
        os.kill(second, 0)


@pytest.mark.parametrize("kills", [1, 2])
def test_a_question_that_was_killed_from_outside_is_asked_once_more(kills, worker, monkeypatch):
    """Killed while it answers, as by the out-of-memory killer; the second time there is no verdict to remember."""
    monkeypatch.setattr(math_worker, "_worker", worker)
    math_worker._verdict.cache_clear()
    start = worker._start

    def start_and_kill() -> None:
        start()
        if worker.started <= kills:
            worker.process.send_signal(signal.SIGSTOP)
            threading.Timer(0.2, worker.process.kill).start()

    monkeypatch.setattr(worker, "_start", start_and_kill)
    if kills == 2:
        assert math_worker.verify_in_worker("2/4", "1/2") is False
    assert math_worker.verify_in_worker("2/4", "1/2") is True
    assert worker.started == kills + 1


SCRIPT = """
import multiprocessing, os, sys
from trl_ext.rewards import math_worker

def grade(n):
    return math_worker.verify_in_worker(f"{2 * n}/4", f"{n}/2"), math_worker._worker.process.pid

if __name__ == "__main__":
    here = grade(1)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        there = pool.map(grade, range(2, 6), chunksize=2)
    again = grade(7)
    assert all(verdict for verdict, _ in [here, *there, again]), there
    assert here[1] == again[1] and here[1] not in {pid for _, pid in there}
    print(*{pid for _, pid in [here, *there]})
"""


def test_forks_have_processes_of_their_own_and_all_end(tmp_path):
    """Nothing is left a moment after the program, neither its worker nor those of its forks."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, timeout=120)
    assert run.returncode == 0 and not run.stderr, run.stderr
    pids = [int(pid) for pid in run.stdout.split()]
    assert len(pids) >= 2
    deadline = time.monotonic() + 10
    while any(map(_runs_math_worker, pids)):
        assert time.monotonic() < deadline, "a worker outlived its program"
        time.sleep(0.05)


def _runs_math_worker(pid: int) -> bool:
    try:
        return b"math_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
