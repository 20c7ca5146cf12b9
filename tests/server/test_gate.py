"""Who may do what, and whose things are whose: every route, every endpoint of a session, every limit at its edge."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from inside import SHORT, core_for_text, inside, say, served, until, waiting
from starlette.routing import Route

from engine.server.app import bind
from engine.server.messages import Start
from engine.server.page_api import FILES

KEYS = {"api_key": "alice,bob", "admin_api_key": "root"}
OPEN = {"/health", "/ready", "/health_generate", *FILES}
ADMIN = {"/metrics", "/flush_cache", "/pause_generation", "/continue_generation", "/server_info", "/kv_picture"}


@served
async def test_every_route_asks_for_its_key():
    async with inside(**KEYS) as server:
        asked = 0
        routers = [getattr(one, "original_router", None) for one in server.app.routes]
        found = [*server.app.routes, *(route for router in routers if router is not None for route in router.routes)]
        routes = [route for route in found if isinstance(route, Route)]
        for route in sorted(routes, key=lambda route: route.path not in OPEN):  # a pause comes behind the probe
            path = route.path.replace("{name:path}", "x").replace("{session_id}", "x").replace("{response_id}", "x")
            for method in sorted((route.methods or set()) - {"HEAD", "OPTIONS"}):
                mine, not_mine = ("root", "alice") if path in ADMIN else ("alice", "root")
                for key in (None, not_mine, "alic", "alicee", "alice,bob", "", "x"):
                    status = (await server.ask(method, path, {}, key)).status_code
                    assert (status == 401) is (path not in OPEN), (method, path, key, status)
                basic = {"authorization": f"Basic {mine}"}
                if path not in OPEN:
                    assert (await server.ask(method, path, {}, headers=basic)).status_code == 401
                assert (await server.ask(method, path, {}, mine)).status_code not in (401, 403), (method, path)
                asked += 1
        assert asked > 30
        assert (await server.ask("GET", "/v1/models", key="bob")).status_code == 200, "the last of several keys"


@served
async def test_without_an_admin_key_nobody_is_an_admin():
    async with inside(api_key="alice") as server:
        for path in ADMIN:
            method = "POST" if "generation" in path else "GET"
            assert (await server.ask(method, path, {}, "alice")).status_code == 403, path
            assert (await server.ask(method, path, {})).status_code == 403, path


@pytest.mark.parametrize("is_chunked", [False, True])
@served
async def test_a_body_may_have_as_many_bytes_as_the_limit_and_no_more(is_chunked):
    body = b'{"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 1}}' + b" " * 1000

    async def pieces(data: bytes) -> Any:
        for start in range(0, len(data), 7):
            yield data[start : start + 7]

    async with inside(max_body_bytes=len(body)) as server:
        for content, status in ((body, 200), (body + b" ", 413)):
            headers = {"content-type": "application/json"}
            given: Any = pieces(content) if is_chunked else content
            answer = await server.http.post("/generate", content=given, headers=headers)
            assert answer.status_code == status
            if status == 413:
                assert answer.json()["error"]["code"] == "body_too_large"
        assert server.client.num_open == 0


@pytest.mark.parametrize("share", [False, True])
@served
async def test_salts_keep_keys_apart_and_what_a_client_keeps_apart(share):
    """Prompts share prefixes where salts are equal: of one key and one word of its client's."""
    cases = [(key, word) for key in ("alice", "bob") for word in (None, "w", "v")]
    async with inside(**KEYS, share_prefix_across_keys=share) as server:
        for key, word in cases:
            await server.post("/generate", say([5], cache_salt=word), key=key)
        salts = [start.cache_salt for start in server.told(Start)]
    assert len(set(salts)) == (3 if share else 6)
    assert not share or salts[:3] == salts[3:]
    assert not any("alice" in (salt or "") for salt in salts)
    async with inside() as server:
        for word in (None, "w", "v"):
            await server.post("/generate", say([5], cache_salt=word))
        assert [start.cache_salt for start in server.told(Start)] == [None, "w", "v"]


@served
async def test_a_session_is_nothing_to_other_keys():
    async with inside(**KEYS) as server:
        await server.post("/open_session", {"session_id": "mine"}, key="alice")
        first = await server.post("/generate", say([5, 6], session_params={"id": "mine"}), key="alice")
        assert await server.post("/sessions/mine/fork", {"session_id": "twig"}, key="alice") == {"session_id": "twig"}
        view = (await server.ask("GET", "/sessions/twig", key="alice")).json()
        assert (view["id"], view["history_tokens"]) == ("twig", 2 + len(first["output_ids"]))
        for name in ("mine", "twig"):
            for path, body in (("fork", {}), ("rewind", {"tokens": 1}), ("hold", {"seconds": 1})):
                await server.post(f"/sessions/{name}/{path}", body, 404, key="bob")
            assert (await server.ask("GET", f"/sessions/{name}", key="bob")).status_code == 404
            await server.post("/generate", say([5], session_params={"id": name}), 404, key="bob")
            await server.post("/close_session", {"session_id": name}, key="bob")
        await server.post("/open_session", {"session_id": "mine"}, key="bob")
        await server.post("/sessions/mine/hold", {"seconds": 1}, key="alice")
        assert (await server.post("/sessions/mine/rewind", {"tokens": 1}, key="alice"))["history_tokens"] == 1
        assert (await server.ask("GET", "/sessions/mine", key="bob")).json()["history_tokens"] == 0
        assert await server.post("/close_session", {"session_id": "mine"}, key="alice") == {"closed": True}
        assert (await server.ask("GET", "/sessions/mine", key="bob")).status_code == 200


@served
async def test_a_requests_name_is_its_keys():
    """Two clients may call theirs the same, and neither ends the other's."""
    async with inside(**KEYS) as server:
        num = waiting(server)
        await server.post("/pause_generation", {}, key="root")
        body = say([5, 6], rid="same")
        alices, bobs = (asyncio.create_task(server.post("/generate", body, key=key)) for key in ("alice", "bob"))
        await until(num(2))
        error = await server.post("/generate", body, 400, key="alice")
        assert "still running" in error["error"]["message"]
        await server.post("/abort_request", {"rid": "same"}, key="bob")
        assert (await bobs)["meta_info"]["finish_reason"]["type"] == "abort"
        await until(num(1))
        await server.post("/continue_generation", {}, key="root")
        meta = (await alices)["meta_info"]
        assert (meta["id"], meta["finish_reason"]["type"], meta["completion_tokens"]) == ("same", "length", 3)
        unnamed = (await server.post("/generate", say([5]), key="bob"))["meta_info"]["id"]
        assert ":" not in unnamed


@served
async def test_a_branch_goes_on_from_a_request_by_its_keys_name():
    async with inside(**KEYS) as server:
        await server.post("/open_session", {"session_id": "tree", "streaming": False}, key="alice")
        first = await server.post("/generate", say([5, 6], rid="root", session_params={"id": "tree"}), key="alice")
        where = {"id": "tree", "rid": "root"}
        second = await server.post("/generate", say([7], session_params=where), key="alice")
        assert second["meta_info"]["prompt_tokens"] == 2 + len(first["output_ids"]) + 1
        await server.post("/abort_request", {"rid": ""}, key="alice")


@served
async def test_what_goes_on_gets_no_beginning_of_its_own():
    from tiny_tokenizers import tiny_tokenizer

    tokenizer = tiny_tokenizer("sentencepiece")
    bos = tokenizer.bos_token_id
    async with inside(tokenizer, core_for_text()) as server:
        for text in ("a b", "c"):
            await server.post("/open_session", {"session_id": text})
            for said in ({"text": text}, {"text": text}, {"input_ids": [bos, 5]}):
                body = {**said, "sampling_params": SHORT, "session_params": {"id": text}}
                await server.post("/generate", body)
        prompts = [np.frombuffer(start.prompt_ids, dtype="<i4").tolist() for start in server.told(Start)]
    assert [ids.count(bos) for ids in prompts] == [1, 0, 0] * 2
    assert [ids[0] == bos for ids in prompts] == [True, False, False] * 2
    assert prompts[2] == [5]


def test_a_port_is_had_again_while_its_last_connections_linger():
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    listener.listen()
    import socket

    with socket.create_connection(("127.0.0.1", port)) as peer:
        served_one, _ = listener.accept()
        served_one.close()  # who closes first keeps the address for a minute
        listener.close()
        assert peer.recv(1) == b""
    bind("127.0.0.1", port).close()
