"""`scripts/npu/router`: one address before several `rung serve`. Keys are the replicas' business and pass through."""

from __future__ import annotations

import logging
from typing import Annotated

import typer
import uvicorn

from cluster.router import Router, create_app

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(help=__doc__)
def route(
    backend: Annotated[list[str], typer.Option(help="A replica's URL; repeat it.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 6677,
    prefix_chars: Annotated[int, typer.Option(help="Characters of a prompt that decide its replica.")] = 256,
    max_load_factor: Annotated[
        float, typer.Option(help="Pass a replica over with more than this times the mean load.")
    ] = 1.5,
    drain_timeout_s: Annotated[int, typer.Option(help="Seconds that SIGTERM leaves to requests in flight.")] = 30,
) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    router = Router(backend, prefix_chars, max_load_factor)
    uvicorn.run(
        create_app(router),
        host=host,
        port=port,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=drain_timeout_s,
    )


def main() -> None:
    app()
