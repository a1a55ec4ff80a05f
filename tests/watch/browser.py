"""A real Chromium without a window, and what the tests and pictures want of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PATIENCE_S = 240
DESKTOP, PHONE = (1400, 900), (390, 844)


def found() -> tuple[str, str] | None:
    """Paths of the browser and of its driver, where both are installed."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    return (browser, driver) if browser and driver else None


@contextmanager
def opened() -> Iterator[Browser]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    paths = found()
    assert paths is not None
    options = webdriver.ChromeOptions()
    options.binary_location = paths[0]
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(paths[1]))
    try:
        yield Browser(driver)
    finally:
        driver.quit()


class Browser:
    def __init__(self, driver: Any) -> None:
        self._driver = driver

    def open(self, url: str, size: tuple[int, int] = DESKTOP, colours: str = "light") -> None:
        """As on a screen of this size whose owner prefers these colours; returns when everything is drawn."""
        width, height = size
        about = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self._driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", about)
        preferred = {"features": [{"name": "prefers-color-scheme", "value": colours}]}
        self._driver.execute_cdp_cmd("Emulation.setEmulatedMedia", preferred)
        self._driver.get("about:blank")
        self._driver.get(url)
        self.wait("document.body.dataset.ready === 'yes'")

    def leave(self) -> None:
        """Close the page, which would go on asking a server that has ended, and forget what it complained of."""
        self._driver.get("about:blank")
        self.complaints()

    def ask(self, expression: str) -> Any:
        return self._driver.execute_script(f"return {expression}")

    def run(self, statement: str) -> None:
        self._driver.execute_script(statement)

    def wait(self, expression: str) -> None:
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self._driver, PATIENCE_S, poll_frequency=0.1).until(lambda _: self.ask(expression), expression)

    def text(self, selector: str) -> str:
        return str(self.ask(f"document.querySelector({selector!r}).textContent"))

    def complaints(self) -> list[str]:
        """What the browser has reported since it was asked last: errors, and what the page's policy forbids."""
        return [entry["message"] for entry in self._driver.get_log("browser")]

    def picture(self, path: str) -> None:
        self._driver.save_screenshot(path)
