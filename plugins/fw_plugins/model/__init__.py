"""Plugins of kind ``model``."""
