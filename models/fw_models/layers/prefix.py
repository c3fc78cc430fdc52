"""Keys and values of virtual tokens before those of a sequence (Li and Liang 2021, https://arxiv.org/abs/2101.00190)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fw.api import AttentionPlugin, KVShape, UserError


class Prefixed(NamedTuple):
    """In place of an attention plugin's plan: that of P positions more, and a block's keys and values for these."""

    plan: Any
    k_KPH: Tensor
    v_KPH: Tensor


def prefix_width(shapes: Sequence[KVShape]) -> int:
    """Numbers that a virtual token has in all blocks.

    Raises:
        UserError: blocks differ, so that no file of peft's can hold them.
    """
    if len({(shape.heads, shape.head_dim) for shape in shapes}) > 1:
        raise UserError("peft: keys and values of a prefix are as large in every block, and this model's blocks differ; use another peft")
    return 2 * len(shapes) * shapes[0].heads * shapes[0].head_dim


def by_block(prefix_PE: Tensor, head_dim: int, blocks: int) -> list[tuple[Tensor, Tensor]]:
    """Keys and values ``[K, P, H]`` of each block, as peft lays them out in ``[P, 2 · blocks · K · H]``."""
    each_SPKH = prefix_PE.unflatten(1, (2 * blocks, -1, head_dim)).permute(1, 2, 0, 3)
    return list(zip(each_SPKH[::2], each_SPKH[1::2], strict=True))


def segments_with(tokens: int, segments_BL: Tensor | None) -> Tensor | None:
    """Virtual tokens belong to the document that each row begins with."""
    return None if segments_BL is None else torch.cat([segments_BL[:, :1].expand(-1, tokens), segments_BL], 1)


def attend(attention: AttentionPlugin, q_BNLH: Tensor, k_BKLH: Tensor, v_BKLH: Tensor, plan: Any, **how: Any) -> Tensor:
    """By the plugin; with a prefix where ``plan`` has one.

    Plugins know as many queries as keys: virtual tokens have queries of zeros, whose results nobody takes.
    """
    if not isinstance(plan, Prefixed):
        return attention.attend(q_BNLH, k_BKLH, v_BKLH, plan, **how)
    tokens = plan.k_KPH.shape[1]
    k_BKLH, v_BKLH = (
        torch.cat([of_KPH.to(own.dtype).expand(len(own), -1, -1, -1), own], 2)
        for of_KPH, own in ((plan.k_KPH, k_BKLH), (plan.v_KPH, v_BKLH))
    )
    return attention.attend(F.pad(q_BNLH, (0, 0, tokens, 0)), k_BKLH, v_BKLH, plan.plan, **how)[:, :, tokens:]
