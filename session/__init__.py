"""Conversations that outlive a request. Empty in this version: the record it will share is `mem_cache.kv_info`."""
