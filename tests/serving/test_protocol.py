"""The HTTP protocol by itself, with connections in this process."""

import asyncio

import uvicorn
from made_service import in_process, pixel, until
from uvicorn.server import ServerState

from mlcn_jax.serving import server as server_lib


def test_pipelined_requests_that_arrived_before_the_end_are_all_answered():
    async def check(app, slow, service):
        config, state = uvicorn.Config(app, **server_lib._settings(service.limits)), ServerState()
        config.load()
        protocol = server_lib._protocol(service)
        listener = await asyncio.get_running_loop().create_server(lambda: protocol(config, state, {}), "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*listener.sockets[0].getsockname())
        body = pixel(200)
        writer.write(3 * (b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body))
        await until(slow.entered.is_set)
        for connection in state.connections:
            connection.shutdown()
        slow.go.set()
        received = await reader.read()
        assert received.count(b"HTTP/1.1 200 ") == 3
        assert received.count(b"connection: close") == 1
        writer.close()
        listener.close()

    in_process(check)
