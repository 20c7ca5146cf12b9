"""The engine's logits and greedy tokens beside those of a `transformers` model."""

from __future__ import annotations

import torch
from harness import run

from engine import LLM, SamplingParams

TOLERANCE = 2e-4
"""Largest difference of a logit, as a share of the largest logit."""

NEAR_TIE = 1e-3
"""Two best logits closer than this may come out in either order; a comparison of tokens ends there."""


def logits_of_steps(llm: LLM, prompt: list[int], num_steps: int) -> tuple[torch.Tensor, list[int]]:
    """Next-token logits after the prompt and after each generated token, [num_steps, vocab], and the tokens."""
    seen: list[torch.Tensor] = []
    logits = llm.core.runner.model.logits

    def watched(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(logits(hidden))
        return seen[-1]

    llm.core.runner.model.logits = watched  # type: ignore[method-assign]
    [request] = run(llm, [prompt], SamplingParams(temperature=0.0, max_new_tokens=num_steps, ignore_eos=True))
    return torch.cat(seen).cpu(), request.output_ids


def assert_logits_equal(
    llm: LLM, reference: torch.nn.Module, prompt: list[int], num_steps: int = 64, reference_len: int = 0
) -> None:
    """Logits and tokens of a greedy run; the reference reads at least `reference_len` tokens, the last of no effect.

    What a device that has no fp32 may be off by grows with the rounding of its dtype.
    """
    coarser = torch.finfo(llm.core.runner.model.dtype).eps / torch.finfo(torch.float32).eps
    tolerance = TOLERANCE * max(1.0, coarser / 100)
    got, tokens = logits_of_steps(llm, prompt, num_steps)
    ids = prompt + tokens[:-1]
    padding = [3] * (reference_len - len(ids))
    with torch.inference_mode():
        whole = reference(torch.tensor([ids + padding])).logits[0, len(prompt) - 1 : len(ids)].float()
    assert got.shape == whole.shape
    assert (got - whole).abs().max() < tolerance * whole.abs().max()
    near_tie = max(NEAR_TIE, 2 * tolerance * float(whole.abs().max()) if coarser > 1 else 0.0)
    known = whole[:, : llm.tokenizer.vocab_size]
    chosen = known.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    assert (known.amax(-1) - chosen < near_tie).all()
