"""Triton kernels of the CUDA device, each beside the function that launches it.

These are the only modules that import Triton when they are imported; everything else imports *them* when it needs them.
One source serves Triton 3.6 to 3.9: plain pointer arithmetic, one scalar page id for a tile, int32 indices that become
int64 as scalars only, sizes that are powers of two, no block pointers, no descriptors, no autotuning. Those that an NPU
could run lower for Ascend too (docs/cuda.md, `tests/lowering`): there a store masks only the end of its block. A
launcher checks its arguments on the host; its torch form in `devices.torch_forms/` has the same signature, and it is
tested against that.
"""
