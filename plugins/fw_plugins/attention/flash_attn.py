"""The package flash-attn."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

from fw.api import AttentionPlugin, Pattern, UserError, describe, planned_gpu
from fw_models.layers import Attention

if TYPE_CHECKING:
    from fw.api import CausalLM, StepSpec

_OLDEST, _MOST_HEAD_DIM, _AMPERE = (2, 7), 256, (8, 0)


@dataclass
class FlashAttentionConfig:
    """How the kernels compute."""

    deterministic: bool = False
    """Backward adds up in a fixed order, so that a run repeats to the bit. Slower, and the gradient of the queries is held in fp32 several
    times over: 4 bytes an element, times what it takes to fill the device."""


class _Plan(NamedTuple):
    """Documents lie one after another: of each row, whose first position is number row · L of all.

    Attributes:
        window: positions seen, the own one included; None for all before.
        offsets: int32 ``[documents + 1]``, where each begins, and the end of the last; None where a row is one document.
        longest: positions of the longest document.
    """

    window: int | None
    offsets: Tensor | None = None
    longest: int = 0


class FlashAttention(AttentionPlugin):
    """The package flash-attn (https://arxiv.org/abs/2307.08691): no scores and no mask in memory, windows, documents and caps included."""

    api = 1
    Config = FlashAttentionConfig
    config: FlashAttentionConfig
    packages: ClassVar[dict[str, str]] = {"flash_attn": "flash-attn>=2.7,<3"}
    otherwise: ClassVar[str] = "with --no-build-isolation, on a machine with CUDA; or use attention=sdpa"

    @property
    def differs_because(self) -> str:
        """Unless it was asked not to."""
        return "" if self.config.deterministic else "its backward adds up in any order; set attention.deterministic=true"

    def check(self, model: CausalLM, spec: StepSpec) -> None:
        """What the kernels do not do is known before the run; of the device only where there is one here."""
        compute = spec.precision.compute
        widest = max(block.head_dim for block in model.kv_shapes)
        shapes = [module.shape for module in model.modules() if isinstance(module, Attention)]
        lacks = {
            "computes on GPUs only, and this run on the CPU": spec.device_type != "cuda",
            f"takes float16 and bfloat16 only, and this run computes in {str(compute).removeprefix('torch.')} (precision=bf16 would do)": (
                compute not in (torch.float16, torch.bfloat16)
            ),
            f"takes heads of {_MOST_HEAD_DIM} dimensions at most, and this model's have {widest}": widest > _MOST_HEAD_DIM,
            "drops no weights where scores are capped (model.attention_dropout=0 would do)": (
                any(shape.softcap is not None and shape.dropout > 0 for shape in shapes)
            ),
        }
        if spec.device_type == "cuda" and (gpu := _gpu()) is not None:
            name, capability = gpu
            lacks[f"needs an Ampere GPU or a newer one, and {name} has capability {capability[0]}.{capability[1]}"] = capability < _AMPERE
        for what, is_so in lacks.items():
            if is_so:
                raise UserError(f"attention.name: flash_attn {what}; use attention=sdpa")
        if spec.device_type == "cuda" and torch.cuda.is_available():
            _check_package()

    def plan(self, pattern: Pattern, device: torch.device) -> _Plan:
        """Where documents begin; to know how many there are, the host waits for the device once. A document's positions lie together."""
        window = None if pattern.window is None or pattern.window >= pattern.length else pattern.window
        if pattern.segments_BL is None:
            return _Plan(window)
        begins_BL = torch.ones_like(pattern.segments_BL, dtype=torch.bool, device=device)
        begins_BL[:, 1:] = pattern.segments_BL[:, 1:] != pattern.segments_BL[:, :-1]
        end = torch.full((1,), begins_BL.numel(), device=device)
        offsets = torch.cat((begins_BL.flatten().nonzero().flatten(), end)).to(torch.int32)
        return _Plan(window, offsets, int(offsets.diff().max()))

    def attend(
        self,
        q_BNLH: Tensor,
        k_BKLH: Tensor,
        v_BKLH: Tensor,
        plan: _Plan,
        *,
        scale: float,
        softcap: float | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        """As the contract says, in the dtype of autocast where that is on: to autocast the kernels are unknown."""
        from flash_attn import flash_attn_func, flash_attn_varlen_func

        device = q_BNLH.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else q_BNLH.dtype
        q_BLNH, k_BLKH, v_BLKH = (x.transpose(1, 2).to(dtype) for x in (q_BNLH, k_BKLH, v_BKLH))
        options = {
            "dropout_p": dropout,
            "softmax_scale": scale,
            "causal": True,
            "window_size": (-1, -1) if plan.window is None else (plan.window - 1, 0),  # both ends are seen
            "softcap": softcap or 0.0,
            "deterministic": self.config.deterministic,
        }
        if plan.offsets is None:
            out_BLNH: Tensor = flash_attn_func(q_BLNH, k_BLKH, v_BLKH, **options)
        else:
            offsets, longest = plan.offsets, plan.longest
            q_TNH, k_TKH, v_TKH = (x.flatten(0, 1) for x in (q_BLNH, k_BLKH, v_BLKH))
            out_TNH = flash_attn_varlen_func(q_TNH, k_TKH, v_TKH, offsets, offsets, longest, longest, **options)
            out_BLNH = out_TNH.unflatten(0, q_BLNH.shape[:2])
        return out_BLNH.transpose(1, 2)


def _gpu() -> tuple[str, tuple[int, int]] | None:
    """Name and compute capability of the one that is planned for, or is here; None where there is neither."""
    if (planned := planned_gpu()) is not None:
        return planned.name, planned.capability
    return (torch.cuda.get_device_name(), torch.cuda.get_device_capability()) if torch.cuda.is_available() else None


def _check_package() -> None:
    """A package that is there may have been built for another torch, or be too old for soft-capping and for torch's operators."""
    try:
        version: str = importlib.import_module("flash_attn").__version__
    except Exception as error:  # what it loads is compiled
        raise UserError(
            f"attention.name: flash-attn is installed and does not load ({describe(error)}); build it again for torch"
            f" {torch.__version__}, or use attention=sdpa"
        ) from error
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
        raise UserError(f"attention.name: flash-attn {version} is too old; the oldest that serves is 2.7; upgrade, or use attention=sdpa")
