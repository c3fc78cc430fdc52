"""What is wrong with a machine, made so here, and what the doctor says of it."""

from __future__ import annotations

import json
import os
import shutil
import socket
from types import SimpleNamespace

import torch

from conftest import environment, fw
from distributed.faulty import installed
from fw.doctor import hardware, network, software
from fw.doctor.finding import Finding, guarded
from fw.launching import cores as shared

GIB = 1 << 30


def states(findings):
    return [finding.state for finding in findings]


def test_a_sound_machine_has_no_problem_and_every_area_is_told(workspace):
    told = json.loads(fw("doctor", "--json").ok().out)
    assert "problem" not in states(SimpleNamespace(**each) for each in told), told
    areas = [
        *("python", "torch", "libraries", "processor", "gpu", "memory"),
        *("disk", "kernels", "locks", "network", "collectives", "plugins"),
    ]
    assert list(dict.fromkeys(each["area"] for each in told)) == areas
    (gloo,) = [each["text"] for each in told if each["area"] == "collectives"]
    assert gloo.startswith("2 ranks add up over gloo")
    assert "MB/s written durably" in next(each["text"] for each in told if each["area"] == "disk")
    assert torch.__version__ in next(each["text"] for each in told if each["area"] == "torch")


def test_a_broken_plugin_from_elsewhere_is_a_problem_and_the_exit_code_says_so(workspace, tmp_path):
    env = installed(tmp_path / "site")
    (tmp_path / "site" / "faulty_objective.py").unlink()
    done = fw("doctor", "--quick", env=env)
    assert done.code == 1 and "PROBLEM plugins     objective 'faulty' " in done.out
    assert done.out.splitlines()[-1].startswith("1 problem, ") and "\x1b" not in done.out
    assert "collectives" not in done.out and "MB/s" not in done.out


def test_one_that_cannot_be_imported_is_found_by_importing_it(workspace, tmp_path):
    env = installed(tmp_path / "site")
    file = tmp_path / "site" / "faulty_objective.py"
    file.write_text(file.read_text() + '\n{}["no such driver"]\n')
    assert "no such driver" not in fw("doctor", "--quick", env=env).out
    found = list(json.loads(fw("doctor", "--json", env=env).out))
    (problem,) = [each for each in found if each["area"] == "plugins" and each["state"] == "problem"]
    assert "faulty" in problem["text"] and "no such driver" in problem["text"] and problem["fix"]


def test_without_a_compiler_it_says_what_to_install(workspace):
    done = fw("doctor", "--quick", env={**environment(), "CXX": "/no/such/compiler", "FW_CACHE": str(workspace / "empty")})
    assert "note    kernels" in done.out or "PROBLEM kernels" in done.out
    line = next(line for line in done.out.splitlines() if " kernels " in line)
    assert "/no/such/compiler" in line


def test_a_lock_that_a_killed_build_left_is_named_with_what_to_remove(tmp_path):
    lock = tmp_path / "py311_cpu" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    assert states(software.locks([tmp_path])) == ["ok"], "somebody builds now"
    os.utime(lock, (0, 0))
    (found,) = software.locks([tmp_path])
    assert found.state == "problem" and str(lock) in found.text and found.fix == f"rm {lock}"


def test_a_driver_that_torch_does_not_use_is_a_problem(monkeypatch):
    monkeypatch.setattr(software.Path, "exists", lambda self: str(self).startswith(("/dev/nvidia", "/proc/driver/nvidia")))
    monkeypatch.setattr(torch.version, "cuda", None)
    assert any(finding.state == "problem" and "built without CUDA" in finding.text for finding in software.torch_itself())
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (problem,) = [finding for finding in software.torch_itself() if finding.state == "problem"]
    assert "sees no GPU" in problem.text and "CUDA_VISIBLE_DEVICES= may hide it" in problem.fix


def test_less_time_than_cores_is_told(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    for module in (hardware, shared):
        monkeypatch.setattr(module, "quota", lambda: 2.5)
    notes = [finding.text for finding in hardware.processor() if finding.state == "note"]
    assert notes == ["the container may use 2.5 of these 8 cores' time: ranks have 2 threads between them"]


def test_little_shared_memory_and_few_files_are_told(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=64 << 20, free=64 << 20))
    monkeypatch.setattr(hardware.resource, "getrlimit", lambda what: (256, 1 << 20))
    texts = [finding.text + finding.fix for finding in hardware.memory() if finding.state != "ok"]
    assert any("/dev/shm has 64 MiB" in text for text in texts) and any("256 files" in text and "ulimit -n 65536" in text for text in texts)


def test_a_disk_is_measured_and_one_that_cannot_be_written_is_a_problem(monkeypatch, tmp_path):
    places = {"runs": tmp_path, "cache": tmp_path / "not" / "there" / "yet"}
    found = list(hardware.disks(places))
    assert states(found)[:2].count("problem") == 0 and "MB/s written durably" in found[0].text and not list(tmp_path.iterdir())
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    refused = list(hardware.disks(places))
    assert states(refused) == ["problem", "problem"] and refused[1].fix == "set FW_CACHE"
    monkeypatch.undo()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=GIB))
    assert states(hardware.disks({"runs": tmp_path}, measured=False)) == ["ok", "note"]


def test_ranks_that_fail_are_a_problem_with_their_last_words(monkeypatch):
    monkeypatch.setattr(network, "_RANK", "raise SystemExit('no route to anybody')")
    (found,) = network.collectives()
    assert found.state == "problem" and "no route to anybody" in found.text and found.fix
    second = "import os, signal, sys\nif sys.argv[2] == '1':\n    os.kill(os.getpid(), signal.SIGILL)\nsignal.pause()"
    monkeypatch.setattr(network, "_RANK", second)
    (found,) = network.collectives()
    assert found.text == "2 ranks over gloo: rank 1 ended with signal 4"


def test_a_host_that_is_loopback_to_itself_is_told(monkeypatch):
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    notes = [finding for finding in network.interfaces() if finding.state == "note"]
    assert (notes and "127.0.1.1 to itself" in notes[0].text) or len(socket.if_nameindex()) < 2

    def unknown(name):
        raise OSError("unknown")

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    assert "cannot be resolved" in [finding.text for finding in network.interfaces()][-1]


def test_a_check_that_fails_takes_no_other_with_it():
    def check():
        yield Finding("a", "ok", "fine")
        raise RuntimeError("of\nitself")

    assert [(each.state, each.text) for each in guarded("a", check)] == [
        ("ok", "fine"),
        ("problem", "cannot be looked at: RuntimeError: of itself"),
    ]
