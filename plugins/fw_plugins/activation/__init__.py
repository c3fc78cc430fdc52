"""Plugins of kind ``activation``."""
