"""The pictures of README and the docs, taken of a real server: ``python -m tests.server.pictures``."""

from __future__ import annotations

import io
import time
from functools import partial
from pathlib import Path

from PIL import Image
from selenium.webdriver import ActionChains
from selenium.webdriver.common.keys import Keys

from ssd.bundled import MODEL_PATH
from tests.server.browser import Page, chromium
from tests.server.bundled_engine import load_bundled
from tests.server.failing_engine import serving
from tests.waiting import wait_until

_PLACE = Path(__file__).parents[2] / "docs" / "pictures"
_SESSION, _CALL = 0, 1
"""The numbers of the examples: the recorded session, and the call of a tool."""
_NUM_REQUESTS = 4
"""The requests of the recorded session."""


def _take(page: Page, name: str) -> None:
    taken = Image.open(io.BytesIO(page.driver.get_screenshot_as_png())).convert("RGB")
    few = taken.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(_PLACE / f"{name}.png", optimize=True)


def _rest(page: Page) -> None:
    """Nothing is pointed at, nothing has the focus."""
    page.script("document.activeElement.blur(); scrollTo(0, 0)")
    ActionChains(page.driver).move_to_element(page["state"]).perform()


def _watch_session(page: Page, url: str, **size: int) -> None:
    """Play the recorded session to its end, and select a draft."""
    page.open(url, **size)
    page.all(".example")[_SESSION].click()
    wait_until(lambda: len(page.all("#asks li")) == _NUM_REQUESTS and not page["stop"].is_displayed())
    page.all(".stream")[0].send_keys(*[Keys.ARROW_RIGHT] * 3)
    time.sleep(1)


def main() -> None:
    """Take the web UI with the recorded session, and with a tool call that is sent three times."""
    _PLACE.mkdir(exist_ok=True)
    with (
        serving(
            partial(load_bundled, max_model_len=None), model=str(MODEL_PATH), model_names=("ssd-bundled",)
        ) as server,
        chromium() as page,
    ):
        _watch_session(page, server.url, height=880)
        _rest(page)
        _take(page, "page-light")
        page.open(server.url, height=1000)
        page.all(".example")[_CALL].click()
        page.wait_for_answer()
        for number in (2, 3):
            page["again"].click()
            wait_until(lambda number=number: len(page.all("#asks li")) == number)  # type: ignore[misc]
        time.sleep(2)
        page.resize(1280, 1000)
        _rest(page)
        _take(page, "agent-loop")


if __name__ == "__main__":
    main()
