"""Plugins of kind ``optimizer``."""
