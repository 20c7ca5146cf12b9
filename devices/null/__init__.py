"""A device without arithmetic, for simulation: real pages, and every wrong one shows. See `device.py`."""
