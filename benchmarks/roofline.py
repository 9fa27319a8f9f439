"""How far a training step is from what the machine can do, and which part of it takes longest.

    python -m benchmarks.roofline

For each network with a target: FLOPs of the matrix products in the compiled step, bytes that its operations read and
write (as XLA counts them: a product that XLA's library fused is one operation), FLOPs of the direct convolutions for
comparison, and the seconds that these would take at the product rate and memory bandwidth measured in the same run.
Then a profile of the step by kinds of operation. Writes `benchmarks/results/roofline.json`.
"""

import collections
import dataclasses
import functools
import gzip
import json
import math
import re
import statistics
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from benchmarks import networks, peers
from benchmarks.frameworks import in_mlcn_jax
from mlcn_jax import conv, cost, devices
from mlcn_jax.config import write_json
from mlcn_jax.launch import launch
from mlcn_jax.model import apply_model, init_params

_NETWORKS = flags.DEFINE_list("networks", [n.name for n in networks.TARGETS], "; ".join(networks.NETWORKS))
_ROUNDS = flags.DEFINE_integer("rounds", 10, "timed rounds", lower_bound=1)
_PROFILED_STEPS = 5
_PRODUCTS = ((2048, 2048, 2048), (14400, 300, 256))  # a large one, and the first convolution of a lane


def best_seconds(function, *args, repeats: int = 20) -> float:
    compiled = jax.jit(function, compiler_options=conv.compiler_options(jax.default_backend())).lower(*args).compile()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def machine() -> dict:
    """FLOP/s of float32 products, and bytes per second of reading and writing a large array."""
    key = jax.random.key(0)
    rates = {}
    for m, k, n in _PRODUCTS:
        seconds = best_seconds(jnp.matmul, jax.random.normal(key, (m, k)), jax.random.normal(key, (k, n)))
        rates[f"{m}x{k}x{n}"] = 2 * m * k * n / seconds
    x = jnp.zeros(2**26)
    return {
        "product_flops_per_second": rates,
        "bytes_per_second": 2 * x.nbytes / best_seconds(lambda x: x + 1, x),
    }


def compiled_product_flops(hlo: str) -> int:
    """FLOPs of all dots in a compiled program's text, those inside fusions included."""
    shapes = {
        name: [int(n) for n in dims.split(",") if n]
        for name, dims in re.findall(r"^\s*(?:ROOT )?%?([\w.-]+) = \w+\[([\d,]*)\]", hlo, re.MULTILINE)
    }
    total = 0
    pattern = r"%?([\w.-]+) = \w+\[[\d,]*\]\S* dot\(%?([\w.-]+), .*?lhs_contracting_dims={([\d,]*)}"
    for name, lhs, dims in re.findall(pattern, hlo):
        total += 2 * math.prod(shapes[name]) * math.prod(shapes[lhs][int(d)] for d in dims.split(","))
    return total


def direct_flops(network: networks.Network) -> int:
    """Of a training step with direct convolutions: thrice the forward pass, less the gradient of the images."""
    spec = dataclasses.replace(in_mlcn_jax.make_spec(network), conv="native")
    params = jax.eval_shape(lambda key: init_params(spec, key), jax.random.key(0))
    height, width, channels = network.image_shape
    images = jax.ShapeDtypeStruct((networks.BATCH, height, width, channels), jnp.float32)
    forward = cost.matmul_flops(lambda p, x: apply_model(spec, p, x), params, images)
    filters = (
        256 if network.kind == "capsnet" else network.lanes * network.width * (8 if network.kind == "mlcn2" else 16)
    )
    first = 2 * networks.BATCH * (height - 8) * (width - 8) * 81 * channels * filters
    return 3 * forward - first


def profile(program, batch, hlo: str) -> list[dict]:
    """Shares of the time that the step's operations take, by kind: name without number, and type of the result."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(_PROFILED_STEPS):
                float(program.train(*batch))
        (file,) = Path(folder).rglob("*.trace.json.gz")
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    kinds = dict(re.findall(r"^\s*(?:ROOT )?%?([\w.-]+) = (\(?\w+\[[\d,]*\])", hlo, re.MULTILINE))
    scopes = dict(re.findall(r'^\s*(?:ROOT )?%?([\w.-]+) = .*?op_name="([^"]*)"', hlo, re.MULTILINE))
    durations: collections.Counter = collections.Counter()
    for event in events:
        operation = event.get("args", {}).get("hlo_op")
        if operation in kinds and "dur" in event and not operation.startswith("while"):
            scope = scopes.get(operation, "")
            part = "decoder" if "decoder" in scope else "encoder" if "encoder" in scope else "optimizer and metrics"
            direction = "backward" if "transpose(" in scope else "forward" if part != "optimizer and metrics" else ""
            name = re.sub(r"[.\d]+$", "", operation)
            durations[f"{part} {direction}".strip(), f"{name} {kinds[operation]}"] += event["dur"]
    total = sum(durations.values())
    return [
        {"part": part, "operation": operation, "share": duration / total}
        for (part, operation), duration in durations.most_common(12)
    ]


def measure(network: networks.Network, rates: dict, rounds: int) -> dict:
    program = in_mlcn_jax.Program(network, networks.BATCH, in_mlcn_jax.start_weights(network), "vmap", "float32")
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (networks.BATCH, *network.image_shape), dtype=np.uint8)
    batch = images, rng.integers(0, networks.NUM_CLASSES, networks.BATCH, dtype=np.int32)
    milliseconds = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        for _ in range(3):
            loss = program.train(*batch)
        float(loss)
        milliseconds.append((time.perf_counter() - started) * 1000 / 3)
    step_seconds = statistics.median(milliseconds[1:]) / 1000
    hlo = program.compiled.as_text()
    flops, moved = compiled_product_flops(hlo), program.compiled.cost_analysis()["bytes accessed"]
    product_seconds = flops / max(rates["product_flops_per_second"].values())
    memory_seconds = moved / rates["bytes_per_second"]
    parts = profile(program, batch, hlo)
    return {
        "title": network.title,
        "step_seconds": step_seconds,
        "flops": flops,
        "direct_flops": direct_flops(network),
        "bytes": moved,
        "seconds_at_product_rate": product_seconds,
        "seconds_at_bandwidth": memory_seconds,
        "share_of_product_rate": product_seconds / step_seconds,
        "share_of_bandwidth": memory_seconds / step_seconds,
        "largest_part": parts[0],
        "profile": parts,
    }


def main(argv):
    del argv
    chosen = [networks.find(name) for name in _NETWORKS.value]
    rates = machine()
    results = {"rounds": _ROUNDS.value, **devices.environment(), "machine": rates, "networks": {}}
    for network in chosen:
        results["networks"][network.name] = entry = measure(network, rates, _ROUNDS.value)
        write_json(peers.RESULTS / "roofline.json", results)
        print(
            f"{entry['title']}: {1000 * entry['step_seconds']:.0f} ms; {entry['flops'] / 1e9:.1f} GFLOP (direct "
            f"{entry['direct_flops'] / 1e9:.1f}), {entry['share_of_product_rate']:.0%} of the product rate; "
            f"{entry['bytes'] / 1e9:.2f} GB, {entry['share_of_bandwidth']:.0%} of the bandwidth; largest: "
            "{operation}, {part}, {share:.0%}".format(**entry["largest_part"]),
            flush=True,
        )


if __name__ == "__main__":
    launch(functools.partial(app.run, main))
