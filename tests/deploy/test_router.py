"""The router: which replica gets what, against plain properties, and the proxy against replicas made of functions."""

from __future__ import annotations

import asyncio
import gzip
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from json import dumps, loads
from typing import Any

import httpx
from cluster.router import Router, create_app
from cluster.routing import Backend, Sessions, choose, prefix_of, ranking, session_of
from hypothesis import given
from hypothesis import strategies as st

URLS = [f"http://replica-{number}" for number in range(4)]

# Decisions


@given(keys=st.lists(st.text(), min_size=1, max_size=50, unique=True), gone=st.sampled_from(URLS))
def test_when_a_replica_goes_only_its_share_moves(keys: list[str], gone: str) -> None:
    left = [url for url in URLS if url != gone]
    for key in keys:
        before, after = ranking(key, URLS)[0], ranking(key, left)[0]
        assert before in {after, gone}
        assert sorted(ranking(key, URLS)) == URLS


def test_beginnings_spread_over_the_replicas() -> None:
    homes = Counter(ranking(f"system prompt {number}", URLS)[0] for number in range(400))
    assert min(homes[url] for url in URLS) > 60


@given(
    loads=st.lists(st.integers(0, 20), min_size=4, max_size=4), ready=st.lists(st.booleans(), min_size=4, max_size=4)
)
def test_a_choice_is_ready_and_not_overloaded(loads: list[int], ready: list[bool]) -> None:
    backends = [Backend(url, is_ready, load) for url, is_ready, load in zip(URLS, ready, loads, strict=True)]
    chosen = choose("key", backends, 1.5)
    able = [backend for backend in backends if backend.is_ready]
    if not able:
        assert chosen is None
        return
    assert chosen is not None
    assert chosen.is_ready
    limit = 1.5 * sum(one.num_in_flight for one in able) / len(able) + 1
    assert chosen.num_in_flight < limit
    order = ranking("key", [one.url for one in able])
    passed = [one for one in able if order.index(one.url) < order.index(chosen.url)]
    assert all(one.num_in_flight >= limit for one in passed)


def test_without_a_beginning_the_least_loaded_is_taken() -> None:
    backends = [Backend(url, True, load) for url, load in zip(URLS, (3, 1, 2, 9), strict=True)]
    assert choose("", backends, 1.5) is backends[1]


def test_where_a_session_is_named() -> None:
    assert session_of("/sessions/a%2Fb/fork", {}) == "a/b"
    assert session_of("/close_session", {"session_id": "s"}) == "s"
    assert session_of("/generate", {"session_params": {"id": "s"}}) == "s"
    for body in (None, [], "s", {"session_params": "s"}, {"session_params": {"id": 3}}, {"session_id": ""}):
        assert session_of("/generate", body) is None


def test_what_decides_about_a_prompt() -> None:
    assert prefix_of({"prompt": "abcdef"}, 3) == prefix_of({"prompt": "abcxyz"}, 3) != ""
    assert prefix_of({"prompt": "abc"}, 3) != prefix_of({"prompt": "abc", "cache_salt": "x"}, 3)
    chat = [{"role": "system", "content": "s" * 50}, {"role": "user", "content": "1"}]
    other = [chat[0], {"role": "user", "content": "2"}]
    assert prefix_of({"messages": chat}, 60) == prefix_of({"messages": other}, 60)
    assert prefix_of({"input_ids": [1, 2, 3]}, 100) != prefix_of({"input_ids": [1, 2, 4]}, 100)
    assert prefix_of({"model": "m"}, 10) == prefix_of(None, 10) == ""


def test_the_least_recent_session_is_forgotten() -> None:
    sessions = Sessions(max_sessions=2)
    for name in ("a", "b"):
        sessions.remember(name, URLS[0])
    assert sessions.home_of("a") == URLS[0]
    sessions.remember("c", URLS[1])
    assert [sessions.home_of(name) for name in "abc"] == [URLS[0], None, URLS[1]]


# The proxy

Answer = Callable[[httpx.Request], Awaitable[httpx.Response] | httpx.Response]


class Replicas(httpx.AsyncBaseTransport):
    """Replicas that answer from a function and remember what reached them."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.seen: list[tuple[str, str]] = []
        self.down: set[str] = set()
        self.not_ready: set[str] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        url = f"http://{request.url.host}"
        if url in self.down:
            raise httpx.ConnectError("refused", request=request)
        if request.url.path == "/ready":
            return httpx.Response(503 if url in self.not_ready else 200)
        self.seen.append((url, request.url.path))
        answer = self.answer(request)
        return answer if isinstance(answer, httpx.Response) else await answer


def run(replicas: Replicas, talk: Callable[[httpx.AsyncClient, Router], Awaitable[None]]) -> None:
    async def session() -> None:
        router = Router(URLS[:3], transport=replicas)
        await router.probe()
        app = httpx.ASGITransport(create_app(router, probing=False))
        async with httpx.AsyncClient(transport=app, base_url="http://router") as client:
            await talk(client, router)
        assert [backend.num_in_flight for backend in router.backends] == [0, 0, 0]
        await router.client.aclose()

    asyncio.run(session())


def reply(status: int, json: Any = None, content: bytes = b"", headers: dict[str, str] | None = None) -> httpx.Response:
    """An answer that is still on its way, as over a network."""
    body = content if json is None else dumps(json).encode()
    return httpx.Response(status, headers=headers, stream=httpx.ByteStream(body))


def echo(request: httpx.Request) -> httpx.Response:
    return reply(200, json={"url": str(request.url), "headers": dict(request.headers)})


def test_equal_beginnings_meet_in_one_replica() -> None:
    replicas = Replicas(echo)

    async def talk(client: httpx.AsyncClient, _: Router) -> None:
        for number in range(6):
            await client.post("/v1/completions", json={"prompt": "s" * 256 + str(number)})

    run(replicas, talk)
    assert len({url for url, _ in replicas.seen}) == 1


def test_a_request_goes_through_as_it_is() -> None:
    async def talk(client: httpx.AsyncClient, _: Router) -> None:
        headers = {"authorization": "Bearer k", "x-mine": "1", "connection": "x-secret"}
        answer = await client.post("/v1/x%20y?a=1&b=%2F", json={"prompt": "p"}, headers=headers)
        found = answer.json()
        assert found["url"].endswith("/v1/x%20y?a=1&b=%2F")
        assert found["headers"]["authorization"] == "Bearer k"
        assert found["headers"]["x-mine"] == "1"
        assert found["headers"]["host"] in {"replica-0", "replica-1", "replica-2"}

    run(Replicas(echo), talk)


def test_errors_and_compressed_bodies_pass_untouched() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/bad":
            return reply(400, json={"error": {"message": "no"}}, headers={"x-why": "because"})
        return reply(200, content=gzip.compress(b"hello"), headers={"content-encoding": "gzip"})

    async def talk(client: httpx.AsyncClient, _: Router) -> None:
        bad = await client.post("/bad", json={})
        assert (bad.status_code, bad.json(), bad.headers["x-why"]) == (400, {"error": {"message": "no"}}, "because")
        assert (await client.post("/good", json={})).text == "hello"
        assert (await client.post("/open_session", json={})).text == "hello"

    run(Replicas(answer), talk)


def test_replicas_that_are_not_ready_or_out_of_reach_get_nothing() -> None:
    replicas = Replicas(echo)

    async def talk(client: httpx.AsyncClient, router: Router) -> None:
        replicas.not_ready = {URLS[0]}
        await router.probe()
        replicas.down = {URLS[1]}
        for number in range(8):
            assert (await client.post("/v1/completions", json={"prompt": str(number)})).status_code == 200
        assert {url for url, _ in replicas.seen} == {URLS[2]}
        replicas.down = {URLS[1], URLS[2]}
        answer = await client.post("/v1/completions", json={"prompt": "x"})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        await router.probe()
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/health")).status_code == 200

    run(replicas, talk)


def test_a_request_that_a_replica_may_have_is_not_sent_twice() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadError("reset", request=request)

    replicas = Replicas(answer)

    async def talk(client: httpx.AsyncClient, _: Router) -> None:
        assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 502

    run(replicas, talk)
    assert len(replicas.seen) == 1


class Engine:
    """Sessions as replicas keep them: a name belongs to a key, and lives in one replica."""

    def __init__(self) -> None:
        self.homes: dict[tuple[str, str], str] = {}

    def __call__(self, request: httpx.Request) -> httpx.Response:
        url, key = f"http://{request.url.host}", request.headers.get("authorization", "")
        body: dict[str, Any] = loads(request.content) if request.content else {}
        if request.url.path == "/open_session":
            self.homes[key, body["session_id"]] = url
            return reply(200, json=body["session_id"])
        if request.url.path.endswith("/fork"):
            self.homes[key, "forked"] = url
            return reply(200, json={"session_id": "forked"})
        name = body.get("session_id") or body.get("session_params", {}).get("id") or request.url.path.split("/")[-1]
        return reply(200 if self.homes.get((key, name)) == url else 404, json={})


def test_sessions_go_home_also_after_the_router_forgot_them() -> None:
    engine = Engine()
    replicas = Replicas(engine)

    async def talk(client: httpx.AsyncClient, router: Router) -> None:
        async def turn(name: str, key: str) -> int:
            body = {"text": "t", "session_params": {"id": name}}
            return (await client.post("/generate", json=body, headers={"authorization": key})).status_code

        for number in range(9):
            body, headers = {"session_id": f"s{number}"}, {"authorization": f"k{number % 2}"}
            assert (await client.post("/open_session", json=body, headers=headers)).status_code == 200
        for _ in range(2):
            assert [await turn(f"s{number}", f"k{number % 2}") for number in range(9)] == [200] * 9
            router.sessions = Sessions()
        assert await turn("s1", "k0") == 404
        await client.post("/sessions/s3/fork", json={}, headers={"authorization": "k1"})
        assert await turn("forked", "k1") == 200

    run(replicas, talk)


def test_two_keys_may_use_one_name_in_different_replicas() -> None:
    engine = Engine()
    engine.homes = {("a", "chat"): URLS[0], ("b", "chat"): URLS[1]}

    async def talk(client: httpx.AsyncClient, _: Router) -> None:
        for key in ("a", "b", "a", "b"):
            body = {"session_params": {"id": "chat"}}
            assert (await client.post("/generate", json=body, headers={"authorization": key})).status_code == 200

    run(Replicas(engine), talk)


def test_a_session_whose_replica_is_gone_is_an_error_and_no_other_session() -> None:
    replicas = Replicas(Engine())

    async def talk(client: httpx.AsyncClient, _: Router) -> None:
        await client.post("/open_session", json={"session_id": "s"})
        replicas.down = {replicas.seen[-1][0]}
        answer = await client.post("/generate", json={"session_params": {"id": "s"}})
        assert answer.status_code == 503
        assert "has this session" in answer.json()["error"]["message"]

    run(replicas, talk)


def test_an_abort_reaches_every_replica() -> None:
    replicas = Replicas(echo)

    async def talk(client: httpx.AsyncClient, _: Router) -> None:
        assert (await client.post("/abort_request", json={"rid": "r"})).status_code == 200
        assert sorted(replicas.seen) == [(url, "/abort_request") for url in URLS[:3]]
        replicas.down = {URLS[0]}
        assert (await client.post("/abort_request", json={"rid": "r"})).status_code == 502

    run(replicas, talk)


def test_a_client_that_hangs_up_frees_its_place() -> None:
    """Before the head of the answer and in the middle of it; the replica's side is closed both times."""
    closed: list[str] = []

    class Slow(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            yield b"first"
            await asyncio.sleep(60)

        async def aclose(self) -> None:
            closed.append("stream")

    async def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/before":
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                closed.append("head")
                raise
        return httpx.Response(200, stream=Slow())

    async def hang_up(router: Router, path: str) -> None:
        app = create_app(router, probing=False)
        gone = asyncio.Event()
        first = [{"type": "http.request", "body": b"{}", "more_body": False}]

        async def receive() -> dict[str, Any]:
            if first:
                return first.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message.get("body"):
                gone.set()

        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
        scope |= {"headers": [], "http_version": "1.1", "scheme": "http", "server": ("r", 80), "client": ("c", 1)}
        if path == "/before":
            asyncio.get_running_loop().call_later(0.1, gone.set)
        await asyncio.wait_for(app(scope, receive, send), 20)

    async def talk() -> None:
        router = Router(URLS[:1], transport=Replicas(answer))
        await router.probe()
        for path in ("/before", "/middle"):
            await hang_up(router, path)
            assert router.backends[0].num_in_flight == 0
        await router.client.aclose()

    asyncio.run(talk())
    assert closed == ["head", "stream"]
