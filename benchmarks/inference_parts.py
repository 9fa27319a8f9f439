"""Where the time of few images goes: dispatch, layout, products, and weights that are laid out at each call.

    python -m benchmarks.inference_parts
    python -m benchmarks.inference_parts --networks=mlcn1_4x4_28x28x1 --batches=1

In interleaved rounds, from uint8 images in host memory to lengths there: the export as `predict` and `serve` run it;
the same function jitted with its weights compiled in, and with its weights as arguments, whose difference is what
laying weights out at each call costs; and a program that computes nothing, which is dispatch, the images' way in and
the lengths' way out. Parts are the time of XLA's operations of the second while it is traced, by what they do, and what
is left of the time that the same calls took: convolutions that XLA computes beside other operations, most of them, are
in there, since a trace has only their start. FLOPs of products over the whole time stand against the machine's rate for
large ones. Writes `benchmarks/results/inference_parts.json` after each batch size of a network; what is there of this
machine is kept, and not measured again.
"""

import collections
import itertools
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from absl import flags

from benchmarks import networks, peers, roofline
from benchmarks.frameworks import in_artifact, in_mlcn_jax
from mlcn_jax.data.batches import to_pixels
from mlcn_jax.launch import launch_script
from mlcn_jax.nn.calibration import fold_statistics
from mlcn_jax.nn.model import class_lengths, encode
from mlcn_jax.placement import cost

_CALLS = 50  # of one image in a round, and traced; of more images, so many fewer
_PARTS = {  # by the operation that a result comes from, or else by the kind of XLA's operation; the first counts
    "products": "conv_general_dilated|dot_general|^dot|^convolution",
    "layout": "transpose|reshape|copy|pad|slice|concatenate|gather|broadcast",
}


def part_of(name: str, op_name: str) -> str:
    """What an operation of a program does."""
    return next(
        (part for part, pattern in _PARTS.items() if re.search(pattern, op_name.rpartition("/")[2] or name)),
        "element-wise and sums",
    )


def parts_of(hlo: str, microseconds: dict[str, float], seconds: float, calls: int) -> dict[str, float]:
    """Milliseconds of a call in each part, and in none, of so many calls that took so many seconds while traced.

    Operations that run beside each other count each, so that parts can add up to more than the call: then none is left.
    """
    pattern = r"^\s*(?:ROOT )?%?([\w.-]+) = (?:.*?op_name=\"(.*?)\")?"
    op_names = dict(re.findall(pattern, hlo, re.MULTILINE))
    found = collections.Counter()
    for name, duration in microseconds.items():
        found[part_of(name, op_names.get(name, ""))] += duration / calls / 1000
    left = 1000 * seconds / calls - sum(found.values())
    return {**found, "not in operations": left} if left > 0 else dict(found)


def measure(network: networks.Network, batch: int, rounds: int, product_rate: Callable[[], float]) -> dict:
    """Milliseconds of each way for so many images, and the parts of the second."""
    spec = in_mlcn_jax.make_spec(network)
    encoder = fold_statistics(spec, in_mlcn_jax.start_params(network, calibrated=True))["encoder"]
    images = np.random.default_rng(0).integers(0, 256, (batch, *network.image_shape), np.uint8)
    options, num_calls = spec.compiler_options(jax.default_backend(), batch), -(-_CALLS // batch)

    def lengths(encoder, images):
        return class_lengths(spec, encode(spec, encoder, to_pixels(images)))

    given = jax.jit(lengths, compiler_options=options)
    within = jax.jit(lambda images: lengths(encoder, images), compiler_options=options).lower(images).compile()
    nothing = jax.jit(lambda images: jax.numpy.zeros((len(images), networks.NUM_CLASSES)), keep_unused=True)
    with tempfile.TemporaryDirectory() as folder:
        in_mlcn_jax.write_export(network, Path(folder), "float32")
        program = in_artifact.Program(network, batch, Path(folder), "xla", "float32")
    calls = {
        "export": lambda: program.infer(images),
        "weights compiled in": lambda: np.asarray(within(images)),
        "weights as arguments": lambda: np.asarray(given(encoder, images)),
        "nothing": lambda: np.asarray(nothing(images)),
    }
    taken: dict[str, list[float]] = {name: [] for name in calls}
    rates = []
    for _ in range(rounds + 1):
        for name, call in calls.items():
            call()
            started = time.perf_counter()
            for _ in range(num_calls):
                call()
            taken[name].append(1000 * (time.perf_counter() - started) / num_calls)
        rates.append(product_rate())
    hlo = within.as_text()
    parts = parts_of(hlo, *roofline.traced(calls["weights compiled in"], hlo, num_calls), num_calls)
    flops, rate = cost.matmul_flops(lengths, encoder, images), max(rates[1:])
    milliseconds = {name: statistics.median(values[1:]) for name, values in taken.items()}
    return {
        "title": network.title,
        "batch": batch,
        "milliseconds": milliseconds,
        "parts_milliseconds": parts,
        "flops": flops,
        "product_flops_per_second": rate,
        "share_of_product_rate": flops / rate / (milliseconds["weights compiled in"] / 1000),
    }


def product_rate() -> Callable[[], float]:
    """A function that measures FLOPs a second of a large product."""
    run, flops = next(iter(roofline.compile_probes().values()))

    def rate() -> float:
        started = time.perf_counter()
        jax.block_until_ready(run())
        return flops / (time.perf_counter() - started)

    return rate


def define(values: flags.FlagValues) -> None:
    peers.define_networks(values)
    flags.DEFINE_integer("rounds", 20, "interleaved rounds", lower_bound=1, flag_values=values)
    peers.define_batches(values, [1, 8])
    peers.define_out(values, "inference_parts")


def main(values: flags.FlagValues) -> None:
    chosen, batches = networks.chosen(values.networks), peers.batches(values)
    results = peers.results_so_far(values, {"rounds": values.rounds}, "networks")
    rate = product_rate()
    for network, batch in itertools.product(chosen, batches):
        name = f"{network.name}_batch_{batch}"
        with peers.kept(values, results, "networks", name) as missing:
            if missing:
                results["networks"][name] = entry = measure(network, batch, values.rounds, rate)
                print(network.title, batch, entry["milliseconds"], entry["parts_milliseconds"], flush=True)


if __name__ == "__main__":
    launch_script(define, main)
