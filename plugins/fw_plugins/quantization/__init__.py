"""Plugins of kind ``quantization``."""
