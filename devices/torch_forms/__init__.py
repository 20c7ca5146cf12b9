"""What devices compute, in plain torch: it runs on any of them, and every kernel is tested against it.

`operators.py` and `attention.py` are what `--kernels torch` runs the engine on, `state.py` the recurrent layers' parts;
`paged_attention.py`, `kv_cache.py`, `page_tables.py` have the signatures of launchers in `devices/cuda/kernels/`.
Nothing here knows which device its tensors live on.
"""
