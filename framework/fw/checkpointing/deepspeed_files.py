"""A checkpoint directory of DeepSpeed's engine: master weights and optimizer state by the names of the module that was trained."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fw.checkpointing.deepspeed_layout import Placed, by_elements, by_parameter, states_of
from fw.checkpointing.deepspeed_pickle import load
from fw.errors import UserError

_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_\d+_)?mp_rank_(\d+)_model_states\.pt")
_WRAPPERS = ("module.", "_orig_mod.", "_forward_module.")


class DeepSpeedFiles:
    """Files of ZeRO stages 0 to 3, mapped; a tensor is put together when it is asked for.

    Attributes:
        stage: of ZeRO.
        ranks: that wrote it.
        step: optimizer steps done.
        shapes: of the weights, by name.
        states: shapes of the optimizer's tensors by ``<parameter>/<key>``; ``()`` for single numbers.
        notes: what could not be taken over, a sentence each.
        loss_scale: of fp16 runs.

    Raises:
        UserError: it is no such checkpoint, one of a kind not read here, or a file is missing or damaged.
    """

    def __init__(self, directory: Path, tag: str | None = None) -> None:
        self.directory = _tagged(directory, tag)
        names = sorted(path.name for path in self.directory.iterdir())
        _refuse_other_kinds(self.directory, names)
        self._optimizer_files = {int(m[1]): m[0] for name in names if (m := _OPTIMIZER.fullmatch(name))}
        self.notes: list[str] = []
        self.loss_scale: float | None = None
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.states: dict[str, tuple[int, ...]] = {}
        self._whole: dict[str, Tensor] = {}
        self._pieces: dict[str, list[Tensor]] = {}
        self._numbers: dict[str, float] = {}
        self._placed: dict[str, Placed] = {}
        self._flats: dict[str | None, list[list[Tensor]]] = {}
        if self._optimizer_files:
            self._open_zero(names)
        elif any(name.startswith("zero_pp_rank_") for name in names):
            raise UserError(f"{self.directory / 'zero_pp_rank_0_mp_rank_00_optim_states.pt'} is missing; it holds the weights")
        else:
            self._open_plain()

    @property
    def integers(self) -> set[str]:
        """Names of weights (buffers) that are no floating-point numbers, and stay what they are."""
        return {name for name, tensor in self._whole.items() if name in self.shapes and not tensor.is_floating_point()}

    def weight(self, name: str) -> Tensor:
        """The master weight, whole, in fp32 where it is a floating-point number."""
        if name in self._placed:
            return self._placed[name].gather(self._flats[None])
        if name in self._pieces:
            whole = torch.cat([piece.reshape(-1) for piece in self._pieces[name]])
            size = torch.Size(self.shapes[name])
            return whole[: size.numel()].reshape(size).float()
        found = self._whole[name]
        return found.float() if found.is_floating_point() else found

    def state(self, path: str) -> Tensor:
        """A tensor of the optimizer's, whole, in fp32."""
        if path in self._numbers:
            return torch.tensor(float(self._numbers[path]))
        if path in self._whole:
            return self._whole[path].float()
        name, _, key = path.rpartition("/")
        return self._placed[name].gather(self._flats[key])

    def _open_plain(self) -> None:
        """Stage 0: one file, the module as it is and a plain optimizer."""
        self.stage, self.ranks = 0, 1
        model = load(self.directory / "mp_rank_00_model_states.pt")
        self._common(model)
        self.ranks = int(model.get("dp_world_size") or 1)
        buffers = set(model.get("buffer_names") or ())
        seen: dict[tuple[int, tuple[int, ...]], str] = {}
        for name, tensor in model["module"].items():
            first = seen.setdefault((tensor.data_ptr(), tuple(tensor.shape)), name) if tensor.numel() else name
            if first == name:
                self._add(name, tensor)
        trained = [bare(name) for name in model["module"] if bare(name) in self.shapes and name not in buffers]
        optimizer = model.get("optimizer") or {}
        state = optimizer.get("state")
        groups = optimizer.get("param_groups") or []
        if not state:
            self.notes.append("no optimizer state: stage 0 keeps it by number in a form that names no parameter")
            return
        if len(groups) != 1 or len(state) > len(trained):
            self.notes.append("no optimizer state: stage 0 numbers the parameters of several groups, and does not say which is which")
            return
        if len(groups[0]["params"]) != len(trained):  # frozen ones have no number: told apart by shape, in order, or not at all
            trained = _matched(trained, self.shapes, [state[i] for i in groups[0]["params"] if i in state])
        if len(groups[0]["params"]) != len(trained):
            self.notes.append("no optimizer state: its numbers do not tell which parameters were frozen")
            return
        for name, number in zip(trained, groups[0]["params"], strict=True):
            for key, value in state.get(number, {}).items():
                self._add_state(name, key, value)

    def _add_state(self, name: str, key: str, value: Any) -> None:
        path = f"{name}/{key}"
        if isinstance(value, Tensor) and tuple(value.shape) == self.shapes[name]:
            self._whole[path], self.states[path] = value, self.shapes[name]
        elif isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1):
            self._numbers[path], self.states[path] = float(value), ()

    def _open_zero(self, names: list[str]) -> None:
        first = self._optimizer_file(0)
        inner = first["optimizer_state_dict"]
        counts = inner.get("partition_count", len(self._optimizer_files))
        counts = list(counts) if isinstance(counts, (list, tuple)) else [counts]
        if len(set(counts)) != 1:
            raise UserError(f"{self.directory} has groups divided over different numbers of ranks (experts), which is not read here")
        self.ranks = int(counts[0])
        self.stage = int(inner.get("zero_stage", 1))
        optimizers = [inner] + [self._optimizer_file(rank)["optimizer_state_dict"] for rank in range(1, self.ranks)]
        if extra := sorted(set(self._optimizer_files) - set(range(self.ranks))):
            stale = self._optimizer_files[extra[0]]
            raise UserError(f"{self.directory / stale} is of another save: {self.ranks} rank(s) wrote this checkpoint; remove it")
        pattern = "zero_pp_rank_{}_mp_rank_00_model_states.pt" if self.stage == 3 else "mp_rank_00_model_states.pt"
        model = load(self.directory / pattern.format(0))
        self._common(model)
        key = "fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"
        flats = [optimizer.get(key) for optimizer in optimizers]
        flats = [[flat] if isinstance(flat, Tensor) else flat for flat in flats]
        for rank, flat in enumerate(flats):
            if not flat or not all(isinstance(tensor, Tensor) for tensor in flat):
                raise UserError(f"{self.directory / self._optimizer_files[rank]} holds no {key}: weights kept on a disk are not in it")
        self._flats[None] = flats
        paddings = inner.get("group_paddings") if self.stage < 3 else None
        sizes = [flat.numel() + (paddings[i] if paddings and self._lean(inner, flat, i) else 0) for i, flat in enumerate(flats[0])]
        shapes = model["param_shapes"]
        shapes = [{bare(n): tuple(s) for n, s in group.items()} for group in ([shapes] if isinstance(shapes, dict) else shapes)]
        try:
            if self.stage == 3:
                self._placed = by_parameter(shapes, sizes, self.ranks)
            else:
                self._placed = by_elements(shapes, sizes, self.ranks, inner.get("param_alignment_paddings"))
        except (UserError, ValueError) as error:
            raise UserError(f"{self.directory}: {error}") from None
        self._check_sizes(flats)
        self._add_beside(model)
        for name, placed in self._placed.items():
            self.shapes[name] = placed.shape
        self._take_states(optimizers, shapes)
        scaler = inner.get("loss_scaler")
        self.loss_scale = getattr(scaler, "cur_scale", None) if inner.get("dynamic_loss_scale") else None

    def _optimizer_file(self, rank: int) -> dict[str, Any]:
        prefix = next(iter(self._optimizer_files.values())).partition("zero_pp")[0]
        path = self.directory / self._optimizer_files.get(rank, f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        loaded = load(path)
        if not isinstance(loaded.get("optimizer_state_dict"), dict):
            raise UserError(f"{path} is no file of a ZeRO optimizer")
        return loaded

    @staticmethod
    def _lean(inner: Mapping[str, Any], flat: Tensor, group: int) -> bool:
        """Whether padding was cut off the weights: the state, which keeps it, is longer."""
        state = states_of(inner.get("base_optimizer_state") or {}, group + 1)
        tensors = (
            [value.numel() for value in state[group].values() if isinstance(value, Tensor) and value.dim()] if group < len(state) else []
        )
        return any(count > flat.numel() for count in tensors)

    def _check_sizes(self, flats: list[list[Tensor]]) -> None:
        """Every span must lie inside its file."""
        for name, placed in self._placed.items():
            for span in placed.spans:
                if span.group >= len(flats[span.rank]) or span.end > flats[span.rank][span.group].numel():
                    raise UserError(f"{self.directory / self._optimizer_files[span.rank]} ends before {name} does: it is of another save")

    def _add_beside(self, model: Mapping[str, Any]) -> None:
        """Frozen parameters and buffers."""
        frozen = {bare(n): tuple(s) for n, s in (model.get("frozen_param_shapes") or {}).items()}
        buffers = set(model.get("buffer_names") or ())
        shared = {bare(name) for name in model.get("shared_params") or ()}
        for name, tensor in model["module"].items():
            if name in buffers or (self.stage < 3 and bare(name) not in self._placed and bare(name) not in shared):
                self._add(name, tensor)
        missing = {name: shape for name, shape in frozen.items() if name not in self.shapes}
        if not missing:
            return
        count = self.ranks if self.stage == 3 else 1
        others = [load(self.directory / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt") for rank in range(1, count)]
        for name, shape in missing.items():
            pieces = [{bare(n): t for n, t in each["frozen_param_fragments"].items()}[name] for each in (model, *others)]
            self._pieces[name], self.shapes[name] = pieces, shape

    def _take_states(self, optimizers: list[dict[str, Any]], shapes: list[dict[str, tuple[int, ...]]]) -> None:
        kept = "optimizer_state_dict" if self.stage == 3 else "base_optimizer_state"
        groups = len(self._flats[None][0])
        by_rank = [states_of(optimizer.get(kept) or {}, groups) for optimizer in optimizers]
        number = optimizers[0].get("base_optimizer_state_step")
        keys = dict.fromkeys(key for state in by_rank[0] for key in state)
        for key in keys:
            values = [[state.get(key) for state in states] for states in by_rank]
            flat = all(
                isinstance(value, Tensor) and value.dim() > 0 and value.numel() >= weight.numel() and weight.numel() > 1
                for row, weights in zip(values, self._flats[None], strict=True)
                for value, weight in zip(row, weights, strict=True)
            )
            if flat:
                self._flats[key] = values  # type: ignore[assignment]
                self.states |= {f"{name}/{key}": placed.shape for name, placed in self._placed.items()}
                continue
            first = values[0][0]
            if isinstance(first, (int, float)) or (isinstance(first, Tensor) and first.numel() == 1):
                number = first if key == "step" else number
                for name in self._placed:
                    self._numbers[f"{name}/{key}"], self.states[f"{name}/{key}"] = float(first), ()
            else:
                self.notes.append(f"optimizer state {key} is left out: it is neither shaped like the parameters nor a number")
        if "step" not in keys and number is not None:
            for name in self._placed:
                self._numbers[f"{name}/step"], self.states[f"{name}/step"] = float(number), ()

    def _common(self, model: Mapping[str, Any]) -> None:
        if not isinstance(model.get("module"), dict):
            raise UserError(f"{self.directory} holds no module: it is of a pipeline, which is not read here")
        if int(model.get("mp_world_size") or 1) > 1:
            raise UserError(f"{self.directory} is of {model['mp_world_size']} tensor-parallel ranks, which is not read here")
        self.step = int(model.get("global_steps") or 0)

    def _add(self, name: str, tensor: Tensor) -> None:
        self._whole[bare(name)], self.shapes[bare(name)] = tensor, tuple(tensor.shape)


def bare(name: str) -> str:
    """A parameter's name without what wrappers put before it."""
    while name.startswith(_WRAPPERS):
        name = name.partition(".")[2]
    return name


def _matched(names: list[str], shapes: Mapping[str, tuple[int, ...]], states: list[Mapping[str, Any]]) -> list[str]:
    """The names that the states are of, where their shapes leave one way only; else none."""
    wanted = [next((tuple(v.shape) for v in state.values() if isinstance(v, Tensor) and v.dim()), None) for state in states]
    ways = [1] + [0] * len(wanted)  # in how many ways the first n are found among the names so far
    for name in names:
        for n in range(len(wanted), 0, -1):
            ways[n] += ways[n - 1] if wanted[n - 1] == shapes[name] else 0
    if ways[-1] != 1:
        return []
    found, position = [], 0
    for name in names:
        if position < len(wanted) and shapes[name] == wanted[position]:
            found.append(name)
            position += 1
    return found


def _tagged(directory: Path, tag: str | None) -> Path:
    if not directory.is_dir():
        raise UserError(f"{directory} is no directory")
    if tag is None and any(_MODEL.fullmatch(path.name) for path in directory.iterdir()):
        return directory
    if tag is None:
        if not (directory / "latest").is_file():
            raise UserError(f"{directory} is no checkpoint directory of DeepSpeed's: it has no file 'latest'; say which one with --tag")
        tag = (directory / "latest").read_text().strip()
    if not (directory / tag).is_dir():
        have = ", ".join(sorted(path.name for path in directory.iterdir() if path.is_dir())) or "none"
        raise UserError(f"{directory} holds no checkpoint '{tag}' (there are: {have})")
    return directory / tag


def _refuse_other_kinds(directory: Path, names: list[str]) -> None:
    if "zero" in names and (directory / "zero").is_dir():
        raise UserError(f"{directory} is a universal checkpoint, which is not read here; give the one it was made from")
    if layers := [name for name in names if name.startswith("layer_")]:
        raise UserError(f"{directory / layers[0]} is of a pipeline, which is not read here")
    if experts := [name for name in names if "expert_" in name]:
        raise UserError(f"{directory / experts[0]} is of expert parallelism, which is not read here")
    parallel = [
        name for name in names if ((m := _OPTIMIZER.fullmatch(name)) and int(m[2])) or ((m := _MODEL.fullmatch(name)) and int(m[1]))
    ]
    if parallel:
        raise UserError(f"{directory / parallel[0]} is of a second tensor- or pipeline-parallel rank, which is not read here")
