"""Plugins of kind ``logger``."""
