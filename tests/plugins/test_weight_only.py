"""w4a16 and w8a16 against compressed-tensors, and directories that transformers reads and writes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import fw
from fw.checkpointing.placement import quantizing
from fw.checkpointing.quantized_files import weights_of
from fw.checkpointing.tensor_files import weights_for
from fw.cli import main
from fw.errors import UserError
from fw.pretrained.load import structure
from fw_plugins.quantization import grouped
from fw_plugins.quantization.grouped import SCALE, ZERO, Grouped

compressed = pytest.importorskip("compressed_tensors")
transformers = pytest.importorskip("transformers")

IDS = torch.randint(0, 40, (2, 12), generator=torch.Generator().manual_seed(1))
CONFIG = transformers.LlamaConfig(
    vocab_size=40, hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
)
KINDS = [("w4a16", True, 64), ("w4a16", False, 32), ("w8a16", True, -1), ("w8a16", False, 64)]


def scheme(kind: str, symmetric: bool, group: int):
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    strategy = {"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}
    return QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(num_bits=int(kind[1]), type="int", symmetric=symmetric, **strategy)
    )


@pytest.mark.parametrize("kind, symmetric, group", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_and_what_they_stand_for_are_compressed_tensors_own(kind: str, symmetric: bool, group: int, dtype: torch.dtype) -> None:
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization.utils import calculate_qparams

    weight_OI = (torch.randn(24, 192, generator=torch.Generator().manual_seed(0)) / 8).to(dtype)
    weight_OI[3, :64] = 0
    theirs = scheme(kind, symmetric, group)
    groups = weight_OI.unflatten(1, (-1, 192 if group == -1 else group))
    layout = Grouped((24, 192), int(kind[1]), 192 if group == -1 else group, symmetric)
    kept = layout.quantize(weight_OI)
    alive = groups.abs().amax(-1) > 0
    scale, zero = calculate_qparams(groups.amin(-1).float(), groups.amax(-1).float(), theirs.weights)
    found_scale = kept[SCALE].view(torch.float32)
    assert torch.equal(found_scale[alive], scale.to(dtype).float()[alive])
    if not symmetric:
        found_zero = kept[ZERO].int() - 2 ** (layout.bits - 1)
        # Theirs is of the scale before it is rounded.
        assert ((found_zero - zero.int())[alive].abs() <= (0 if dtype == torch.float32 else 1)).all()
        zero = found_zero.to(zero.dtype)
    scale = found_scale.to(dtype)
    packed = PackedQuantizationCompressor.compress({"weight": weight_OI.float(), "weight_scale": scale, "weight_zero_point": zero}, theirs)
    dense = PackedQuantizationCompressor.decompress(packed, theirs)["weight"]
    found = layout.dequantize(tuple(kept.values()), dtype)
    assert torch.equal(found, dense.to(dtype))
    assert torch.equal(kept["weight"].view(torch.int32), packed["weight_packed"])


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
def test_scales_are_rounded_with_the_products_alone(monkeypatch: pytest.MonkeyPatch, ordered: bool, symmetric: bool) -> None:
    """Those of files in float16 have more bits than bfloat16; some rows at a time, the last ones fewer."""
    monkeypatch.setattr(grouped, "_AT_ONCE", 5 * 64)
    layout = Grouped((24, 64), 4, 16, symmetric, ordered)
    kept = layout.quantize(torch.randn(24, 64, generator=torch.Generator().manual_seed(0)).half())
    if ordered:
        kept[grouped.ORDER] = kept[grouped.ORDER].flip(0).contiguous()
    exact = layout.dequantize(tuple(kept.values()), torch.float32)
    assert torch.equal(layout.dequantize(tuple(kept.values()), torch.bfloat16), exact.bfloat16())
    scale = kept[SCALE].view(torch.float32)
    assert not torch.equal(scale, scale.bfloat16().float()), "scales that bfloat16 holds would show nothing"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """In bf16."""
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(CONFIG).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def logits(model, ids=IDS) -> torch.Tensor:
    with torch.no_grad():
        found = model(ids)
    return getattr(found, "logits", found).float()


def quantized(base: Path, kind: str, symmetric: bool, group: int, to: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        from fw_plugins.quantization import weight_only

        patch.setattr(weight_only.WeightOnlyConfig, "__init__", lambda self: vars(self).update(options))
        options = {"group_size": group, "symmetric": symmetric, "skip": ["*lm_head"]}
        return fw.save_model(fw.load_model(base, dtype=torch.bfloat16, quantization=kind), to)


@pytest.mark.parametrize("kind, symmetric, group", [each for each in KINDS if not each[1]])
def test_compressed_tensors_unpacks_what_is_written(base: Path, kind: str, symmetric: bool, group: int, tmp_path: Path) -> None:
    """Itself, since models of transformers 5.23 have no room for zero points that are packed, as the form has them."""
    from compressed_tensors.compressors import PackedQuantizationCompressor

    there = quantized(base, kind, symmetric, group, tmp_path / "q")
    ours = fw.load_model(there, dtype=torch.bfloat16)
    tensors = load_file(there / "model.safetensors")
    for name, module in ours.named_modules():
        if hasattr(module, "dense_weight"):
            (of,) = ours.hf_tensors(f"{name}.weight")
            stem = of.name.removesuffix("weight")
            of_module = {key.removeprefix(stem): value for key, value in tensors.items() if key.startswith(stem)}
            dense = PackedQuantizationCompressor.decompress(of_module, scheme(kind, symmetric, group))["weight"]
            assert torch.equal(module.dense_weight(torch.bfloat16), dense), name


@pytest.mark.parametrize("kind, symmetric, group", [each for each in KINDS if each[1]])
def test_transformers_reads_what_is_written(base: Path, kind: str, symmetric: bool, group: int, tmp_path: Path) -> None:
    there = quantized(base, kind, symmetric, group, tmp_path / "q")
    ours = fw.load_model(there, dtype=torch.bfloat16)
    assert len(ours.quantized) == 14
    theirs = transformers.AutoModelForCausalLM.from_pretrained(there, dtype=torch.bfloat16, device_map="cpu")
    modules = dict(theirs.named_modules())
    dense = {name: module.dense_weight(torch.bfloat16) for name, module in ours.named_modules() if hasattr(module, "dense_weight")}
    assert len(dense) == 14
    with torch.no_grad():
        theirs(IDS)  # packed layers become weights at the first use
    for name, weight in dense.items():
        (of,) = ours.hf_tensors(f"{name}.weight")
        assert torch.equal(weight, modules[of.name.removesuffix(".weight")].weight), name
    expected, found = logits(theirs), logits(ours)
    assert (found - expected).norm() <= 1e-2 * expected.norm()


def test_a_directory_is_read_back_bit_for_bit(base: Path, tmp_path: Path) -> None:
    there = quantized(base, "w4a16", False, 32, tmp_path / "q")
    ours = fw.load_model(there, dtype=torch.bfloat16)
    again = fw.save_model(ours, tmp_path / "again")
    assert (again / "config.json").read_text() == (there / "config.json").read_text()
    one, two = load_file(there / "model.safetensors"), load_file(again / "model.safetensors")
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    whole = fw.load_model(there, dtype=torch.bfloat16, quantization="none")
    assert not whole.quantized and torch.equal(logits(whole), logits(ours))
    assert main(["checkpoint", "export", str(there), "--to", str(tmp_path / "plain"), "--dtype", "bf16"]) == 0
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.bfloat16)
    assert (logits(plain) - logits(whole)).norm() <= 1e-2 * logits(whole).norm()


def test_what_is_not_known_is_refused(base: Path, tmp_path: Path) -> None:
    there = quantized(base, "w4a16", True, 64, tmp_path / "q")
    config = json.loads((there / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "type": "int"}
    (there / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="in this variant"):
        weights_of(there)


def test_codes_that_do_not_fit_their_scales_are_refused(base: Path, tmp_path: Path) -> None:
    there = quantized(base, "w4a16", True, 64, tmp_path / "q")
    tensors = load_file(there / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight_packed"
    tensors[name] = tensors[name][:, 1:].contiguous()
    save_file(tensors, there / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="bytes of codes"):
        fw.load_model(there)


@pytest.mark.parametrize("kind", ["w4a16", "w8a16"])
def test_zero_points_as_older_files_have_them(base: Path, kind: str, tmp_path: Path) -> None:
    """Not packed: compressed-tensors' own, before it packed them."""
    from compressed_tensors.compressors import unpack_from_int32

    there = quantized(base, kind, False, 32, tmp_path / "q")
    expected = logits(fw.load_model(there, dtype=torch.bfloat16))
    tensors, changed = load_file(there / "model.safetensors"), 0
    for name, tensor in tensors.items():
        if name.endswith("weight_zero_point"):
            shape = tensors[name.replace("zero_point", "scale")].shape
            tensors[name] = unpack_from_int32(tensor, int(kind[1]), shape, packed_dim=0).contiguous()
            changed += 1
    assert changed == 14 and all(t.dtype == torch.int8 for name, t in tensors.items() if name.endswith("weight_zero_point"))
    save_file(tensors, there / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(logits(fw.load_model(there, dtype=torch.bfloat16)), expected)
    name = "model.layers.0.mlp.up_proj.weight_zero_point"
    save_file({**tensors, name: tensors[name][1:].contiguous()}, there / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        UserError, match=r"up_proj\.weight: zero points \[191, 4\] of torch.int8 are neither words \[\d+, 4\] of torch.int32"
    ):
        fw.load_model(there)


@pytest.mark.parametrize("part", ["weight_scale", "weight_shape", "weight_zero_point"])
def test_what_is_missing_is_said(base: Path, part: str, tmp_path: Path) -> None:
    there = quantized(base, "w4a16", False, 32, tmp_path / "q")
    tensors = load_file(there / "model.safetensors")
    del tensors[f"model.layers.0.mlp.up_proj.{part}"]
    save_file(tensors, there / "model.safetensors", metadata={"format": "pt"})
    why = rf"up_proj\.weight: its files hold codes, and there is no model\.layers\.0\.mlp\.up_proj\.{part}; have the directory whole"
    with pytest.raises(UserError, match=why):
        fw.load_model(there)


@pytest.mark.skipif(sys.platform != "linux", reason="pages of files are Linux's to ask for")
@pytest.mark.parametrize("whole", [False, True])
def test_pages_of_what_was_read_go(tmp_path: Path, whole: bool) -> None:
    """As codes, and as the weights that they stand for."""
    wide = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**CONFIG.to_dict(), **wide, "head_dim": 128})).save_pretrained(
        tmp_path / "base"
    )
    there = quantized(tmp_path / "base", "w8a16", False, 32, tmp_path / "q")
    file = there / "model.safetensors"
    files = weights_of(there)
    assert file.stat().st_size > 16 << 20 and resident(file) < 1 << 20
    model, *_ = structure(there, torch.bfloat16, quantization="none" if whole else None)
    assert bool(model.quantized) != whole
    model.to_empty(device="cpu")
    filling = weights_for(files, model)
    quantizing(filling, model, filling.codes, filling.done)(model.stored())
    left = resident(file)
    assert left < 2 << 20, "what tensors share pages with"
    files.whole("model.layers.0.mlp.up_proj.weight")
    assert resident(file) >= left + (2 << 20), "the file is mapped still"


def resident(file: Path) -> int:
    """Bytes of its mappings that are in memory."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            inside = line.endswith(str(file))
        elif inside and line.startswith("Rss:"):
            found += 1024 * int(line.split()[1])
    return found


def test_groups_that_do_not_divide_are_refused_with_what_does(base: Path) -> None:
    with pytest.raises(UserError, match=r"group_size: 128 does not divide the 192 features of .*down_proj; what does: 64, 32, 16, 8"):
        fw.load_model(base, quantization="w4a16")
