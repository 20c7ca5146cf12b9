"""Breaks the kernels one small way at a time and asks whether a test notices. Not part of the tests: minutes of CPU.

    python tests/kernels/mutants.py [WORD]     all mutants, or those whose name contains WORD

A mutant is a text of a kernel's source, what stands there instead, and the tests that should fail. The sources are
copied to a temporary folder first; the working tree is never changed. Exit status 1 when one survives.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KERNELS = Path("devices/cuda/kernels")


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str
    tests: str

    def is_caught(self) -> bool:
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder)
            for part in ("devices", "mem_cache", "session", "engine", "tests"):
                shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
            shutil.copy(ROOT / "pyproject.toml", copy)
            source = copy / KERNELS / self.file
            text = source.read_text()
            assert text.count(self.old) >= 1, f"{self.name}: {self.old!r} is not in {self.file}"
            source.write_text(text.replace(self.old, self.new))
            file, _, words = self.tests.partition(" ")
            command = [
                sys.executable,
                "-m",
                "pytest",
                f"tests/kernels/interpreted/{file}",
                "-q",
                "-x",
                "-p",
                "no:xdist",
            ]
            environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{copy}:{copy / 'tests'}"}
            done = subprocess.run(
                command + (["-k", words] if words else []),
                cwd=copy,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            print(f"{'killed' if done.returncode == 1 else 'SURVIVED':9s} {self.name}", flush=True)
            if done.returncode == 1:
                print(
                    *(f"          {line}" for line in done.stdout.splitlines() if line.startswith("FAILED")), sep="\n"
                )
            return done.returncode == 1


DECODE, EXTEND, LATENT, CACHE, TABLES, SHARED = (
    "decode.py",
    "extend.py",
    "latent.py",
    "kv_cache.py",
    "page_tables.py",
    "softmax.py",
)
# ruff: noqa: E501
EDGES = "test_decode.py edges"
NORM, ROPE, GATE, SAMPLE, STATE, DEVICE = "norm.py", "rope.py", "gate.py", "sample.py", "state.py", "../attention.py"
EDIT, UPLOAD = "edit.py", "../upload.py"
MUTANTS = (
    Mutant("decode: the last key is lost", DECODE, "is_key = start + key < high", "is_key = start + key < high - 1", EDGES),
    Mutant("decode: keys behind the end are read", DECODE, "is_key = start + key < high", "is_key = start + key >= 0", EDGES),
    Mutant("decode: a draft sees a later token", DECODE, "<= position[:, None])", "<= position[:, None] + 1)", "test_decode.py drafts"),
    Mutant("decode: the window is one token wide of its edge", DECODE, "> position[:, None] - WINDOW", ">= position[:, None] - WINDOW", "test_decode.py window_ends"),
    Mutant("decode: the window's load mask is one short", DECODE, "num_queries - WINDOW)\n", "num_queries - WINDOW + 1)\n", "test_decode.py window_ends"),
    Mutant("decode: what the window hides is read", DECODE, "is_key = is_key & (start + key > num_keys", "is_key = is_key & (start + key > 0 * num_keys", "test_decode.py window"),
    Mutant("decode: the page id is not moved on", DECODE, "next_page = tl.load(table + tl.minimum(start + BLOCK_N, high - 1) // PAGE)", "next_page = tl.load(table + low // PAGE)", EDGES),
    Mutant("decode: a group's heads are swapped", DECODE, "head_row = head * GROUP + row % GROUP\n        position", "head_row = head * GROUP + (GROUP - 1 - row % GROUP)\n        position", EDGES),
    Mutant("decode: accumulator is not decayed", DECODE, "values, summed * decay[:, None]", "values, summed", EDGES),
    Mutant("decode: k_scale is forgotten", DECODE, "scale *= tl.load(k_scale + head)", "scale *= 1.0", "test_decode.py fp8"),
    Mutant("decode: too few spans lose the rest", DECODE, "tl.where(split + 1 == tl.num_programs(1), num_keys, tl.minimum(low + span, num_keys))", "tl.minimum(low + span, num_keys)", "test_decode.py too_few"),
    Mutant("merge: weights are not log2", DECODE, "weight = tl.exp2(lse - finite)", "weight = tl.exp(lse - finite)", EDGES),
    Mutant("merge: one span fewer", DECODE, "split < used, other", "split < used - 1, other", EDGES),
    Mutant("merge: unwritten partial results are read", DECODE, "(lse > float(\"-inf\"))[:, None] & (dim", "(split >= 0)[:, None] & (dim", "test_decode.py"),
    Mutant("merge: sum is not decayed", DECODE, "total = total * decay + tl.sum(weight, 0)", "total = total + tl.sum(weight, 0)", "test_decode.py sinks or same_bits or bits"),
    Mutant("merge: the sink is in natural units", DECODE, "largest = tl.load(sinks + head_row).to(tl.float32) * LOG2E", "largest = tl.load(sinks + head_row).to(tl.float32)", "test_decode.py sinks"),
    Mutant("softmax: no guard for rows without keys", SHARED, "finite = tl.where(larger == float(\"-inf\"), 0.0, larger)  # -inf", "finite = larger  # -inf", "test_decode.py drafts or window_ends"),
    Mutant("softmax: the sink is in natural units", SHARED, ".to(tl.float32) * LOG2E\n", ".to(tl.float32)\n", "test_decode.py sinks"),
    Mutant("softmax: soft cap misses log2", SHARED, "CAP * LOG2E * (1.0", "CAP * (1.0", "test_decode.py cap"),
    Mutant("softmax: sum of weights is not decayed", SHARED, "total * decay + tl.sum(weights, 1)", "total + tl.sum(weights, 1)", EDGES),
    Mutant("window: a tile too many is left out", SHARED, "num_queries - WINDOW + 1, 0) // BLOCK_N * BLOCK_N", "num_queries - WINDOW + 1, 0) // BLOCK_N * BLOCK_N + BLOCK_N", "test_decode.py window_ends"),
    Mutant("extend: a token does not see itself", EXTEND, "<= position[:, None])", "< position[:, None])", "test_extend.py ragged"),
    Mutant("extend: the unmasked part reaches past the diagonal", EXTEND, "full = (past + first + 1) // BLOCK_N", "full = (past + first + BLOCK_N) // BLOCK_N", "test_extend.py"),
    Mutant("extend: last keys of a tile are lost", EXTEND, "newest = tl.minimum(past + first + QUERIES, num_keys)", "newest = tl.minimum(past + first + QUERIES - 1, num_keys)", "test_extend.py"),
    Mutant("extend: the prefix is forgotten", EXTEND, "past = num_keys - num_queries\n", "past = num_keys * 0\n", "test_extend.py ragged"),
    Mutant("extend: the window's edge is off by one", EXTEND, "> position[:, None] - WINDOW", ">= position[:, None] - WINDOW", "test_extend.py window"),
    Mutant("extend: the window's first tile is off by one", EXTEND, "oldest = tl.maximum(past + first - WINDOW + 1, 0)", "oldest = tl.maximum(past + first - WINDOW + 2, 0)", "test_extend.py window"),
    Mutant("extend: the first rows of the next tile are written too", EXTEND, "is_row = (query < num_queries) & (row < QUERIES * GROUP)", "is_row = query < num_queries", "test_extend.py ragged"),
    Mutant("extend: tiles start a query late", EXTEND, "first = index * tile_queries", "first = index * (tile_queries + 1)", "test_extend.py cover"),
    Mutant("latent: the rotary part is forgotten", LATENT, "scores = tl.dot(rotary_queries, tl.trans(rotary_tile), scores", "scores = tl.dot(rotary_queries * 0.0, tl.trans(rotary_tile), scores", "test_latent.py values"),
    Mutant("latent: a draft sees a later token", LATENT, "<= position[:, None])", "<= position[:, None] + 1)", "test_latent.py drafts"),
    Mutant("latent: keys behind the end are read", LATENT, "is_key = start + key < high", "is_key = start + key >= 0", "test_latent.py values"),
    Mutant("write: padding is no longer skipped", CACHE, "if slot < 0:", "if slot < -1:", "test_kv_cache.py slots"),
    Mutant("write: int32 folds a far slot back", CACHE, "(slot // PAGE).to(tl.int64) * (HEADS * PAGE * DIM)", "(slot // PAGE) * (HEADS * PAGE * DIM)", "test_kv_cache.py gib"),
    Mutant("write: heads are a token apart, not a page", CACHE, "at = head[:, None] * (PAGE * DIM)", "at = head[:, None] * DIM", "test_kv_cache.py slots"),
    Mutant("write: the scale multiplies", CACHE, "1.0 / tl.load(v_scale + head", "1.0 * tl.load(v_scale + head", "test_kv_cache.py scaled"),
    Mutant("write: fp8 is held within too small a range", CACHE, "x = tl.where(x > E4M3_MAX, E4M3_MAX, x)", "x = tl.where(x > 240.0, 240.0, x)", "test_kv_cache.py scaled"),
    Mutant("copy: the last block of a page is lost", CACHE, "is_value = at < SIZE", "is_value = at < SIZE - 1", "test_kv_cache.py fork"),
    Mutant("tables: wrong prefix sum of tokens", TABLES, "tl.store(slots + token_start +", "tl.store(slots + entry +", "test_page_tables.py loops"),
    Mutant("tables: the last page's id is not read", TABLES, "which < last_page - first", "which < last_page - first - 1", "test_page_tables.py loops"),
    Mutant("tables: a tile's page border is forgotten", TABLES, "place < PAGE, page", "place < 2 * PAGE, page", "test_page_tables.py loops"),
    Mutant("tables: a change goes to the next entry", TABLES, "tl.store(table + at +", "tl.store(table + at + 1 +", "test_page_tables.py loops"),
    Mutant("tables: a program leaves out every second of its rows", TABLES, "entries, tl.num_programs(0))", "entries, 2 * tl.num_programs(0))", "test_page_tables.py few_programs"),
    Mutant("tables: int32 folds a far row back", TABLES, "tl.load(rows + entry).to(tl.int64) * width", "tl.load(rows + entry) * width", "test_page_tables.py gib"),
    Mutant("norm: the sum is not rounded before it is normed", NORM, "value = value.to(tl.float32)\n        norm", "value = value.to(tl.float32) + 1e-2\n        norm", "test_layer_kernels.py norms"),
    Mutant("norm: eps stands outside the root", NORM, "tl.sum(value * value, 1) / SIZE + eps", "tl.sum(value * value, 1) / SIZE", "test_layer_kernels.py norms"),
    Mutant("norm: heads of a wider row are taken for rows", NORM, "(row % INNER) * x_inner", "(row % INNER) * SIZE * 2", "test_layer_kernels.py heads"),
    Mutant("norm: a program leaves out every second of its tiles", NORM, "rows, tl.num_programs(0) * ROWS)", "rows, 2 * tl.num_programs(0) * ROWS)", "test_layer_kernels.py few_programs"),
    Mutant("rotate: the sign of the sine", ROPE, "low * c - high * s", "low * c + high * s", "test_layer_kernels.py rotation"),
    Mutant("rotate: the rest is not copied", ROPE, "if REST_BLOCK > 0:", "if REST_BLOCK > 1024:", "test_layer_kernels.py part"),
    Mutant("gate: halves are swapped", GATE, "(gate * share * up)", "(up * share * up)", "test_layer_kernels.py gates"),
    Mutant("gate: tanh instead of erf", GATE, 'elif ACTIVATION == "gelu":', 'elif ACTIVATION == "none":', "test_layer_kernels.py gates"),
    Mutant("sample: one token fewer of the best", SAMPLE, "stage == 0, top_k - 1,", "stage == 0, top_k - 2,", "test_sample_kernel.py same_logits"),
    Mutant("sample: top-p of all instead of what top-k left", SAMPLE, "mass = kept * tl.where(is_draw, uniform, top_p)", "mass = tl.where(is_draw, kept * uniform, total * top_p)", "test_sample_kernel.py same_logits"),
    Mutant("sample: min-p is forgotten best first", SAMPLE, "tl.minimum(kept, probable)", "tl.minimum(kept, total)", "test_sample_kernel.py distribution"),
    Mutant("sample: equal tokens from the last on", SAMPLE, "- 1 == equal_before)", "== equal_before)", "test_sample_kernel.py equal"),
    Mutant("sample: sums lose what stands before a digit", SAMPLE, "mass_before += tl.sum(tl.where(digits < digit, sums, 0.0), 0)", "mass_before += 0.0", "test_sample_kernel.py same_logits"),
    Mutant("sample: a copy keeps the places and not the ids", SAMPLE, "tl.where(is_copy, copied, place)", "tl.where(is_copy, place, place)", "test_sample_kernel.py same_logits"),
    Mutant("sample: NaN is a number", SAMPLE, "(tl.sum(num_nan, 0) == 0) &", "(tl.sum(num_nan, 0) >= 0) &", "test_sample_kernel.py finite"),
    Mutant("edit: a positive logit is multiplied by the repetition", EDIT, "tl.math.div_rn(logit, repetition)", "logit * repetition", "test_edit_kernel.py same_bits"),
    Mutant("edit: presence counts for a token of the prompt", EDIT, "tl.where(count > 0, presence, 0.0)", "presence", "test_edit_kernel.py same_bits"),
    Mutant("edit: frequency is subtracted once", EDIT, "frequency * count.to(tl.float32)", "frequency", "test_edit_kernel.py same_bits"),
    Mutant("edit: the last token of a row's is lost", EDIT, "tl.load(seen_starts + row + 1)", "tl.load(seen_starts + row + 1) - 1", "test_edit_kernel.py same_bits"),
    Mutant("edit: a row takes the biases of the next", EDIT, "tl.load(bias_starts + row), tl.load(bias_starts + row + 1)", "tl.load(bias_starts + row + 1), tl.load(bias_starts + row + 1)", "test_edit_kernel.py same_bits"),
    Mutant("edit: a span changes tokens before it", EDIT, "is_own = (token >= low) & (token < high)\n            logit = tl.load(target + token, mask=is_own, other=0.0)\n            logit = tl.where", "is_own = token < high\n            logit = tl.load(target + token, mask=is_own, other=0.0)\n            logit = tl.where", "test_edit_kernel.py"),
    Mutant("edit: the grammar's bits in the other order", EDIT, "word >> (token & 31)", "word >> (31 - (token & 31))", "test_edit_kernel.py same_bits"),
    Mutant("edit: a forbidden NaN is -inf", EDIT, 'is_number = logit < float("inf")', 'is_number = logit != float("inf")', "test_edit_kernel.py bad"),
    Mutant("edit: a forbidden +inf is -inf", EDIT, 'is_number = logit < float("inf")', "is_number = logit == logit", "test_edit_kernel.py bad"),
    Mutant("edit: a row without a grammar takes the first one's", EDIT, "(token < high) & (mask_row >= 0)", "token < high", "test_edit_kernel.py same_bits"),
    Mutant("upload: a buffer is written while it is copied", UPLOAD, "        buffer.wait()\n", "", "test_upload.py"),
    Mutant("upload: arrays are not aligned", UPLOAD, "end + -end % ALIGNMENT", "end", "test_upload.py"),
    Mutant("upload: a tensor of the step before is written over", UPLOAD, "        self._on_device = torch.empty(len(self._host)", "        if len(self._on_device) != len(self._host): self._on_device = torch.empty(len(self._host)", "test_upload.py"),
    Mutant("upload: what follows happens before the copy", UPLOAD, "        self._afterwards.append(act)", "        act()", "test_upload.py"),
    Mutant("state: the convolution's window does not move", STATE, "if step > 0:\n            tl.store(before + (step - 1)", "if step > 9:\n            tl.store(before + (step - 1)", "test_state_kernels.py token_through"),
    Mutant("state: a new row goes on from a former owner's state", STATE, "(at < start) & has_state, other=0.0)", "(at < start), other=0.0)", "test_state_kernels.py prompts"),
    Mutant("state: the decay comes after the error", STATE, "matrix = tl.load(at) * tl.exp(tl.load(decay + place).to(tl.float32))", "matrix = tl.load(at)", "test_state_kernels.py delta"),
    Mutant("state: softplus is left out", STATE, "step = tl.where(step > 20.0", "step = tl.where(step > -1e9", "test_state_kernels.py mamba2"),
    Mutant("device: a plan after a capture makes new tensors", DEVICE, "frozen = self._plan if self._is_frozen else None", "frozen = None", "test_cuda_device.py padded"),
    Mutant("device: a captured plan keeps its old page tables", DEVICE, "self._uploader.afterwards(lambda: tables.copy_(step.page_tables))", "pass", "test_cuda_device.py padded"),
    Mutant("device: a graph is sized for rows of one token", DEVICE, "num_splits = self._num_splits(plan.step, plan.work, longest)", "num_splits = plan.num_splits", "test_cuda_device.py padded"),
)  # fmt: skip


if __name__ == "__main__":
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    caught = [mutant.is_caught() for mutant in MUTANTS if word in mutant.name]
    print(f"{sum(caught)} of {len(caught)} killed")
    sys.exit(0 if all(caught) else 1)
