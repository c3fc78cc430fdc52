"""Saving and going on as a run does it: what is written, what stays, what a damaged, vanished or full place does, and what is said."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml

import fw
from conftest import TINY, column, environment, fw as run_fw, metrics
from fw.checkpointing import commit
from fw.checkpointing.manifest import damages, read_manifest
from fw.checkpointing.ranks import OneRank
from fw.config import load
from fw.errors import FwError, RunError, UserError
from fw.place import place
from fw.recipe import World, resolve
from fw.training import resume, saving

HERE = Path(__file__).parent
SAVE = "train.save_every=5"


def train(*overrides: str) -> fw.TrainResult:
    return fw.train("tiny.yaml", *overrides)


def steps(run: str = "run") -> list[int]:
    return [int(name[5:]) for name in commit.steps(place(Path(run) / "checkpoints"))]


def contents(run: str, step: int) -> dict[str, bytes]:
    """What a step is made of, but for the names of its run."""
    directory = Path(run) / "checkpoints" / f"step-{step:08d}"
    own = ("config.yaml", "config.resolved.yaml", "origins.json", "manifest.json")
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name not in own}


def test_in_the_background_the_same_is_written(workspace, capfd):
    train(SAVE, "train.run_dir=one")
    train(SAVE, "train.run_dir=two", "checkpoint.asynchronous=true")
    assert steps("one") == steps("two") == [5, 10, 15, 20]
    for step in steps("one"):
        assert contents("one", step) == contents("two", step)
    assert capfd.readouterr().err.count("saved two/checkpoints/step-") == 4


def test_two_ranks_in_the_background_write_what_they_write_at_once(workspace):
    two = ("sharding=fsdp", "launch.devices=2", SAVE, "train.max_steps=10")
    run_fw("train", "tiny.yaml", *two, "train.run_dir=one").ok()
    run_fw("train", "tiny.yaml", *two, "train.run_dir=two", "checkpoint.asynchronous=true", "checkpoint.max_shard_size=100KiB").ok()
    run_fw("checkpoint", "reshard", "two", "--to", "again").ok()
    assert run_fw("checkpoint", "diff", "one", "again").ok().out.startswith("84 tensors identical, 0 different")
    assert len(list(Path("two/checkpoints/latest/").glob("optimizer-*.safetensors"))) > 4
    assert (Path("again/latest/rng.json").read_bytes()) == Path("one/checkpoints/latest/rng.json").read_bytes()


def test_what_is_kept(workspace):
    train("train.save_every=2", "checkpoint={name: safetensors, keep_last: 2, keep_every: 8, keep_best: 1, metric: loss}")
    losses = {step: float(row["loss"]) for step, row in enumerate(metrics("run"), start=1) if step % 2 == 0}
    best = min(losses, key=lambda step: losses[step])
    assert steps() == sorted({8, 16, 18, 20, best})
    done = run_fw("checkpoint", "prune", "run", "--keep-last", "1", "--dry-run").ok()
    assert "would remove" in done.out and steps() == sorted({8, 16, 18, 20, best})
    found = json.loads(run_fw("checkpoint", "prune", "run", "--keep-last", "1", "--json").ok().out)
    assert len(found["removed"]) == len({8, 16, 18, 20, best}) - 1 and steps() == [20]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("checkpoint={keep_last: 1, keep_best: 1}",), "val_loss is never measured, since train.val_every is 0"),
        (("checkpoint={keep_last: 1, keep_best: 1}", "train.val_every=3"), "make train.save_every=5 a multiple of train.val_every=3"),
        (("checkpoint={keep_last: 1, keep_best: 1, metric: loss}", "train.log_every=3"), "a multiple of train.log_every=3"),
        (("checkpoint.to=nonsense://x",), "Protocol not known"),
        (("checkpoint.to=memory://x", "launch.devices=2", "sharding=ddp"), "memory:// is one process's own"),
        (("checkpoint.asynchronous=true", "offload={optimizer: nvme, path: .}"), "copies to host memory what offload keeps on a disk"),
        (("checkpoint.grace=-1",), "checkpoint.grace: -1 is negative"),
        (("checkpoint.when_busy=panic",), "when_busy"),
    ],
)
def test_wishes_that_cannot_be_fulfilled_are_refused_before_the_run(workspace, overrides, says):
    with pytest.raises(UserError, match=says):
        train(SAVE, *overrides)
    assert not Path("run").exists()


@pytest.fixture
def trained(workspace, capfd) -> Path:
    """A run with the checkpoints 5, 10, 15, 20, and one of another seed beside it."""
    train(SAVE)
    return Path("run/checkpoints")


def newest() -> tuple[str | None, list[str]]:
    """What resume=auto goes on from, and what it says."""
    said: list[str] = []
    reader = resume.newest(resolve(load("tiny.yaml", ["resume=auto"]), World()), OneRank(), said.append)
    return (reader.place.name if reader else None), said


def flip(path: Path, at: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def test_a_run_goes_back_to_the_newest_whole_checkpoint_and_says_why(trained, capfd):
    straight = column("run", "loss")
    flip(trained / "step-00000020" / "optimizer.safetensors", -1)
    (trained / "step-00000015" / "trainer.json").write_text("{")
    train(SAVE, "train.max_steps=20", "resume=auto")
    err = capfd.readouterr().err
    assert "step-00000020 is damaged: optimizer.safetensors has other bytes than were written; going back to" in err
    assert "step-00000015 is damaged: trainer.json has 1 bytes instead of" in err and "step-00000010 at step 10" in err
    assert column("run", "loss") == straight and steps() == [5, 10, 15, 20]
    assert newest() == ("step-00000020", [])


def test_what_was_named_is_not_exchanged_for_something_else(trained):
    flip(trained / "step-00000020" / "model.safetensors", 900)
    with pytest.raises(UserError, match=r"step-00000020 is damaged: model\.safetensors has other bytes"):
        train(SAVE, "train.max_steps=25", "resume=run")
    train(SAVE, "train.max_steps=21", "resume=run/checkpoints/step-00000015", "train.run_dir=other")


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda new, old: (new / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda new, old: shutil.copy(old / "optimizer.safetensors", new), "optimizer.safetensors has other bytes"),
        (lambda new, old: shutil.copy(old / "manifest.json", new), "its manifest.json is that of step 15"),
        (lambda new, old: shutil.copy(old / "model.safetensors", new / "model-00001-of-00002.safetensors"), "is not one of its files"),
        (lambda new, old: (new / "manifest.json").unlink(), "is no checkpoint: it has no manifest.json"),
        (lambda new, old: [path.unlink() for path in new.iterdir()], "is no checkpoint: it has no manifest.json"),
    ],
    ids=["a vanished shard", "a shard of another step", "another step's manifest", "a stale shard", "no manifest", "nothing in it"],
)
def test_harm_is_named_and_the_checkpoint_before_it_is_taken(trained, harm, says):
    harm(trained / "step-00000020", trained / "step-00000015")
    found, said = newest()
    assert found == "step-00000015" and len(said) == 1 and says in said[0] and "going back to" in said[0]


def test_a_manifest_of_another_run_is_found(trained):
    train(SAVE, "train.run_dir=other", "train.seed=1")
    shutil.copy("other/checkpoints/step-00000020/manifest.json", trained / "step-00000020")
    found, said = newest()
    assert found == "step-00000015" and "model.safetensors has other bytes" in said[0]
    done = run_fw("checkpoint", "verify", "run")
    assert done.code == 1 and done.out.count("whole") == 3 and done.out.count("DAMAGED") == 1


def test_every_flipped_byte_and_every_cut_is_found(trained):
    """2,000 of them over all files; none is loaded."""
    step, chance = trained / "step-00000020", random.Random(0)
    files = sorted(path for path in step.iterdir())
    assert len(files) == 12
    for number in range(2000):
        path = files[number % len(files)]
        data = path.read_bytes()
        at = chance.randrange(len(data))
        path.write_bytes(data[:at] if chance.random() < 0.3 else data[:at] + bytes([data[at] ^ chance.randint(1, 255)]) + data[at + 1 :])
        with pytest.raises(FwError, match=path.name):
            manifest = read_manifest(place(step))
            if wrong := damages(place(step), manifest):
                raise RunError("; ".join(wrong))
        if number % 20 == 0:
            assert newest()[0] == "step-00000015", path
        path.write_bytes(data)
    assert newest() == ("step-00000020", [])


def mounted(directory: Path, *options: str) -> bool:
    directory.mkdir()
    return subprocess.run(["mount", "-t", "tmpfs", *options, "tmpfs", str(directory)], capture_output=True).returncode == 0


def test_a_full_disk_costs_a_checkpoint_and_nothing_else(workspace, capfd):
    if not mounted(Path("small"), "-o", "size=3m"):
        pytest.skip("mounting a small file system is not permitted here")
    try:
        train(SAVE, "train.max_steps=15", "checkpoint.to=small/checkpoints")
        assert [path.name for path in sorted(Path("small/checkpoints").glob("step-*"))] == ["step-00000005", "step-00000010"]
    except RunError as error:
        assert "training finished, but its last checkpoint was not written" in str(error)
        assert "No space left on device" in str(error)
    err = capfd.readouterr().err
    assert "warning: checkpoint small/checkpoints/step-00000015 not written: " in err and "what was there before is untouched" in err
    assert len(metrics("run")) == 15
    path = commit.steps_at(place("small/checkpoints"))[0]
    assert path.name == "step-00000010" and damages(path, read_manifest(path)) == []
    subprocess.run(["umount", "small"], check=True)


def test_a_place_that_cannot_be_written_is_refused_before_the_run_and_survived_in_it(workspace, capfd, monkeypatch):
    if not mounted(Path("fixed"), "-o", "ro"):
        pytest.skip("mounting is not permitted here")
    fixed: list[bool] = []
    try:
        with pytest.raises(UserError, match=r"checkpoint\.to: fixed/c cannot be written: Read-only file system"):
            train(SAVE, "checkpoint.to=fixed/c")
        assert not Path("run/metrics.csv").exists()
        subprocess.run(["mount", "-o", "remount,rw", "fixed"], check=True)
        report = saving.Saver.report

        def then_fixed(self):
            report(self)
            if self.saved and not fixed:
                fixed.append(True)  # over itself, since the run has a file open there
                subprocess.run("mount --bind fixed fixed && mount -o remount,bind,ro fixed", shell=True, check=True)

        monkeypatch.setattr(saving.Saver, "report", then_fixed)
        with pytest.raises(RunError, match="Read-only file system"):
            train(SAVE, "checkpoint.to=fixed/c", "train.max_steps=12", "train.run_dir=second")
        assert len(metrics("second")) == 12 and commit.steps(place("fixed/c")) == ["step-00000005"]
    finally:
        for _ in (None, *fixed):
            subprocess.run(["umount", "fixed"], check=True)


@pytest.mark.parametrize("policy", ["wait", "skip"])
def test_a_save_that_is_due_while_another_one_runs(workspace, capfd, monkeypatch, policy):
    from fw_plugins.checkpoint.safetensors import SafetensorsCheckpoint

    go_on, save = threading.Event(), SafetensorsCheckpoint.save

    def slow(self, directory, snapshot, ranks):
        if snapshot.step == 5:
            assert go_on.wait(60)
        return save(self, directory, snapshot, ranks)

    rest = saving.Watch.rest

    def waits(self):
        rest(self)
        if policy == "wait" and Path("run/metrics.csv").exists() and len(metrics("run")) >= 10:
            go_on.set()  # the save of step 10 is about to wait

    snapshot = saving.snapshot
    monkeypatch.setattr(
        saving,
        "snapshot",
        lambda recipe, module, *more: (go_on.set() if module.global_step > 10 else None, snapshot(recipe, module, *more))[1],
    )
    monkeypatch.setattr(SafetensorsCheckpoint, "save", slow)
    monkeypatch.setattr(saving.Watch, "rest", waits)
    if policy == "skip":  # the last save of a run waits
        close = saving._Pending.wait
        monkeypatch.setattr(saving._Pending, "wait", lambda self: (go_on.set(), close(self))[1])
    train(SAVE, "train.max_steps=12", "checkpoint.asynchronous=true", f"checkpoint.when_busy={policy}")
    err = capfd.readouterr().err
    if policy == "wait":
        assert "for the checkpoint of step 5" in err and steps() == [5, 10, 12]
    else:
        assert "step 10: not saved, step 5 is still being written (checkpoint.when_busy=skip)" in err and steps() == [5, 12]


def test_what_is_pending_when_a_run_fails_is_finished(workspace, capfd, monkeypatch):
    from fw_plugins.objective.causal_lm import CausalLMObjective

    loss, calls = CausalLMObjective.loss_sum, []

    def fails(self, *arguments):
        calls.append(0)
        if len(calls) > 5 * 4 + 1:
            raise RuntimeError("out of luck")
        return loss(self, *arguments)

    monkeypatch.setattr(CausalLMObjective, "loss_sum", fails)
    with pytest.raises(RuntimeError, match="out of luck"):
        train(SAVE, "checkpoint.asynchronous=true")
    path = commit.steps_at(place("run"))[0]
    assert path.name == "step-00000005" and damages(path, read_manifest(path)) == []
    assert threading.active_count() == 1 or not any(thread.name.startswith("save step") for thread in threading.enumerate())


GRACE = """
import sys, threading
from fw_plugins.checkpoint.safetensors import SafetensorsCheckpoint
save = SafetensorsCheckpoint.save
def stuck(self, directory, snapshot, ranks):
    if snapshot.step > int(sys.argv[1]):
        threading.Event().wait()
    return save(self, directory, snapshot, ranks)
SafetensorsCheckpoint.save = stuck
from fw.cli import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize("saved", [True, False])
def test_a_preempted_run_ends_when_its_time_is_over(workspace, saved):
    every = 2 if saved else 100_000
    words = ["train", "tiny.yaml", "train.max_steps=100000", f"train.save_every={every}", "checkpoint.grace=2", "checkpoint.when_busy=skip"]
    more = ["checkpoint.asynchronous=true"] if saved else []
    process = subprocess.Popen(
        [sys.executable, "-c", GRACE, "2" if saved else "0", *words, *more], env=environment(), stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if line.startswith("step 2: saved" if saved else "step 1/"):
            break
    process.send_signal(signal.SIGUSR1)
    _, err = process.communicate(timeout=120)
    said = "".join(lines) + err
    assert process.returncode == (75 if saved else 1), said
    assert "not saved within checkpoint.grace=2 s; " in said
    assert ("the newest checkpoint is run/checkpoints/step-00000002; go on with resume=auto" if saved else "there is no checkpoint") in said


def test_an_object_store_holds_a_run_and_gives_it_back(workspace, bucket):
    """Two ranks to S3, pruned there, on from there on one, and the same numbers as on a disk."""
    url = f"{bucket}/{workspace.name}/run"
    straight = ("sharding=fsdp", "launch.devices=2", "train.max_steps=12")
    run_fw("train", "tiny.yaml", *straight, "train.run_dir=disk", "train.save_every=4").ok()
    done = run_fw("train", "tiny.yaml", *straight, SAVE, f"checkpoint.to={url}", "checkpoint.keep_last=2", "train.max_steps=10").ok()
    assert f"step 10: saved {url}/step-00000010" in done.err and not Path("run/checkpoints").exists()
    done = run_fw("train", "tiny.yaml", *straight, SAVE, f"checkpoint.to={url}", "checkpoint.keep_last=2", "resume=auto").ok()
    assert f"resuming from {url}/step-00000010 at step 10" in done.err
    assert column("run", "loss") == column("disk", "loss")
    assert sorted(path.rpartition("/")[2] for path in map(str, commit.steps_at(place(url)))) == ["step-00000010", "step-00000012"]
    done = run_fw("train", "tiny.yaml", f"checkpoint.to={url}", SAVE, "train.run_dir=new")
    assert done.code == 2 and "holds another run's checkpoints (the newest is step-00000012)" in done.err
    done = run_fw("train", "tiny.yaml", f"checkpoint.to={bucket.replace('fw-tests', 'fw-nowhere')}", SAVE, "train.run_dir=new")
    assert done.code == 2 and "cannot be written: The specified bucket does not exist" in done.err
    assert run_fw("checkpoint", "diff", url, "disk").ok().out == "84 tensors identical, 0 different\n"


def test_transformers_loads_a_step_as_it_is(trained):
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(trained / "latest")
    ours = fw.load_model(trained / "latest")
    import torch

    ids = torch.randint(0, 250, (1, 16))
    assert (model(ids).logits - ours(ids)).abs().max() < 1e-5


def test_there_is_no_pickle_in_it(trained):
    for path in (trained / "latest/").iterdir():
        assert path.suffix in (".json", ".safetensors", ".yaml"), path
        assert os.path.getsize(path) > 0
    assert yaml.safe_load((trained / "latest" / "config.yaml").read_text())["model"]["hidden_size"] == TINY["model"]["hidden_size"]


def test_a_checkpoint_of_the_first_format_is_gone_on_from(trained):
    """As fw wrote it before: random states as tensors, a manifest hashed by its values."""
    import hashlib

    import torch
    from safetensors.torch import save_file

    straight = column("run", "loss")
    step = trained / "step-00000010"
    rng = json.loads((step / "rng.json").read_text())["0"]["cpu"]
    import base64

    save_file({"rank0.cpu": torch.frombuffer(bytearray(base64.b64decode(rng)), dtype=torch.uint8)}, step / "rng.safetensors")
    (step / "rng.json").unlink()
    body = json.loads((step / "manifest.json").read_text())
    files = {p.name: {"size": p.stat().st_size, "sha256": hashlib.sha256(p.read_bytes()).hexdigest()} for p in step.iterdir()}
    del files["manifest.json"]
    old = {"format": 1, "step": 10, "world_size": 1, "files": files, "sha256": ""}
    old["sha256"] = hashlib.sha256(json.dumps(old, sort_keys=True).encode()).hexdigest()
    (step / "manifest.json").write_text(json.dumps(old, indent=1) + "\n")
    assert body["format"] == 2
    for name in ("step-00000005", "step-00000015", "step-00000020"):
        shutil.rmtree(trained / name)
    train("train.max_steps=20", "resume=auto")
    assert column("run", "loss") == straight


@pytest.mark.slow
def test_the_torture_in_short():
    done = subprocess.run(
        [sys.executable, str(HERE.parent.parent / "tools" / "benches" / "torture.py"), "--kills", "8", "--json"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    tallies = json.loads(done.stdout)
    assert sum(tally["kills"] for tally in tallies.values()) == 8 and all(tally["runs"] for tally in tallies.values())
