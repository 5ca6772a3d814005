"""The pictures in docs/pictures, taken of a real server: ``python -m tests.server.pictures``."""

from __future__ import annotations

import io
import time
from functools import partial
from pathlib import Path

from PIL import Image
from selenium.webdriver import ActionChains
from selenium.webdriver.common.keys import Keys

from ssd.bundled import MODEL_PATH
from ssd.config import IndexConfig
from tests.server.browser import Page, chromium
from tests.server.bundled_engine import load_bundled
from tests.server.client import greedy_completion
from tests.server.failing_engine import serving
from tests.waiting import wait_until

_PLACE = Path(__file__).parents[2] / "docs" / "pictures"
_SEALED_AFTER_S = 6.0
_INDEX = IndexConfig(rebuild_interval_s=_SEALED_AFTER_S)
_CALL = 2
"""The example that calls a tool."""

_ASKED_BEFORE = (
    "class Queue:\n    def put(self, item):\n",
    "def read(path):\n",
    "import os\nimport sys\n\ndef main(argv):\n",
)
_ASKED_LATELY = 'class Deque:\n    """A queue with two ends."""\n\n    def __init__(self, items):\n'
_ASKED = 'class Stack:\n    """A queue with one end."""\n\n    def __init__(self, items):\n'


def _take(page: Page, name: str) -> None:
    taken = Image.open(io.BytesIO(page.driver.get_screenshot_as_png())).convert("RGB")
    few = taken.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(_PLACE / f"{name}.png", optimize=True)


def _choose(page: Page, mode: str) -> None:
    wait_until(lambda: page.script("return document.querySelector('input[value=chat]').checked"))
    page.script(f"document.querySelector('input[value={mode}]').click()")


def _rest(page: Page) -> None:
    """Nothing is pointed at, nothing has the focus."""
    page.script("document.activeElement.blur(); scrollTo(0, 0)")
    ActionChains(page.driver).move_to_element(page["state"]).perform()


def main() -> None:
    """Ask, some of it long ago, and take the page in light, in dark, with an agent's call, and on a phone."""
    _PLACE.mkdir(exist_ok=True)
    with (
        serving(
            partial(load_bundled, index=_INDEX, max_model_len=None), model=str(MODEL_PATH), model_names=("ssd-bundled",)
        ) as server,
        chromium() as page,
    ):
        page.open(server.url, height=880)
        for prompt in _ASKED_BEFORE:
            greedy_completion(server.port, prompt=prompt, max_tokens=220)
            time.sleep(1)
        time.sleep(2 * _SEALED_AFTER_S)
        greedy_completion(server.port, prompt=_ASKED_LATELY, max_tokens=220)
        _choose(page, "completion")
        page["prompt"].send_keys(_ASKED)
        page["run"].click()
        page.wait_for_answer()
        page.all(".stream")[0].send_keys(*[Keys.ARROW_RIGHT] * 24)
        time.sleep(2)
        page.resize(1280, 1120)
        _rest(page)
        _take(page, "page-light")
        page.script("document.querySelectorAll('#theme').forEach(button => { button.click(); button.click() })")
        page["again"].click()
        wait_until(lambda: len(page.all("#asks li")) == 2)
        time.sleep(2)
        _rest(page)
        _take(page, "page-dark")
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
        page.open(server.url, width=390, height=844)
        _choose(page, "chat")
        page["prompt"].send_keys("Return the base name of a path.")
        page["run"].click()
        page.wait_for_answer()
        time.sleep(2)
        page.resize(390, 1180)
        _rest(page)
        _take(page, "page-phone")


if __name__ == "__main__":
    main()
