"""The only place that knows the order in which plugins act on a model."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fw.averaging import AveragedWeights
from fw.checkpointing.elsewhere import HOST_SHARE, Elsewhere, allocate, announce, announced, check_host, choose_elsewhere
from fw.checkpointing.in_files import bring_ahead, frozen_in_files
from fw.checkpointing.placement import fill_from_base, initialise, local_part, quantizing
from fw.checkpointing.quantized_files import quantization_for, weights_of
from fw.checkpointing.streaming import expect, stream
from fw.checkpointing.tensor_files import ADAPTER, TensorFiles, adapter_for, weights_for
from fw.errors import UserError
from fw.kinds import make
from fw.kinds.attention import AttentionPlugin
from fw.kinds.checkpoint import Reader
from fw.kinds.data import Rows
from fw.kinds.model import Adapters, CausalLM, Give, Init, ModelPlugin
from fw.kinds.offload import OffloadPolicy
from fw.kinds.quantization import QuantizationPlugin
from fw.kinds.sharding import REPLICATE, Stepper, StepSpec
from fw.locate import find
from fw.meter.flops import ModelFlops
from fw.meter.memory import available_bytes
from fw.planned import planned_gpu
from fw.recipe import Recipe


@dataclass(frozen=True)
class Assembly:
    """A model whose parameters have their values on this rank, and the owner of its step.

    Attributes:
        flops: the model needs for sequences of given lengths.
        beside: a frozen model that the objective computes with.
    """

    model: CausalLM
    stepper: Stepper
    vocab_size: int
    flops: ModelFlops
    beside: CausalLM | None = None

    @property
    def beside_weights(self) -> list[Tensor]:
        """What this rank keeps of it."""
        if self.beside is None:
            return []
        return [local_part(p.detach())[0] for name, p in self.beside.named_parameters() if name not in self.beside.in_files]


@dataclass(frozen=True)
class Built:
    """A model on the meta device, divided and wrapped as it will run; it has no bytes yet.

    Attributes:
        spec: what its step is to honour.
        flops: the model needs for sequences of given lengths.
    """

    model: CausalLM
    spec: StepSpec
    vocab_size: int
    flops: ModelFlops
    beside: CausalLM | None = None


def assemble(
    recipe: Recipe,
    vocab_size: int,
    mesh: DeviceMesh | None,
    device: torch.device,
    checkpoint: Reader | None = None,
    rows: Rows | None = None,
) -> Assembly:
    """Build, divide, fill and make steppable. Collective; no rank ever holds a full copy that it does not keep.

    Args:
        vocab_size: rows of the embedding.
        mesh: of the shape ``recipe.mesh_shape``, or None on a single rank.
        checkpoint: where weights and optimizer state come from; initial values where None.
        rows: of the data; None for documents of one length.

    Raises:
        UserError: the checkpoint, or the directory training begins from, does not fit the model.
    """
    built = build(recipe, vocab_size, mesh, device, rows)
    give = values(built.model, recipe.train.seed, checkpoint, recipe.model.weights)
    made = start(recipe, built, mesh, device, give, None if built.beside is None else beside_values(recipe, built.beside))
    for model in (made.model, made.beside):
        if model is not None:
            bring_ahead(model)
    if checkpoint is not None:
        made.stepper.load_optimizer_tensors(checkpoint.optimizer(made.stepper.placements()))
        if isinstance(made.stepper, AveragedWeights):
            made.stepper.begin_average(checkpoint.average(made.model))
    return made


def build(recipe: Recipe, vocab_size: int, mesh: DeviceMesh | None, device: torch.device, rows: Rows | None = None) -> Built:
    """Everything that can be decided before a parameter has bytes. The arguments are those of :func:`assemble`."""
    spec = recipe.step_spec(device, rows)
    with torch.device("meta"):
        attention = recipe.sharding.attention(recipe.attention, mesh)
        model = recipe.model.build(vocab_size, recipe.train.sequence_length, attention)
        flops = ModelFlops.of(model, recipe.train.sequence_length)
        _change(model, recipe, spec)
        flops = flops.with_adapters(model)
    away = _elsewhere(model, recipe, spec)
    check_host(away, available_bytes(torch.device("cpu")))
    announce(model, away, spec.device_type != "cpu")
    recipe.sharding.parallelize(model, mesh)
    recipe.precision.convert(model, device)
    if model.elsewhere:
        expect(model)
    recipe.activation.apply(model, spec, recipe.train.sequence_length)
    if recipe.train.compile:
        # Blocks of several kinds (windows, experts), training and evaluation, and shapes all count; beyond the limit dynamo goes eager.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 8 * len(model.blocks))
        for block in model.blocks:
            block.compile()
    recipe.sharding.shard(model, mesh, spec)
    recipe.offload.attach(model)
    beside = build_beside(recipe, vocab_size, spec, attention)
    if beside is not None:
        recipe.sharding.parallelize(beside, mesh)
        recipe.sharding.shard(beside, mesh, replace(spec, offload=OffloadPolicy()))
    return Built(model, spec, vocab_size, flops, beside)


def start(
    recipe: Recipe, built: Built, mesh: DeviceMesh | None, device: torch.device, give: Give, give_beside: Give | None = None
) -> Assembly:
    """Leave the meta device: parameters have bytes from here on, their values by ``give``, and the step has an owner. Collective.

    Args:
        give_beside: values of the model that the objective computes with; None for none.
    """
    if (beside := built.beside) is not None:
        beside.materialise(device)
        if give_beside is not None:
            _but_files(beside, give_beside, device)(beside.stored())
        recipe.objective.use(beside)
    allocate(built.model)
    stepper = recipe.sharding.start(built.model, mesh, built.spec, device, _but_files(built.model, give, device))
    if recipe.train.ema_decay:
        stepper = AveragedWeights(stepper, recipe.train.ema_decay)
    return Assembly(built.model, stepper, built.vocab_size, built.flops, beside)


def _but_files(model: CausalLM, give: Give, device: torch.device) -> Give:
    """What lies in files has its values. Once the model has them, those that lie elsewhere are brought from there."""

    def given(tensors: Mapping[str, Tensor]) -> None:
        give({name: tensor for name, tensor in tensors.items() if name not in model.in_files})
        stream(model, device)

    return given


def build_beside(recipe: Recipe, vocab_size: int, spec: StepSpec, attention: AttentionPlugin) -> CausalLM | None:
    """The frozen model that the objective computes with, whole, on the meta device.

    Raises:
        UserError: there is no such model, or it has other tokens.
    """
    if (wanted := recipe.objective.beside) is None:
        return None
    directory = find(wanted.path)
    plugin = make(ModelPlugin, "auto", path=str(directory))
    if plugin.vocab_size != vocab_size:
        raise UserError(f"{wanted.option}: {wanted.path} has {plugin.vocab_size} tokens, this model {vocab_size}; they must be the same")
    quantization = quantization_for(directory)
    if quantization is None or wanted.quantization != "none":
        quantization = make(QuantizationPlugin, wanted.quantization)
    with torch.device("meta"):
        model = plugin.build(vocab_size, recipe.train.sequence_length, attention)
        model.quantized, model.quantization = quantization.apply(model, spec.precision.compute), quantization
        model.to(spec.precision.compute)
    model.requires_grad_(False)
    if wanted.in_files:
        if set(recipe.mesh_shape) - {REPLICATE}:
            raise UserError("objective.offload: nvme leaves whole matrices in files; use sharding=ddp, whose ranks read the same")
        model.in_files = frozen_in_files(model, directory, in_files_for(spec.device_type), "objective.offload")
    return model.eval()


def in_files_for(device_type: str) -> OffloadPolicy:
    """That a model which the objective computes with stays in its files.

    Raises:
        UserError: it computes on a GPU.
    """
    if device_type != "cpu":
        raise UserError("objective.offload: nvme leaves weights in the model's files for a CPU so far; leave it out")
    return OffloadPolicy(params="nvme")


def beside_values(recipe: Recipe, model: CausalLM) -> Give:
    """From its files.

    Raises:
        UserError: they do not fit it.
    """
    wanted = recipe.objective.beside
    assert wanted is not None
    filling = weights_for(weights_of(find(wanted.path)), model)
    return quantizing(filling, model, filling.codes, filling.done)


def _elsewhere(model: CausalLM, recipe: Recipe, spec: StepSpec) -> Elsewhere:
    """Frozen matrices that stay in the files of the directory which training begins from, or on a GPU's host; none without such a policy.

    Raises:
        UserError: nothing is frozen, or it cannot stay there.
    """
    policy = spec.offload
    on_host = policy.params == "cpu" and not recipe.sharding.moves_parameters and spec.device_type != "cpu"
    if not policy.params_in_files and not on_host:
        return Elsewhere()
    if model.adapters is None and policy.params_in_files:
        raise UserError(
            "offload.params: nvme leaves frozen weights in the model's files, and all of this model trains: set peft, or offload.path, a"
            " directory on the disk"
        )
    if model.adapters is None:
        raise UserError(
            "offload.params: cpu leaves frozen weights in host memory, and all of this model trains: set peft, or use sharding that brings"
            " parameters block by block from there (fsdp, or zero with stage 3)"
        )
    if spec.device_type == "cpu":
        assert recipe.model.weights is not None
        return Elsewhere(in_files=frozen_in_files(model, recipe.model.weights, policy.on_cpu()))
    if policy.automatic and policy.budget is None:
        raise UserError(
            "offload.params: auto: a run does not find out what frozen weights may take of a GPU; say it, as in"
            " offload.max_memory='{device: 12GiB}'"
        )
    if policy.automatic and policy.host_budget is None:
        free = math.inf if planned_gpu() is not None else HOST_SHARE * available_bytes(torch.device("cpu")) / recipe.ranks_per_host
        policy = replace(policy, host_budget=free)
    away = choose_elsewhere(model, recipe.model.weights, policy)
    own = dict(model.named_parameters())
    compute = spec.precision.compute
    if spec.precision.full_eval and any(own[name].is_floating_point() and own[name].dtype != compute for name in announced(away)):
        raise UserError(
            "offload.params: precision.full_eval converts weights once for a validation, and those that come from elsewhere are not kept in"
            f" {str(compute).removeprefix('torch.')}; leave it out"
        )
    return away


def undivided(recipe: Recipe, vocab_size: int) -> CausalLM:
    """The model as checkpoints know it, adapters and codes included, on the meta device."""
    with torch.device("meta"):
        model = recipe.model.build(vocab_size, recipe.train.sequence_length, recipe.attention)
        _change(model, recipe, recipe.step_spec(torch.device("cpu")))
    return model


def check(recipe: Recipe, vocab_size: int, device: torch.device, rows: Rows | None = None, is_here: bool = True) -> None:
    """Refuse what the model's shape stands against, or that of the data's ``rows``, before any rank starts.

    Args:
        is_here: as in :class:`StepSpec`.

    Raises:
        UserError: sharding does not fit the model, or does not do what the other plugins ask for.
    """
    if recipe.steps_in_backward and recipe.train.on_nonfinite == "skip":
        raise UserError(
            f"{recipe.config.origin(('train', 'on_nonfinite'))}: train.on_nonfinite: skip looks at all gradients before an update, and"
            " optimizer.in_backward makes it as each comes; use stop or roll_back"
        )
    with torch.device("meta"):
        model = recipe.model.build(vocab_size, recipe.train.sequence_length, recipe.attention)
    try:
        spec = replace(recipe.step_spec(device, rows), is_here=is_here)
        with torch.device("meta"):
            _change(model, recipe, spec)
        _elsewhere(model, recipe, spec)
        for plugin in (recipe.precision, recipe.sharding, recipe.activation):
            plugin.check(model, recipe.mesh_shape, spec, recipe.train.sequence_length)
        recipe.peft.check(model, spec)
        recipe.attention.check(model, spec)
        recipe.objective.check(model, recipe.mesh_shape)
        build_beside(recipe, vocab_size, spec, recipe.attention)
        recipe.optimizer.check(spec.device_type, spec.offload)
    except UserError as error:
        named = re.match(r"\w+", str(error))  # the section or option at fault comes first
        section = named[0] if named and named[0] in recipe.tree else "sharding"
        raise UserError(f"{recipe.config.origin((section,))}: {error}") from None


def check_beginning(recipe: Recipe, vocab_size: int, checkpoint: Reader | None) -> None:
    """Refuse files to begin from that the model does not fit, before anything is made.

    Raises:
        UserError: they do not, or are not there.
    """
    values(undivided(recipe, vocab_size), recipe.train.seed, checkpoint, recipe.model.weights)


def values(model: CausalLM, seed: int, checkpoint: Reader | None, weights: Path | None) -> Give:
    """Where the parameters' values come from; what is returned fills those it is given, read by the slice or drawn by the slice.

    Args:
        checkpoint: of a run to go on with; goes before ``weights``.
        weights: model directory to begin from; None for initial values. Of a model with adapters the frozen base comes from it in any
            case.

    Raises:
        UserError: the files do not fit the model.
    """
    if model.adapters is None:
        return checkpoint.weights(model) if checkpoint is not None else _base_values(model, seed, weights)
    adapters, base = model.adapters, _base_values(model, seed, weights)
    if checkpoint is not None:
        trained = checkpoint.weights(model)
    elif adapters.weights is not None:
        trained = adapter_for(TensorFiles(adapters.weights, ADAPTER), model)
    else:
        trained = _begun(model, adapters, seed)
    begins = checkpoint is None and adapters.weights is None
    own, computed = set(adapters.added) if begins else set(adapters.tensors), adapters.from_base.keys()

    def give(tensors: Mapping[str, Tensor]) -> None:
        base({name: tensor for name, tensor in tensors.items() if name not in own | computed})
        trained({name: tensor for name, tensor in tensors.items() if name in own})
        if not begins:
            fill_from_base(model, tensors)

    return give


def _base_values(model: CausalLM, seed: int, weights: Path | None) -> Give:
    if weights is None:
        return quantizing(_drawn(model.init, seed), model)
    filling = weights_for(weights_of(weights), model)
    return quantizing(filling, model, filling.codes, filling.done)


def _drawn(init: Callable[[str], Init], seed: int) -> Give:
    def draw(tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            initialise(tensor.data, name, init(name), seed)

    return draw


def _begun(model: CausalLM, adapters: Adapters, seed: int) -> Give:
    """Initial values of what adapters add; the base has its values."""
    draw = _drawn(adapters.added.__getitem__, seed)

    def give(tensors: Mapping[str, Tensor]) -> None:
        draw({name: tensor for name, tensor in tensors.items() if name not in adapters.from_base})
        fill_from_base(model, tensors, seed, all_of_them=True)

    return give


def _change(model: CausalLM, recipe: Recipe, spec: StepSpec) -> None:
    """What a weight is kept as, and whether it trains, on the meta device.

    Parameters have the policy's dtype; frozen matrices that of compute, which their products would round them to anyway.
    """
    model.quantized, model.quantization = recipe.quantization.apply(model, spec.precision.compute), recipe.quantization
    model.adapters = recipe.peft.apply(model)
    model.to(spec.precision.parameters)
    if model.adapters is None or len(spec.computes_in) > 1:
        return
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding) and not module.weight.requires_grad and module.weight.is_floating_point():
            module.weight.data = module.weight.data.to(spec.precision.compute)
