"""FSDP2's dtypes, and how they change between two steps, for which torch has no public way.

A parameter group reads its policy once, before its first gather; gathered parameters are made once, in that policy's dtype, and only lose
and get back their storage afterwards. Where nothing is gathered and no gradient is there, both can be made anew. The attributes that this
needs are looked for before ranks start.
"""

from __future__ import annotations

import importlib

from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from fw.api import PrecisionPolicy, UserError


def mixed_precision(policy: PrecisionPolicy) -> MixedPrecisionPolicy:
    """What FSDP2 is told of dtypes; nothing where all are the parameters'."""
    if policy.compute == policy.parameters == policy.reduce:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=policy.compute, reduce_dtype=policy.reduce)


def check() -> None:
    """Refuse a torch whose FSDP2 is made otherwise.

    Raises:
        UserError: with what would work.
    """
    try:
        inside = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_param_group")
        known = hasattr(inside.FSDPParamGroup, "_init_mp_dtypes") and hasattr(inside.FSDPParam, "init_unsharded_param")
    except (ImportError, AttributeError):
        known = False
    if not known:
        raise UserError("precision.phases: FSDP2 of this torch does not let dtypes change between steps; use sharding=ddp or another torch")


def change(model: nn.Module, policy: PrecisionPolicy) -> None:
    """Gather, compute and reduce by ``policy`` from the next forward on. Between two steps; on every rank alike."""
    dtypes = mixed_precision(policy)
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        module.reshard()
    for module in modules:
        state = module._get_fsdp_state()
        state._mp_policy = dtypes
        groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]  # torch 2.11 has one
        for group in filter(None, groups):
            group.mp_policy = dtypes
            for parameter in group.fsdp_params:
                assert parameter.unsharded_accumulated_grad is None
                parameter.mp_policy = dtypes
                parameter.all_gather_outputs = []
                vars(parameter).pop("_unsharded_param", None)
            group._init_mp_dtypes()
