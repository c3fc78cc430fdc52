"""Plugins of kind ``offload``."""
