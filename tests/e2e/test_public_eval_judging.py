"""`public_eval.judge` and `public_eval.grade` as a user runs them: figures, caches, costs, and errors in one line."""

from __future__ import annotations

import json
import os
from functools import partial

import pytest

from tests.support import REPOSITORY
from tests.support.files import read_rows
from tests.support.public_evaluation import (
    flags_of_course,
    one_line_error,
    plan,
    response_rows,
    run_command,
    write_policy,
    write_scores,
)
from tests.support.reward_adapters import save_full_model


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

    def test_openai_over_the_network_and_its_cache(self, run, course, tmp_path, monkeypatch):
        """The server prefers the longer answer: the five right ones, and never "wrong", which is shorter than the two
        words of the base; so 5 wins and 2 losses, beside 3 ties of identical answers."""
        from tests.support.loopback import LoopbackServer

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
        assert "sk-test" not in (tmp_path / "judge_cache.sqlite").read_bytes().decode("latin-1") + out + err

    def test_settings_of_the_judge(self, run, course, tmp_path, monkeypatch):
        """They are sent, written into every result, and part of what a verdict is kept under."""
        from tests.support.loopback import LoopbackServer

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
        from tests.support.loopback import Fault, LoopbackServer

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

    def test_a_reward_model_as_the_judge(self, run, course, tmp_path, tiny_model_path):
        """Each row's outcome is the sign of the difference of the rewards."""
        from trl_ext.rewards import RewardModel

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

    @pytest.mark.parametrize(
        "arguments, message",
        [
            (["--judge", "opnai"], "unknown --judge 'opnai'; did you mean 'openai'?"),
            (["--max_concurency", "4"], "unknown flag --max_concurency; did you mean"),
            (["--max_new_tokens", "0"], "--max_new_tokens: must be at least 1, got 0"),
            (["--max_new_tokens", "8"], "over the token budget: generated_num_tokens is 9, at most 8"),
        ],
    )
    def test_errors(self, run, course, tmp_path, arguments, message):
        path = write_policy(tmp_path, "aot", response_rows(plan(win=10)))
        line = one_line_error(run("judge", "--candidate", path, *course["judging"], *arguments))
        assert message in line

    def test_no_key_is_needed_where_every_verdict_is_in_the_cache(self, run, course, tmp_path, monkeypatch):
        """The server's address is part of no key, only that it is one's own: OPENAI_BASE_URL says so too."""
        from tests.support.loopback import LoopbackServer

        monkeypatch.delenv("OPENAI_API_KEY", raising=False)
        path = write_policy(tmp_path, "aot", response_rows(plan(win=10)))
        options = ("--judge", "openai", "--model", "gpt-5.4", "--json")
        with LoopbackServer() as server:
            assert run("judge", "--candidate", path, *course["judging"], *options, "--base_url", server.url)[0] == 0
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        code, out, _ = run("judge", "--candidate", path, *course["judging"], *options)
        assert (code, json.loads(out)["usage"]["cached"]) == (0, 20)

    def test_the_wrong_api_ends_the_command_with_the_way_out(self, run, course, tmp_path, monkeypatch):
        from tests.support.loopback import Fault, LoopbackServer

        monkeypatch.delenv("OPENAI_API_KEY", raising=False)
        path = write_policy(tmp_path, "aot", response_rows(plan(win=10)))
        with LoopbackServer(faults=lambda question, attempt: Fault("not_the_api")) as server:
            options = ("--judge", "openai", "--model", "m", "--base_url", server.url)
            line = one_line_error(run("judge", "--candidate", path, *course["judging"], *options))
        assert "a server that speaks only Chat Completions needs --api chat" in line

    def test_an_interrupt(self, run, course, tmp_path, monkeypatch):
        """Before the first verdict: none of 20 is there, which it says."""
        from trl_ext.evaluation.judging.run import JudgingRun

        def interrupt(self, questions):
            raise KeyboardInterrupt

        monkeypatch.setattr(JudgingRun, "ask_all", interrupt)
        path = write_policy(tmp_path, "aot", response_rows(plan(win=10)))
        options = ("--judge", "openai", "--model", "m", "--base_url", "http://127.0.0.1:9/v1")
        code, _, err = run("judge", "--candidate", path, *course["judging"], *options)
        kept = "interrupted: 0 of 20 verdicts are kept in judge_cache.sqlite, and the same command goes on from there"
        assert (code, err.strip()) == (130, kept)
        code, _, err = run("judge", "--candidate", path, *course["judging"])
        assert (code, err.strip()) == (
            130,
            "interrupted: no verdict is kept, since there is no cache of them: run again",
        )


class TestGrade:
    def test_table_and_problems(self, run, course, tmp_path):
        folder = tmp_path / "submission"
        write_policy(folder, "aot", response_rows(plan(win=8, loss=2)))
        bad = response_rows(plan(win=10))
        bad[4]["row_id"] = "elsewhere"
        path = write_policy(folder, "dpo", bad)
        write_scores(folder, [1.0, 2.0, 3.0, -1.0])
        code, out, _ = run("grade", folder, *course["all"], "--out", "grades.json")
        assert code == 2, "a file that is there cannot be used"
        lines = {line.split()[0]: line for line in out.splitlines() if line.strip()}
        assert "PASS" in lines["aot"] and "0.800" in lines["aot"] and "0.72" in lines["aot"]
        assert "PASS" in lines["reward_model"] and "0.750" in lines["reward_model"]
        assert "FAIL" in lines["dpo"] and "2 bad rows" in lines["dpo"]
        assert "FAIL" in lines["gspo"] and "missing" in lines["gspo"]
        assert f"cannot be graded: {path}: row_id elsewhere: line 5: foreign" in out
        assert f"cannot be graded: {path}: row_id row-blue: missing" in out
        assert "2 of 9 passed; part two, by either file: FAIL" in out
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
        """
        folder = tmp_path / "submission"
        write_policy(folder, "aot", response_rows(plan(win=10)))
        options = ("--tokenizer", tiny_model_path, "--json", "--max_new_tokens")
        for limit, over in ((22, []), (19, ["captain"]), (18, ["banana", "captain", "carrot", "castle"])):
            _, out, _ = run("grade", folder, *course["all"], *options, limit)
            grade = next(g for g in json.loads(out)["grades"] if g["method"] == "aot")
            assert [line.split("row-")[1].split(":")[0] for line in grade["problems"]] == over
            assert grade["passed"] is not bool(over)

    def test_rows_that_do_not_count_are_shown(self, run, course, tmp_path):
        """5 wins, 3 ties, 2 losses: 7 of 10 count. Ties in both orders are agreement, and without a bias."""
        write_policy(tmp_path / "submission", "aot", response_rows(plan(win=5, tie=3, loss=2)))
        code, out, _ = run("grade", "submission", *course["all"])
        lines = {line.split()[0]: line for line in out.splitlines() if line.strip()}
        assert code == 0
        assert "0.714  [0.359, 0.918]  n 7 of 10" in lines["aot"]
        assert lines["aot"].split()[-2:] == ["1.000", "0.000"]
        assert out.splitlines()[0].split("  ")[-2:] == ["agreement", "position bias"]
        assert lines["gspo"].split()[-3:] == ["-", "-", "-"], "no chance, agreement or bias of a missing file"

    def test_estimate(self, run, course, tmp_path):
        folder = tmp_path / "submission"
        write_policy(folder, "aot", response_rows(plan(win=10)))
        write_policy(folder, "dpo", response_rows(plan(win=10))[1:])
        options = ("--judge", "openai", "--model", "gpt-5.4", "--estimate", "--json")
        code, out, _ = run("grade", folder, *course["all"], *options)
        assert code == 0
        assert {name: row["calls"] for name, row in json.loads(out)["estimates"].items()} == {"aot": 20}

    def test_no_folder(self, run):
        error = one_line_error(run("grade", "nowhere"))
        assert "no folder nowhere: make a policy's file with `python -m public_eval.generate --model RUN" in error
        assert "score --reward_model RUN --out nowhere/reward_model/public_test_pref_scores.jsonl`" in error

    def test_the_courses_thresholds(self):
        thresholds = json.loads((REPOSITORY / "public_eval" / "thresholds.json").read_text())
        assert thresholds == {
            "reward_model": 0.74,
            "dpo": 0.68,
            "ipo": 0.55,
            "aot": 0.72,
            "grpo": 0.68,
            "drgrpo": 0.64,
            "gspo": 0.60,
            "offline_best": 0.83,
            "online_best": 0.75,
        }
