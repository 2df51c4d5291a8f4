"""The answer that an LLM judge must give: its JSON schema, its validation, and the judgement in it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trl_ext.evaluation.judge import Judgement, normalised

Rating = Annotated[int, Field(ge=1, le=5)]
# What models write for an empty list of tags.
_NO_TAG = ("", "none", "n/a", "null")


class JudgeAnswer(BaseModel):
    """The fields of an answer, in the order in which the judge writes them: the reason comes before the verdict."""

    model_config = ConfigDict(extra="forbid", strict=True)

    reason: str
    best: Literal["A", "B"]
    worst: Literal["A", "B"]
    confidence: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
    strength: Rating
    usable: bool
    quality: Rating
    exclusion_tags: list[str]


def answer_schema() -> dict[str, Any]:
    """JSON schema for structured output: every field required, no others allowed."""
    schema = JudgeAnswer.model_json_schema()
    properties = {
        name: {key: value for key, value in field.items() if key != "title"}
        for name, field in schema["properties"].items()
    }
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def read_answer(text: str) -> Judgement:
    """The judgement in the text of an answer, normalised.

    Raises:
        ValueError: it is not JSON, or breaks the schema.
    """
    try:
        answer = JudgeAnswer.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{where}: {first['msg']}" if where else first["msg"]) from None
    tags = tuple(tag.strip() for tag in answer.exclusion_tags if tag.strip().lower() not in _NO_TAG)
    return normalised(
        Judgement(
            verdict=answer.best,
            usable=answer.usable,
            worst=answer.worst,
            confidence=answer.confidence,
            strength=answer.strength,
            quality=answer.quality,
            exclusion_tags=tags,
            reason=answer.reason.strip(),
        )
    )
