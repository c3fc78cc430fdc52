"""safetensors files of a directory, read by the slice from mapped memory: no more than a rank's part of one tensor is ever copied."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Set as AbstractSet
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fw.bars import Bar
from fw.checkpointing.pages import leave
from fw.checkpointing.placement import Cut, local_part
from fw.checkpointing.ranges import RangeFile
from fw.checkpointing.stream import DTYPES
from fw.errors import UserError
from fw.kinds.checkpoint import Kept, Part, adapter_parts, parts
from fw.kinds.model import CausalLM, HFTensor, Quantized
from fw.place import Place, place

ADAPTER = "adapter_model"
AVERAGE = "average"
"""Stem of an adapter's files."""


class Rows(Protocol):
    """Gives rows of a tensor."""

    def __getitem__(self, rows: slice, /) -> Tensor: ...


Fill = Callable[[Mapping[str, Tensor] | Mapping[str, Tensor | Kept]], None]
"""Gives tensors their values."""

_DTYPE_OF = {name: dtype for dtype, name in DTYPES.items()}


def has_tensors(directory: Place, stem: str) -> bool:
    """Whether there are files of this stem."""
    return bool({f"{stem}.safetensors", f"{stem}.safetensors.index.json"} & set(directory.names()))


class TensorFiles:
    """The tensors of ``<stem>.safetensors``, or of the files that ``<stem>.safetensors.index.json`` names.

    Attributes:
        files: their names, each with the names of its tensors.

    Raises:
        UserError: there are none, one is missing or damaged, or they are pickles.
    """

    def __init__(self, directory: Path | Place, stem: str = "model") -> None:
        self.directory = place(directory)
        self.files: dict[str, list[str]] = {}
        self.where: dict[str, Any] = {}
        local = self.directory.local
        for name in _files(self.directory, stem):
            try:
                file = safe_open(local / name, framework="pt") if local is not None else RangeFile(self.directory, name)
                self.files[name] = list(file.keys())
                self.where.update(dict.fromkeys(self.files[name], file))
            except (SafetensorError, OSError) as error:
                raise UserError(f"{self.directory / name} is no whole safetensors file ({error})") from None

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor, from the file's header."""
        return tuple(self.where[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Of a tensor, from the file's header.

        Raises:
            UserError: torch has no such dtype.
        """
        text = self.where[name].get_slice(name).get_dtype()
        if text not in _DTYPE_OF:
            raise UserError(f"{self.directory}: {name} has dtype {text}, which is not known here")
        return _DTYPE_OF[text]

    def whole(self, name: str) -> Tensor:
        """All of a tensor."""
        tensor: Tensor = self.where[name].get_tensor(name)
        return tensor

    def mapped(self, name: str) -> Tensor | None:
        """All of a tensor, in the mapped file: not read before somebody does. None where it does not lie in one just so."""
        return None if self.directory.local is None else self.whole(name)

    @torch.no_grad()
    def fill(self, name: str, part: Part) -> None:
        """Copy into what this rank keeps of ``part``, in its dtype."""
        assert isinstance(part.tensor, Tensor | Cut)
        local, kept = local_part(part.tensor)
        region = part.region
        both = [slice(max(k.start, r.start), min(k.stop, r.stop)) for k, r in zip(kept, region, strict=True)]
        if any(s.stop <= s.start for s in both):
            return
        target = part.as_in_file(local[tuple(slice(s.start - k.start, s.stop - k.start) for s, k in zip(both, kept, strict=True))])
        wanted = [slice(s.start - r.start, s.stop - r.start) for s, r in zip(both, region, strict=True)][part.of.index is not None :]
        if part.of.transposed:
            wanted.reverse()
        source = self._region(name, wanted) if wanted else self.whole(name)
        target.copy_(source)
        self.left(name, source)

    def rows(self, name: str) -> Rows:
        """What gives some of a tensor at a time."""
        found: Rows = self.where[name].get_slice(name)
        return found

    def left(self, name: str, read: Tensor | None = None) -> None:
        """What was read of a tensor is not needed any more: pages of a mapped file go from the process.

        Args:
            read: in that memory.
        """
        if read is not None and self.directory.local is not None:
            leave(read)

    def superfluous(self, name: str) -> bool:
        """Whether a tensor that a model has no place for changes nothing."""
        return False

    def kept(self, name: str, weight: Quantized) -> Mapping[str, Tensor] | None:
        """Values of the parameters that a model keeps a quantized weight as; None where the files have no such codes."""
        return None

    def _region(self, name: str, region: list[slice]) -> Tensor:
        found: Tensor = self.where[name].get_slice(name)[tuple(region)]
        return found


@dataclass(frozen=True)
class Filling:
    """Fills a model's tensors from files.

    Attributes:
        names: of tensors in the files, by what the model's own files call them.
    """

    files: TensorFiles
    model: CausalLM
    names: Mapping[str, str]

    def __call__(self, tensors: Mapping[str, Tensor] | Mapping[str, Tensor | Kept]) -> None:
        """Those given."""
        for name, part in Bar(parts(self.model, tensors).items(), desc="loading weights", unit=" tensors"):
            self.files.fill(self.names[name], part)

    def codes(self, name: str) -> Mapping[str, Tensor] | None:
        """Values of the parameters that a quantized weight is kept as, where the files hold the same ones."""
        weight = self.model.quantized[name]
        found = self._stored(name)
        return None if found is None else self.files.kept(found, weight)

    def done(self, name: str) -> None:
        """With what :meth:`codes` gave of a weight."""
        if (found := self._stored(name)) is not None:
            self.files.left(found)

    def _stored(self, name: str) -> str | None:
        """The one tensor of the files that it is, as it is."""
        found = [self.names[of.name] for of in self.model.hf_tensors(name) if of == HFTensor(of.name)]
        return found[0] if len(found) == 1 else None


def weights_for(files: TensorFiles, model: CausalLM) -> Filling:
    """Check once that the files are all of the model and nothing else, adapters apart; what is returned fills its tensors, any of them at
    a time.

    Args:
        model: may be on the meta device.

    Raises:
        UserError: tensors that are missing, unexpected or of another shape, all listed; a tied head that is no repetition.
    """
    expected = parts(model, model.base())
    names = {_full_name(name, expected, model): name for name in files.where}
    repeated = {name: source for name, source in model.hf_repeated().items() if name in names and name not in expected}
    unexpected = set(names) - set(expected) - set(repeated)
    unexpected = {name for name in unexpected if not model.hf_superfluous(name) and not files.superfluous(names[name])}
    if problems := _differences(files, names, expected, unexpected, "model"):
        raise UserError(f"the weights in {files.directory} do not fit the model: {'; '.join(problems)}")
    for name, source in repeated.items():
        if not _same(files, names[name], names[source]):
            raise UserError(f"{files.directory}: the configuration ties {name} to {source}, but the files hold two different tensors")

    return Filling(files, model, names)


def adapter_name(name: str) -> str:
    """A tensor's name in an adapter's file, as peft writes it today: versions differ in what they wrap modules with that train whole."""
    return name.replace(".modules_to_save.default.", ".").replace(".modules_to_save.", ".")


def _differences(
    files: TensorFiles, names: Mapping[str, str], expected: Mapping[str, Part], unexpected: AbstractSet[str], whose: str
) -> list[str]:
    """What is wrong, a clause each.

    Args:
        names: in the files, by what the model calls them.
    """
    missing = sorted(set(expected) - set(names))
    shapes = [
        f"{name} is {list(files.shape(names[name]))} in the files and {list(part.shape)} in the {whose}"
        for name, part in expected.items()
        if name in names and files.shape(names[name]) != part.shape
    ]
    lists = (("missing", missing), ("unexpected", sorted(unexpected)))
    return [f"{what}: {_some(found)}" for what, found in lists if found] + _few(shapes)


def adapter_for(files: TensorFiles, model: CausalLM) -> Fill:
    """Check once that the files are all of the model's adapters and nothing else; what is returned fills those of the tensors it is given.

    peft keeps the weight of an embedding beside its change; such a one is taken too. A head that is tied to an embedding that trains
    whole it writes a second time.

    Raises:
        UserError: tensors that are missing, unexpected or of another shape, all listed; a tied head that is no repetition.
    """
    assert model.adapters is not None
    called = {model.hf_module_name(of.name): of.name for of in model.adapters.tensors.values()}
    names = {called.get(own := adapter_name(name), own): name for name in files.where}
    beside = {}
    for name in model.base():
        for of in model.hf_tensors(name):
            wrapped = f"base_model.model.{of.name.removesuffix('.weight')}.base_layer.weight"
            if wrapped in names and name not in model.adapters.tensors:
                beside[name] = replace(of, name=wrapped)
    adapters = replace(model.adapters, tensors={**model.adapters.tensors, **beside}, repeated={})
    expected = adapter_parts(adapters, model.stored())
    inside = {f"base_model.model.{name}": f"base_model.model.{source}" for name, source in model.hf_repeated().items()}
    inside |= model.adapters.repeated
    repeated = {name: source for name, source in inside.items() if name in names and source in names and source in expected}
    if problems := _differences(files, names, expected, set(names) - set(expected) - set(repeated), "adapters"):
        raise UserError(f"the adapters in {files.directory} do not fit the model's: {'; '.join(problems)}")
    for name, source in repeated.items():
        if not _same(files, names[name], names[source]):
            raise UserError(f"{files.directory}: the model ties {name} to {source}, but the adapter holds two different tensors")

    def give(tensors: Mapping[str, Tensor] | Mapping[str, Tensor | Kept]) -> None:
        for name, part in adapter_parts(adapters, tensors).items():
            files.fill(names[name], part)

    return give


def _files(directory: Place, stem: str) -> list[str]:
    index, single = f"{stem}.safetensors.index.json", f"{stem}.safetensors"
    inside = set(directory.names())
    if index in inside:
        try:
            names = sorted(set(json.loads(directory.read(index))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise UserError(f"{directory / index} is no index of safetensors files ({type(error).__name__}: {error})") from None
        if strange := [name for name in names if not isinstance(name, str) or {"/", "\\", os.sep} & set(name)]:
            raise UserError(f"{directory / index} names {strange[0]!r}, which is no file beside it; all that an index names are")
        missing = [name for name in names if not directory.has(name)]
        if missing:
            raise UserError(f"{directory}: files that {index} names are missing: {_some(missing)}")
        return names
    if single in inside:
        return [single]
    pickles = [name for name in sorted(inside) if name.endswith((".bin", ".pt", ".pth"))]
    if pickles:
        raise UserError(
            f"{directory} holds pickled weights ({pickles[0]}), which can run code when read and are refused; save them as safetensors"
        )
    raise UserError(f"{directory} holds no weights: neither {single} nor {index}")


def _full_name(name: str, expected: Mapping[str, Part], model: CausalLM) -> str:
    """Some published files leave out the prefix that transformers' own have."""
    prefixed = model.hf_prefix + name
    return prefixed if name not in expected and (prefixed in expected or name.startswith(_first_parts(model, expected))) else name


def _first_parts(model: CausalLM, expected: Mapping[str, Part]) -> tuple[str, ...]:
    """What names begin with, once the prefix is gone: ``h.``, ``layers.``."""
    prefix = model.hf_prefix
    bare = {name[len(prefix) :].partition(".")[0] + "." for name in expected if prefix and name.startswith(prefix)}
    return tuple(bare)


def _same(files: TensorFiles, name: str, other: str) -> bool:
    """Whether two tensors of the files are equal, compared some rows at a time."""
    if files.shape(name) != files.shape(other) or files.dtype(name) != files.dtype(other):
        return False
    one, two = (files.rows(n) for n in (name, other))
    rows = files.shape(name)[0]
    step = max(1, rows // 64)
    for start in range(0, rows, step):
        some = [(name, one[start : start + step]), (other, two[start : start + step])]
        same = torch.equal(some[0][1], some[1][1])
        for of, read in some:
            files.left(of, read)
        if not same:
            return False
    return True


def _few(texts: list[str], limit: int = 8) -> list[str]:
    return texts[:limit] + [f"and {len(texts) - limit} shapes more"] * (len(texts) > limit)


def _some(names: Iterable[str], limit: int = 12) -> str:
    names = list(names)
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
