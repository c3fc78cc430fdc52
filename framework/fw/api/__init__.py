"""What plugins may use of fw: contracts of all kinds, and what goes with them. Nothing else is promised to stay.

A name stays for as long as the versions of the contracts that the core speaks (``api`` of a plugin); one that is to go warns first, for
two minor versions. Beside what is here, kinds that touch much of the core have a part of their own: :mod:`fw.api.checkpointing`,
:mod:`fw.api.launching` and :mod:`fw.api.kernels`. Importing this imports nothing: a name brings in what it needs when it is asked for, so
that a launcher, or ``fw plugins list``, does without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fw.bars import Bar as Bar
    from fw.caches import cache_dir as cache_dir
    from fw.checkpointing.placement import local_part as local_part
    from fw.checkpointing.weights_digest import weights_digest as weights_digest
    from fw.config import LaunchSection as LaunchSection, format_size as format_size, parse_size as parse_size
    from fw.errors import (
        EXIT_FAILED as EXIT_FAILED,
        EXIT_INTERRUPTED as EXIT_INTERRUPTED,
        EXIT_OK as EXIT_OK,
        EXIT_REQUEUE as EXIT_REQUEUE,
        EXIT_USER as EXIT_USER,
        FwError as FwError,
        RunError as RunError,
        UserError as UserError,
        describe as describe,
        did_you_mean as did_you_mean,
    )
    from fw.kinds import make as make, plugin_class as plugin_class
    from fw.kinds.activation import ActivationPlugin as ActivationPlugin, repeating as repeating, repeats as repeats
    from fw.kinds.attention import AttentionPlugin as AttentionPlugin, Pattern as Pattern
    from fw.kinds.checkpoint import (
        Beat as Beat,
        CheckpointOptions as CheckpointOptions,
        CheckpointPlugin as CheckpointPlugin,
        Kept as Kept,
        NewerFormatError as NewerFormatError,
        Part as Part,
        Piece as Piece,
        Ranks as Ranks,
        Reader as Reader,
        Region as Region,
        Snapshot as Snapshot,
        Writes as Writes,
        adapter_parts as adapter_parts,
        parts as parts,
    )
    from fw.kinds.data import (
        CUT_OFF as CUT_OFF,
        IGNORED as IGNORED,
        Corpus as Corpus,
        DataPlugin as DataPlugin,
        Rows as Rows,
        Sample as Sample,
        Samples as Samples,
        Say as Say,
        VaryingSamples as VaryingSamples,
    )
    from fw.kinds.kv_cache import (
        KVCache as KVCache,
        KVCachePlugin as KVCachePlugin,
        KVNeeds as KVNeeds,
        Places as Places,
        Stretch as Stretch,
    )
    from fw.kinds.launcher import LauncherPlugin as LauncherPlugin, Prepare as Prepare, Submitted as Submitted
    from fw.kinds.logger import COLUMNS as COLUMNS, LoggerPlugin as LoggerPlugin
    from fw.kinds.model import (
        Adapters as Adapters,
        CausalLM as CausalLM,
        FromBase as FromBase,
        Give as Give,
        Head as Head,
        HFTensor as HFTensor,
        Init as Init,
        KVShape as KVShape,
        LinearHead as LinearHead,
        ModelPlugin as ModelPlugin,
        NormsOf as NormsOf,
        Quantized as Quantized,
        Readout as Readout,
        Rescaling as Rescaling,
        Width as Width,
        positions as positions,
    )
    from fw.kinds.objective import Beside as Beside, ObjectivePlugin as ObjectivePlugin
    from fw.kinds.offload import OffloadPlugin as OffloadPlugin, OffloadPolicy as OffloadPolicy, Tier as Tier
    from fw.kinds.optimizer import OptimizerOptions as OptimizerOptions, OptimizerPlugin as OptimizerPlugin, OptimizerSpec as OptimizerSpec
    from fw.kinds.peft import (
        LowRank as LowRank,
        LowRankChange as LowRankChange,
        PeftPlugin as PeftPlugin,
        adapters_are_off as adapters_are_off,
        without_adapters as without_adapters,
    )
    from fw.kinds.precision import (
        LossScaling as LossScaling,
        Phase as Phase,
        PrecisionPlugin as PrecisionPlugin,
        PrecisionPolicy as PrecisionPolicy,
    )
    from fw.kinds.quantization import (
        QuantizationPlugin as QuantizationPlugin,
        StoredWeight as StoredWeight,
        reading_codes as reading_codes,
    )
    from fw.kinds.schedule import Decay as Decay, SchedulePlugin as SchedulePlugin, Warmup as Warmup
    from fw.kinds.sharding import (
        CONTEXT as CONTEXT,
        REPLICATE as REPLICATE,
        SHARD as SHARD,
        TENSOR as TENSOR,
        KeptTensors as KeptTensors,
        ShardingPlugin as ShardingPlugin,
        Stepper as Stepper,
        StepResult as StepResult,
        StepSpec as StepSpec,
    )
    from fw.kinds.tensor_plan import TensorPlan as TensorPlan, fits as fits, given as given, plan_for as plan_for
    from fw.launching.cores import usable_cores as usable_cores
    from fw.locate import ADAPTER_CONFIG as ADAPTER_CONFIG, find as find
    from fw.meter.operator_flops import operator_flops as operator_flops
    from fw.meter.transfers import FROM_DISK as FROM_DISK, TO_DISK as TO_DISK, disk_transfer as disk_transfer
    from fw.open_files import allow_open_files as allow_open_files
    from fw.place import Place as Place
    from fw.planned import (
        capability_of as capability_of,
        gpu_capability as gpu_capability,
        is_gpu as is_gpu,
        on_gpu as on_gpu,
        planned_gpu as planned_gpu,
        update_alone as update_alone,
    )
    from fw.pretrained import plugin_for as plugin_for, read_config as read_config
    from fw.pretrained.directory import read_adapter_config as read_adapter_config
    from fw.registry import (
        Apis as Apis,
        Conflicts as Conflicts,
        NoOptions as NoOptions,
        Plugin as Plugin,
        Requires as Requires,
        register as register,
    )
    from fw.tokenizer import Tokenizer as Tokenizer, load_tokenizer as load_tokenizer, on_day as on_day

_NAMES = {
    "fw.checkpointing.placement": "local_part",
    "fw.checkpointing.weights_digest": "weights_digest",
    "fw.config": "LaunchSection format_size parse_size",
    "fw.caches": "cache_dir",
    "fw.errors": "EXIT_FAILED EXIT_INTERRUPTED EXIT_OK EXIT_REQUEUE EXIT_USER FwError RunError UserError describe did_you_mean",
    "fw.bars": "Bar",
    "fw.kinds": "make plugin_class",
    "fw.kinds.activation": "ActivationPlugin repeating repeats",
    "fw.kinds.attention": "AttentionPlugin Pattern",
    "fw.kinds.checkpoint": (
        "Beat CheckpointOptions CheckpointPlugin Kept NewerFormatError Part Piece Ranks Reader Region Snapshot Writes adapter_parts parts"
    ),
    "fw.kinds.data": "CUT_OFF IGNORED Corpus DataPlugin Rows Sample Samples Say VaryingSamples",
    "fw.kinds.kv_cache": "KVCache KVCachePlugin KVNeeds Places Stretch",
    "fw.kinds.launcher": "LauncherPlugin Prepare Submitted",
    "fw.kinds.logger": "COLUMNS LoggerPlugin",
    "fw.kinds.model": (
        "Adapters CausalLM FromBase Give HFTensor Head Init KVShape LinearHead ModelPlugin NormsOf Quantized Readout Rescaling Width"
        " positions"
    ),
    "fw.kinds.objective": "Beside ObjectivePlugin",
    "fw.kinds.offload": "OffloadPlugin OffloadPolicy Tier",
    "fw.kinds.optimizer": "OptimizerOptions OptimizerPlugin OptimizerSpec",
    "fw.kinds.peft": "LowRank LowRankChange PeftPlugin adapters_are_off without_adapters",
    "fw.kinds.precision": "LossScaling Phase PrecisionPlugin PrecisionPolicy",
    "fw.kinds.quantization": "QuantizationPlugin StoredWeight reading_codes",
    "fw.kinds.schedule": "Decay SchedulePlugin Warmup",
    "fw.kinds.sharding": "CONTEXT REPLICATE SHARD TENSOR KeptTensors ShardingPlugin StepResult StepSpec Stepper",
    "fw.kinds.tensor_plan": "TensorPlan fits given plan_for",
    "fw.launching.cores": "usable_cores",
    "fw.locate": "ADAPTER_CONFIG find",
    "fw.meter.operator_flops": "operator_flops",
    "fw.planned": "capability_of gpu_capability is_gpu on_gpu planned_gpu update_alone",
    "fw.meter.transfers": "FROM_DISK TO_DISK disk_transfer",
    "fw.open_files": "allow_open_files",
    "fw.place": "Place",
    "fw.pretrained": "plugin_for read_config",
    "fw.pretrained.directory": "read_adapter_config",
    "fw.registry": "Apis Conflicts NoOptions Plugin Requires register",
    "fw.tokenizer": "Tokenizer load_tokenizer on_day",
}
_FROM = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_FROM)


def __getattr__(name: str) -> Any:
    if name in _FROM:
        return getattr(importlib.import_module(_FROM[name]), name)
    raise AttributeError(f"module 'fw.api' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
