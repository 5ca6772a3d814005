"""A real Chromium on the page, for tests and for the pictures of the documentation."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from tests.waiting import wait_until

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")


@contextmanager
def chromium() -> Iterator[Page]:
    """A browser without a window; BROWSER and DRIVER must be there."""
    assert BROWSER is not None and DRIVER is not None
    options = ChromeOptions()
    options.binary_location = BROWSER
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options, ChromeService(DRIVER))
    try:
        yield Page(driver)
    finally:
        driver.quit()


class Page:
    """The page in a browser. ``complaints`` : what the browser said about it since it was asked last."""

    def __init__(self, driver: Chrome) -> None:
        self.driver = driver

    def open(self, url: str, *, width: int = 1280, height: int = 960) -> None:
        """Open ``url`` in a window of some size, as a new visitor; wait for its first counters."""
        driver = self.driver
        self.resize(width, height)
        driver.get(url)
        driver.execute_script("sessionStorage.clear(); localStorage.clear()")
        driver.get_log("browser")
        driver.get(url)
        wait_until(lambda: self["state"].text not in ("", "connecting"))

    def resize(self, width: int, height: int) -> None:
        """Make the window so large; narrow ones are a phone's."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def __getitem__(self, name: str) -> WebElement:
        return self.driver.find_element(By.ID, name)

    def all(self, selector: str) -> list[WebElement]:
        """Elements by a CSS selector."""
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def script(self, text: str, *arguments: Any) -> Any:
        """What JavaScript returns."""
        return self.driver.execute_script(text, *arguments)

    def wait_for_answer(self) -> str:
        """The sentence about what ran, once it has ended."""
        wait_until(lambda: self["verdict"].text not in ("", "Running") or self["error"].is_displayed())
        return str(self["verdict"].text)

    def complaints(self) -> list[str]:
        """Errors and warnings, violations of the policy among them."""
        return [str(entry["message"]) for entry in self.driver.get_log("browser")]
