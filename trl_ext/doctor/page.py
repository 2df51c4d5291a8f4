"""A report as one HTML page, which needs no network and no script."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from trl_ext.doctor.report import Report
from trl_ext.files import write_text

_STYLE = """
:root { color-scheme: light dark; --text: #1b1e23; --page: #fff; --faint: #5a6270; --line: #d3d7de; --learned: #bfe8cb;
  --bar: #0060c7; --error: #a8143a; --warning: #9a5b00; }
@media (prefers-color-scheme: dark) { :root { --text: #e7eaef; --page: #14171c; --faint: #a3acba; --line: #39404b;
  --learned: #1f5a35; --bar: #5aa2ff; --error: #ff7f9c; --warning: #ffb45c; } }
body { margin: 0 auto; padding: 0 1rem 2rem; max-width: 60rem; background: var(--page); color: var(--text);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; }
h2 { margin-top: 2rem; border-top: 1px solid var(--line); padding-top: .8rem; font-size: 1.25rem; }
h3 { margin: 1.2rem 0 .2rem; font-size: 1rem; } .error { color: var(--error); } .warning { color: var(--warning); }
p { margin: .2rem 0; } .note { color: var(--faint); font-size: .875rem; }
.tokens { font-family: ui-monospace, monospace; font-size: .875rem; line-height: 1.9;
  white-space: pre-wrap; margin: .5rem 0; }
.tokens span { border: 1px solid var(--line); border-radius: .2rem; margin-right: 1px; color: var(--faint); }
.tokens .learned { background: var(--learned); color: var(--text); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; text-align: right; border-bottom: 1px solid var(--line); }
svg { width: 100%; max-width: 30rem; height: auto; } svg rect { fill: var(--bar); }
svg text { fill: var(--faint); font-size: 11px; }
"""
# Metrics of the first updates, in the order of the table's columns.
_METRICS = (
    *("step", "learning_rate", "loss", "grad_norm", "reward", "reward_std", "frac_reward_zero_std", "kl"),
    *("rewards/margins", "rewards/accuracies", "min_reward", "max_reward", "accuracy", "mean_token_accuracy"),
    *("completions/mean_length", "completions/clipped_ratio", "entropy"),
)


def write_page(report: Report, path: str | Path, title: str = "") -> None:
    """Write the findings, two rows with what is learned, and the figures of the first steps as a page.

    Args:
        report: what was found.
        path: the page's file.
        title: what was examined.
    """
    head = f"Doctor{': ' if title else ''}{title}"
    parts = [f"<h1>{escape(head)}</h1>", _findings(report)]
    if report.rows:
        note = "Rows as the trainer sees them. The loss is taken on the marked tokens."
        parts += ["<h2>Tokens</h2>", f'<p class="note">{note}</p>', *map(_tokens, report.rows)]
    for name, what in (("rewards", "Rewards of the sampled responses"), ("lengths", "Lengths in tokens")):
        if values := [value for value in report.figures.get(name, ()) if math.isfinite(value)]:
            parts += [f"<h2>{what}</h2>", _histogram(values, what)]
    if updates := report.figures.get("updates"):
        parts += ["<h2>First updates</h2>", _table(updates)]
    policy = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    write_text(
        Path(path),
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(head)}</title><style>{_STYLE}</style></head><body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n",
    )


def _findings(report: Report) -> str:
    skipped = "".join(
        f"<p class='note'>Not checked: {escape(f'{n} ({why})')}</p>" for n, why in report.skipped.items()
    )
    if report.healthy:
        return f"<p>No fault was found by {len(report.checked)} checks.</p>{skipped}"
    parts = [f"<p>{report.count} found by {len(report.checked)} checks.</p>"]
    for one in report.findings:
        parts.append(f'<h3><span class="{one.severity}">{one.severity}</span>: {escape(one.name)}</h3>')
        parts += [f"<p>{escape(one.evidence)}</p>", f"<p><b>Remedy:</b> {escape(one.remedy)}</p>"]
        parts += [_tokens(one.tokens)] if one.tokens else []
    return "\n".join(parts) + skipped


def _tokens(row: Iterable[tuple[str, bool]]) -> str:
    spans = [
        f"<span{' class=learned' if learned else ''}>{escape(text.replace(chr(10), '↵'))}</span>"
        for text, learned in row
    ]
    return f'<div class="tokens">{"".join(spans)}</div>'


def _histogram(values: Sequence[float], what: str) -> str:
    counts, edges = np.histogram(values, bins=min(20, max(len(set(values)), 1)))
    width, height = 480 / len(counts), 120
    bars = []
    for index, count in enumerate(counts.tolist()):
        tall = height * count / max(counts.max(), 1)
        label = f"<title>{edges[index]:.3g} to {edges[index + 1]:.3g}: {count}</title>"
        at = f'x="{index * width:.1f}" y="{height - tall + 14:.1f}" width="{width - 1:.1f}" height="{tall:.1f}"'
        bars.append(f"<rect {at}>{label}</rect>")
    ends = [(0, "start", edges[0]), (480, "end", edges[-1])]
    texts = [f'<text x="{x}" y="{height + 28}" text-anchor="{anchor}">{end:.3g}</text>' for x, anchor, end in ends]
    texts.append(f'<text x="0" y="10">{int(counts.max())} of {len(values)}</text>')
    summary = f"mean {np.mean(values):.3g}, standard deviation {np.std(values):.3g}, {len(values)} values"
    return (
        f'<svg viewBox="0 0 480 {height + 32}" role="img" aria-label="{escape(what)}">{"".join(bars + texts)}</svg>'
        f'<p class="note">{summary}</p>'
    )


def _table(rows: Sequence[dict[str, Any]]) -> str:
    names = [name for name in _METRICS if any(isinstance(row.get(name), int | float) for row in rows)]
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(f"<tr>{''.join(f'<td>{_cell(row.get(name))}</td>' for name in names)}</tr>" for row in rows[:50])
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else ""
