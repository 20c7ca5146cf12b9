"""Model definitions: their shape (`config.py`) and their layers."""
