"""Rung over HTTP: an API process (text, protocols, clients) and an engine process (tokens, scheduler, device).

    client --HTTP--> app.py, *_api.py --> engine_client.py ==ZeroMQ==> engine_process.py --> engine.core

Start at `messages.py` (what the two processes say to each other), then `engine_process.py`, `engine_client.py` and
`app.py`.
"""
