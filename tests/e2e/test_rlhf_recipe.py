"""The pipeline as a command: its stages and their order, what is skipped and refused, its figures, and a whole run."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import yaml
from datasets import Dataset
from transformers import AutoModelForCausalLM

from tests.support import recipes
from tests.support.files import write_rows
from tests.support.recipes import wait_until
from tests.support.reward_adapters import save_full_model
from tests.support.tiny import save_tiny_gpt2, save_tiny_model, token_log_probs
from tools.toy_prompts import pool_of
from trl_ext.data import load_benchmark
from trl_ext.data.formats import main as convert
from trl_ext.evaluation.stages import compare_stages
from trl_ext.evaluation.submissions.assets import load_prompts
from trl_ext.rewards import RewardModel
from trl_ext.rollouts import SamplingSettings, generation
from trl_ext.runs.offline import demonstrations
from trl_ext.runs.reward import training_pairs
from trl_ext.studies import pipeline, processes
from trl_ext.studies.pipeline import find_adversarial
from trl_ext.toy import score
from trl_ext.toy.prompts import parse

TOY = recipes.RECIPES / "configs" / "toy" / "rlhf.yaml"
POLICIES = ["ppo", "ppo-weak", "grpo", "dpo"]
STAGES = ["sft", "reward_model", "reward_model_weak", *POLICIES]


class Recipe:
    """The recipe in this process, whose stages are made up; `calls` has the flags of each by the stage's name."""

    def __init__(self, monkeypatch):
        self.monkeypatch, self.calls, self.failing = monkeypatch, {}, set()
        monkeypatch.setattr(processes, "run_or_stop", self._stage)
        monkeypatch.setattr(pipeline, "evaluate_pipeline", lambda given, pipeline: {})
        monkeypatch.setattr(pipeline, "write_pipeline_report", lambda *_: ["report.html"])

    def _stage(self, command):
        given = flags(command)
        name = Path(given["output_dir"]).name
        self.calls[name] = given
        if name in self.failing:
            return 3
        (Path(given["output_dir"]) / "results.json").write_text("{}")
        return 0

    def main(self, *words: str) -> int:
        self.calls.clear()
        try:
            recipes.run(self.monkeypatch, "rlhf", *words)
        except SystemExit as stopped:
            return stopped.code
        return 0


def flags(command) -> dict[str, str]:
    at = next(place for place, word in enumerate(command) if word.endswith(".py"))
    words = command[at + 1 :]
    return {"recipe": Path(command[at]).stem, **dict(zip((w[2:] for w in words[::2]), words[1::2], strict=True))}


@pytest.fixture
def recipe(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return Recipe(monkeypatch)


def test_the_stages_in_order_and_what_each_is_given(recipe):
    assert recipe.main() == 0
    assert list(recipe.calls) == STAGES
    calls = recipe.calls
    recipes_of = ["sft", "reward_model", "reward_model", "ppo", "ppo", "grpo", "dpo"]
    assert [calls[name]["recipe"] for name in STAGES] == recipes_of
    assert calls["sft"]["model_name_or_path"] == "toy"
    assert {calls[name]["model_name_or_path"] for name in STAGES[1:]} == {"runs/rlhf/sft"}
    assert {calls[name]["seed"] for name in STAGES} == {"0"}
    # The weak reward model has fewer pairs and wrong labels, and nothing else is different but when it is saved.
    own, weak = calls["reward_model"], calls["reward_model_weak"]
    assert (weak["num_train_pairs"], weak["label_noise"]) == ("200", "0.2")
    assert not {"num_train_pairs", "label_noise"} & own.keys()
    own = "runs/rlhf/reward_model"
    assert [calls[name].get("reward_model") for name in POLICIES] == [own, f"{own}_weak", own, None]
    # Finished stages are not run again.
    assert recipe.main() == 0 and not recipe.calls
    # The weak reward model can be left out.
    assert recipe.main("--policy_methods", "rloo,kto", "--weak_reward_model", "{}", "--output_dir", "other") == 0
    assert list(recipe.calls) == ["sft", "reward_model", "rloo", "kto"]


def test_arguments_of_methods_and_the_places_in_them(recipe):
    methods = {"ppo": {"value_model_name_or_path": "{reward_model}", "max_steps": 7}, "ppo:weak": {"max_steps": 9}}
    assert recipe.main("--policy_methods", "ppo,ppo:weak", "--methods", json.dumps(methods)) == 0
    found = [(recipe.calls[n]["value_model_name_or_path"], recipe.calls[n]["max_steps"]) for n in ("ppo", "ppo-weak")]
    assert found == [("runs/rlhf/reward_model", "7"), ("runs/rlhf/reward_model_weak", "9")]


def test_a_dry_run_prints_the_commands_and_runs_nothing(recipe, capsys):
    assert recipe.main("--policy_methods", "dpo", "--dry_run") == 0
    lines = capsys.readouterr().out.splitlines()
    lines = [line for line in lines if not line.startswith("configuration: ")]
    assert lines[0:-1:2] == ["# sft: new", "# reward_model: new", "# reward_model_weak: new", "# dpo: new"]
    assert flags(shlex.split(lines[7]))["output_dir"] == "runs/rlhf/dpo"
    assert lines[-1].startswith("# evaluation of base, sft, dpo, and the report")
    assert not recipe.calls and not Path("runs").exists()


def test_a_failing_stage_is_one_line_with_its_command(recipe, capsys):
    recipe.failing.add("ppo")
    assert recipe.main() == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("error: the stage ppo failed, for the reason above -- repeat the same ")
    alone = flags(shlex.split(said.partition("this stage alone: ")[2]))
    assert (alone["recipe"], alone["output_dir"]) == ("ppo", "runs/rlhf/ppo")
    # The same command goes on from the stage that failed, in the folder that it began.
    recipe.failing.clear()
    assert recipe.main() == 0
    assert list(recipe.calls) == ["ppo", "ppo-weak", "grpo", "dpo"]
    assert "overwrite_output_dir" not in recipe.calls["ppo"], "it made no update"


def test_a_stage_with_other_settings_is_refused(recipe, capsys, tmp_path):
    assert recipe.main() == 0
    capsys.readouterr()
    assert recipe.main("--sft", '{"learning_rate": 0.5}') == 2
    said = capsys.readouterr().err
    assert "runs/rlhf/sft was run with learning_rate 0.001, and now it is 0.5: take that back" in said
    assert recipe.main("--seed", "1") == 2 and "sft was run with seed 0, and now it is 1" in capsys.readouterr().err
    # A setting within a stage's configuration file is one, too.
    shutil.copytree(TOY.parent, tmp_path / "configs")
    path = tmp_path / "configs" / "dpo.yaml"
    path.write_text(path.read_text().replace("beta: 0.1", "beta: 0.2"))
    assert recipe.main("--configs", "configs") == 2
    assert "runs/rlhf/dpo was run with beta 0.1, and now it is 0.2" in capsys.readouterr().err
    # Where the first stage was made anew, those after it are of another model.
    shutil.rmtree("runs/rlhf/sft")
    assert recipe.main("--sft", '{"learning_rate": 0.5}') == 2
    assert "runs/rlhf/reward_model was run with settings of sft" in capsys.readouterr().err
    assert not recipe.calls


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        # The pipeline launches its stages itself.
        ([], "start the pipeline with python"),
        (["--policy_methods", "ppo,dpoo"], "no method 'dpoo'; did you mean 'dpo'?"),
        (["--policy_methods", "dpo:weak"], "'dpo:weak': only :weak may follow"),
        (["--stages", "sft,policy"], "no stage 'policy'; did you mean 'policies'?"),
        (["--stages", "policies"], "the stage sft is not finished, and --stages policies leaves it out"),
        (["--policy_methods", "ppo:weak", "--weak_reward_model", "{}"], "only :weak may follow"),
        (["--policy", '{"output_dir": "x"}'], "output_dir is set by the study"),
        (["--eval_split", "nope"], "toy has no split 'nope', only train_prefs"),
        (["--adversarial_prompts", "plain.jsonl"], "plain.jsonl, row_id plain:1: every adversarial prompt must say"),
    ],
)
def test_what_is_refused_before_anything_runs(words, expected, recipe, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2" if not words else "1")
    Path("plain.jsonl").write_text('{"prompt": "Hello"}\n')
    assert recipe.main(*words) == 2
    said = capsys.readouterr().err
    assert expected in said and said.startswith("error: ") and said.count("\n") == 1
    assert not recipe.calls and not Path("runs").exists()


# ---- Whole runs ----

SHORT = {"max_steps": 2, "num_eval_prompts": 4, "logging_steps": 1, "save_steps": 1, "generation_eval_every": 0}


def command(*words: str) -> list[str]:
    return [sys.executable, str(recipes.RECIPES / "rlhf.py"), *words]


@pytest.mark.long
def test_a_whole_pipeline_killed_between_stages_and_taken_up(tmp_path):
    rewarding = {"max_steps": 2, "eval_steps": 1, "save_steps": 1, "logging_steps": 1}
    content = yaml.safe_load(TOY.read_text()) | {"policy_methods": "ppo:weak,dpo", "policy": SHORT}
    content |= {"sft": {**SHORT, "num_examples": 64}, "reward_model": rewarding, "num_eval_prompts": 8}
    content |= {"weak_reward_model": {"num_train_pairs": 40, "label_noise": 0.2}, "num_samples": 5}
    (tmp_path / "short.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    words = command("--config", "short.yaml", "--output_dir", "out")
    environment = {**recipes.environment(), "OMP_NUM_THREADS": "1"}
    options = {"cwd": tmp_path, "env": environment, "start_new_session": True}
    first = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **options)
    out = tmp_path / "out"
    # The second stage has begun when its record is there. A stage is of another session.
    wait_until((out / "reward_model" / "run.json").exists, first, seconds=240)
    for one in (*psutil.Process(first.pid).children(recursive=True), first):
        one.kill()
    first.wait()
    done = (out / "sft" / "results.json").stat().st_mtime_ns
    second = subprocess.run(words, capture_output=True, text=True, timeout=500, **options)
    assert second.returncode == 0, second.stderr[-3000:]
    assert "=== run 1 of 5, sft: finished" in second.stdout
    assert re.search("=== run 2 of 5, reward_model: (to begin anew|interrupted)", second.stdout)
    assert (out / "sft" / "results.json").stat().st_mtime_ns == done
    check_outputs(out, ["base", "sft", "ppo-weak", "dpo"])


def check_outputs(out: Path, models: list[str]) -> None:
    """The figures are those of the samples, recomputed; and the report has them."""
    summary = json.loads((out / "evaluation" / "evaluation.json").read_text())
    held_out, adversarial = summary["held_out"], summary["adversarial"]
    assert [row["name"] for row in held_out["models"]] == models
    report = (out / "report.md").read_text().replace("\\", "")
    for row in held_out["models"]:
        lines = (out / "evaluation" / f"samples_held_out_{row['name']}.jsonl").read_text().splitlines()
        samples = [json.loads(line) for line in lines]
        assert len(samples) == row["n"] == 8
        for name in ("reward_model", "reward_model_weak"):
            rewards = [sample["rewards"][name] for sample in samples]
            mean = sum(rewards) / 8
            deviation = (sum((value - mean) ** 2 for value in rewards) / 7) ** 0.5
            assert row["rewards"][name]["mean"] == pytest.approx(mean)
            assert row["rewards"][name]["std"] == pytest.approx(deviation)
        truths = [score(s["prompt_text"], s["response_text"], finished=s["finished"]) for s in samples]
        assert row["true_score"]["mean"] == pytest.approx(sum(truths) / 8)
        assert (row["kl"] is None) == (row["name"] == "sft")
        assert f"| {row['name']} | 8 | {row['rewards']['reward_model']['mean']:.3f} [" in report
    graded = [name for name, rows in adversarial["families"].items() if rows[0]["true_score"] is not None]
    assert graded == ["length_hack", "long"] and len(adversarial["families"]) == 5
    # One sample of each family is shown.
    assert len({sample["family"] for sample in adversarial["samples"]["sft"]}) == 5
    weak = json.loads((out / "reward_model_weak" / "results.json").read_text())["run"]
    assert (weak["train_pairs"], weak["label_noise"]) == (40, 0.2) and "label noise 0.2" in weak["objective"]


@pytest.mark.slow
def test_a_model_without_a_chat_template_on_converted_data(tmp_path):
    """The settings for GPT-2, cut to two steps, on a random GPT-2 of two layers and records in the public formats."""
    save_tiny_gpt2(tmp_path / "gpt2")
    records = [
        {"chosen": f"\n\nHuman: Say {i}\n\nAssistant: {i} {i}", "rejected": f"\n\nHuman: Say {i}\n\nAssistant: no"}
        for i in range(24)
    ]
    dolly = [{"instruction": f"Say {i}", "context": "", "response": str(i), "category": "x"} for i in range(16)]
    for name, rows in (("hh", records), ("dolly", dolly)):
        write_rows(tmp_path / f"{name}.jsonl", rows)
    hh, folder = str(tmp_path / "hh.jsonl"), tmp_path / "hh_rlhf"
    for split in ("train", "validation", "test"):
        convert([hh, str(folder / f"{split}_prefs.jsonl"), "--format", "hh_rlhf", "--plain"])
    for split in ("train", "test"):
        convert([hh, str(folder / f"{split}_gen.jsonl"), "--format", "hh_rlhf", "--plain", "--prompts"])
    dolly = [str(tmp_path / "dolly.jsonl"), str(tmp_path / "dolly" / "train_gen.jsonl")]
    convert([*dolly, "--format", "dolly", "--plain"])
    steps = {"max_steps": 2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "save_steps": 1}
    content = yaml.safe_load((recipes.RECIPES / "configs" / "gpt2_hh" / "rlhf.yaml").read_text())
    content |= {"model_name_or_path": "gpt2", "sft": steps, "reward_model": {**steps, "eval_steps": 1}}
    content |= {"weak_reward_model": {"num_train_pairs": 8, "label_noise": 0.25}, "max_new_tokens": 8}
    content |= {"policy": {**steps, "num_eval_prompts": 4}, "num_eval_prompts": 4, "output_dir": "out"}
    content["methods"]["ppo"] |= {"generation_batch_size": 8, "num_iterations": 1, "max_completion_length": 8}
    content["methods"]["ppo"]["generation_eval_every"] = 0
    content["methods"]["dpo"] = {"max_new_tokens": 8}
    (tmp_path / "short.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    environment = {**recipes.environment(), "OMP_NUM_THREADS": "1"}
    options = {"env": environment, "capture_output": True, "text": True, "timeout": 500}
    done = subprocess.run(command("--config", "short.yaml"), cwd=tmp_path, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((tmp_path / "out" / "evaluation" / "evaluation.json").read_text())
    for row in summary["held_out"]["models"]:
        assert row["true_score"] is None and len(row["rewards"]) == 2
        assert (row["kl"] is None) == (row["name"] == "sft")
    sample = json.loads((tmp_path / "out" / "evaluation" / "samples_held_out_ppo.jsonl").read_text().splitlines()[0])
    assert sample["prompt_text"] == "\n\nHuman: Say 0\n\nAssistant:"


# ---- The evaluation ----


def test_figures_of_stages_recomputed(tmp_path, tiny_model_path, monkeypatch):
    """Reward and length anew from the samples, and KL from the tokens, one row at a time and without padding."""
    original, generations = generation.generate_responses, []

    def remember(*arguments, **keywords):
        generations.extend(original(*arguments, **keywords))
        return generations[-10:]

    monkeypatch.setattr(generation, "generate_responses", remember)
    save_tiny_model(tmp_path / "other", seed=1)
    models = {"base": tiny_model_path, "ppo": str(tmp_path / "other")}
    reward_model = save_full_model(models["base"], tmp_path / "reward")
    settings = SamplingSettings(max_new_tokens=5, stop=())
    options = {"reference": "base", "reward_models": {"own": reward_model}}
    rows, samples = compare_stages(models, load_prompts()[:10], settings, **options)
    base, ppo = rows
    assert base["kl"] is None and ppo["true_score"] is None
    assert len(samples["ppo"]) == ppo["n"] == 10
    lengths = torch.tensor([float(row["generated_num_tokens"]) for row in samples["ppo"]])
    messages = [[{"role": "user", "content": row["prompt_text"]}] for row in samples["ppo"]]
    texts, finished = ([row[name] for row in samples["ppo"]] for name in ("response_text", "finished"))
    rewards = RewardModel(reward_model).score(messages, texts, finished=finished)
    for found, values in ((ppo["tokens"], lengths), (ppo["rewards"]["own"], rewards)):
        for key, expected in (("mean", values.mean()), ("std", values.std())):
            assert found[key] == pytest.approx(float(expected), abs=1e-5)
    own, reference = (AutoModelForCausalLM.from_pretrained(models[name]).double() for name in ("ppo", "base"))
    totals = {"k1": [], "k3": []}
    for one in generations[10:]:
        chosen = torch.tensor(one.response_ids)[:, None]
        with torch.no_grad():
            ids = one.prompt_ids, one.response_ids
            p, q = (token_log_probs(model, *ids).gather(1, chosen) for model in (own, reference))
        totals["k1"].append(float((p - q).sum()))
        totals["k3"].append(float((torch.exp(q - p) - 1 - (q - p)).sum()))
    assert ppo["kl"]["mean"] == pytest.approx(sum(totals[ppo["kl"]["estimator"]]) / 10, rel=1e-4)
    assert ppo["kl"]["n"] == 10


def test_the_embedded_adversarial_prompts():
    """Five families; what is graded is a prompt of the benchmark's test pool, and none is its prompt as a whole."""
    rows = load_prompts(find_adversarial("recipes/configs/toy/rlhf_adversarial.jsonl"))
    assert len(rows) == 31
    families = {row["family"] for row in rows}
    assert families == {"length_hack", "long", "contradictory", "out_of_vocabulary", "near_empty"}
    known = {row["prompt"][-1]["content"] for split in load_benchmark("toy").values() for row in split}
    for row in rows:
        assert row["prompt_text"] not in known
        assert bool(row["graded_as"]) == (row["family"] in ("length_hack", "long"))
        if row["graded_as"]:
            assert row["graded_as"] in row["prompt_text"]
            assert pool_of(row["graded_as"]) == "test" and parse(row["graded_as"])
        with pytest.raises(ValueError, match="unknown prompt"):
            parse(row["prompt_text"])


def test_label_noise_turns_the_share_that_is_asked_for():
    """Of the first 10 pairs, 0.25 are 2.5, rounded to the even 2: two are turned round, the others as they were."""
    pairs = Dataset.from_list([{"chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(20)])
    given = SimpleNamespace(num_train_pairs=10, label_noise=0.25, train_split="train_prefs")
    found = training_pairs(pairs, given, seed=3)
    turned = [i for i, row in enumerate(found) if row["chosen"] == f"bad {i}" and row["rejected"] == f"good {i}"]
    kept = [i for i, row in enumerate(found) if row["chosen"] == f"good {i}" and row["rejected"] == f"bad {i}"]
    assert (len(turned), len(kept)) == (2, 8)
    assert training_pairs(pairs, given, seed=3)["chosen"] == found["chosen"]
    given = SimpleNamespace(num_train_pairs=None, label_noise=0.0, train_split="train_prefs")
    assert training_pairs(pairs, given, seed=3)["chosen"] == pairs["chosen"]
    with pytest.raises(ValueError, match="num_train_pairs 21"):
        training_pairs(pairs, SimpleNamespace(num_train_pairs=21, label_noise=0.0, train_split="train_prefs"), 0)


def test_demonstrations_are_chosen_responses_or_references():
    prompt, answer = [{"role": "user", "content": "q"}], [{"role": "assistant", "content": "a"}]
    pairs = Dataset.from_list([{"row_id": "1", "prompt": prompt, "chosen": answer, "rejected": prompt}])
    assert demonstrations(pairs, "x")[0] == {"row_id": "1", "prompt": prompt, "completion": answer}
    prompts = Dataset.from_list([{"row_id": "1", "prompt": prompt, "reference_response_text": "a"}])
    assert demonstrations(prompts, "x")[0]["completion"] == answer
    plain = Dataset.from_list([{"row_id": "1", "prompt": "q:", "reference_response_text": " a"}] * 2)
    assert demonstrations(plain, "x", 1)["completion"] == [" a"]
    with pytest.raises(ValueError, match="num_examples 3"):
        demonstrations(plain, "x", 3)
    with pytest.raises(ValueError, match="the split 'x' holds no demonstrations"):
        demonstrations(plain.remove_columns("reference_response_text"), "x")
