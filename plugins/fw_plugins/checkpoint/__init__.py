"""Plugins of kind ``checkpoint``."""
