"""Plugins of kind ``objective``."""
