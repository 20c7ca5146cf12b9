"""Text at the engine's edge: prompts become token ids, token ids become text that can be shown.

Read `tokenizer.py`, then `detokenizer.py` and `stops.py`, then `stream.py`, which is what a running request holds.
"""
