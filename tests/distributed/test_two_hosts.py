"""Several hosts: two that share a machine, and two that only a cable joins."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import REPOSITORY, column, fw, start
from distributed.faulty import installed
from fw.cli import main

SAME = ("sharding=ddp", "train.save_every=4", "train.max_steps=10")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def test_a_rank_killed_on_one_host_restarts_both(workspace, tmp_path_factory):
    fault = ("objective={name: faulty, how: kill, rank: 1, steps: [6]}", "launch.max_restarts=1")
    hosts = ("launch.nodes=2", f"launch.rendezvous=localhost:{free_port()}")
    env = installed(tmp_path_factory.mktemp("site"))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": env}
    processes = [start("train", "tiny.yaml", *SAME, *hosts, *fault, **pipes) for _ in range(2)]
    told = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], told
    both = "\n".join(told)
    assert "rank 1 was killed by SIGKILL" in both and both.count("attempt 2 of 2") == 1
    assert {p.name for p in Path("run/logs").glob("*/*.log")} == {"rank-0.log", "rank-1.log"}
    main(["train", "tiny.yaml", "train.max_steps=10", "train.run_dir=one"])
    assert column("run", "step") == list(range(1, 11)) and column("run", "loss") == pytest.approx(column("one", "loss"), rel=1e-5)


def test_a_host_that_waits_in_vain_says_so(workspace):
    words = ("sharding=ddp", "launch.nodes=2", f"launch.rendezvous=localhost:{free_port()}", "launch.join_timeout=2")
    done = fw("train", "tiny.yaml", *words)
    assert done.code == 1 and "fw: error: not all 2 hosts joined within launch.join_timeout=2 s" in done.err
    assert not Path("run").exists()


def test_an_unknown_interface_is_refused_with_those_there_are(workspace):
    done = fw("train", "tiny.yaml", "launch.interface=nope0", "launch.devices=2", "sharding=ddp")
    assert not Path("run").exists() and done.err.startswith("fw: error: override launch.interface=nope0: launch.interface:")
    assert done.code == 2 and "this host has no interface 'nope0' that is up; there are: lo (127.0.0.1" in done.err


@pytest.mark.slow
def test_a_cut_cable_fails_both_hosts_and_the_run_goes_on_when_it_is_back(tmp_path):
    done = subprocess.run([sys.executable, REPOSITORY / "tools/two_hosts", tmp_path], capture_output=True, text=True, timeout=400)
    if done.returncode == 77:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "host a | fw: error: rank" in done.stdout
    # The other host loses its peers and the store at once: which of them it misses first is chance.
    unreachable = "the rendezvous host cannot be reached any more; it has ended or the network is down"
    assert "host b | fw: error: rank" in done.stdout or f"host b | fw: error: {unreachable}" in done.stdout
    assert "another rank did not answer within launch.timeout=10 s" in done.stdout
    assert "largest relative difference of losses" in done.stdout
