"""How torch's threads wait for their next piece of work."""

from __future__ import annotations

import os

from fw.kernels.switches import KERNELS, TRAINING_KERNELS, turned_off


def wait_asleep() -> None:
    """Let them sleep between pieces where kernels of fw's own train, unless the environment says how.
    To be called before torch is imported, which reads it then.

    By default they look out for work for milliseconds, on processors that kernels of fw's own, and other processes, could use meanwhile:
    a step of training takes 7 % longer so on two cores (docs/performance.md).
    """
    if not turned_off(TRAINING_KERNELS) and not turned_off(KERNELS):
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
