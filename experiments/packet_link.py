"""A link between two network namespaces of this machine, whose packets are delayed and rationed: netem without netem.

    with PacketLink(delay_ms=50, rate_mbit=10) as link: ...    # commands after `link.prefix(0)` and `link.prefix(1)`

Whatever a process sends to the other namespace goes over it, also what no relay can stand in the way of, such as the
collectives of gloo, which choose their own ports. Each direction is a link of its own: a packet leaves once those
before it have, at the rate, and arrives after the delay; none is lost. TCP is Reno's, and does not start slowly again
after a pause. Needs root, `ip` and /dev/net/tun. It ends with the process that made it.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import queue
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

from experiments import REPOSITORY
from mlcn_jax.errors import InputError

ADDRESSES = ("10.77.0.1", "10.77.0.2")
_DEVICE = "tun0"
_TUN = "/dev/net/tun"
_LARGEST_PACKET = 65536
_HEADER_BYTES = 52  # of a packet: IPv4, and TCP with time stamps
_CLONE_NEWNET, _TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x40000000, 0x400454CA, 0x0001, 0x1000  # of Linux
_TCP = {"tcp_congestion_control": "reno", "tcp_slow_start_after_idle": "0"}


def possible() -> bool:
    """Whether this process may make such a link."""
    return not os.geteuid() and os.path.exists(_TUN) and shutil.which("ip") is not None


class PacketLink:
    """Two namespaces, the addresses of which are `ADDRESSES`, and the link between them, while it is entered.

    Args:
      delay_ms: from one to the other, in each direction.
      rate_mbit: megabits a second in each direction, headers included; 0 is unlimited.

    Raises:
      InputError: this process may not make them.
    """

    def __init__(self, delay_ms: float, rate_mbit: float):
        self._names = [f"mlcn{os.getpid()}{side}" for side in "ab"]
        self._settings = {"delay_ms": delay_ms, "rate_mbit": rate_mbit, "names": self._names}

    def prefix(self, side: int) -> list[str]:
        """What to put before a command, so that it runs on a side of the link, 0 or 1."""
        return ["ip", "netns", "exec", self._names[side]]

    @property
    def bytes_moved(self) -> int:
        """Bytes that were sent so far, in both directions, without the headers of TCP and IP."""
        shown = [_shown("-n", name, "-j", "-s", "link", "show", "dev", _DEVICE) for name in self._names]
        sent = [json.loads(text)[0]["stats64"]["tx"] for text in shown]
        return sum(one["bytes"] - _HEADER_BYTES * one["packets"] for one in sent)

    def __enter__(self) -> "PacketLink":
        if not possible():
            raise InputError(f"a packet link needs root, the command ip and {_TUN}: run it on Linux, as root")
        command = [sys.executable, "-m", "experiments.packet_link", json.dumps(self._settings)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(command, cwd=REPOSITORY, text=True, **pipes)
        if self._process.stdout.readline() != "ready\n":
            self._process.wait()
            raise InputError("the packet link could not be made; the message is above")
        return self

    def __exit__(self, *error: object) -> None:
        self._process.stdin.close()
        self._process.wait()


def _make(name: str, side: int) -> int:
    """Makes a namespace and its end of the link; this thread is in it afterwards."""
    own, other = ADDRESSES[side], ADDRESSES[1 - side]
    _ip("netns", "add", name)
    with open(f"/run/netns/{name}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {name}")
    end = os.open(_TUN, os.O_RDWR)
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", _DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
    _ip("-n", name, "link", "set", "lo", "up")
    _ip("-n", name, "addr", "add", own, "peer", other, "dev", _DEVICE)
    _ip("-n", name, "link", "set", "dev", _DEVICE, "up")
    for field, value in _TCP.items():
        _ip("netns", "exec", name, "sh", "-c", f"echo {value} > /proc/sys/net/ipv4/{field}")
    hosts = _hosts(name)  # `ip netns exec` puts it in the place of /etc/hosts; gloo looks its own name up there
    hosts.parent.mkdir(parents=True)
    hosts.write_text(f"127.0.0.1 localhost\n{own} {socket.gethostname()}\n")
    return end


def _hosts(name: str) -> Path:
    return Path(f"/etc/netns/{name}/hosts")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def _shown(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


def _direction(source: int, sink: int, delay_ms: float, rate_mbit: float) -> None:
    """Starts passing packets on."""
    waiting: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

    def read() -> None:
        free = 0.0  # when the link can take the next packet
        while True:
            packet = os.read(source, _LARGEST_PACKET)
            free = max(free, time.perf_counter())
            if rate_mbit:
                free += 8e-6 * len(packet) / rate_mbit
            waiting.put((free + delay_ms / 1e3, packet))

    def write() -> None:
        while True:
            due, packet = waiting.get()
            left = due - time.perf_counter()
            if left > 0:
                time.sleep(left)
            with contextlib.suppress(OSError):
                os.write(sink, packet)

    for work in (read, write):
        threading.Thread(target=work, daemon=True).start()


def _main(delay_ms: float, rate_mbit: float, names: list[str]) -> None:
    sys.setswitchinterval(1e-4)
    try:
        ends = [_make(name, side) for side, name in enumerate(names)]
        for source, sink in (ends, ends[::-1]):
            _direction(source, sink, delay_ms, rate_mbit)
        print("ready", flush=True)
        sys.stdin.read()
    finally:
        for name in names:
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", name)
            shutil.rmtree(_hosts(name).parent, ignore_errors=True)


if __name__ == "__main__":
    _main(**json.loads(sys.argv[1]))
