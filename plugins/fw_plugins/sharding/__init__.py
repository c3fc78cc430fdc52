"""Plugins of kind ``sharding``."""
