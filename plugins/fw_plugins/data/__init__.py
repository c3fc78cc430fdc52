"""Plugins of kind ``data``."""
