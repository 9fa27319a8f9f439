"""A relay that shapes a TCP link: delay, rate, stalls and partitions, for test beds on one machine.

    python -m experiments.tiers_relay --to=127.0.0.1:8001 --delay_ms=50 --rate_mbit=10
    python -m experiments.tiers_relay --check

Each direction is a link of its own: a byte leaves once those before it have, at the rate, and arrives after the delay.
All connections share it.
While it runs it reads lines of JSON from its standard input, such as {"delay_ms": 500} or {"mode": "stall"}, and
answers each with the bytes that have gone to and fro. Modes: `pass`; `stall` holds everything until it passes again;
`drop` cuts all connections and refuses new ones. Threads rather than an event loop, because its timers are 1 ms apart.

What it does not do: a connection is accepted at once, so the handshake of TCP costs no delay (that of TLS, which is
bytes, does). Whoever opens a connection is one round trip faster than over a real link; gateways keep theirs open.

netem would delay all packets, but the kernels that this was made on do not have it, and on loopback it takes a class
and a filter for each port, and can neither cut a connection nor lead it elsewhere. So beds use this relay everywhere,
and are alike on all machines.
"""

import contextlib
import dataclasses
import json
import queue
import socket
import statistics
import sys
import threading
import time
from collections.abc import Sequence

from absl import flags

from mlcn_jax.errors import InputError
from mlcn_jax.launch import launch_script

MODES = ("pass", "stall", "drop")
_CHUNK = 2048
_AHEAD_SECONDS = 0.05  # of bytes that are taken before they leave: what the sender's socket would hold
_MOST_WAITING = 2**14  # chunks under way in one direction of a connection; then no more are taken
_STALL_LOOK_SECONDS = 0.01
_CHECKS = 5
_SWITCH_SECONDS = 1e-4  # how long a thread waits for Python's lock; the default is longer than what is measured


@dataclasses.dataclass
class Link:
    """The state of a link, which may change while it is used.

    Attributes:
      delay_ms: from one end to the other, in each direction.
      rate_mbit: megabits a second, in each direction; 0 is unlimited.
      mode: one of `MODES`.
    """

    delay_ms: float = 0.0
    rate_mbit: float = 0.0
    mode: str = "pass"


class Relay:
    """Listens on a free port of this machine, or on `port`, and passes connections on to an address."""

    def __init__(self, target: tuple[str, int], link: Link, port: int = 0):
        self.link, self._target = link, target
        self.sent = self.received = 0  # bytes to the target, and back
        self._free = {"sent": 0.0, "received": 0.0}  # when each direction can take the next byte
        self._lock = threading.Lock()  # of these
        self._listener = socket.create_server(("127.0.0.1", port), backlog=256)
        self.port = self._listener.getsockname()[1]
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def change(self, to: str = "", **values: float | str) -> None:
        """Changes the link, or where new connections lead (HOST:PORT); `drop` and `to` cut what is under way.

        Raises:
          InputError: there is no such setting.
        """
        if to:
            host, _, port = to.rpartition(":")
            self._target = host, int(port)
            for connection in list(self._open):
                _close(connection)
        for name, value in values.items():
            if name not in ("delay_ms", "rate_mbit", "mode") or (name == "mode" and value not in MODES):
                raise InputError(f"a link has delay_ms, rate_mbit and mode ({', '.join(MODES)}), not {name}={value}")
            setattr(self.link, name, value)
        if self.link.mode == "drop":
            for connection in list(self._open):
                _close(connection)

    def close(self) -> None:
        """Ends all connections and stops listening."""
        self.link.mode = "drop"
        for connection in [self._listener, *self._open]:
            _close(connection)

    def _accept(self) -> None:
        while True:
            try:
                near = self._listener.accept()[0]
            except OSError:
                return
            threading.Thread(target=self._connect, args=(near,), daemon=True).start()

    def _connect(self, near: socket.socket) -> None:
        if self.link.mode == "drop":
            _close(near)
            return
        try:
            far = socket.create_connection(self._target, timeout=5)
        except OSError:
            _close(near)
            return
        far.settimeout(None)
        for connection in (near, far):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._open.add(connection)
        self._direction(near, far, "sent")
        self._direction(far, near, "received")

    def _direction(self, source: socket.socket, sink: socket.socket, counter: str) -> None:
        waiting: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(source, waiting, counter), daemon=True).start()
        threading.Thread(target=self._write, args=(sink, source, waiting), daemon=True).start()

    def _read(self, source: socket.socket, waiting: queue.SimpleQueue, counter: str) -> None:
        while True:
            try:
                data = source.recv(_CHUNK)
            except OSError:
                data = b""
            now = time.perf_counter()
            free = self._takes(counter, len(data), now)
            waiting.put((free + self.link.delay_ms / 1e3, data))
            if not data:
                return
            while waiting.qsize() >= _MOST_WAITING and source in self._open:  # it stalls, or nobody takes them
                time.sleep(_STALL_LOOK_SECONDS)
            if free - now > _AHEAD_SECONDS:
                time.sleep(free - now - _AHEAD_SECONDS)

    def _takes(self, counter: str, size: int, now: float) -> float:
        """Counts bytes of any connection; returns when the last of them has left, after all that came before."""
        rate = self.link.rate_mbit * 1e6 / 8
        with self._lock:
            setattr(self, counter, getattr(self, counter) + size)
            self._free[counter] = max(self._free[counter], now) + (size / rate if rate else 0.0)
            return self._free[counter]

    def _write(self, sink: socket.socket, source: socket.socket, waiting: queue.SimpleQueue) -> None:
        data = b"start"
        while data:
            due, data = waiting.get()
            left = due - time.perf_counter()
            if left > 0:
                time.sleep(left)
            while self.link.mode == "stall":
                time.sleep(_STALL_LOOK_SECONDS)
            try:
                if data:
                    sink.sendall(data)
                else:
                    sink.shutdown(socket.SHUT_WR)
            except OSError:
                _close(source)
                break
        self._open.discard(source)


def _close(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def check(
    delays_ms: Sequence[float] = (5.0, 10.0, 50.0), rates_mbit: Sequence[float] = (2.0, 20.0, 100.0)
) -> list[dict[str, float]]:
    """Measures what the relay makes of delays and rates: medians of 20 echoes, and of 3 transfers of half a second."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_SECONDS)
    echo = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_echo, args=(echo,), daemon=True).start()
    found = []
    for delay in delays_ms:
        relay = Relay(echo.getsockname(), Link(delay))
        with socket.create_connection(("127.0.0.1", relay.port)) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            seconds = [_exchange(connection, 64) for _ in range(21)][1:]
        found.append({"delay_ms": delay, "measured_ms": 1e3 * statistics.median(seconds) / 2})
        relay.close()
    for rate in rates_mbit:
        relay = Relay(echo.getsockname(), Link(0.0, rate))
        size = int(rate * 1e6 / 8 / 2)
        with socket.create_connection(("127.0.0.1", relay.port)) as connection:
            # What comes back goes out while the rest comes in: both ways take as long as one.
            seconds = [_exchange(connection, size) for _ in range(3)]
        found.append({"rate_mbit": rate, "measured_mbit": 8e-6 * size / statistics.median(seconds)})
        relay.close()
    echo.close()
    sys.setswitchinterval(before)
    return found


def holds(row: dict[str, float]) -> bool:
    """Whether a row of `check` is within 1 ms of the delay, or 5 % of the rate."""
    if "delay_ms" in row:
        return abs(row["measured_ms"] - row["delay_ms"]) <= 1.0
    return abs(row["measured_mbit"] / row["rate_mbit"] - 1) <= 0.05


def described(row: dict[str, float]) -> tuple[str, str]:
    """What was set and what was measured, of a row of `check`."""
    if "delay_ms" in row:
        return f"{row['delay_ms']:g} ms each way", f"{row['measured_ms']:.2f} ms"
    return f"{row['rate_mbit']:g} Mbit/s", f"{row['measured_mbit']:.2f} Mbit/s"


def checked() -> list[dict[str, float]]:
    """The rows of `check`, measured again a few times if the machine was busy with something else.

    Raises:
      InputError: delays or rates are still wrong, so nothing that is measured over this relay can be reported.
    """
    for _ in range(_CHECKS):
        rows = check()
        if all(map(holds, rows)):
            return rows
    raise InputError(
        f"the relay's delays or rates are wrong, in each of {_CHECKS} checks: {json.dumps(rows)}: leave it a core of "
        "this machine"
    )


def _echo(listener: socket.socket) -> None:
    while True:
        try:
            connection = listener.accept()[0]
        except OSError:
            return

        def serve(connection: socket.socket = connection) -> None:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while data := connection.recv(65536):
                connection.sendall(data)

        threading.Thread(target=serve, daemon=True).start()


def _exchange(connection: socket.socket, size: int) -> float:
    """Seconds until as many bytes have come back as are sent."""
    started = time.perf_counter()
    sender = threading.Thread(target=connection.sendall, args=(bytes(size),))
    sender.start()
    left = size
    while left:
        left -= len(connection.recv(65536))
    sender.join()
    return time.perf_counter() - started


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("to", "", "HOST:PORT to pass connections on to.", flag_values=values)
    flags.DEFINE_integer("port", 0, "To listen on; 0 picks a free one.", flag_values=values)
    flags.DEFINE_float("delay_ms", 0.0, "In each direction.", flag_values=values)
    flags.DEFINE_float("rate_mbit", 0.0, "In each direction; 0 is unlimited.", flag_values=values)
    flags.DEFINE_bool("check", False, "Measures delays and rates instead.", flag_values=values)


def main(values: flags.FlagValues) -> None:
    sys.setswitchinterval(_SWITCH_SECONDS)
    if values.check:
        for row in check():
            print(json.dumps(row | {"holds": holds(row)}))
        return
    host, _, port = values.to.rpartition(":")
    if not host or not port.isdigit():
        raise InputError(f"--to={values.to} is not HOST:PORT")
    relay = Relay((host, int(port)), Link(values.delay_ms, values.rate_mbit), values.port)
    print(json.dumps({"port": relay.port}), flush=True)
    for line in sys.stdin:
        relay.change(**json.loads(line))
        print(json.dumps({"sent": relay.sent, "received": relay.received}), flush=True)


if __name__ == "__main__":
    launch_script(define, main)
