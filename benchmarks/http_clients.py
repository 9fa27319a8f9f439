"""Clients of a server on this machine, many of them in one thread: how long it takes to answer.

They are cheap enough to leave the server nearly all of the machine, on which both run.
"""

import collections
import contextlib
import itertools
import re
import select
import socket
import time

import numpy as np

from mlcn_jax.errors import InputError

_CONNECTIONS = 64  # at first, of an open loop
_LONGEST_SECONDS = 10.0  # from the last request of an open loop to its answer
_TURNED_AWAY = (b"HTTP/1.1 429 ", b"HTTP/1.1 503 ")


class Connections:
    """Connections to a server, each with one request at a time."""

    def __init__(self, port: int):
        self._port, self._poll = port, select.epoll()
        self._connections: dict[int, socket.socket] = {}
        self._received: dict[int, bytes] = {}
        self._requests: dict[int, bytes] = {}
        self._have_answered: set[int] = set()

    def open(self) -> int:
        """The number of a new connection."""
        connection = socket.create_connection(("127.0.0.1", self._port))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connections[connection.fileno()] = connection
        self._poll.register(connection, select.EPOLLIN)
        return connection.fileno()

    def send(self, number: int, request: bytes) -> None:
        self._requests[number] = request
        with contextlib.suppress(ConnectionError):  # which the server has closed, as `answered` will tell
            self._connections[number].sendall(request)

    def send_again(self, number: int) -> int:
        """The number of a new connection for the request of one that the server closed."""
        request = self._requests[number]
        self.drop(number)
        again = self.open()
        self.send(again, request)
        return again

    def answered(self, seconds: float, idle: list[int] | None = None) -> list[tuple[int, bool | None]]:
        """The connections whose answers are complete, after at most so many seconds, and whether the server accepted.

        None stands for a connection that the server closed after an earlier answer, while the request was on its way; a
        new one that it closes without an answer was turned away. Of those that are `idle`, without a request, any that
        the server has closed is taken out.

        Raises:
          InputError: an answer is none, or an error other than that the server has too much to do.
        """
        complete = []
        for number, _ in self._poll.poll(max(0.0, seconds)):
            try:
                more = self._connections[number].recv(2**16)
            except ConnectionError:
                more = b""
            if not more and idle and number in idle:  # which the server has closed
                self.drop(number)
                idle.remove(number)
                continue
            answer = self._received.pop(number, b"") + more
            if not answer:
                complete.append((number, None if number in self._have_answered else False))
                continue
            head, _, body = answer.partition(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head)
            if length is None or len(body) < int(length[1]):
                self._received[number] = answer
                continue
            is_accepted = answer.startswith(b"HTTP/1.1 200 ")
            if not is_accepted and not answer.startswith(_TURNED_AWAY):
                raise InputError(f"the server at port {self._port} answered {answer.decode()!r}")
            self._have_answered.add(number)
            complete.append((number, is_accepted))
        return complete

    def drop(self, number: int) -> None:
        """Closes one connection."""
        self._poll.unregister(number)
        self._have_answered.discard(number)
        self._connections.pop(number).close()

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._poll.close()


def ask(port: int, requests: list[bytes], clients: int, seconds: float) -> list[float]:
    """Seconds that each request took which was answered in so many seconds, with so many clients that ask in turn.

    Raises:
      InputError: the server has too much to do with so many clients.
    """
    connections, turns, sent, latencies = Connections(port), itertools.cycle(requests), {}, []
    end = time.perf_counter() + seconds
    for number in [connections.open() for _ in range(clients)]:
        sent[number] = time.perf_counter()
        connections.send(number, next(turns))
    while (left := end - time.perf_counter()) > 0:
        for number, is_accepted in connections.answered(left):
            if is_accepted is None:
                sent[connections.send_again(number)] = sent[number]
                continue
            if not is_accepted:
                raise InputError(
                    f"the server at port {port} turned one of {clients} clients away: give fewer --clients"
                )
            now = time.perf_counter()
            latencies.append(now - sent[number])
            sent[number] = now
            connections.send(number, next(turns))
    connections.close()
    return latencies


def ask_at(port: int, requests: list[bytes], rate: float, seconds: float, seed: int = 0) -> tuple[list[float], int]:
    """Requests due at random moments, `rate` a second: seconds from when each was due to its answer; how many had none.

    They do not wait for answers to others (an open loop), so a server that falls behind is seen to do so. Those that it
    turned away have no latency.
    """
    connections, turns, latencies, turned_away = Connections(port), itertools.cycle(requests), [], 0
    gaps = np.random.default_rng(seed).exponential(1 / rate, round(rate * seconds))
    free, waiting, started = [connections.open() for _ in range(_CONNECTIONS)], {}, time.perf_counter()
    ahead, heard = collections.deque(started + np.cumsum(gaps)), started
    while ahead or waiting:
        now = time.perf_counter()
        while ahead and ahead[0] <= now:
            number = free.pop() if free else connections.open()
            waiting[number] = ahead.popleft()
            connections.send(number, next(turns))
        until = ahead[0] if ahead else heard + _LONGEST_SECONDS
        found = connections.answered(until - time.perf_counter(), free)
        if found or ahead:
            heard = time.perf_counter()
        elif time.perf_counter() >= until:
            raise InputError(f"the server at port {port} has not answered for {_LONGEST_SECONDS:g} seconds")
        for number, is_accepted in found:
            due = waiting.pop(number)
            if is_accepted is None:
                waiting[connections.send_again(number)] = due
            elif is_accepted:
                latencies.append(time.perf_counter() - due)
                free.append(number)
            else:
                turned_away += 1
                connections.drop(number)  # the server may close it
    connections.close()
    return latencies, turned_away
