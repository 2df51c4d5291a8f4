"""Prompt templates: those of the library word by word where their form matters, and a user's own."""

from __future__ import annotations

import pytest

from tests.support import REPOSITORY
from trl_ext.data.math import load_prompt_template, render, template_names


def test_r1_zero_is_a_conversation_that_stops_at_the_thoughts():
    prompt = render(load_prompt_template("r1_zero"), "What is 2 + 3?")
    introduction, user, assistant = prompt.split("\n")
    assert user == "User: What is 2 + 3?"
    assert assistant == "Assistant: <think>" and prompt.endswith("Assistant: <think>")
    assert introduction.index("<think>") < introduction.index("</think>") < introduction.index("<answer>")
    assert "</think> <answer> the answer </answer>" in introduction


def test_the_form_that_the_prompt_shows_earns_the_reward():
    from trl_ext.rewards import r1_zero_reward

    shown = load_prompt_template("r1_zero").split("in this form: <think>")[1].split("\n")[0].rstrip(".")
    assert r1_zero_reward(shown.replace("the answer", "5"), "5")["reward"] == 1


def test_the_others():
    assert render(load_prompt_template("question_only"), "What?") == "What?"
    prompt = render(load_prompt_template("alpaca_sft"), "Name a colour.")
    assert prompt.endswith("\n\n### Instruction:\nName a colour.\n\n### Response:\n")
    assert template_names() == ["alpaca_sft", "boxed", "question_only", "r1_zero"]


def test_a_users_own(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("Set {a} of é: {question} {question}\n\n", encoding="utf-8")
    template = load_prompt_template(path)
    assert template == load_prompt_template(str(path)) == "Set {a} of é: {question} {question}\n"
    assert render(template, r"\frac{1}{2} {question_}") == (
        "Set {a} of é: \\frac{1}{2} {question_} \\frac{1}{2} {question_}\n"
    )


def test_what_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="alpaca_sft, boxed, question_only, r1_zero; did you mean 'r1_zero'"):
        load_prompt_template("r1-zero")
    path = tmp_path / "mine.txt"
    path.write_text("{Question}")
    with pytest.raises(ValueError, match=r"mine\.txt: no \{question\} in this prompt template"):
        load_prompt_template(path)


def test_the_files_are_part_of_the_package():
    import fnmatch
    import tomllib

    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["trl_ext"]
    for name in template_names():
        assert any(fnmatch.fnmatch(f"data/prompt_templates/{name}.txt", pattern) for pattern in patterns)
