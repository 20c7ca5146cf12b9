"""What `NPUGraph.update` is given: host length lists for each captured attention call.

torch_npu ignores a key that the operator does not know, and the graph goes on with the lengths of its capture: wrong
text, no error. So keys, their number and the lists are checked here, always. Source: `torch_npu/npu/graphs.py` and
`torch_npu/npu/_npugraph_handlers/ifa_handler.py` of torch_npu 2.13.
"""

from __future__ import annotations

from collections.abc import Sequence

from devices.npu.arguments.attention import V1, V2
from devices.npu.arguments.contract import ContractViolation, check_lengths

OPERATOR = "NPUGraph.update"

UPDATE_KEYS = {
    V1: frozenset({"actual_seq_lengths", "actual_seq_lengths_kv"}),
    V2: frozenset({"actual_seq_qlen", "actual_seq_kvlen"}),
}
"""Host lists that a captured call takes anew, by operator."""

KV_KEYS = {V1: "actual_seq_lengths_kv", V2: "actual_seq_kvlen"}
"""The one that must be among them: a step always makes rows longer."""


def graph_update(
    captured: Sequence[str], updates: Sequence[dict[str, list[int]]], num_rows: Sequence[int]
) -> list[dict[str, list[int]]]:
    """Updates for a replay.

    Args:
        captured: operators in the order of their capture.
        updates: new lists for each.
        num_rows: of each call; its lists have so many entries.
    """
    if len(updates) != len(captured):
        rule = f"there is one update for each of the {len(captured)} captured calls"
        raise ContractViolation(OPERATOR, rule, len(updates))
    for operator, update, rows in zip(captured, updates, num_rows, strict=True):
        keys = UPDATE_KEYS.get(operator)
        if keys is None:
            raise ContractViolation(OPERATOR, f"only {', '.join(UPDATE_KEYS)} can be updated", operator)
        unknown = update.keys() - keys
        if unknown or KV_KEYS[operator] not in update:
            rule = f"{operator} is updated by {KV_KEYS[operator]}, another key is ignored in silence"
            raise ContractViolation(OPERATOR, rule, sorted(update))
        for key, lengths in update.items():
            check_lengths(OPERATOR, key, lengths, rows)
            if len(lengths) != rows:
                raise ContractViolation(OPERATOR, f"{key} has one entry for each of {rows} rows", len(lengths))
    return list(updates)
