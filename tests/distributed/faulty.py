"""An objective that fails on command: installed into a directory of its own, as a distribution that ``PYTHONPATH`` makes visible."""

from __future__ import annotations

import os
from pathlib import Path

from conftest import environment

METADATA = "Metadata-Version: 2.1\nName: faulty\nVersion: 1.0\n"
ENTRY_POINTS = "[fw.objective]\nfaulty = faulty_objective:Faulty\n"
MODULE = '''
"""What can go wrong on a rank."""
import ctypes
import os
import signal
import threading
from dataclasses import dataclass, field
from pathlib import Path

from fw.errors import UserError
from fw_plugins.objective.causal_lm import CausalLMObjective


@dataclass
class FaultyConfig(CausalLMObjective.Config):
    """The fault."""

    how: str = ""
    """kill, raise, user, lock or sleep, once; inf (the loss), module or gradient (of a module); glitch, once."""
    rank: int = 1
    """On which rank."""
    steps: list[int] = field(default_factory=lambda: [3] * 9)
    """In which step of the process, from 1: one for each attempt that fails; where values go wrong, all of them."""


class Faulty(CausalLMObjective):
    """The usual loss, and a fault."""

    Config = FaultyConfig
    tested_with = {"sharding": ("ddp",)}
    step = 0
    counting = False

    def count(self, batch):
        """The micro-batches of a step are all counted before the first is computed."""
        self.step += not self.counting
        self.counting = True
        return super().count(batch)

    def loss_sum(self, model, batch):
        self.counting = False
        config = self.config
        if config.how in ("inf", "module", "gradient", "glitch"):
            return self.spoilt(model, batch)
        failed = Path("failed")
        before = failed.read_text() if failed.exists() else ""
        if config.steps[len(before) :][:1] == [self.step] and int(os.environ.get("RANK", "0")) == config.rank:
            failed.write_text(before + "x")
            fail(config.how)
        return super().loss_sum(model, batch)


    def spoilt(self, model, batch):
        config, now = self.config, int(os.environ.get("RANK", "0")) == self.config.rank and model.training
        if not now or self.step not in config.steps:
            return super().loss_sum(model, batch)
        if config.how == "glitch":
            config.steps.remove(self.step)
        if config.how in ("inf", "glitch"):
            return super().loss_sum(model, batch) + float("inf")
        (module,) = [m for name, m in model.named_modules() if name.endswith("layers.1.mlp.down_proj")]

        def spoil(module, args, output):
            if config.how == "module":
                return output * float("inf")
            output.register_hook(lambda gradient: gradient * float("nan"))

        hook = module.register_forward_hook(spoil, prepend=True)
        try:
            return super().loss_sum(model, batch)
        finally:
            hook.remove()


def fail(how):
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raise":
        print("about to fail")
        raise ArithmeticError("a gremlin")
    if how == "user":
        raise UserError("the input is no good")
    if how == "lock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    if how == "sleep":
        ctypes.PyDLL(None).sleep(600)  # PyDLL keeps the GIL
'''


def installed(directory: Path) -> dict[str, str]:
    """Write the distribution; returns the environment of a process that sees it."""
    info = directory / "faulty-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(METADATA)
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    (directory / "faulty_objective.py").write_text(MODULE)
    env = environment()
    return {**env, "PYTHONPATH": os.pathsep.join([str(directory), env.get("PYTHONPATH", "")])}
