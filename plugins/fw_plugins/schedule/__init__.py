"""Plugins of kind ``schedule``."""
