"""Hosts of a small network on this machine, for `nodes.py`: Linux namespaces, a bridge as the switch.

Each host has its own network, processes, name, /dev/shm and /tmp/ray. It can be lost whole (its first
process is killed, and the kernel ends all others with it), its port of the switch can go dead without a
word to anybody, and a host with a slow wire has its packets delayed and dropped on their way.

Needs root. It does not know what runs on the hosts.
"""

import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NETWORK = "10.213.77"  # /24
PREFIX = "rmfy-"  # of the names of all that is made
SWITCH, BRIDGE, OUTSIDE = f"{PREFIX}switch", "bridge", f"{PREFIX}outside"
CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000


def obstacle() -> str | None:
    """Why there can be no such hosts here, in one line."""
    if not sys.platform.startswith("linux"):
        return "namespaces are Linux's: run it there"
    if os.geteuid() != 0:
        return "it makes network namespaces, so it has to be root: run it with sudo"
    for name, package in (("ip", "iproute2"), ("unshare", "util-linux"), ("nsenter", "util-linux")):
        if shutil.which(name) is None:
            return f"there is no {name} here: install {package}"
    found = subprocess.run(["ip", "netns", "add", f"{PREFIX}try"], capture_output=True, text=True)
    if found.returncode:
        return f"no network namespace can be made here: {found.stderr.strip()}"
    ip("netns", "del", f"{PREFIX}try")
    return None


def ip(*words: str, quietly: bool = False) -> None:
    """Raises CalledProcessError, but `quietly`."""
    subprocess.run(["ip", *words], check=not quietly, capture_output=True, text=True)


def environment() -> dict[str, str]:
    """For programs on hosts: nothing of theirs goes over a proxy, which gRPC would ask, too."""
    return {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}


class Network:
    """The switch. Use it with `with`: whatever was made is gone behind it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hosts: dict[str, Host] = {}
        self.outside = f"{NETWORK}.1"  # this machine's own address, where clients are

    def __enter__(self) -> "Network":
        self._clear()
        ip(
            "netns", "add", SWITCH
        )  # in a namespace of its own no filter of this machine looks at packets
        ip("-n", SWITCH, "link", "add", BRIDGE, "type", "bridge")
        ip("-n", SWITCH, "link", "set", BRIDGE, "up")
        ip("link", "add", OUTSIDE, "type", "veth", "peer", "name", OUTSIDE, "netns", SWITCH)
        ip("-n", SWITCH, "link", "set", OUTSIDE, "master", BRIDGE, "up")
        ip("addr", "add", f"{self.outside}/24", "dev", OUTSIDE)
        ip("link", "set", OUTSIDE, "up")
        return self

    def __exit__(self, *error: object) -> None:
        self.empty()
        self._clear()

    def empty(self) -> None:
        """Lose all hosts."""
        for host in list(self.hosts.values()):
            host.lose()
            shutil.rmtree(host.folder, ignore_errors=True)

    def host(self, name: str, *, wire: tuple[float, float, float] | None = None) -> "Host":
        """A new one. `wire`: delay in seconds, its spread, and the part of packets that is lost."""
        taken = {each.address for each in self.hosts.values()}
        number = next(n for n in range(10, 250) if f"{NETWORK}.{n}" not in taken)
        made = Host(self, name, f"{NETWORK}.{number}", wire)
        self.hosts[name] = made
        return made

    def _clear(self) -> None:
        """What an earlier run that was killed has left, too."""
        ip("link", "del", OUTSIDE, quietly=True)
        listed = subprocess.run(
            ["ip", "netns", "list"], check=True, capture_output=True, text=True
        ).stdout
        for line in listed.splitlines():
            if line.startswith(PREFIX):
                ip("netns", "del", line.split()[0], quietly=True)


class Host:
    """Make it with `Network.host`."""

    def __init__(
        self, network: Network, name: str, address: str, wire: tuple[float, float, float] | None
    ) -> None:
        self.name, self.address = name, address
        self.lost = False
        self._network, self._space, self._port = network, PREFIX + name, f"rmfy{name}"
        self._wire: subprocess.Popen[bytes] | None = None
        folder = network.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder  # its /tmp/ray
        ip("netns", "add", self._space)
        if wire is None:
            ends = ["type", "veth", "peer", "name", "eth0", "netns", self._space]
            ip("-n", SWITCH, "link", "add", self._port, *ends)
        else:
            words = [str(value) for value in wire]
            self._wire = subprocess.Popen(
                [sys.executable, __file__, self._port, self._space, *words], stdout=subprocess.PIPE
            )
            assert self._wire.stdout is not None
            self._wire.stdout.readline()
        ip("-n", SWITCH, "link", "set", self._port, "master", BRIDGE, "up")
        for words in (
            ["link", "set", "lo", "up"],
            ["addr", "add", f"{address}/24", "dev", "eth0"],
            ["link", "set", "eth0", "up"],
            ["route", "add", "default", "via", network.outside],
        ):
            ip("-n", self._space, *words)
        # The first process of the host: all others end with it.
        first = f"hostname {name}; mkdir -p /tmp/ray; mount --bind {folder} /tmp/ray; "
        first += "mount -t tmpfs none /dev/shm; echo; exec sleep infinity"
        own = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "--uts", "--ipc"]
        self._unshare = subprocess.Popen(
            ["ip", "netns", "exec", self._space, *own, "sh", "-ec", first],
            stdout=subprocess.PIPE,
        )
        assert self._unshare.stdout is not None
        if not self._unshare.stdout.readline():
            raise RuntimeError(f"host {name} cannot be made")
        children = Path(f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children")
        self._first = int(children.read_text().split()[0])

    def start(self, words: list[str], log: str, **fields: Any) -> "subprocess.Popen[Any]":
        """A program on this host; what it says goes to the file `log` of its folder."""
        enter = ["nsenter", "-t", str(self._first), "-m", "-u", "-i", "-n", "-p", "--"]
        with (self.folder / log).open("ab") as out:
            fields = {"stdout": out, "stderr": out, "env": environment()} | fields
            return subprocess.Popen([*enter, *words], **fields)

    def run(self, words: list[str], log: str, **fields: Any) -> None:
        """The same to its end. Raises RuntimeError."""
        if self.start(words, log, **fields).wait():
            raise RuntimeError(f"{words} on {self.name}: {(self.folder / log).read_text()[-2000:]}")

    def unplug(self) -> None:
        """Its port is out of the switch: nothing comes or goes, and no end sees its own link go down."""
        ip("-n", SWITCH, "link", "set", self._port, "nomaster")

    def plug(self) -> None:
        """It is in again."""
        ip("-n", SWITCH, "link", "set", self._port, "master", BRIDGE)

    def lose(self, *, silently: bool = False) -> None:
        """All of its processes are killed at once. `silently`: as if its power were gone.

        Else the kernel closes their connections, and then nobody has its address.
        """
        if self.lost:
            return
        self.lost = True
        del self._network.hosts[self.name]
        if silently:
            self.unplug()
        os.kill(self._first, signal.SIGKILL)
        self._unshare.wait()
        if self._wire is not None:
            self._wire.kill()
            self._wire.wait()
        ip("netns", "del", self._space, quietly=True)
        ip("-n", SWITCH, "link", "del", self._port, quietly=True)


# --- a wire that delays and drops, where the kernel has no netem ------------------------------------


def tap(name: str) -> int:
    """A network interface whose packets this process carries."""
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TAP | IFF_NO_PI))
    os.set_blocking(device, False)
    return device


def carry(port: str, space: str, delay: float, spread: float, loss: float) -> None:
    """Carry packets both ways until killed, in the order in which they came."""
    ends = []
    for where, name in ((SWITCH, port), (space, "eth0")):
        with open(f"/run/netns/{where}") as there:
            if ctypes.CDLL(None, use_errno=True).setns(there.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        ends.append(tap(name))
    print(flush=True)
    waiting: list[tuple[float, int, int, bytes]] = []
    last, count, chance = [0.0, 0.0], 0, random.Random(1)
    while True:
        patience = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for end in select.select(ends, [], [], patience)[0]:
            packet, to = os.read(end, 1 << 16), 1 - ends.index(end)
            if chance.random() < loss:
                continue
            due = max(last[to], time.monotonic() + chance.gauss(delay, spread))
            last[to], count = due, count + 1
            heapq.heappush(waiting, (due, count, to, packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, to, packet = heapq.heappop(waiting)
            with contextlib.suppress(OSError):  # that end is down
                os.write(ends[to], packet)


if __name__ == "__main__":
    carry(sys.argv[1], sys.argv[2], *map(float, sys.argv[3:6]))
