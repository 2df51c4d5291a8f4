"""The commands of the public evaluation as a user runs them: results, files, and errors in one line."""

import importlib
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.reward_adapters import save_full_model
from tests.test_grading import plan, response_rows, write_assets, write_lines, write_policy, write_scores

ROOT = Path(__file__).parent.parent
COMMANDS = ("generate", "score", "judge", "grade", "pack", "tournament")


def call(command, *arguments):
    """Run a command in this process; returns its exit code."""
    module = "trl_ext.evaluation.stages" if command == "stages" else f"public_eval.{command}"
    try:
        importlib.import_module(module).main([str(argument) for argument in arguments])
    except SystemExit as end:
        return end.code
    return 0


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """Run a command in an empty folder; returns its exit code, and what it wrote to standard output and error."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        code = call(*arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def course(tmp_path):
    """Flags that name ten prompts, their base responses, and four pairs."""
    files = write_assets(tmp_path / "assets")
    flags = {name: [f"--{name}", path] for name, path in files.items()}
    flags["judging"] = flags["prompts_jsonl"] + flags["base_jsonl"]
    flags["all"] = flags["judging"] + flags["prefs_jsonl"]
    return flags


def one_line_error(result):
    code, out, err = result
    assert code == 2
    assert out == ""
    lines = [
        line for line in err.replace("\r", "\n").splitlines() if line.strip() and not line.startswith("verdicts:")
    ]
    assert len(lines) == 1 and lines[0].startswith("error: "), err
    return lines[0]


class TestHelp:
    @pytest.mark.parametrize("module", [*(f"public_eval.{name}" for name in COMMANDS), "trl_ext.evaluation.stages"])
    def test_says_what_it_costs_and_writes(self, module, capsys):
        assert call(module.rpartition(".")[2], "--help") == 0
        text = capsys.readouterr().out
        assert f"python -m {module}" in text
        assert "\ncost  " in text and "\nwrites  " in text
        assert "--json" in text

    def test_as_modules(self, tmp_path):
        """`python -m` finds the commands, without a warning of modules imported twice."""
        for module in ("public_eval.pack", "trl_ext.evaluation.stages"):
            done = subprocess.run(
                [sys.executable, "-W", "error", "-m", module, "--help"], cwd=ROOT, capture_output=True, text=True
            )
            assert (done.returncode, done.stderr) == (0, "")


class TestJudge:
    def test_figures(self, run, course, tmp_path):
        """5 wins, 3 ties and 2 losses: 5 / 7 and 6.5 / 10; against 7 wins and 3 losses: 0.7."""
        first = write_policy(tmp_path, "aot", response_rows(plan(win=5, tie=3, loss=2)))
        second = write_policy(tmp_path, "dpo", response_rows(plan(win=7, loss=3)))
        code, out, _ = run(
            "judge",
            "--candidate",
            first,
            second,
            *course["judging"],
            "--json",
            "--out",
            "j.json",
            "--verdicts",
            "v.jsonl",
        )
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
        verdicts = [json.loads(line) for line in (tmp_path / "v.jsonl").read_text().splitlines()]
        assert len(verdicts) == 20
        assert [row["outcome"] for row in verdicts[:10]] == ["candidate"] * 5 + ["tie"] * 3 + ["base"] * 2

    def test_table(self, run, course, tmp_path):
        path = write_policy(tmp_path, "aot", response_rows(plan(win=5, tie=3, loss=2)))
        code, out, _ = run("judge", "--candidate", path, *course["judging"])
        assert code == 0
        assert "0.714  [0.359, 0.918]  n 7" in out
        assert "0.650" in out and "without its difficulty term" in out

    def test_estimate_sends_nothing(self, run, course, tmp_path, monkeypatch):
        monkeypatch.delenv("OPENAI_API_KEY", raising=False)
        path = write_policy(tmp_path, "aot", response_rows(plan(win=9, empty=1)))
        options = ("--judge", "openai", "--model", "gpt-5.4", "--estimate", "--json")
        code, out, _ = run("judge", "--candidate", path, *course["judging"], *options)
        assert code == 0
        assert json.loads(out)["total"]["calls"] == 18, "nine rows in both orders; the empty one is not asked about"
        assert json.loads(out)["total"]["dollars"] > 0
        assert not (tmp_path / "judge_cache.jsonl").exists()

    def test_openai_over_the_network_and_its_cache(self, run, course, tmp_path, monkeypatch):
        """The server prefers the longer answer: the five right ones, and never "wrong", which is shorter than the two
        words of the base; so 5 wins and 2 losses, beside 3 ties of identical answers."""
        from tests.loopback import LoopbackServer

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
        assert "sk-test" not in (tmp_path / "judge_cache.jsonl").read_text() + out + err

    def test_settings_of_the_judge(self, run, course, tmp_path, monkeypatch):
        """They are sent, written into every result, and part of what a verdict is kept under."""
        from tests.loopback import LoopbackServer

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
        from tests.loopback import Fault, LoopbackServer

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
            (["--judge", "openai"], "--judge openai needs --model, such as gpt-5.4"),
            (["--judge", "reward_model"], "--judge reward_model needs --model"),
            (["--model", "gpt-5.4"], "--model is for --judge openai or reward_model"),
            (["--reasoning_effort", "low"], "--reasoning_effort is for --judge openai alone"),
            (["--max_output_tokens", "220"], "--max_output_tokens is for --judge openai alone"),
            (["--judge", "openai", "--model", "m", "--max_output_tokens", "0"], "must be at least 1, got 0"),
            (["--judge", "opnai"], "invalid choice: 'opnai'"),
            (["--max_concurency", "4"], "unknown flag --max_concurency, did you mean"),
            (["--max_new_tokens", "0"], "--max_new_tokens: must be at least 1, got 0"),
            (["--max_new_tokens", "8"], "over the token budget: generated_num_tokens is 9, at most 8"),
        ],
    )
    def test_errors(self, run, course, tmp_path, arguments, message):
        path = write_policy(tmp_path, "aot", response_rows(plan(win=10)))
        line = one_line_error(run("judge", "--candidate", path, *course["judging"], *arguments))
        assert message in line or message.replace(", did you mean", "") in line

    def test_two_files_of_one_name(self, run, course, tmp_path):
        paths = [write_policy(tmp_path / name, "aot", response_rows(plan(win=10))) for name in ("a", "b")]
        assert "two files are called aot" in one_line_error(run("judge", "--candidate", *paths, *course["judging"]))

    def test_no_key(self, run, course, tmp_path, monkeypatch):
        monkeypatch.delenv("OPENAI_API_KEY", raising=False)
        monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
        path = write_policy(tmp_path, "aot", response_rows(plan(win=10)))
        options = ("--judge", "openai", "--model", "gpt-5.4")
        line = one_line_error(run("judge", "--candidate", path, *course["judging"], *options))
        assert "OPENAI_API_KEY is not set" in line

    def test_no_key_is_needed_where_every_verdict_is_in_the_cache(self, run, course, tmp_path, monkeypatch):
        """The server's address is part of no key, only that it is one's own: OPENAI_BASE_URL says so too."""
        from tests.loopback import LoopbackServer

        monkeypatch.delenv("OPENAI_API_KEY", raising=False)
        path = write_policy(tmp_path, "aot", response_rows(plan(win=10)))
        options = ("--judge", "openai", "--model", "gpt-5.4", "--json")
        with LoopbackServer() as server:
            assert run("judge", "--candidate", path, *course["judging"], *options, "--base_url", server.url)[0] == 0
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        code, out, _ = run("judge", "--candidate", path, *course["judging"], *options)
        assert (code, json.loads(out)["usage"]["cached"]) == (0, 20)

    def test_the_wrong_api_ends_the_command_with_the_way_out(self, run, course, tmp_path, monkeypatch):
        from tests.loopback import Fault, LoopbackServer

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
        kept = "interrupted: 0 of 20 verdicts are kept in judge_cache.jsonl, and the same command goes on from there"
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
            assert code == 2 and "row_id pair-2: chosen_score must be a finite number, got 'nan'" in out
            assert "0.200" in out or json.loads(out)["grades"], "the other file is graded all the same"
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

    def test_what_costs_nothing_is_not_counted_in_calls(self, run, course, tmp_path):
        """Seven rows are asked about in both orders; the three ties are identical texts."""
        path = write_policy(tmp_path / "submission", "aot", response_rows(plan(win=5, tie=3, loss=2)))
        for command in (("grade", "submission", *course["all"]), ("judge", "--candidate", path, *course["judging"])):
            out = run(*command)[1]
            assert out.endswith("14 verdicts (equal responses need none), 0 errors; this judge costs nothing\n")
            assert "calls" not in out and "$" not in out

    def test_json_alone_on_standard_output(self, run, course, tmp_path):
        folder = tmp_path / "submission"
        write_policy(folder, "aot", response_rows(plan(win=8, loss=2)))
        code, out, _ = run("grade", folder, *course["all"], "--json")
        assert (code, json.loads(out)["passed"]) == (0, 1)

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

    def test_estimate_leaves_out_what_would_not_be_judged(self, run, course, tmp_path, tiny_model_path):
        """Three words of three letters are 14 bytes: over a limit of 9 and a slack of 4, as in grading."""
        write_policy(tmp_path / "submission", "aot", response_rows(plan(win=10)))
        options = ("--estimate", "--tokenizer", tiny_model_path, "--max_new_tokens", "9")
        line = one_line_error(run("grade", "submission", *course["all"], *options))
        assert "holds no policy's file that could be judged" in line

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

    def test_bad_thresholds(self, run, tmp_path):
        (tmp_path / "t.json").write_text('{"aot": 72}')
        line = one_line_error(run("grade", tmp_path, "--thresholds", "t.json"))
        assert "t.json: aot: must be a rate between 0 and 1, got 72" in line

    def test_the_courses_thresholds(self):
        thresholds = json.loads((ROOT / "public_eval" / "thresholds.json").read_text())
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


class TestGenerateScorePack:
    def test_from_models_to_the_archive(self, run, course, tmp_path, tiny_model_path):
        reward_model = save_full_model(tiny_model_path, tmp_path / "reward")
        out = tmp_path / "submission" / "policy_generations" / "aot.jsonl"
        scores = tmp_path / "submission" / "reward_model" / "public_test_pref_scores.jsonl"
        generate = ("generate", "--model", tiny_model_path, "--out", out, *course["prompts_jsonl"])
        code, text, err = run(*generate, "--max_new_tokens", "4", "--json")
        assert (code, json.loads(text)["rows"]) == (0, 10), err
        assert "responses: 100%" in err or os.environ.get("TQDM_DISABLE")
        code, text, _ = run("score", "--reward_model", reward_model, "--out", scores, *course["prefs_jsonl"], "--json")
        rows = [json.loads(line) for line in scores.read_text().splitlines()]
        accuracy = sum(row["chosen_score"] > row["rejected_score"] for row in rows) / 4
        assert (code, json.loads(text)["accuracy"]) == (0, accuracy)
        options = (*course["prompts_jsonl"], *course["prefs_jsonl"], "--max_new_tokens", "4")
        code, text, _ = run("pack", "submission", *options)
        assert code == 0
        assert "2 files, 7 missing" in text
        assert len(zipfile.ZipFile(tmp_path / "submission.zip").namelist()) == 2
        line = one_line_error(run("pack", "submission", *options))
        assert "submission.zip exists: choose another --out, or replace it with --overwrite" in line
        # Other settings do not overwrite, and say so.
        line = one_line_error(run(*generate, "--max_new_tokens", "5"))
        assert "made with max_new_tokens 4, not with max_new_tokens 5" in line

    def test_damaged_rows_are_not_packed(self, run, course, tmp_path):
        rows = response_rows(plan(win=10))
        path = write_policy(tmp_path / "submission", "aot", [*rows, rows[3]])
        line = one_line_error(run("pack", "submission", *course["prompts_jsonl"], *course["prefs_jsonl"]))
        assert f"{path.relative_to(tmp_path)}: row_id row-black: duplicate: on lines 4 and 11" in line

    @pytest.mark.parametrize(
        "arguments, message",
        [
            (["generate", "--modle", "toy", "--out", "x.jsonl"], "unknown flag --modle"),
            (["generate", "--out", "x.jsonl"], "the following arguments are required: --model"),
            (["generate", "--model", "./nowhere", "--out", "x.jsonl"], "no model folder './nowhere'"),
            (["generate", "--model", "runs/nosuch", "--out", "x.jsonl"], "no model folder 'runs/nosuch'"),
            (["generate", "--model", "toy", "--out", "."], "is a folder: name a file"),
            (["score", "--reward_model", "toy", "--out", "x.jsonl"], "without a score head"),
            (["score", "--reward_model", "toy", "--out", "x", "--prefs_jsonl", "no.jsonl"], "no file no.jsonl"),
            (["generate", "--model", "toy", "--out", "x.jsonl", "--prompts_jsonl", "no.jsonl"], "no file no.jsonl"),
        ],
    )
    def test_errors(self, run, arguments, message):
        assert message in one_line_error(run(*arguments))


class TestRefusals:
    @pytest.mark.parametrize(
        "arguments, message",
        [
            (["generate", "--model", "./no", "--out", "x.jsonl"], "no model folder './no'"),
            (["generate", "--model", "toy", "--out", "x.jsonl", "--dtype", "int8"], "--dtype: invalid choice: 'int8'"),
            (["score", "--reward_model", "./no", "--out", "x.jsonl"], "no model folder './no'"),
            (["score", "--reward_model", "toy", "--out", "x", "--dtype", "auto"], "--dtype: invalid choice: 'auto'"),
            (["grade", "nowhere"], "no folder nowhere"),
            (["grade", ".", "--judge", "reward_model", "--model", "./no"], "no model folder './no'"),
            (["grade", ".", "--tokenizer", "./no"], "no model folder './no'"),
            (["grade", ".", "--max_error_fraction", "3"], "--max_error_fraction: must lie between 0 and 1, got 3.0"),
            (["grade", ".", "--base_url", "http://x"], "--base_url is for --judge openai alone"),
            (["grade", ".", "--judge", "openai", "--model", "x", "--prices", "no.json"], "--prices: no file no.json"),
            (["pack", "nowhere"], "no folder nowhere"),
            (["tournament", "no.jsonl"], "no file no.jsonl: make it with `python -m public_eval.generate --model"),
            (["tournament", "no.jsonl", "--judge", "openai"], "--judge openai needs --model"),
        ],
    )
    def test_wrong_flags_fail_before_large_libraries_load(self, tmp_path, arguments, message):
        """In a process of its own: the error, and neither torch nor datasets among its modules."""
        command, *flags = arguments
        code = (
            "import sys, atexit\n"
            "atexit.register(lambda: print(sorted({'torch', 'transformers', 'datasets'} & set(sys.modules))))\n"
            f"from public_eval.{command} import main\n"
            f"main({flags!r})\n"
        )
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert (done.returncode, done.stdout.strip()) == (2, "[]")
        assert done.stderr.startswith("error: ") and message in done.stderr


class TestTournament:
    def test_files_and_table(self, run, course, tmp_path):
        """Nine points of ten against the base: 1000 + 400 log10(9) = 1382."""
        good = write_policy(tmp_path, "good", response_rows(plan(win=8, tie=2)))
        even = write_policy(tmp_path, "even", response_rows(plan(win=5, loss=5)))
        code, out, _ = run("tournament", good, even, *course["judging"], "--pairs", "base", "--out", "t")
        assert code == 0
        assert out.splitlines()[2].split()[:2] == ["good", "1382"]
        # Nine points of ten, with an interval.
        assert re.search(r"0\.900  \[0\.\d{3}, \d\.\d{3}\]$", out.splitlines()[2])
        saved = json.loads((tmp_path / "t" / "tournament.json").read_text())
        assert [row["name"] for row in saved["ratings"]][0] == "good"
        assert (tmp_path / "t" / "tournament.png").stat().st_size > 1000

    def test_estimate(self, run, course, tmp_path):
        good = write_policy(tmp_path, "good", response_rows(plan(win=10)))
        even = write_policy(tmp_path, "even", response_rows(plan(win=5, loss=5)))
        options = ("--judge", "openai", "--model", "gpt-5.4", "--estimate", "--json")
        _, out, _ = run("tournament", good, even, *course["judging"], *options)
        estimates = json.loads(out)["estimates"]
        # Nothing is asked about the five rows on which both are right in the same words.
        assert {name: row["calls"] for name, row in estimates.items()} == {
            "base - good": 20,
            "base - even": 20,
            "good - even": 10,
        }

    def test_a_file_called_base(self, run, course, tmp_path):
        path = write_policy(tmp_path, "base", response_rows(plan(win=10)))
        assert "the base takes part anyway" in one_line_error(run("tournament", path, *course["judging"]))


class TestCompareStages:
    @pytest.fixture
    def models(self, tmp_path, tiny_model_path):
        from tests.tiny import save_tiny_model

        save_tiny_model(tmp_path / "other", seed=1)
        return {"base": tiny_model_path, "ppo": str(tmp_path / "other")}

    def test_figures_recomputed(self, run, course, models, tmp_path, monkeypatch):
        """Reward and length anew from the samples, and KL from the tokens, one row at a time and without padding."""
        import torch
        from transformers import AutoModelForCausalLM

        from tests.tiny import token_log_probs
        from trl_ext import rollouts
        from trl_ext.rewards import RewardModel

        original, generations = rollouts.generate_responses, []

        def remember(*arguments, **keywords):
            generations.extend(original(*arguments, **keywords))
            return generations[-10:]

        monkeypatch.setattr(rollouts, "generate_responses", remember)

        reward_model = save_full_model(models["base"], tmp_path / "reward")
        named = [f"{name}={path}" for name, path in models.items()]
        options = ("--reward_model", reward_model, "--max_new_tokens", "5", "--out", "stages", "--json")
        code, out, err = run("stages", *named, *course["prompts_jsonl"], *options)
        assert code == 0, err
        base, ppo = json.loads(out)["models"]
        assert json.loads((tmp_path / "stages" / "comparison.json").read_text()) == json.loads(out)
        assert (base["kl"], base["kl_note"]) == (None, "the reference itself")
        samples = [json.loads(line) for line in (tmp_path / "stages" / "samples_ppo.jsonl").read_text().splitlines()]
        assert len(samples) == ppo["n"] == 10
        lengths = torch.tensor([float(row["generated_num_tokens"]) for row in samples])
        assert ppo["tokens"]["mean"] == pytest.approx(float(lengths.mean()))
        assert ppo["tokens"]["std"] == pytest.approx(float(lengths.std()))
        messages = [[{"role": "user", "content": row["prompt_text"]}] for row in samples]
        rewards = RewardModel(reward_model).score(
            messages, [row["response_text"] for row in samples], finished=[row["finished"] for row in samples]
        )
        assert ppo["reward"]["mean"] == pytest.approx(float(rewards.mean()), abs=1e-5)
        assert ppo["reward"]["std"] == pytest.approx(float(rewards.std()), abs=1e-5)
        own, reference = (AutoModelForCausalLM.from_pretrained(models[name]).double() for name in ("ppo", "base"))
        k1, k3 = [], []
        for generation in generations[10:]:
            chosen = torch.tensor(generation.response_ids)[:, None]
            with torch.no_grad():
                p, q = (
                    token_log_probs(model, generation.prompt_ids, generation.response_ids).gather(1, chosen)
                    for model in (own, reference)
                )
            k1.append(float((p - q).sum()))
            k3.append(float((torch.exp(q - p) - 1 - (q - p)).sum()))
        totals = {"k1": k1, "k3": k3}[ppo["kl"]["estimator"]]
        assert ppo["kl"]["mean"] == pytest.approx(sum(totals) / 10, rel=1e-4)
        assert ppo["kl"]["n"] == 10

    def test_other_temperature_has_no_kl(self, run, course, models):
        named = [f"{name}={path}" for name, path in models.items()]
        options = ("--temperature", "0", "--max_new_tokens", "3", "--num_prompts", "2", "--reference", "ppo")
        code, out, _ = run("stages", *named, *course["prompts_jsonl"], *options)
        assert code == 0
        assert "base: no KL: samples at temperature 0.0 give no estimate; sample at 1" in out
        how = (
            "Reference: ppo. Decoding: greedy, one response per prompt, at most 3 tokens. "
            "Samples: the files samples_*.jsonl hold all 2 prompts.\n"
        )
        assert how in out and Path("stages/comparison.md").read_text().endswith(f"\n{how}")

    def test_sampling_and_how_many_samples_are_written_are_said(self, run, course, models):
        named = [f"{name}={path}" for name, path in models.items()]
        options = ("--max_new_tokens", "3", "--num_prompts", "4", "--num_samples", "3", "--temperature", "0.7")
        code, out, _ = run("stages", *named, *course["prompts_jsonl"], *options, "--seed", "5")
        assert code == 0
        how = (
            "Reference: base. Decoding: sampled at temperature 0.7, seed 5, one response per prompt, at most 3 "
            "tokens. Samples: the files samples_*.jsonl hold the first 3 of 4 prompts.\n"
        )
        assert how in out and Path("stages/comparison.md").read_text().endswith(f"\n{how}")
        assert len(Path("stages/samples_ppo.jsonl").read_text().splitlines()) == 3

    @pytest.mark.parametrize(
        "arguments, message",
        [
            (["toy"], "'toy': give each model as name=folder, such as base=toy"),
            (["base=toy", "base=toy"], "'base' is given twice"),
            (["base=toy", "--reference", "sft"], "the reference 'sft' is none of the models: base"),
            (["../x=toy"], "may hold no slash"),
            (["base=./nowhere"], "no model folder './nowhere'"),
            (["base=toy", "--reward_model", "./nowhere"], "no model folder './nowhere'"),
            (["base=toy", "--temperature", "-1"], "temperature must not be negative, got -1.0"),
        ],
    )
    def test_errors(self, run, arguments, message):
        assert message in one_line_error(run("stages", *arguments))

    @pytest.mark.parametrize(
        "command, message",
        [
            ("stages base=toy sft=./nowhere", "no model folder './nowhere'"),
            ("stages base=toy --reward_model ./nowhere", "no model folder './nowhere'"),
            ("judge --judge openai --model gpt-5.4 --candidate RESPONSES", "OPENAI_API_KEY is not set"),
            ("grade --judge openai --model gpt-5.4 .", "OPENAI_API_KEY is not set"),
        ],
    )
    def test_what_the_command_line_tells_is_refused_before_slow_imports(self, command, message, tmp_path):
        """`torch`, `transformers` and `openai` take many seconds."""
        path = write_policy(tmp_path, "aot", response_rows(plan(win=10)))
        name, *arguments = command.replace("RESPONSES", str(path)).split()
        module = "trl_ext.evaluation.stages" if name == "stages" else f"public_eval.{name}"
        program = (
            f"import sys; from {module} import main\n"
            f"try: main({arguments!r})\n"
            "except SystemExit as end: print(end.code, {'torch', 'transformers', 'openai'} & set(sys.modules))"
        )
        environment = {key: value for key, value in os.environ.items() if not key.startswith("OPENAI_")}
        environment["PYTHONPATH"] = str(ROOT)
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.stdout == "2 set()\n" and message in done.stderr


def test_the_courses_own_files(run, wildchat, tmp_path):
    """The base as its own candidate, its answers doubled: a judge that prefers longer ones has it win all 128."""
    from tests.loopback import LoopbackServer

    rows = [json.loads(line) for line in (wildchat / "public_test_gen_base_responses_128.jsonl").open()]
    path = write_lines(tmp_path / "aot.jsonl", [{**row, "response_text": row["response_text"] * 2} for row in rows])
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
