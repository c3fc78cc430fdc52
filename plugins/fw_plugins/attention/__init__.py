"""Plugins of kind ``attention``."""
