"""Bodies made from the server's own OpenAPI schema, right and wrong: never a 5xx, always the error object."""

from __future__ import annotations

import json
from typing import Any

import httpx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
NUMBERS = st.sampled_from([-1, 0, 1, 2, 3, 16, 255, 300, 2**31, 2**63, 10**30])
TEXTS = st.text(max_size=8) | st.sampled_from(
    ["auto", "none", "required", "json_object", "user", "漢字🙂", "\x00", "\ud800", "a" * 300, "in_place", "retract"]
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool", "x"]), "content": TEXTS | ANY}
)
TOOL = st.sampled_from(
    [
        {"type": "function", "function": {"name": "f"}},
        {"type": "function", "name": "f", "parameters": {"type": "object"}},
        {"type": "function", "function": {"name": "f", "parameters": {"$ref": "#/x"}}},
        {"type": "x"},
    ]
)
HINTS: dict[str, st.SearchStrategy[Any]] = {
    "messages": st.lists(MESSAGE, max_size=3),
    "input": TEXTS | st.lists(MESSAGE | st.fixed_dictionaries({"type": TEXTS, "call_id": TEXTS}), max_size=3),
    "input_ids": st.lists(NUMBERS, max_size=4) | st.lists(st.lists(NUMBERS, max_size=4), max_size=2),
    "tokens": st.lists(NUMBERS, max_size=4),
    "tools": st.lists(TOOL, max_size=2),
    "model": st.none() | st.just("default"),
    "response_format": st.fixed_dictionaries({"type": TEXTS, "json_schema": ANY}),
    "text": TEXTS | st.lists(TEXTS, max_size=2) | st.fixed_dictionaries({"format": ANY}),
    "sampling_params": st.dictionaries(st.sampled_from(["temperature", "n", "stop", "top_p", "regex"]), ANY | NUMBERS),
    "session_params": st.dictionaries(st.sampled_from(["id", "rid", "offset", "replace"]), TEXTS | NUMBERS),
}
BRIEF = {"max_tokens": 3, "max_completion_tokens": 3, "max_output_tokens": 3}
NEVER = {"/metrics", "/health_generate"}


def of_schema(schema: dict[str, Any], defs: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values that a schema allows, and a few that it does not."""
    if "$ref" in schema:
        return of_schema(defs[schema["$ref"].rsplit("/", 1)[1]], defs)
    if "anyOf" in schema:
        return st.one_of([of_schema(one, defs) for one in schema["anyOf"]])
    kind = schema.get("type")
    if kind == "object" and "properties" in schema:
        fields = {name: HINTS.get(name, of_schema(one, defs)) for name, one in schema["properties"].items()}
        required = {name: value for name, value in fields.items() if name in schema.get("required", ())}
        return st.fixed_dictionaries(required, optional={k: v for k, v in fields.items() if k not in required})
    if kind == "array":
        return st.lists(of_schema(schema.get("items", {}), defs), max_size=3)
    simple = {"string": TEXTS, "integer": NUMBERS, "number": NUMBERS | st.floats(), "boolean": st.booleans()}
    return simple.get(str(kind), st.none() if kind == "null" else ANY)


def test_no_body_of_the_schema_is_a_server_error(server):
    spec = server.get("/openapi.json")
    defs = spec["components"]["schemas"]
    operations = [
        (path, method, operation)
        for path, methods in spec["paths"].items()
        for method, operation in methods.items()
        if path not in NEVER
    ]
    assert {"/v1/chat/completions", "/v1/responses", "/generate"} <= {path for path, _, _ in operations}
    answered: dict[tuple[str, int], int] = {}
    with server.http() as client:

        @settings(
            max_examples=300, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
        )
        @given(st.data())
        def send(data: st.DataObject) -> None:
            path, method, operation = data.draw(st.sampled_from(operations))
            for parameter in operation.get("parameters", ()):
                if parameter["in"] == "path":
                    value = data.draw(st.sampled_from(["x", "..", "%00", "a" * 300, "漢"]))
                    path = path.replace("{" + parameter["name"] + "}", value)
            body = None
            if "requestBody" in operation:
                schema = operation["requestBody"]["content"]["application/json"]["schema"]
                body = data.draw(of_schema(schema, defs) if data.draw(st.integers(0, 9)) else ANY)
                if isinstance(body, dict):  # what is right is answered, and should be short
                    body |= {name: value for name, value in BRIEF.items() if body.get(name) is None}
                    if isinstance(body.get("sampling_params"), dict) or path == "/generate":
                        body["sampling_params"] = {**(body.get("sampling_params") or {}), "max_new_tokens": 3}
                    body.pop("mode", None)
            content = None if body is None else json.dumps(body)
            answer = client.request(method, path, content=content, headers={"content-type": "application/json"})
            answered[operation["operationId"], answer.status_code] = 1
            assert answer.status_code < 500, (path, content, answer.text)
            if answer.status_code >= 400:
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}, (path, content, answer.text)
            if "pause" in path:
                client.post("/continue_generation")

        send()
    assert {200, 400, 404} <= {status for _, status in answered}
    assert httpx.get(f"{server.url}/health").status_code == 200
    server.post("/abort_request", {"abort_all": True})
    server.wait_until_idle()
