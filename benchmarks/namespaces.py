"""Two processes in network namespaces of their own, joined by a link of a chosen rate. Linux, root, iproute2.

A namespace lives as long as a process is in it, and a link as long as its namespaces: no name is registered
anywhere, so nothing is left behind however the processes end.
"""

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

INTERFACE = "veth"  # the name of the link's end in each namespace; the value of GLOO_SOCKET_IFNAME
CLONE_NEWNET = 0x40000000
BURST, LATENCY = "128kb", "100ms"  # of the token bucket: above one segment of 64 KiB; a queue that TCP never fills


class Unavailable(RuntimeError):
    """This machine has no namespaces or no shaped links for us; says why."""


def check() -> None:
    """Raises Unavailable where it is plain that a link cannot be made."""
    if sys.platform != "linux":
        raise Unavailable(f"network namespaces need Linux, this is {sys.platform}")
    if os.geteuid() != 0:
        raise Unavailable("network namespaces need root")
    missing = [command for command in ("ip", "tc") if shutil.which(command) is None]
    if missing:
        raise Unavailable(f"needs the command {' and '.join(missing)}: install iproute2")


def enter() -> None:
    """Move this process, before it starts threads or opens sockets, into a new network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET):
        raise Unavailable(f"unshare(CLONE_NEWNET): {os.strerror(ctypes.get_errno())}")


def link(pids: Sequence[int]) -> None:
    """Join the namespaces of two processes. Called from outside, once both have entered."""
    here, there = pids
    _run(f"ip link add {INTERFACE} netns {here} type veth peer name {INTERFACE} netns {there}")


def address(rank: int) -> None:
    """Give this end of the link an address, and bring it up. Called inside, once `link` has returned.

    A connection sends at the rate of the link, always: others than reno probe it now and then, and an idle connection
    would start slowly again.
    """
    for setting, value in (("tcp_congestion_control", "reno"), ("tcp_slow_start_after_idle", "0")):
        try:
            Path("/proc/sys/net/ipv4", setting).write_text(value)
        except OSError as error:
            raise Unavailable(f"{setting} of a new network namespace cannot be set: {error}") from error
    _run(f"ip addr add 10.0.0.{1 + rank}/30 dev {INTERFACE}")
    _run(f"ip link set {INTERFACE} up")


def shape(bits_per_second: float) -> None:
    """Limit what this end sends. Both ends are to be limited."""
    rate = f"{bits_per_second / 1e6:g}mbit"
    _run(f"tc qdisc replace dev {INTERFACE} root tbf rate {rate} burst {BURST} latency {LATENCY}")


def sent_bytes() -> int:
    """Bytes that this end has sent so far, headers included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counters.split()[8])
    raise RuntimeError(f"no interface {INTERFACE} in this network namespace")


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise Unavailable(f"{command}: {done.stderr.strip()}")
