"""The published scaling over K80s, simulated from the published seconds on one P100 (do Rosario 2021, thesis).

    python -m experiments.published_scaling

Input: the thesis's seconds an epoch (table 4.1), a K80 4.2 times as slow as that P100, and assumptions, all in flags:
links, and the decoder's share of a step. Seconds are in proportion to the lanes and images that a device has. Output:
step times of MLCN and CapsNet on 1, 2, 4, 8 K80s of one host, as speed-up over the same model on one K80 and over
CapsNet on one K80, apart, beside the published 7.18 (over CapsNet on one); and the curve continued to 1,024 devices of
128 hosts. Nothing is fitted to 7.18: where the decoder is on one device, its assumed share decides.

Writes `experiments/results/published_scaling.json` and `.png`.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any

from absl import flags

from experiments import RESULTS
from mlcn_jax import host
from mlcn_jax.distributed import traffic
from mlcn_jax.files import markdown, write_json
from mlcn_jax.launch import launch_script
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.placement.partition import partition
from mlcn_jax.placement.problem import Problem, uniform_seconds
from mlcn_jax.placement.simulate import ALGORITHMS, Cluster, Link, StepTime, simulate_mesh, simulate_stacks

PUBLISHED_SPEEDUP = 7.18  # 8 K80s over CapsNet on one, of a model that is not named with it
K80_SLOWNESS = 4.2  # over a P100
BATCH = 100
STEPS = {"CIFAR-10": 500, "Fashion-MNIST": 600}  # an epoch
IMAGE_SHAPES = {"CIFAR-10": (32, 32, 3), "Fashion-MNIST": (28, 28, 1)}
SECONDS = {  # an epoch on one P100 (table 4.1), by data and lanes; "" is CapsNet
    "CIFAR-10": {"": 240, "mlcn1:w4*4": 54, "mlcn1:w2*32": 205, "mlcn2:w4*4": 53, "mlcn2:w2*32": 204},
    "Fashion-MNIST": {"": 220, "mlcn1:w4*2": 21, "mlcn1:w4*8": 90, "mlcn2:w4*2": 20, "mlcn2:w4*8": 92},
}
DEVICES = (1, 2, 4, 8)
MODES = ("capsnet-data", "mlcn-data", "mlcn-lane", "mlcn-lane, decoder on one device")
DRAWN = {"CIFAR-10": "mlcn1:w2*32", "Fashion-MNIST": "mlcn1:w4*8"}
LARGE_BATCH = 128  # so that every power of two of devices divides lanes and images
LANES_PER_DEVICE = 4
DEVICES_PER_HOST = 8
ASSUMED = {  # flags, their defaults and what they say
    "decoder_share": (0.05, "loss and decoder's share of a step."),
    "link_us": (20.0, "latency within a host, microseconds."),
    "link_gbytes": (10.0, "GB/s within a host (PCIe 3.0 x16, effective)."),
    "network_us": (50.0, "latency between hosts, microseconds."),
    "network_gbits": (100.0, "Gbit/s of each host's network."),
}
FORWARD_SHARE = 1 / 3  # backward makes two products for each one of forward


@dataclasses.dataclass(frozen=True)
class Base:
    """A published model on one K80: what of a step of batch 100 its encoder and its decoder take, as assumed."""

    assumed: Mapping[str, float]
    spec: ModelSpec
    encoder_seconds: float
    decoder_seconds: float


def base_of(data: str, lanes: str, assumed: Mapping[str, float]) -> Base:
    seconds = SECONDS[data][lanes] / STEPS[data] * K80_SLOWNESS
    spec = ModelSpec("mlcn" if lanes else "capsnet", IMAGE_SHAPES[data], 10, lanes)
    share = assumed["decoder_share"]
    return Base(assumed, spec, (1 - share) * seconds, share * seconds)


def cluster_of(num_devices: int, assumed: Mapping[str, float]) -> Cluster:
    within = Link(assumed["link_us"] * 1e-6, assumed["link_gbytes"] * 1e9)
    between = Link(assumed["network_us"] * 1e-6, assumed["network_gbits"] * 1e9 / 8)
    return Cluster([device // DEVICES_PER_HOST for device in range(num_devices)], within, between)


def decoder_weights(spec: ModelSpec, lane: int) -> int:
    """Weights of the decoder that each of `lane` devices multiplies with: its units are split where `lane` divides."""
    dim = len(spec.lane_specs) or 16  # class capsules of CapsNet
    sizes = (spec.num_classes * dim, *spec.decoder, math.prod(spec.image_shape))
    return sum(fan_in * units // (1 if units % lane else lane) for fan_in, units in itertools.pairwise(sizes))


def on_mesh(base: Base, spec: ModelSpec, batch: int, data: int, lane: int, algorithm: str = "ring") -> StepTime:
    """A step of `spec`, the base's model or the same with more lanes, on a mesh of K80s."""
    num_lanes, base_lanes = (len(s.lane_specs) or 1 for s in (spec, base.spec))
    images = batch / BATCH / data
    encoder = base.encoder_seconds * images * num_lanes / base_lanes / lane
    decoder = base.decoder_seconds * images * decoder_weights(spec, lane) / decoder_weights(base.spec, 1)
    layers = (*spec.decoder, math.prod(spec.image_shape))
    gathers = 1 + sum(units % lane == 0 for units in layers)
    return simulate_mesh(
        data,
        lane,
        cluster_of(data * lane, base.assumed),
        lane_seconds=[encoder] * (data * lane),
        head_seconds=[decoder] * (data * lane),
        forward_share=FORWARD_SHARE,
        exchanged=traffic.exchanged_bytes(spec, batch, data, lane),
        num_collectives={"all-gather": gathers, "reduce-scatter": gathers},
        algorithm=algorithm,
    )


def on_stacks(base: Base, num_devices: int) -> StepTime:
    """A step of the base's model, its lanes over K80s and all of the decoder on the first."""
    num_lanes = len(base.spec.lane_specs)
    lanes = [base.encoder_seconds / num_lanes] * num_lanes
    placement = partition("greedy", Problem(uniform_seconds(lanes, [1.0] * num_devices)))
    return simulate_stacks(
        placement,
        cluster_of(num_devices, base.assumed),
        column_bytes=4 * BATCH * base.spec.num_classes,
        head_seconds=base.decoder_seconds,
        forward_share=FORWARD_SHARE,
    )


def on_few(assumed: Mapping[str, float]) -> list[dict[str, Any]]:
    """Every published model in every mode on up to 8 K80s whose number divides its lanes."""
    rows = []
    for data, models in SECONDS.items():
        capsnet = SECONDS[data][""] / STEPS[data] * K80_SLOWNESS
        for lanes in models:
            base = base_of(data, lanes, assumed)
            alone = base.encoder_seconds + base.decoder_seconds
            for mode, n in itertools.product(MODES[1:] if lanes else MODES[:1], DEVICES):
                if mode.startswith("mlcn-lane") and any(group.count % n for group in base.spec.lane_groups):
                    continue
                if mode == MODES[-1]:
                    step = on_stacks(base, n)
                else:
                    shape = (1, n) if mode == "mlcn-lane" else (n, 1)
                    step = on_mesh(base, base.spec, BATCH, *shape)
                rows.append(
                    {
                        "data": data,
                        "lanes": lanes,
                        "mode": mode,
                        "devices": n,
                        "total_seconds": step.total_seconds,
                        "communication_seconds": step.communication_seconds,
                        "mean_idle_share": sum(step.idle_shares) / n,
                        "over_itself_on_one": alone / step.total_seconds,
                        "over_capsnet_on_one": capsnet / step.total_seconds,
                    }
                )
    return rows


def on_many(assumed: Mapping[str, float]) -> list[dict[str, Any]]:
    """mlcn1 on CIFAR-10 up to 1,024 K80s: its 32 lanes, then the batch, divided; and 4 lanes for every device.

    The speed-up is over the same model, with as many lanes, on one K80 that would hold it.
    """
    base = base_of("CIFAR-10", DRAWN["CIFAR-10"], assumed)
    (group,) = base.spec.lane_groups
    rows = []
    for algorithm, scaling in itertools.product(ALGORITHMS, ("strong", "weak")):
        for n in (2**k for k in range(11)):
            lane = min(n, group.count) if scaling == "strong" else n
            num_lanes = group.count if scaling == "strong" else LANES_PER_DEVICE * n
            spec = dataclasses.replace(base.spec, lanes=f"{group.spec}*{num_lanes}")
            step = on_mesh(base, spec, LARGE_BATCH, n // lane, lane, algorithm)
            alone = on_mesh(base, spec, LARGE_BATCH, 1, 1)
            rows.append(
                {
                    "scaling": scaling,
                    "algorithm": algorithm,
                    "devices": n,
                    "hosts": math.ceil(n / DEVICES_PER_HOST),
                    "data": n // lane,
                    "lane": lane,
                    "lanes": num_lanes,
                    "total_seconds": step.total_seconds,
                    "communication_seconds": step.communication_seconds,
                    "head_seconds": step.head_seconds,
                    "over_itself_on_one": alone.total_seconds / step.total_seconds,
                }
            )
    return rows


def table(few: list[dict[str, Any]], many: list[dict[str, Any]]) -> str:
    """Speed-ups in Markdown: of every model on few devices, then of one on many."""
    head = ["data", "lanes", "mode (all simulated)"]
    head += [f"over {base} on one, n={n}" for base in ("itself", "CapsNet") for n in DEVICES]
    lines = []
    for (data, lanes, mode), group in itertools.groupby(few, key=lambda r: (r["data"], r["lanes"], r["mode"])):
        rows = list(group)
        cells = [data, lanes or "CapsNet", mode]
        for name in ("over_itself_on_one", "over_capsnet_on_one"):
            cells += [f"{row[name]:.2f}" for row in rows] + [""] * (len(DEVICES) - len(rows))
        lines.append(cells)
    few_devices, lines = markdown(head, lines), []
    head = ["simulated", "algorithm", "devices", "data x lane", "lanes"]
    head += ["ms", "of that sent", "of that head", "over itself on one"]
    for row in many:
        times = [f"{1000 * row[name]:.1f}" for name in ("total_seconds", "communication_seconds", "head_seconds")]
        split = f"{row['data']} x {row['lane']}"
        cells = [row["scaling"], row["algorithm"], str(row["devices"]), split, str(row["lanes"]), *times]
        lines.append([*cells, f"{row['over_itself_on_one']:.1f}"])
    return f"{few_devices}\n\n{markdown(head, lines)}"


def draw(few: list[dict[str, Any]], many: list[dict[str, Any]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 8), layout="constrained")
    panels = figure.subplot_mosaic("ABE;CDE")
    drawn = itertools.product(("capsnet", "itself"), DRAWN.items())
    for panel, (base, (data, lanes)) in zip("ABCD", drawn, strict=True):
        axes = panels[panel]
        for mode, style in zip(MODES, ("s-", "^-", "o-", "x--"), strict=True):
            rows = [r for r in few if (r["data"], r["mode"]) == (data, mode) and r["lanes"] in ("", lanes)]
            axes.plot(DEVICES, [r[f"over_{base}_on_one"] for r in rows], style, label=mode)
        axes.plot(DEVICES, DEVICES, ":", color="gray", label="as many times as devices")
        if base == "capsnet":
            axes.plot(8, PUBLISHED_SPEEDUP, "*", color="black", markersize=14, label="published: 7.18 on 8 K80s")
        axes.set_xticks(DEVICES)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("K80s")
        axes.set_ylabel("speed-up over " + ("CapsNet" if base == "capsnet" else "the same model") + " on one K80")
        axes.set_title(f"{data}, {lanes} (simulated)")
        axes.legend(fontsize=8, loc="upper left")
    axes = panels["E"]
    for (scaling, algorithm), group in itertools.groupby(many, key=lambda r: (r["scaling"], r["algorithm"])):
        rows = list(group)
        lanes = "32 lanes" if scaling == "strong" else f"{LANES_PER_DEVICE} lanes a device"
        style = ("o" if algorithm == "ring" else "x") + ("-" if scaling == "strong" else "--")
        axes.plot(
            [r["devices"] for r in rows], [r["over_itself_on_one"] for r in rows], style, label=f"{lanes}, {algorithm}"
        )
    devices = [row["devices"] for row in many]
    axes.plot([1, max(devices)], [1, max(devices)], ":", color="gray", label="as many times as devices")
    axes.loglog(base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:.0f}")
    axes.set_xlabel(f"K80s, {DEVICES_PER_HOST} a host")
    axes.set_ylabel("speed-up over the same model on one K80")
    axes.set_title(f"CIFAR-10, mlcn1:w2, batch {LARGE_BATCH} (simulated)")
    axes.legend(fontsize=8, loc="upper left")
    figure.savefig(RESULTS / "published_scaling.png", dpi=120)


def define(values: flags.FlagValues) -> None:
    for name, (default, text) in ASSUMED.items():
        flags.DEFINE_float(name, default, f"Assumed: {text}", flag_values=values)


def main(values: flags.FlagValues) -> None:
    assumed = {name: values[name].value for name in ASSUMED}
    few, many = on_few(assumed), on_many(assumed)
    assumed |= {"k80_slowness": K80_SLOWNESS, "forward_share": FORWARD_SHARE, "devices_per_host": DEVICES_PER_HOST}
    published = {"speedup_of_8_k80s_over_capsnet_on_one": PUBLISHED_SPEEDUP, "seconds_an_epoch_on_one_p100": SECONDS}
    RESULTS.mkdir(exist_ok=True)
    simulated = {"batch": BATCH, "few_devices": few, "large_batch": LARGE_BATCH, "many_devices": many}
    about = {"date": host.today(), **host.environment()}
    results = {"published": published, "assumed": assumed, "simulated": simulated, **about}
    write_json(RESULTS / "published_scaling.json", results)
    draw(few, many)
    print(table(few, many))


if __name__ == "__main__":
    launch_script(define, main)
