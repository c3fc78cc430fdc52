"""Mechanism shared by checkpoint formats: streaming safetensors, placement of shards, manifests and atomic commits."""
