"""The page at /, in a real browser on a real server: a chat that streams, and the ladder of its row that grows."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hash_engine import make_core
from served import Server
from starlette.testclient import TestClient

from engine.config import EngineConfig, server_config
from engine.sampling.params import SamplingParams
from engine.server.app import create_app
from engine.server.kv_picture import kv_picture
from engine.server.metrics import Metrics
from engine.server.page_api import FILES, FOLDER
from engine.server.serving import Serving

BRIEF = SamplingParams(temperature=0.0, max_new_tokens=4, ignore_eos=True)
LONG = "Write a long story about a lighthouse keeper."
"""The default model has much to say to it: on a quick machine there must be time to look."""

ATTACK = "<img src=x onerror=\"document.title='hit'\"><script>document.title='hit'</script>"
WATCH = """() => {
  window.seen = {texts: [], lengths: []};
  const note = (list, value) => { if (list.at(-1) !== value) list.push(value); };
  new MutationObserver(() => {
    const said = [...document.querySelectorAll(".model .said")].at(-1);
    if (said) note(window.seen.texts, said.textContent);
  }).observe(document.getElementById("log"), {childList: true, subtree: true, characterData: true});
  new MutationObserver(() => {
    const parts = [...document.querySelectorAll("#rows .mine .part")].slice(0, 2);
    if (parts.length) note(window.seen.lengths, parts.reduce((sum, part) => sum + Number(part.dataset.tokens), 0));
  }).observe(document.getElementById("rows"), {childList: true, subtree: true, attributes: true});
}"""
"""Writes down every text of the answer and every written length of the chat's row that the page has shown."""


@pytest.fixture(scope="module")
def playwright() -> Any:
    return pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra dev)")


@pytest.fixture(scope="module")
def browser(playwright: Any) -> Iterator[Any]:
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no Chromium is on the PATH (Debian: apt-get install chromium)")
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium refuses its sandbox to root
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=path, args=flags)
        yield running
        running.close()


@dataclass
class Watched:
    """A page, and what it did that it must not do."""

    page: Any
    wrong: list[str] = field(default_factory=list)

    def say(self, text: str, most: int = 16) -> None:
        """Send a message and wait for the answer's end."""
        self.begin(text, most)
        self.page.wait_for_selector("#send:visible", timeout=90_000)

    def begin(self, text: str, most: int) -> None:
        before = self.page.locator(".model").count()
        self.page.evaluate("most => { document.getElementById('most').value = most; }", most)
        self.page.fill("#say", text)
        self.page.press("#say", "Enter")
        # A short answer may have ended before the button that stops it was seen.
        self.page.wait_for_function("n => document.querySelectorAll('.model').length > n", arg=before)

    def usage(self, turn: int) -> dict[str, int]:
        """What the page says of an answer: reused, computed, generated."""
        words = self.page.locator(".usage").nth(turn).inner_text().split()
        return {name: int(words[words.index(name) + 1]) for name in ("reused", "computed", "generated")}


@pytest.fixture
def open_page(browser: Any) -> Iterator[Any]:
    opened: list[Watched] = []

    def open_at(url: str, *, origin: str | None = None, **options: Any) -> Watched:
        context = browser.new_context(**options)
        page = context.new_page()
        home = origin or url
        watched = Watched(page)
        page.on("request", lambda sent: watched.wrong.append(sent.url) if not sent.url.startswith(home) else None)
        page.on("console", lambda said: watched.wrong.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: watched.wrong.append(str(error)))
        page.goto(url)
        opened.append(watched)
        return watched

    yield open_at
    for watched in opened:
        watched.page.context.close()
        assert watched.wrong == [], "another origin was asked, or the console has something"


def test_a_chat_streams_its_row_grows_and_the_next_turn_reuses_it(smollm2_server: Server, open_page, playwright):
    smollm2_server.post("/flush_cache", {})
    watched = open_page(smollm2_server.url)
    page = watched.page
    page.evaluate(WATCH)
    watched.say(LONG, most=240)
    page.wait_for_selector("#sessions .mine")
    seen = page.evaluate("window.seen")
    texts = seen["texts"]
    assert len(texts) > 5, "the answer came in pieces"
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    first = watched.usage(0)
    assert first["reused"] == 0
    assert first["generated"] > 5
    lengths = seen["lengths"]
    assert len(lengths) > 2, "the row was seen to grow"
    assert lengths == sorted(lengths)

    watched.say("Where does the keeper live?")
    second = watched.usage(1)
    assert second["reused"] > 0
    assert second["reused"] + second["computed"] > first["computed"] + first["generated"]
    playwright.expect(page.locator("#sessions .mine td").nth(1)).to_have_text("2")
    view = smollm2_server.get("/kv_picture")
    session, *others = view["sessions"]["shown"]  # the latest used first; the server is also other tests'
    cells = page.locator("#sessions .mine").locator("th, td").all_inner_texts()
    assert [int(cell.replace(",", "").split()[0]) for cell in cells[2:]] == [
        session[name] for name in ("turns", "history", "held", "reused", "computed", "lost_to_alignment")
    ]
    assert session["reused"] == second["reused"]
    (row,) = [row for row in view["rows"]["shown"] if row["owner_id"] == session["owner_id"]]
    label = page.locator("#rows .mine .ladder").get_attribute("aria-label")
    assert f"committed {row['committed']}" in label
    assert f"allocated {row['allocated']}" in label
    shown = page.locator("#pools .owners li").all_inner_texts()
    assert any(line.startswith("idle sessions") and "0%" not in line.split() for line in shown)

    page.locator(".back").first.click()
    assert page.locator(".model").count() == 1
    watched.say("Name one more.", most=4)
    assert watched.usage(1)["reused"] > 0
    playwright.expect(page.locator("#sessions tr")).to_have_count(2 + len(others))
    assert smollm2_server.get("/server_info?audit=true")["violations"] == []


def test_stop_ends_the_turn_and_the_session_goes_on_from_before_it(smollm2_server: Server, open_page, playwright):
    watched = open_page(smollm2_server.url, color_scheme="dark")
    page = watched.page
    watched.say("Hello.", most=4)
    watched.begin(LONG, 1000)
    playwright.expect(page.locator(".model .said").nth(1)).to_have_text(re.compile("..."), timeout=90_000)
    page.click("#stop")
    page.get_by_text("Stopped: this turn is not in the session.").wait_for()
    smollm2_server.wait_until_idle()
    watched.say("Hello again.", most=4)
    assert watched.usage(1)["reused"] > 0
    assert page.locator("#where").inner_text() == "2 turns"


def test_what_a_user_or_a_model_says_is_shown_as_text(smollm2_server: Server, open_page):
    watched = open_page(smollm2_server.url, viewport={"width": 360, "height": 700})
    page = watched.page
    events = [
        {"type": "response.output_text.delta", "delta": ATTACK},
        {"type": "error", "message": ATTACK},
    ]
    body = "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)
    page.route("**/v1/responses", lambda route: route.fulfill(status=200, body=body, content_type="text/event-stream"))
    page.fill("#say", ATTACK)
    page.click("#send")
    page.get_by_role("alert").wait_for()
    assert page.locator(".user .said").inner_text() == ATTACK
    assert page.locator(".model .said").inner_text() == ATTACK
    assert page.get_by_role("alert").inner_text() == f"Not answered: {ATTACK}"
    assert page.locator("#log img, #log script").count() == 0
    assert page.title() == "Rung"
    page.wait_for_selector("#pools .owners")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    # Markup that got in by mistake could do nothing: the policy lets no inline script run.
    page.evaluate("document.getElementById('log').innerHTML = '<img src=\"data:,\" onerror=\"document.title=1\">'")
    page.wait_for_timeout(50)
    assert page.title() == "Rung"
    assert any("Content Security Policy" in text for text in watched.wrong)
    watched.wrong.clear()


def test_keys_are_asked_for_and_kept_nowhere(smollm2_server: Server, open_page):
    watched = open_page("about:blank", origin=smollm2_server.url)
    page = watched.page
    sent: list[tuple[str, str]] = []

    def guard(route: Any) -> None:
        key = route.request.headers.get("authorization", "")
        sent.append((route.request.url.split("?")[0].removeprefix(smollm2_server.url), key))
        wanted = "alice-key" if "/v1/" in route.request.url else "root-key"
        if key == f"Bearer {wanted}":
            route.continue_()
        else:
            route.fulfill(status=401, json={"error": {"message": "give a key"}})

    page.route("**/kv_picture*", guard)
    page.route("**/v1/*", guard)
    page.goto(smollm2_server.url)
    page.get_by_role("button", name="Give a key").click()
    page.fill("#api-key", "alice-key")
    page.fill("#admin-key", "root-key")
    page.press("#admin-key", "Enter")
    page.wait_for_selector("#pools .owners")
    watched.say("hello", most=3)
    page.wait_for_selector("#sessions .mine")
    assert {key for path, key in sent if path == "/v1/responses"} == {"Bearer alice-key"}
    assert {key for path, key in sent if path == "/kv_picture"} == {"", "Bearer root-key"}
    kept = "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href])"
    assert "key" not in page.evaluate(kept)
    page.reload()
    page.get_by_role("button", name="Give a key").wait_for()
    watched.wrong = [text for text in watched.wrong if "401" not in text]  # where no key was given


class QuietEngine:
    """An engine client over a core that costs nothing, which knows one call."""

    def __init__(self) -> None:
        self.config = EngineConfig()
        self.beat = SimpleNamespace(stats={}, step_age_s=0.0)
        self.info = {"description": "a device"}
        self.core = make_core(num_pages=64)

    async def call(self, name: str) -> Any:
        assert name == "kv_picture"
        return kv_picture(self.core)


def client_of(engine: Any = None, **flags: Any) -> TestClient:
    engine = engine or QuietEngine()
    tokenizer: Any = None
    return TestClient(create_app(Serving(engine, tokenizer, server_config(**flags)[1], Metrics(engine))))


def test_without_the_page_nothing_of_it_is_there():
    paths = (*FILES, "/kv_picture", "/page/page_api.py", "/page/%2e%2e/gate.py")
    assert {client_of(no_ui=True).get(path).status_code for path in paths} == {404}
    assert [path for path in paths if client_of().get(path).status_code == 200] == [*FILES, "/kv_picture"]


def test_with_keys_the_files_are_open_and_the_picture_is_for_admins():
    client = client_of(api_key="alice,bob", admin_api_key="root")

    def status(path: str, key: str) -> int:
        return client.get(path, headers={"authorization": f"Bearer {key}"} if key else {}).status_code

    assert {status(path, "") for path in FILES} == {200}
    assert [status("/kv_picture", key) for key in ("", "alice", "wrong", "root")] == [401, 401, 401, 200]
    assert client_of(api_key="alice").get("/kv_picture", headers={"authorization": "Bearer alice"}).status_code == 403


def test_with_keys_names_that_clients_gave_are_not_shown():
    engine = QuietEngine()
    core = engine.core
    for name in ("alice", "bob"):
        core.sessions.open(f"{name}:their words")
        core.add_turn(f"{name}:their words", np.arange(3, 9, dtype=np.int32), BRIEF, request_id=f"{name}s question")
    while core.has_work:
        core.step()
    core.add(np.arange(3, 7, dtype=np.int32), BRIEF, request_id="carols question")
    core.step()

    def shown(mine: str, **flags: Any) -> tuple[str, list[list[bool]]]:
        headers = {"authorization": "Bearer root"}
        view = client_of(engine, **flags).get("/kv_picture", params={"mine": mine}, headers=headers).json()
        return json.dumps(view), [[one["is_mine"] for one in view[of]["shown"]] for of in ("rows", "sessions")]

    for mine, rows, sessions in (("bobs question", 1, 1), ("carols question", 1, 0), ("nobodys", 0, 0)):
        text, marks = shown(mine, api_key="a", admin_api_key="root")
        assert not any(word in text for word in ("alice", "bob", "carol", "words", "question"))
        assert [sum(of) for of in marks] == [rows, sessions]
        assert [len(of) for of in marks] == [3, 2]
    assert "bob:their words" in shown("nobodys")[0], "without keys everybody is the same person"


def test_the_page_is_whole_and_names_nothing_elsewhere():
    client = client_of()
    for path in FILES:
        answer = client.get(path)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "://" not in answer.text.replace("http://www.w3.org/2000/svg", "")
        assert "innerHTML" not in answer.text
    assert {path.name for path in FOLDER.iterdir()} == {name for name, _ in FILES.values()}
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 64 << 10
