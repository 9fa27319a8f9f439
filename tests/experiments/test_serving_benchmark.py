"""benchmarks.serving: what its clients count (`benchmarks.http_clients`), and what the server is compared with."""

import contextlib
import itertools
import socketserver
import threading

import pytest

from benchmarks import http_clients, serving
from mlcn_jax.errors import InputError


@contextlib.contextmanager
def server(statuses):
    """The port of a server that answers with these statuses in turn, again and again."""
    turns, lock = itertools.cycle(statuses), threading.Lock()

    class Handler(socketserver.BaseRequestHandler):
        def handle(self):
            with contextlib.suppress(ConnectionError):  # the client may leave
                while self.request.recv(2**16):
                    with lock:
                        status = next(turns)
                    self.request.sendall(b"HTTP/1.1 %d X\r\ncontent-length: 2\r\n\r\n{}" % status)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as found:
        found.daemon_threads = True
        threading.Thread(target=found.serve_forever, args=(0.01,), daemon=True).start()
        yield found.server_address[1]
        found.shutdown()


def test_requests_that_a_server_turns_away_are_counted_and_do_not_end_the_measurement():
    with server([200, 200, 429]) as port:
        latencies, turned_away = http_clients.ask_at(port, [b"request"], 100, 0.3)
    assert (len(latencies), turned_away) == (20, 10)


def test_any_other_answer_ends_it():
    with server([500]) as port, pytest.raises(InputError, match=r"answered .*500"):
        http_clients.ask_at(port, [b"request"], 100, 0.1)


@contextlib.contextmanager
def closing_server(answers):
    """The port of a server that closes every connection after so many answers; with 0, it never answers.

    With -1, it closes connections without an answer to the first request.
    """

    class Handler(socketserver.BaseRequestHandler):
        def handle(self):
            for _ in range(answers):
                if not self.request.recv(2**16):
                    return
                self.request.sendall(b"HTTP/1.1 200 X\r\ncontent-length: 2\r\n\r\n{}")
            if answers <= 0:
                self.request.recv(2**16)
                ended.wait(5 * (answers + 1))

    ended = threading.Event()
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as found:
        found.daemon_threads = True
        threading.Thread(target=found.serve_forever, args=(0.01,), daemon=True).start()
        yield found.server_address[1]
        ended.set()
        found.shutdown()


def test_idle_connections_that_a_server_closes_are_replaced():
    with closing_server(1) as port:
        latencies, turned_away = http_clients.ask_at(port, [b"request"], 50, 0.6)
    assert (len(latencies), turned_away) == (30, 0)


def test_requests_whose_new_connections_a_server_closes_were_turned_away():
    with closing_server(-1) as port:
        latencies, turned_away = http_clients.ask_at(port, [b"request"], 50, 0.3)
    assert (len(latencies), turned_away) == (0, 15)


def test_a_request_that_is_never_answered_ends_the_measurement(monkeypatch):
    monkeypatch.setattr(http_clients, "_LONGEST_SECONDS", 0.1)
    with closing_server(0) as port, pytest.raises(InputError, match=r"has not answered for 0\.1 seconds"):
        http_clients.ask_at(port, [b"request"], 50, 0.1)


def test_clients_that_ask_in_turn_must_not_be_turned_away():
    with server([200, 429]) as port, pytest.raises(InputError, match="give fewer --clients"):
        http_clients.ask(port, [b"request"], 2, 5)


@pytest.mark.parametrize(("mean", "sizes"), [(1, [1]), (1.4, [1, 2]), (16, [16]), (17.2, [16, 32]), (31.9, [16, 32])])
def test_the_model_alone_computes_batches_that_are_not_padded(mean, sizes):
    assert serving.powers_around(mean) == sizes
