"""Links of the README, which leads from the repository's root, as links of the page that it becomes in docs/."""

from __future__ import annotations

import re

# Of docs/, whose pages are beside it; other files of the repository are no pages and lose their link.
PAGE = re.compile(r"\]\(docs/([^)]+)\)")
OTHER = re.compile(r"\[([^\]]+)\]\((?!https?://|#|docs/)[^)]+\)")
# Of a page in docs/: the README, and other files above.
OUTSIDE = re.compile(r"\]\(\.\./README\.md")
ABOVE = re.compile(r"\[([^\]]+)\]\(\.\./[^)]+\)")


def on_page_markdown(markdown: str, page, config, files) -> str:
    """The README's text in the place of the first page's; other pages' links to it lead there."""
    if page.file.src_uri != "index.md":
        return ABOVE.sub(r"\1", OUTSIDE.sub("](index.md", markdown))
    with open("README.md", encoding="utf-8") as file:
        readme = file.read()
    return PAGE.sub(r"](\1)", OTHER.sub(r"\1", readme))
