"""Equations of the pages as MathML, which browsers show by themselves: nothing is fetched by who reads the pages."""

from __future__ import annotations

import html
import re

from latex2mathml.converter import convert

# What GitHub takes as a displayed equation, and what pymdownx.arithmatex does.
FENCE = re.compile(r"^```math\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', flags=re.DOTALL)
DISPLAYED = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', flags=re.DOTALL)


def on_page_markdown(markdown: str, page, config, files) -> str:
    """Fences of equations as blocks between double dollars."""
    return FENCE.sub(r"$$\n\1$$", markdown)


def on_page_content(content: str, page, config, files) -> str:
    """Equations as MathML."""
    content = INLINE.sub(lambda match: _mathml(match, "inline"), content)
    return DISPLAYED.sub(lambda match: _mathml(match, "block"), content)


def _mathml(match: re.Match, display: str) -> str:
    return convert(html.unescape(match[1]).strip(), display=display)
