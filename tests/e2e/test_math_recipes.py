"""SFT and GRPO on verified problems, and the recipe that evaluates: stop strings, files, kills and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support import recipes
from tests.support.recipes import check_figures, read
from tests.support.train_once import in_processes
from tests.support.trl_private import logged_metrics, score_rollout
from trl_ext import PolicyConfig, PolicyTrainer
from trl_ext.data.math import load_math
from trl_ext.rewards import VerifiedReward
from trl_ext.rewards.verified import VerifiedGrader, category_of
from trl_ext.runs import reasoning
from trl_ext.toy import MODEL_DIR

# ---- Stop strings ----


def stop_trainer(folder: Path, stop: list[str] | None, **settings) -> PolicyTrainer:
    settings |= {"per_device_train_batch_size": 16, "num_generations": 4, "max_completion_length": 48, "beta": 0.0}
    config = PolicyConfig(output_dir=str(folder), stop=stop, report_to="none", use_cpu=True, **settings)
    rows = [{"prompt": [{"role": "user", "content": f"What is {n} + 25?"}], "answer": str(n + 25)} for n in range(20)]
    return PolicyTrainer(
        AutoModelForCausalLM.from_pretrained(MODEL_DIR),
        reward_funcs=VerifiedReward("r1_zero"),
        args=config,
        processing_class=AutoTokenizer.from_pretrained(MODEL_DIR),
        train_dataset=Dataset.from_list(rows),
    )


@pytest.mark.parametrize("peft", [False, True])
def test_rollouts_end_at_the_stop_string(peft, tmp_path):
    """Sixteen rollouts of the embedded model, which closes most answers: each ends with the tag or its own end."""
    trainer = stop_trainer(tmp_path, ["</answer>"])
    if peft:
        from peft import LoraConfig, get_peft_model

        trainer.model = get_peft_model(trainer.model, LoraConfig(target_modules=["q_proj"]))
        trainer.model_wrapped = trainer.model
    trainer.model.train()
    rows = [trainer.train_dataset[index // 4] for index in range(16)]
    output = score_rollout(trainer, rows)
    tokenizer = trainer.processing_class
    batch = zip(output["completion_ids"], output["completion_mask"], strict=True)
    responses = [ids[mask.bool()].tolist() for ids, mask in batch]
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in responses]
    closed = [text.endswith("</answer>") for text in texts]
    own_end = [ids[-1] == tokenizer.eos_token_id for ids in responses]
    assert sum(closed) >= 8
    assert all("</answer>" not in text[: -len("</answer>")] for text in texts), "nothing stands behind the tag"
    assert not any(a and b for a, b in zip(closed, own_end, strict=True)), "no end token is put behind the tag"
    assert tokenizer.pad_token_id not in [token for ids in responses for token in ids]
    cut = [not (a or b) for a, b in zip(closed, own_end, strict=True)]
    assert trainer.rewards.finished.tolist() == [not one for one in cut]
    metrics = logged_metrics(trainer)
    assert metrics["completions/clipped_ratio"] == [pytest.approx(sum(cut) / 16)]
    ended = [len(ids) for ids, one in zip(responses, cut, strict=True) if not one]
    assert metrics["completions/mean_terminated_length"] == [pytest.approx(sum(ended) / len(ended))]
    assert vars(trainer.model).get("generate") in (None, trainer.sampler.generate), "the model is left as it was"


def test_what_a_stop_string_ended_pays_no_penalty(tmp_path):
    trainer = stop_trainer(tmp_path, ["</answer>"], missing_eos_penalty=1.0)
    tag = trainer.processing_class("<answer>5</answer>")["input_ids"]
    assert trainer.has_ended(tag) and trainer.has_ended([trainer.processing_class.eos_token_id])
    assert not trainer.has_ended(tag[:-1]) and not trainer.has_ended([])


def test_rewards_read_no_more_than_evaluations(tmp_path):
    """Where the last token holds `>)`, the bracket is no part of the answer; and what tools say is left as it is."""
    seen = []

    def reward(completions, **columns):
        seen.extend(completions)
        return VerifiedReward("r1_zero")(None, completions, answer=columns["answer"])

    trainer = stop_trainer(tmp_path, ["</answer>"])
    trainer.reward_funcs, trainer.reward_func_names = [reward], ["reward"]
    trainer.reward_processing_classes = [None]
    kept = "5 </think> <answer> 30 </answer>"
    ids = trainer.processing_class(kept + ")")["input_ids"]
    message, tool = {"role": "assistant", "content": kept + ")"}, {"role": "tool", "content": kept + ")"}
    for completion, expected in (
        (kept + ")", kept),
        ([message], [{**message, "content": kept}]),
        ([tool, message], [tool, {**message, "content": kept}]),
        ("no end", "no end"),
    ):
        rows = [{"prompt": "5 + 25", "answer": "30"}]
        rewards = trainer.total(trainer.reward(rows, ["5 + 25"], [completion], [ids]))
        assert seen.pop() == expected
        assert rewards.tolist() == [float(completion != "no end")]


# ---- The recipe ----


def test_the_last_number_is_the_answer_of_gsm8k(monkeypatch):
    """In training, validation and the final comparison alike, and no tag ends a response."""
    arguments, _, _ = recipes.parse(monkeypatch, "grpo_math", "--reward", "gsm8k", "--num_eval_prompts", "3")
    sets = reasoning.load_problem_sets(arguments)
    for problems in sets:
        row = problems.rows[0]
        assert problems.reward == "gsm8k"
        assert problems.grade(f"no tags: {row['answer']}", row)["reward"] == 1
        assert problems.grade(f"{row['answer']}, or 0", row)["reward"] == 0
    assert len(sets[2].rows) == 3
    assert reasoning.sampling_settings(arguments, reward="gsm8k").stop == ()
    assert reasoning.sampling_settings(arguments, reward="countdown").stop == ("</answer>",)


# ---- SFT ----


SHORT_SFT = ["--max_steps=6", "--num_eval_prompts=16", "--generation_eval_every=3", "--num_generation_prompts=4"]
SHORT_SFT += ["--save_steps=3", "--save_total_limit=3", "--logging_steps=1", "--disable_tqdm=true"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sft")
    recipes.launch("sft_math", *SHORT_SFT, folder=folder)
    return folder


@pytest.mark.slow
def test_rows_are_graded_and_beside_the_base(finished):
    run = finished / "runs" / "sft-toy"
    rows, base = read(run, "generations.jsonl"), read(run, "samples/base_sampled.jsonl")
    check_figures(run, results := read(run, "results.json"))
    assert results["run"]["filtered"] == {"kept": 293, "of": 400} and results["run"]["train_responses"] == 293
    problems = load_math("toy", "test")[:16]
    assert [row["row_id"] for row in rows] == [row["row_id"] for row in problems]
    for row, other, problem in zip(rows, base, problems, strict=True):
        rewards = VerifiedGrader()(row["response_text"], problem)
        assert row["category"] == category_of(rewards["format_reward"], rewards["answer_reward"])
        assert row["score"] == rewards["reward"] and row["answer"] == problem["answer"]
        assert row["base_response_text"] == other["response_text"]
        assert row["base_score"] == VerifiedGrader()(other["response_text"], problem)["reward"]
    evaluations = [row for row in read(run, "metrics.jsonl") if "eval_score" in row]
    assert [row["step"] for row in evaluations] == [0, 3, 6]
    for row in evaluations:
        rows = read(run, f"samples/step_{row['step']:06d}.jsonl")
        wrong = [one["generated_num_tokens"] for one in rows if one["category"] != "correct"]
        assert row["eval_score"] == sum(one["answer_reward"] for one in rows) / 4
        assert row["eval_rewards/format"] == sum(one["format_reward"] for one in rows) / 4
        assert row["eval_completions/mean_length"] == sum(one["generated_num_tokens"] for one in rows) / 4
        assert row.get("eval_completions/mean_length_incorrect") == (sum(wrong) / len(wrong) if wrong else None)
        assert row["eval_entropy"] == pytest.approx(sum(one["entropy"] for one in rows) / 4)


@pytest.mark.long
@pytest.mark.parametrize(
    ("recipe", "folder", "least"), [("sft_math", "sft-toy", 0.4), ("grpo_math", "grpo-math-toy", 0.2)]
)
def test_a_run_of_the_defaults_learns_to_add(recipe, folder, least, tmp_path):
    """As a user starts it: the interval of the gain in sampled accuracy lies above these."""
    recipes.launch(recipe, folder=tmp_path, timeout=600)
    assert read(tmp_path / "runs" / folder, "results.json")["score"]["gain"]["low"] > least


@pytest.mark.slow
def test_several_processes(finished, tmp_path):
    """Two processes divide the evaluation: the base's greedy responses are those that one process finds."""
    arguments = [*SHORT_SFT, "--per_device_train_batch_size=16", "--use_cpu=true"]
    in_processes(2, str(recipes.RECIPES / "sft_math.py"), *arguments, cwd=tmp_path)
    run, alone = (folder / "runs" / "sft-toy" for folder in (tmp_path, finished))
    assert read(run, "results.json")["run"]["processes"] == 2
    assert len(read(run, "generations.jsonl")) == 16
    greedy = (read(folder, "samples/base_greedy.jsonl") for folder in (run, alone))
    for row, expected in zip(*greedy, strict=True):
        assert row["entropy"] == pytest.approx(expected["entropy"], abs=1e-5)
        assert {**row, "entropy": None} == {**expected, "entropy": None}


def test_demonstrations_are_filtered_and_counted(monkeypatch, capsys):
    """Before any model is loaded; smaller sizes are the beginning of larger ones."""
    problems = {row["row_id"]: row for row in load_math("toy", "train")}
    chosen = []
    for size in (100, 30):
        arguments = recipes.parse(monkeypatch, "sft_math", f"--num_examples={size}")[0]
        rows, counts = reasoning.choose_demonstrations(arguments, reasoning.load_problems(arguments, "train"))
        assert "kept 293 of 400 responses" in capsys.readouterr().out
        assert counts == {"kept": 293, "of": 400} and len(rows) == size
        chosen.append(rows.to_list())
    for row in chosen[0]:
        assert VerifiedGrader()(row["completion"][0]["content"], problems[row["row_id"]])["reward"] == 1
    assert chosen[1] == chosen[0][:30]
