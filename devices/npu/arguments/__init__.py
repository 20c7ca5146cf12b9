"""One argument builder for each torch_npu operator that Rung calls.

A builder checks on the host, from shapes, dtypes and host lists alone, what the operator's documentation demands and
what hardware often does not check: a wrong block id, length or mask shape there is wrong text, not an error. The source
is the documentation inside the wheel `torch_npu==2.13.0` (`torch_npu/_op_plugin_docs.py`), under the operator's name.
"""
