"""An LLM judge behind any server that implements OpenAI's Responses or Chat Completions API."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from trl_ext.evaluation.judging.openai_model import OpenAIModel, sections_text
from trl_ext.evaluation.judging.protocol import Judgement, Messages, Usage
from trl_ext.files import existing_file

Rating = Annotated[int, Field(ge=1, le=5)]
# If a judge names the same response as best and worst, it considers neither good.
ALL_WEAK = "all_weak"
# Strings that models write for an empty list of tags.
_NO_TAG = ("", "none", "n/a", "null")


class JudgeAnswer(BaseModel, extra="forbid", strict=True):
    """A judge's answer; the reason comes before the verdict."""

    reason: str
    best: Literal["A", "B"]
    worst: Literal["A", "B"]
    confidence: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
    strength: Rating
    usable: bool
    quality: Rating
    exclusion_tags: list[str]


class OpenAIJudge(OpenAIModel):
    """Asks a model behind an OpenAI-compatible API which response is better. The answers have a fixed schema.

    Args:
        model: the model's name on the server.
        instructions: the rubric, as a string or as the `Path` of a file; None for the package's own. It must ask for
            the same fields as the package's.
        settings: the other arguments of `OpenAIModel`, such as `base_url` and `api`.

    Raises:
        ImportError: the openai package is missing.
        ValueError: `api` is unknown, or the instructions are not text.
        FileNotFoundError: the file of instructions does not exist.
    """

    def __init__(self, model: str = "gpt-5.4", *, instructions: str | Path | None = None, **settings: Any):
        super().__init__(model, **settings)
        if instructions is None:
            instructions = Path(__file__).with_name("instructions.md")
        if isinstance(instructions, Path):
            instructions = existing_file(instructions).read_text(encoding="utf-8")
        if len(instructions.split()) < 2:
            raise ValueError(f"instructions must be a text, or the Path of a file of it, got {instructions!r}")
        self.instructions = instructions

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that a verdict depends on other than the question: `OpenAIModel.identity`, and the rubric."""
        return {**super().identity, "instructions": self.instructions}

    def judge(self, prompt: Messages | str, response_a: str, response_b: str) -> Judgement:
        """Judge one question; raises what `OpenAIModel.complete` does."""
        return self.ask(prompt, response_a, response_b)[0]

    def ask(self, prompt: Messages | str, response_a: str, response_b: str) -> tuple[Judgement, Usage]:
        """Judge one question as `judge` does; also return the usage."""
        question = question_text(prompt, response_a, response_b)
        answer, usage = self.complete(self.instructions, question, JudgeAnswer)
        return read_answer(answer), usage

    def estimate_tokens(self, prompt: Messages | str, response_a: str, response_b: str) -> int:
        """Approximate input tokens of a question, with its schema: a quarter of its UTF-8 bytes."""
        schema = str(JudgeAnswer.model_json_schema())
        sent = (self.instructions, question_text(prompt, response_a, response_b), schema)
        return sum(len(text.encode("utf-8", "replace")) // 4 + 1 for text in sent)


def question_text(prompt: Messages | str, response_a: str, response_b: str) -> str:
    """A pairwise judge's input: the conversation and both responses."""
    return sections_text(prompt, ("response A", response_a), ("response B", response_b))


def read_answer(answer: JudgeAnswer) -> Judgement:
    """The judgement in an answer, with `usable` and `quality` made consistent with its tags and labels.

    Any exclusion tag makes it unusable and limits its quality to 2. If best and worst have the same label, it is
    unusable, its quality is at most 1, and the tag `all_weak` is added; the verdict is still the best label.
    """
    tags = [tag.strip() for tag in answer.exclusion_tags if tag.strip().lower() not in _NO_TAG]
    best_quality = 2 if tags else 5
    if answer.worst == answer.best:
        best_quality = 1
        tags += [] if ALL_WEAK in tags else [ALL_WEAK]
    return Judgement(
        verdict=answer.best,
        usable=answer.usable and not tags,
        worst=answer.worst,
        confidence=answer.confidence,
        strength=answer.strength,
        quality=min(answer.quality, best_quality),
        exclusion_tags=tuple(tags),
        reason=answer.reason.strip(),
    )
