"""A run that reaches every vendor operator that the package calls: windows, heads, draws, a session, graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness import make_llm, outputs, prompts_with_shared_heads, run, run_turn
from tiny_models import save_tiny_model

from engine import SamplingParams

CUTS: tuple[dict[str, Any], ...] = ({"top_k": 9}, {"top_p": 0.9}, {})
WINDOWS = {"num_hidden_layers": 2, "use_sliding_window": True, "sliding_window": 40, "head_dim": 16}


def exercise(folder: Path) -> None:
    """Write a model into `folder` and run it on the target."""
    save_tiny_model(folder, "qwen3", layer_types=["sliding_attention", "full_attention"], **WINDOWS)
    llm = make_llm(folder, cuda_graph_max_bs=2)
    prompts = prompts_with_shared_heads(seed=3, n=3, max_len=150)
    assert len(outputs(run(llm, prompts))) == 3
    run(llm, prompts, [SamplingParams(max_new_tokens=2, **cut) for cut in CUTS])
    session = llm.core.sessions.open()
    for turn in prompts[:2]:
        run_turn(llm, session.id, turn)
