"""From logits to a token: `params.py` is what a request asks for, `sampler.py` computes it for a whole batch."""
