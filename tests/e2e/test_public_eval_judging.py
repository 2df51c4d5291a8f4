"""`public_eval.judge` and `public_eval.grade` as a user runs them: figures, caches, costs, and errors in one line."""

from __future__ import annotations

import json
import os
from functools import partial

import pytest

from tests.support import REPOSITORY
from tests.support.files import read_rows, write_rows
from tests.support.loopback import Fault, LoopbackServer
from tests.support.public_evaluation import (
    flags_of_course,
    one_line_error,
    plan,
    response_rows,
    run_command,
    write_policy,
    write_scores,
)
from tests.support.refusals import assert_one_line
from tests.support.reward_adapters import save_full_model
from trl_ext.evaluation.judging.run import JudgingRun
from trl_ext.rewards import RewardModel


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return partial(run_command, capsys)


@pytest.fixture
def course(tmp_path):
    return flags_of_course(tmp_path)


class TestJudge:
    def test_figures(self, run, course, tmp_path):
        """5 wins, 3 ties and 2 losses: 5 / 7 and 6.5 / 10; against 7 wins and 3 losses: 0.7."""
        first = write_policy(tmp_path, "aot", response_rows(plan(win=5, tie=3, loss=2)))
        second = write_policy(tmp_path, "dpo", response_rows(plan(win=7, loss=3)))
        written = ["--json", "--out", "j.json", "--verdicts", "v.jsonl"]
        code, out, _ = run("judge", "--candidate", first, second, *course["judging"], *written)
        assert code == 0
        result = json.loads(out)
        assert json.loads((tmp_path / "j.json").read_text()) == result
        rates = [
            (c["name"], c["win_rate"]["agreed"]["rate"], c["win_rate"]["half"]["rate"]) for c in result["candidates"]
        ]
        assert rates == [("aot", pytest.approx(5 / 7), pytest.approx(0.65)), ("dpo", 0.7, 0.7)]
        (difference,) = result["differences"]
        assert difference["candidates"] == ["aot", "dpo"]
        assert difference["difference"] == pytest.approx(5 / 7 - 0.7)
        controlled = result["candidates"][0]["length_controlled"]
        assert (controlled["n"], controlled["raw"]) == (10, pytest.approx(0.65))
        verdicts = read_rows(tmp_path / "v.jsonl")
        assert len(verdicts) == 20
        assert [row["outcome"] for row in verdicts[:10]] == ["candidate"] * 5 + ["tie"] * 3 + ["base"] * 2
        out = run("judge", "--candidate", first, *course["judging"])[1]
        assert "0.714  [0.359, 0.918]  n 7" in out and "0.650" in out and "position bias  length bias" in out
        # Seven rows are asked about in both orders; the three ties are identical texts.
        assert out.endswith("14 verdicts (equal responses need none), 0 errors; this judge costs nothing\n")

    def test_estimate_sends_nothing(self, run, course, tmp_path, monkeypatch):
        monkeypatch.delenv("OPENAI_API_KEY", raising=False)
        path = write_policy(tmp_path, "aot", response_rows(plan(win=9, empty=1)))
        options = ("--judge", "openai", "--model", "m", "--estimate", "--json", "--price_in", "1", "--price_out", "9")
        code, out, _ = run("judge", "--candidate", path, *course["judging"], *options)
        assert code == 0
        assert json.loads(out)["total"]["calls"] == 18, "nine rows in both orders; the empty one is not asked about"
        assert json.loads(out)["total"]["dollars"] > 0
        assert not (tmp_path / "judge_cache.sqlite").exists()

    def test_openai_over_the_network_and_its_cache(self, run, course, tmp_path, monkeypatch):
        """The server prefers the longer answer: the five right ones, and never "wrong", which is shorter than the two
        words of the base; so 5 wins and 2 losses, beside 3 ties of identical answers."""
        monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
        path = write_policy(tmp_path, "aot", response_rows(plan(win=5, tie=3, loss=2)))
        with LoopbackServer() as server:
            options = ("--judge", "openai", "--model", "gpt-5.4", "--base_url", server.url, "--json")
            code, out, err = run("judge", "--candidate", path, *course["judging"], *options)
            assert code == 0, err
            figures = json.loads(out)["candidates"][0]["win_rate"]
            assert figures["agreed"]["rate"] == pytest.approx(5 / 7)
            assert figures["half"]["rate"] == pytest.approx(0.65)
            asked = len(server.calls)
            # Nothing is asked about identical answers: 2 x 7.
            assert asked == 14
            code, out, _ = run("judge", "--candidate", path, *course["judging"], *options)
            assert len(server.calls) == asked, "everything was in the cache"
            assert json.loads(out)["usage"]["cached"] == 14
            folder = tmp_path / "submission"
            write_policy(folder, "aot", response_rows(plan(win=5, tie=3, loss=2)))
            code, out, _ = run("grade", folder, *course["all"], *options)
            assert len(server.calls) == asked, "grading reads the same cache"
            grade = next(g for g in json.loads(out)["grades"] if g["method"] == "aot")
            assert grade["figure"] == pytest.approx(5 / 7)
        # Where every verdict is in the cache no key is needed, and no server. Its address is part of no key of the
        # cache, only that it is one's own: OPENAI_BASE_URL says so too.
        monkeypatch.delenv("OPENAI_API_KEY")
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        code, out, _ = run("judge", "--candidate", path, *course["judging"], *options[:4], "--json")
        assert (code, json.loads(out)["usage"]["cached"]) == (0, 14)
        assert "sk-test" not in (tmp_path / "judge_cache.sqlite").read_bytes().decode("latin-1") + out + err

    def test_settings_of_the_judge(self, run, course, tmp_path, monkeypatch):
        """They are sent, written into every result, and part of what a verdict is kept under."""
        monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
        rows = response_rows(plan(win=1, tie=9))
        path = write_policy(tmp_path / "submission", "aot", rows)
        (tmp_path / "rubric.md").write_text("Judge by rhyme.")
        settings = ("--reasoning_effort", "none", "--max_output_tokens", "220", "--instructions", "rubric.md")
        expected = {"kind": "openai", "model": "m", "instructions": None, "reasoning_effort": None}
        with LoopbackServer() as server:
            options = ("--judge", "openai", "--model", "m", "--base_url", server.url, "--json")
            commands = {
                "judge": ("--candidate", path, *course["judging"], "--out", "judge.json"),
                "grade": ("submission", *course["all"], "--out", "grade.json"),
                "tournament": (path, *course["judging"], "--out", "."),
            }
            # Under the defaults one row is asked about, in both orders, and then it is in the cache.
            for command in commands:
                code, out, err = run(command, *commands[command], *options)
                assert (code, json.loads(out)["judge"]) == (0, {**expected, "max_output_tokens": 2048}), err
            assert len(server.calls) == 2 and "reasoning" not in server.calls[0].body
            told = {**expected, "reasoning_effort": "none", "max_output_tokens": 220, "instructions": "rubric.md"}
            # Every setting that is added to those before it asks anew, and the three commands share its verdicts.
            for count in (2, 4, 6):
                for command in commands:
                    assert run(command, *commands[command], *options, *settings[:count])[0] == 0
                assert len(server.calls) == 2 + count
            for command in commands:
                assert json.loads((tmp_path / f"{command}.json").read_text())["judge"] == told
            body = server.calls[-1].body
            assert (body["reasoning"], body["max_output_tokens"]) == ({"effort": "none"}, 220)
            assert body["instructions"] == "Judge by rhyme."

    def test_errors_above_the_limit_end_with_a_code(self, run, course, tmp_path, monkeypatch):
        monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
        path = write_policy(tmp_path, "aot", response_rows(plan(win=10)))

        def refuse_axes(question, attempt):
            return Fault("refusal") if "axe" in question[0] else None

        with LoopbackServer(faults=refuse_axes) as server:
            options = ("--judge", "openai", "--model", "gpt-5.4", "--base_url", server.url)
            result = run("judge", "--candidate", path, *course["judging"], *options, "--max_error_fraction", "0.05")
            line = one_line_error(result)
            assert "1 of 10 rows could not be judged" in line and "row-axe" in line
            assert run("judge", "--candidate", path, *course["judging"], *options)[0] == 0

    def test_your_own_function_as_the_judge(self, run, course, tmp_path):
        """Of ten responses, three are longer than the base's: 3 of 10. It is asked again when its file has changed."""
        asked = "    open('asked', 'a').write('.')\n"
        longer = f"def longer(prompt, a, b):\n{asked}    return 'A' if len(a) > len(b) else 'B'\n"
        (tmp_path / "mine.py").write_text(longer)
        rows = [
            {**row, "response_text": "x" * 500 if i < 3 else "x"} for i, row in enumerate(response_rows(plan(win=10)))
        ]
        policy = write_policy(tmp_path, "own", rows)
        flags = ["--candidate", policy, *course["judging"], "--judge", "mine.py:longer", "--json"]

        def judged() -> tuple[float, int]:
            code, out, err = run("judge", *flags)
            assert code == 0, err
            (candidate,) = json.loads(out)["candidates"]
            return candidate["win_rate"]["half"]["rate"], (tmp_path / "asked").stat().st_size

        code, out, _ = run("judge", *flags, "--estimate")
        estimate = json.loads(out)
        assert (code, estimate["total"]["calls"], estimate["total"]["dollars"]) == (0, 20, None)
        assert estimate["notes"] == ["this judge does not say what it costs"]
        assert judged() == (pytest.approx(0.3), 20)
        assert judged() == (pytest.approx(0.3), 20)
        (tmp_path / "mine.py").write_text(longer.replace(">", "<"))
        os.utime(tmp_path / "mine.py", ns=(1, 1))
        assert judged() == (pytest.approx(0.7), 40)

    def test_your_own_judge_may_say_what_its_verdicts_depend_on(self, run, course, tmp_path):
        """With an identity of None, its verdicts cost nothing and are not kept."""
        source = "def free(prompt, a, b):\n    return 'A' if a > b else 'B'\nfree.identity = None\n"
        (tmp_path / "free.py").write_text(source)
        flags = ["--candidate", write_policy(tmp_path, "own", response_rows(plan(win=10)))]
        flags += [*course["judging"], "--judge", "free.py:free", "--json"]
        total = json.loads(run("judge", *flags, "--estimate")[1])["total"]
        assert (total["calls"], total["dollars"]) == (20, 0.0)
        assert run("judge", *flags)[0] == 0 and not (tmp_path / "judge_cache.sqlite").exists()

    def test_a_reward_model_as_the_judge(self, run, course, tmp_path, tiny_model_path):
        """Each row's outcome is the sign of the difference of the rewards."""
        folder = save_full_model(tiny_model_path, tmp_path / "reward")
        rows = response_rows(plan(win=5, tie=3, loss=2))
        base = response_rows(plan(tie=10))
        path = write_policy(tmp_path, "aot", rows)
        options = ("--judge", "reward_model", "--model", folder, "--json")
        code, out, err = run("judge", "--candidate", path, *course["judging"], *options)
        assert code == 0, err
        model = RewardModel(folder)
        prompts = [[{"role": "user", "content": row["prompt_text"]}] for row in rows]
        own, other = (model.score(prompts, [row["response_text"] for row in r]).tolist() for r in (rows, base))
        # Equal texts have equal rewards, up to rounding in batches of different width.
        credits = [0.5 if abs(a - b) < 1e-5 else float(a > b) for a, b in zip(own, other, strict=True)]
        assert credits[5:8] == [0.5] * 3 and set(credits) == {0.0, 0.5, 1.0}
        figures = json.loads(out)["candidates"][0]["win_rate"]
        assert figures["half"]["rate"] == pytest.approx(sum(credits) / 10)

    def test_an_interrupt(self, run, course, tmp_path, monkeypatch):
        """Before the first verdict: none of 20 is there, which it says."""

        def interrupt(self, questions):
            raise KeyboardInterrupt

        monkeypatch.setattr(JudgingRun, "ask_all", interrupt)
        path = write_policy(tmp_path, "aot", response_rows(plan(win=10)))
        openai = ("--judge", "openai", "--model", "m", "--base_url", "http://127.0.0.1:9/v1")
        for options, words in ((openai, ["0 of 20 verdicts", "judge_cache.sqlite"]), ((), ["no verdict is kept"])):
            code, _, err = run("judge", "--candidate", path, *course["judging"], *options)
            assert code == 130
            assert_one_line(err, ["interrupted: ", *words])


class TestGrade:
    def test_table_and_problems(self, run, course, tmp_path):
        """Of ipo 5 wins, 3 ties and 2 losses: 7 of 10 rows count. Ties in both orders agree, and without a bias."""
        folder = tmp_path / "submission"
        write_policy(folder, "aot", response_rows(plan(win=8, loss=2)))
        write_policy(folder, "ipo", response_rows(plan(win=5, tie=3, loss=2)))
        bad = response_rows(plan(win=10))
        bad[4]["row_id"] = "elsewhere"
        path = write_policy(folder, "dpo", bad)
        write_scores(folder, [1.0, 2.0, 3.0, -1.0])
        code, out, _ = run("grade", folder, *course["all"], "--out", "grades.json")
        assert code == 2, "a file that is there cannot be used"
        lines = {line.split()[0]: line for line in out.splitlines() if line.strip()}
        for method, words in {
            "aot": ["PASS", "0.800", "0.72"],
            "reward_model": ["PASS", "0.750"],
            "ipo": ["PASS", "0.714  [0.359, 0.918]  n 7 of 10"],
            "dpo": ["FAIL", "2 bad rows"],
            "gspo": ["FAIL", "missing"],
        }.items():
            assert_one_line(lines[method], words)
        assert lines["ipo"].split()[-2:] == ["1.000", "0.000"]
        assert out.splitlines()[0].split("  ")[-2:] == ["agreement", "position bias"]
        assert lines["gspo"].split()[-3:] == ["-", "-", "-"], "no chance, agreement or bias of a missing file"
        assert f"cannot be graded: {path}: row_id elsewhere: line 5: foreign" in out
        assert f"cannot be graded: {path}: row_id row-blue: missing" in out
        assert "3 of 9 passed; part two, by either file: FAIL" in out
        assert len(json.loads((tmp_path / "grades.json").read_text())["grades"]) == 9

    def test_exit_codes(self, run, course, tmp_path):
        """Eight of nine files are missing, one method fails: 0. A NaN among the scores: 2, as in packing."""
        folder = tmp_path / "submission"
        write_policy(folder, "aot", response_rows(plan(win=2, loss=8)))
        code, out, _ = run("grade", folder, *course["all"])
        assert code == 0 and "0 of 9 passed" in out
        path = write_scores(folder, [1.0, 2.0, float("nan"), -1.0])
        for more in ((), ("--json",)):
            code, out, _ = run("grade", folder, *course["all"], *more)
            assert code == 2 and "row_id pair-2: chosen_score: Input should be a finite number, got nan" in out
            if more:
                grades = {row["method"]: row for row in json.loads(out)["grades"]}
                assert grades["aot"]["figure"] == 0.2, "the other file is graded all the same"
            else:
                assert "0.200" in out
        assert run("pack", folder, *course["prompts_jsonl"], *course["prefs_jsonl"])[0] == 2
        assert path.name in out
        assert "exit    0 whatever the grades" in run("grade", "--help")[1]

    def test_an_empty_file_and_one_of_many_problems(self, run, course, tmp_path):
        """Ten rows that are all foreign, and so ten missing: twenty problems, of which five are shown, in one line."""
        folder = tmp_path / "submission"
        empty = write_policy(folder, "aot", [])
        foreign = [{**row, "row_id": f"other-{row['row_id']}"} for row in response_rows(plan(win=10))]
        path = write_policy(folder, "dpo", foreign)
        code, out, _ = run("grade", folder, *course["all"])
        assert code == 2
        assert f"cannot be graded: {empty}: the file is empty\n" in out
        assert out.count(str(path)) == 1 and "; and 15 more" in out
        assert one_line_error(run("judge", "--candidate", empty, *course["judging"])) == (
            f"error: {empty}: the file is empty"
        )
        line = one_line_error(run("judge", "--candidate", path, *course["judging"]))
        assert line.count(str(path)) == 1 and line.count("row_id") == 5 and line.endswith("; and 15 more")

    def test_tokens_are_counted_by_a_tokenizer(self, run, course, tmp_path, tiny_model_path):
        """Bytes are tokens here: three words of w letters, two commas, two spaces and a full stop have 3 w + 5.

        26 for captain, 23 for banana, carrot and castle, 20 for beach and black; four over the limit are let pass.
        Even three letters are over a limit of 9: nothing is left to judge.
        """
        folder = tmp_path / "submission"
        write_policy(folder, "aot", response_rows(plan(win=10)))
        options = ("--tokenizer", tiny_model_path, "--json", "--max_new_tokens")
        for limit, over in ((22, []), (19, ["captain"]), (18, ["banana", "captain", "carrot", "castle"])):
            _, out, _ = run("grade", folder, *course["all"], *options, limit)
            grade = next(g for g in json.loads(out)["grades"] if g["method"] == "aot")
            assert [line.split("row-")[1].split(":")[0] for line in grade["problems"]] == over
            assert grade["passed"] is not bool(over)
        line = one_line_error(run("grade", folder, *course["all"], "--estimate", *options, 9))
        assert "holds no policy's file that could be judged" in line
        write_policy(folder, "dpo", response_rows(plan(win=10))[1:])
        openai = ("--judge", "openai", "--model", "gpt-5.4", "--estimate", "--json")
        estimates = json.loads(run("grade", folder, *course["all"], *openai)[1])["estimates"]
        assert {name: row["calls"] for name, row in estimates.items()} == {"aot": 20}, "and not dpo, a row short"

    def test_the_courses_thresholds(self):
        thresholds = json.loads((REPOSITORY / "public_eval" / "thresholds.json").read_text())
        expected = {"reward_model": 0.74, "dpo": 0.68, "ipo": 0.55, "aot": 0.72, "grpo": 0.68, "drgrpo": 0.64}
        assert thresholds == {**expected, "gspo": 0.60, "offline_best": 0.83, "online_best": 0.75}


def test_the_courses_own_files(run, wildchat, tmp_path):
    """The base as its own candidate, its answers doubled: a judge that prefers longer ones has it win all 128."""
    rows = [json.loads(line) for line in (wildchat / "public_test_gen_base_responses_128.jsonl").open()]
    path = write_rows(tmp_path / "aot.jsonl", [{**row, "response_text": row["response_text"] * 2} for row in rows])
    with LoopbackServer() as server:
        code, out, err = run(
            "judge",
            *("--candidate", path),
            *("--prompts_jsonl", wildchat / "public_test_gen_prompts_128.jsonl"),
            *("--base_jsonl", wildchat / "public_test_gen_base_responses_128.jsonl"),
            *("--judge", "openai", "--model", "some-model", "--base_url", server.url, "--json"),
        )
    assert code == 0, err
    figures = json.loads(out)["candidates"][0]["win_rate"]
    assert (figures["agreed"]["rate"], figures["agreed"]["n"]) == (1.0, 128)
