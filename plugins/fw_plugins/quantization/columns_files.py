"""Grouped integers in the files of AutoGPTQ (GPTQModel) and of AutoAWQ, which hold a weight ``[O, I]`` as ``[I, O]``.

Of ``X.weight`` there are ``X.qweight``, 32-bit words of codes; ``X.scales`` ``[G, O]``; and ``X.qzeros``, words of what zero is coded as,
packed along O. AutoGPTQ packs codes along I, the first in the low bits; ``X.g_idx`` ``[I]`` is the group of each column; and ``X.qzeros``
are one less than they mean, unless ``checkpoint_format`` is ``gptq_v2``. AutoAWQ packs all along O: of eight neighbours the first, the
third, the fifth and the seventh, then the others.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from fw.api import UserError
from fw_plugins.quantization.coded import CodedWeight
from fw_plugins.quantization.grouped import ORDER, SCALE, ZERO, Grouped, pack, unpack
from fw_plugins.quantization.grouped_files import GroupedFiles, Scheme

GPTQ, AWQ = "gptq", "awq"
_PLAIN = "take a directory of the plain weights"
_CODES, _ZEROS, _SCALES, _GROUPS = "qweight", "qzeros", "scales", "g_idx"
_ONES = {4: 0x11111111, 8: 0x01010101}
"""A word of ones. Whoever writes takes it from whole words, so that adding it to them gives any zero point back."""
_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
"""Where AutoAWQ's words have each of eight neighbours."""


def read_gptq(config: Mapping[str, Any], names: Collection[str]) -> GroupedFiles | None:
    """Of AutoGPTQ and GPTQModel.

    Raises:
        UserError: another number of bits, or a form for certain kernels.
    """
    form = config.get("checkpoint_format") or ("marlin" if config.get("is_marlin_format") else GPTQ)
    if form not in (GPTQ, "gptq_v2"):
        raise UserError(f"checkpoint_format: '{form}' is not read, only gptq and gptq_v2; {_PLAIN}")
    scheme = Scheme(_bits(config, (4, 8)), _group_size(config), bool(config.get("sym", True)))
    if config.get("desc_act") and scheme.group_size != -1:
        stems = (name.removesuffix(_CODES) for name in names if name.endswith(f".{_CODES}"))
        if (lost := next((stem for stem in stems if f"{stem}{_GROUPS}" not in names), None)) is not None:
            raise UserError(f"desc_act: true, and there is no {lost}{_GROUPS}, which says what group a column is of; {_PLAIN}")
    return GPTQFiles(scheme, one_less=form == GPTQ)


def read_awq(config: Mapping[str, Any], names: Collection[str]) -> GroupedFiles | None:
    """Of AutoAWQ.

    Raises:
        UserError: another number of bits, or another version.
    """
    version = str(config.get("version", "gemm")).lower()
    if version != "gemm":
        raise UserError(f"version: '{version}' is not read, only gemm; {_PLAIN}")
    return AWQFiles(Scheme(_bits(config, (4,)), _group_size(config), not config.get("zero_point", True)))


def _bits(config: Mapping[str, Any], known: tuple[int, ...]) -> int:
    bits = config.get("bits", config.get("w_bit"))
    if bits not in known:
        raise UserError(f"bits: {bits} is not read, only {' and '.join(map(str, known))}; {_PLAIN}")
    return int(bits)


def _group_size(config: Mapping[str, Any]) -> int:
    size = config.get("group_size", config.get("q_group_size", 128))
    if not isinstance(size, int) or (size < 1 and size != -1):
        raise UserError(f"group_size: {size} is no number of neighbours; the least is 1, and -1 makes one group of each row")
    return size


class _ColumnsFiles(GroupedFiles):
    def stored(self, names: Collection[str]) -> dict[str, tuple[str, ...]]:
        """By their codes."""
        found = {}
        for name in names:
            stem, _, end = name.rpartition(".")
            if end == _CODES:
                beside = (f"{stem}.{key}" for key in (_SCALES, _ZEROS, _GROUPS))
                found[f"{stem}.weight"] = (name, *(part for part in beside if part in names))
        return found

    @abstractmethod
    def open(self, name: str, read: Callable[[str], Tensor]) -> _ColumnsWeight:
        """One of them."""

    def layout(self, name: str, read: Callable[[str], Tensor]) -> Grouped:
        """As its scales and groups say it."""
        return self.open(name, read).layout


class GPTQFiles(_ColumnsFiles):
    """Of AutoGPTQ.

    Args:
        one_less: than they mean are zero points.
    """

    def __init__(self, scheme: Scheme, one_less: bool) -> None:
        super().__init__(scheme)
        self._one_less = one_less

    def open(self, name: str, read: Callable[[str], Tensor]) -> GPTQWeight:
        """One of them."""
        return GPTQWeight(name, self.scheme, read, self._one_less)


class AWQFiles(_ColumnsFiles):
    """Of AutoAWQ."""

    def open(self, name: str, read: Callable[[str], Tensor]) -> AWQWeight:
        """One of them."""
        return AWQWeight(name, self.scheme, read)


class _ColumnsWeight(CodedWeight):
    """One of a file.

    Raises:
        UserError: its tensors do not fit one another, or what ``quantization_config`` says.
    """

    layout: Grouped
    sym_false: ClassVar[str]
    """What ``quantization_config`` says where zero is anywhere."""

    def __init__(self, name: str, scheme: Scheme, read: Callable[[str], Tensor]) -> None:
        self._stem, self._read = name.removesuffix("weight"), read
        scale_GO = self._tensor(_SCALES)
        super().__init__(name, scale_GO.dtype)
        groups, out = scale_GO.shape
        into = self._inputs(groups, scheme)
        group = into if scheme.group_size == -1 else scheme.group_size
        if groups * group != into:
            raise UserError(f"{name}: has scales for {groups} groups, which are not of {group} of its {into} features in each; {_PLAIN}")
        self.layout = Grouped((out, into), scheme.bits, group, scheme.symmetric)

    def _tensor(self, key: str) -> Tensor:
        return self._read(f"{self._stem}{key}")

    @abstractmethod
    def _inputs(self, groups: int, scheme: Scheme) -> int:
        """Features in."""

    @abstractmethod
    def _codes(self) -> Tensor:
        """As they are kept."""

    @abstractmethod
    def _zeros(self) -> Tensor:
        """uint8 ``[G, ≥ O]``."""

    def values(self) -> dict[str, Tensor]:
        """In the order of :meth:`Grouped.kept`."""
        out, into = self.layout.features
        bits, expected = self.layout.bits, self.layout.kept()["weight"][0]
        codes, scale_GO = self._codes(), self._tensor(_SCALES)
        if tuple(codes.shape) != expected:
            raise UserError(
                f"{self._name}: {list(codes.shape)} bytes of codes, where [{out}, {into}] of {bits} bits have {list(expected)}; {_PLAIN}"
            )
        found = {"weight": codes, SCALE: scale_GO.t().float().contiguous().view(torch.int32)}
        words = self._tensor(_ZEROS).shape
        if tuple(words) != (self.layout.groups, -(-out * bits // 32)):
            raise UserError(f"{self._name}: {list(words)} words of zero points do not fit scales {list(scale_GO.shape)}")
        zero_OG = self._zeros()[:, :out].t().contiguous()
        if not self.layout.symmetric:
            return {**found, ZERO: zero_OG}
        if bool((zero_OG != (middle := 2 ** (bits - 1))).any()):
            raise UserError(f"{self._name}: zero is not {middle} everywhere, so that quantization_config should say {self.sym_false}")
        return found


class GPTQWeight(_ColumnsWeight):
    """One that AutoGPTQ wrote."""

    sym_false = "sym: false"

    def __init__(self, name: str, scheme: Scheme, read: Callable[[str], Tensor], one_less: bool) -> None:
        super().__init__(name, scheme, read)
        self._one_less = one_less
        self._order_I = self._groups_of_columns()
        if self._order_I is not None and not torch.equal(self._order_I, self.layout.neighbours(self._order_I.device)):
            if not 0 <= int(self._order_I.min()) <= int(self._order_I.max()) < self.layout.groups:
                raise UserError(f"{name}: {_GROUPS} names groups that are not among its {self.layout.groups}")
            features, group = self.layout.features, self.layout.group
            self.layout = Grouped(features, scheme.bits, group, scheme.symmetric, ordered=True)

    def _groups_of_columns(self) -> Tensor | None:
        try:
            return self._read(f"{self._stem}{_GROUPS}").to(torch.int32)
        except KeyError:  # the oldest files have none, and neighbours for groups
            return None

    def _inputs(self, groups: int, scheme: Scheme) -> int:
        order_I = self._groups_of_columns()
        return self._tensor(_CODES).shape[0] * 32 // scheme.bits if order_I is None else len(order_I)

    def _codes(self) -> Tensor:
        return self._tensor(_CODES).t().contiguous().view(torch.uint8)

    def _zeros(self) -> Tensor:
        words, bits = self._tensor(_ZEROS), self.layout.bits
        words = words + _ONES[bits] if self._one_less else words.contiguous()
        return unpack(words.view(torch.uint8), bits, words.shape[1] * 32 // bits)

    def values(self) -> dict[str, Tensor]:
        """In the order of :meth:`Grouped.kept`."""
        found = super().values()
        if self.layout.ordered:
            assert self._order_I is not None
            found[ORDER] = self._order_I
        return found


class AWQWeight(_ColumnsWeight):
    """One that AutoAWQ wrote."""

    sym_false = "zero_point: true"

    def _inputs(self, groups: int, scheme: Scheme) -> int:
        # Codes are large, and their shape is compared when they are read.
        return self._tensor(_CODES).shape[0] if scheme.group_size == -1 else groups * scheme.group_size

    def _codes(self) -> Tensor:
        return pack(_in_their_places(self._tensor(_CODES)).t().contiguous(), self.layout.bits)

    def _zeros(self) -> Tensor:
        return _in_their_places(self._tensor(_ZEROS))


def _in_their_places(words: Tensor) -> Tensor:
    """uint8 ``[…, 8 · W]`` of W words of 4-bit codes in AutoAWQ's order."""
    codes = unpack(words.contiguous().view(torch.uint8), 4, words.shape[1] * 8)
    return codes.unflatten(1, (-1, 8))[:, :, _PLACES].flatten(1)
