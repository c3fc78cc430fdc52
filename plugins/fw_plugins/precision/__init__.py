"""Plugins of kind ``precision``."""
