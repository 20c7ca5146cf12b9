"""Kernels of our own for Ascend, in Triton-Ascend's dialect; each has a torch form that says what it computes."""
