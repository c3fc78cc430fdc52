"""Which interface ranks of several hosts use."""

from __future__ import annotations

import socket

import pytest

from fw.config import LaunchSection
from fw.errors import RunError, UserError
from fw.launching import network

ONE = {"lo": ["127.0.0.1", "::1"], "eth0": ["10.0.0.5"]}
TWO = {**ONE, "eth1": ["192.168.7.5", "fd00::5"]}


@pytest.fixture
def names(monkeypatch):
    """Host names as Debian's /etc/hosts has them: one's own leads to oneself."""
    table = {"here": "127.0.1.1", "there": "192.168.7.9", "localhost": "127.0.0.1"}

    def look_up(host, port, **more):
        if host not in table and not host[0].isdigit():
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (table.get(host, host), port))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)


def route(target: str) -> str:
    return {"127.0.1.1": "127.0.0.1", "127.0.0.1": "127.0.0.1", "192.168.7.9": "192.168.7.5"}[target]


def test_the_interface_leads_to_the_rendezvous(names):
    assert network.towards("there", TWO, route) == ("eth1", "192.168.7.5")
    assert network.towards("localhost", ONE, route) == ("lo", "127.0.0.1")
    assert network.towards("127.0.0.1", ONE, route) == ("lo", "127.0.0.1")


def test_a_name_that_leads_to_oneself_is_not_told_to_the_others(names):
    assert network.towards("here", ONE, route) == ("eth0", "10.0.0.5")
    with pytest.raises(RunError, match=r"'here' is 127.0.1.1 on this host, .* launch.interface=NAME \(there are: eth0, eth1\)"):
        network.towards("here", TWO, route)
    with pytest.raises(RunError, match="host name 'nowhere' cannot be resolved here"):
        network.towards("nowhere", TWO, route)
    assert network.is_here("here", TWO) and not network.is_here("there", TWO)


def test_what_the_user_gives_wins_over_the_environment_and_that_over_a_guess(names):
    env = {"GLOO_SOCKET_IFNAME": "eth9", "MASTER_ADDR": "localhost"}
    network.use_interface(LaunchSection(), spans_hosts=True, place="", environment=env)
    assert env["GLOO_SOCKET_IFNAME"] == "eth9"
    lo = next(name for name, found in network.addresses().items() if "127.0.0.1" in found)
    network.use_interface(LaunchSection(interface=lo), spans_hosts=True, place="", environment=env)
    assert env["GLOO_SOCKET_IFNAME"] == env["NCCL_SOCKET_IFNAME"] == lo
    with pytest.raises(UserError, match=f"has no interface 'nope0' that is up; there are: .*{lo}"):
        network.use_interface(LaunchSection(interface="nope0"), spans_hosts=False, place="x", environment=env)


@pytest.mark.parametrize(
    ("given", "host", "port"),
    [("", "localhost", 29500), ("a.b:1", "a.b", 1), ("a.b", "a.b", 7), ("[fd00::5]:9", "fd00::5", 9), ("[fd00::5]", "fd00::5", 7)],
)
def test_a_rendezvous_names_host_and_port(given, host, port):
    section = LaunchSection(nodes=2, rendezvous=given, port=7 if given else 0)
    assert (section.rendezvous_host, section.rendezvous_port) == (host, port)
