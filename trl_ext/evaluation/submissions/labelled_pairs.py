"""Pairs of responses with a human preference, and recorded verdicts of judges on them, in the formats they come in."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trl_ext.data.rows import first_error, read_jsonl
from trl_ext.evaluation.judging.protocol import Verdict
from trl_ext.files import existing_file

# By the numbers that LLMBar and PandaLM give the responses; PandaLM's annotators write 0 for a tie.
RESPONSES: dict[str, Verdict] = {"1": "A", "2": "B", "0": "tie", "Tie": "tie"}
LLMBAR_VERDICTS, PANDALM_PAIRS, PANDALM_VERDICTS = "verdicts.jsonl", "testset-v1.json", "gpt-3.5-turbo-testset-v1.json"


class LabelledPair(BaseModel):
    """Two responses to a prompt, and the one that people prefer.

    `prompt` is a text or a list of messages, `label` is A, B or tie, and `kind` an optional group of pairs.
    """

    model_config = ConfigDict(strict=True)

    row_id: str
    prompt: str | list[dict[str, str]]
    response_a: str
    response_b: str
    label: Verdict
    kind: str | None = None

    @property
    def messages(self) -> list[dict[str, str]]:
        """The prompt as messages."""
        return [{"role": "user", "content": self.prompt}] if isinstance(self.prompt, str) else self.prompt


class RecordedVerdict(BaseModel):
    """One answer of a judge. Several answers to the same question are several rows.

    `shown_first` is the response that was shown first, and `verdict` the preferred one, A or B wherever it was shown;
    null if the judge gave no verdict. `confidence` is the probability that the verdict is right.
    """

    model_config = ConfigDict(strict=True)

    row_id: str
    judge: str = "judge"
    shown_first: Literal["A", "B"]
    verdict: Verdict | None
    confidence: Annotated[float, Field(ge=0, le=1)] | None = None


def read_labelled_pairs(path: str | Path) -> list[LabelledPair]:
    """Read pairs from JSON lines of `LabelledPair`, LLMBar's folder or `dataset.json`, or PandaLM's folder or file.

    In JSON lines, `row_id` may be missing: it is then the number of the line. The label of a pair of PandaLM is what
    two of the three annotators say, or a tie.

    Raises:
        FileNotFoundError: there is no such file or folder.
        ValueError: it has no pairs, or a row is not a pair.
    """
    path = Path(path)
    if path.is_dir():
        if (path / PANDALM_PAIRS).is_file():
            return read_labelled_pairs(path / PANDALM_PAIRS)
        files = sorted(path.rglob("dataset.json"))
        if not files:
            raise ValueError(f"{path}: neither LLMBar's folders of dataset.json nor PandaLM's {PANDALM_PAIRS}")
        return [pair for file in files for pair in read_labelled_pairs(file)]
    if path.suffix == ".json":
        kind = path.parent.name.lower()
        return _checked(path, LabelledPair, (_foreign_pair(row, n, kind) for n, row in enumerate(_json_list(path))))
    return _json_lines(path, LabelledPair)


def read_recorded_verdicts(path: str | Path, pairs: Sequence[LabelledPair]) -> dict[str, list[RecordedVerdict]]:
    """Read each judge's verdicts from JSON lines of `RecordedVerdict`, or from LLMBar's or PandaLM's file of verdicts.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: a row is not a verdict, there are none, or one is about a pair that is not there.
    """
    path = Path(path)
    if path.suffix == ".json":
        rows = [
            {
                **{"row_id": str(row.get("idx")), "judge": "gpt-3.5-turbo", "shown_first": "A"},
                "verdict": RESPONSES.get(row.get("gpt_result")),
            }
            for row in _json_list(path)
        ]
        verdicts = _checked(path, RecordedVerdict, rows)
    else:
        verdicts = _json_lines(path, RecordedVerdict, _verdict_rows)
    known = {pair.row_id for pair in pairs}
    foreign = next((row.row_id for row in verdicts if row.row_id not in known), None)
    if foreign is not None:
        raise ValueError(f"{path}: row_id {foreign}: none of the {len(known)} pairs")
    by_judge: dict[str, list[RecordedVerdict]] = {}
    for row in verdicts:
        by_judge.setdefault(row.judge, []).append(row)
    return by_judge


def _foreign_pair(row: Mapping[str, Any], number: int, kind: str) -> dict[str, Any]:
    """A row of LLMBar's `dataset.json`, or of PandaLM's test set, as fields of a `LabelledPair`."""
    if "annotator1" in row:
        told = [str(row.get(f"annotator{k}")) for k in (1, 2, 3)]
        label = next((one for one in told if told.count(one) > 1), "0")
        given = "\n\n".join(filter(None, (row.get("instruction"), row.get("input"))))
        responses, row_id, kind = (row.get("response1"), row.get("response2")), str(row.get("idx")), row.get("cmp_key")
    else:
        label, given, row_id = str(row.get("label")), row.get("input"), f"{kind}:{number}"
        responses = row.get("output_1"), row.get("output_2")
    # Some of PandaLM's responses became booleans on their way into JSON.
    texts = [str(text) if isinstance(text, bool) else text for text in responses]
    fields = dict(zip(("response_a", "response_b"), texts, strict=True))
    return {"row_id": row_id, "prompt": given, **fields, "label": RESPONSES.get(label, label), "kind": kind}


def _verdict_rows(row: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """The row itself, or the verdicts of many judges in a row of LLMBar's file."""
    if "judges" not in row:
        return [row]
    row_id = f"{str(row.get('subset')).lower()}:{row.get('index')}"
    return [
        {"row_id": row_id, "judge": judge, "shown_first": shown, "verdict": RESPONSES.get(verdict)}
        for judge, verdicts in row["judges"].items()
        for shown, verdict in zip("AB", verdicts, strict=True)
    ]


def _json_list(path: Path) -> list[dict[str, Any]]:
    try:
        rows = json.loads(existing_file(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path}: must be a JSON list of objects")
    return rows


def _json_lines(
    path: Path, row_type: type[BaseModel], expand: Callable[..., Iterable[Mapping[str, Any]]] = lambda row: [row]
) -> list:
    found = read_jsonl(path)
    if found.problems:
        raise ValueError(found.describe())
    return _checked(path, row_type, ({"row_id": str(n), **row} for n, line in found.rows for row in expand(line)))


def _checked(path: Path, row_type: type[BaseModel], rows: Iterable[Mapping[str, Any]]) -> list:
    found = []
    for number, row in enumerate(rows, start=1):
        try:
            found.append(row_type.model_validate(row))
        except ValidationError as error:
            raise ValueError(f"{path}: row {number}: {first_error(error)}") from None
    if not found:
        raise ValueError(f"{path}: the file is empty")
    ids = {row.row_id for row in found}
    if row_type is LabelledPair and len(ids) < len(found):
        raise ValueError(f"{path}: {len(found) - len(ids)} row_ids are used more than once")
    return found
