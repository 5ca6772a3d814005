"""The page at /, in a real browser on a real server with the bundled model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from selenium.webdriver import ActionChains
from selenium.webdriver.common.keys import Keys

from benchmarks.recorded_session import record
from ssd.bundled import MODEL_PATH
from ssd.engine import Request, RequestOutput, RequestStats, VerifiedDraft
from tests.server import test_web_ui
from tests.server.browser import BROWSER, DRIVER, Page, chromium
from tests.server.bundled_engine import load_bundled
from tests.server.client import get, post
from tests.server.failing_engine import FailingEngine, RunningServer, serving
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(BROWSER is None or DRIVER is None, reason="no chromium with chromedriver here")

PROMPT = test_web_ui.PROMPT
"""How the last example of the page begins."""
QUESTION = "Return True if the path is a directory."


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """It has said before what it is asked for here: drafts are made where they pay, and then they do on any machine."""
    with serving(load_bundled, model=str(MODEL_PATH)) as running:
        post(running.port, "/v1/completions", {"prompt": PROMPT, "max_tokens": 220, "temperature": 0, "seed": 0})
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    with chromium() as made:
        yield made


@pytest.fixture
def page(browser: Page, server: RunningServer) -> Iterator[Page]:
    """The page of the server, about which the browser must have nothing to say, and which asks nobody else."""
    open_page(browser, server)
    yield browser
    assert browser.complaints() == []
    asked = browser.script("return performance.getEntriesByType('resource').map(entry => entry.name)")
    assert asked and all(name.startswith(f"{server.url}/") for name in asked)


def open_page(browser: Page, server: RunningServer, **window: Any) -> None:
    """With completions in place of the chat that comes first where a model has a template."""
    browser.open(server.url, **window)
    wait_until(lambda: browser.script("return document.querySelector('input[value=chat]').checked"))
    browser.script("document.querySelector('input[value=completion]').click()")


def ask_for(page: Page, prompt: str, max_tokens: int = 120) -> str:
    page.script("document.querySelector('details').open = true")
    for name, value in (("prompt", prompt), ("max-tokens", str(max_tokens))):
        page[name].clear()
        page[name].send_keys(value)
    page["run"].click()
    return page.wait_for_answer()


def shown(page: Page) -> list[str]:
    """The text of each lane."""
    texts: list[str] = page.script("return [...document.querySelectorAll('.stream')].map(s => s.textContent)")
    return texts


def figures(page: Page, name: str) -> list[int]:
    texts = page.script(f"return [...document.querySelectorAll('[data-figure={name}]')].map(f => f.textContent)")
    return [int(text.replace(",", "")) for text in texts]


def test_what_is_shown_is_what_the_api_says_and_colours_are_the_accepted_tokens(
    page: Page, server: RunningServer
) -> None:
    before = get(server.port, "/ui/stats").json
    verdict = ask_for(page, PROMPT)
    after = get(server.port, "/ui/stats").json
    body = {"prompt": PROMPT, "max_tokens": 120, "temperature": 0, "seed": 0}
    text = post(server.port, "/v1/completions", body).json["choices"][0]["text"]
    assert shown(page) == [text, text]
    assert re.fullmatch(r"[\d.]+\u00d7 fewer passes, the same 120 tokens\.", verdict)
    drafts = page.script(
        "return [...document.querySelectorAll('.draft')].map(d => [d.dataset.source, d.childElementCount])"
    )
    by_source = {source: counts["accepted"] for source, counts in after["sources"].items()}
    for source, counts in before["sources"].items():
        by_source[source] -= counts["accepted"]
    for source, accepted in by_source.items():
        assert sum(number for name, number in drafts[1:] if name == source) == accepted  # the first explains
    assert sum(by_source.values()) > 40
    passes = figures(page, "passes")
    assert passes == [after["passes"] - before["passes"] - 120, 120]
    assert figures(page, "tokens") == [120, 120]
    assert passes[0] + sum(by_source.values()) == 120


def test_the_tool_call_is_offered_first_and_the_recorded_session_is_the_text_that_was_written(
    browser: Page, server: RunningServer
) -> None:
    browser.open(server.url)
    wait_until(lambda: browser["prompt"].get_attribute("value") == "Read the first line of README.md.")
    session = record()
    browser.all(".example")[0].click()
    wait_until(lambda: len(browser.all("#asks li")) == len(session) and not browser["stop"].is_displayed())
    texts = [text for each in session[-1]["passes"] for text in each["texts"]]
    assert shown(browser) == ["".join(texts)] * 2
    assert figures(browser, "passes") == [len(session[-1]["passes"]), len(texts)]
    first, *later = (len(each["passes"]) for each in session)
    assert max(later) < first / 3
    assert browser.complaints() == []


def test_asking_again_takes_fewer_passes_and_says_so(page: Page) -> None:
    ask_for(page, "class Queue:\n    def put(self, item):\n")
    first = figures(page, "passes")[0]
    assert page["hint"].is_displayed()
    page["again"].click()
    wait_until(lambda: len(page.all("#asks li")) == 2)
    assert figures(page, "passes")[0] < first
    assert [row.text.split("\n")[0] for row in page.all("#asks li")] == ["run 1, greedy", "run 2, greedy"]
    assert page["hint"].text == "The answer was in the cache: the best case."
    assert not page["same"].is_displayed()


def test_a_conversation_goes_on(page: Page, server: RunningServer) -> None:
    page.script("document.querySelector('input[value=chat]').click()")
    ask_for(page, QUESTION)
    answer = shown(page)[0]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    body = {"max_tokens": 120, "temperature": 0, "seed": 0}
    said = post(server.port, "/v1/chat/completions", {"messages": messages, **body}).json["choices"][0]
    assert answer == said["message"]["content"]
    assert page["prompt"].get_attribute("value") == ""
    ask_for(page, "And the name?")
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And the name?"}]
    assert [turn.get_attribute("textContent") for turn in page.all("#transcript li")] == [
        m["content"] for m in messages
    ]
    said = post(server.port, "/v1/chat/completions", {"messages": messages, **body}).json["choices"][0]
    assert shown(page)[0] == said["message"]["content"]
    page["new-chat"].click()
    assert page.all("#transcript li") == []


def test_everything_can_be_done_by_keyboard(page: Page) -> None:
    def press(*keys: str) -> None:
        ActionChains(page.driver).send_keys(*keys).perform()

    press(Keys.TAB, Keys.ENTER)  # the link that skips what comes before
    assert page.driver.switch_to.active_element.get_attribute("id") == "prompt"
    press(*PROMPT)
    ActionChains(page.driver).key_down(Keys.CONTROL).send_keys(Keys.ENTER).key_up(Keys.CONTROL).perform()
    assert "the same" in page.wait_for_answer()
    reached = []
    for _ in range(12):
        press(Keys.TAB)
        reached.append(page.driver.switch_to.active_element)
        if "stream" in (reached[-1].get_attribute("class") or ""):
            break
    names = [element.get_attribute("id") for element in reached]
    assert {"race", "run", "again"} <= set(names)
    ring = page.script("return getComputedStyle(document.activeElement).outlineStyle")
    assert ring == "solid"
    press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    about = page.all(".inspect")[0].text
    assert re.fullmatch(r"Pass \d+: \d+ of \d+ draft tokens accepted, source: [\w ]+", about)
    assert len(page.all(".draft.current")) == 1
    press(Keys.ARROW_LEFT)
    assert page.all(".inspect")[0].text != about


def test_every_control_has_a_name(page: Page) -> None:
    page.script("document.querySelector('details').open = true")
    page.script("document.querySelectorAll('[hidden]').forEach(hidden => hidden.hidden = false)")
    controls = page.all("button, input, textarea, summary, [role=img], [role=region]")
    assert len(controls) > 15
    assert [control.get_attribute("outerHTML") for control in controls if not control.accessible_name] == []


@pytest.mark.parametrize("width", [320, 390])
def test_a_phone_sees_all_of_it_without_scrolling_sideways(browser: Page, server: RunningServer, width: int) -> None:
    open_page(browser, server, width=width, height=844)
    ask_for(browser, PROMPT)
    assert browser.script("return document.documentElement.scrollWidth") <= width
    assert browser.script("return Math.max(...[...document.querySelectorAll('.lane')].map(l => l.offsetWidth))") > 280
    for control in browser.all("button.primary, #new-chat"):
        if control.is_displayed():
            assert control.size["height"] >= 34


def test_errors_are_shown_as_the_api_words_them(browser: Page, server: RunningServer) -> None:
    open_page(browser, server)
    ask_for(browser, PROMPT, max_tokens=100_000)
    body = {"prompt": PROMPT, "max_tokens": 100_000, "temperature": 0, "seed": 0}
    refused = post(server.port, "/v1/completions", body)
    assert refused.status == 400
    assert browser["error"].text == refused.error["message"]
    ask_for(browser, PROMPT, max_tokens=8)
    assert not browser["error"].is_displayed()


def test_thousands_of_tokens_are_drawn_with_few_elements(page: Page) -> None:
    drawn = page.driver.execute_async_script(
        """
        const done = arguments[0];
        import("/ui/tokens.js").then(({ TokenStream }) => {
          const place = document.createElement("div");
          document.body.append(place);
          const view = new TokenStream(place, () => {});
          let text = "";
          for (let at = 0; at < 20000; at += 1) {
            const texts = ["a" + at, " b", "\\n"];
            text += texts.join("");
            view.push([{ pass: at, source: "context", num_drafted: 3, num_accepted: 2, texts }]);
            if (at % 1000 == 0) view.flush();
          }
          view.flush();
          done([place.querySelectorAll("*").length, place.textContent === text]);
        });
        """
    )
    assert drawn[0] <= 4002 and drawn[1]


# -- other servers -------------------------------------------------------------------------------------------------


class Drafting(FailingEngine):
    """Says the prompt backwards, one accepted draft token a step."""

    def _advance(self, request: Request, stats: RequestStats) -> RequestOutput:
        output = super()._advance(request, stats)
        return replace(output, draft=VerifiedDraft(stats.num_output_tokens, "context", 2, 1))


def test_markup_in_prompts_and_answers_is_text(browser: Page) -> None:
    hostile = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script><b>bold</b>"
    with serving(lambda _: Drafting(), model_names=("<i>model</i>",)) as running:
        browser.open(running.url)
        browser.script("document.querySelector('input[value=chat]').click()")
        ask_for(browser, hostile[::-1], max_tokens=len(hostile))
        assert shown(browser) == [hostile, hostile]
        ask_for(browser, hostile, max_tokens=4)
        assert browser["transcript"].text.count("<b>bold</b>") == 2
        assert browser["model"].text == "<i>model</i>"
        assert (
            browser.script("return document.querySelectorAll('main img, main script, main b b, #model i').length") == 0
        )
        assert browser.driver.title == "SSD playground"
        assert browser.complaints() == []


def test_a_key_is_asked_for_and_stays_in_the_tab(browser: Page) -> None:
    with serving(lambda _: Drafting(), api_keys=("secret",)) as running:
        browser.open(running.url)
        wait_until(lambda: browser["state"].text == "key needed")
        assert browser["key-form"].is_displayed()
        browser["key"].send_keys("wrong", Keys.ENTER)
        wait_until(lambda: browser["key-error"].text == "This key is unknown.")
        browser["key"].clear()
        browser["key"].send_keys("secret", Keys.ENTER)
        wait_until(lambda: browser["state"].text == "ready")
        assert "the same 3 tokens" in ask_for(browser, "abc", max_tokens=3)
        assert not browser["key-form"].is_displayed()
        kept = browser.script("return [Object.values(sessionStorage), Object.values(localStorage), document.cookie]")
        assert kept == [["secret"], [], ""]


def test_a_proxy_may_put_a_path_before_the_page(browser: Page) -> None:
    with serving(lambda _: Drafting(), api_keys=("secret",), root_path="/llm") as running:
        for url in (f"{running.url}/llm/", f"{running.url}/"):
            browser.open(url)
            wait_until(lambda: browser["state"].text == "key needed")
            browser["key"].send_keys("secret", Keys.ENTER)
            assert "the same 3 tokens" in ask_for(browser, "abc", max_tokens=3)
            asked = browser.script("return performance.getEntriesByType('resource').map(entry => entry.name)")
            assert all(name.startswith(url) for name in asked)


def test_the_page_of_the_api_lists_every_endpoint_and_field_and_asks_nobody_else(
    browser: Page, server: RunningServer
) -> None:
    browser.driver.get("about:blank")  # the page of the test before asks its server, which has ended, once a second
    browser.complaints()
    browser.driver.get(f"{server.url}/docs")
    wait_until(lambda: not browser.all("#state"))
    described = get(server.port, "/openapi.json").json
    titles = [link.text for link in browser.all("#index a")]
    assert titles == [f"{way.upper()} {path}" for path, ways in described["paths"].items() for way in ways]
    cells = set(browser.script("return [...document.querySelectorAll('td:first-child')].map(cell => cell.textContent)"))
    assert cells >= {field for schema in described["components"]["schemas"].values() for field in schema["properties"]}
    for link in browser.all("main a"):
        assert browser.all((link.get_attribute("href") or "").removeprefix(f"{server.url}/docs"))
    asked = browser.script("return performance.getEntriesByType('resource').map(entry => entry.name)")
    assert len(asked) >= 3 and all(name.startswith(f"{server.url}/") for name in asked)
    assert browser.script("return document.documentElement.scrollWidth <= innerWidth")
    assert browser.complaints() == []
