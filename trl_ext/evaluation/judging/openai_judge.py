"""An LLM judge behind any server that implements OpenAI's Chat Completions API."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError

from trl_ext.data.rows import first_error
from trl_ext.evaluation.judging.protocol import JudgeError, Judgement, JudgeUnavailable, Messages, Usage
from trl_ext.files import existing_file

KEY_VARIABLE = "OPENAI_API_KEY"
OPENAI_URL = "https://api.openai.com/v1"
MAX_OUTPUT_TOKENS = 2048
# Each attempt costs as much as a valid answer.
BAD_ANSWER_RETRIES = 2
# Error codes of a 429 for which waiting does not help.
_SPENT = {"insufficient_quota", "billing_hard_limit_reached", "billing_not_active"}
# What to do about an error that every request meets.
_ADVICE = {
    401: "the key is missing or refused: set OPENAI_API_KEY to a valid one for this server",
    402: "the account has no credit left: add some, and run again; what is judged already is not asked again",
    404: "check the name of the model and the address of the server",
}
Rating = Annotated[int, Field(ge=1, le=5)]
# If a judge names the same response as best and worst, it considers neither good.
ALL_WEAK = "all_weak"
Answer = TypeVar("Answer", bound=BaseModel)
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


class OpenAIJudge:
    """Asks a model behind an OpenAI-compatible API which response is better. The answers have a fixed schema.

    The key is read only from the environment variable OPENAI_API_KEY; your own server at a `base_url` may need none.
    The SDK retries failed requests. After an invalid answer (outside the schema, empty, truncated or a refusal), the
    question is asked up to two more times. The judge may be asked from several threads.

    Args:
        model: the model's name on the server.
        instructions: the rubric, as a string or as the `Path` of a file; None for the package's own. It must ask for
            the same fields as the package's.
        base_url: the API's address, such as `http://localhost:8000/v1`; None for OPENAI_BASE_URL, or OpenAI's own.
        timeout: seconds to wait for the next part of an answer; a streamed answer may take longer in total.
        max_retries: how often a failed request is sent again.
        max_output_tokens: maximum length of an answer, including reasoning. A truncated answer is invalid.
        reasoning_effort: None for the server's default; not every model accepts it.

    Raises:
        ImportError: the openai package is missing.
        ValueError: the instructions are not text.
        FileNotFoundError: the file of instructions does not exist.
    """

    def __init__(
        self,
        model: str = "gpt-5.4",
        *,
        instructions: str | Path | None = None,
        base_url: str | None = None,
        timeout: float = 60.0,
        max_retries: int = 6,
        max_output_tokens: int = MAX_OUTPUT_TOKENS,
        reasoning_effort: str | None = None,
    ):
        try:
            import openai  # noqa: F401
        except ImportError as error:
            raise ImportError("OpenAIJudge needs the package openai: pip install 'trl_ext[judge]'") from error
        if instructions is None:
            instructions = Path(__file__).with_name("instructions.md")
        if isinstance(instructions, Path):
            instructions = existing_file(instructions).read_text(encoding="utf-8")
        if len(instructions.split()) < 2:
            raise ValueError(f"instructions must be a text, or the Path of a file of it, got {instructions!r}")
        self.model, self.instructions, self.base_url = model, instructions, base_url
        self.timeout, self.max_retries, self.max_output_tokens = timeout, max_retries, max_output_tokens
        self.reasoning_effort = reasoning_effort
        self._answered = False

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that a verdict depends on other than the question.

        It includes whether the server was your own, but not its address, since addresses change. A non-default token
        limit is included, because it decides which answers are complete.
        """
        settings: dict[str, Any] = {"kind": "openai", "model": self.model, "instructions": self.instructions}
        if self.reasoning_effort is not None:
            settings["reasoning_effort"] = self.reasoning_effort
        if self.max_output_tokens != MAX_OUTPUT_TOKENS:
            settings["max_output_tokens"] = self.max_output_tokens
        if self._server != OPENAI_URL:
            settings["server"] = "own"
        return settings

    def judge(self, prompt: Messages | str, response_a: str, response_b: str) -> Judgement:
        return self.ask(prompt, response_a, response_b)[0]

    def ask(self, prompt: Messages | str, response_a: str, response_b: str) -> tuple[Judgement, Usage]:
        """Judge one question, and return the usage too.

        Raises:
            JudgeError: there is no answer to this question.
            JudgeUnavailable: every question would fail: the key is missing or rejected, the model is unknown, or the
                server cannot be reached.
        """
        question = question_text(prompt, ("response A", response_a), ("response B", response_b))
        answer, usage = self.complete(self.instructions, question, JudgeAnswer)
        return read_answer(answer), usage

    def complete(self, instructions: str, question: str, schema: type[Answer]) -> tuple[Answer, Usage]:
        """The model's answer to any question in the form of a pydantic model; raises what `ask` does."""
        usage = Usage()
        for attempt in range(1 + BAD_ANSWER_RETRIES):
            reply, failure = self._send(instructions, question, schema)
            usage = replace(usage + _usage(reply), retries=attempt)
            if failure is not None:
                failure.usage = usage
                raise failure
            try:
                answer = schema.model_validate_json(_text(reply))
                self._answered = True
                return answer, usage
            except ValidationError as error:
                advice = "if all answers do, choose a model and a server that produce structured output"
                reason, is_of_server = f"the answer breaks the schema: {first_error(error)}; {advice}", True
            except ValueError as error:
                reason, is_of_server = str(error), False
            except (AttributeError, IndexError, TypeError):
                advice = "check the address, which ends in /v1 for most servers"
                reason, is_of_server = f"the reply is not one of the Chat Completions API: {advice}", True
        reason = f"{self._without_key(reason)} ({usage.calls} attempts)"
        raise JudgeError(reason, usage=usage, server_failed=is_of_server)

    def estimate_tokens(self, prompt: Messages | str, response_a: str, response_b: str) -> int:
        """Approximate input tokens of a question, with its schema: a quarter of its UTF-8 bytes."""
        question = question_text(prompt, ("response A", response_a), ("response B", response_b))
        sent = (self.instructions, question, str(JudgeAnswer.model_json_schema()))
        return sum(len(text.encode("utf-8", "replace")) // 4 + 1 for text in sent)

    @property
    def _server(self) -> str:
        return self.base_url or os.environ.get("OPENAI_BASE_URL") or OPENAI_URL

    @cached_property
    def _client(self):
        import openai

        key = os.environ.get(KEY_VARIABLE, "").strip()
        if not key and self._server == OPENAI_URL:
            raise JudgeUnavailable(f"{KEY_VARIABLE} is not set: export it, or give the base_url of your own server")
        settings = {"base_url": self.base_url, "timeout": self.timeout, "max_retries": self.max_retries}
        return openai.OpenAI(api_key=key or "none", **settings)

    def _send(
        self, instructions: str, question: str, answer: type[BaseModel]
    ) -> tuple[Any, JudgeError | JudgeUnavailable | None]:
        """The reply to one request, or the failure, which is not raised where the SDK's error would carry the key."""
        import openai

        schema = {"name": "verdict", "strict": True, "schema": answer.model_json_schema()}
        settings: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "system", "content": instructions}, {"role": "user", "content": question}],
            "response_format": {"type": "json_schema", "json_schema": schema},
            "max_completion_tokens": self.max_output_tokens,
            **({"reasoning_effort": self.reasoning_effort} if self.reasoning_effort else {}),
        }
        try:
            return self._client.chat.completions.create(**settings), None
        except openai.APIStatusError as error:
            return None, self._status_failure(error.status_code, error.body)
        except openai.APITimeoutError as error:
            cause, reason = error.__cause__, f"no answer within {self.timeout:g} s"
        except openai.APIConnectionError as error:
            cause = error.__cause__ or error
            reason = f"{self._server} cannot be reached: {type(cause).__name__}: check the address"
        # A server that has answered before is only away for a while.
        is_absent = type(cause).__name__ in ("ConnectError", "ConnectTimeout") and not self._answered
        return None, JudgeUnavailable(reason) if is_absent else JudgeError(reason, server_failed=True)

    def _status_failure(self, status: int, body: Any) -> JudgeError | JudgeUnavailable:
        body = body if isinstance(body, dict) else {}
        reason = self._without_key(f"{status} {body.get('message') or ''}")
        if status == 429 and {body.get("code"), body.get("type")} & _SPENT:
            status = 402
        if status in _ADVICE:
            return JudgeUnavailable(f"{self._server} gives no verdicts: {reason}; {_ADVICE[status]}")
        return JudgeError(reason, server_failed=status in (408, 409, 429) or status >= 500)

    def _without_key(self, text: str) -> str:
        """A server's message in one short line, without the key, which some servers repeat when they reject it."""
        key = os.environ.get(KEY_VARIABLE, "")
        line = " ".join(text.split())
        # A placeholder such as "x" is not a secret, and occurs in many words.
        return (line.replace(key, "[key]") if len(key) >= 8 else line)[:400]


def question_text(prompt: Messages | str, *sections: tuple[str, str]) -> str:
    """The conversation and further sections, each a name and a text, between markers that no text can guess."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    conversation = "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)
    # Model output may contain unpaired surrogates, which cannot be sent.
    texts = [text.encode("utf-8", "replace").decode() for text in (conversation, *(text for _, text in sections))]
    code = hashlib.sha256("\x00".join(texts).encode()).hexdigest()[:12]
    names = ("conversation", *(name for name, _ in sections))
    return "\n".join([*(f"[{name} {code}]\n{text}" for name, text in zip(names, texts, strict=True)), f"[end {code}]"])


def _text(reply: Any) -> str:
    """The text of a reply; ValueError if the judge refused, or its answer is truncated or empty."""
    choice = reply.choices[0]
    if refusal := getattr(choice.message, "refusal", None):
        raise ValueError(f"the judge refused: {refusal}")
    if choice.finish_reason == "length":
        raise ValueError("the answer was truncated at max_output_tokens: raise it")
    if choice.finish_reason == "content_filter":
        raise ValueError("the answer is incomplete: content_filter")
    if not (choice.message.content or "").strip():
        raise ValueError("the answer is empty")
    return choice.message.content


def _usage(reply: Any) -> Usage:
    """What a request cost; servers leave out some of it."""
    counts = getattr(reply, "usage", None)
    shown, answered = (getattr(counts, name, None) or 0 for name in ("prompt_tokens", "completion_tokens"))
    return Usage(calls=1, input_tokens=shown, output_tokens=answered)


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
