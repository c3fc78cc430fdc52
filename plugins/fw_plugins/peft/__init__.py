"""Plugins of kind ``peft``."""
