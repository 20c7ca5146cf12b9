"""A picture of the page of a running server without keys: `python scripts/screenshot_page.py URL FILE.png`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

SAID = ("Name three rivers of Europe, one a line.", "Which of them is the longest?")
LAST = "Tell me more about it, in one paragraph."
SIZE = {"width": 1280, "height": 860}


def take(url: str, file: Path) -> None:
    """Chat for two turns, begin a third and take the picture while it streams."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport=SIZE)
        page.goto(url)
        page.evaluate("document.getElementById('temperature').value = 0")
        page.evaluate("document.getElementById('most').value = 48")
        for text in SAID:
            page.fill("#say", text)
            page.press("#say", "Enter")
            page.wait_for_selector("#stop:visible")
            page.wait_for_selector("#send:visible", timeout=120_000)
        page.locator(".back").first.click()
        for text in (SAID[1], LAST):
            page.wait_for_selector("#send:visible", timeout=120_000)
            page.fill("#say", text)
            page.press("#say", "Enter")
            page.wait_for_selector("#stop:visible")
        page.wait_for_selector("#rows .mine .badge")
        page.wait_for_timeout(2500)
        page.screenshot(path=file)
        browser.close()


if __name__ == "__main__":
    take(sys.argv[1], Path(sys.argv[2]))
