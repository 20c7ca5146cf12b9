"""The CPU's own kernels: C++ with a plain C ABI, compiled once for this machine and called with addresses.

`build.py` compiles and loads the sources that lie here, `operators.py` and `attention.py` call them. Start reading the
C++ at `numeric.h`. Nothing depends on them: without a compiler the device computes the same in plain torch.
"""
