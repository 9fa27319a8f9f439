"""The server under load: many clients, some of which leave or do not read; processes that are replaced meanwhile."""

import contextlib
import http.client
import io
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import REPOSITORY
from PIL import Image

from mlcn_jax.data.images import read_pixels
from mlcn_jax.serving.artifact import Artifact

pytestmark = pytest.mark.long

CLIENTS, REQUESTS = 256, 10_000
_GROWTH_MIB = 300  # of a server's memory under 256 clients


@contextlib.contextmanager
def started(folder, *options):
    """A server in processes of its own, and its port."""
    command = [sys.executable, "-m", "mlcn_jax.serve", str(folder), "--port=0", *options]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        line = process.stdout.readline()
        found = re.search(r":(\d+)/predict", line)
        assert found, line + process.stdout.read()
        yield process, int(found[1])
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert process.stdout.read() == ""
    finally:
        process.kill()


def pictures_of(model, count=40):
    rng, files = np.random.default_rng(0), []
    for _ in range(count):
        buffer = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, model.image_shape[:2]).astype(np.uint8)).save(buffer, "PNG")
        files.append(buffer.getvalue())
    probabilities = model.probabilities(np.stack([read_pixels(file, model.image_shape) for file in files]))
    return files, probabilities.max(axis=1)


class Client(threading.Thread):
    """Asks with one connection until `stop`, and counts what it gets; now and then it leaves without its answer."""

    def __init__(self, port, files, wanted, seed, stop, leaves=False):
        super().__init__(daemon=True)
        self.port, self.files, self.wanted, self.stop, self.leaves = port, files, wanted, stop, leaves
        self.random = random.Random(seed)
        self.statuses: dict[int, int] = {}
        self.wrong, self.lost = 0, 0

    def run(self):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        while not self.stop():
            which = self.random.randrange(len(self.files))
            try:
                connection.request("POST", "/predict", self.files[which], {"Content-Type": "image/png"})
                if self.leaves and self.random.random() < 0.1:
                    connection.close()
                    continue
                response = connection.getresponse()
                answer = json.loads(response.read())
            except (OSError, http.client.HTTPException, ValueError):  # time-outs and answers that are none, too
                connection.close()
                self.lost += 1
                continue
            self.statuses[response.status] = self.statuses.get(response.status, 0) + 1
            if response.status == 200:
                self.wrong += abs(answer["predictions"][0]["probability"] - self.wanted[which]) > 1e-5
            else:
                time.sleep(0.01)
        connection.close()


def resident_mib(pid):
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) / 1024


def answered(clients):
    """Requests that were computed; those that were turned away do not count."""
    return sum(client.statuses.get(200, 0) for client in clients)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads memory from /proc")
def test_ten_thousand_requests_of_256_clients_are_answered_right_in_bounded_memory(exported):
    model = Artifact(exported / "export", "xla")
    files, wanted = pictures_of(model)
    with started(exported / "export", "--runtime=xla", "--max_connections=400") as (process, port):
        idle = [socket.socket() for _ in range(20)]
        for connection in idle:  # which never read their answers
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)  # before the window is agreed on
            connection.connect(("127.0.0.1", port))
            connection.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * 16)
        clients: list[Client] = []
        before = resident_mib(process.pid)

        def stop():
            return answered(clients) >= REQUESTS

        clients += [Client(port, files, wanted, i, stop, leaves=i % 4 == 0) for i in range(CLIENTS)]
        for client in clients:
            client.start()
        most = 0.0
        while any(client.is_alive() for client in clients):
            most = max(most, resident_mib(process.pid))
            time.sleep(0.1)
        for connection in idle:
            connection.close()
        assert sum(client.wrong for client in clients) == 0
        assert {status for client in clients for status in client.statuses} <= {200, 429}
        assert sum(client.lost for client in clients) == 0
        assert answered(clients) >= REQUESTS
        assert most - before < _GROWTH_MIB


def test_processes_are_replaced_under_load_without_losing_a_request(exported):
    model = Artifact(exported / "export", "xla")
    files, wanted = pictures_of(model)
    with started(exported / "export", "--workers=2", "--runtime=xla", "--max_batch=4") as (process, port):

        def workers():
            found = subprocess.run(
                ["ps", "-o", "pid=", "-o", "args=", "-ww", "--ppid", str(process.pid)], capture_output=True, text=True
            )
            return {int(line.split()[0]) for line in found.stdout.splitlines() if "spawn_main" in line}

        ended = threading.Event()
        clients = [Client(port, files, wanted, i, ended.is_set) for i in range(8)]
        for client in clients:
            client.start()
        before = workers()
        assert len(before) == 2
        for pid in (*before, process.pid):  # as when their terminal closes
            os.kill(pid, signal.SIGHUP)
        until(lambda: not before & workers() and len(workers()) == 2)
        assert sum(client.lost for client in clients) == 0
        os.kill(min(workers()), signal.SIGKILL)  # one that dies is replaced, too
        until(lambda: len(workers()) == 2)
        ended.set()
        for client in clients:
            client.join(60)
        assert not any(client.is_alive() for client in clients)
        assert sum(client.wrong for client in clients) == 0
        assert {status for client in clients for status in client.statuses} == {200}
        assert answered(clients) > 100
        assert sum(client.lost for client in clients) <= len(clients)  # those of the process that was killed


def until(condition):
    for _ in range(600):
        if condition():
            return
        time.sleep(0.2)
    raise AssertionError("it did not happen")


@pytest.mark.parametrize(
    ("path", "said"), [("", "is not an exported model"), ("~nobody.of.this.name", "home director")]
)
def test_a_model_that_cannot_be_read_is_told_once(tmp_path, path, said):
    command = [sys.executable, "-m", "mlcn_jax.serve", path or str(tmp_path), "--port=0", "--workers=3"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=200)
    assert done.returncode == 2
    assert done.stderr.count("error: ") == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr
