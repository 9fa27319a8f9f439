"""Where a training step stands between this machine's rate of products and its memory bandwidth.

    python -m benchmarks.roofline
    python -m benchmarks.roofline --networks=mlcn1_4x4_28x28x1

FLOPs are those of the matrix products and convolutions of the traced step (`cost.matmul_flops`): as it runs, with the
zeros that pad kernels to four phases and with no gradient of the images, and as plain convolutions would take, which
is three times the forward pass but for the first convolution, whose input has no gradient.

Bytes are XLA's count of what every operation of the compiled step reads and writes. One that YNN computes counts with
its operands and results, not with what it keeps inside, and nothing is said about caches, so that a step can be faster
than the bandwidth roof. Seconds are medians over rounds of a few steps, where images come from host memory as in
training. The rates are the best of rounds taken in turn with those of the steps, because a shared machine's rates
change by the minute: products of two shapes, and x + 1 over 256 MiB, read and written.

Parts are shares of the time of XLA's operations, added up, while a few steps are traced; on a CPU two operations can
run at once. Of a loop those in its body count. Writes `benchmarks/results/roofline.json` after each network; what is
there of this machine is kept, and not measured again.
"""

import collections
import dataclasses
import functools
import gzip
import json
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags

from benchmarks import networks, peers
from benchmarks.frameworks import in_mlcn_jax
from mlcn_jax.launch import launch_script
from mlcn_jax.nn import conv
from mlcn_jax.placement import cost
from mlcn_jax.training.step import make_train_step

STEPS = 5  # in a round, and traced
PRODUCTS = ((2048, 2048, 2048), (14400, 300, 256))  # a large one; the first convolution of an mlcn1 lane on 32x32x3
COPY_BYTES = 2**28
_RUN_OTHERS = ("while", "conditional", "call")  # operations that take the time of those in them, which are traced, too


def compile_probes() -> dict[str, tuple[Callable, int]]:
    """What measures the machine, compiled as the training step is: a call, and its FLOPs or bytes."""
    options = conv.compiler_options(jax.default_backend(), chains=True)

    def compiled(function, *args):
        return functools.partial(jax.jit(function, compiler_options=options).lower(*args).compile(), *args)

    probes = {}
    for rows, depth, columns in PRODUCTS:
        run = compiled(jnp.matmul, jnp.ones((rows, depth)), jnp.ones((depth, columns)))
        probes[f"product_{rows}x{depth}x{columns}_flops_per_second"] = run, 2 * rows * depth * columns
    run = compiled(lambda x: x + 1, jnp.ones(COPY_BYTES // 4))
    return probes | {"bytes_per_second": (run, 2 * COPY_BYTES)}


def step_flops(spec, state, images, labels) -> int:
    optimizer = optax.adam(networks.LEARNING_RATE)
    weight = networks.RECONSTRUCTION_WEIGHT
    step = make_train_step(spec, optimizer, reconstruction_weight=weight, seed=0)
    return cost.matmul_flops(step, state, images, labels)


def traced(call: Callable[[], object], hlo: str, calls: int) -> tuple[dict[str, float], float]:
    """Microseconds in each operation of a program over so many warm calls, and the seconds that these took.

    Args:
      call: runs the program, and waits for it.
      hlo: the program's text.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # tracing Python as well would slow the calls down
    call()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            started = time.perf_counter()
            for _ in range(calls):
                call()
            seconds = time.perf_counter() - started
        (path,) = Path(folder).rglob("*.trace.json.gz")
        with gzip.open(path) as file:
            events = json.load(file)["traceEvents"]
    return by_operation(events, hlo), seconds


def by_operation(events: Iterable[dict], hlo: str) -> dict[str, float]:
    """Microseconds of a trace's events in each operation, by its name in `hlo`; without operations that run others."""
    found = re.findall(r"^\s*(?:ROOT )?%?([\w.-]+) = .*? ([\w-]+)\((.*)", hlo, re.MULTILINE)
    whole = 'xla_cpu_small_call="true"'  # compiled as one operation, so that nothing in it is traced
    run_others = {name for name, opcode, rest in found if opcode in _RUN_OTHERS and whole not in rest}
    total = collections.Counter()
    for event in events:
        name = event.get("args", {}).get("hlo_op")
        if name is not None and name not in run_others and "dur" in event:
            total[name] += event["dur"]
    return total


def part_of(network: networks.Network, op_name: str, shape: tuple[int, ...]) -> str:
    """A part of the step, from where in the model an operation comes from and the shape of its result."""
    if "/decoder" in op_name:
        return "decoder"
    if not re.search(r"/encoder|\bLane\b", op_name):  # CapsNet's, and those of lanes
        return "optimizer, losses and the rest"
    direction = "backward" if "transpose(jvp" in op_name else "forward"
    if network.kind == "resnet":
        return f"encoder, {direction}: {_residual_layer(network, op_name, shape)}"
    outputs = (network.image_shape[0] - 8 - 9) // 2 + 1
    points = outputs + 4  # a phase of a 9x9 kernel with stride 2 has 5 taps
    frequencies = 3 * -(-points // 2) * points
    capsules = outputs**2 * (2 * network.width if network.lanes else 32)
    dims = tuple(size for size in shape if size > 1)
    if {capsules, 8 * capsules} & set(dims):
        layer = "capsules"
    elif dims[:1] == (points**2 * networks.BATCH,):
        layer = "map between the convolutions"
    elif dims[:2] == (frequencies, networks.BATCH):
        layer = "spectra of maps"
    elif dims[:1] == (frequencies,):
        layer = "spectra of kernels"
    elif dims[:2] == (outputs**2, networks.BATCH) or dims[:3] == (outputs, outputs, networks.BATCH):
        layer = "products of spectra, transformed back"
    else:
        layer = "other"
    return f"encoder, {direction}: {layer}"


def _residual_layer(network: networks.Network, op_name: str, shape: tuple[int, ...]) -> str:
    """What an operation of a residual lane does, and the size of its maps: 31, 15, 7 and 3 for 32x32 images."""
    dims = tuple(size for size in shape if size > 1)
    convolves = re.search("conv_general_dilated|dot_general", op_name) is not None
    pools = re.search("/pooling/|reduce_max", op_name) is not None
    if network.batch not in dims and 2 in (dims.count(2), dims.count(3)) and not pools:
        return "gradients of kernels" if convolves else "kernels"
    what = "convolutions" if convolves else "normalisation and activation"
    if pools or dims.count(2) == 2:  # 2x2 values of each result
        what = "pooling"
    sizes = [network.image_shape[0] - 1]
    while sizes[-1] > 3:
        sizes.append(sizes[-1] // 2)
    size = next((size for size in sizes if dims.count(size) >= 2), None)
    return f"{what}, {size}x{size}" if size else f"{what}, head and statistics"


def shares(network: networks.Network, hlo: str, microseconds: dict[str, float]) -> tuple[dict, dict]:
    """Shares of the parts, and of the five kinds of operation (name without number, result) that take longest."""
    pattern = r"^\s*(?:ROOT )?%?([\w.-]+) = \(?(\w+)\[([\d,]*)\](?:.*?op_name=\"(.*?)\")?"
    found = {name: rest for name, *rest in re.findall(pattern, hlo, re.MULTILINE)}
    parts, kinds = collections.Counter(), collections.Counter()
    for name, duration in microseconds.items():
        dtype, sizes, op_name = found.get(name, ("", "", ""))
        part = part_of(network, op_name, tuple(map(int, filter(None, sizes.split(",")))))
        parts[part] += duration
        kinds[f"{re.sub(r'[.0-9]+$', '', name)} {dtype}[{sizes}], {part}"] += duration
    total = sum(microseconds.values())

    def largest(counter, number=None):
        return {name: duration / total for name, duration in counter.most_common(number)}

    return largest(parts), largest(kinds, 5)


def measure(network: networks.Network, probes: dict[str, tuple[Callable, int]], rounds: int) -> dict:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (network.batch, *network.image_shape), dtype=np.uint8)
    labels = rng.integers(0, networks.NUM_CLASSES, network.batch, dtype=np.int32)
    weights = in_mlcn_jax.start_weights(network)
    program = in_mlcn_jax.Program(network, network.batch, weights, "vmap", "float32")

    def take_steps():
        return jax.block_until_ready([program.train(images, labels) for _ in range(STEPS)])

    calls = {"step": take_steps, **{name: call for name, (call, _) in probes.items()}}
    seconds = peers.in_turns(calls, rounds)  # the first round compiles
    measured = 1 / statistics.median(STEPS / taken for taken in seconds["step"])
    machine = {name: work / min(seconds[name]) for name, (_, work) in probes.items()}
    flops = step_flops(program.spec, program.state, images, labels)
    plain = step_flops(dataclasses.replace(program.spec, conv="native"), program.state, images, labels)
    num_bytes = (program.compiled.cost_analysis() or {}).get("bytes accessed")
    if network.kind == "resnet":
        num_bytes = None  # of a loop XLA counts one turn
    at_products = flops / max(rate for name, rate in machine.items() if name.startswith("product"))
    at_bandwidth = num_bytes / machine["bytes_per_second"] if num_bytes else None
    hlo = program.compiled.as_text()
    microseconds, _ = traced(lambda: float(program.train(images, labels)), hlo, STEPS)
    parts, kinds = shares(network, hlo, microseconds)
    return {
        "title": network.title,
        "batch": network.batch,
        "seconds": measured,
        "machine": machine,
        "flops": flops,
        "flops_of_plain_convolutions": plain,
        "bytes": num_bytes,
        "seconds_at_product_rate": at_products,
        "seconds_at_bandwidth": at_bandwidth,
        "share_of_product_roof": at_products / measured,
        "share_of_bandwidth_roof": at_bandwidth and at_bandwidth / measured,
        "binding": "bandwidth" if at_bandwidth and at_bandwidth > at_products else "products",
        "largest_part": next(iter(parts)),
        "parts": parts,
        "largest_kinds": kinds,
    }


def table(results: dict) -> str:
    lines = ["| network | ms | GFLOP | plain GFLOP | GB | of product roof | of bandwidth roof | binds | largest part |"]
    lines.append("|" + "---|" * 9)
    for entry in results["networks"].values():
        part = entry["largest_part"]
        row = [entry["title"], f"{1000 * entry['seconds']:.1f}"]
        row += [f"{entry[name] / 1e9:.1f}" for name in ("flops", "flops_of_plain_convolutions")]
        row.append(f"{entry['bytes'] / 1e9:.2f}" if entry["bytes"] else "-")
        row.append(f"{entry['share_of_product_roof']:.0%}")
        row.append(f"{entry['share_of_bandwidth_roof']:.0%}" if entry["bytes"] else "-")
        row += [entry["binding"], f"{part} ({entry['parts'][part]:.0%})"]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def define(values: flags.FlagValues) -> None:
    peers.define_networks(values)
    flags.DEFINE_integer("rounds", 20, "rounds of each network", lower_bound=1, flag_values=values)
    peers.define_out(values, "roofline")


def main(values: flags.FlagValues) -> None:
    chosen = networks.chosen(values.networks)
    results = peers.results_so_far(values, {"rounds": values.rounds}, "networks")
    probes = compile_probes()
    for network in chosen:
        with peers.kept(values, results, "networks", network.name) as missing:
            if missing:
                results["networks"][network.name] = measure(network, probes, values.rounds)
    print(table(results))


if __name__ == "__main__":
    launch_script(define, main)
