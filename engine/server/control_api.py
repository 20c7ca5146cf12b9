"""Health, metrics, and what operators do: three truths about health, and each is checked where it is asked."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any, ClassVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict

from engine.sampling.params import SamplingParams
from engine.server.openai_api import serving_of
from engine.server.serving import Prompt, Serving

router = APIRouter()
BEAT_LIMIT_S = 5.0
PROBE_LIMIT_S = 20.0


@router.get("/health")
async def health(request: Request) -> Response:
    """Both processes live and the current step is not older than the watchdog allows."""
    reason = _why_unhealthy(serving_of(request))
    return JSONResponse({"status": "ok"}) if reason is None else JSONResponse({"status": reason}, 503)


@router.get("/ready")
async def ready(request: Request) -> Response:
    """Weights are loaded, a step has run, and new requests are welcome: not while it drains."""
    serving = serving_of(request)
    reason = _why_unhealthy(serving)
    if reason is None and request.app.state.is_draining:
        reason = "the server is draining"
    return JSONResponse({"status": "ok"}) if reason is None else JSONResponse({"status": reason}, 503)


@router.get("/health_generate")
async def health_generate(request: Request) -> Response:
    """One real token within a limit; it is not counted, and shares no prefix with anybody."""
    serving = serving_of(request)
    params = SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True)
    probe = Prompt(
        ids=[0],
        params=params,
        request_id=f"health-{uuid.uuid4().hex}",
        priority=2**30,
        extra_key="health",
        counts=False,
    )
    try:
        async with asyncio.timeout(PROBE_LIMIT_S):
            generation = await serving.generate(probe)
            await generation.whole()
    except Exception as error:
        what = f"no token within {PROBE_LIMIT_S:.0f} s" if isinstance(error, TimeoutError) else str(error)
        return JSONResponse({"status": what}, 503)
    return JSONResponse({"status": "ok"})


def _why_unhealthy(serving: Serving) -> str | None:
    client = serving.client
    if client.died.is_set():
        return "the engine process has ended"
    age = time.monotonic() - client.beat_at_s
    if age > BEAT_LIMIT_S:
        return f"the engine process has not been heard of for {age:.0f} s"
    if client.beat.step_age_s > serving.args.watchdog_timeout_s:
        return f"a step has taken {client.beat.step_age_s:.0f} s"
    return None


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    return Response(serving_of(request).metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/server_info")
async def server_info(request: Request, audit: bool = False) -> dict[str, Any]:
    """What the engine is, and what it holds now; with `audit` also what is wrong with its books."""
    serving = serving_of(request)
    info = {**serving.client.info, "served_model_name": serving.model_name}
    if audit:
        info["violations"] = await serving.client.call("audit")
    return {**info, "stats": await serving.client.call("stats")}


@router.get("/get_model_info", include_in_schema=False)
@router.post("/get_model_info")
@router.get("/model_info")
async def model_info(request: Request) -> dict[str, Any]:
    info = serving_of(request).client.info
    return {
        "model_path": info["model"],
        "served_model_name": serving_of(request).model_name,
        "architecture": info["architecture"],
        "context_length": info["context_length"],
        "is_generation": True,
    }


@router.get("/flush_cache", include_in_schema=False)
@router.post("/flush_cache")
async def flush_cache(request: Request) -> dict[str, bool]:
    """Empty the prefix cache; refused while requests run."""
    await serving_of(request).client.call("flush_cache")
    return {"success": True}


class Pause(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    mode: str = "in_place"


@router.post("/pause_generation")
async def pause_generation(request: Request, body: Pause) -> dict[str, str]:
    await serving_of(request).client.call("pause", mode=body.mode)
    return {"status": "paused"}


@router.post("/continue_generation")
async def continue_generation(request: Request) -> dict[str, str]:
    await serving_of(request).client.call("resume")
    return {"status": "running"}
