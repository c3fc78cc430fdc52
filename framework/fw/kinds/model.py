"""The contract of ``model``: a causal language model that sharding, training and checkpoints can handle without knowing it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from fw.errors import UserError
from fw.kinds.attention import AttentionPlugin
from fw.kinds.from_base import FromBase as FromBase, NormsOf as NormsOf
from fw.kinds.head import Head as Head, LinearHead as LinearHead, only_looks as only_looks
from fw.kinds.in_files import left_out
from fw.kinds.tensor_plan import TensorPlan
from fw.kinds.widths import Rescaling as Rescaling, Width as Width
from fw.registry import Plugin

if TYPE_CHECKING:
    from fw.kinds.quantization import QuantizationPlugin

Readout = Callable[[Tensor, Head, Tensor | None], Tensor]
"""Takes the last hidden states ``[B, L, D]``, the head, and what the model itself adds to the mean loss per token while it trains (a
weighted scalar, as the balance of a router; None where there is nothing); what it returns, forward returns."""

Give = Callable[[Mapping[str, Tensor]], None]
"""Fills tensors that a model stores, called by the model's own names, in place: plain ones whole, of DTensors what this rank keeps."""

_USUAL_STD = 0.02
"""Of initial weights, since GPT (Radford et al. 2018, section 4.1)."""


@dataclass(frozen=True)
class Init:
    """How a parameter begins: normal with mean 0 and ``std``, uniform between ``-bound`` and ``bound``, or the constant ``value``.

    Attributes:
        values: where none of these: gives all of its values on the host, from the run's seed and its name, for small ones.
    """

    std: float = 0.0
    value: float = 0.0
    bound: float = 0.0
    values: Callable[[int, str], Tensor] | None = None


@dataclass(frozen=True)
class HFTensor:
    """A tensor of a Hugging Face file and how it lies in a parameter.

    Attributes:
        name: in the file.
        index: the slice of the parameter's first dimension it is (one expert of a stack); None for the whole.
        rows: first and one past the last row of that slice it is (gate and up projections in one); None for all.
        transposed: whether the file holds it transposed (GPT-2's Conv1D).
    """

    name: str
    index: int | None = None
    rows: tuple[int, int] | None = None
    transposed: bool = False


@dataclass(frozen=True)
class KVShape:
    """What a block keeps of each token for generation: keys and values of ``heads`` × ``head_dim``, of the last ``window`` tokens only."""

    heads: int
    head_dim: int
    window: int | None = None


@dataclass(frozen=True)
class Quantized:
    """A weight that is kept as codes.

    Attributes:
        shape, dtype: of the weight itself.
        kept: names of the parameters that hold it, its own among them.
        quantize: gives these parameters' values for the weight's, on any device.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    kept: tuple[str, ...]
    quantize: Callable[[Tensor], Mapping[str, Tensor]]


@dataclass(frozen=True)
class Adapters:
    """What ``peft`` has made of a model: some parameters train, most of them added, and the others are a frozen base.

    Attributes:
        added: parameters that the model did not have before, by its own names, and how they begin.
        tensors: each trained parameter, added or not, as a tensor of an adapter's file, and of what was added and does not train that which
            such a file holds. An adapter's checkpoint holds these alone.
        config: ``adapter_config.json``, but for the base's name.
        split: what tensor parallelism cuts of what was added, as :attr:`TensorPlan.split`.
        whole_layers_because: why tensor parallelism cannot divide the layers, as a clause; empty where it can.
        from_base: added parameters that come from a weight of the base: at the beginning, and where no file holds them, always.
        undecayed: of what was added, besides vectors, what weight decay must leave alone.
        weights: the adapter's directory that training begins from; None for initial values.
        fixed: buffers that the model did not have before, and what makes their values, on the host: of shapes and options alone.
        repeated: tensors that an adapter's file holds besides, by name, and the one of :attr:`tensors` that each repeats.
    """

    added: Mapping[str, Init]
    tensors: Mapping[str, HFTensor]
    config: Mapping[str, Any]
    split: Mapping[str, int] = field(default_factory=dict)
    weights: Path | None = None
    whole_layers_because: str = ""
    from_base: Mapping[str, FromBase] = field(default_factory=dict)
    undecayed: frozenset[str] = frozenset()
    fixed: Mapping[str, Callable[[], Tensor]] = field(default_factory=dict)
    repeated: Mapping[str, str] = field(default_factory=dict)


def positions(ids_BL: Tensor, segments_BL: Tensor | None) -> Tensor:
    """0 … L-1, ``[1, L]``; with segments ``[B, L]``, counted anew where a segment begins."""
    at_1L = torch.arange(ids_BL.shape[1], device=ids_BL.device)[None]
    if segments_BL is None:
        return at_1L
    begins_BL = torch.ones_like(segments_BL, dtype=torch.bool)
    begins_BL[:, 1:] = segments_BL[:, 1:] != segments_BL[:, :-1]
    return at_1L - torch.where(begins_BL, at_1L, 0).cummax(dim=1).values


class CausalLM(nn.Module):
    """What every model is. Built on the meta device; weights come from files or from :meth:`init`.

    Reference models keep no buffers: what can be computed from the configuration is computed in forward. A model that cannot do so
    gives its buffers their values in :meth:`materialise`.
    """

    vocab_size: int
    """Rows of the embedding."""

    context: int
    """Tokens of the longest sequence that it claims to serve."""

    adapters: Adapters | None = None
    """What ``peft`` has added; None where all of the model trains."""

    quantized: Mapping[str, Quantized] = MappingProxyType({})
    """Weights that ``quantization`` has replaced by codes, by name."""

    quantization: QuantizationPlugin | None = None
    """Who has."""

    shows_hidden_states: bool = True
    """Whether ``readout`` sees hidden states, and not what its own head has made of them."""

    virtual_tokens: int = 0
    """That ``peft`` has put before every sequence."""

    in_files: Mapping[str, Tensor] = MappingProxyType({})
    """Parameters that lie in mapped files, by name, chosen before the model leaves the meta device: nobody writes to them, and reading them
    may have to wait for a disk."""

    elsewhere: Mapping[str, Tensor] = MappingProxyType({})
    """Parameters that lie in host memory, or in :attr:`in_files`, while a GPU computes, by name: chosen before the model leaves the meta
    device, and brought there block by block."""

    @property
    @abstractmethod
    def blocks(self) -> Sequence[nn.Module]:
        """The repeated transformer blocks, in order: the units of sharding, recomputation and compilation."""

    @abstractmethod
    def forward(
        self, ids_BL: Tensor, *, positions_BL: Tensor | None = None, segments_BL: Tensor | None = None, readout: Readout | None = None
    ) -> Tensor:
        """Logits ``[B, L, V]`` of the token ids, or what ``readout`` makes of the last hidden states.

        The readout runs inside forward, where sharding has gathered the head's weights.

        Args:
            positions_BL: position of each token; where None, those of :func:`positions`.
            segments_BL: int64; which document a token belongs to, for rows that hold several or padding (0): no token attends to
                another document's, and padding counts for nothing. None where every row is one document.
        """

    def init(self, name: str) -> Init:
        """How the parameter called ``name`` begins. Here: matrices normal, biases at zero, what norms multiply with at one."""
        if self.get_parameter(name).dim() > 1:
            return Init(std=_USUAL_STD)
        return Init() if name.endswith("bias") else Init(value=1.0)

    @abstractmethod
    def flops_per_token(self, sequence_length: int) -> float:
        """Floating-point operations of forward and backward per token; the docstring gives the formula."""

    def undecayed(self) -> frozenset[str]:
        """Names of the parameters that weight decay must leave alone: norms, biases and embeddings, also where one serves as head."""
        tables = {id(module.weight) for module in self.modules() if isinstance(module, nn.Embedding)}
        return frozenset(name for name, p in self.named_parameters() if p.dim() < 2 or id(p) in tables)

    @abstractmethod
    def hf_config(self) -> dict[str, Any]:
        """What goes into ``config.json`` so that transformers loads the checkpoint."""

    def hf_config_of(self, blocks: Sequence[int]) -> dict[str, Any]:
        """:meth:`hf_config` of a model of these blocks alone, by their numbers, in order. Raises UserError where there is no such model."""
        raise UserError(f"--layers: {type(self).__name__} has no config.json of fewer blocks; leave --layers out")

    @property
    @abstractmethod
    def kv_shapes(self) -> Sequence[KVShape]:
        """What each block keeps of a token for generation."""

    @property
    def own_embedding(self) -> nn.Module | None:
        """The embedding, where forward calls it once and nothing else uses its weights: a unit of sharding, as blocks are."""
        return None

    @property
    def own_head(self) -> nn.Module | None:
        """The output head, where nothing else uses its weights, and forward does so within :attr:`around_head` only: another unit."""
        return None

    around_head: Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor] = staticmethod(lambda x_BLD, out: out(x_BLD))
    """Makes what forward returns of the last hidden states, by a function that uses the head; sharding gathers the head meanwhile."""

    def hf_tensors(self, name: str) -> Sequence[HFTensor]:
        """The tensors of a Hugging Face checkpoint that together are the parameter called ``name``."""
        return (HFTensor(name),)

    def tensor_plan(self) -> TensorPlan | None:
        """How layers divide between ranks; None where nobody has said."""
        return None

    def whole_tensor_plan(self) -> TensorPlan | None:
        """:meth:`tensor_plan`, and what adapters add to it."""
        plan = self.tensor_plan()
        return plan if plan is None or self.adapters is None else replace(plan, split={**plan.split, **self.adapters.split})

    def whole_undecayed(self) -> frozenset[str]:
        """:meth:`undecayed`, and what adapters add to it."""
        return self.undecayed() if self.adapters is None else self.undecayed() | self.adapters.undecayed

    def add_prompt(self, tokens: int) -> str:
        """Give it virtual tokens, which stand before every sequence: the name of a parameter ``[tokens, D]`` that it has from now on.
        Logits remain those of the sequence's own tokens.

        Raises:
            UserError: it takes none.
        """
        raise UserError("peft: this model takes no virtual tokens; use a model of fw's own, or another peft")

    def add_prefix(self, tokens: int) -> str:
        """Give it keys and values of virtual tokens in every block, which every token of a sequence sees: the name of a parameter
        ``[tokens, 2 · blocks · K · H]`` that it has from now on, of each block the keys and then the values. They are no part of rows.

        Raises:
            UserError: it takes none.
        """
        raise UserError("peft: this model takes no virtual tokens; use a model of fw's own, or another peft")

    def widths(self) -> Mapping[str, Width]:
        """What can be left out of blocks, by a word for it; ``features`` of the feed-forward network and ``heads`` are known words."""
        return {}

    def rescalings(self, block: int) -> Sequence[Rescaling]:
        """What of a block can be rescaled without changing what the model computes."""
        return ()

    def whole_sequences_because(self) -> str:
        """Why ranks cannot each take some positions of a sequence, as a clause; empty where they can, the attention plugin seeing to it."""
        return "its attention is not a plugin's"

    over_ranks: Callable[[Tensor], Tensor] = staticmethod(lambda x: x)
    """Adds up a tensor over the ranks that divide sequences, for what a model computes over all positions; they see to it."""

    hf_prefix: ClassVar[str] = ""
    """What :meth:`hf_tensors` put before most names, and some published files leave out (``transformer.`` of GPT-2)."""

    def hf_repeated(self) -> Mapping[str, str]:
        """Names that a file may hold besides, with the tensor each must repeat: a tied head. Never written."""
        return {}

    def hf_module_name(self, name: str) -> str:
        """What transformers' own model calls what files call ``name``, where it renames what it reads; it writes adapters so."""
        return name

    def hf_superfluous(self, name: str) -> bool:
        """Whether a file may hold ``name`` besides, since it can be computed from the configuration (masks, rotary frequencies)."""
        return False

    def active_parameters(self) -> int:
        """Parameters that take part in computing one token; all but the experts a token is not sent to."""
        return sum(p.numel() for p in self.parameters())

    def materialise(self, device: torch.device) -> None:
        """Leave the meta device: storage for every buffer and parameter on ``device``, whose values come afterwards; parameters in files
        are there, and so are those that lie elsewhere."""

        def storage(tensor: Tensor) -> Tensor:
            if type(tensor) not in (Tensor, nn.Parameter) or not torch.ops.aten.is_non_overlapping_and_dense(tensor):
                return torch.empty_like(tensor, device=device)
            # For the same of one on the meta device torch imports what it says of operators in Python: half a second.
            return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)

        with left_out(self, {**self.in_files, **self.elsewhere}):
            self._apply(storage)
        for name, make in ({} if self.adapters is None else self.adapters.fixed).items():
            self.get_buffer(name).copy_(make())

    def stored(self) -> dict[str, Tensor]:
        """What has a value to keep, by the model's own names: parameters, those of adapters too, and buffers that training may change."""
        return {**dict(self.named_parameters()), **self.elsewhere}

    def base(self) -> dict[str, Tensor]:
        """Of :meth:`stored`, what the model has without adapters; for what is quantized, the weight itself, without storage."""
        added = self.adapters.added if self.adapters is not None else {}
        codes = {name for weight in self.quantized.values() for name in weight.kept}
        found = {name: tensor for name, tensor in self.stored().items() if name not in added and name not in codes}
        return found | {name: torch.empty(w.shape, dtype=w.dtype, device="meta") for name, w in self.quantized.items()}


class ModelPlugin(Plugin):
    """Builds the model and reads its Hugging Face configuration."""

    kind: ClassVar[str] = "model"
    hf_model_types: ClassVar[tuple[str, ...]] = ()
    """``model_type`` of the config.json files this plugin reads; a literal, since it is looked up without importing the plugin."""

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], changes: Mapping[str, Any]) -> ModelPlugin:
        """The plugin configured as a ``config.json`` says, with changes to its fields, spelt as they may be there.

        Raises:
            UserError: a field that cannot be honoured, by name.
        """
        raise NotImplementedError(f"{cls.__name__} reads no config.json")

    @property
    def weights(self) -> Path | None:
        """The model directory that training begins from; None for initial values."""
        return None

    @property
    @abstractmethod
    def vocab_size(self) -> int | None:
        """Rows of the embedding, or None to take the tokenizer's."""

    @abstractmethod
    def build(self, vocab_size: int, sequence_length: int, attention: AttentionPlugin) -> CausalLM:
        """The model. Called under ``torch.device("meta")``, on every rank; must not read files or depend on the rank.

        Args:
            sequence_length: what the run trains with, for a model that claims no longest context of its own.
        """
