"""precision phased: which dtypes hold at a step, and what is refused."""

from __future__ import annotations

import warnings

import pytest
import torch

from fw.config import load
from fw.errors import UserError
from fw.recipe import resolve
from fw_plugins.activation.auto import _Chooser
from fw_plugins.precision.phased import PhaseConfig, Phased, PhasedConfig
from fw_plugins.sharding import fsdp_dtypes

THREE = [PhaseConfig(0, "fp32"), PhaseConfig(3, "bf16"), PhaseConfig(7, "fp32")]


def test_the_dtype_is_a_function_of_the_step():
    plugin = Phased(PhasedConfig(phases=THREE, accumulate="bf16"))
    dtypes = [plugin.policy_at(step).compute for step in range(9)]
    assert dtypes == [torch.float32] * 3 + [torch.bfloat16] * 4 + [torch.float32] * 2
    assert plugin.policy() == plugin.policy_at(0)
    assert {(p.policy.parameters, p.policy.reduce, p.policy.accumulate) for p in plugin.phases()} == {
        (torch.float32, torch.float32, torch.bfloat16)
    }


def test_a_config_lists_phases(workspace):
    recipe = resolve(load("tiny.yaml", ["precision={name: phased, phases: [{compute: bf16}, {from_step: 5, compute: fp32}]}"]))
    assert recipe.precision.config.phases == [PhaseConfig(0, "bf16"), PhaseConfig(5, "fp32")]
    assert recipe.tree["precision"]["phases"] == [{"from_step": 0, "compute": "bf16"}, {"from_step": 5, "compute": "fp32"}]


@pytest.mark.parametrize(
    ("phases", "said"),
    [
        ("[]", "precision.phases: empty"),
        ("[{from_step: 2}]", "they begin at 2; the first must begin at 0"),
        ("[{from_step: 0}, {from_step: 0}]", "they begin at 0, 0; the first must begin at 0, each after the last"),
        ("[{from_step: 0, compute: fp8}]", "precision.phases.0.compute: invalid value 'fp8', expected one of"),
        ("[{from_step: 0, compyte: fp32}]", "unknown key 'compyte' in 'precision.phases.0'; did you mean 'compute'"),
        ("[{from_step: soon}]", "precision.phases.0.from_step: 'soon' is not of type int"),
        ("[bf16]", r"precision.phases: \['bf16'\] is not of type"),
    ],
)
def test_what_is_no_list_of_phases_is_refused(workspace, phases, said):
    with pytest.raises(UserError, match=said):
        resolve(load("tiny.yaml", [f"precision={{name: phased, phases: {phases}}}"]))


def test_autocast_knows_no_fp32():
    """Why single and ddp compute in fp32 from parameters in fp32 only."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autocast("cpu", dtype=torch.float32):
            x = torch.ones(2, 2, dtype=torch.bfloat16)
            assert (x @ x).dtype == torch.bfloat16


def test_another_fsdp_is_refused_before_ranks_start(monkeypatch):
    """torch has no public way to change FSDP2's dtypes; what fw needs of its inside is looked for."""
    fsdp_dtypes.check()
    monkeypatch.delattr("torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._init_mp_dtypes")
    with pytest.raises(UserError, match="FSDP2 of this torch does not let dtypes change between steps; use sharding=ddp"):
        fsdp_dtypes.check()


def test_a_chooser_observes_anew_what_is_computed_otherwise():
    """The budget holds three activations in 16 bits, and then has to do for fp32."""
    blocks = [torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32)) for _ in range(2)]
    x = torch.randn(64, 32)
    chooser = _Chooser(3 * x.nbytes, len(blocks))
    forwards = [chooser.chosen(number, block, block.forward) for number, block in enumerate(blocks)]

    def bytes_kept(dtype: torch.dtype) -> int:
        saved: dict[int, int] = {}
        y = x.to(dtype).requires_grad_()
        own = {p.untyped_storage()._cdata for block in blocks for p in block.parameters()}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            if (name := tensor.untyped_storage()._cdata) not in own:
                saved[name] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            for forward in forwards:
                y = forward(y)
        return sum(saved.values())

    for block in blocks:
        block.to(torch.bfloat16)
    bytes_kept(torch.bfloat16)
    assert bytes_kept(torch.bfloat16) <= 3 * x.nbytes
    for block in blocks:
        block.to(torch.float32)
    chooser.forget()
    bytes_kept(torch.float32)
    assert 0 < bytes_kept(torch.float32) <= 3 * x.nbytes
    assert len(chooser._profiles) == 2 and all(p is not None and p.input_bytes == x.nbytes for p in chooser._profiles)
