"""The HTTP protocol by itself, with connections in this process."""

import asyncio
import contextlib
import dataclasses

import pytest
import uvicorn
from made_service import in_process, pixel, until
from uvicorn.server import ServerState

from mlcn_jax.serving import server as server_lib


def requests(count):
    body = pixel(200)
    return count * (b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)


@contextlib.asynccontextmanager
async def connected(app, service):
    """A connection to a server in this process, and the server's side of all its connections."""
    config, state = uvicorn.Config(app, **server_lib._settings(service.limits)), ServerState()
    config.load()
    protocol = server_lib._protocol(service)
    listener = await asyncio.get_running_loop().create_server(lambda: protocol(config, state, {}), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*listener.sockets[0].getsockname())
    try:
        yield reader, writer, state.connections
    finally:
        for connection in list(state.connections):
            connection.transport.abort()  # or a request that waits for its client would never end
        writer.close()
        listener.close()


def test_pipelined_requests_that_arrived_before_the_end_are_all_answered():
    async def check(app, slow, service):
        async with connected(app, service) as (reader, writer, connections):
            writer.write(requests(3))
            await until(slow.entered.is_set)
            for connection in connections:
                connection.shutdown()
            slow.go.set()
            received = await reader.read()
            assert received.count(b"HTTP/1.1 200 ") == 3
            assert received.count(b"connection: close") == 1

    in_process(check)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    ("status", "last"),
    [
        (400, b"nonsense\r\n\r\n"),
        (400, b"POST /predict HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nno size\r\n"),
        (431, b"GET / HTTP/1.1\r\nX: " + 800_000 * b"x"),
    ],
    ids=["not HTTP", "a body that is none", "a long head"],
)
def test_a_request_is_refused_after_the_answers_to_those_before_it(count, status, last):
    """Then the connection ends; what follows the request at fault is not read."""

    async def check(app, slow, service):
        async with connected(app, service) as (reader, writer, _):
            writer.write(requests(count))
            await until(slow.entered.is_set)
            writer.write(last + b"\r\n\r\n" + requests(1))
            await asyncio.sleep(0.05)
            slow.go.set()
            assert answers(await reader.read()) == [*count * [200], status]

    in_process(check)


def test_a_request_that_arrives_too_slowly_is_refused_after_the_answers_to_those_before_it():
    async def check(app, slow, service):
        service.limits = dataclasses.replace(service.limits, timeout_seconds=0.2)
        async with connected(app, service) as (reader, writer, _):
            writer.write(requests(2) + requests(1)[:-1])
            await until(slow.entered.is_set)
            await asyncio.sleep(0.5)
            writer.write(requests(1)[-1:] + requests(1))
            slow.go.set()
            assert answers(await reader.read()) == [200, 200, 408]

    in_process(check)


def test_a_client_that_does_not_read_its_answers_is_disconnected():
    async def check(app, slow, service):
        async with connected(app, service) as (_, writer, connections):
            writer.transport.pause_reading()
            await until(lambda: connections)
            (connection,) = connections
            while not connection.flow.write_paused:
                writer.write(16 * b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n")
                await asyncio.sleep(0.01)
                await until(lambda: connection.flow.write_paused or not connection.pipeline)
            await until(lambda: not connections)

    in_process(check, timeout_seconds=0.2)


def test_a_client_that_reads_slowly_stays_connected_while_it_does():
    class Transport:
        def __init__(self, *unread):
            self.unread, self.aborted = list(unread), False

        def get_write_buffer_size(self):
            return self.unread.pop(0)

        def abort(self):
            self.aborted = True

    async def check(app, slow, service):
        async with connected(app, service) as (_, _, connections):
            await until(lambda: connections)
            (connection,) = connections
            connection.transport, connection.flow.write_paused = Transport(900, 500, 100, 100), True
            seen = []
            for _ in range(4):
                connection._timer.cancel()
                connection._look()
                seen.append(connection.transport.aborted)
            assert seen == [False, False, False, True]

    in_process(check)


def test_a_request_at_fault_is_told_so_after_one_that_was_answered_before_its_body_came():
    async def check(app, slow, service):
        async with connected(app, service) as (reader, writer, _):
            writer.write(b"POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\n")
            assert b" 404 " in await reader.readuntil(b"\r\n\r\n")
            writer.write(b"x")
            await asyncio.sleep(0.05)
            writer.write(b"nonsense\r\n\r\n")
            assert b" 400 " in await reader.read()

    in_process(check)


@pytest.mark.parametrize("parts", [[b"x"], [b"x", b"y"]])
def test_a_connection_that_was_answered_before_its_body_came_is_closed_once_it_is_idle(parts):
    async def check(app, slow, service):
        async with connected(app, service) as (reader, writer, connections):
            await until(lambda: connections)
            (connection,) = connections
            connection.timeout_keep_alive = 0.1
            writer.write(b"POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(parts))
            assert b" 404 " in await reader.readuntil(b"\r\n\r\n")
            for part in parts:
                writer.write(part)
                await asyncio.sleep(0.05)
            await asyncio.wait_for(reader.read(), 3)

    in_process(check)


def test_a_request_behind_a_body_that_came_after_its_answer_may_take_longer_than_idle_connections_stay():
    async def check(app, slow, service):
        async with connected(app, service) as (reader, writer, connections):
            await until(lambda: connections)
            (connection,) = connections
            connection.timeout_keep_alive = 0.1
            writer.write(b"POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\n")
            assert b" 404 " in await reader.readuntil(b"\r\n\r\n")
            writer.write(b"x" + requests(1))
            await asyncio.sleep(0.3)
            slow.go.set()
            assert b" 200 " in await reader.read()

    in_process(check)


def test_no_more_requests_wait_on_a_connection_than_it_may_have(monkeypatch):
    monkeypatch.setattr(server_lib, "_MAX_PIPELINED", 3)

    async def check(app, slow, service):
        async with connected(app, service) as (reader, writer, _):
            writer.write(requests(1))
            await until(slow.entered.is_set)
            writer.write(requests(9))
            await asyncio.sleep(0.05)
            slow.go.set()
            assert answers(await reader.read()) == [200, 200, 200, 200, 429]

    in_process(check)


def answers(received):
    """The status of each answer, of which the last must end the connection."""
    assert received.count(b"connection: close") == 1
    assert b"connection: close" in received.rpartition(b"HTTP/1.1 ")[2]
    return [int(part[:3]) for part in received.split(b"HTTP/1.1 ")[1:]]
