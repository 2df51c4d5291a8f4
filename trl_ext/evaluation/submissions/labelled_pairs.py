"""Pairs of responses with a human preference, and recorded verdicts of judges on them, in the formats they come in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trl_ext.data.rows import first_error, read_json_rows
from trl_ext.evaluation.judging.protocol import Verdict

# By the numbers that LLMBar and PandaLM give the responses; PandaLM's annotators write 0 for a tie.
RESPONSES: dict[Any, Verdict] = {"1": "A", "2": "B", "0": "tie", "Tie": "tie"}
PANDALM = "testset-v1.json"


class LabelledPair(BaseModel):
    """Two responses to a prompt, and the one that people prefer: A, B or tie. `kind` is an optional group of pairs."""

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
    """Read JSON lines of `LabelledPair`, LLMBar's folder or a `dataset.json` of it, or PandaLM's folder or test set.

    In JSON lines, `row_id` may be missing: it is then the number of the line. The label of a pair of PandaLM is what
    two of the three annotators say, or a tie.

    Raises:
        FileNotFoundError: there is no such file or folder.
        ValueError: it has no pairs, a row is not a pair, or a row_id repeats.
    """
    path = Path(path)
    if path.is_dir():
        files = [path / PANDALM] if (path / PANDALM).is_file() else sorted(path.rglob("dataset.json"))
        if not files:
            raise ValueError(f"{path}: holds neither LLMBar's folders of dataset.json nor PandaLM's {PANDALM}")
        return [pair for file in files for pair in read_labelled_pairs(file)]
    rows = [(number, _pair(path, number, row)) for number, row in read_json_rows(path)]
    pairs = _validated(path, LabelledPair, rows)
    if repeated := len(pairs) - len({pair.row_id for pair in pairs}):
        raise ValueError(f"{path}: {repeated} row_ids are used more than once")
    return pairs


def read_recorded_verdicts(path: str | Path, pairs: Sequence[LabelledPair]) -> dict[str, list[RecordedVerdict]]:
    """Read each judge's verdicts from JSON lines of `RecordedVerdict`, or from LLMBar's or PandaLM's file of verdicts.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: a row is not a verdict, there are none, or one is about a pair that is not there.
    """
    known, by_judge = {pair.row_id for pair in pairs}, {}
    rows = [(number, fields) for number, row in read_json_rows(path) for fields in _verdicts(row)]
    for row in _validated(path, RecordedVerdict, rows):
        if row.row_id not in known:
            raise ValueError(f"{path}: row_id {row.row_id}: none of the {len(known)} pairs")
        by_judge.setdefault(row.judge, []).append(row)
    return by_judge


def _pair(path: Path, number: int, row: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `LabelledPair`, from a row of any of the formats."""
    if "annotator1" in row:
        told = [str(row.get(f"annotator{k}")) for k in (1, 2, 3)]
        label = next((one for one in told if told.count(one) > 1), "0")
        prompt = "\n\n".join(filter(None, (row.get("instruction"), row.get("input"))))
        # Some responses became booleans on their way into JSON.
        a, b = (str(text) if isinstance(text, bool) else text for text in (row.get("response1"), row.get("response2")))
        row_id, kind = str(row.get("idx")), row.get("cmp_key")
    elif "output_1" in row:
        # LLMBar's kinds are its folders.
        kind, label = path.parent.name.lower(), str(row.get("label"))
        row_id, prompt, a, b = f"{kind}:{number - 1}", row.get("input"), row["output_1"], row.get("output_2")
    else:
        return {"row_id": str(number), **row}
    label = RESPONSES.get(label, label)
    return {"row_id": row_id, "prompt": prompt, "response_a": a, "response_b": b, "label": label, "kind": kind}


def _verdicts(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The fields of `RecordedVerdict`s, from a row of any of the formats; LLMBar's has both orders of many judges."""
    if "judges" in row:
        row_id, judges = f"{str(row.get('subset')).lower()}:{row.get('index')}", row["judges"]
    elif "gpt_result" in row:
        row_id, judges = str(row.get("idx")), {"gpt-3.5-turbo": [row["gpt_result"]]}
    else:
        return [dict(row)]
    return [
        {"row_id": row_id, "judge": judge, "shown_first": shown, "verdict": RESPONSES.get(verdict)}
        for judge, verdicts in judges.items()
        for shown, verdict in zip("AB", verdicts, strict=False)
    ]


def _validated(path: str | Path, row_type: type[BaseModel], rows: Iterable[tuple[int, dict[str, Any]]]) -> list:
    found = []
    for number, fields in rows:
        try:
            found.append(row_type.model_validate(fields))
        except ValidationError as error:
            raise ValueError(f"{path}: row {number}: {first_error(error)}") from None
    return found
