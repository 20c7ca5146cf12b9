"""The command as a person runs it: what goes to standard output, what to standard error, and how it ends.

Each case is a process of its own, which imports everything again, so there are few of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness import make_llm

from engine import SamplingParams

ROOT = Path(__file__).resolve().parents[2]
MAIN = "from engine.cli import main; main()"


@dataclass(frozen=True)
class Ended:
    """A command that ended; text is decoded as it came, line ends included."""

    code: int
    out: str
    err: str

    @property
    def err_lines(self) -> list[str]:
        return self.err.splitlines()


def rung(*args: str, stdin: str = "", **environment: str) -> Ended:
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"} | environment
    done = subprocess.run(
        [sys.executable, "-c", MAIN, *args],
        input=stdin.encode(),
        capture_output=True,
        env=env,
        cwd="/",
        timeout=280,
        check=False,
    )
    return Ended(done.returncode, done.stdout.decode("utf-8"), done.stderr.decode("utf-8"))


def assert_quiet(ended: Ended) -> None:
    """Without a terminal: no colours, no cursor movements, no bar that redraws itself."""
    for text in (ended.out, ended.err):
        assert "\x1b" not in text
    assert "\r" not in ended.err
    assert "━" not in ended.err


def assert_refused(ended: Ended, *parts: str) -> None:
    """Exit code 2 and one line, without a trace and without an answer."""
    assert ended.code == 2
    assert ended.out == ""
    assert len(ended.err_lines) == 1, ended.err
    assert ended.err.startswith("error: ")
    for part in parts:
        assert part in ended.err
    assert_quiet(ended)


def test_generate_answers_on_standard_output_and_keeps_its_numbers_off_it(tiny_path: Path) -> None:
    prompts = ["hello the world and more", "hello the world and less"]
    ended = rung(
        "generate", *prompts, "--model", str(tiny_path), "--device", "cpu", "--dtype", "float32", "--page-size", "1",
        "--max-new-tokens", "12", "--max-total-tokens", "256",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    llm = make_llm(tiny_path, page_size=1, max_total_tokens=256)
    results = [llm.generate(prompt, SamplingParams(temperature=0.0, max_new_tokens=12)) for prompt in prompts]
    assert ended.out == "".join(f"{result.text}\n" for result in results)
    loaded, *answers = ended.err_lines
    assert loaded.startswith(f"loaded {tiny_path} in ")
    assert answers[::2] == [f"> {prompt}" for prompt in prompts]
    for line, result in zip(answers[1::2], results, strict=True):
        usage = result.usage
        assert line.startswith(f"[{usage.completion_tokens} tokens, ")
        assert f"reused {usage.cached_tokens} of {usage.prompt_tokens} prompt tokens" in line
        assert f"ended by {result.finish_reason}]" in line
    assert results[1].usage.cached_tokens > 0
    assert_quiet(ended)


def test_chat_answers_each_line_and_reuses_the_turns_before(tiny_path: Path) -> None:
    lines = ["hi there 🙂", "and what else?"]
    ended = rung(
        "chat", "--system", "be brief", "--model", str(tiny_path), "--device", "cpu", "--dtype", "float32",
        "--max-new-tokens", "5", "--max-total-tokens", "512",
        stdin="\n".join([*lines, "", "this comes after the end"]),
    )  # fmt: skip
    assert ended.code == 0, ended.err
    session = make_llm(tiny_path, max_total_tokens=512).open_session()
    expected, reused = "", []
    for line in lines:
        opening = [{"role": "system", "content": "be brief"}] if not reused else []
        said = [*opening, {"role": "user", "content": line}]
        result = session.chat(said, SamplingParams(temperature=0.0, max_new_tokens=5))
        expected += f"{result.text}\n"
        usage = result.usage
        computed = usage.prompt_tokens - usage.cached_tokens
        reused.append(
            f"reused {usage.cached_tokens} of {usage.prompt_tokens} prompt tokens, computed {computed}, lost to "
            "alignment 0;"
        )
    assert ended.out == expected
    assert len(ended.err_lines) == 3
    assert all(part in line for part, line in zip(reused, ended.err_lines[1:], strict=True))
    assert "reused 0" not in reused[1]
    assert_quiet(ended)


def test_a_page_size_the_device_lacks_is_refused_in_one_line(tiny_path: Path) -> None:
    ended = rung("generate", "x", "--model", str(tiny_path), "--device", "cpu", "--page-size", "24")
    assert_refused(ended, "page_size=24", "'cpu'", "1, 16, 32, 64, 128", "use --page-size")


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (("generate", "x", "--temperature", "nan"), ("temperature=nan", "0.0 to 100.0")),
        (("chat", "--top-k", "0"), ("top_k=0", "-1 for all")),
        (("model", "fetch", "no-such-model"), ("no-such-model", "smollm2-135m-instruct")),
    ],
    ids=["generate", "chat", "model"],
)
def test_bad_values_are_refused_before_anything_is_loaded(args: tuple[str, ...], parts: tuple[str, ...]) -> None:
    assert_refused(rung(*args), *parts)


def test_an_unknown_flag_is_refused_with_the_usage() -> None:
    ended = rung("generate", "x", "--page-sise", "16")
    assert ended.code == 2
    assert ended.out == ""
    assert "--page-sise" in ended.err
    assert "Traceback" not in ended.err


def test_doctor_says_which_devices_open_and_why_the_others_do_not() -> None:
    ended = rung("doctor")
    assert ended.code == 0, ended.err
    rows = {line.split()[0]: line for line in ended.out.splitlines()[1:] if not line.startswith(" ")}
    assert set(rows) >= {"npu", "npu-sim", "cuda", "cpu"}
    assert rows["cpu"].split()[1:3] == ["yes", "PASS"]
    for name, line in rows.items():
        if line.split()[1] == "no":
            assert len(line.split()) > 4, f"{name} gives no reason"
    if "torch_npu is not installed" in rows["npu"]:
        assert "rung[npu]" in rows["npu"], "square brackets are text, not markup"
    assert_quiet(ended)


def test_model_list_says_what_is_here(tmp_path: Path) -> None:
    by_flag = rung("model", "list", "--model-cache", str(tmp_path))
    by_environment = rung("model", "list", RUNG_MODEL_CACHE=str(tmp_path))
    assert by_flag == by_environment
    assert by_flag.code == 0
    [line] = [line for line in by_flag.out.splitlines() if line.startswith("smollm2-135m-instruct")]
    assert line.split()[1:4] == ["98", "MB", "no"]
    assert_quiet(by_flag)
