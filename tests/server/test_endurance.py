"""What a server bears: clients that are slow or send too much, a full disk beneath its log, a clock that jumps."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from served import ROOT, Server, serve_command

SLOW = {"text": "x", "sampling_params": {"max_new_tokens": 450, "ignore_eos": True}}


def connect(server: Server) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30.0)


def is_closed_by_peer(peer: socket.socket) -> bool:
    try:
        return peer.recv(1 << 16) == b""
    except ConnectionError:
        return True


def test_clients_that_are_slow_are_cut_off(own_server):
    server = own_server("--client-timeout-s", "1")
    head = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n"
    for begun in (b"", b"POST /gen", head, head + b"\r\n{"):
        with connect(server) as peer:
            peer.sendall(begun)
            if begun:
                time.sleep(0.6)
                peer.sendall(b" ")  # a byte now and then does not help
            assert is_closed_by_peer(peer)
    # One that never reads: its stream fills the buffers of both ends, and then it is aborted.
    body = b'{"text": "x", "stream": true, "return_logprob": true, "top_logprobs_num": 5, "sampling_params": '
    body += b'{"max_new_tokens": 700, "ignore_eos": true}}'
    with connect(server) as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.sendall(head.replace(b"100", str(len(body)).encode()) + b"\r\n" + body)
        started = time.monotonic()
        while (left := _in_flight(server)) and time.monotonic() - started < 60:
            time.sleep(0.1)
        assert left == 0
        server.wait_until_idle()
    with server.http() as client:  # one that takes longer than the limit to think between requests is no slow client
        assert client.get("/health").status_code == 200
        time.sleep(1.5)
        assert client.get("/health").status_code == 200
        server.post("/pause_generation", {})
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "stream": True}
        with client.stream("POST", "/v1/chat/completions", json=body) as answer:  # nor is one whose answer takes longer
            lines = answer.iter_lines()
            next(lines)
            time.sleep(1.5)
            server.post("/continue_generation", {})
            assert [line for line in lines if line][-1] == "data: [DONE]"


def _in_flight(server: Server) -> float:
    with server.http() as client:
        lines = client.get("/metrics").text.splitlines()
    [value] = [line.rsplit(" ", 1)[1] for line in lines if line.startswith("rung:num_http_requests ")]
    return float(value)


def test_headers_have_a_limit(server):
    for headers in ({"x-big": "x" * 200_000}, {f"x-{index}": "y" * 1000 for index in range(200)}):
        with suppress(httpx.TransportError):  # closed before all of it was sent
            assert httpx.get(f"{server.url}/health", headers=headers).status_code == 400
    for said in (b"\x16\x03\x01\x02\x00\x01\x00", b"\r\n" * 100, b"G" * 300_000):
        with connect(server) as peer:
            try:
                peer.sendall(said + b"\r\n\r\n")
                answer = peer.recv(4096)
            except ConnectionError:
                continue
            assert answer == b"" or b" 400 " in answer.splitlines()[0]
    assert server.get("/health") == {"status": "ok"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_beneath_the_log_hurts_no_request(tiny_model):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with open("/dev/full", "w") as full:
        command = serve_command(tiny_model, "--port", str(port), "--log-level", "debug", "--decode-log-interval", "1")
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, stdout=full, stderr=full, cwd=ROOT, env=env)
    try:
        server = Server(process, f"http://127.0.0.1:{port}", Path(os.devnull))
        deadline = time.monotonic() + 120.0
        while time.monotonic() < deadline and process.poll() is None:
            try:
                httpx.get(f"{server.url}/ready")
                break
            except httpx.TransportError:
                time.sleep(0.1)
        for _ in range(3):
            assert server.post("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 5}})["output_ids"]
            server.post("/generate", {"text": "x", "sampling_params": {"max_new_tokens": -5}}, 400)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


JUMPING = """
import os, time
_now = time.time
time.time = lambda: _now() + float(open(os.environ["RUNG_TEST_JUMP"]).read())
"""


def test_a_clock_that_jumps_ends_nothing(own_server, tmp_path):
    """Both processes see the wall clock jump by ten days, forth and back, while an answer streams."""
    (tmp_path / "sitecustomize.py").write_text(JUMPING)
    jump = tmp_path / "jump"
    jump.write_text("0")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    flags = ("--watchdog-timeout-s", "20", "--stored-response-ttl-s", "3600")
    server = own_server(*flags, env={"PYTHONPATH": path, "RUNG_TEST_JUMP": str(jump)})
    name = server.post("/open_session", {"timeout": 3600})
    kept = server.post("/v1/responses", {"input": "x", "max_output_tokens": 2})
    limited = {**SLOW["sampling_params"], "time_limit_s": 300.0}
    with server.http() as client:
        body = {**SLOW, "sampling_params": limited, "stream": True}
        with client.stream("POST", "/generate", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            for seconds in ("864000", "-864000", "0"):
                jump.write_text(seconds)
                for path in ("/health", "/ready", "/health_generate", f"/sessions/{name}"):
                    server.get(path)
                assert server.get(f"/v1/responses/{kept['id']}")["id"] == kept["id"]
                made = server.post("/v1/responses", {"input": "x", "max_output_tokens": 1})["created_at"]
                assert abs(made - time.time() - float(seconds)) < 100, "the clock did not jump"
            rest = [line for line in lines if line]
    assert '"length"' in rest[-2]
