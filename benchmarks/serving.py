"""Requests per second of `mlcn_jax.serve` with batching over without, and what batching costs a single client.

    python -m benchmarks.serving --artifacts=runs/small/export,runs/large/export

For each model two servers, one with batching, one with `--max_batch=1`, take turns; the one whose turn it is not waits
for requests and uses no CPU. This process is the clients: so many connections, each of which asks again as soon as it
is answered, with PNG files of random pixels in the shape of the model's images. Writes
`benchmarks/results/serving.json` after each model.
"""

import importlib.metadata
import io
import json
import re
import select
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
from absl import flags
from PIL import Image

from mlcn_jax.errors import InputError
from mlcn_jax.files import write_json
from mlcn_jax.launch import launch_script

_ROOT = Path(__file__).parents[1]
_PICTURES = 64
_PAUSE_SECONDS = 0.3  # so that the other server's threads have gone to sleep
_SETTLE_SECONDS = 0.3  # of each turn, which do not count
_PACKAGES = ("httptools", "pillow", "starlette", "uvicorn", "uvloop")


class Server:
    """`mlcn_jax.serve` in a process of its own."""

    def __init__(self, artifact: str, max_batch: int):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mlcn_jax.serve", artifact, "--port=0", f"--max_batch={max_batch}"],
            cwd=_ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        found = re.search(r":(\d+)/predict", self._process.stdout.readline())
        if found is None:
            raise InputError(f"there is no server for {artifact}, as said above")
        self.port = int(found[1])
        self.latencies: dict[int, list[list[float]]] = {}

    def get(self, path: str) -> str:
        """The answer to a GET request."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}") as answer:
            return answer.read().decode()

    def mean_batch(self) -> float:
        """Images computed at once, so far."""
        metrics = self.get("/metrics")
        images, batches = (
            float(re.search(rf"^mlcn_jax_batch_images_{what} (\S+)$", metrics, re.MULTILINE)[1])
            for what in ("sum", "count")
        )
        return images / batches

    def turn(self, requests: list[bytes], clients: int, seconds: float) -> None:
        """Asks with so many clients at a time, and keeps the seconds that each answer took."""
        time.sleep(_PAUSE_SECONDS)
        ask(self.port, requests, clients, _SETTLE_SECONDS)
        self.latencies.setdefault(clients, []).append(ask(self.port, requests, clients, seconds))

    def results(self, seconds: float) -> dict:
        """Of all turns of so many seconds; throughput is the median over them."""
        return {
            f"{clients}_clients": {
                "requests_per_second": statistics.median(len(turn) for turn in turns) / seconds,
                "milliseconds_p50": 1000 * float(np.percentile(np.concatenate(turns), 50)),
                "milliseconds_p99": 1000 * float(np.percentile(np.concatenate(turns), 99)),
            }
            for clients, turns in self.latencies.items()
        }

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


def ask(port: int, requests: list[bytes], clients: int, seconds: float) -> list[float]:
    """Seconds that each request took which was answered in so many seconds.

    Raises:
      InputError: an answer is none, or an error.
    """
    poll = select.epoll()
    sent = {}
    connections = {}
    received: dict[int, bytes] = {}
    turn = 0
    for _ in range(clients):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connections[connection.fileno()] = connection
        poll.register(connection, select.EPOLLIN)
    latencies = []
    end = time.perf_counter() + seconds
    for file, connection in connections.items():
        sent[file] = time.perf_counter()
        connection.sendall(requests[turn % len(requests)])
        turn += 1
    while time.perf_counter() < end:
        for file, _ in poll.poll(end - time.perf_counter()):
            connection = connections[file]
            answer = received.pop(file, b"") + connection.recv(2**16)
            head, _, body = answer.partition(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head)
            if answer and (length is None or len(body) < int(length[1])):
                received[file] = answer
                continue
            if not answer.startswith(b"HTTP/1.1 200 "):
                raise InputError(f"the server at port {port} answered {answer.decode()!r}")
            now = time.perf_counter()
            latencies.append(now - sent[file])
            sent[file] = now
            connection.sendall(requests[turn % len(requests)])
            turn += 1
    for connection in connections.values():
        connection.close()
    poll.close()
    return latencies


def pictures(image_shape: list[int]) -> list[bytes]:
    """Requests with PNG files of random pixels."""
    rng = np.random.default_rng(0)
    height, width, channels = image_shape
    requests = []
    for _ in range(_PICTURES):
        pixels = rng.integers(0, 256, (height, width, 3)).astype(np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels if channels == 3 else pixels[..., 0]).save(file, "PNG")
        head = f"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/png\r\nContent-Length: {file.tell()}\r\n\r\n"
        requests.append(head.encode() + file.getvalue())
    return requests


def measure(artifact: str, values: flags.FlagValues) -> dict:
    """One model's figures."""
    batching, off = servers = Server(artifact, values.max_batch), Server(artifact, 1)
    requests = pictures(json.loads(batching.get("/"))["image_shape"])
    for first in range(values.rounds):
        for server in servers if first % 2 else servers[::-1]:
            server.turn(requests, values.clients, values.seconds)
    mean_batch = batching.mean_batch()
    for first in range(values.rounds):
        for server in servers if first % 2 else servers[::-1]:
            server.turn(requests, 1, values.seconds)
    for server in servers:
        server.close()
    model = json.loads((Path(artifact) / "model.json").read_text())
    throughput, latency = (
        [measured(a) / measured(b) for a, b in zip(batching.latencies[clients], off.latencies[clients], strict=True)]
        for clients, measured in ((values.clients, len), (1, statistics.median))
    )
    return {
        "lanes": model["lanes"],
        "image_shape": model["image_shape"],
        "parameters": model["parameters"],
        "throughput_over_without_batching": _spread(throughput),
        "single_client_latency_over_without_batching": _spread(latency),
        "images_in_a_batch": mean_batch,
        "with_batching": batching.results(values.seconds),
        "without_batching": off.results(values.seconds),
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_list("artifacts", [], "folders that `mlcn_jax export` wrote", flag_values=values)
    flags.DEFINE_integer("clients", 32, "connections at a time", lower_bound=1, flag_values=values)
    flags.DEFINE_integer("max_batch", 64, "of the server with batching", lower_bound=2, flag_values=values)
    flags.DEFINE_integer("rounds", 10, "interleaved rounds", lower_bound=1, flag_values=values)
    flags.DEFINE_float("seconds", 3.0, "of each turn", lower_bound=0.1, flag_values=values)
    flags.DEFINE_string(
        "out", str(Path(__file__).parent / "results" / "serving.json"), "file to write", flag_values=values
    )


def main(values: flags.FlagValues) -> None:
    if not values.artifacts:
        raise InputError("--artifacts=FOLDER,... names no exported model: mlcn_jax export writes one")
    from mlcn_jax import host  # loads jax, whose threads wait while the servers work

    results = {
        "rounds": values.rounds,
        "seconds": values.seconds,
        "clients": values.clients,
        "max_batch": values.max_batch,
        **host.environment(),
        "server_versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "models": [],
    }
    for artifact in values.artifacts:
        result = measure(artifact, values)
        results["models"].append(result)
        write_json(Path(values.out), results)
        for name in ("throughput", "single_client_latency"):
            ratio = result[f"{name}_over_without_batching"]
            print(f"{result['lanes']}: {name} {ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})")


if __name__ == "__main__":
    launch_script(define, main)
