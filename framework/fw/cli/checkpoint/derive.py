"""Actions that make a step or a model directory out of what others have written."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any


def add_actions(actions: Any) -> None:
    """``convert`` and ``merge``."""
    convert = actions.add_parser("convert", help="write a step directory from a checkpoint directory of DeepSpeed's (ZeRO 0 to 3)")
    convert.add_argument("source", metavar="DEEPSPEED_DIR", help="what engine.save_checkpoint wrote, or one global_step directory in it")
    convert.add_argument("--to", metavar="DIR", required=True, help="directory to make; it must not exist, or be empty")
    convert.add_argument("--model", metavar="MODEL_DIR", help="model directory that gives configuration and tokenizer")
    convert.add_argument("--like", metavar="STEP_DIR", help="step or run directory of the fw run that is to go on from it with resume")
    convert.add_argument("--tag", metavar="TAG", help="which checkpoint of the directory; what its file latest says if not given")
    convert.set_defaults(act=_convert)
    merge = actions.add_parser("merge", help="write a model directory from a base and a LoRA adapter of peft's")
    merge.add_argument("base", metavar="BASE", help="model directory, step directory or run directory")
    merge.add_argument("adapter", metavar="ADAPTER", help="directory of adapter_config.json and adapter_model.safetensors")
    merge.add_argument("--to", metavar="DIR", required=True, help="directory to make; it must not exist, or be empty")
    merge.add_argument("--dtype", metavar="DTYPE", help="bf16, fp16 or fp32; the base's if not given")
    merge.set_defaults(act=_merge)
    for action in (convert, merge):
        action.add_argument("--json", action="store_true", help="print JSON")


def _merge(options: argparse.Namespace) -> int:
    from fw.pretrained.merge import merge

    changed = merge(options.base, options.adapter, options.to, options.dtype)
    if options.json:
        print(json.dumps({"directory": options.to, "changed": changed}, indent=1))
        return 0
    print(f"{options.to}: {changed:,} tensors of {options.base} changed")
    return 0


def _convert(options: argparse.Namespace) -> int:
    from fw.pretrained.convert import convert

    made = convert(Path(options.source), Path(options.to), options.model, options.like, options.tag)
    if options.json:
        print(json.dumps({"directory": options.to, **dataclasses.asdict(made)}, indent=1))
        return 0
    print(f"{options.to}: step {made.step:,} of ZeRO stage {made.stage} on {made.ranks} rank(s), {made.weights:,} weights in fp32,")
    print(f"  {made.states:,} tensors of the optimizer")
    if made.resumable:
        print(f"  go on from it with resume={options.to}")
    else:
        print(
            f"  weights for model: {{name: …, weights: {options.to}}} or transformers; the optimizer is kept, but resume"
            " needs a run's state: --like STEP_DIR gives it"
        )
    for note in made.notes:
        print(f"  note: {note}")
    return 0
