"""The report in headless Chromium: it opens without the network, filters, follows keys, and fits a phone."""

from __future__ import annotations

import shutil

import pytest

from tests.support.report_runs import HOSTILE, write_example, write_two_tasks
from trl_ext.evaluation import write_report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")]
PROMPTS = ["Name a bird.", "Say hi, politely.", "Sort 2 1.", HOSTILE]


@pytest.fixture
def open_report(tmp_path):
    """Opens the report of runs in a window of its own; in the end it must have said nothing and asked for nothing."""
    from playwright.sync_api import sync_playwright

    said, asked, path = [], [], tmp_path / "report.html"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-background-networking"]
        )

        def open_page(write, width: int = 1280, scheme: str = "light"):
            write_report(write(tmp_path / write.__name__ / scheme), path)
            page = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme).new_page()
            page.set_default_timeout(5_000)
            page.on("console", lambda message: said.append(message.text))
            page.on("pageerror", lambda error: said.append(str(error)))
            page.on("dialog", lambda dialog: said.append(dialog.message))
            page.on("request", lambda request: asked.append(request.url))
            page.goto(path.as_uri())
            return page

        yield open_page
        browser.close()
    assert (said, {*asked} - {"data:,", path.as_uri()}) == ([], set())


def listed(page) -> list[str]:
    """The prompts in the list, as the script set them."""
    return page.locator("#prompts li").evaluate_all("items => items.map(item => item.textContent)")


def shown(page) -> dict[str, tuple[str, str]]:
    """Each card's text and outcome, by its name."""
    cards = page.locator("#responses .card").evaluate_all(
        "cards => cards.map(card => [card.querySelector('bdi').textContent, card.querySelector('.words').textContent,"
        " card.querySelector('h4 span')?.textContent ?? ''])"
    )
    return {name: (text, outcome) for name, text, outcome in cards}


def selected(page) -> str:
    return page.locator("#responses .prompt-text .words").evaluate("node => node.textContent")


def test_tables_sort_runs_hide_and_text_of_models_stays_text(open_report):
    page = open_report(write_example)
    names = page.locator("#table-policies tbody th")
    head = page.get_by_role("columnheader", name="gain in true score")
    for order, expected in (("ascending", ["beta", "alpha", "gamma"]), ("descending", ["gamma", "alpha", "beta"])):
        head.get_by_role("button").click()
        assert (names.all_inner_texts(), head.get_attribute("aria-sort")) == (expected, order)
    page.locator("#prompts li").nth(3).click()
    assert (listed(page), selected(page)) == (PROMPTS, HOSTILE)
    assert (shown(page)["alpha"], shown(page)["gamma"]) == ((HOSTILE, "wins"), ("(empty)", "wins"))
    assert page.evaluate("window.pwned") is None
    lines = page.locator("#curves svg[aria-label='win rate, ties as half'] g[data-run]:visible")
    loss = page.locator("svg[aria-label='loss, aot']")
    assert (lines.count(), loss.is_visible()) == (3, True)
    page.get_by_role("checkbox", name="beta").uncheck()
    assert (lines.count(), loss.is_visible(), "beta" in shown(page)) == (2, False, False)
    page.get_by_role("button", name="None", exact=True).click()
    assert page.locator("figure:visible").count() == 0


def test_filters_and_keys(open_report):
    """Outcomes by prompt: alpha win, tie, loss, win; beta win, win, loss, tie; gamma loss, win, loss, win."""
    page = open_report(write_example)
    for key, place in (("j", 1), ("j", 2), ("k", 1), ("k", 0), ("k", 0)):
        page.keyboard.press(key)
        assert selected(page) == PROMPTS[place]
    page.keyboard.press("/")
    page.keyboard.type("KINDLY")
    assert listed(page) == [] and shown(page) == {}
    page.get_by_label("or a response does").check()
    assert listed(page) == [PROMPTS[1]], "gamma's response"
    page.get_by_role("button", name="Clear").click()
    page.get_by_label("Kind", exact=True).select_option(label="say")
    assert listed(page) == [PROMPTS[1], PROMPTS[3]]
    page.get_by_role("button", name="Clear").click()
    for outcome, of, places in (
        ("policy wins", "any run shown", [0, 1, 3]),
        ("base wins", "every run shown", [2]),
        ("tie", "alpha", [1]),
    ):
        page.get_by_label("Outcome", exact=True).select_option(label=outcome)
        page.get_by_label("Run of the outcome").select_option(label=of)
        assert listed(page) == [PROMPTS[index] for index in places]
    page.get_by_role("button", name="Clear").click()
    page.get_by_label("Methods").select_option(label="disagree in the outcome")
    assert listed(page) == [PROMPTS[0], PROMPTS[1], PROMPTS[3]]


def test_tasks_and_phones(open_report):
    page = open_report(write_two_tasks)
    titles = ["Preferences on pairs", "Verified problems on pairs"]
    assert page.locator("nav p a:first-child").all_inner_texts() == titles
    assert set(shown(page)) == {"base", "a-dpo", "c-grpo"}
    page.get_by_label("Task").select_option(label=titles[1])
    assert set(shown(page)) == {"base", "b-sum", "d-sum"}
    for write in (write_example, write_two_tasks):
        page = open_report(write, 360, "dark")
        page.locator("details").evaluate_all("nodes => nodes.forEach(node => { node.open = true; })")
        page.locator("#prompts li").nth(3).click()
        boxes = page.locator("figure svg, .card, #filters > *").evaluate_all(
            "nodes => nodes.map(node => [node.getBoundingClientRect().left, node.getBoundingClientRect().right])"
        )
        assert min(left for left, _ in boxes) >= 0 and max(right for _, right in boxes) <= 360
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
