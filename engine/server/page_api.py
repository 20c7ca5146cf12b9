"""The page at `/`: a chat, and the live picture of the KV beside it. Four static files, and one endpoint behind them.

The files are open, since they hold nothing; what they fetch asks for keys as always. The page keeps the keys in its
memory only, loads nothing from elsewhere, and its policy forbids both to whatever might get into it.
"""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from engine.server.openai_api import serving_of

router = APIRouter(include_in_schema=False)
PICTURE_PATH = "/kv_picture"
FOLDER = Path(__file__).parent / "page"
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page/chat.js": ("chat.js", "text/javascript; charset=utf-8"),
    "/page/picture.js": ("picture.js", "text/javascript; charset=utf-8"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
}
LABEL_KEY = secrets.token_bytes(16)
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


async def _file(request: Request) -> Response:
    name, media_type = FILES[request.url.path]
    return Response((FOLDER / name).read_bytes(), media_type=media_type, headers=HEADERS)


for _path in FILES:
    router.add_api_route(_path, _file, methods=["GET"])


@router.get(PICTURE_PATH)
async def picture(request: Request, mine: str | None = None) -> dict[str, Any]:
    """Rows, pools, tree and sessions as they are now: lengths, never tokens.

    `mine`: a request id; its row and its session are marked. Where there are keys, ids are somebody's words: labels
    stand for them.
    """
    serving = serving_of(request)
    view: dict[str, Any] = await serving.client.call("kv_picture")
    rows, sessions = view["rows"]["shown"], view["sessions"]["shown"]
    own = {session["owner_id"] for session in sessions if _is_named(session["request"], mine)}
    for one in [*rows, *sessions]:
        one["is_mine"] = one["owner_id"] in own or _is_named(one["request"], mine)
        if serving.args.api_keys:
            one.update({name: _label(one[name]) for name in ("id", "owner_id", "request") if one.get(name)})
    return {"model": serving.model_name, "device": serving.client.info["description"], **view}


def _is_named(request: str | None, mine: str | None) -> bool:
    """Whether a client calls a request so; where there are keys, whose it is stands in front."""
    return request is not None and mine is not None and (request == mine or request.endswith(f":{mine}"))


def _label(name: str) -> str:
    """The same for the same name as long as the server lives, and tells nothing of it."""
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=4, key=LABEL_KEY).hexdigest()
