"""What a checkpoint holds besides tensors of the model and its optimizer."""

from __future__ import annotations

import base64
import json
from typing import Any

from safetensors.torch import load

from fw.place import Place

STATE = "trainer.json"
RNG = "rng.json"
_RNG_OF_FORMAT_1 = "rng.safetensors"


def read_rng(step: Place, rank: int) -> dict[str, Any]:
    """States of a rank's random generators; empty where the checkpoint has no such rank."""
    if step.has(RNG):
        states: dict[str, Any] = json.loads(step.read(RNG)).get(str(rank), {})
        return states
    prefix = f"rank{rank}."
    tensors = load(step.read(_RNG_OF_FORMAT_1))
    return {name[len(prefix) :]: encode(t.numpy().tobytes()) for name, t in tensors.items() if name.startswith(prefix)}


def encode(data: bytes) -> str:
    """Bytes as JSON holds them."""
    return base64.b64encode(data).decode()


def decode(text: str) -> bytes:
    """The bytes again."""
    return base64.b64decode(text)
