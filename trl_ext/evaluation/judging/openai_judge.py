"""An LLM judge behind any server that implements OpenAI's Responses or Chat Completions API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trl_ext.evaluation.judging.openai_format import SCHEMA, question_text, read_answer
from trl_ext.evaluation.judging.openai_model import OpenAIModel
from trl_ext.evaluation.judging.protocol import Judgement, Messages, Usage
from trl_ext.files import existing_file


class OpenAIJudge(OpenAIModel):
    """Asks a model behind an OpenAI-compatible API which response is better. The answers have a fixed schema.

    Args:
        model: the model's name on the server.
        instructions: the rubric, as a string or as the `Path` of a file; None for the package's own. It must ask for
            the same fields as the package's.
        settings: the other arguments of `OpenAIModel`, such as `base_url` and `api`. An answer that was cut at
            `max_output_tokens` gives no verdict.

    Raises:
        ImportError: the openai package is missing.
        ValueError: `api` is unknown, or the instructions are not text.
        FileNotFoundError: the file of instructions does not exist.
    """

    def __init__(self, model: str = "gpt-5.4", *, instructions: str | Path | None = None, **settings: Any):
        super().__init__(model, **settings)
        self.instructions = _read_instructions(instructions)

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that a verdict depends on other than the question: `OpenAIModel.identity`, and the rubric."""
        return {**super().identity, "instructions": self.instructions}

    def judge(self, prompt: Messages | str, response_a: str, response_b: str) -> Judgement:
        """Judge one question; raises what `OpenAIModel.complete` does."""
        return self.ask(prompt, response_a, response_b)[0]

    def ask(self, prompt: Messages | str, response_a: str, response_b: str) -> tuple[Judgement, Usage]:
        """Judge one question as `judge` does; also return the usage."""
        return self.complete(self.instructions, question_text(prompt, response_a, response_b), SCHEMA, read_answer)

    def estimate_tokens(self, prompt: Messages | str, response_a: str, response_b: str) -> int:
        """Approximate input tokens of a question: a quarter of its UTF-8 bytes."""
        # The schema is sent with the question, and the model reads it.
        sent = (self.instructions, question_text(prompt, response_a, response_b), str(SCHEMA))
        return sum(len(text.encode("utf-8", "replace")) // 4 + 1 for text in sent)


def _read_instructions(instructions: str | Path | None) -> str:
    if instructions is None:
        instructions = Path(__file__).with_name("instructions.md")
    if isinstance(instructions, Path):
        instructions = existing_file(instructions).read_text(encoding="utf-8")
    if len(instructions.split()) < 2:
        raise ValueError(f"instructions must be a text, or the Path of a file that holds one, got {instructions!r}")
    return instructions
