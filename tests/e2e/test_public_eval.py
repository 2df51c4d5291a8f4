"""The commands of the public evaluation as a user runs them: results, files, and errors in one line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support import REPOSITORY
from tests.support.files import read_rows, write_rows
from tests.support.public_evaluation import (
    COMMANDS,
    flags_of_course,
    module_of,
    one_line_error,
    plan,
    response_rows,
    run_command,
    write_policy,
)
from tests.support.refusals import assert_one_line
from tests.support.reward_adapters import save_full_model
from tests.support.tiny import save_tiny_model, token_log_probs
from trl_ext import rollouts
from trl_ext.rewards import RewardModel


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return partial(run_command, capsys)


@pytest.fixture
def course(tmp_path):
    return flags_of_course(tmp_path)


class TestHelp:
    @pytest.mark.parametrize("command", [*COMMANDS, "stages"])
    def test_says_what_it_costs_and_writes(self, command, run):
        code, text, _ = run(command, "--help")
        assert code == 0 and f"python -m {module_of(command)}" in text
        assert "\ncost  " in text and "\nwrites  " in text
        assert "--json" in text

    def test_as_modules(self):
        """`python -m` finds the commands, without a warning of modules imported twice."""
        for command in ("pack", "stages"):
            program = [sys.executable, "-W", "error", "-m", module_of(command), "--help"]
            done = subprocess.run(program, cwd=REPOSITORY, capture_output=True, text=True)
            assert (done.returncode, done.stderr) == (0, "")


class TestGenerateScorePack:
    def test_from_models_to_the_archive(self, run, course, tmp_path, tiny_model_path):
        reward_model = save_full_model(tiny_model_path, tmp_path / "reward")
        out = tmp_path / "submission" / "policy_generations" / "aot.jsonl"
        scores = tmp_path / "submission" / "reward_model" / "public_test_pref_scores.jsonl"
        generate = ("generate", "--model", tiny_model_path, "--out", out, *course["prompts_jsonl"])
        code, text, err = run(*generate, "--max_new_tokens", "4", "--json")
        assert (code, json.loads(text)["rows"]) == (0, 10), err
        code, text, _ = run("score", "--reward_model", reward_model, "--out", scores, *course["prefs_jsonl"], "--json")
        rows = read_rows(scores)
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
        assert ". is a folder: name a file" in one_line_error(run("generate", "--model", "toy", "--out", "."))


OPENAI = ["--judge", "openai", "--model", "gpt-5.4"]
CANDIDATE = ["--candidate", "policy_generations/aot.jsonl"]
# Every refusal is one line: what is wrong, and the flag, file or name that a user would change.
REFUSALS = [
    (["generate", "--model", "./no", "--out", "x.jsonl"], ["no model folder './no'"]),
    (["generate", "--modle", "toy", "--out", "x.jsonl"], ["unknown flag --modle"]),
    (["generate", "--out", "x.jsonl"], ["required", "--model"]),
    (["generate", "--model", "toy", "--out", "x.jsonl", "--prompts_jsonl", "no.jsonl"], ["no file no.jsonl"]),
    (["score", "--reward_model", "./no", "--out", "x.jsonl"], ["no model folder './no'"]),
    (["grade", "nowhere"], ["no folder nowhere", "public_eval.generate", "--reward_model RUN --out nowhere/reward_m"]),
    (["grade", ".", "--judge", "reward_model", "--model", "./no"], ["no model folder './no'"]),
    (["grade", ".", "--tokenizer", "./no"], ["no model folder './no'"]),
    (["pack", "nowhere"], ["no folder nowhere"]),
    (["tournament", "no.jsonl"], ["no file no.jsonl", "python -m public_eval.generate --model"]),
    (["stages", "base=toy", "sft=./nowhere"], ["no model folder './nowhere'"]),
    (["stages", "toy"], ["'toy'", "name=folder"]),
    (["stages", "base=toy", "base=toy"], ["'base' is given twice"]),
    (["stages", "base=toy", "--reference", "sft"], ["reference 'sft'", "base"]),
    (["stages", "base=toy", "--temperature", "-1"], ["temperature", "not be negative", "-1.0"]),
    (["judge", "--candidate", "policy_generations/aot.jsonl", "a/aot.jsonl"], ["two files are called aot"]),
    (["judge", "--candidate", "no.jsonl"], ["no file no.jsonl"]),
    (["judge", *CANDIDATE, *OPENAI], ["OPENAI_API_KEY is not set"]),
    (["judge", *CANDIDATE, "--judge", "opnai"], ["--judge 'opnai'", "did you mean 'openai'?"]),
    (["judge", *CANDIDATE, "--max_concurency", "4"], ["unknown flag --max_concurency", "did you mean"]),
    (["judge", *CANDIDATE, "--max_new_tokens", "0"], ["--max_new_tokens", "at least 1", "0"]),
    (["judge", *CANDIDATE, "--max_error_fraction", "2"], ["--max_error_fraction", "between 0 and 1", "2"]),
    (["judge", *CANDIDATE, "--base_url", "http://localhost:8000/v1"], ["--base_url", "--judge openai"]),
    (["judge", *CANDIDATE, "--judge", "reward_model", "--model", "m", "--api", "chat"], ["--api", "--judge openai"]),
    (["judge", *CANDIDATE, "--judge", "openai"], ["--judge openai needs --model"]),
    (["judge", *CANDIDATE, "--judge", "reward_model"], ["--judge reward_model needs --model"]),
    (["judge", *CANDIDATE, "--model", "gpt-5.4"], ["--model", "openai or reward_model"]),
    (["judge", *CANDIDATE, *OPENAI, "--instructions", "no.md"], ["--instructions", "no file no.md"]),
    (["judge", *CANDIDATE, *OPENAI, "--price_in", "-1"], ["--price_in", "not be negative", "-1"]),
]


def test_refusals_come_before_large_libraries_load(tmp_path):
    """In a process of its own, since `torch`, `transformers`, `datasets` and `openai` take many seconds."""
    for folder in ("policy_generations", "a"):
        write_rows(tmp_path / folder / "aot.jsonl", response_rows(plan(win=10)))
    program = (
        "import contextlib, importlib, io, json, sys\n"
        "for module, flags in json.load(sys.stdin):\n"
        "    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.suppress(SystemExit):\n"
        "        importlib.import_module(module).main(flags)\n"
        "    slow = {'torch', 'transformers', 'datasets', 'openai'} & set(sys.modules)\n"
        "    print(json.dumps([said.getvalue(), sorted(slow)]))\n"
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith("OPENAI_")}
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps([(module_of(command), flags) for (command, *flags), _ in REFUSALS]),
        env={**environment, "PYTHONPATH": str(REPOSITORY)}, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    for line, (arguments, words) in zip(done.stdout.splitlines(), REFUSALS, strict=True):
        said, slow = json.loads(line)
        assert said.startswith("error: ") and slow == [], (arguments, said, slow)
        assert_one_line(said, words)


class TestTournament:
    def test_files_and_table(self, run, course, tmp_path):
        """Nine points of ten against the base: 1000 + 400 log10(9) = 1382."""
        good = write_policy(tmp_path, "good", response_rows(plan(win=8, tie=2)))
        code, out, _ = run("tournament", good, *course["judging"], "--out", "t")
        assert code == 0
        assert out.splitlines()[2].split()[:2] == ["good", "1382"]
        # Nine points of ten, with an interval.
        assert re.search(r"0\.900  \[0\.\d{3}, \d\.\d{3}\]$", out.splitlines()[2])
        saved = json.loads((tmp_path / "t" / "tournament.json").read_text())
        assert [row["name"] for row in saved["ratings"]][0] == "good"
        assert out.split("column")[1].splitlines()[4].split() == ["good", "-", "0.900"]

    def test_estimate(self, run, course, tmp_path):
        """Nothing is asked about the five rows on which both are right in the same words."""
        good = write_policy(tmp_path, "good", response_rows(plan(win=10)))
        even = write_policy(tmp_path, "even", response_rows(plan(win=5, loss=5)))
        options = ("--judge", "openai", "--model", "gpt-5.4", "--estimate", "--json")
        _, out, _ = run("tournament", good, even, *course["judging"], *options)
        calls = {name: row["calls"] for name, row in json.loads(out)["estimates"].items()}
        assert calls == {"base - good": 20, "base - even": 20, "good - even": 10}
        path = write_policy(tmp_path, "base", response_rows(plan(win=10)))
        assert "the base takes part anyway" in one_line_error(run("tournament", path, *course["judging"]))


class TestCompareStages:
    @pytest.fixture
    def models(self, tmp_path, tiny_model_path):
        save_tiny_model(tmp_path / "other", seed=1)
        return {"base": tiny_model_path, "ppo": str(tmp_path / "other")}

    def test_figures_recomputed(self, run, course, models, tmp_path, monkeypatch):
        """Reward and length anew from the samples, and KL from the tokens, one row at a time and without padding."""

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
        samples = read_rows(tmp_path / "stages" / "samples_ppo.jsonl")
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
        assert "ppo: no KL: the reference itself" in out
