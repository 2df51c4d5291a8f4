"""Blind labels by hand: which pair is next, in which order its responses are shown, and the file of labels."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trl_ext.data.rows import read_jsonl
from trl_ext.evaluation.reporting.page import page_of
from trl_ext.evaluation.statistics.sampled_labels import draw_order, draw_weights, uncertainty
from trl_ext.evaluation.submissions.rows import HumanLabel, read_rows, refuse_fatal
from trl_ext.files import existing_file, write_json_lines

# Verdicts for the candidate in both orders, by a row's outcome in the file of `judge --verdicts`.
WINS = {"candidate": 2, "base": 0, "tie": 1, "disagree": 1}


def read_uncertainty(paths: Iterable[str | Path], candidate: str, row_ids: Sequence[str]) -> dict[str, float]:
    """How uncertain the judges' verdicts on each row are, from files of `public_eval.judge --verdicts`.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: a file has no verdicts on the candidate's responses to these rows.
    """
    verdicts: dict[str, list[int]] = {row_id: [] for row_id in row_ids}
    for path in paths:
        rows = [row for _, row in read_jsonl(existing_file(path)).rows if row.get("candidate") == candidate]
        rows = [row for row in rows if row.get("row_id") in verdicts and row.get("outcome") in WINS]
        if not rows:
            raise ValueError(f"{path}: no verdicts on {candidate}: make it with `public_eval.judge --verdicts`")
        for row in rows:
            verdicts[row["row_id"]].append(WINS[row["outcome"]])
    sizes = uncertainty(map(sum, verdicts.values()), [2 * len(found) for found in verdicts.values()])
    return dict(zip(row_ids, sizes, strict=True))


class LabelSession:
    """The labels of one person on one candidate, which are written to a file at once.

    Args:
        pairs: what to label, by row_id: texts named `prompt`, `candidate` and `base`.
        path: the JSONL file, which `judge --human_labels` reads; an earlier session in it goes on. None for a page.
        seed: seed of the order of the rows and of the two responses.
        sizes: by row_id, in proportion to which rows are drawn (see `sampled_labels`), and the labels get a weight;
            None for a random order without weights.

    Raises:
        ValueError: the file has bad rows, or its labels are of other responses, another seed or other sizes.
    """

    def __init__(
        self,
        pairs: Mapping[str, Mapping[str, str]],
        path: str | Path | None,
        *,
        seed: int = 0,
        sizes: Mapping[str, float] | None = None,
    ):
        self.pairs, self.path, self.seed = pairs, path and Path(path), seed
        self.weighted = sizes is not None
        self.sizes = sizes or dict.fromkeys(pairs, 1.0)
        self.order = draw_order(self.sizes, seed)
        drawn = json.dumps([seed, self.weighted, *([row_id, pairs[row_id]] for row_id in self.order)])
        self.identity = hashlib.sha256(drawn.encode()).hexdigest()[:12]
        # By row_id in the order of labelling; None for a row that was skipped in this session.
        self.labels: dict[str, str | None] = {}
        if self.path and self.path.is_file():
            rows, problems = read_rows(self.path, HumanLabel, list(pairs), complete=False)
            refuse_fatal(problems)
            if any(row.get("session") != self.identity for row in rows.values()):
                raise ValueError(
                    f"{self.path} holds labels from elsewhere, of other responses, or of another --seed or "
                    "--verdicts: give the same, or another --out"
                )
            self.labels = {row_id: row["outcome"] for row_id, row in rows.items()}

    def next(self) -> str | None:
        """The row_id of the pair to label now; None after the last."""
        return next((row_id for row_id in self.order if row_id not in self.labels), None)

    def shown(self, row_id: str) -> tuple[str, str]:
        """Which system's response is shown first, and which second."""
        systems = ("candidate", "base")
        return systems if random.Random(f"{self.seed}:order:{row_id}").random() < 0.5 else systems[::-1]

    def label(self, row_id: str, choice: str) -> None:
        """Keep a choice: `1` or `2` of the responses as shown, `t` for a tie, or `s` for no label."""
        self.labels[row_id] = {**dict(zip("12", self.shown(row_id), strict=True)), "t": "tie", "s": None}[choice]
        write_json_lines(self.path, self.rows())

    def undo(self) -> None:
        """Take the last choice back, if there is one."""
        if self.labels:
            self.labels.popitem()
            write_json_lines(self.path, self.rows())

    def rows(self) -> list[dict[str, Any]]:
        """The rows of the file."""
        labels = {row_id: outcome for row_id, outcome in self.labels.items() if outcome}
        rows = [{"row_id": row_id, "outcome": outcome, "session": self.identity} for row_id, outcome in labels.items()]
        if self.weighted:
            order = {row_id: priority for row_id, priority in self.order.items() if self.labels.get(row_id, "new")}
            weights = draw_weights(self.sizes, order, list(labels))
            rows = [{**row, "weight": weights[row["row_id"]]} for row in rows]
        return rows

    def page(self, title: str) -> str:
        """One HTML file in which a browser collects the same labels, without a network."""
        rows = []
        for row_id, priority in self.order.items():
            pair, shown = self.pairs[row_id], self.shown(row_id)
            rows.append([row_id, pair["prompt"], [pair[who] for who in shown], shown, priority, self.sizes[row_id]])
        data = {"session": self.identity, "weighted": self.weighted, "rows": rows}
        return page_of("label", data, title=title)
