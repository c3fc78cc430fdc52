"""Any causal language model of transformers behind the contract of a model: its blocks found, its buffers kept, its names its own."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from fw.api import CausalLM, HFTensor, Init, KVShape, Readout, UserError, positions


class _WeightsOnMeta(TorchFunctionMode):
    """What modules allocate empty, their weights, goes to the meta device; what they compute, their buffers, is computed."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _device_constructors() and kwargs.get("device") is None:
            kwargs["device"] = "meta" if func in (torch.empty, torch.empty_strided, torch.empty_permuted) else "cpu"
        return func(*args, **kwargs)


@contextmanager
def _weights_on_meta() -> Iterator[None]:
    """Parameters that are computed all the same go to the meta device one by one, as they are registered."""
    register = nn.Module.register_parameter

    def registered(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param if param is None or param.is_meta else nn.Parameter(param.to("meta"), param.requires_grad))

    nn.Module.register_parameter = registered  # type: ignore[method-assign]
    try:
        with _WeightsOnMeta():
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


class HFCausalLM(CausalLM):
    """A model of transformers.

    ``readout`` gets finished logits and a head that does nothing, since families scale, cap and shift them in ways of their own: whoever
    wants to avoid logits of a whole batch needs a reference model. What a mixture of experts adds to its loss is not added.
    """

    shows_hidden_states = False

    def __init__(self, make: Callable[[torch.dtype], Any]) -> None:
        """``make`` builds the model of transformers in a dtype."""
        super().__init__()
        self._make = make
        with _weights_on_meta():
            self.hf: Any = make(torch.float32)
        self._buffer_names = {name for name, _ in self.hf.named_buffers()}
        self.hf.to("meta")
        self.hf.tie_weights()
        self.text: Any = self.hf.config.get_text_config()
        self.vocab_size = self.text.vocab_size
        self.hf_prefix = f"{self.hf.base_model_prefix}."  # type: ignore[misc]
        self._blocks = _find_blocks(self.hf)
        self._takes_positions = "position_ids" in inspect.signature(self.hf.forward).parameters
        self._isolates: bool | None = None
        self._causal: bool | None = None
        self._in_files = _in_files(self.hf)

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The modules that transformers says must not be split."""
        return self._blocks

    def forward(
        self, ids_BL: Tensor, *, positions_BL: Tensor | None = None, segments_BL: Tensor | None = None, readout: Readout | None = None
    ) -> Tensor:
        """Logits ``[B, L, V]``, or what ``readout`` makes of them.

        Raises:
            UserError: segments or positions for a family that takes no positions, or both: transformers tells documents by them.
        """
        if self._causal is None:
            self._causal = self._later_tokens_are_not_seen(ids_BL.device)
        if not self._causal:
            raise UserError(f"{type(self.hf).__name__} of this configuration sees later tokens, so it is no causal language model")
        if segments_BL is not None and not self._keeps_apart(ids_BL.device) and _ends_with_padding(segments_BL):
            segments_BL = None  # nothing sees what comes after it
        given = segments_BL is not None or positions_BL is not None
        if given and not self._takes_positions:
            raise UserError(f"{type(self.hf).__name__} takes no positions, so documents cannot share a row; give one document per row")
        if segments_BL is not None:
            if positions_BL is not None:
                raise UserError("a model of transformers tells documents by their positions; give segments or positions, not both")
            if not self._keeps_apart(ids_BL.device):
                raise UserError(f"{type(self.hf).__name__} lets documents that share a row see each other; give one document per row")
            # Positions begin again with each segment, padding included, and that is what transformers separates rows by.
            positions_BL = positions(ids_BL, segments_BL)
        places = {"position_ids": positions_BL} if given else {}
        if positions_BL is not None and segments_BL is None:
            places["attention_mask"] = torch.ones_like(ids_BL)  # a jump in positions is no new document then
        out = self.hf(input_ids=ids_BL, use_cache=False, **places)
        logits_BLV: Tensor = out.logits
        return logits_BLV if readout is None else readout(logits_BLV, _as_it_is, self._auxiliary(out))

    def _keeps_apart(self, device: torch.device) -> bool:
        """Whether documents may share a row."""
        if self._isolates is None:
            self._isolates = self._takes_positions and self._documents_stay_apart(device)
        return self._isolates

    def _auxiliary(self, out: Any) -> Tensor | None:
        """The routers' balance as transformers adds it to its loss, where the configuration asks for it (``output_router_logits``)."""
        loss: Tensor | None = getattr(out, "aux_loss", None)
        return loss * self.hf.config.router_aux_loss_coef if self.training and loss is not None else None

    @torch.no_grad()
    def _later_tokens_are_not_seen(self, device: torch.device) -> bool:
        """Whether another last token leaves what comes before it alone: transformers builds encoders as language models too. Once, on all
        ranks at the same time."""
        training = self.hf.training
        self.hf.eval()
        ids_2L = torch.arange(8, device=device).repeat(2, 1) % self.vocab_size
        ids_2L[1, -1] = (ids_2L[1, -1] + 1) % self.vocab_size
        one, other = self.hf(input_ids=ids_2L, use_cache=False).logits[:, :-1]
        self.hf.train(training)
        return bool((one - other).float().norm() <= (1e-5 if one.dtype == torch.float32 else 1e-2) * one.float().norm())

    @torch.no_grad()
    def _documents_stay_apart(self, device: torch.device) -> bool:
        """Whether this family honours positions that begin again: not all do, and those that do not say nothing. Two short documents in a
        row, the second one compared with itself alone; once, on all ranks at the same time."""
        training = self.hf.training
        self.hf.eval()
        ids_1L = torch.arange(8, device=device)[None] % self.vocab_size
        places_1L = torch.arange(4, device=device).repeat(2)[None]
        together = self.hf(input_ids=ids_1L, position_ids=places_1L, use_cache=False).logits[:, 4:]
        alone = self.hf(input_ids=ids_1L[:, 4:], use_cache=False).logits
        self.hf.train(training)
        tolerance = 1e-3 if alone.dtype == torch.float32 else 5e-2
        return bool((together - alone).float().norm() <= tolerance * alone.float().norm())

    def init(self, name: str) -> Init:
        """A family's own initial weights are not known here.

        Raises:
            UserError: always; such a model begins from its directory's weights.
        """
        raise UserError(f"model hf: '{name}' has no initial value; a model of transformers begins from its directory's weights")

    def flops_per_token(self, sequence_length: int) -> float:
        """``6 · (parameters in matrix products) + 12 · layers · heads · head_dim · length``, as for the reference models; experts that a
        token is not sent to are counted too."""
        head = self.hf.get_output_embeddings()
        tables = {id(m.weight): m.weight.numel() for m in self.modules() if isinstance(m, nn.Embedding)}
        if head is not None:
            tables.pop(id(head.weight), None)  # a tied table is a product once
        products = sum(p.numel() for p in self.parameters() if p.dim() > 1) - sum(tables.values())
        shapes = self.kv_shapes
        heads = getattr(self.text, "num_attention_heads", 0)
        return 6.0 * products + 12.0 * sum(heads * shape.head_dim * sequence_length for shape in shapes)

    @property
    def kv_shapes(self) -> Sequence[KVShape]:
        """By the configuration's usual fields; none for a family without attention."""
        text = self.text
        if not hasattr(text, "num_attention_heads"):
            return []  # a family without attention
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return [KVShape(heads, head_dim)] * len(self._blocks)

    def hf_config(self) -> dict[str, Any]:
        """As transformers writes it."""
        fields: dict[str, Any] = {**self.hf.config.to_diff_dict(), "architectures": [type(self.hf).__name__]}
        fields.pop("dtype", None)
        return fields

    def hf_tensors(self, name: str) -> Sequence[HFTensor]:
        """As transformers writes it to a file, which for some families is not as it is in memory: experts are stacked there."""
        return self._in_files[name.removeprefix("hf.")]

    def hf_repeated(self) -> Mapping[str, str]:
        """Tied weights that files may hold besides."""
        own = {tensor.name for name in self.base() for tensor in self.hf_tensors(name)}
        tied: Mapping[str, str] = self.hf.all_tied_weights_keys
        return {name: source for name, source in tied.items() if name not in own}

    def hf_superfluous(self, name: str) -> bool:
        """What transformers itself expects to find besides, and buffers that are computed."""
        patterns = [*(self.hf._keys_to_ignore_on_load_unexpected or ()), r"\.rotary_emb\.inv_freq$"]
        return name in self._buffer_names or any(re.search(pattern, name) for pattern in patterns)

    def stored(self) -> dict[str, Tensor]:
        """Parameters, and buffers that transformers stores."""
        kept = set(self.state_dict(keep_vars=True))
        return {**super().stored(), **{name: buffer for name, buffer in self.named_buffers() if name in kept}}

    def materialise(self, device: torch.device) -> None:
        """Storage for parameters; tied ones tied again; buffers as transformers computes them for a model of this dtype.

        Raises:
            UserError: the family keeps some parameters in fp32 whatever the model's dtype is.
        """
        dtype = max(
            (p.dtype for p in self.parameters() if p.is_floating_point()), key=lambda dtype: dtype.itemsize
        )  # frozen ones may be narrower
        with _weights_on_meta():
            twin = self._make(dtype)
        # transformers computes buffers once more after it has read the weights, no longer in the model's dtype.
        for module in twin.modules():
            module._is_hf_initialized = False
        twin.initialize_weights()
        kept = [*(twin._keep_in_fp32_modules or ()), *(twin._keep_in_fp32_modules_strict or ())]
        if dtype != torch.float32 and any(part in name for part in kept for name, _ in self.hf.named_parameters()):
            raise UserError(f"{type(self.hf).__name__} keeps {', '.join(kept)} in fp32; keep parameters in fp32 (precision: bf16)")
        super().materialise(device)
        self.hf.tie_weights()
        for name, value in twin.named_buffers():
            module, _, leaf = name.rpartition(".")
            self.hf.get_submodule(module)._buffers[leaf] = value.to(device)


def _in_files(model: Any) -> dict[str, Sequence[HFTensor]]:
    """Name in memory → what it is in files of current transformers.

    Raises:
        UserError: the family keeps tensors of its files in a way that only transformers' own loader takes apart.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightConverter

    transforms = get_model_conversion_mapping(model, add_legacy=False)
    # As transformers does when it writes: a change of prefix is only taken back where it was seen while reading.
    kept = [t for t in reversed(transforms) if not isinstance(t, PrefixChange)]
    found: dict[str, Sequence[HFTensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        stored: Sequence[HFTensor] = (HFTensor(name),)
        for transform in kept:
            if isinstance(transform, WeightConverter) and transform.reverse_transform().rename_source_key(name)[1] is not None:
                stored = _taken_apart(name, tensor.shape, transform)
                if not stored:
                    raise UserError(f"model hf: {type(model).__name__} keeps tensors of its files in a way not supported ({name})")
                break
        for transform in kept:
            if not isinstance(transform, WeightConverter):
                back = transform.reverse_transform()
                stored = [replace(part, name=back.rename_source_key(part.name)[0]) for part in stored]
        found[name] = stored
    return found


def _taken_apart(name: str, shape: Sequence[int], transform: Any) -> Sequence[HFTensor]:
    """The tensors of a stack of experts, each perhaps of several projections one below the other; empty for anything else."""
    steps = [(type(operation).__name__, getattr(operation, "dim", None)) for operation in transform.operations]
    sources, targets = transform._original_source_patterns, transform._original_target_patterns
    stacked, joined = [("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)]
    if len(targets) != 1 or (steps != joined and (steps != stacked or len(sources) != 1)) or any(s.count("*") != 1 for s in sources):
        return ()
    prefix, own, rest = name.rpartition(targets[0])
    if not own or rest or shape[1] % len(sources):
        return ()
    height = shape[1] // len(sources)
    return [
        HFTensor(prefix + source.replace("*", str(expert)), expert, (i * height, (i + 1) * height) if len(sources) > 1 else None)
        for expert in range(shape[0])
        for i, source in enumerate(sources)
    ]


def _ends_with_padding(segments_BL: Tensor) -> bool:
    """Whether each row is one document, and padding behind it. Waits for the device, so it is for those alone that need to know."""
    return bool((segments_BL <= 1).all() & (segments_BL.diff(dim=1) <= 0).all())


def _as_it_is(logits: Tensor) -> Tensor:
    return logits


def _find_blocks(model: Any) -> list[nn.Module]:
    """The modules of the classes that the family declares unsplittable; else the longest list of modules of one class.

    Raises:
        UserError: there is neither.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    repeated = {id(item) for module in model.modules() if isinstance(module, nn.ModuleList) for item in module}
    found = [module for module in model.modules() if type(module).__name__ in names and id(module) in repeated]
    inside = {id(inner) for module in found for inner in module.modules() if inner is not module}
    if found:
        return [module for module in found if id(module) not in inside]
    lists = [list(m) for m in model.modules() if isinstance(m, nn.ModuleList) and len({type(item) for item in m}) == 1]
    if not lists:
        raise UserError(f"{type(model).__name__}: no repeated blocks found, which sharding and recomputation work by")
    return max(lists, key=len)
