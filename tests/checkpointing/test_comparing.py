"""How two checkpoints differ: what is no number is not hidden, adapters alone are compared and told of, too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fw.checkpointing.comparing import compare
from fw.cli import main
from fw.place import place


def model(directory: Path, **tensors: torch.Tensor) -> Path:
    directory.mkdir()
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text("{}")
    return directory


def test_what_is_no_number_comes_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = torch.arange(1.0, 5.0)
    one = model(tmp_path / "one", a=base, b=base, c=base)
    other = model(tmp_path / "other", a=base + 1, b=base.index_fill(0, torch.tensor([1]), torch.nan), c=base)
    found = compare(place(one), place(other))
    assert found.identical == 1 and found.changed["model: a"]["largest"] == 1
    assert all(value != value for value in found.changed["model: b"].values())
    assert main(["checkpoint", "diff", str(one), str(other)]) == 1
    assert capsys.readouterr().out.splitlines()[1].startswith("model: b: largest difference nan")
    assert main(["checkpoint", "diff", str(one), str(other), "--json"]) == 1
    told = json.loads(capsys.readouterr().out, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert told["changed"]["model: b"]["largest"] is None


def test_adapters_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in (("one", 1.0), ("other", 2.0)):
        (tmp_path / name).mkdir()
        save_file({"base_model.model.q_proj.lora_A.weight": torch.full((2, 4), value)}, tmp_path / name / "adapter_model.safetensors")
        (tmp_path / name / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "base"}))
    assert main(["checkpoint", "diff", str(tmp_path / "one"), str(tmp_path / "other")]) == 1
    assert "largest difference 1" in capsys.readouterr().out
    assert main(["checkpoint", "inspect", str(tmp_path / "one")]) == 0
    assert "adapters (LORA) of base (read by: peft)" in capsys.readouterr().out
