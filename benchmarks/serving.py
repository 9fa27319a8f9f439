"""Requests per second of `mlcn_jax.serve` with batching, without, and of the model without a server; and latencies.

    python -m benchmarks.serving
    python -m benchmarks.serving --networks=mlcn2_4x4_32x32x3

Of each network's export, with its ONNX model, three servers, one with batching, one with `--max_batch=1` and one with
batching in several processes, take turns with the model in this process, in batches of the two powers of two next to
the first server's mean batch, of which the faster counts: other sizes are padded, which would flatter the server. Those
whose turn it is not use no CPU. This process is also the clients: so many connections, each of which asks again as soon
as it is answered, with PNG files of random pixels in the shape of the model's images. Then requests come at random
moments, half and nine tenths as many a second as those clients were answered, whether or not earlier ones have been
answered; those that the server turns away are counted, and have no latency. Writes `benchmarks/results/serving.json`
after each network; what is there of this machine is kept, and not measured again.
"""

import collections
import contextlib
import importlib.metadata
import io
import itertools
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import numpy as np
from absl import flags
from PIL import Image

from benchmarks import networks, peers
from benchmarks.frameworks import in_mlcn_jax
from benchmarks.http_clients import ask, ask_at
from mlcn_jax.data.images import read_pixels
from mlcn_jax.errors import InputError
from mlcn_jax.launch import launch_script
from mlcn_jax.serving.predict import open_model

_ROOT = Path(__file__).parents[1]
_SERVED = ["mlcn1_4x4_28x28x1", "mlcn1_8x4_28x28x1", "capsnet_28x28x1", "resnet_4xw4d2_32x32x3"]
_PICTURES = 64
_PAUSE_SECONDS = 0.3  # so that the other server's threads have gone to sleep
_SETTLE_SECONDS = 0.3  # of each turn, which do not count
_LOADS = {"half": 0.5, "nine_tenths": 0.9}  # of the requests a second that clients were answered
_PACKAGES = ("httptools", "pillow", "starlette", "uvicorn", "uvloop")


class Server:
    """`mlcn_jax.serve` in a process of its own."""

    def __init__(self, artifact: str, max_batch: int, workers: int = 1):
        options = ("--port=0", f"--max_batch={max_batch}", f"--workers={workers}")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mlcn_jax.serve", artifact, *options],
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


class InProcess:
    """The model itself, without a server: decodes the same pictures and computes them in batches of one size."""

    def __init__(self, artifact: str, requests: list[bytes], batch: int):
        self._model = open_model(artifact)  # as the server does
        files = itertools.cycle(request.partition(b"\r\n\r\n")[2] for request in requests)
        self._files = list(itertools.islice(files, batch))
        self._images = self._decoded()
        self._model.lengths(self._images)
        self.computed: list[float] = []
        self.decoded: list[float] = []

    def _decoded(self) -> np.ndarray:
        return np.stack([read_pixels(file, self._model.image_shape) for file in self._files])

    def turn(self, seconds: float) -> None:
        """Notes the images a second: computed only, and decoded and computed."""
        for rates, images in ((self.computed, lambda: self._images), (self.decoded, self._decoded)):
            started, count = time.perf_counter(), 0
            while time.perf_counter() < started + seconds:
                self._model.lengths(images())
                count += len(self._files)
            rates.append(count / (time.perf_counter() - started))


def powers_around(mean: float) -> list[int]:
    """The powers of two, one or two of them, next to a mean of at least 1."""
    below = 1 << int(np.log2(mean))
    return [below] if below == mean else [below, 2 * below]


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


def measure(network: networks.Network, values: flags.FlagValues) -> dict:
    """One network's figures."""
    processes = [(values.max_batch, 1), (1, 1), *([(values.max_batch, values.workers)] if values.workers > 1 else [])]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as open_servers:
        in_mlcn_jax.prepare(network, Path(folder), "infer", "float32", values.onnx_python)
        artifact = str(Path(folder) / "export")
        servers = [open_servers.enter_context(contextlib.closing(Server(artifact, *given))) for given in processes]
        return {"title": network.title, **_measured(artifact, servers, values)}


def _measured(artifact: str, servers: list[Server], values: flags.FlagValues) -> dict:
    batching, off = servers[:2]
    requests = pictures(json.loads(batching.get("/"))["image_shape"])
    ask(batching.port, requests, values.clients, values.seconds)
    models = {size: InProcess(artifact, requests, size) for size in powers_around(batching.mean_batch())}
    for first in range(values.rounds):
        for server in servers if first % 2 else servers[::-1]:
            server.turn(requests, values.clients, values.seconds)
        for model in models.values():
            time.sleep(_PAUSE_SECONDS)
            model.turn(values.seconds)
    mean_batch = batching.mean_batch()
    answered = [len(turn) / values.seconds for turn in batching.latencies[values.clients]]
    openly = {name: [] for name in _LOADS}
    turned_away = collections.Counter()
    for seed in range(values.rounds):
        for name, share in _LOADS.items():
            time.sleep(_PAUSE_SECONDS)
            rate = share * statistics.median(answered)
            latencies, refused = ask_at(batching.port, requests, rate, values.seconds, seed)
            openly[name].append(latencies)
            turned_away[name] += refused
    for first in range(values.rounds):
        for server in servers if first % 2 else servers[::-1]:
            server.turn(requests, 1, values.seconds)
    sizes = {
        what: max(models, key=lambda size: statistics.median(getattr(models[size], what)))
        for what in ("computed", "decoded")
    }
    runtime = json.loads(batching.get("/"))["runtime"]
    more = {}
    if values.workers > 1:
        several = servers[-1]
        more["throughput_of_workers_over_one_process"] = _over(
            *([len(turn) for turn in server.latencies[values.clients]] for server in (several, batching))
        )
        more["throughput_of_workers_over_computing_in_process"] = _over(
            [len(turn) / values.seconds for turn in several.latencies[values.clients]],
            models[sizes["computed"]].computed,
        )
        more["with_workers"] = several.results(values.seconds)
    throughput, latency = (
        [measured(a) / measured(b) for a, b in zip(batching.latencies[clients], off.latencies[clients], strict=True)]
        for clients, measured in ((values.clients, len), (1, statistics.median))
    )
    return {
        "runtime": runtime,
        "throughput_over_without_batching": peers.spread(throughput),
        "throughput_over_computing_in_process": _over(answered, models[sizes["computed"]].computed),
        "throughput_over_decoding_and_computing_in_process": _over(answered, models[sizes["decoded"]].decoded),
        "in_process": {
            f"batch_{size}": {
                "images_per_second": statistics.median(model.computed),
                "images_per_second_with_decoding": statistics.median(model.decoded),
            }
            for size, model in models.items()
        },
        **more,
        "open_loop": {
            name: {
                "requests_per_second": _LOADS[name] * statistics.median(answered),
                "milliseconds_p50": 1000 * float(np.percentile(np.concatenate(turns), 50)),
                "milliseconds_p99": 1000 * float(np.percentile(np.concatenate(turns), 99)),
                "turned_away": turned_away[name],
            }
            for name, turns in openly.items()
        },
        "single_client_latency_over_without_batching": peers.spread(latency),
        "images_in_a_batch": mean_batch,
        "with_batching": batching.results(values.seconds),
        "without_batching": off.results(values.seconds),
    }


def _over(some: list[float], others: list[float]) -> dict[str, float]:
    return peers.spread([a / b for a, b in zip(some, others, strict=True)])


def define(values: flags.FlagValues) -> None:
    peers.define_networks(values, _SERVED)
    flags.DEFINE_integer("clients", 32, "connections at a time", lower_bound=1, flag_values=values)
    flags.DEFINE_integer("max_batch", 64, "of the server with batching", lower_bound=2, flag_values=values)
    flags.DEFINE_integer(
        "workers", 2, "processes of the third server; 1 leaves it out", lower_bound=1, flag_values=values
    )
    flags.DEFINE_integer("rounds", 20, "interleaved rounds", lower_bound=1, flag_values=values)
    flags.DEFINE_float("seconds", 3.0, "of each turn", lower_bound=0.1, flag_values=values)
    peers.define_onnx_python(values)
    peers.define_out(values, "serving")


def main(values: flags.FlagValues) -> None:
    chosen = networks.chosen(values.networks)
    peers.check_onnx_python(values.onnx_python)
    settings = {name: values[name].value for name in ("rounds", "seconds", "clients", "max_batch", "workers")}
    settings["server_versions"] = {name: importlib.metadata.version(name) for name in _PACKAGES}
    results = peers.results_so_far(values, settings, "models")
    for network in chosen:
        with peers.kept(values, results, "models", network.name) as missing:
            if missing:
                results["models"][network.name] = result = measure(network, values)
                for what in ("throughput", "single_client_latency"):
                    ratio = result[f"{what}_over_without_batching"]
                    print(f"{network.title}: {what} {ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})")


if __name__ == "__main__":
    launch_script(define, main)
