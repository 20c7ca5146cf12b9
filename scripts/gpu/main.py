"""`scripts/gpu_check`: see there for its use. Correctness first, so that a run that is cut short has said most."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from report import Report, Row

NO_GPU = 2


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/gpu_check", description="Check and time the CUDA device.")
    parser.add_argument("--model", type=Path, help="a small real model: a GGUF file or a Hugging Face folder")
    parser.add_argument("--json", type=Path, default=Path("gpu_check.json"), help="where the report goes")
    parser.add_argument("--only", default="", help="only kernels whose name has this in it, and no engine")
    parser.add_argument("--seconds", type=float, default=450.0, help="start nothing new after so many")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, interpreted on the CPU, nothing timed")
    return parser.parse_args()


class Check:
    """One run: its report, and the time that is left."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.started = options, time.monotonic()
        self.is_dry = options.dry_run
        self.device = torch.device("cpu" if self.is_dry else "cuda")
        import triton

        gpu = "dry run on the CPU, kernels interpreted" if self.is_dry else torch.cuda.get_device_name()
        self.report = Report(gpu, f"torch {torch.__version__}, triton {triton.__version__}")

    def has_time(self, what: str) -> bool:
        if time.monotonic() - self.started < self.options.seconds:
            return True
        self.report.skipped.append(f"{what}: no time left of {self.options.seconds:.0f} s")
        return False

    def kernels(self) -> None:
        from cases import make_cases
        from measure import ceilings, graph_seconds

        if not self.is_dry:
            self.report.ceilings = ceilings()
        for name, make in make_cases(self.device, self.is_dry):
            if self.options.only not in name or not self.has_time(name):
                continue
            torch.manual_seed(0)
            try:
                case = make()
                case.run(0)
                error = case.error()
                seconds = None if self.is_dry else graph_seconds(case.run, case.num_sets)
                row = Row(
                    name, error, case.tolerance, case.num_bytes, case.flops, seconds, case.target, most_s=case.most_s
                )
                del case
            except Exception as failure:  # the others are still worth knowing
                row = Row(name, float("nan"), 0.0, failure=f"{type(failure).__name__}: {str(failure)[:200]}")
            self.report.rows.append(row)
            print(f"  {name}: {row.failure or f'error {row.error:.1e}'}", flush=True)
            if not self.is_dry:
                torch.cuda.empty_cache()

    def engine(self) -> None:
        from engines import SHAPE_8B, bench, matrix, random_model, with_random_weights

        with tempfile.TemporaryDirectory() as folder:
            tiny = {"head_dim": 16, "hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 304}
            tiny |= {"tie_word_embeddings": False}
            if self.is_dry:
                model = random_model(Path(folder) / "tiny", tiny)
                self._try("matrix", lambda: with_random_weights(lambda: matrix(model, 2, (5, 18))))
                return
            real = self.options.model
            if real is not None:
                self._try("matrix", lambda: matrix(real, 16, (9, 70, 200)))
                self._try("bench", lambda: bench(real, (1, 8, 32)))
            else:
                self.report.skipped.append("matrix and bench on a real model: give --model")
            large = random_model(Path(folder) / "8b", SHAPE_8B)
            self._try(
                "bench of a random 8B", lambda: with_random_weights(lambda: bench(large, (1, 32), dtype="bfloat16"))
            )

    def _try(self, name: str, act: Callable[[], Any]) -> None:
        if not self.has_time(name):
            return
        try:
            self.report.engine[name] = act()
        except Exception as failure:
            self.report.engine[name] = f"FAILED: {type(failure).__name__}: {str(failure)[:300]}"
        print(f"  {name}: {self.report.engine[name]}", flush=True)


def stand_in() -> None:
    """For a dry run: kernels interpreted, right about bf16; "cuda" opens on the CPU."""
    from interpreted_gpu import InterpretedRuntime
    from kernels.interpreter import install

    import devices.cuda
    from devices.cuda.device import CudaDevice

    install()
    devices.cuda.open_device = lambda name, kernels="auto": CudaDevice(InterpretedRuntime(), kernels)


def main() -> int:
    options = arguments()
    if options.dry_run:
        torch.set_num_threads(1)
        stand_in()
    else:
        from devices.cuda.probe import refusal, this_machine

        reason = refusal(this_machine(), "auto")
        if reason is not None:
            print(f"no GPU to check: {reason}", file=sys.stderr)
            return NO_GPU
    check = Check(options)
    check.kernels()
    if not options.only:
        if not options.dry_run and check.has_time("peers"):
            from measure import peers

            check.report.peers = peers()
        check.engine()
    check.report.write(options.json)
    print(check.report.table())
    return 0 if check.report.is_right else 1


if __name__ == "__main__":
    sys.exit(main())
