"""Blind labels by hand: which pair is next, in which order its responses are shown, and the file of labels."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trl_ext.data.rows import read_jsonl
from trl_ext.evaluation.reporting.page import asset, digest, embed, fill
from trl_ext.evaluation.statistics.sampled_labels import draw_order, draw_weights, uncertainty
from trl_ext.evaluation.submissions.rows import HumanLabelRow, Response, read_rows, refuse_fatal
from trl_ext.files import existing_file, write_json_lines

# Verdicts for the candidate in both orders, by a row's outcome in the file of `judge --verdicts`.
WINS = {"candidate": 2, "base": 0, "tie": 1, "disagree": 1}


@dataclass(frozen=True)
class Pair:
    """A prompt as text, and the two responses to it."""

    row_id: str
    prompt: str
    candidate: str
    base: str


def make_pairs(
    prompts: Sequence[Mapping[str, Any]], candidate: Sequence[Response], base: Sequence[Response]
) -> list[Pair]:
    """The pairs to label; a prompt of several messages names who speaks."""

    def text(row: Mapping[str, Any]) -> str:
        if isinstance(row["prompt"], str) or len(row["prompt"]) == 1:
            return row["prompt_text"]
        return "\n\n".join(f"{message['role']}: {message['content']}" for message in row["prompt"])

    rows = zip(prompts, candidate, base, strict=True)
    return [Pair(row["row_id"], text(row), own.text, other.text) for row, own, other in rows]


def read_uncertainty(paths: Iterable[str | Path], candidate: str, row_ids: Sequence[str]) -> dict[str, float]:
    """How uncertain the judges' verdicts on each row are, from files of `public_eval.judge --verdicts`.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: a file has no verdicts on the candidate's responses to these rows.
    """
    wins, verdicts = dict.fromkeys(row_ids, 0), dict.fromkeys(row_ids, 0)
    for path in paths:
        found = [row for _, row in read_jsonl(existing_file(path)).rows if row.get("candidate") == candidate]
        found = [row for row in found if row.get("row_id") in wins and row.get("outcome") in WINS]
        if not found:
            raise ValueError(f"{path}: no verdicts on {candidate}: make it with `public_eval.judge --verdicts`")
        for row in found:
            wins[row["row_id"]] += WINS[row["outcome"]]
            verdicts[row["row_id"]] += 2
    return dict(zip(row_ids, uncertainty(wins.values(), verdicts.values()), strict=True))


class LabelSession:
    """The labels of one person on one candidate, which are written to a file at once.

    Args:
        pairs: what to label.
        path: the JSONL file, which `judge --human_labels` reads; an earlier session in it goes on. None for a page.
        seed: seed of the order of the rows and of the two responses.
        sizes: by row_id, in proportion to which rows are drawn (see `sampled_labels`), and the labels get a weight;
            None for a random order without weights.

    Raises:
        ValueError: the file has bad rows, or its labels are of other responses, another seed or other sizes.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        path: str | Path | None,
        *,
        seed: int = 0,
        sizes: Mapping[str, float] | None = None,
    ):
        self.pairs = {pair.row_id: pair for pair in pairs}
        self.path = path and Path(path)
        self.seed = seed
        self.is_weighted = sizes is not None
        self.sizes = dict(sizes) if sizes is not None else dict.fromkeys(self.pairs, 1.0)
        self.order = draw_order(self.sizes, seed)
        drawn = [[seed, self.is_weighted], *([*vars(self.pairs[row]).values()] for row in self.order)]
        self.identity = hashlib.sha256(json.dumps(drawn).encode()).hexdigest()[:12]
        # By row_id in the order of labelling; None for a row that was skipped in this session.
        self.labels: dict[str, str | None] = {}
        if self.path and self.path.is_file():
            rows, problems = read_rows(self.path, HumanLabelRow, list(self.pairs), complete=False)
            refuse_fatal(problems)
            if any(row.get("session") != self.identity for row in rows.values()):
                raise ValueError(
                    f"{self.path} holds labels of other responses, or of another --seed or --verdicts: give the same, "
                    "or another --out"
                )
            self.labels = {row_id: row["outcome"] for row_id, row in rows.items()}

    def next(self) -> Pair | None:
        """The pair to label now; None after the last."""
        return next((self.pairs[row_id] for row_id in self.order if row_id not in self.labels), None)

    def shown(self, row_id: str) -> tuple[str, str]:
        """Which system's response is shown first, and which second."""
        systems = ("candidate", "base")
        return systems if random.Random(f"{self.seed}:order:{row_id}").random() < 0.5 else systems[::-1]

    def label(self, row_id: str, choice: str) -> None:
        """Keep a choice: `1` or `2` of the responses as shown, `tie`, or `skip` for no label."""
        outcomes = dict(zip("12", self.shown(row_id), strict=True)) | {"tie": "tie", "skip": None}
        self.labels[row_id] = outcomes[choice]
        self._write()

    def undo(self) -> bool:
        """Take the last choice back; False if there is none."""
        if self.labels:
            self.labels.popitem()
            self._write()
            return True
        return False

    def rows(self) -> list[dict[str, Any]]:
        """The rows of the file."""
        labels = {row_id: outcome for row_id, outcome in self.labels.items() if outcome is not None}
        order = {
            row_id: priority for row_id, priority in self.order.items() if self.labels.get(row_id, "") is not None
        }
        weights = draw_weights(self.sizes, order, list(labels)) if self.is_weighted else {}
        return [
            {"row_id": row_id, "outcome": outcome}
            | ({"weight": weights[row_id]} if weights else {})
            | {"session": self.identity}
            for row_id, outcome in labels.items()
        ]

    def page(self, title: str) -> str:
        """One HTML file in which a browser collects the same labels, without a network."""
        rows = []
        for row_id in self.order:
            pair, shown = self.pairs[row_id], self.shown(row_id)
            texts = [getattr(pair, system) for system in shown]
            rows.append([row_id, pair.prompt, texts, shown, self.order[row_id], self.sizes[row_id]])
        return fill(
            asset("label.html"),
            title=title,
            data=embed({"session": self.identity, "weighted": self.is_weighted, "rows": rows}),
            style=asset("report.css"),
            script=asset("label.js"),
            policy=f"default-src 'none'; script-src {digest('label.js')}; style-src {digest('report.css')}; "
            "img-src data:; base-uri 'none'; form-action 'none'",
        )

    def _write(self) -> None:
        write_json_lines(self.path, self.rows())
