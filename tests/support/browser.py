"""A headless Chromium of Debian's packages, driven by Selenium. `scripts/debian` installs it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from tests.support.waiting import eventually
from tests.support.web import TOKEN, Served

AXE = Path(__file__).parent.parent / "data" / "axe.min.js"
SERIOUS = ("serious", "critical")
RUN_AXE = """
const done = arguments[arguments.length - 1];
axe.run(document, { resultTypes: ["violations"] }).then(
  (found) => done(found.violations.map((v) => [v.impact, v.id, v.nodes.map((n) => n.html.slice(0, 160)).slice(0, 3)])),
  (error) => done([["critical", String(error), []]]),
);
"""


class Browser:
    """A browser window."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, page: Served, path: str = "", ready: str = "#page:not([aria-busy])") -> None:
        """Open a page as a viewer who has the token, and wait until its script has filled it."""
        self.driver.get(f"{page.url}/{path}{'&' if '?' in path else '?'}token={TOKEN}")
        self.find(ready)

    def find(self, selector: str, text: str = "") -> WebElement:
        """Wait for a visible element that contains a text."""

        def look() -> WebElement | None:
            found = self.driver.find_elements(By.CSS_SELECTOR, selector)
            return next((one for one in found if text in one.text), None)

        return eventually(look, f"{selector} with {text!r}", ignoring=(Exception,))

    def text(self) -> str:
        """Return the visible text."""
        return self.driver.find_element(By.TAG_NAME, "body").text

    def press(self, *keys: str) -> None:
        """Press keys where the focus is."""
        webdriver.ActionChains(self.driver).send_keys(*keys).perform()

    def has_focus(self) -> str:
        """Return the label, or else the text, of the element that has the focus."""
        active = self.driver.switch_to.active_element
        return active.get_attribute("aria-label") or active.text

    def script(self, code: str, *arguments: object) -> Any:
        """Run a script, which no policy of the page forbids."""
        return self.driver.execute_script(code, *arguments)

    def resize(self, width: int, height: int = 900) -> None:
        """Set the size of the page."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def scheme(self, name: str) -> None:
        """Prefer "light" or "dark"."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def errors(self) -> list[str]:
        """Return what the browser reports as errors since it was asked last: of scripts, files and the policy."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]

    def serious(self) -> list[Any]:
        """Return what axe-core finds that is serious."""
        self.script(AXE.read_text())
        return [found for found in self.driver.execute_async_script(RUN_AXE) if found[0] in SERIOUS]


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start a browser; skips where there is none."""
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("needs Debian's chromium and chromium-driver: scripts/debian installs them")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    running = webdriver.Chrome(options=options, service=Service(driver))
    try:
        running.set_script_timeout(60)
        running.set_page_load_timeout(60)
        yield Browser(running)
    finally:
        running.quit()


__all__ = ["Browser", "Keys", "chromium"]
