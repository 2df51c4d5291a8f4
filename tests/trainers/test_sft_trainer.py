"""Fine-tuning on demonstrations, and expert iteration: tokens, loss, what a round keeps, resumption, the recipe."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
import trl
from accelerate.utils import set_seed
from datasets import Dataset
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support import recipes
from tests.support.files import read_rows
from tests.support.tiny import build_tokenizer, response_log_prob
from tests.support.train_once import DEFAULTS
from trl_ext import ExpertIterationConfig, ExpertIterationTrainer, SFTConfig, SFTTrainer
from trl_ext.data import encode_turn
from trl_ext.data.math import load_math, math_prompt
from trl_ext.rewards.verified import VerifiedGrader, r1_zero_reward
from trl_ext.rollouts import SamplingSettings, responses
from trl_ext.toy import MODEL_DIR
from trl_ext.trainers.expert_iteration import NoCorrectResponseError, keep_correct
from trl_ext.trainers.sft import _encode

ROWS = [
    {"prompt": "one and ", "completion": "two"},
    {"prompt": "a longer prompt, then ", "completion": "four words of completion"},
    {"prompt": "ca", "completion": "t"},
    {"prompt": "one and ", "completion": "three or four"},
]


def messages(rows: list[dict]) -> list[dict]:
    roles = {"prompt": "user", "completion": "assistant"}
    return [{name: [{"role": roles[name], "content": text}] for name, text in row.items()} for row in rows]


def trainer_of(model: str, folder: Path, rows: list[dict], **args) -> SFTTrainer:
    args = SFTConfig(**{**DEFAULTS, "gradient_accumulation_steps": 2, **args, "output_dir": str(folder)})
    return SFTTrainer(model, args=args, train_dataset=Dataset.from_list(rows))


@pytest.mark.parametrize("conversational", [False, True])
def test_rows_are_the_tokens_of_prompt_and_completion(conversational, tmp_path):
    """Tokenized apart: `ca` and `t` are not `cat`, which the model never generates from `ca`."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    rows = messages(ROWS) if conversational else ROWS
    trainer = trainer_of(str(MODEL_DIR), tmp_path, rows)
    for row, text, encoded in zip(rows, ROWS, trainer.train_dataset, strict=True):
        if conversational:
            prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=True)
            prompt = prompt["input_ids"]
        else:
            prompt = tokenizer(text["prompt"])["input_ids"]
        completion = tokenizer(text["completion"])["input_ids"]
        whole = [*prompt, *completion, tokenizer.eos_token_id]
        assert encoded["input_ids"][: len(whole)] == whole
        labels = encoded["labels"]
        assert labels[: len(prompt)] == [-100] * len(prompt)
        assert labels[len(prompt) :] == encoded["input_ids"][len(prompt) :]
    ids = [tokenizer(text)["input_ids"] for text in ("ca", "t", "cat")]
    assert ids[0] + ids[1] != ids[2], "or else the row proves nothing"


def test_the_loss_is_the_mean_over_completion_tokens(tiny_model_path, tmp_path):
    """Of the whole optimizer batch, with two micro-batches: their tokens count alike, whichever they are in."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path)
    total = tokens = 0
    for row in ROWS:
        completion = [*tokenizer(row["completion"])["input_ids"], tokenizer.eos_token_id]
        total -= response_log_prob(model, tokenizer(row["prompt"])["input_ids"], completion).item()
        tokens += len(completion)
    trainer = trainer_of(tiny_model_path, tmp_path, ROWS)
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(total / tokens, rel=1e-4)


def test_long_rows_are_counted(tiny_model_path, tmp_path, caplog):
    """One token for each byte, and one to end: rows of 12, 47, 4 and 22 tokens; the prompt of the second has 22."""
    with caplog.at_level(logging.WARNING):
        trainer = trainer_of(tiny_model_path, tmp_path, ROWS, max_length=20)
    assert "2 of 4 rows exceed max_length 20" in caplog.text
    assert len(trainer.train_dataset) == 3
    caplog.clear()
    turns = [{"messages": [*row["prompt"], *row["completion"]]} for row in messages(ROWS)]
    with caplog.at_level(logging.WARNING):
        lengths = [
            len(ids) for ids in trainer_of(tiny_model_path, tmp_path, turns, max_length=40).train_dataset["input_ids"]
        ]
    assert f"{lengths.count(40)} of 4 rows reach max_length 40" in caplog.text and 40 in lengths
    with pytest.raises(ValueError, match="no completion of the train dataset is within max_length"):
        trainer_of(tiny_model_path, tmp_path, ROWS, max_length=2)


def test_thoughts_are_trained_as_they_are_written():
    """Qwen3's template would set line breaks around the thoughts, and the grader would not know the form."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    problem, written = [{"role": "user", "content": "2+2?"}], " 2+2=4 </think> <answer> 4 </answer>"
    for text in (f"<think>{written}", "<think>\n2+2=4\n</think>\n\nIt is 4."):
        found = _encode({"prompt": problem, "completion": [{"role": "assistant", "content": text}]}, tokenizer)
        completion = [token for token, own in zip(found["input_ids"], found["completion_mask"], strict=True) if own]
        assert tokenizer.decode(completion) == f"{text}<|im_end|>\n"
    _, truncated = encode_turn(tokenizer, problem, f"<think>{written}", verbatim=True, finished=False)
    assert tokenizer.decode(truncated) == f"<think>{written}"
    assert r1_zero_reward(tokenizer.decode(truncated), "4")["reward"] == 1
    # Where the generation prompt opens the thoughts, the template says what follows.
    begin = "<|im_start|>assistant\\n"
    tokenizer.chat_template = tokenizer.chat_template.replace(f"'{begin}' }}}}", f"'{begin}<think>\\n' }}}}")
    prompt, ids = encode_turn(tokenizer, problem, "<think>\n2+2=4\n</think>\n\nIt is 4.", verbatim=True)
    assert tokenizer.decode(prompt + ids).count("<think>") == 1


def test_tools_are_refused(tiny_model_path, tmp_path):
    with pytest.raises(ValueError, match="'tools' of the train dataset is not used"):
        trainer_of(tiny_model_path, tmp_path, [{**ROWS[0], "tools": "[]"}])


# ---- Expert iteration ----

COMMON = {"learning_rate": 5e-4, "per_device_train_batch_size": 16, "per_device_eval_batch_size": 64}
COMMON |= {"logging_steps": 1, "report_to": "none", "use_cpu": True, "disable_tqdm": True}
SHORT = "--n_steps=2 --questions_per_step=40 --rollouts_per_question=2 --sft_epochs=1 --num_validation_prompts=4"
SHORT = [*SHORT.split(), "--num_eval_prompts=6", "--logging_steps=1", "--disable_tqdm=true"]


def build(folder: Path, *, grade=None, rows=None, ask=None, limit=48, **settings) -> ExpertIterationTrainer:
    """320 responses to a round, of which 256 are saved at once, so that a round's sampling can break in the middle."""
    rows = rows or load_math("toy", "train")
    own = {"n_steps": 3, "questions_per_step": 80, "rollouts_per_question": 4, "sft_epochs": 1, "seed": 3}
    return ExpertIterationTrainer(
        str(MODEL_DIR),
        ExpertIterationConfig(output_dir=str(folder), **{**COMMON, **own, **settings}),
        rows=rows,
        prompts=[math_prompt(row, ask) for row in rows],
        grade=grade or VerifiedGrader("r1_zero"),
        settings=SamplingSettings(max_new_tokens=limit, batch_size=128),
    )


def right(response, row):
    return {"reward": 1.0, "format_reward": 1.0, "answer_reward": 1.0}


def wrong(response, row):
    return {"reward": 0.0, "format_reward": 1.0, "answer_reward": 0.0}


def same_weights(one: Path, other: Path) -> bool:
    one, other = (load_file(folder / "model.safetensors") for folder in (one, other))
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


# ---- What is kept ----


def graded(*rows: tuple[str, str, str]) -> list[dict]:
    return [{"row_id": i, "response_text": text, "category": category, "finished": True} for i, text, category in rows]


def test_correct_responses_are_kept_once():
    """Of a: x twice and y are correct, z is not. Of b: x, the same text, is a response to another question."""
    rows = graded(("a", "x", "correct"), ("a", "z", "wrong_answer"), ("a", "x", "correct"), ("a", "y", "correct"))
    rows += graded(("b", "w", "wrong_format"), ("b", "x", "correct"))
    for limit, expected in ((None, ["ax", "ay", "bx"]), (1, ["ax", "bx"]), (2, ["ax", "ay", "bx"])):
        assert [row["row_id"] + row["response_text"] for row in keep_correct(rows, limit)] == expected


def test_what_the_limit_cut_is_not_kept():
    """Behind its right answer the first goes on in mid-sentence; the same text of another row ended there."""
    rows = graded(("a", r"\boxed{5}, for the", "correct"), ("a", r"\boxed{5}.", "correct"))
    rows[0]["finished"] = False
    assert keep_correct(rows) == keep_correct(rows, 1) == rows[1:]


@pytest.mark.parametrize(
    ("grade", "limit", "counts"),
    [
        # Two tokens are too few for any end.
        (right, 2, "'correct': 10, 'wrong_answer': 0"),
        (wrong, 48, "'correct': 0, 'wrong_answer': 10"),
    ],
)
def test_a_round_without_a_response_to_keep_says_so(grade, limit, counts, tmp_path):
    trainer = build(tmp_path, grade=grade, limit=limit, questions_per_step=5, rollouts_per_question=2)
    expected = f"round 1 .* none of 10 responses to 5 questions .*{counts}"
    with pytest.raises(NoCorrectResponseError, match=expected):
        trainer.train()
    (figures,) = [row for row in read_rows(tmp_path / "metrics.jsonl") if "rollouts/kept" in row]
    assert figures["rollouts/kept"] == 0


# ---- A round ----


def test_rounds_sample_anew(tmp_path):
    """With one question and a learning rate of 0, the rounds differ by their seeds alone."""
    one = {"n_steps": 2, "questions_per_step": 1, "rollouts_per_question": 8, "learning_rate": 0.0}
    build(tmp_path, grade=right, rows=load_math("toy", "train")[:1], **one).train()
    first, second = (read_rows(tmp_path / "samples" / f"expert_{step}_rollouts.jsonl") for step in (1, 2))
    assert [row["response_text"] for row in first] != [row["response_text"] for row in second]


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    """Three rounds without interruption."""
    folder = tmp_path_factory.mktemp("expert")
    trainer = build(folder)
    trainer.train()
    # As a notebook has them.
    logged, written = trainer.state.log_history, read_rows(folder / "metrics.jsonl")
    names = ("rollouts/reward", "loss", "train_loss")
    assert [[row.get(name) for name in names] for row in logged] == [[row.get(n) for n in names] for row in written]
    return folder


@pytest.mark.slow
class TestRounds:
    def test_a_dataset_is_the_correct_responses_of_its_round(self, straight):
        answers = {row["row_id"]: row["answer"] for row in load_math("toy", "train")}
        for step in (1, 2, 3):
            rollouts = read_rows(straight / "samples" / f"expert_{step}_rollouts.jsonl")
            assert len(rollouts) == 320 and len({row["row_id"] for row in rollouts}) == 80
            expected = {
                (row["row_id"], row["response_text"])
                for row in rollouts
                if row["response_text"].endswith(f"</think> <answer>{answers[row['row_id']]}</answer>")
            }
            rows = read_rows(straight / "samples" / f"expert_{step}_dataset.jsonl")
            found = [(row["row_id"], row["completion"][0]["content"]) for row in rows]
            assert len(found) == len(set(found)) and set(found) == expected

    def test_metrics(self, straight):
        """Steps go on over the rounds: a round of n rows makes ceil(n / 16) updates."""
        metrics = read_rows(straight / "metrics.jsonl")
        rounds = [row for row in metrics if "expert_step" in row]
        assert [row["expert_step"] for row in rounds] == [1, 2, 3]
        updates = [-(-row["rollouts/kept"] // 16) for row in rounds]
        assert [row["step"] for row in rounds] == [0, updates[0], updates[0] + updates[1]]
        losses = [row["step"] for row in metrics if "loss" in row]
        assert losses == list(range(1, sum(updates) + 1))
        for row in rounds:
            rollouts = read_rows(straight / "samples" / f"expert_{row['expert_step']}_rollouts.jsonl")
            for name, key in (("reward", "reward"), ("format", "format_reward"), ("entropy", "entropy")):
                assert row[f"rollouts/{name}"] == pytest.approx(sum(one[key] for one in rollouts) / 320)
        # Twice the standard error of the difference of two means of 320 such rewards.
        assert rounds[2]["rollouts/reward"] > rounds[0]["rollouts/reward"] + 0.06
        assert rounds[2]["rollouts/entropy"] < rounds[0]["rollouts/entropy"]

    def test_a_round_is_fine_tuning_on_its_dataset(self, straight, tmp_path):
        """`SFTTrainer` by itself, on what the file of the first round holds, ends with the same weights."""
        rows = Dataset.from_list(read_rows(straight / "samples" / "expert_1_dataset.jsonl"))
        config = SFTConfig(output_dir=str(tmp_path), num_train_epochs=1, save_strategy="no", seed=3, **COMMON)
        trainer = SFTTrainer(str(MODEL_DIR), config, train_dataset=rows)
        set_seed(3 + 1)
        trainer.train()
        trainer.save_model(str(tmp_path / "sft"))
        assert same_weights(tmp_path / "sft", straight / "checkpoint-1")

    def test_a_run_that_breaks_in_sampling_goes_on_as_the_straight_one(self, straight, tmp_path, monkeypatch):
        """In the second round, with 256 of 320 responses sampled."""
        sample, calls = responses.map_over_ranks, []

        def breaking(*arguments):
            calls.append(arguments)
            # Each round samples 256 responses and then 64.
            if len(calls) == 4:
                raise KeyboardInterrupt
            return sample(*arguments)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(responses, "map_over_ranks", breaking)
            build(tmp_path).train(resume_from_checkpoint=False)
        assert (tmp_path / "checkpoint-1").is_dir() and not (tmp_path / "checkpoint-2").exists()
        build(tmp_path).train(resume_from_checkpoint=True)
        assert same_weights(tmp_path / "checkpoint-3", straight / "checkpoint-3")
        for name in ("expert_1_dataset", "expert_2_rollouts", "expert_3_dataset"):
            path = Path("samples") / f"{name}.jsonl"
            assert (tmp_path / path).read_bytes() == (straight / path).read_bytes()
        steps = [[row["step"] for row in read_rows(folder / "metrics.jsonl")] for folder in (tmp_path, straight)]
        assert steps[0] == steps[1]

    def test_a_checkpoint_that_cannot_be_resumed_from(self, straight, tmp_path):
        with pytest.raises(FileNotFoundError, match="has no checkpoint to resume from"):
            build(tmp_path).train(resume_from_checkpoint=True)
        with pytest.raises(ValueError, match="is of a run with 16 examples to an update, and now it is 8: "):
            build(straight, per_device_train_batch_size=8).train(resume_from_checkpoint=True)


def test_more_questions_than_there_are(tmp_path):
    with pytest.raises(ValueError, match="questions_per_step 500 is more than the 400 problems"):
        build(tmp_path, questions_per_step=500)


# ---- The recipe ----


def check_a_run(run: Path) -> None:
    """Check what a run of two rounds of 80 responses leaves, of which one to a question is kept."""
    results, rows = json.loads((run / "results.json").read_text()), read_rows(run / "generations.jsonl")
    assert results["score"]["policy"] == sum(row["score"] for row in rows) / 6
    assert results["run"]["sampled_responses"] == 160
    validations = [row for row in read_rows(run / "metrics.jsonl") if "eval_score" in row]
    assert len(validations) == 3 and validations[0]["step"] == 0
    assert validations[-1]["step"] == results["run"]["optimizer_steps"]
    for step in (1, 2):
        questions = [row["row_id"] for row in read_rows(run / "samples" / f"expert_{step}_dataset.jsonl")]
        assert len(questions) == len(set(questions))
    assert sorted(path.name for path in run.glob("checkpoint-*")) == ["checkpoint-2"]
    assert (run / "report.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_two_rounds_of_the_recipe(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    recipes.run(monkeypatch, "expert_iteration", *SHORT, "--max_per_question", "1", "--output_dir", "straight")
    check_a_run(tmp_path / "straight")
    assert "accuracy, sampled" in capsys.readouterr().out


def test_a_round_without_a_correct_response_is_one_line(tmp_path, monkeypatch, capsys):
    """Answers in a box are asked for, which the embedded model never writes."""
    monkeypatch.chdir(tmp_path)
    arguments = [*SHORT, "--output_dir", "run", "--reward", "question_only"]
    line = recipes.refused(monkeypatch, capsys, "expert_iteration", *arguments)
    assert "none of 80 responses to 40 questions was correct" in line


@pytest.mark.long
def test_the_default_run_improves(tmp_path):
    """The recipe without arguments, as a user starts it: the interval of the gain lies above 0.2."""
    recipes.launch("expert_iteration", folder=tmp_path, timeout=600)
    results = json.loads((tmp_path / "runs" / "expert-iteration-toy" / "results.json").read_text())
    assert results["score"]["gain"]["low"] > 0.2
