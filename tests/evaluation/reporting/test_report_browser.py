"""The report in headless Chromium: it opens without the network, filters, follows keys, and fits a phone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.report_runs import HOSTILE, write_example, write_policy, write_two_tasks
from trl_ext.evaluation import write_report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium"),
]
PROMPTS = ["Name a bird.", "Say hi, politely.", "Sort 2 1.", HOSTILE]


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-background-networking"]
        )
        yield browser
        browser.close()


@pytest.fixture
def open_report(browser, tmp_path):
    """Opens the report of runs in a window of its own; in the end it must have said nothing and asked for nothing."""
    said, asked = [], []

    def open_page(write=write_example, width: int = 1280, scheme: str = "light"):
        folder = tmp_path / f"runs-{write.__name__}"
        if not folder.exists():
            write(folder)
        path: Path = tmp_path / "report.html"
        write_report(folder, path)
        page = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme).new_page()
        page.context.set_default_timeout(5_000)
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("dialog", lambda dialog: said.append(dialog.message))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(path.as_uri())
        asked.remove(path.as_uri())
        return page

    yield open_page
    for context in browser.contexts:
        context.close()
    assert (said, [url for url in asked if url != "data:,"]) == ([], [])


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


def overflow(page) -> int:
    return page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")


def test_everything_is_there_and_text_of_models_stays_text(open_report):
    page = open_report()
    headings = ["Summary", "Curves", "Reward against KL", "Length and diversity", "Reward models", "Generations"]
    assert page.locator("h2").all_inner_texts() == headings
    assert all(page.locator("svg[role=img]").evaluate_all("nodes => nodes.map(node => node.ariaLabel)"))
    names = page.locator("#table-policies tbody th")
    head = page.get_by_role("columnheader", name="gain in true score")
    for order, expected in (("ascending", ["beta", "alpha", "gamma"]), ("descending", ["gamma", "alpha", "beta"])):
        head.get_by_role("button").click()
        assert (names.all_inner_texts(), head.get_attribute("aria-sort")) == (expected, order)
    assert listed(page) == PROMPTS
    page.locator("#prompts li").nth(3).click()
    assert selected(page) == HOSTILE
    assert (shown(page)["alpha"], shown(page)["gamma"]) == ((HOSTILE, "wins"), ("(empty)", "wins"))
    assert page.evaluate("window.pwned") is None
    assert page.locator("main img, main script, .toggles b").count() == 0


def test_filters(open_report):
    """Outcomes by prompt: alpha win, tie, loss, win; beta win, win, loss, tie; gamma loss, win, loss, win."""
    page = open_report()
    page.get_by_label("Prompt contains").fill("SORT")
    assert listed(page) == [PROMPTS[2]]
    assert page.locator("#matches").inner_text() == "1 of 4 prompts"
    assert shown(page)["base"] == ("1 2 3", "")
    page.get_by_label("Prompt contains").fill("kindly")
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
    # Methods disagree in the outcome on all but the third; without gamma on the second and the fourth alone.
    page.get_by_label("Methods").select_option(label="disagree in the outcome")
    assert listed(page) == [PROMPTS[0], PROMPTS[1], PROMPTS[3]]
    page.get_by_role("checkbox", name="gamma").uncheck()
    assert listed(page) == [PROMPTS[1], PROMPTS[3]]
    assert set(shown(page)) == {"base", "alpha", "beta"}


def test_keys(open_report):
    page = open_report()
    for key, place in (("j", 1), ("j", 2), ("k", 1), ("k", 0), ("k", 0)):
        page.keyboard.press(key)
        assert selected(page) == PROMPTS[place]
    page.locator("#prompts").focus()
    for key, place in (("ArrowDown", 1), ("End", 3), ("ArrowUp", 2), ("Home", 0)):
        page.keyboard.press(key)
        assert selected(page) == PROMPTS[place]
    page.keyboard.press("/")
    page.keyboard.type("jk/")
    assert (page.locator("#search").input_value(), listed(page)) == ("jk/", []), "in a field they are letters"
    page.keyboard.press("Escape")
    assert (page.locator("#search").input_value(), listed(page)) == ("", PROMPTS)


def test_a_run_can_be_hidden_and_many_open_with_one_of_each_method(open_report):
    """A hidden run's curves and responses go, and a chart of no other run."""
    page = open_report()
    lines = page.locator("#curves svg[aria-label='win rate, ties as half'] polyline:visible")
    loss = page.locator("svg[aria-label='loss, aot']")
    assert (lines.count(), loss.is_visible()) == (3, True)
    page.get_by_role("checkbox", name="beta").uncheck()
    assert (lines.count(), loss.is_visible()) == (2, False)
    assert page.locator("#shown-count").inner_text() == "3 of 4"
    page.get_by_role("button", name="None", exact=True).click()
    assert page.locator("figure:visible").count() == 0
    page.get_by_role("button", name="All", exact=True).click()
    assert lines.count() == 3

    def write_many(folder):
        for index in range(13):
            write_policy(folder / f"run-{index}", objective=f"m{index % 2}", seed=index)

    page = open_report(write_many)
    assert page.locator("#shown-count").inner_text() == "2 of 13"
    assert set(shown(page)) == {"base", "run-0", "run-1"}


def test_generations_of_each_task(open_report):
    assert overflow(open_report(write_two_tasks, 390)) == 0
    page = open_report(write_two_tasks)
    titles = ["Preferences on pairs", "Verified problems on pairs"]
    assert page.locator("nav p a:first-child").all_inner_texts() == titles
    assert page.locator("nav > a").all_inner_texts() == ["Generations"]
    assert set(shown(page)) == {"base", "a-dpo", "c-grpo"}
    page.get_by_label("Task").select_option(label=titles[1])
    assert set(shown(page)) == {"base", "b-sum", "d-sum"}


def test_nothing_is_wider_than_a_phone_or_its_chart(open_report):
    def write_long_names(folder):
        for name, kl in (("dpo-with-a-long-name-seed-10", 1.5), ("simpo-with-a-long-name-seed-10", 2.5)):
            write_policy(folder / name, objective=name[:3], kl=kl)

    for write in (write_example, write_long_names):
        page = open_report(write, 360, "dark")
        page.locator("details").evaluate_all("nodes => nodes.forEach(node => { node.open = true; })")
        for place in range(4):
            page.locator("#prompts li").nth(place).click()
            assert overflow(page) == 0
        boxes = page.locator("figure svg, figure svg text.name, .card, #filters > *").evaluate_all(
            "nodes => nodes.map(node => [node.getBoundingClientRect().left, node.getBoundingClientRect().right])"
        )
        assert min(left for left, _ in boxes) >= 0 and max(right for _, right in boxes) <= 360
