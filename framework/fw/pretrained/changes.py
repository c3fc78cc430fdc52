"""What an adapter in files (LoRA, DoRA, (IA)³) makes of the weights of its base, some rows at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fw.checkpointing.tensor_files import TensorFiles, adapter_name
from fw.errors import UserError
from fw.locate import ADAPTER_CONFIG
from fw.pretrained.directory import read_adapter_config

_PREFIX = "base_model.model."
_LORA = re.compile(r"(.+)\.lora_(A|B|embedding_A|embedding_B|magnitude_vector)(?:\.weight)?")
_BASE_LAYER = ".base_layer."
_SCALE = ".ia3_l"
_UNSUPPORTED = ("alora_invocation_tokens", "arrow_config", "trainable_token_indices", "megatron_config", "lora_bias")
_PARAMETERS = "target_parameters"
_MODULE, _FILE = ".mlp.", ".block_sparse_moe."
"""How modules of transformers call mixtures of experts, and how files of Mixtral do."""
_NAMED_TIED = {"embed_tokens", "lm_head"}
"""By these names alone does peft know that a module is tied to another (``EMBEDDING_LAYER_NAMES`` there)."""
_SLICE_BYTES = 64 << 20

Heads = Callable[[], Mapping[str, str]]
"""Gives the heads of the base that have another tensor's weight, and which; asked only where an adapter may change either."""


class Adapter:
    """The tensors of a LoRA adapter, by the base's tensor that each changes.

    Attributes:
        changed: for each tensor of the base, the adapter's tensors by kind: ``A``, ``B``, ``embedding_A``, ``magnitude_vector``, ``base``,
            ``whole``.
        untied: heads that are tensors of their own from now on, since they or the embedding that they were are changed alone, and that
            embedding.
        repeated: heads that the base's files hold besides and that go on being the embedding.

    Raises:
        UserError: it is no LoRA adapter, it is a pickle, or has tensors that the base has no place for.
    """

    def __init__(self, directory: Path, base: TensorFiles, heads: Heads) -> None:
        path = directory / ADAPTER_CONFIG
        self.config = read_adapter_config(directory)
        if self.config.get("peft_type") != "LORA":
            raise UserError(f"{path}: peft_type {self.config.get('peft_type')} cannot be merged here; LORA and IA3 can")
        try:
            self.rank = int(self.config["r"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} cannot be read as an adapter's configuration ({type(error).__name__}: {error})") from None
        if unsupported := [key for key in _UNSUPPORTED if self.config.get(key)]:
            raise UserError(f"{path}: {', '.join(unsupported)} cannot be merged here")
        if stacked := [name for name in self.config.get(_PARAMETERS) or [] if not name.endswith(".weight")]:
            raise UserError(
                f"{path}: {_PARAMETERS}: {', '.join(sorted(stacked))} are stacked experts, whose changes cannot be merged here; peft can"
                " (merge_and_unload)"
            )
        if not (directory / "adapter_model.safetensors").is_file() and (directory / "adapter_model.bin").is_file():
            raise UserError(f"{directory} holds a pickle (adapter_model.bin), which can run code when read; save it as safetensors")
        self.files = TensorFiles(directory, "adapter_model")
        self.changed: dict[str, dict[str, str]] = {}
        for name in self.files.where:
            target, kind = _changes(name)
            if target not in base.where and (called := target.replace(_MODULE, _FILE)) in base.where:
                target = called
            self.changed.setdefault(target, {})[kind] = name
        self._transposed = bool(self.config.get("fan_in_fan_out"))
        self.untied: dict[str, str] = {}
        self.repeated: set[str] = set()
        if any(target not in base.where or self._is_of_table(kinds) for target, kinds in self.changed.items()):
            self._untie({head: of for head, of in heads().items() if of in base.where}, base)
        placed = {*base.where, *self.untied}
        strangers = [name for target, kinds in self.changed.items() if target not in placed for name in kinds.values()]
        if strangers:
            raise UserError(f"{directory} has tensors that nothing in {base.directory} matches: {', '.join(sorted(strangers)[:6])}")
        for target, kinds in self.changed.items():
            if "whole" not in kinds and not ({"A", "B"} <= kinds.keys() or {"embedding_A", "embedding_B"} <= kinds.keys()):
                raise UserError(f"{directory}: the change of {target} is not whole, it has {', '.join(sorted(kinds))} only")
            shape = base.shape(target if target in base.where else self.untied[target])
            # Convolution layers of GPT-2 hold their weights transposed. The configuration says so, unless peft changed a head besides.
            self._transposed |= {"A", "B"} <= kinds.keys() and shape[0] != shape[-1] and self._change_shape(kinds) == shape[::-1]
            if "whole" in kinds and self.files.shape(kinds["whole"]) != shape:
                raise UserError(f"{directory} holds {target} in another shape than the base; resize the base first")

    def _change_shape(self, kinds: Mapping[str, str]) -> tuple[int, int] | None:
        """Of what A and B give; None where they are no matrices."""
        down, up = (self.files.shape(kinds[kind]) for kind in "AB")
        return (up[0], down[1]) if len(down) == len(up) == 2 else None

    def _is_of_table(self, kinds: Mapping[str, str]) -> bool:
        """Whether it may be an embedding that is changed, or a head."""
        return "embedding_A" in kinds or ("whole" in kinds and len(self.files.shape(kinds["whole"])) == 2)

    def _untie(self, heads: Mapping[str, str], base: TensorFiles) -> None:
        """Heads become tensors of their own where peft has trained head and embedding apart."""
        for head, embedding in heads.items():
            if head not in self.changed and embedding not in self.changed:
                continue
            named = {name.rpartition(".")[2] for name in self.config.get("modules_to_save") or []} & _NAMED_TIED
            if self.config.get("ensure_weight_tying") and embedding in self.changed and (head in self.changed or named):
                self.changed.pop(head, None)  # the same change once more
                self.repeated |= {head} & base.where.keys()
            else:
                self.untied[head] = embedding

    def merge(self, target: str, weight: Tensor, out: Tensor) -> None:
        """The base's tensor with its change into ``out``, in that one's dtype, which may be the weight itself; sums are taken in fp32."""
        kinds = {kind: self.files.whole(name) for kind, name in self.changed[target].items()}
        if "whole" in kinds:
            out.copy_(kinds["whole"])
            return
        weight = kinds.get("base", weight)
        module = target.removesuffix(".weight")
        embedding = "embedding_A" in kinds
        down, up = (kinds[key] for key in (("embedding_A", "embedding_B") if embedding else ("A", "B")))
        if down.dim() != 2:
            raise UserError(f"the LoRA of {module} is no pair of matrices, which cannot be merged here")
        rank = int(self._pattern("rank_pattern", module, self.rank))
        if down.shape[0] != rank or up.shape[1] != rank:
            raise UserError(f"the LoRA of {module} has rank {down.shape[0]}, its configuration says {rank}")
        scale = float(self._pattern("alpha_pattern", module, self.config.get("lora_alpha", 8)))
        scale /= rank**0.5 if self.config.get("use_rslora") else rank
        if embedding:  # whose rows are what A has columns for
            down, up = up.t(), down.t()
        change = torch.Size((up.shape[0], down.shape[1]))
        if weight.shape not in (change, change[::-1]) or (embedding and weight.shape != change):
            raise UserError(f"the LoRA of {module} is {list(change)}, the base's weight {list(weight.shape)}")
        transposed = not embedding and (self._transposed if change[0] == change[1] else weight.shape != change)
        if transposed:
            weight, out = weight.t(), out.t()
        lengths = kinds["magnitude_vector"].float().reshape(-1) if "magnitude_vector" in kinds else None
        down = down.float()
        for rows in _slices(change):
            total = weight[rows].to(torch.float32, copy=True).addmm_(up[rows].float(), down, alpha=scale)
            if lengths is not None:
                total *= (lengths[rows] / torch.linalg.vector_norm(total, dim=1))[:, None]
            out[rows] = total

    def _pattern(self, key: str, module: str, default: Any) -> Any:
        """What the first pattern that names the module says; a pattern is a regular expression of its name's end, or of its weight's where
        the configuration names that."""
        weight = f"{module.replace(_FILE, _MODULE)}.weight"
        if any(weight == name or weight.endswith(f".{name}") for name in self.config.get(_PARAMETERS) or []):
            module = weight
        patterns: Mapping[str, Any] = self.config.get(key) or {}
        return next((value for pattern, value in patterns.items() if re.match(rf"(.*\.)?({pattern})$", module)), default)


class Scales:
    """The tensors of an (IA)³ adapter: factors of what linear layers see, or of what they give. As :class:`Adapter`.

    Raises:
        UserError: it has tensors that the base has no place for.
    """

    untied: Mapping[str, str] = {}
    repeated: frozenset[str] = frozenset()

    def __init__(self, directory: Path, base: TensorFiles) -> None:
        config = read_adapter_config(directory)
        if config.get("modules_to_save"):
            raise UserError(f"{directory / ADAPTER_CONFIG}: modules_to_save beside (IA)³ cannot be merged here")
        self._transposed = bool(config.get("fan_in_fan_out"))
        self.files = TensorFiles(directory, "adapter_model")
        self.changed: dict[str, dict[str, str]] = {}
        for name in self.files.where:
            target, kind = _changes(name)
            if kind == "base" and target in base.where and name.removesuffix(f"{_BASE_LAYER}weight") + _SCALE in self.files.where:
                self.changed.setdefault(target, {})[kind] = name
                continue
            module = name.removeprefix(_PREFIX).removesuffix(_SCALE)
            if not name.endswith(_SCALE) or f"{module}.weight" not in base.where:
                raise UserError(f"{directory} has tensors that nothing in {base.directory} matches: {name}")
            self.changed.setdefault(f"{module}.weight", {})[_SCALE] = name
            if f"{module}.bias" in base.where and self.files.shape(name)[1] == 1:  # of what the layer gives, its bias with it
                self.changed[f"{module}.bias"] = {_SCALE: name}

    def merge(self, target: str, weight: Tensor, out: Tensor) -> None:
        """The base's tensor times its factors into ``out``; products are taken in fp32."""
        kinds = {kind: self.files.whole(name) for kind, name in self.changed[target].items()}
        scale, weight = kinds[_SCALE].float(), kinds.get("base", weight)
        if target.endswith(".bias"):
            out.copy_(weight.float() * scale.flatten())
            return
        if self._transposed:
            weight, out = weight.t(), out.t()
        if any(size not in (1, of) for size, of in zip(scale.shape, weight.shape, strict=True)):
            shape = list(weight.t().shape if self._transposed else weight.shape)
            raise UserError(f"the scale of {target} is {list(scale.shape)}, the base's weight {shape}")
        for rows in _slices(weight.shape):
            out[rows] = weight[rows].float() * (scale if scale.shape[0] == 1 else scale[rows])


def change_of(directory: Path, base: TensorFiles, heads: Heads) -> Adapter | Scales:
    """What the adapter in ``directory`` makes of ``base``.

    Raises:
        UserError: as :class:`Adapter` and :class:`Scales` do, or ``init_lora_weights`` has altered the base.
    """
    scales = read_adapter_config(directory).get("peft_type") == "IA3"
    return Scales(directory, base) if scales else Adapter(directory, base, heads)


def _changes(name: str) -> tuple[str, str]:
    """The tensor of the base that one of an adapter's changes, and what it is of the change."""
    inner = name.removeprefix(_PREFIX)
    if found := _LORA.fullmatch(inner):
        return f"{found[1]}.weight", found[2]
    if _BASE_LAYER in inner:  # within a layer that is changed: a bias that trained, or an embedding's own weight, kept beside its change
        return inner.replace(_BASE_LAYER, "."), "whole" if inner.endswith(".bias") else "base"
    return adapter_name(inner), "whole"


def _slices(shape: torch.Size) -> Iterator[slice]:
    """All rows, as many at a time as take :data:`_SLICE_BYTES` in fp32."""
    step = max(1, _SLICE_BYTES // (4 * max(1, shape[1])))
    return (slice(start, start + step) for start in range(0, shape[0], step))
