"""The contract of ``quantization``: which weights are kept in fewer bits than they are computed with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

from fw.errors import UserError
from fw.kinds.model import CausalLM, Quantized
from fw.registry import Plugin


class StoredWeight(ABC):
    """A weight as files hold it in fewer bits."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Of the weight itself."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """That it had before, and has where it is wanted whole."""

    @abstractmethod
    def dense(self) -> Tensor:
        """What the codes stand for, in :attr:`dtype`."""

    @abstractmethod
    def kept(self, weight: Quantized) -> Mapping[str, Tensor] | None:
        """Values of the parameters that a model keeps it as, bit for bit; None where it keeps the weight in another way."""


class NotThere(KeyError):
    """A tensor, in files."""


@contextmanager
def reading_codes(name: str) -> Iterator[None]:
    """Of a weight, by a function that gives tensors of its files.

    Raises:
        UserError: one that belongs to it is not there.
    """
    try:
        yield
    except NotThere as missing:
        raise UserError(
            f"{name}: its files hold codes, and there is no {missing.args[0]}; have the directory whole, or take one of the plain weights"
        ) from None


class QuantizationPlugin(Plugin):
    """Decides which layers keep codes. A layer that does is an :class:`torch.nn.Linear` still, of the same features and names: ``weight``
    are the codes, and ``dense_weight(dtype)`` gives what they stand for. Where it has ``grouped_codes()``, that gives them for kernels
    that compute with codes while generating on the CPU (:class:`fw.kernels.grouped.GroupedCodes`), or None where it cannot."""

    kind: ClassVar[str] = "quantization"
    hf_methods: ClassVar[tuple[str, ...]] = ()
    """``quant_method`` of the ``quantization_config`` in a config.json that it may read and write; a literal. The methods after
    :meth:`apply` are for these."""

    whole_layers_because: ClassVar[str] = ""
    """Why ranks cannot divide layers that :meth:`apply` changes without keeping codes in them, as a clause; empty where they can."""

    methods: ClassVar[tuple[str, ...]] = ("rtn",)
    """How :meth:`calibrate` can choose codes; ``rtn`` is rounding to the nearest."""

    @abstractmethod
    def apply(self, model: CausalLM, compute: torch.dtype) -> Mapping[str, Quantized]:
        """Have layers keep codes. Called under ``torch.device("meta")``, on every rank alike, before anything else changes the model.

        Codes and scales are frozen parameters of integer dtypes (a scale as its bits), so that nothing casts them; they may be divided
        between ranks anywhere, and are whole again where a layer computes.

        Args:
            compute: dtype of the products; what is quantized has it.

        Returns:
            the weights that are kept so, by the model's names.

        Raises:
            UserError: the options do not fit the model; what would.
        """

    def calibrate(self, weight: Quantized, weight_OI: Tensor, gram_II: Tensor, method: str) -> Mapping[str, Tensor]:
        """Codes of a weight by what its layer sees, as :attr:`Quantized.quantize` gives them.

        Args:
            gram_II: Σ x xᵀ of its inputs, fp32.
            method: one of :attr:`methods`, and not ``rtn``.
        """
        raise NotImplementedError(f"{type(self).__name__} knows no {method}")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], names: Collection[str]) -> QuantizationPlugin | None:
        """The plugin as a ``quantization_config`` says; None where that is another's.

        Args:
            names: of the tensors in the files.

        Raises:
            UserError: it is this plugin's, in a form that is not read; which, as what follows the place.
        """
        raise NotImplementedError(f"{cls.__name__} reads no quantization_config")

    def look(self, read: Callable[[str], Tensor]) -> None:  # most are told all by the configuration
        """Be given the files that :meth:`from_hf` was about, for what their ``quantization_config`` does not say; before :meth:`apply`.

        Args:
            read: gives a tensor of the files; KeyError where there is none.
        """

    def hf_config(self, model: CausalLM) -> Mapping[str, Any]:
        """``quantization_config`` of a model that this was applied to."""
        raise NotImplementedError(f"{type(self).__name__} has no form in files")

    def stored(self, names: Collection[str]) -> Mapping[str, tuple[str, ...]]:
        """Weights that files hold quantized, and the tensors that each consists of, its codes first."""
        raise NotImplementedError(f"{type(self).__name__} has no form in files")

    def open(self, name: str, read: Callable[[str], Tensor]) -> StoredWeight:
        """A weight of :meth:`stored`.

        Args:
            read: gives a tensor of the files; KeyError where there is none.

        Raises:
            UserError: it is not what its description says.
        """
        raise NotImplementedError(f"{type(self).__name__} has no form in files")

    def written(self, name: str, weight: Quantized, values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The tensors that hold a weight in files, by name.

        Args:
            values: of the parameters that the model keeps it as.
        """
        raise NotImplementedError(f"{type(self).__name__} has no form in files")
