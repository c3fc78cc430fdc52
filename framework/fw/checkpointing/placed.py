"""Optimizer state from files, each tensor placed like its parameter when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from fw.checkpointing.tensor_files import TensorFiles
from fw.errors import RunError
from fw.kinds.checkpoint import Part


class PlacedTensors(Mapping[str, Tensor]):
    """Tensors of a directory by ``<parameter>/<key>``, read when they are looked up.

    Raises:
        RunError: state of a parameter that is not among ``parameters``.
    """

    def __init__(self, files: TensorFiles, parameters: Mapping[str, Tensor]) -> None:
        self._files, self._parameters = files, parameters
        for path in files.where:
            if (name := path.rpartition("/")[0]) not in parameters:
                raise RunError(f"{files.directory}: optimizer state of '{name}', which the model does not have")

    def __getitem__(self, path: str) -> Tensor:
        if path not in self._files.where:
            raise KeyError(path)
        parameter = self._parameters.get(path, self._parameters[path.rpartition("/")[0]])
        if self._files.shape(path) != tuple(parameter.shape):
            return self._files.whole(path).to(parameter.device)
        tensor = torch.empty_like(parameter, dtype=self._files.dtype(path), requires_grad=False)
        self._files.fill(path, Part(tensor))
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files.where)

    def __len__(self) -> int:
        return len(self._files.where)
