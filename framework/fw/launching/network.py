"""Network interfaces of this host, and which of them ranks of several hosts are to use."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path

from fw.config import LaunchSection
from fw.errors import RunError, UserError

_GET_ADDRESS, _GET_FLAGS, _IS_UP = 0x8915, 0x8913, 0x1  # SIOCGIFADDR, SIOCGIFFLAGS, IFF_UP (linux/sockios.h, linux/if.h)
_LINK_SCOPE = "20"


def addresses() -> dict[str, list[str]]:
    """Interfaces that are up, each with its addresses, IPv4 first (Linux)."""
    found: dict[str, list[str]] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            flags = struct.unpack_from("H", fcntl.ioctl(probe.fileno(), _GET_FLAGS, request), 16)[0]
            if not flags & _IS_UP:
                continue
            found[name] = []
            try:
                found[name].append(socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _GET_ADDRESS, request)[20:24]))
            except OSError:
                continue  # it has no IPv4 address
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        lines = []
    for digits, _, _, scope, _, name in (line.split() for line in lines):
        if name in found and scope != _LINK_SCOPE:
            found[name].append(str(ipaddress.ip_address(bytes.fromhex(digits))))
    return found


def resolve(host: str) -> list[str]:
    """Addresses of a host name.

    Raises:
        RunError: the name is unknown here.
    """
    try:
        return list(dict.fromkeys(str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)))
    except socket.gaierror as error:
        raise RunError(f"host name '{host}' cannot be resolved here ({error.strerror}); give launch.rendezvous as an address") from None


def is_here(host: str, known: Mapping[str, list[str]]) -> bool:
    """Whether a name or address is this host's."""
    own = {address for found in known.values() for address in found}
    return host == socket.gethostname() or any(a in own or ipaddress.ip_address(a).is_loopback for a in resolve(host))


def check_interface(name: str, known: Mapping[str, list[str]], place: object) -> None:
    """Refuse an interface that is not there.

    Raises:
        UserError: with those that are.
    """
    if name not in known:
        there = ", ".join(f"{other} ({', '.join(found)})" for other, found in known.items() if found)
        raise UserError(f"{place}: launch.interface: this host has no interface '{name}' that is up; there are: {there}")


def towards(host: str, known: Mapping[str, list[str]], route: Callable[[str], str] | None = None) -> tuple[str, str]:
    """The interface from which ``host`` is reached, and its address.

    A host that resolves to itself by a loopback address (127.0.1.1 in Debian's /etc/hosts) would offer that one to the others, which
    cannot reach it: there the only other interface is taken. Named as ``localhost`` or by a loopback address, it is meant.

    Raises:
        RunError: several interfaces remain, or none.
    """
    target = resolve(host)[0]
    source = (route or _route)(target)
    if ipaddress.ip_address(source).is_loopback and host != "localhost" and not _is_loopback_address(host):
        outward = [(n, found[0]) for n, found in known.items() if found and not ipaddress.ip_address(found[0]).is_loopback]
        if len(outward) != 1:
            names = ", ".join(n for n, _ in outward) or "none that leads outward"
            raise RunError(
                f"'{host}' is {target} on this host, which others cannot reach; give launch.interface=NAME (there are: {names})"
                f" or launch.rendezvous as an address"
            )
        return outward[0]
    for name, found in known.items():
        if source in found:
            return name, source
    raise RunError(f"no interface of this host has {source}, from which '{host}' is reached; give launch.interface=NAME")


def use_interface(launch: LaunchSection, spans_hosts: bool, place: object, environment: MutableMapping[str, str] | None = None) -> None:
    """Tell gloo and NCCL which interface to use, before the process group is made.

    What the user gave wins, then what the environment says; a run on several hosts takes the interface towards rank 0's host.

    Raises:
        UserError: there is no such interface.
        RunError: the way to the other hosts is not clear.
    """
    env = os.environ if environment is None else environment
    if launch.interface:
        check_interface(launch.interface, addresses(), place)
        env["GLOO_SOCKET_IFNAME"] = env["NCCL_SOCKET_IFNAME"] = launch.interface
    elif spans_hosts and "GLOO_SOCKET_IFNAME" not in env:
        name, _ = towards(env.get("MASTER_ADDR", "localhost"), addresses())
        env["GLOO_SOCKET_IFNAME"] = name
        if name != "lo":
            env.setdefault("NCCL_SOCKET_IFNAME", name)


def _route(target: str) -> str:
    """The address this host sends from. Nothing is sent: connecting a datagram socket only looks the route up."""
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise RunError(f"no way from this host to {target} ({error.strerror}); check launch.rendezvous and the network") from None


def _is_loopback_address(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
