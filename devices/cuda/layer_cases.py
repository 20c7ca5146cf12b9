"""`devices.cuda.kernel_cases` of everything but attention and its cache: norms, turns, gates, sampling, states."""

from __future__ import annotations

from collections.abc import Iterator

from devices.cuda.aot import KernelCase


def _types(kind: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, kind)


def _layers() -> Iterator[KernelCase]:
    norm = _types("*bf16", "x", "residual", "weight", "out", "total") | {"rows": "i32", "eps": "fp32"}
    norm |= _types("i32:16", "x_outer", "x_inner", "residual_row")
    yield KernelCase(
        name="rms_norm add 4096",
        kernel="norm:rms_norm_kernel",
        arguments=norm,
        constants={"SIZE": 4096, "INNER": 1, "ROWS": 1, "BLOCK": 4096, "ADDS": True},
        num_warps=8,
        wide=128,
        floor="T N b 4 + N b bytes",
        target="0.85 (8192x4096: 62 us)",
    )
    yield KernelCase(
        name="rms_norm heads 128",
        kernel="norm:rms_norm_kernel",
        arguments=norm,
        constants={"SIZE": 128, "INNER": 32, "ROWS": 8, "BLOCK": 128, "ADDS": False},
        num_warps=2,
        wide=128,
        narrow_allowed=1,
        floor="T N b 2 + N b bytes",
        target="0.80",
    )
    for is_interleaved in (False, True):
        yield KernelCase(
            name=f"rotate 40x128 {'interleaved' if is_interleaved else 'halves'}",
            kernel="rope:rotate_kernel",
            arguments={
                **_types("*bf16", "x", "out"),
                **_types("*fp32", "cos", "sin"),
                **_types("i32:16", "x_token", "x_head"),
            },
            constants={"HEADS": 40, "WIDTH": 128, "PAIRS": 64, "HEAD_BLOCK": 32, "PAIR_BLOCK": 64, "REST_BLOCK": 0}
            | {"INTERLEAVED": is_interleaved},
            num_warps=8,
            archs=(90,),
            wide=128,
            floor="2 T (Hq + Hk) D b + 4 T D bytes",
            target="0.80 (8192 tokens: 40 us)",
        )
    yield KernelCase(
        name="silu gate 12288",
        kernel="gate:gate_kernel",
        arguments={**_types("*bf16", "x", "out"), "x_row": "i32:16"},
        constants={"SIZE": 12288, "BLOCK": 1024, "ACTIVATION": "silu"},
        num_warps=4,
        wide=128,
        floor="3 T I b bytes",
        target="0.85 (8192x12288: 140 us)",
    )


def _sampling() -> Iterator[KernelCase]:
    yield KernelCase(
        name="sample",
        kernel="sample:sample_kernel",
        arguments={
            **_types("*fp32", "logits", "temperatures", "top_ps", "min_ps", "values"),
            **_types("*i32", "top_ks", "tokens", "ids"),
            "uniforms": "*fp64",
            "is_finite": "*i8",
            **_types("i32:16", "row_stride", "vocab_size"),
        },
        constants={"BLOCK": 1024, "CAPACITY": 16384},
        num_warps=8,
        max_registers=128,
        ctas_per_sm=2,
        floor="B V 4 bytes",
        target="greedy 0.6; top-k and top-p <= 150 us at B64 V152k",
    )
    yield KernelCase(
        name="edit logits",
        kernel="edit:edit_kernel",
        arguments={
            **_types("*fp32", "logits", "out", "repetitions", "presences", "frequencies", "biases"),
            **_types("*i32", "seen_starts", "seen_tokens", "counts", "bias_starts", "bias_tokens"),
            **_types("*i32", "mask_rows", "words"),
            **_types("i32:16", "row_stride", "out_stride", "vocab_size", "num_words"),
        },
        constants={"PENALISES": True, "BIASES": True, "MASKS": True, "SPAN": 16384, "BLOCK": 1024},
        num_warps=4,
        wide=128,
        narrow_allowed=64,
        floor="B V (8 + 1 / 8) bytes",
        target="0.6",
    )
    yield KernelCase(
        name="log_normaliser",
        kernel="sample:normaliser_kernel",
        arguments={**_types("*fp32", "logits", "out"), **_types("i32:16", "row_stride", "vocab_size")},
        constants={"BLOCK": 1024},
        num_warps=8,
        archs=(90,),
        floor="B V 4 bytes",
        target="0.6",
    )


def _states() -> Iterator[KernelCase]:
    conv = _types("*bf16", "x", "weight", "bias", "state", "out")
    yield KernelCase(
        name="conv decode w4",
        kernel="state:conv_decode_kernel",
        arguments={**conv, "slots": "*i32", "channels": "i32:16"},
        constants={"WIDTH": 4, "BLOCK": 512},
        num_warps=2,
        archs=(90,),
        wide=128,
        narrow_allowed=1,
        floor="B C b (2 + 2 (W - 1)) bytes",
        target="0.6",
    )
    yield KernelCase(
        name="conv prefill w4",
        kernel="state:conv_prefill_kernel",
        arguments={**conv, **_types("*i32", "slots", "starts"), "is_continued": "*i8", "channels": "i32:16"},
        constants={"WIDTH": 4, "TOKENS": 32, "BLOCK": 64},
        num_warps=4,
        archs=(90,),
        floor="2 T C b bytes",
        target="0.6",
    )
    yield KernelCase(
        name="gated delta 128x128",
        kernel="state:gated_delta_kernel",
        arguments={
            **_types("*bf16", "q", "k", "v", "out"),
            **_types("*fp32", "decay", "beta", "state"),
            "slots": "*i32",
            "scale": "fp32",
        },
        constants={"KEY_HEADS": 16, "VALUE_HEADS": 32, "KEY_DIM": 128, "VALUE_DIM": 128, "BLOCK": 32},
        num_warps=4,
        floor="2 B HV DK DV 4 bytes",
        target="0.80 (B256, 32 heads: 251 us)",
    )
    yield KernelCase(
        name="mamba2 64x128",
        kernel="state:mamba2_kernel",
        arguments={
            **_types("*bf16", "x", "dt", "b", "c", "out"),
            **_types("*fp32", "a", "d", "dt_bias", "state"),
            "slots": "*i32",
        },
        constants={"HEADS": 128, "GROUPS": 8, "DIM": 64, "SIZE": 128, "BLOCK": 32},
        num_warps=4,
        floor="2 B H P N 4 bytes",
        target="0.80 (B256: 503 us)",
    )


LAYER_CASES: tuple[KernelCase, ...] = (*_layers(), *_sampling(), *_states())
