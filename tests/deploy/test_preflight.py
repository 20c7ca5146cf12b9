"""The fifteen checks from recorded texts and on this machine: verdicts, exit status, JSON, and never a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cluster.evidence import CachedEvidence, LiveEvidence, RecordedEvidence, Recorder
from cluster.needs import Needs
from cluster.preflight import CHECKS, run_checks
from cluster.preflight_cli import main
from cluster.verdicts import Severity, Verdict, exit_status

ROOT = Path(__file__).resolve().parents[2]
RECORDINGS = Path(__file__).parent / "recordings"
TWO_HOSTS = Needs(num_devices=2, num_hosts=2, peers=("10.20.1.30",))
FAULTY = Needs(num_devices=4, num_hosts=8, peers=("10.20.1.30",), min_driver="25.2.0", store="172.30.0.11:24669")


def verdicts_of(folder: str, needs: Needs) -> list[Verdict]:
    return run_checks(RecordedEvidence(RECORDINGS / folder), needs)


def said(verdicts: list[Verdict], number: int) -> str:
    return " | ".join(f"{one.severity.label}: {one.what}" for one in verdicts[number - 1].findings)


def test_healthy_hosts_pass_every_check() -> None:
    for folder, needs in (("a2-healthy", TWO_HOSTS), ("a3-healthy", Needs(2, num_hosts=2, peers=("192.168.2.99",)))):
        verdicts = verdicts_of(folder, needs)
        assert [one for one in verdicts if one.severity > Severity.OK] == []
        assert sum(one.severity is Severity.OK for one in verdicts) >= 12
        assert exit_status(verdicts) == 0


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (1, ("device 3 (910B3) is Alarm", "device 2 has 536 of 65536 MB free", "process 1333928 (python3.11)")),
        (2, ("driver 24.1.rc2.2 is older than 25.2.0", "no pair")),
        (3, ("libascendcl.so: cannot open",)),
        (4, ("torch 2.12.0 and torch_npu 2.10.0 differ", "triton is upstream's")),
        (
            5,
            (
                "device 0: link DOWN",
                "device 1: net health Receive timeout",
                "TLS is on for devices [2]",
                "2 of 3 came back",
            ),
        ),
        (5, ("device 3 has no address",)),
        (6, ("the interface names differ", "interface is lo", "eth9 does not exist", "TP_SOCKET_IFNAME not set")),
        (7, ("port 30000 (server) is taken", "172.30.0.11:24669 does not answer")),
        (9, ("/dev/shm has 64 MB", "1024 open files", "64 kB may be locked")),
        (9, ("kernel.numa_balancing is 1", "vm.swappiness is 60", "governor is powersave")),
        (10, ("not ascending",)),
        (11, ("HCCL_CONNECT_TIMEOUT=120 s is less",)),
        (12, ("net.core.somaxconn is 128",)),
        (13, ("server_count is '1'", "rank ids must be 0 to 15", "status is 'initializing'")),
        (14, ("ASCEND_LAUNCH_BLOCKING=1",)),
        (15, ("max_split_size_mb above 20", "excludes graphs")),
    ],
)
def test_each_fault_is_found_by_its_check(number: int, words: tuple[str, ...]) -> None:
    verdicts = verdicts_of("a2-faulty", FAULTY)
    for word in words:
        assert word in said(verdicts, number)
    assert verdicts[number - 1].severity > Severity.OK
    assert all(one.change for one in verdicts[number - 1].findings if one.severity > Severity.OK)


def test_every_check_that_can_fail_has_a_fault() -> None:
    """The faulty host leaves only check 8, which has its own test, without a fault."""
    assert [one.number for one in verdicts_of("a2-faulty", FAULTY) if one.severity <= Severity.OK] == [8]
    assert len(CHECKS) == 15


def test_one_host_needs_no_device_network() -> None:
    """What is wrong with the ports is said, and does not stop a host that works alone."""
    alone = verdicts_of("a2-faulty", Needs(num_devices=4))
    assert alone[4].severity is Severity.WARN
    assert "link DOWN" in said(alone, 5)


def test_a_driver_that_refuses_is_a_verdict() -> None:
    verdicts = verdicts_of("driver-refuses", Needs())
    assert "code -8005" in said(verdicts, 1)
    assert "empty" in said(verdicts, 10)
    assert verdicts[4].severity is Severity.NOT_APPLICABLE
    assert exit_status(verdicts) == 2


def test_what_was_not_recorded_is_not_said_to_be_fine(tmp_path: Path) -> None:
    (tmp_path / "probe_ports.txt").write_text("30000 free\n")
    verdicts = run_checks(RecordedEvidence(tmp_path), Needs(num_devices=2, num_hosts=9))
    assert {one.number for one in verdicts if one.severity is Severity.OK} == {7}
    for number in (6, 10, 11, 14, 15):
        assert "not recorded" in said(verdicts, number)


def test_texts_that_cannot_be_read_are_a_verdict(tmp_path: Path) -> None:
    for name in ("probe_limits", "probe_packages", "probe_interfaces", "cmd_npu-smi_info", "probe_libraries"):
        (tmp_path / f"{name}.txt").write_text("\x00 what = is ||| this 1/ x\n| 1 | 2 | 3 |\n")
    (tmp_path / "probe_environment.txt").write_text("=\nHCCL_CONNECT_TIMEOUT=soon\nPYTORCH_NPU_ALLOC_CONF=,,:\n")
    assert exit_status(run_checks(RecordedEvidence(tmp_path), Needs(num_devices=2))) == 2


@pytest.mark.parametrize(
    ("value", "wrong"),
    [("18446744073709551616", "memlock_kb"), ("-1", "shm_mb")],
)
def test_limits_are_numbers_of_any_size(tmp_path: Path, value: str, wrong: str) -> None:
    lines = {"nofile": "1048576", "memlock_kb": "-1", "shm_mb": "16384", wrong: value}
    (tmp_path / "probe_limits.txt").write_text("".join(f"{name} {number}\n" for name, number in lines.items()))
    verdict = run_checks(RecordedEvidence(tmp_path), Needs())[8]
    assert verdict.severity is (Severity.FAIL if wrong == "shm_mb" else Severity.WARN)


def test_prefill_and_decode_must_agree(tmp_path: Path) -> None:
    same = {"model_hash": "a", "page_size": 128, "kv_dtype": "bfloat16", "c128_page_size": 16, "max_context": 4096}
    prefill, decode = tmp_path / "p.json", tmp_path / "d.json"
    prefill.write_text(json.dumps(same))
    decode.write_text(json.dumps(same))
    needs = Needs(prefill_geometry=prefill, decode_geometry=decode)
    evidence = RecordedEvidence(RECORDINGS / "a2-healthy")
    assert run_checks(evidence, needs)[7].severity is Severity.OK
    for name in same:
        decode.write_text(json.dumps({**same, name: "other"}))
        verdict = run_checks(evidence, needs)[7]
        assert verdict.severity is Severity.FAIL
        assert verdict.findings[0].what.startswith(name)
    decode.write_text("{")
    assert run_checks(evidence, needs)[7].severity is Severity.FAIL


def test_a_recording_of_this_machine_says_the_same(tmp_path: Path) -> None:
    live = LiveEvidence(timeout_s=20.0)
    first = run_checks(CachedEvidence(Recorder(live, tmp_path)), Needs())
    assert run_checks(RecordedEvidence(tmp_path), Needs()) == first


def test_commands_that_hang_or_fail_are_answers(tmp_path: Path) -> None:
    for name, body in (("slow", "sleep 60"), ("silent", "exit 3"), ("refused", "exit 0")):
        tool = tmp_path / name
        tool.write_text(f"#!/bin/sh\n{body}\n")
        tool.chmod(0o644 if name == "refused" else 0o755)
    live = LiveEvidence(timeout_s=0.2)
    assert "no answer within 0.2 s" in str(live.command(str(tmp_path / "slow")).problem)
    assert "status 3" in str(live.command(str(tmp_path / "silent")).problem)
    assert "may not be run" in str(live.command(str(tmp_path / "refused")).problem)
    assert "not installed" in str(live.command("no-such-tool-here").problem)
    assert "does not exist" in str(live.file("/no/such/file").problem)


def run_script(*arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": path or os.environ["PATH"]}
    command = [sys.executable, str(ROOT / "scripts/npu/preflight"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)


def test_the_script_on_this_machine_says_what_is_missing(tmp_path: Path) -> None:
    """No NPU is here (or npu-smi is hidden from the PATH): failures in words, status 2, no traceback."""
    report = tmp_path / "verdicts.json"
    done = run_script("--json", str(report), path="/usr/bin-without-npu-smi")
    assert done.returncode == 2
    assert "npu-smi is not installed" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    found = json.loads(report.read_text())
    assert found["exit_status"] == 2
    assert [one["number"] for one in found["verdicts"]] == list(range(1, 16))
    assert {one["severity"] for one in found["verdicts"]} <= {"ok", "warn", "fail", "not applicable"}


def test_the_script_from_recorded_texts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: str) -> object:
        monkeypatch.setattr(sys, "argv", ["preflight", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code

    assert run("--from-dir", str(RECORDINGS / "a2-healthy"), "--num-devices", "2", "--num-hosts", "2") == 0
    assert "0 fail, 0 warn, 13 ok" in capsys.readouterr().out
    assert run("--from-dir", str(RECORDINGS / "a2-faulty")) == 2
    assert "process 1333928" not in capsys.readouterr().out  # device 1 is not needed
    assert run("--from-dir", "/no/such/folder") == 2
    assert capsys.readouterr().err.startswith("preflight: --from-dir /no/such/folder is no folder")
    assert run("--devices", "1,0") == 2
    assert "not ascending" in capsys.readouterr().err


def test_warnings_alone_are_status_1(tmp_path: Path) -> None:
    for source in (RECORDINGS / "a2-healthy").iterdir():
        (tmp_path / source.name).write_text(source.read_text())
    (tmp_path / "probe_limits.txt").write_text("nofile 1024\nmemlock_kb -1\nshm_mb 16384\n")
    assert exit_status(run_checks(RecordedEvidence(tmp_path), TWO_HOSTS)) == 1
