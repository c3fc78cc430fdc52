"""An adapter in peft's format (LoRA, DoRA, (IA)³), merged into the weights of its base."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fw.checkpointing.quantized_files import weights_of
from fw.checkpointing.tensor_files import TensorFiles, adapter_name
from fw.config import parse_size
from fw.errors import UserError
from fw.locate import ADAPTER_CONFIG, CONFIG, find
from fw.place import place
from fw.pretrained.directory import read_adapter_config, read_config
from fw.pretrained.export import DTYPE_NAMES, copy_beside
from fw.pretrained.load import write_json, write_weights
from fw.pretrained.new_directory import new_directory

_PREFIX = "base_model.model."
_LORA = re.compile(r"(.+)\.lora_(A|B|embedding_A|embedding_B|magnitude_vector)(?:\.weight)?")
_BASE_LAYER = ".base_layer.weight"
_SCALE = ".ia3_l"
_UNSUPPORTED = ("alora_invocation_tokens", "arrow_config", "trainable_token_indices", "target_parameters", "megatron_config")


@dataclass(frozen=True)
class _Announced:
    shape: tuple[int, ...]
    dtype: torch.dtype


class Adapter:
    """The tensors of an adapter, by the base's tensor that each changes.

    Attributes:
        changed: for each tensor of the base, the adapter's tensors by kind: ``A``, ``B``, ``embedding_A``, ``magnitude_vector``, ``base``,
            ``whole``.

    Raises:
        UserError: it is no LoRA adapter, it is a pickle, or has tensors that the base has no place for.
    """

    def __init__(self, directory: Path, base: TensorFiles) -> None:
        path = directory / ADAPTER_CONFIG
        try:
            self.config: dict[str, Any] = json.loads(path.read_text())
            self.rank = int(self.config["r"]) if self.config.get("peft_type") == "LORA" else 0
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} cannot be read as an adapter's configuration ({type(error).__name__}: {error})") from None
        if self.config.get("peft_type") != "LORA":
            raise UserError(f"{path}: peft_type {self.config.get('peft_type')} cannot be merged here; LORA and IA3 can")
        if unsupported := [key for key in _UNSUPPORTED if self.config.get(key)]:
            raise UserError(f"{path}: {', '.join(unsupported)} cannot be merged here")
        if self.config.get("bias", "none") != "none" or self.config.get("lora_bias"):
            raise UserError(f"{path}: an adapter with trained biases (bias, lora_bias) cannot be merged here")
        if not (directory / "adapter_model.safetensors").is_file() and (directory / "adapter_model.bin").is_file():
            raise UserError(f"{directory} holds a pickle (adapter_model.bin), which can run code when read; save it as safetensors")
        self.files = TensorFiles(directory, "adapter_model")
        self.changed: dict[str, dict[str, str]] = {}
        strangers = []
        for name in self.files.where:
            module, kind = self._of(name)
            target = module if kind == "whole" else f"{module}.weight"
            if target in base.where:
                self.changed.setdefault(target, {})[kind] = name
            else:
                strangers.append(name)
        if strangers:
            raise UserError(f"{directory} has tensors that nothing in {base.directory} matches: {', '.join(sorted(strangers)[:6])}")
        for target, kinds in self.changed.items():
            if "whole" not in kinds and not ({"A", "B"} <= kinds.keys() or {"embedding_A", "embedding_B"} <= kinds.keys()):
                raise UserError(f"{directory}: the change of {target} is not whole, it has {', '.join(sorted(kinds))} only")

    def _of(self, name: str) -> tuple[str, str]:
        """The module of the base that a tensor belongs to, and what it is of it."""
        inner = name.removeprefix(_PREFIX)
        if found := _LORA.fullmatch(inner):
            return found[1], found[2]
        if inner.endswith(_BASE_LAYER):  # peft keeps an embedding's own weights beside its change
            return inner.removesuffix(_BASE_LAYER), "base"
        return adapter_name(inner), "whole"

    def merged(self, target: str, weight: Tensor) -> Tensor:
        """The base's tensor with its change, in its dtype; sums are taken in fp32."""
        kinds = {kind: self.files.whole(name) for kind, name in self.changed[target].items()}
        if "whole" in kinds:
            return kinds["whole"].to(weight.dtype)
        weight = kinds["base"].to(weight.dtype) if "base" in kinds else weight
        module = target.removesuffix(".weight")
        embedding = "embedding_A" in kinds
        a, b = (kinds[key].float() for key in (("embedding_A", "embedding_B") if embedding else ("A", "B")))
        if a.dim() != 2:
            raise UserError(f"the LoRA of {module} is no pair of matrices, which cannot be merged here")
        rank = int(self._pattern("rank_pattern", module, self.rank))
        if a.shape[0] != rank or b.shape[1] != rank:
            raise UserError(f"the LoRA of {module} has rank {a.shape[0]}, its configuration says {rank}")
        scale = float(self._pattern("alpha_pattern", module, self.config.get("lora_alpha", 8)))
        scale /= rank**0.5 if self.config.get("use_rslora") else rank
        delta = (b @ a) * scale
        # Convolution layers of GPT-2 hold their weights transposed, which the configuration says.
        transposed = embedding or bool(self.config.get("fan_in_fan_out"))
        delta = delta.t() if transposed else delta
        if delta.shape != weight.shape:
            raise UserError(f"the LoRA of {module} is {list(delta.shape)}, the base's weight {list(weight.shape)}")
        total = weight.float() + delta
        if "magnitude_vector" in kinds:
            magnitude = kinds["magnitude_vector"].float()
            rows = total.t() if transposed else total
            rows = rows * (magnitude.reshape(-1) / rows.norm(dim=1))[:, None]
            total = rows.t() if transposed else rows
        return total.to(weight.dtype)

    def _pattern(self, key: str, module: str, default: Any) -> Any:
        """What the first pattern that names the module says; a pattern is a regular expression of its name's end."""
        patterns: Mapping[str, Any] = self.config.get(key) or {}
        return next((value for pattern, value in patterns.items() if re.match(rf"(.*\.)?({pattern})$", module)), default)


class Scales:
    """The tensors of an (IA)³ adapter: factors of what linear layers see, or of what they give. As :class:`Adapter`.

    Raises:
        UserError: it has tensors that the base has no place for.
    """

    def __init__(self, directory: Path, base: TensorFiles) -> None:
        config = read_adapter_config(directory)
        if config.get("modules_to_save"):
            raise UserError(f"{directory / ADAPTER_CONFIG}: modules_to_save beside (IA)³ cannot be merged here")
        self._transposed = bool(config.get("fan_in_fan_out"))
        self.files = TensorFiles(directory, "adapter_model")
        self.changed: dict[str, dict[str, str]] = {}
        for name in self.files.where:
            module = name.removeprefix(_PREFIX).removesuffix(_SCALE)
            if not name.endswith(_SCALE) or f"{module}.weight" not in base.where:
                raise UserError(f"{directory} has tensors that nothing in {base.directory} matches: {name}")
            self.changed[f"{module}.weight"] = {_SCALE: name}
            if f"{module}.bias" in base.where and self.files.shape(name)[1] == 1:  # of what the layer gives, its bias with it
                self.changed[f"{module}.bias"] = {_SCALE: name}

    def merged(self, target: str, weight: Tensor) -> Tensor:
        """The base's tensor times its factors, in its dtype; products are taken in fp32."""
        scale = self.files.whole(self.changed[target][_SCALE]).float()
        if target.endswith(".bias"):
            return (weight.float() * scale.flatten()).to(weight.dtype)
        rows = weight.float().t() if self._transposed else weight.float()
        if any(size not in (1, of) for size, of in zip(scale.shape, rows.shape, strict=True)):
            raise UserError(f"the scale of {target} is {list(scale.shape)}, the base's weight {list(weight.shape)}")
        scaled = rows * scale
        return (scaled.t() if self._transposed else scaled).to(weight.dtype)


def _change(directory: Path, base: TensorFiles) -> Adapter | Scales:
    scales = read_adapter_config(directory).get("peft_type") == "IA3"
    return Scales(directory, base) if scales else Adapter(directory, base)


def merge(base: str | Path, adapter: str | Path, to: str | Path, dtype: str | None = None, max_shard_size: str = "5GiB") -> int:
    """Write the model directory ``to``, one tensor in memory at a time; returns how many tensors the adapter changed.

    Args:
        dtype: of floating-point tensors, by name; the base's where None.

    Raises:
        UserError: no such base, an adapter that does not fit it or is of another kind, or ``to`` exists already.
    """
    if dtype is not None and dtype not in DTYPE_NAMES:
        raise UserError(f"--dtype {dtype} is unknown (there are: {', '.join(DTYPE_NAMES)})")
    directory = find(base)
    config = read_config(directory)
    files = weights_of(directory)
    change = _change(find(adapter, ADAPTER_CONFIG), files)
    wanted = DTYPE_NAMES[dtype] if dtype else None

    def cast(found: torch.dtype) -> torch.dtype:
        return wanted if wanted is not None and found.is_floating_point else found

    tensors = {name: _Announced(files.shape(name), cast(files.dtype(name))) for name in files.where}
    resized = [n for n, kinds in change.changed.items() if "whole" in kinds and change.files.shape(kinds["whole"]) != files.shape(n)]
    if resized:
        raise UserError(f"{adapter} holds {resized[0]} in another shape than the base; resize the base first")

    def value(name: str) -> Tensor:
        whole = files.whole(name)
        whole = whole.float() if wanted == torch.float32 and whole.is_floating_point() else whole
        return (change.merged(name, whole) if name in change.changed else whole).to(tensors[name].dtype)

    with new_directory(Path(to)) as made:
        write_weights(made, tensors, value, parse_size(max_shard_size))
        copy_beside(place(directory), made)
        config.pop("quantization_config", None)  # what was quantized has been made weights of
        if wanted is not None:
            config = {**{k: v for k, v in config.items() if k != "torch_dtype"}, "dtype": str(wanted).removeprefix("torch.")}
        write_json(made / CONFIG, config)
    return len(change.changed)
