"""What the doctor says of GPUs."""

from __future__ import annotations

import pytest
import torch

from fw.doctor import hardware

pytestmark = pytest.mark.gpu


def test_gpus_are_told_with_what_they_compute_in():
    found = [finding for finding in hardware.gpus() if finding.state == "ok"]
    assert len(found) == torch.cuda.device_count() and all("GiB free, compute" in finding.text for finding in found)
