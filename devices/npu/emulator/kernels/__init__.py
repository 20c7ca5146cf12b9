"""Reference kernels of the vendor's operators, by group; each checks its operator's rules, then computes in fp32 and
rounds once. They take host tensors, and know nothing of the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from devices.npu.emulator.kernels import attention, cache, norm, paged_attention, rotary, sampling

KERNELS: dict[tuple[str, str], Callable[..., Any]] = {
    ("npu::npu_fused_infer_attention_score", ""): attention.fused_infer_attention_v1,
    ("npu::npu_fused_infer_attention_score", "out"): attention.fused_infer_attention_v1,
    ("npu::npu_fused_infer_attention_score_v2", ""): attention.fused_infer_attention_v2,
    ("npu::npu_fused_infer_attention_score_v2", "out"): attention.fused_infer_attention_v2,
    ("npu::_npu_fused_infer_attention_score_get_max_workspace", ""): attention.workspace,
    ("npu::_npu_fused_infer_attention_score_v2_get_max_workspace", ""): attention.workspace,
    ("npu::_npu_fused_infer_attention_score_infer_output", ""): attention.infer_output_v1,
    ("npu::_npu_fused_infer_attention_score_v2_infer_output", ""): attention.infer_output_v2,
    ("atb::_npu_paged_attention", ""): paged_attention.paged_attention,
    ("atb::_npu_paged_attention_get_workspace", ""): attention.workspace,
    ("atb::_npu_reshape_and_cache", ""): cache.reshape_and_cache,
    ("npu::npu_scatter_nd_update", ""): cache.scatter_nd_update,
    ("npu::npu_scatter_nd_update_", ""): cache.scatter_nd_update_,
    ("npu::npu_scatter_pa_kv_cache", ""): cache.scatter_pa_kv_cache,
    ("npu::npu_gather_pa_kv_cache", ""): cache.gather_pa_kv_cache,
    ("npu::npu_gather_pa_kv_cache_functional", ""): cache.gather_pa_kv_cache_functional,
    ("npu::npu_rms_norm", ""): norm.rms_norm,
    ("npu::npu_add_rms_norm", ""): norm.add_rms_norm,
    ("npu::npu_swiglu", ""): norm.swiglu,
    ("npu::npu_rotary_mul", ""): rotary.rotary_mul,
    ("npu::npu_apply_rotary_pos_emb", ""): rotary.apply_rotary_pos_emb,
    ("npu::npu_top_k_top_p", ""): sampling.top_k_top_p,
    ("npu::npu_format_cast", ""): norm.format_cast,
}
"""By name and overload."""
