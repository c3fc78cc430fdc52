"""What a run takes before its first step: loading, and going on from a checkpoint. The same assembly, filled from nowhere."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fw.assemble import Assembly, Built, start
from fw.checkpointing.pieces import kept_elements
from fw.checkpointing.placed import PlacedTensors
from fw.checkpointing.placement import initialise, quantizing
from fw.checkpointing.quantized_files import quantization_for, weights_of
from fw.checkpointing.tensor_files import TensorFiles
from fw.errors import UserError
from fw.kinds.checkpoint import Kept, Part
from fw.kinds.model import CausalLM, Give, Init
from fw.meter.account import History, Recorder
from fw.meter.step_memory import BUFFERS, COMPONENT_OF, OPTIMIZER, OTHER, RULES, WEIGHTS
from fw.planning.ledger import Ledger
from fw.recipe import Recipe

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Of an optimizer's tensors, by ``<parameter>/<key>``."""


def started(recipe: Recipe, built: Built, mesh: DeviceMesh | None, device: torch.device, ledger: Ledger) -> tuple[Assembly, dict[str, int]]:
    """:func:`fw.assemble.start` as it is for initial values, or those of files; components at the peak."""
    with ledger.recording(device, RULES) as found:
        found.known_rest(OTHER)
        made = _start(recipe, built, mesh, device, ledger, initial=recipe.model.weights is None)
        _name(found, made)
    return made, highest(found.history)


def resumed(recipe: Recipe, built: Built, mesh: DeviceMesh | None, device: torch.device, ledger: Ledger, state: Shapes) -> dict[str, int]:
    """Components at the peak, where a run is assembled from a checkpoint.

    Args:
        state: that the optimizer has.
    """
    with ledger.recording(device, RULES) as found:
        found.known_rest(OTHER)
        drawn = recipe.model.weights is None and built.model.adapters is not None  # else all comes from the checkpoint
        made = _start(recipe, built, mesh, device, ledger, drawn)
        made.stepper.load_optimizer_tensors(PlacedTensors(_Unread(state), made.stepper.placements()))
        _name(found, made)
    made.stepper.close()
    return highest(_own(found.history))


def highest(history: History) -> dict[str, int]:
    """Components at its peak."""
    return history.account(COMPONENT_OF).at_peak


def _own(history: History) -> History:
    """Without what was there before, which may go in the course of it."""
    came = {block for block, sign in history.changes if sign > 0}
    return History(changes=[(block, sign) for block, sign in history.changes if block in came])


def read_bytes(model: CausalLM, weights: Path | None) -> int:
    """Of a model directory, by a rank that keeps its part of a model: of what is quantized, all; of what stays in the files, nothing."""
    if weights is None:
        return 0
    try:
        files = weights_of(weights)
    except UserError:  # a plan needs none
        files = None
    if model.quantized and quantization_for(weights) is not None:
        return sum(file.stat().st_size for file in weights.glob("*.safetensors"))
    total = 0
    for name, tensor in model.base().items():
        if name in model.in_files:
            continue
        elements = tensor.numel() if name in model.quantized else kept_elements(tensor)
        names = [of.name for of in model.hf_tensors(name)]
        dtype = files.dtype(names[0]) if files is not None and names[0] in files.where else tensor.dtype
        total += elements * dtype.itemsize
    return total


def shapes(tensors: Mapping[str, Tensor | Kept]) -> Shapes:
    """Of all of them."""
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def _start(recipe: Recipe, built: Built, mesh: DeviceMesh | None, device: torch.device, ledger: Ledger, initial: bool) -> Assembly:
    for model in (built.model, built.beside):
        if model is not None:
            model.in_files = {name: ledger.in_a_file(tensor) for name, tensor in model.in_files.items()}
            model.elsewhere = {name: model.in_files.get(name, tensor) for name, tensor in model.elsewhere.items()}
    give = filling(built.model, recipe.model.weights, ledger, initial)
    wanted = recipe.objective.beside
    beside = None if built.beside is None or wanted is None else filling(built.beside, Path(wanted.path), ledger, initial=False)
    return start(recipe, built, mesh, device, give, beside)


def _name(found: Recorder, made: Assembly) -> None:
    kept = made.stepper.kept()
    found.name(WEIGHTS, [*kept.weights, *made.beside_weights])
    found.name(BUFFERS, kept.buffers)
    found.name(OPTIMIZER, kept.optimizer)


def name_known(found: Recorder, made: Assembly) -> None:
    """What an assembly keeps between two steps was there before."""
    kept = made.stepper.kept()
    found.known(WEIGHTS, [*kept.weights, *made.beside_weights])
    found.known(BUFFERS, kept.buffers)
    found.known(OPTIMIZER, kept.optimizer)
    found.known_rest(OTHER)


def filling(model: CausalLM, weights: Path | None, ledger: Ledger, initial: bool) -> Give:
    """Takes what filling a model takes: files are mapped, and what lies there takes nothing; values that are drawn take a chunk at a time,
    and a weight that is quantized is there whole for a moment. Of several tensors of a kind, one does so."""
    there = weights is not None and (of := quantization_for(weights)) is not None and type(of) is type(model.quantization)
    codes = {name for weight in model.quantized.values() for name in weight.kept}
    give = _draw if initial and ledger.gpu is None else _nothing  # a GPU is given what was drawn on the host

    def give_all(tensors: Mapping[str, Tensor]) -> None:
        give({name: tensor for name, tensor in tensors.items() if name not in codes})
        kinds: dict[tuple[tuple[int, ...], torch.dtype], str] = {}
        for name, weight in model.quantized.items():
            if name in tensors and not there:
                kinds.setdefault((weight.shape, weight.dtype), name)
        chosen = {part for name in kinds.values() for part in model.quantized[name].kept}
        quantizing(give, model)({name: tensor for name, tensor in tensors.items() if name in chosen})

    return give_all


def _draw(tensors: Mapping[str, Tensor]) -> None:
    """The beginning of the largest."""
    drawn = [tensor.detach() for tensor in tensors.values() if tensor.is_floating_point()]
    if drawn:
        largest = max(drawn, key=kept_elements)
        initialise((largest.to_local() if isinstance(largest, DTensor) else largest).flatten()[: 2 << 16], "", Init(std=1.0), 0)


def _nothing(tensors: Mapping[str, Tensor]) -> None:
    pass


class _Unread(TensorFiles):
    """Tensors of a checkpoint that nobody has written."""

    def __init__(self, tensors: Shapes) -> None:
        self.directory, self.files, self.where = Path(), {}, dict.fromkeys(tensors)  # type: ignore[assignment]
        self._tensors = tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name][0]

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name][1]

    def whole(self, name: str) -> Tensor:
        return torch.empty(self.shape(name), dtype=self.dtype(name))

    def fill(self, name: str, part: Part) -> None:
        pass
