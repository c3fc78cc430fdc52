"""What oneDNN lays out for products: on processors without such products, and beside somebody's profiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from fw.planning import products

THERE = """
import json, torch
from fw.planning import products
taken = []
for shapes in (((1024, 512), (512, 1024)), ((3, 768, 256), (3, 256, 768))):
    a, b = (torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes)
    of = [(tuple(x.shape), tuple(x.stride())) for x in (a, b)]
    taken += [(products.packed([a, b], torch.bfloat16, threads), products.measured(*of, torch.bfloat16, threads)) for threads in (1, 2)]
print(json.dumps(taken))
"""


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="oneDNN takes 16 bits with AVX-512 alone")
def test_where_a_processor_has_no_such_products_sums_in_fp32_are_known_without_computing() -> None:
    env = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "FW_TESTS_COLD": "1"}
    done = subprocess.run([sys.executable, "-c", THERE], env=env, capture_output=True, text=True, check=True)
    taken = json.loads(done.stdout.splitlines()[-1])
    assert len(taken) == 4
    for (known,), measured in taken:
        assert known == pytest.approx(measured, abs=1024) and known >= 4 * 768 * 768


@pytest.mark.skipif(not products.multiplies(torch.bfloat16), reason="no products in bf16")
def test_a_profiler_that_is_at_work_goes_on() -> None:
    given = [torch.ones(64, 777).bfloat16(), torch.ones(777, 96).bfloat16()]
    products._found_out.cache_clear()
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        torch.ones(3) + 1
        found = products.packed(given, torch.bfloat16, 2)
        torch.ones(3) * 2
    seen = {event.key for event in recorded.key_averages()}
    assert {"aten::add", "aten::mul"} <= seen and "aten::mm" not in seen
    products._found_out.cache_clear()
    assert found == products.packed(given, torch.bfloat16, 2) != []
