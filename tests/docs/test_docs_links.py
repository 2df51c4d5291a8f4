"""Links of the pages in docs/, as the built documentation has them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from docs.links import on_page_markdown


@pytest.mark.parametrize(
    ("page", "link", "built"),
    [
        ("policy.md", "[KTO](kto.md#data)", "[KTO](kto.md#data)"),
        ("policy.md", "[README](../README.md#pages)", "[README](index.md#pages)"),
        ("policy.md", "[a recipe](../recipes/grpo.py)", "a recipe"),
        ("learn/policy.md", "[KTO](../kto.md)", "[KTO](../kto.md)"),
        ("learn/policy.md", "![plot](../images/plot.png)", "![plot](../images/plot.png)"),
        ("learn/policy.md", "[README](../../README.md)", "[README](../index.md)"),
        ("learn/policy.md", "[a notebook](../../recipes/notebooks/1.ipynb)", "a notebook"),
    ],
)
def test_links_stay_within_the_pages(page, link, built):
    found = on_page_markdown(f"See {link}.", SimpleNamespace(file=SimpleNamespace(src_uri=page)), None, None)
    assert found == f"See {built}."
