"""What devices compute, in plain torch: it runs on any of them, and every kernel is tested against it.

`operators.py` and `attention.py` are what `--kernels torch` runs the engine on, `state.py` the recurrent layers' parts.
Nothing here knows which device its tensors live on.
"""
