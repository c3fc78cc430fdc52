"""A small model of transformers', adapted by peft and by fw."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fw
from fw.cli import main
from fw.kinds.model import CausalLM

SIZES = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
IDS = torch.randint(0, 40, (2, 12), generator=torch.Generator().manual_seed(1))
CONFIG = """
model: {{name: auto, path: {base}}}
peft: {peft}
data: {{name: synthetic, vocab_size: 40, samples: 16}}
train: {{global_batch_size: 4, sequence_length: 16, max_steps: 3, save_every: 3, run_dir: run, sample_tokens: 0}}
optimizer: {{name: adamw, lr: 3.0e-2}}
launch: {{accelerator: cpu}}
"""


def small_configs() -> dict[str, Any]:
    """One of each architecture that attends in a way of its own."""
    transformers = pytest.importorskip("transformers")
    return {
        "llama": transformers.LlamaConfig(**SIZES, num_key_value_heads=2),
        "qwen3": transformers.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16),
        "gemma2": transformers.Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=8, sliding_window=6),
        "gemma3": transformers.Gemma3TextConfig(**SIZES, num_key_value_heads=2, head_dim=8, sliding_window=6),
        "mixtral": transformers.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4),
        "gpt2": transformers.GPT2Config(
            vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=32, embd_pdrop=0, attn_pdrop=0, resid_pdrop=0
        ),
    }


def base_in(directory: Path, config: Any) -> Any:
    """A model with random weights, written to ``base``."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    base = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in base.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(std=0.1)
    base.save_pretrained(directory / "base")
    return base


def run(directory: Path, monkeypatch: pytest.MonkeyPatch, peft: dict[str, Any], *overrides: str) -> int:
    """Train three steps with that ``peft`` section; the exit code."""
    (directory / "run.yaml").write_text(CONFIG.format(base=directory / "base", peft=json.dumps(peft)))
    monkeypatch.chdir(directory)
    return main(["train", "run.yaml", *overrides])


def checkpoint(directory: Path) -> Path:
    """That the run has written."""
    return (directory / "run" / "checkpoints" / "latest").resolve()


def disturbed(model: Any, std: float) -> Any:
    """peft's model, whose adapters are not what they begin with."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.randn_like(parameter) * std)
    return model.eval()


def computes_as_peft(directory: Path, theirs: Any) -> tuple[CausalLM, torch.Tensor]:
    """Of an adapter of peft's over ``base``, which changes something: the same logits and gradients.

    Returns:
        the model with the adapter, and logits without.
    """
    theirs.save_pretrained(directory / "adapter")
    ours = fw.load_model(directory / "base", adapter=directory / "adapter")
    expected, found, plain = theirs(IDS).logits, ours(IDS), fw.load_model(directory / "base")(IDS)
    assert (found - expected).abs().max() < 1e-5
    assert (found - plain).abs().max() > 1e-3
    same_gradients(theirs, ours, expected, found)
    return ours, plain


def peft_computes_as_trained(directory: Path, base: Any) -> None:
    """What a run over it has written, which changes something, peft reads: the same logits."""
    peft = pytest.importorskip("peft")
    with torch.no_grad():
        untrained = base(IDS).logits
        theirs = peft.PeftModel.from_pretrained(base, checkpoint(directory)).eval()(IDS).logits
        found = fw.load_model(checkpoint(directory))(IDS)
    assert (found - theirs).abs().max() < 1e-5
    assert (found - untrained).abs().max() > 1e-4


def same_gradients(theirs: Any, ours: CausalLM, expected: torch.Tensor, found: torch.Tensor) -> None:
    """Of all that trains, by the names that files have."""
    for logits in (expected, found):
        logits.square().sum().backward()
    expects = [(name, p) for name, p in theirs.named_parameters(remove_duplicate=False) if p.requires_grad]
    expects = [(name.replace(".default", "").replace("magnitude_vector.weight", "magnitude_vector"), p) for name, p in expects]
    gradients = {name: p.grad for name, p in expects}
    assert ours.adapters is not None
    trained = {name: of for name, of in ours.adapters.tensors.items() if ours.get_parameter(name).requires_grad}
    assert {id(p) for name, p in expects if name in {of.name for of in trained.values()}} == {id(p) for _, p in expects}
    for name, of in trained.items():
        grad, wanted = ours.get_parameter(name).grad, gradients[of.name]
        assert grad is not None and (grad - wanted).abs().max() <= 5e-5 * wanted.abs().max().clamp(min=1), name
