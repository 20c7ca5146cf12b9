"""Errors as clients of the OpenAI API expect them: one object, the right 4xx, and nothing about the inside."""

from __future__ import annotations

import json
import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from engine.errors import BadRequest, SessionRefused
from engine.server.engine_client import EngineDied
from engine.server.serving import AnswerFailed

logger = logging.getLogger("rung")

_STATUS_OF_KIND = {"unknown": 404, "busy": 409, "full": 400, "illegal": 400}
_CODE_OF_STATUS = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}
_TYPE_OF_STATUS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    503: "overloaded_error",
}


def error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The error object. `param`: the field that is wrong; `code`: short and stable, for programs."""
    kind = _TYPE_OF_STATUS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def as_error(error: Exception) -> tuple[int, dict[str, Any]]:
    """Status and body for what went wrong with one request."""
    if isinstance(error, SessionRefused):
        code = f"session_{error.kind}"
        status = _STATUS_OF_KIND.get(error.kind, 400)
        return status, error_body(status, str(error), param=error.field, code=code)
    if isinstance(error, BadRequest):
        is_too_long = error.field in ("prompt", "input") and ("context" in error.rule or "can never fit" in error.rule)
        code = "context_length_exceeded" if is_too_long else "invalid_value"
        if error.field == "previous_response_id":
            code = "previous_response_not_found"
        return 400, error_body(400, str(error), param=error.field, code=code)
    if isinstance(error, EngineDied):
        return 503, error_body(503, "the engine has stopped; the server is shutting down", code="engine_stopped")
    if isinstance(error, AnswerFailed):
        return 500, error_body(500, str(error), code="generation_failed")
    logger.error("a request failed", exc_info=error)
    return 500, error_body(500, "internal error; the server's log has the reason", code="internal_error")


def sse_error(error: Exception) -> bytes:
    """The same as the last event of a stream that has begun."""
    return f"data: {json.dumps(as_error(error)[1])}\n\n".encode()


class AsciiJson(JSONResponse):
    """JSON that can be written whatever a client's own words in it are, lone surrogates included."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content).encode()


def install(app: FastAPI) -> None:
    """Answer every exception of the routes with the error object."""

    async def of_exception(_: Request, error: Exception) -> AsciiJson:
        status, body = as_error(error)
        return AsciiJson(body, status)

    async def of_http(_: Request, error: Exception) -> AsciiJson:
        assert isinstance(error, HTTPException)
        status = error.status_code
        body = error_body(status, str(error.detail), code=_CODE_OF_STATUS.get(status))
        return AsciiJson(body, status, headers=error.headers)

    async def of_validation(_: Request, error: Exception) -> AsciiJson:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        message = f"{where or 'body'}: {first['msg']}"
        code = "invalid_json" if first["type"] == "json_invalid" else "invalid_value"
        return AsciiJson(error_body(400, message, param=where or None, code=code), 400)

    for kind in (BadRequest, EngineDied, AnswerFailed, Exception):
        app.add_exception_handler(kind, of_exception)
    app.add_exception_handler(HTTPException, of_http)
    app.add_exception_handler(RequestValidationError, of_validation)
