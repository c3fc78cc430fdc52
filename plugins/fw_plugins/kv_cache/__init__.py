"""Plugins of the kind ``kv_cache``."""
