"""The simulator itself: the oracle and the device agree, equal seeds are equal, a failure is found and made small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from devices.null.device import NullKv, next_tokens, null_capabilities, window_text_hash
from devices.registry import AUTO_ORDER, DeviceUnavailable, open_device
from engine.errors import BadRequest
from engine.sim.failures import SimFailure, WrongToken
from engine.sim.oracle import continuation, extended_hash, next_token
from engine.sim.oracle import text_hash as oracle_hash
from engine.sim.play import play
from engine.sim.profiles import CLEAN, draw
from engine.sim.run import ALL, run_seed, simulate
from engine.sim.shrink import as_test, shrink
from engine.sim.soak import Totals

ROOT = Path(__file__).resolve().parents[2]


def written(tokens: list[int], table: list[int], page_size: int = 4) -> NullKv:
    kv = NullKv(8, page_size)
    kv.write(table, 0, tokens)
    return kv


@pytest.mark.parametrize("page_size", [1, 4, 128])
@pytest.mark.parametrize("length", [1, 4, 7, 11, 40, 300])
@pytest.mark.parametrize("seed", [None, 0, 991])
def test_oracle_and_device_agree_on_a_row_that_is_right(length: int, seed: int | None, page_size: int) -> None:
    tokens = list(range(100, 100 + length))
    kv = NullKv(301, page_size)
    table = list(range(301, 0, -1))
    for first in (0, length // 2, length - 1):  # in pieces, read in between: what a page remembers must not be old
        kv.write(table, first, tokens[first:])
        text_hash = kv.read(table, length)
        assert text_hash == extended_hash(0, 0, tokens, 0)
        assert kv.read(table, first) == extended_hash(0, 0, tokens[:first], 0)
        for window in (1, page_size, 2 * page_size + 1):
            for end in (first, length):
                lo = max(0, end - window)
                whole = text_hash_of(kv, kv, table, end, window)
                assert whole == oracle_hash(extended_hash(0, 0, tokens[:end], 0), window, tokens, end, 0)
                assert kv.read(table, end, lo) == extended_hash(0, lo, tokens[lo:end], 0)
    salt = 0 if seed is None else (seed * 0x2545F4914F6CDD1D + length) % 2**64
    assert next_tokens([text_hash], [salt], 4096) == [next_token(text_hash, length, seed, 4096)]


def text_hash_of(full: NullKv, window_kv: NullKv, table: list[int], length: int, window: int) -> int:
    """As the executor reads a row of both families."""
    return window_text_hash(full.read(table, length), window_kv.read(table, length, max(0, length - window)))


def test_what_lies_before_a_window_is_not_read_and_what_lies_in_it_is() -> None:
    table = [5, 2, 7]
    kv = written(list(range(11)), table)
    whole, windowed = kv.read(table, 11), kv.read(table, 11, 6)
    kv.spoil([5])
    assert kv.read(table, 11) != whole
    assert kv.read(table, 11, 6) == windowed == kv.read([0, 2, 7], 11, 6)
    assert kv.read(table, 11, 3) != kv.read([0, 2, 7], 10, 3)
    kv.write(table, 5, [99])
    assert kv.read(table, 11, 6) == windowed
    kv.write(table, 6, [99])
    assert kv.read(table, 11, 6) != windowed


@pytest.mark.parametrize("wrong", [[5, 2, 6], [5, 5, 7], [2, 5, 7], [5, 2, 0]])
def test_a_wrong_page_is_another_hash(wrong: list[int]) -> None:
    kv = written(list(range(11)), [5, 2, 7])
    right = kv.read([5, 2, 7], 11)
    assert kv.read(wrong, 11) != right
    assert kv.read([5, 2, 7], 11) == right


def test_whatever_changes_a_page_changes_the_hash() -> None:
    kv = written(list(range(11)), [5, 2, 7])
    before = kv.read([5, 2, 7], 11)
    kv.copy_page(2, 3)
    assert kv.read([5, 3, 7], 11) == before
    kv.spoil([2])
    spoiled = kv.read([5, 2, 7], 11)
    assert spoiled != before
    kv.copy_page(3, 2)
    assert kv.read([5, 2, 7], 11) == before
    kv.write([5, 2, 7], 5, [99])
    assert kv.read([5, 2, 7], 11) not in (before, spoiled)
    kv.write([5, 2, 7], 5, [5])
    assert kv.read([5, 2, 7], 11) == before
    kv.weights_version = 1
    kv.write([5, 2, 7], 0, list(range(11)))
    assert kv.read([5, 2, 7], 11) != before


def test_the_oracle_ends_an_answer_at_its_first_stop() -> None:
    tokens = continuation([7, 8, 9], 6, None, 0, 4096)
    assert continuation([7, 8, 9, *tokens[:2]], 4, None, 0, 4096) == tokens[2:]
    assert continuation([7, 8, 9], 6, None, 0, 4096, {tokens[2]}) == tokens[:3]
    assert continuation([7, 8, 9], 2, None, 0, 4096, {tokens[2]}) == tokens[:2]


def test_only_a_simulation_opens_the_null_device() -> None:
    assert "null" not in AUTO_ORDER
    with pytest.raises(DeviceUnavailable, match="unknown"):
        open_device("null")
    assert null_capabilities(16, resume_unit="page").resume_unit == "page"


def trace(seed: int, profile: str = "mixed") -> str:
    drawn, lines = draw(seed, 200, profile), []
    play(drawn.config, drawn.script, drawn.num_steps, lines.append)
    return "\n".join([repr(drawn), *lines])


def test_equal_seeds_are_equal_to_the_byte_in_another_process_as_well() -> None:
    program = f"import sys; sys.path[:0] = {[str(ROOT), str(ROOT / 'tests')]!r}; import sim.test_simulator as t"
    command = [sys.executable, "-c", f"{program}; print(t.trace(5))"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "77"})
    assert done.stdout.rstrip("\n") == trace(5) == trace(5)
    assert trace(5) != trace(6)


def test_the_canary_fails() -> None:
    for seed in range(3):
        failure = run_seed(draw(seed, 300, "canary"), Totals())
        assert isinstance(failure, WrongToken)


def test_every_class_of_failure_has_its_exit_code() -> None:
    codes = [kind.exit_code for kind in SimFailure.__subclasses__()]
    assert sorted(codes) == list(range(127, 133))


def test_a_failure_is_shrunk_to_a_test_that_fails_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from sim.faults import FAULTS

    fault = next(fault for fault in FAULTS if fault.name == "a fork keeps more than it reads")
    fault.inject(monkeypatch)
    for seed in range(fault.max_seeds):
        drawn = draw(seed, 150, fault.profile)
        failure = run_seed(drawn, Totals())
        if failure is not None:
            break
    small = shrink(drawn, failure)
    assert len(small.best.script) == 1 < len(drawn.script)
    assert small.failure.checker == failure.checker == "tokens"
    scope: dict = {}
    exec(as_test(small.best, small.failure, "it"), scope)
    with pytest.raises(WrongToken) as caught:
        scope["test_it"]()
    assert (str(caught.value), caught.value.step) == (str(small.failure), small.failure.step)
    monkeypatch.undo()
    scope["test_it"]()


def test_a_run_says_how_to_replay_what_failed_and_returns_its_code() -> None:
    said: list[str] = []
    arguments = {"num_steps": 300, "minutes": 0.0, "is_verbose": False, "say": said.append}
    assert simulate(seed=3, num_seeds=2, profile="canary", **arguments) == WrongToken.exit_code
    assert "scripts/sim --profile canary --seed 3 --steps 300" in said[-1]
    assert "def test_seed_3_of_canary" in said[-1]
    assert simulate(seed=3, num_seeds=2, profile="tiny", **arguments) == 0
    assert said[-1].startswith("2 seeds, ")


def test_minutes_bound_a_soak() -> None:
    now = iter(range(0, 1000, 12))
    said: list[str] = []
    code = simulate(
        seed=0,
        num_seeds=1,
        num_steps=5,
        profile="tiny",
        minutes=1.0,
        is_verbose=False,
        say=said.append,
        clock=lambda: float(next(now)),
    )
    assert code == 0
    assert said[-1].startswith("2 seeds, ")


def test_a_soak_goes_on_where_it_was_stopped_and_adds_up(tmp_path: Path) -> None:
    file = tmp_path / "soak.json"
    arguments = {"seed": 5, "num_steps": 20, "minutes": 0.0, "is_verbose": False, "summary": file}
    steps = 0
    for _ in range(2):
        said: list[str] = []
        assert simulate(num_seeds=10, profile=ALL, say=said.append, **arguments) == 0
        steps += int(said[-1].split()[2])
    soak = json.loads(file.read_text())
    assert {name: one["next_seed"] for name, one in soak["profiles"].items()} == {
        name: 5 + (4 if i < 2 else 2) for i, name in enumerate(CLEAN)
    }
    assert (soak["total"]["seeds"], soak["total"]["steps"], soak["total"]["failed"]) == (20, steps, 0)
    assert sum(one["num_steps"] for one in soak["profiles"].values()) == steps
    assert soak["marks"]["arrive"] > 0
    with pytest.raises(BadRequest, match="give the same"):
        simulate(num_seeds=1, profile=ALL, say=said.append, **{**arguments, "num_steps": 21})


def test_a_soak_counts_what_failed_and_goes_on_behind_it(tmp_path: Path) -> None:
    file = tmp_path / "soak.json"
    arguments = {"seed": 3, "num_seeds": 2, "num_steps": 300, "profile": "canary", "minutes": 0.0, "summary": file}
    assert simulate(**arguments, is_verbose=False, say=lambda _: None) == WrongToken.exit_code
    soak = json.loads(file.read_text())
    assert soak["total"]["failed"] == 1
    assert soak["profiles"]["canary"]["next_seed"] == 4
    assert soak["profiles"]["canary"]["failed"]["3"].startswith("tokens: ")


def test_a_simulation_needs_no_torch() -> None:
    program = "import sys, engine.sim.run; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
