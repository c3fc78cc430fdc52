"""Tiers of memory: the same numbers as without, state where it should be, and refusals."""

from __future__ import annotations

import gc
import os
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from conftest import column, fw
from fw.errors import RunError, UserError
from fw.kinds.offload import OffloadPolicy
from fw.kinds.precision import PrecisionPolicy
from fw.kinds.sharding import StepSpec
from fw_plugins.offload import activations, disk_store
from fw_plugins.offload.activations import offload
from fw_plugins.offload.disk_store import DiskStore
from fw_plugins.offload.tiers import TiersConfig
from fw_plugins.optimizer.adamw import AdamW, AdamWConfig
from fw_plugins.optimizer.sgd import SGD, SGDConfig
from fw_plugins.sharding import offloaded, space
from fw_plugins.sharding.torch_stepper import TorchStepper
from fw_plugins.sharding.zero import disk
from plugins.test_stepper import batches, loss_of, model

FP32 = PrecisionPolicy(torch.float32, torch.float32, torch.float32)
OPTIMIZERS = {"adamw": AdamW(AdamWConfig(lr=1e-2)), "momentum": SGD(SGDConfig(lr=0.1, momentum=0.9))}


def policies(path: Path) -> list[OffloadPolicy]:
    return [
        OffloadPolicy(optimizer="cpu"),
        OffloadPolicy(optimizer="nvme", path=path),
        OffloadPolicy(optimizer="cpu", gradients="cpu"),
        OffloadPolicy(optimizer="nvme", gradients="cpu", path=path),
    ]


def trained(policy: OffloadPolicy, optimizer: str) -> TorchStepper:
    made = model()
    stepper = TorchStepper(made, StepSpec(FP32, policy, OPTIMIZERS[optimizer].spec(torch.device("cpu")), 0.5))
    for ids in batches(4):
        for part in ids.split(2):
            stepper.backward(loss_of(made, part) / 2)
        stepper.step(1.0)
    return stepper


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_on_the_host_or_on_disk_is_the_same_step(tmp_path, optimizer):
    plain = trained(OffloadPolicy(), optimizer)
    expected = plain.optimizer_tensors()
    for policy in policies(tmp_path):
        away = trained(policy, optimizer)
        for (name, a), (_, b) in zip(plain.parameters(), away.parameters(), strict=True):
            assert torch.equal(a, b), (policy, name)
        found = away.optimizer_tensors()
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    assert not list(tmp_path.iterdir()), "files on disk have no name, so that nothing is left behind"


class _Late:
    """A copy that is made when it is waited for, and no sooner."""

    def __init__(self, target: torch.Tensor, source: torch.Tensor, under_way: list[object]) -> None:
        self._target, self._source, self._under_way = target.fill_(torch.nan), source, under_way
        under_way.append(self)

    def synchronize(self) -> None:
        self._target.copy_(self._source)
        self._under_way.remove(self)


def test_gradients_on_their_way_are_waited_for_and_are_few(monkeypatch):
    plain = trained(OffloadPolicy(), "adamw")
    under_way: list[object] = []
    most = []

    def to_host(grad):
        copy = torch.empty_like(grad)
        late = _Late(copy, grad, under_way)
        most.append(len(under_way))
        return copy, late

    monkeypatch.setattr(offloaded, "_to_host", to_host)
    away = trained(OffloadPolicy(optimizer="cpu"), "adamw")
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(plain.parameters(), away.parameters(), strict=True))
    assert max(most) == 3 and not under_way, "the one that is next, and two behind it"


def mapped_bytes(path: Path) -> int:
    """Bytes of this process's mappings of files that were under ``path``."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if str(path) in line:
            low, high = (int(word, 16) for word in line.split()[0].split("-"))
            total += high - low
    return total


def test_state_on_disk_is_mapped_from_there(tmp_path):
    stepper = trained(OffloadPolicy(optimizer="nvme", path=tmp_path), "adamw")
    state = sum(tensor.nbytes for name, tensor in stepper.optimizer_tensors().items() if not name.endswith("/step"))
    assert state <= mapped_bytes(tmp_path) <= state + 2 * 4096 * len(list(stepper.parameters()))


def test_state_from_a_checkpoint_goes_back_to_disk(tmp_path):
    first = trained(OffloadPolicy(), "adamw")
    made = model()
    made.load_state_dict(first.module.state_dict())
    policy = OffloadPolicy(optimizer="nvme", path=tmp_path)
    second = TorchStepper(made, StepSpec(FP32, policy, OPTIMIZERS["adamw"].spec(torch.device("cpu")), 0.5))
    second.load_optimizer_tensors({name: tensor.clone() for name, tensor in first.optimizer_tensors().items()})
    for stepper in (first, second):
        stepper.backward(loss_of(stepper.module, batches(1)[0]))
        stepper.step(1.0)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(first.parameters(), second.parameters(), strict=True))
    assert mapped_bytes(tmp_path) > 0


def test_too_little_space_is_said_first(tmp_path, monkeypatch):
    policy = OffloadPolicy(optimizer="nvme", path=tmp_path)
    spec = StepSpec(FP32, policy, OPTIMIZERS["adamw"].spec(torch.device("cpu")), ranks_per_host=3)
    elements = sum(p.numel() for p in model().parameters())
    need = 3 * 8 * elements  # two moments in fp32, of every rank
    monkeypatch.setattr(space.shutil, "disk_usage", lambda path: SimpleNamespace(free=need))
    offloaded.check(spec, model(), parts=1, gathers=False)
    monkeypatch.setattr(space.shutil, "disk_usage", lambda path: SimpleNamespace(free=need - 1))
    with pytest.raises(UserError, match=r"and 3 ranks on this host would write .*; give a larger disk, or offload to cpu"):
        offloaded.check(spec, model(), parts=1, gathers=False)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("compiled", [False, True])
def test_activations_on_disk_leave_gradients_alone(tmp_path, compiled, ahead):
    plain, away = model(), model()
    stores = []

    class Counting(DiskStore):
        def __call__(self, tensor):
            stores.append(tensor.nbytes)
            return super().__call__(tensor)

    offload(away.blocks, Counting(tmp_path), 1024, ahead)
    for block in (*plain.blocks, *away.blocks) if compiled else ():
        block.compile(backend="aot_eager")
    ids = batches(1)[0]
    loss_of(plain, ids).backward()
    loss_of(away, ids).backward()
    for (name, a), b in zip(plain.named_parameters(), away.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name
    assert len(stores) > 10 and min(stores) >= 1024
    assert not list(tmp_path.iterdir())


def test_a_tensor_saved_twice_is_stored_once_and_parameters_never(tmp_path):
    stores = []

    class Counting(DiskStore):
        def __call__(self, tensor):
            stores.append(tensor)
            return super().__call__(tensor)

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 64, bias=False)

        def forward(self, x):
            return self.one(x) + self.two(x)

    block = Block()
    offload([block], Counting(tmp_path), 1, 1)
    block(torch.randn(8, 64, requires_grad=True)).sum().backward()
    assert len(stores) == 1 and stores[0].shape == (8, 64)


def test_a_full_disk_is_said(tmp_path):
    def full(*_):
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_store.os, "posix_fallocate", full)
        with pytest.raises(RunError, match="No space left on device while storing activations"):
            DiskStore(tmp_path)(torch.ones(4))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"optimizer": "nvme"}, "offload.optimizer: nvme needs offload.path"),
        ({"path": "x"}, "nothing is offloaded to nvme"),
        ({"activations_prefetch": -1}, "offload.activations_prefetch: -1 is below 0"),
        ({"activations_prefetch": 2}, "offload.activations_prefetch: activations stay on the device"),
        ({"activations_above": "1MiB"}, "offload.activations_above: activations stay on the device"),
    ],
)
def test_options_that_contradict_each_other(options, says):
    with pytest.raises(UserError, match=says):
        TiersConfig(**options)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["offload.params=cpu"], "needs sharding that brings parameters block by block from there; use fsdp, or zero with stage 3"),
        (["offload.params=nvme", "offload.path=x", "sharding=fsdp"], "zero with stage 3"),
        (["offload.params=cpu", "sharding=fsdp"], "set offload.gradients and offload.optimizer to cpu"),
        (["offload.gradients=cpu"], "set offload.optimizer: cpu or nvme"),
    ],
)
def test_tiers_that_a_sharding_has_no_way_to(workspace, overrides, says):
    done = fw("train", "tiny.yaml", *overrides)
    assert done.code == 2 and says in done.err and "fw: error: override offload." in done.err
    assert not Path("run").exists()


def test_a_run_under_fsdp_with_everything_away(workspace):
    """Two ranks, resumed once, against the same run with everything in place."""
    two = ("sharding=fsdp", "launch.devices=2", "train.max_steps=6")
    fw("train", "tiny.yaml", *two, "train.run_dir=plain").ok()
    away = ("offload.optimizer=nvme", "offload.activations=nvme", "offload.activations_above=1KiB", "offload.path=disk", "activation=sqrt")
    fw("train", "tiny.yaml", *two, *away, "train.max_steps=3", "train.save_every=3").ok()
    fw("train", "tiny.yaml", *two, *away, "resume=auto").ok()
    assert column("run", "loss") == column("plain", "loss")
    assert not list(Path("disk").iterdir())


def test_state_that_is_taken_back_again_takes_no_more_of_the_disk(tmp_path):
    """As each roll-back does."""
    stepper = trained(OffloadPolicy(optimizer="nvme", path=tmp_path), "adamw")
    mapped, kept = mapped_bytes(tmp_path), {name: tensor.clone() for name, tensor in stepper.optimizer_tensors().items()}
    for _ in range(2):
        stepper.load_optimizer_tensors(kept)
        gc.collect()
        assert mapped_bytes(tmp_path) == mapped
    assert all(torch.equal(tensor, kept[name]) for name, tensor in stepper.optimizer_tensors().items())


def test_parameters_that_tensor_parallelism_divides_stay(tmp_path):
    """Operators save their local tensors."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        layer = torch.nn.Linear(64, 64, bias=False)
        local = layer.weight.detach()
        layer.weight = torch.nn.Parameter(DTensor.from_local(local, mesh, [Replicate()]))
        assert activations._storage(layer.weight) == local.untyped_storage()._cdata
    finally:
        dist.destroy_process_group()


def test_many_activations_on_disk_may_be_open(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        store = DiskStore(tmp_path)
        kept = [store(torch.ones(4)) for _ in range(300)]
        assert len(kept) == 300
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_another_machines_disk_is_not_looked_for_here(tmp_path):
    policy = OffloadPolicy(optimizer="nvme", path=tmp_path / "there")
    spec = StepSpec(FP32, policy, OPTIMIZERS["adamw"].spec(torch.device("cpu")), is_here=False)
    offloaded.check(spec, model(), parts=1, gathers=False)
    assert not policy.path.exists()


def test_what_another_user_has_left_is_left(tmp_path, monkeypatch):
    (tmp_path / "fw-zero-theirs").mkdir()
    opened = os.open

    def refuses(path, *more):
        if "theirs" in str(path):
            raise PermissionError(13, "Permission denied")
        return opened(path, *more)

    monkeypatch.setattr(os, "open", refuses)
    disk._remove_abandoned(tmp_path)
    assert (tmp_path / "fw-zero-theirs").is_dir()
