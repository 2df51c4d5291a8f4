"""`trl-ext chat`: a trained model and its base, asked the same questions."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.refusals import assert_one_line
from tests.support.reward_adapters import load_policy as load_adapted
from tests.support.tiny import save_tiny_model
from trl_ext.evaluation import chat


@pytest.fixture
def say(monkeypatch, capsys):
    """Run the command on lines of input; returns what it printed, and what it said beside."""

    def run(*arguments: str, lines: str = "") -> tuple[str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        chat.main([*arguments, "--max_new_tokens", "6"])
        return capsys.readouterr()

    return run


@pytest.fixture
def run_folder(tmp_path, tiny_model_path) -> Path:
    """A run whose policy is another model than its base."""
    folder = tmp_path / "runs" / "mine"
    save_tiny_model(folder, seed=1)
    (folder / "config.yaml").write_text(yaml.safe_dump({"model_name_or_path": tiny_model_path}))
    return folder


def greedy(path: str | Path, *messages: dict, room: int = 1000) -> str:
    """The greedy answer to the last tokens of a conversation, token by token."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    ids = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=True)["input_ids"][
        -room:
    ]
    answer: list[int] = []
    while len(answer) < 6 and (not answer or answer[-1] != tokenizer.eos_token_id):
        answer.append(int(model(torch.tensor([ids + answer])).logits[0, -1].argmax()))
    return tokenizer.decode(answer, skip_special_tokens=True)


def turns(*texts: str) -> list[dict]:
    return [
        {"role": role, "content": text} for role, text in zip(["user", "assistant"] * len(texts), texts, strict=False)
    ]


def test_both_models_answer_with_their_own_conversation(say, run_folder, tiny_model_path):
    printed, _ = say(str(run_folder), "--json", lines="ab\n\nwhy\nnew\nwhy\nexit\nab\n")
    rows = [json.loads(line) for line in printed.splitlines()]
    assert [row["prompt"] for row in rows] == ["ab", "why", "why"]
    for place, path in enumerate((tiny_model_path, run_folder)):
        answers = [row["answers"][place]["text"] for row in rows]
        assert answers[0] == greedy(path, *turns("ab"))
        assert answers[1] == greedy(path, *turns("ab", answers[0], "why"))
        assert answers[2] == greedy(path, *turns("why"))
    assert [answer["model"] for answer in rows[0]["answers"]] == [f"{tiny_model_path} (base)", "mine"]


def test_one_question_and_no_base(say, run_folder):
    printed, _ = say(str(run_folder), "--base", "none", "--prompt", "why", lines="never read\n")
    assert printed == f"> why\nmine: {greedy(run_folder, *turns('why')).strip()}\n\n"


def test_what_does_not_fit_is_forgotten_from_the_beginning(run_folder):
    """Twenty letters take 38 tokens with their turn and the beginning of the answer; the first turn does not fit."""
    model, tokenizer = chat.load_policy(str(run_folder))
    model.config.max_position_embeddings = 46
    speaker = chat.Speaker("mine", model, tokenizer)
    first, second = (speaker.answer(letter * 20, max_new_tokens=6) for letter in "ab")
    assert first == greedy(run_folder, *turns("a" * 20))
    assert second == greedy(run_folder, *turns("a" * 20, first, "b" * 20), room=40)


def test_an_adapter_shares_the_memory_of_its_base(say, tmp_path, tiny_model_path, monkeypatch):
    load_adapted(tiny_model_path).save_pretrained(tmp_path / "run")
    AutoTokenizer.from_pretrained(tiny_model_path).save_pretrained(tmp_path / "run")
    loaded, load = [], chat.load_policy
    monkeypatch.setattr(chat, "load_policy", lambda path, **options: loaded.append(path) or load(path, **options))
    printed, _ = say(str(tmp_path / "run"), "--prompt", "ab", "--json")
    base, policy = json.loads(printed)["answers"]
    assert loaded == [str(tmp_path / "run")]
    assert base["text"] == greedy(tiny_model_path, *turns("ab"))
    assert policy["text"] == greedy(tmp_path / "run", *turns("ab")) != base["text"]


def test_a_model_without_a_chat_template_continues_plain_text(say, tmp_path, run_folder):
    (run_folder / "chat_template.jinja").unlink(missing_ok=True)
    (run_folder / "config.yaml").unlink()
    tokenizer = AutoTokenizer.from_pretrained(run_folder)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(run_folder)
    printed, _ = say(str(run_folder), "--json", lines="ab\nab\n")
    first, second = (json.loads(line)["answers"] for line in printed.splitlines())
    assert first == second and len(first) == 1


def test_refusals(capsys):
    for arguments, words in (
        (["nowhere/at/all"], ["no model folder 'nowhere/at/all'"]),
        (["toy", "--temperature", "-1", "--prompt", "x"], ["temperature", "at least 0", "-1.0"]),
        (["toy", "--temprature", "1"], ["unknown flag --temprature", "did you mean 'temperature'?"]),
        (["toy", "--base", "./nowhere"], ["no model folder './nowhere'"]),
        (["toy", "--max_new_tokens", "5000", "--prompt", "x"], ["no room for a prompt in 2048 tokens"]),
    ):
        with pytest.raises(SystemExit) as ended:
            chat.main(arguments)
        assert ended.value.code == 2
        assert_one_line(capsys.readouterr().err, words)


def test_both_are_sampled_with_the_same_seed(say):
    asked = ("toy", "--base", "toy", "--json", "--prompt", "Name a colour.", "--temperature", "1")
    seeds = ["0", "0", "1", "2", "3"]
    answers = [json.loads(say(*asked, "--seed", seed)[0])["answers"] for seed in seeds]
    assert all(base["text"] == policy["text"] for base, policy in answers)
    texts = [policy["text"] for _, policy in answers]
    assert texts[0] == texts[1] and len(set(texts)) > 1
