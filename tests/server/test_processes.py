"""Two processes that live and end together; keys, limits, and what is said before anything is loaded."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from served import Server, serve_command

ROOT = Path(__file__).resolve().parents[2]
SLOW = {"text": "x", "sampling_params": {"max_new_tokens": 450, "ignore_eos": True}}


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def is_refused(url: str) -> bool:
    """Whether nobody accepts a connection."""
    try:
        httpx.get(f"{url}/health", timeout=2.0)
    except httpx.ConnectError:
        return True
    return False


def wait_for(condition, limit_s: float = 30.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_when_the_engine_dies_clients_are_told_and_the_server_ends(own_server, number):
    server = own_server()
    engine = server.engine_pid()
    with server.http() as client, client.stream("POST", "/generate", json={**SLOW, "stream": True}) as answer:
        lines = answer.iter_lines()
        next(lines)
        os.kill(engine, number)
        rest = [line for line in lines if line]
    assert any("engine has stopped" in line for line in rest)
    assert server.process.wait(30) == 3
    assert "ended with status" in server.log.read_text()


def test_when_the_server_dies_the_engine_ends_too(own_server):
    server = own_server()
    engine = server.engine_pid()
    server.process.send_signal(signal.SIGKILL)
    wait_for(lambda: not is_alive(engine))


def test_sigterm_drains_what_is_in_flight(own_server):
    server = own_server()
    engine = server.engine_pid()
    with server.http() as client, client.stream("POST", "/generate", json={**SLOW, "stream": True}) as answer:
        lines = answer.iter_lines()
        next(lines)
        for pid in (engine, server.process.pid):  # as one to the whole group comes
            os.kill(pid, signal.SIGTERM)
        wait_for(lambda: "draining" in server.log.read_text())
        wait_for(lambda: is_refused(server.url))  # the listener closes with the loop's next tick
        assert not answer.is_closed
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert '"length"' in rest[-2]
    assert server.process.wait(30) == 0
    assert not is_alive(engine)


STUCK = {"messages": [{"role": "user", "content": "x"}], "stream": True}
"""Its first event needs no token; while the engine is paused it cannot end by itself."""


def test_draining_has_a_limit(own_server):
    server = own_server("--drain-timeout-s", "1")
    server.post("/pause_generation", {})
    with server.http() as client, client.stream("POST", "/v1/chat/completions", json=STUCK) as answer:
        lines = answer.iter_lines()  # held: the stream closes with it
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0


def test_a_second_signal_does_not_wait(own_server):
    server = own_server("--drain-timeout-s", "1000")
    server.post("/pause_generation", {})
    with server.http() as client, client.stream("POST", "/v1/chat/completions", json=STUCK) as answer:
        lines = answer.iter_lines()  # held: the stream closes with it
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: "draining" in server.log.read_text())
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0, "well within the limit for requests in flight"


@pytest.mark.parametrize(
    ("step_age_s", "beat_age_s", "is_dead", "says"),
    [
        (0.0, 0.0, False, None),
        (29.0, 4.0, False, None),
        (31.0, 0.0, False, "a step has taken 31 s"),
        (0.0, 6.0, False, "not been heard of for 6 s"),
        (0.0, 0.0, True, "has ended"),
    ],
)
def test_health_looks_at_the_step_the_beat_and_the_process(step_age_s, beat_age_s, is_dead, says):
    from engine.server.control_api import _why_unhealthy

    died = SimpleNamespace(is_set=lambda: is_dead)
    beat = SimpleNamespace(step_age_s=step_age_s)
    client = SimpleNamespace(died=died, beat=beat, beat_at_s=time.monotonic() - beat_age_s)
    reason = _why_unhealthy(SimpleNamespace(client=client, args=SimpleNamespace(watchdog_timeout_s=30.0)))
    assert reason is None if says is None else says in reason


def test_a_step_that_hangs_is_seen(own_server):
    server = own_server("--watchdog-timeout-s", "0.5")
    engine = server.engine_pid()
    os.kill(engine, signal.SIGSTOP)
    try:
        wait_for(lambda: httpx.get(f"{server.url}/health").status_code == 503)
        assert "not been heard of" in httpx.get(f"{server.url}/ready").text
    finally:
        os.kill(engine, signal.SIGCONT)
    wait_for(lambda: httpx.get(f"{server.url}/health").status_code == 200)


def rung(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from engine.cli import main; main()", "serve", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT, timeout=60)


def test_a_port_in_use_is_said_before_anything_is_loaded(tiny_model):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = rung("--model", "/no/such/model", "--port", str(port))
    assert ended.returncode == 2
    assert f"port={port} cannot be had" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--model", "/no/such/model"), "/no/such/model"),
        (("--max-total-tokens", "1"), "max_total_tokens"),
        (("--port", "70000"), "port=70000"),
        (("--config", "/no/such/file"), "cannot be read"),
    ],
)
def test_a_start_that_cannot_be_ends_with_the_reason(tiny_model, arguments, says):
    given = arguments if "--model" in arguments else ("--model", str(tiny_model), *arguments)
    ended = rung("--device", "cpu", *(("--port", "0") if "--port" not in given else ()), *given)
    assert ended.returncode == 2
    assert says in ended.stderr
    assert "Traceback" not in ended.stderr


def begin(model: Path, folder: Path, *flags: str) -> tuple[Server, int]:
    """A server that has an engine process, by its id, and cannot serve yet."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    log = folder / "log"
    with log.open("w") as file:
        command = serve_command(model, "--port", url.rsplit(":", 1)[1], *flags)
        process = subprocess.Popen(command, stderr=file, stdout=file, text=True, cwd=ROOT)
    server = Server(process, url, log)

    def engine_pid() -> int | None:
        with suppress(AssertionError, FileNotFoundError):
            return server.engine_pid()
        return None

    wait_for(engine_pid, limit_s=60.0)
    engine = engine_pid()
    assert engine is not None
    assert is_refused(url)
    return server, engine


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["engine killed", "server told to stop"])
def test_a_start_that_is_cut_off_ends_both(tiny_model, tmp_path, number):
    """Nothing answers before it can serve, nothing waits for ever, and nothing is left."""
    server, engine = begin(tiny_model, tmp_path)
    os.kill(engine if number == signal.SIGKILL else server.process.pid, number)
    assert server.process.wait(30) != 0
    wait_for(lambda: not is_alive(engine), limit_s=30.0)
    assert "serving" not in server.log.read_text()
    assert number != signal.SIGKILL or "ended with status -9" in server.log.read_text()


def test_a_start_that_hangs_has_a_limit(tiny_model, tmp_path):
    """The engine process is frozen, not dead, while it loads."""
    server, engine = begin(tiny_model, tmp_path, "--start-timeout-s", "2")
    os.kill(engine, signal.SIGSTOP)
    try:
        assert server.process.wait(60) == 2
        wait_for(lambda: not is_alive(engine), limit_s=30.0)
    finally:
        with suppress(ProcessLookupError):
            os.kill(engine, signal.SIGKILL)
    said = server.log.read_text()
    assert "start_timeout_s=2" in said
    assert "--start-timeout-s more" in said
    assert "Traceback" not in said


def test_flags_from_a_file_and_the_command_line_wins(own_server, tmp_path):
    file = tmp_path / "flags.yaml"
    file.write_text("page-size: 32\nserved_model_name: from-file\nmax-running-requests: 7\n")
    server = own_server("--config", str(file), "--served-model-name", "from-flag")
    info = server.get("/server_info")
    assert (info["allocation_page"], info["num_rows"], info["served_model_name"]) == (32, 7, "from-flag")
    file.write_text("page-sise: 32\n")
    assert "did you mean page_size" in rung("--config", str(file)).stderr
    file.write_text("- a\n- b\n")
    assert "flags and their values" in rung("--config", str(file)).stderr


def test_keys_open_what_they_are_for(own_server):
    server = own_server("--api-key", "one,two", env={"RUNG_ADMIN_API_KEY": "boss"})
    body = {"text": "secret words " * 8, "sampling_params": {"max_new_tokens": 2, "temperature": 0}}
    for path in ("/health", "/ready", "/health_generate"):
        server.get(path)
    for key in (None, "wrong", "boss", "own", "one,two", "on", "onee"):
        assert server.post("/generate", body, 401, key=key)["error"]["type"] == "authentication_error"
        assert server.get("/v1/models", 401, key=key)
    for key in (None, "one", "boos"):
        server.get("/server_info", 401, key=key)
        server.post("/flush_cache", {}, 401, key=key)
    assert server.get("/server_info", key="boss")["model"]
    first = server.post("/generate", body, key="one")
    assert server.post("/generate", body, key="one")["meta_info"]["cached_tokens"] > 0
    other = server.post("/generate", body, key="two")
    assert other["meta_info"]["cached_tokens"] == 0, "prefixes are not shared between keys"
    assert other["text"] == first["text"]
    server.post("/open_session", {"session_id": "mine"}, key="one")
    server.get("/sessions/mine", 404, key="two")
    server.post("/open_session", {"session_id": "mine"}, key="two")
    server.post("/abort_request", {"abort_all": True}, 400, key="one")
    assert "secret" not in server.log.read_text()
    assert not any(key in server.log.read_text() for key in ("one,two", "boss"))


def test_prefixes_are_shared_between_keys_when_that_is_wanted(own_server):
    server = own_server("--api-key", "one,two", "--share-prefix-across-keys")
    body = {"text": "words " * 20, "sampling_params": {"max_new_tokens": 2}}
    server.post("/generate", body, key="one")
    assert server.post("/generate", body, key="two")["meta_info"]["cached_tokens"] > 0
    server.get("/metrics", 403, key="one")


def test_sizes_and_numbers_have_limits(own_server):
    server = own_server("--max-body-bytes", "2048", "--max-concurrent-requests", "2")
    assert server.post("/generate", {"text": "x" * 4000}, 413)["error"]["code"] == "body_too_large"

    def chunks():
        for _ in range(100):
            yield b" " * 100

    with server.http() as client:
        assert client.post("/generate", content=chunks()).status_code == 413
    server.post("/pause_generation", {})
    slow = {"method": "POST", "url": "/generate", "json": {**SLOW, "stream": True}}
    with server.http() as client, client.stream(**slow), client.stream(**slow):
        with server.http() as third:
            refused = third.post("/generate", json=SLOW)
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "overloaded"
        server.get("/health")
    server.wait_until_idle()
    server.post("/continue_generation", {})
    server.post("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 1}})
