"""A student and a teacher with other widths, in transformers' files, and what of their rows is learnt."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fw.kinds.data import IGNORED

VOCABULARY = 40
IDS = torch.randint(0, VOCABULARY, (3, 16), generator=torch.Generator().manual_seed(0))


def make_pair(directory: Path, widths: tuple[int, int] = (16, 32)) -> Path:
    """Directories ``student`` and ``teacher``."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    for name, width in zip(("student", "teacher"), widths, strict=True):
        shape = {"vocab_size": VOCABULARY, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
        config = transformers.LlamaConfig(**shape, hidden_size=width, intermediate_size=2 * width, initializer_range=0.3)
        transformers.LlamaForCausalLM(config).save_pretrained(directory / name)
    return directory


def labels() -> Tensor:
    """The next tokens, but for some."""
    found = IDS.roll(-1, 1).clone()
    found[:, -1] = IGNORED
    found[1, :5] = IGNORED
    return found


def mixed(z: Tensor, divergence: Tensor, weight: float, temperature: float) -> Tensor:
    """Hinton et al. 2015, section 2, of the student's logits and each token's divergence, summed over those that are learnt."""
    there = labels() != IGNORED
    entropy = -(z.softmax(-1).log().gather(-1, labels().clamp(min=0)[..., None])[..., 0] * there).sum()
    return weight * temperature**2 * (divergence * there).sum() + (1 - weight) * entropy


def of_transformers(pair: Path) -> list[torch.nn.Module]:
    """Student and teacher as it reads them."""
    transformers = pytest.importorskip("transformers")
    return [transformers.AutoModelForCausalLM.from_pretrained(pair / name, dtype=torch.float32) for name in ("student", "teacher")]
