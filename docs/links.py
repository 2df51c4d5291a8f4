"""Links of the README, which leads from the repository's root, as links of the page that it becomes in docs/."""

from __future__ import annotations

import re

# Of docs/, whose pages are beside it; other files of the repository are no pages and lose their link.
PAGE = re.compile(r"\]\(docs/([^)]+)\)")
OTHER = re.compile(r"\[([^\]]+)\]\((?!https?://|#|docs/)[^)]+\)")


def on_page_markdown(markdown: str, page, config, files) -> str:
    """The README's text in the place of the first page's; other pages' links to it lead there."""
    if page.file.src_uri != "index.md":
        return _page_links(markdown, page.file.src_uri)
    with open("README.md", encoding="utf-8") as file:
        readme = file.read()
    return PAGE.sub(r"](\1)", OTHER.sub(r"\1", readme))


def _page_links(markdown: str, path: str) -> str:
    """Links between pages stay, links to the README lead to the first page, and links to other files become text."""
    to_docs = "../" * path.count("/")
    outside = re.escape(to_docs + "../")
    markdown = re.sub(rf"\]\({outside}README\.md", f"]({to_docs}index.md", markdown)
    return re.sub(rf"\[([^\]]+)\]\({outside}[^)]+\)", r"\1", markdown)
