"""Plugins of kind ``launcher``."""
