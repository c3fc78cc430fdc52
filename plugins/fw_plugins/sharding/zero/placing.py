"""A model from the meta device into DeepSpeed's hands: never more than one whole parameter at a time in stage 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fw.api import CausalLM, Give
from fw_plugins.sharding.zero import engine


def partition(model: CausalLM, package: Any, config: dict[str, Any], device: torch.device) -> None:
    """Replace each parameter by one of which this rank keeps its part, and give buffers their values.

    The parameters' own values come later, into the master weights; what is partitioned here is storage without values.

    Args:
        model: on the meta device, in the compute dtype.
        package: deepspeed.
        config: its JSON.
    """
    # By the config's word on dtypes: one that is given counts for nothing on processors without float16 (deepspeed 0.19.8).
    init = package.zero.Init(config_dict_or_path=config)
    engine.by_parameter(init)
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in made:
                made[id(parameter)] = _partitioned(parameter, init, device)
            module._parameters[name] = made[id(parameter)]
    model.materialise(device)  # of parameters only their empty shells are left; buffers


def _partitioned(parameter: nn.Parameter, init: Any, device: torch.device) -> nn.Parameter:
    whole: Any = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device=device), parameter.requires_grad)
    init._convert_to_deepspeed_param(whole)
    whole.partition()
    partitioned: nn.Parameter = whole
    return partitioned


@torch.no_grad()
def fill_frozen(frozen: Mapping[str, tuple[Any, torch.Size]], give: Give) -> None:
    """Values for parameters that do not train, given with the shapes of the whole: in stage 3 the pieces that this rank keeps."""
    give({name: parameter.data for name, (parameter, _) in frozen.items() if not hasattr(parameter, "ds_tensor")})
    for name, (parameter, shape) in frozen.items():
        if not hasattr(parameter, "ds_tensor"):
            continue
        kept = parameter.ds_tensor
        whole = torch.empty(shape, dtype=kept.dtype, device=kept.device)
        give({name: whole})
        start = parameter.ds_zero_partition_rank * parameter.partition_numel()
        own = whole.view(-1)[start : start + kept.numel()]
        kept.data.zero_()
        kept.data[: own.numel()].copy_(own)
