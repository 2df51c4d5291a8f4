"""The commands of the public evaluation as a user runs them: figures, files, caches, costs, and errors in one line."""

from __future__ import annotations

import json
import os
import re
import zipfile
from functools import partial
from pathlib import Path

import pytest

from tests.support import REPOSITORY
from tests.support.files import read_rows, write_rows
from tests.support.loopback import LoopbackServer
from tests.support.public_evaluation import (
    COMMANDS,
    flags_of_course,
    one_line_error,
    plan,
    response_rows,
    run_command,
    write_assets,
    write_policy,
    write_scores,
)
from tests.support.refusals import assert_one_line
from tests.support.reward_adapters import save_full_model
from trl_ext.rewards import RewardModel

MIXED = {"win": 5, "tie": 3, "loss": 2}


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return partial(run_command, capsys)


@pytest.fixture
def result(run):
    """Runs a command that has to succeed, and returns what it prints as JSON."""

    def call(*arguments):
        code, out, err = run(*arguments, "--json")
        assert code == 0, err
        return json.loads(out)

    return call


@pytest.fixture
def course(tmp_path):
    return flags_of_course(tmp_path)


@pytest.fixture
def policy(tmp_path):
    """Writes a file of responses with so many wins, ties, losses and empty ones, in a submission."""
    return lambda name="aot", **counts: write_policy(tmp_path / "submission", name, response_rows(plan(**counts)))


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_what_a_command_costs_and_writes(command, run):
    code, text, _ = run(command, "--help")
    assert code == 0 and f"python -m public_eval.{command}" in text
    assert "\ncost  " in text and "\nwrites  " in text and "--json" in text


def test_from_models_to_the_archive(run, result, course, tmp_path, tiny_model_path):
    reward_model = save_full_model(tiny_model_path, tmp_path / "reward")
    out, scores = "submission/policy_generations/aot.jsonl", "submission/reward_model/public_test_pref_scores.jsonl"
    generate = ("generate", "--model", tiny_model_path, "--out", out, *course["prompts_jsonl"], "--max_new_tokens")
    assert result(*generate, "4")["rows"] == 10
    found = result("score", "--reward_model", reward_model, "--out", scores, *course["prefs_jsonl"])
    assert found["accuracy"] == sum(r["chosen_score"] > r["rejected_score"] for r in read_rows(tmp_path / scores)) / 4
    pack = ("pack", "submission", *course["prompts_jsonl"], *course["prefs_jsonl"], "--max_new_tokens", "4")
    code, text, _ = run(*pack)
    assert code == 0 and "2 files, 7 missing" in text
    assert len(zipfile.ZipFile(tmp_path / "submission.zip").namelist()) == 2
    # Rows of other settings are refused.
    assert "made with max_new_tokens 4, not 5" in one_line_error(run(*generate, "5"))


OPENAI = ["--judge", "openai", "--model", "gpt-5.4"]
COURSE = [f"--{name}_jsonl=course/{name}.jsonl" for name in ("prompts", "base")]
CANDIDATE = ["judge", *COURSE, "--candidate", "one/policy_generations/aot.jsonl"]
# Every refusal is one line: what is wrong, and the flag, file or name that a user would change.
REFUSALS = [
    (["generate", "--model", "./no", "--out", "x.jsonl"], ["no model folder './no'"]),
    (["generate", "--modle", "toy", "--out", "x.jsonl"], ["unknown flag --modle"]),
    (["generate", "--out", "x.jsonl"], ["required", "--model"]),
    (["generate", "--model", "toy", "--out", "x.jsonl", "--prompts_jsonl", "no.jsonl"], ["no file no.jsonl"]),
    (["score", "--reward_model", "./no", "--out", "x.jsonl"], ["no model folder './no'"]),
    (["grade", "nowhere"], ["no folder nowhere", "generate and score"]),
    (["grade", ".", "--judge", "reward_model", "--model", "./no"], ["no model folder './no'"]),
    (["pack", "nowhere"], ["nowhere holds no file of a submission"]),
    (["tournament", "no.jsonl"], ["no file no.jsonl"]),
    (["tournament", *COURSE, "course/base.jsonl"], ["the base takes part anyway"]),
    ([*CANDIDATE, "two/policy_generations/aot.jsonl"], ["two files are called aot"]),
    (["judge", "--candidate", "no.jsonl"], ["no file no.jsonl"]),
    ([*CANDIDATE, *OPENAI], ["OPENAI_API_KEY is not set"]),
    ([*CANDIDATE, "--judge", "opnai"], ["--judge 'opnai'", "did you mean 'openai'?"]),
    ([*CANDIDATE, "--max_concurency", "4"], ["unknown flag --max_concurency", "did you mean"]),
    ([*CANDIDATE, "--max_new_tokens", "0"], ["--max_new_tokens", "at least 1", "0"]),
    ([*CANDIDATE, "--judge", "openai"], ["--judge openai", "--model"]),
    ([*CANDIDATE, "--model", "gpt-5.4"], ["--judge ground_truth", "--model is for openai and reward_model"]),
    ([*CANDIDATE, *OPENAI, "--instructions", "no.md"], ["no file no.md"]),
]


def test_refusals(run, tmp_path, monkeypatch):
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    for folder in ("one", "two"):
        write_policy(tmp_path / folder, "aot", response_rows(plan(win=10)))
    write_assets(tmp_path / "course")
    for arguments, words in REFUSALS:
        assert_one_line(one_line_error(run(*arguments)), words)


class TestJudge:
    def test_figures(self, run, result, course, tmp_path, policy):
        """5 wins, 3 ties and 2 losses: 5 / 7 and 6.5 / 10; against 7 wins and 3 losses: 0.7."""
        first, second = policy(**MIXED), policy("dpo", win=7, loss=3)
        candidates = ["--candidate", first, second, *course["judging"]]
        found = result("judge", *candidates, "--verdicts", "v.jsonl")
        rates = [tuple(one["win_rate"][rule]["rate"] for rule in ("agreed", "half")) for one in found["candidates"]]
        assert rates == [(pytest.approx(5 / 7), pytest.approx(0.65)), (0.7, 0.7)]
        (difference,) = found["differences"]
        assert difference["candidates"] == ["aot", "dpo"]
        assert difference["difference"] == pytest.approx(5 / 7 - 0.7)
        controlled = found["candidates"][0]["length_controlled"]
        assert controlled["n"] == 10
        verdicts = read_rows(tmp_path / "v.jsonl")
        assert len(verdicts) == 20
        assert [row["outcome"] for row in verdicts[:10]] == ["candidate"] * 5 + ["tie"] * 3 + ["base"] * 2
        out = run("judge", "--candidate", first, *course["judging"])[1]
        assert "0.714 [0.359, 0.918]  n 7" in out and "0.650" in out and "position bias  length bias" in out
        # Seven rows are asked about in both orders; the three ties are identical texts.
        assert out.splitlines()[-1].startswith("14 calls, 0 verdicts from the cache, 0 errors")

    def test_estimate_sends_nothing(self, result, course, tmp_path, monkeypatch, policy):
        """Nine rows in both orders; the empty one is not asked about."""
        monkeypatch.delenv("OPENAI_API_KEY", raising=False)
        asked = ("judge", "--candidate", policy(win=9, empty=1), *course["judging"], *OPENAI, "--estimate")
        [found] = result(*asked)
        assert (found["calls"], found["cached"]) == (18, 0) and found["input_tokens"] > 18 * 300
        assert not (tmp_path / "judge_cache.sqlite").exists()

    def test_openai_over_the_network_and_its_cache(self, run, result, course, tmp_path, monkeypatch, policy):
        """The server prefers the longer answer: the five right ones, and never "wrong", which is shorter than the two
        words of the base; so 5 wins and 2 losses, beside 3 ties of identical answers."""
        monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
        judge = ("judge", "--candidate", policy(**MIXED), *course["judging"], *OPENAI)
        with LoopbackServer() as server:
            own = ("--base_url", server.url)
            figures = result(*judge, *own)["candidates"][0]["win_rate"]
            assert (figures["agreed"]["rate"], figures["half"]["rate"]) == pytest.approx((5 / 7, 0.65))
            assert len(server.calls) == 14, "nothing is asked about identical answers: 2 x 7"
            assert result(*judge, *own)["usage"]["cached"] == 14
            grades = result("grade", "submission", *course["all"], *OPENAI, *own)["grades"]
            assert next(one for one in grades if one["method"] == "aot")["figure"] == pytest.approx(5 / 7)
            assert len(server.calls) == 14, "grading reads the same cache"
        # Where every verdict is in the cache no key is needed, and no server, but that it is one's own must be said.
        monkeypatch.delenv("OPENAI_API_KEY")
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        code, out, err = run(*judge)
        assert code == 0 and "\n0 calls, 14 verdicts from the cache" in out
        assert "sk-test" not in (tmp_path / "judge_cache.sqlite").read_bytes().decode("latin-1") + out + err

    def test_settings_of_the_judge(self, result, course, tmp_path, monkeypatch, policy):
        """They are sent, written into every result, and part of what a verdict is kept under."""
        monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
        path = policy(win=1, tie=9)
        (tmp_path / "rubric.md").write_text("Judge by rhyme.")
        settings = {"reasoning_effort": "none", "max_output_tokens": 220, "instructions": "rubric.md"}
        flags = [word for name, value in settings.items() for word in (f"--{name}", value)]
        with LoopbackServer() as server:
            options = (*OPENAI, "--base_url", server.url)
            judged = result("judge", "--candidate", path, *course["judging"], *options)["judge"]
            expected = {"kind": "openai", "model": "gpt-5.4", "instructions": None, "reasoning_effort": None}
            assert judged == {**expected, "max_output_tokens": 2048}
            # One row is asked about, in both orders, and then it is in the cache that the three commands share.
            for command in (
                ("judge", "--candidate", path, *course["judging"]),
                ("grade", "submission", *course["all"]),
                ("tournament", path, *course["judging"], "--out", "."),
            ):
                assert result(*command, *options, *flags)["judge"] == {**expected, **settings}
                assert len(server.calls) == 4
        body = server.calls[-1].body
        assert (body["reasoning_effort"], body["max_completion_tokens"]) == ("none", 220)
        assert body["messages"][0]["content"] == "Judge by rhyme."

    def test_your_own_function_as_the_judge(self, result, course, tmp_path):
        """Of ten responses, three are longer than the base's: 3 of 10. It is asked again when its file has changed.

        With an identity of None, its verdicts cost nothing and are not kept.
        """
        longer = (
            "def own(prompt, a, b):\n    open('asked', 'a').write('.')\n    return 'A' if len(a) > len(b) else 'B'\n"
        )
        (tmp_path / "mine.py").write_text(longer)
        (tmp_path / "free.py").write_text(f"{longer}own.identity = None\n")
        rows = enumerate(response_rows(plan(win=10)))
        rows = [{**row, "response_text": "x" * 500 if number < 3 else "x"} for number, row in rows]
        judge = ("judge", "--candidate", write_policy(tmp_path, "own", rows), *course["judging"], "--judge")

        def judged(source: str) -> tuple[float, int]:
            (candidate,) = result(*judge, f"{source}.py:own")["candidates"]
            return candidate["win_rate"]["half"]["rate"], (tmp_path / "asked").stat().st_size

        assert result(*judge, "mine.py:own", "--estimate")[0]["calls"] == 20
        assert judged("free") == (pytest.approx(0.3), 20) and not (tmp_path / "judge_cache.sqlite").exists()
        for asked in (40, 40):
            assert judged("mine") == (pytest.approx(0.3), asked)
        (tmp_path / "mine.py").write_text(longer.replace(">", "<"))
        os.utime(tmp_path / "mine.py", ns=(1, 1))
        assert judged("mine") == (pytest.approx(0.7), 60)

    def test_a_reward_model_as_the_judge(self, result, course, tmp_path, tiny_model_path, policy):
        """Each row's outcome is the sign of the difference of the rewards."""
        folder = save_full_model(tiny_model_path, tmp_path / "reward")
        options = ("--judge", "reward_model", "--model", folder)
        found = result("judge", "--candidate", policy(**MIXED), *course["judging"], *options)
        systems = response_rows(plan(**MIXED)), response_rows(plan(tie=10))
        prompts = [[{"role": "user", "content": row["prompt_text"]}] for row in systems[0]]
        own, other = (RewardModel(folder).score(prompts, [row["response_text"] for row in r]) for r in systems)
        # Equal texts have equal rewards, up to rounding in batches of different width.
        credits = [0.5 if abs(gap) < 1e-5 else float(gap > 0) for gap in (own - other).tolist()]
        assert credits[5:8] == [0.5] * 3 and set(credits) == {0.0, 0.5, 1.0}
        assert found["candidates"][0]["win_rate"]["half"]["rate"] == pytest.approx(sum(credits) / 10)

    def test_an_interrupt(self, run, course, policy):
        Path("mine.py").write_text("def judge(prompt, a, b):\n    raise KeyboardInterrupt\n")
        code, _, err = run("judge", "--candidate", policy(win=10), *course["judging"], "--judge", "mine.py:judge")
        assert code == 130 and err.endswith("what was finished is kept, and the same command resumes from there\n")

    def test_the_courses_own_files(self, result, wildchat, tmp_path):
        """The base as its own candidate, its answers doubled: a judge that prefers longer ones has it win all 128."""
        base = wildchat / "public_test_gen_base_responses_128.jsonl"
        rows = [{**row, "response_text": row["response_text"] * 2} for row in read_rows(base)]
        flags = ["--candidate", write_rows(tmp_path / "aot.jsonl", rows), "--base_jsonl", base]
        flags += ["--prompts_jsonl", wildchat / "public_test_gen_prompts_128.jsonl", *OPENAI]
        with LoopbackServer() as server:
            figures = result("judge", *flags, "--base_url", server.url)["candidates"][0]["win_rate"]
        assert (figures["agreed"]["rate"], figures["agreed"]["n"]) == (1.0, 128)


class TestGrade:
    def test_table_and_problems(self, run, course, policy):
        """Of ipo 5 wins, 3 ties and 2 losses: 7 of 10 rows count. Ties in both orders agree, and without a bias."""
        policy(win=8, loss=2)
        policy("ipo", **MIXED)
        bad = response_rows(plan(win=10))
        bad[4]["row_id"] = "elsewhere"
        path = write_policy(Path("submission"), "dpo", bad)
        write_scores(Path("submission"), [1.0, 2.0, 3.0, -1.0])
        code, out, _ = run("grade", "submission", *course["all"])
        assert code == 2, "a file that is there cannot be used"
        assert out.splitlines()[0].split("  ")[-2:] == ["agreement", "position bias"]
        lines = {line.split()[0]: line for line in out.splitlines() if line.strip()}
        for method, words in {
            "aot": ["PASS", "0.800", "0.72"],
            "reward_model": ["PASS", "0.750"],
            "ipo": ["PASS", "0.714 [0.359, 0.918]  n 7 of 10"],
            "dpo": ["FAIL", "2 bad rows"],
            "gspo": ["FAIL", "missing"],
        }.items():
            assert_one_line(lines[method], words)
        assert lines["ipo"].split()[-2:] == ["1.000", "0.000"] and lines["gspo"].split()[-2:] == ["-", "-"]
        assert f"cannot be graded: {path}: line 5: row_id elsewhere: foreign" in out
        assert "; row_id row-blue: missing\n" in out
        assert "3 of 9 passed; part two, by either file: FAIL" in out

    def test_exit_codes(self, run, course, policy):
        """Eight of nine files are missing, one method fails: 0. A NaN among the scores: 2, as in packing."""
        policy(win=2, loss=8)
        code, out, _ = run("grade", "submission", *course["all"])
        assert code == 0 and "0 of 9 passed" in out
        write_scores(Path("submission"), [1.0, 2.0, float("nan"), -1.0])
        code, out, _ = run("grade", "submission", *course["all"], "--json")
        assert code == 2 and "line 3: row_id pair-2: chosen_score: Input should be a finite number" in out
        grades = {row["method"]: row for row in json.loads(out)["grades"]}
        assert grades["aot"]["figure"] == 0.2, "the other file is graded all the same"
        assert run("pack", "submission", *course["prompts_jsonl"], *course["prefs_jsonl"])[0] == 2

    def test_the_courses_thresholds(self):
        thresholds = json.loads((REPOSITORY / "public_eval" / "thresholds.json").read_text())
        expected = {"reward_model": 0.74, "dpo": 0.68, "ipo": 0.55, "aot": 0.72, "grpo": 0.68, "drgrpo": 0.64}
        assert thresholds == {**expected, "gspo": 0.60, "offline_best": 0.83, "online_best": 0.75}


class TestTournament:
    def test_files_and_table(self, run, course, tmp_path, policy):
        """Nine points of ten against the base: 1000 + 400 log10(9) = 1382."""
        code, out, _ = run("tournament", policy("good", win=8, tie=2), *course["judging"], "--out", "t")
        row = out.splitlines()[2]
        assert code == 0 and row.split()[:2] == ["good", "1382"]
        assert re.search(r"0\.900 \[0\.\d{3}, \d\.\d{3}\]$", row)
        saved = json.loads((tmp_path / "t" / "tournament.json").read_text())
        assert saved["ratings"][0]["name"] == "good"
        [match] = saved["matches"]
        assert (match["first"], match["second"], match["rate"]) == ("base", "good", pytest.approx(0.1))
