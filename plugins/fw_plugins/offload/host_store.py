"""Tensors of a GPU in page-locked host memory, copied there and back beside the computation."""

from __future__ import annotations

import torch
from torch import Tensor

from fw.api import RunError, on_gpu
from fw.api.kernels import Copy, Lane
from fw_plugins.offload.prefetch import Fetch, Stored


class HostStore:
    """Makes :class:`Stored` of a GPU's tensors; what is in host memory already stays."""

    def __init__(self) -> None:
        self._lanes: dict[tuple[str, torch.device], Lane] = {}

    def __call__(self, tensor: Tensor) -> Stored | None:
        """None where there is nothing to move."""
        return OnHost(tensor, self) if on_gpu(tensor) else None

    def room(self, tensor: Tensor) -> Tensor:
        """Host memory for the values, laid out as they are, so that no kernel turns them round; without gaps."""
        return torch.empty_like(tensor, device="cpu", pin_memory=True)

    def lane(self, direction: str, device: torch.device) -> Lane:
        """The copies ``away`` from a device, or ``back`` to it."""
        if (direction, device) not in self._lanes:
            self._lanes[direction, device] = Lane(device)
        return self._lanes[direction, device]


class OnHost(Stored):
    """A copy, and until that is done the tensor itself."""

    def __init__(self, tensor: Tensor, store: HostStore) -> None:
        self._store, self._device, self._stride = store, tensor.device, tensor.stride()
        self._host = store.room(tensor)
        self._leaving = store.lane("away", tensor.device).copy(self._host, tensor)
        self._here: Tensor | None = tensor
        self._version = tensor._version
        self._overwritten = False

    def settle(self) -> None:
        """Computation goes on when the copy is done, and whatever is computed then may take the tensor's memory."""
        if self._here is not None:
            self._overwritten = self._here._version != self._version
            self._leaving.wait()
            self._here = None

    def check(self) -> None:
        """Nobody knows when the copy was made. Autograd wants what it saves left alone, but looks only where nothing stands in its place.

        Raises:
            RunError: the tensor was changed after it was saved.
        """
        if self._overwritten or (self._here is not None and self._here._version != self._version):
            raise RunError("a block overwrites what it has saved for backward, which is copied to the host; use offload.activations=device")

    def fetch(self) -> Fetch:
        """A copy back, or the tensor itself where that has not gone yet."""
        if self._here is not None:
            return _Here(self, self._here)
        # It has been settled: computation has waited for the host to have the values, and the copy back waits for computation.
        # Compiled code counts on the strides, gaps included.
        back = torch.empty_strided(self._host.shape, self._stride, dtype=self._host.dtype, device=self._device)
        return _Back(self, back, self._store.lane("back", self._device).copy(back, self._host))

    def __del__(self) -> None:
        self.settle()  # a graph that is dropped; before the memory is another's, the copy must be done


class _Here(Fetch):
    def __init__(self, stored: OnHost, tensor: Tensor) -> None:
        self._stored, self._tensor = stored, tensor

    def result(self) -> Tensor:
        self._stored.check()
        return self._tensor

    def cancel(self) -> None:
        pass


class _Back(Fetch):
    def __init__(self, stored: OnHost, tensor: Tensor, copy: Copy) -> None:
        self._stored, self._tensor, self._copy = stored, tensor, copy

    def result(self) -> Tensor:
        self._stored.check()
        self._copy.wait()
        return self._tensor

    def cancel(self) -> None:
        self._copy.wait()  # before the memory is another's
