"""Which memory an operator makes and overwrites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves


def storage(tensor: Tensor) -> int:
    """A name for a tensor's memory, as long as it lives; of a DTensor this rank's."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()._cdata


def storages(tree: Any) -> set[int]:
    """Of all tensors in it."""
    return {storage(leaf) for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)}


def overwritten(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> set[int]:
    """The memory that a call of an OpOverload writes into, by its schema."""
    arguments = op._schema.arguments
    given = [*zip(arguments, args, strict=False), *((a, kwargs.get(a.name)) for a in arguments[len(args) :])]
    return storages([value for argument, value in given if argument.alias_info is not None and argument.alias_info.is_write])
