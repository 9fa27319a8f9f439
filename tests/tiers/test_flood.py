"""A gateway on a real socket in this process, under all kinds of bytes that no honest client sends, many at a time."""

import concurrent.futures
import contextlib
import dataclasses
import gc
import http.client
import json
import random
import re
import socket
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import uvicorn
from made_requests import hostile
from made_tiers import LIMITS, png

from mlcn_jax.serving import server
from mlcn_jax.tiers.client import TierClient
from mlcn_jax.tiers.gateway import GatewayService

CLIENTS = 40
LIMITS = dataclasses.replace(LIMITS, timeout_seconds=0.5)
PATHS = (b"/predict", b"/refine", b"/refine?deadline_ms=60000", b"/tiers/edge")
MOST_GROWTH = 64 * 2**20


@pytest.fixture
def gateway(tiers):
    """A gateway whose nodes are away, and its port."""
    policy = tiers["end"].policy
    clients = {name: TierClient(name, policy, ["http://127.0.0.1:9"]) for name in ("edge", "cloud")}
    service = GatewayService(tiers["end"], clients, LIMITS, may_stop=True)
    service.warm_up()
    listener = server.bind("127.0.0.1", 0)
    config = uvicorn.Config("", **server._settings(LIMITS), timeout_keep_alive=1)
    interval = sys.getswitchinterval()
    server._complete(service, config)
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
    thread.start()
    until = time.monotonic() + 20
    while not running.started:
        assert time.monotonic() < until
        time.sleep(0.01)
    yield service, listener.getsockname()[1]
    running.should_exit = True
    thread.join(20)
    sys.setswitchinterval(interval)
    gc.unfreeze()
    assert not thread.is_alive()


def resident_bytes():
    return 1024 * int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def garbage(rng, pictures):
    """Hostile requests, for all paths of a gateway, and bytes that are no requests."""
    for sent in hostile(rng, pictures):
        yield sent.replace(b"/predict", rng.choice(PATHS))
    for _ in range(200):
        yield rng.randbytes(rng.randrange(1, 2000))
    for deadline in (b"1e6", b"nan", b"-1", b"%00", b"9" * 5000):
        yield b"POST /refine?deadline_ms=" + deadline + b" HTTP/1.1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


def statuses_of(port, sent):
    """Status codes of what comes back for some bytes."""
    received = b""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        with contextlib.suppress(OSError):  # it had enough
            connection.sendall(sent)
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(65536):
                received += part
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", received)]


def ask(port, method, path, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request(method, path, body, {"Content-Type": "image/png"})
    response = connection.getresponse()
    found = response.status, response.read()
    connection.close()
    return found


def test_what_was_loaded_before_the_first_request_is_not_looked_through_again(gateway):
    assert gc.get_freeze_count() > len(gc.get_objects())


def test_a_flood_from_many_clients_at_once_changes_nothing_and_holds_no_memory(gateway):
    service, port = gateway
    rng = np.random.default_rng(0)
    pictures = [png(rng.integers(0, 256, (28, 28, 1)).astype(np.uint8)) for _ in range(4)]
    resident = []
    for seed in range(2):
        sent = list(garbage(random.Random(seed), pictures))
        with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
            found = list(pool.map(lambda one: statuses_of(port, one), sent))
        for one, statuses in zip(sent, found, strict=True):
            assert all(100 <= status < 500 and status // 100 != 3 for status in statuses), (statuses, one[:500])
        assert {200, 400, 408} <= {status for statuses in found for status in statuses}
        resident.append(resident_bytes())
    assert resident[1] - resident[0] < MOST_GROWTH
    until = time.monotonic() + 10
    while service._held_bytes or service.batcher.waiting:
        assert time.monotonic() < until, "all that came has been let go"
        time.sleep(0.01)
    assert ask(port, "GET", "/health")[0] == 200
    status, content = ask(port, "POST", "/refine", pictures[0])
    assert status == 200
    assert json.loads(content.splitlines()[-1])["lanes"] == [1]
