"""CapsNet and MLCN on 1, 2, 4, 8 devices, from parts measured on one: figures 4.7, 4.8, 4.10 of the thesis.

    python -m experiments.scaling_by_parts --workdir=runs/scaling_by_parts --minutes=60

Sweeps over the number of lanes, their width and their depth at batch 150, mlcn1 and CapsNet as published on 28x28x1.
Measured, on one device of any kind: training steps of each whole model, of as many of its lanes as a device has when
lanes are split, of each model on as many images as a device has when the batch is split (150 do not divide by 4 or 8:
the device with most has 38 or 19), and of the head alone: loss, decoder and its update. Simulated from these parts by
`simulate.simulate_mesh`: MLCN split by lanes (`mlcn-lane`), its decoder by units, and MLCN and CapsNet split by batch
(`mlcn-data`, `capsnet-data`), with the sum of all their gradients. CapsNet's batch split is the baseline. Devices do
not slow each other down, and links are assumed, by default those of `published_scaling.py`; `--link_us` and
`--link_gbytes` take others, such as those that `mlcn_jax profile` measures.

The thesis's settings are those of figures 4.4 and 4.5, 2 to 32 lanes and widths 1 to 8, and of chapter 5, depths 1 to
5; which of them figures 4.7, 4.8 and 4.10 show, and their numbers, are not at hand. `--lanes`, `--widths` and
`--depths` take others, and `--most_gflop` leaves out what is too large for a machine; the report says which.

All parts are measured in each of `--rounds` rounds; speed-ups are taken within a round, since the speed of a machine
changes by the hour, and medians over rounds are told. What has no time of its own, because a step was not slower than
its head alone, is left out. A measurement takes 5 steps and then as many as take
`--turn_seconds`, at least one. By the cost model, `full` takes 0.06 PFLOP in its 3 rounds of 80 parts, 0.4 h at 50
GFLOP/s, about what a core gives; starting, compiling and reporting come on top. `smoke` takes few steps of small
parts, half a minute of a core.

One JSON a measurement; what was measured in the workdir is not measured again. Writes `scaling_by_parts_SCALE` as JSON,
Markdown and PNG to the workdir and, but for `smoke`, to `experiments/results/`.

Source: do Rosario 2021 (thesis), chapter 4; the simulator is this project's.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import flags

from experiments import batch_size
from experiments.published_rows import configure
from experiments.published_scaling import ASSUMED, DEVICES, FORWARD_SHARE, cluster_of
from experiments.quiet import busy_cores
from experiments.repeated_report import Records, draw_caption, place, write
from experiments.repeated_runs import Facts, Request, Scale, Series, chosen, command
from experiments.scaling import spread
from experiments.scaling_by_parts_report import (
    CAPSNET,
    MODES,
    deeper_over_wider,
    draw,
    largest_difference,
    sentence,
    table,
)
from mlcn_jax import host
from mlcn_jax.allocator import return_unused_memory, share_heaps
from mlcn_jax.analysis import describe_work
from mlcn_jax.analysis.measure_device import Lab
from mlcn_jax.config import RunConfig
from mlcn_jax.distributed import traffic
from mlcn_jax.errors import InputError
from mlcn_jax.files import markdown
from mlcn_jax.launch import launch_script
from mlcn_jax.placement.simulate import simulate_mesh
from mlcn_jax.training.speeds import mean_seconds

VERSION = 2  # raised with every change after which results cannot stand beside older ones
SCALES = {name: Scale(name, 0) for name in ("smoke", "full")}
LINKS = ("link_us", "link_gbytes")


@dataclasses.dataclass(frozen=True)
class Sweeps:
    """What is looked at.

    Attributes:
      batch, devices: images in a step, and numbers of devices, of all models.
      lanes, lane_width: numbers of lanes, and their width.
      widths, depths: of `count` lanes; deeper ones have the width `depth_width`.
    """

    batch: int
    devices: tuple[int, ...]
    lanes: tuple[int, ...]
    lane_width: int
    widths: tuple[int, ...]
    depths: tuple[int, ...]
    depth_width: int
    count: int

    def models(self) -> dict[str, list[tuple[int, str, int]]]:
        """For each sweep: where in it a model is, its lanes' size, and their number. CapsNet is a sweep of its own."""
        return {
            CAPSNET: [(0, CAPSNET, 0)],
            "lanes": [(n, f"w{self.lane_width}d1", n) for n in self.lanes],
            "width": [(width, f"w{width}d1", self.count) for width in self.widths],
            "depth": [(depth, f"w{self.depth_width}d{depth}", self.count) for depth in self.depths],
        }


SWEEPS = {
    "smoke": Sweeps(8, (1, 2), (2,), 1, (1,), (1,), 1, 2),
    "full": Sweeps(150, DEVICES, (2, 4, 8, 16, 32), 4, (1, 2, 4, 8), (1, 2, 3, 4, 5), 2, 8),
}


@dataclasses.dataclass(frozen=True)
class Part:
    """What is measured: a training step (`what` is `step`) of lanes of one size or of CapsNet, or that of the head."""

    what: str
    lane: str
    count: int
    batch: int


def parts_of(lane: str, count: int, batch: int, mode: str, devices: int) -> list[Part]:
    """What the step of a model on some devices is simulated from; with one device, the step itself. Empty: no split."""
    if devices == 1:
        return [Part("step", lane, count, batch)]
    if mode != "mlcn-lane":
        return [Part("step", lane, count, math.ceil(batch / devices))]
    if count % devices:
        return []
    own = count // devices
    return [Part("step", lane, own, batch), *(Part("head", "w1d1", lanes, batch) for lanes in (own, count))]


def modes_of(lane: str) -> tuple[str, ...]:
    return MODES[:1] if lane == CAPSNET else MODES[1:]


def all_parts(sweeps: Sweeps) -> list[Part]:
    """Of all models, modes and numbers of devices, each once."""
    found: dict[Part, None] = {}
    for models in sweeps.models().values():
        for _, lane, count in models:
            for mode in modes_of(lane):
                for devices in sweeps.devices:
                    found |= dict.fromkeys(parts_of(lane, count, sweeps.batch, mode, devices))
    return list(found)


def part_of(record: Mapping[str, Any]) -> Part:
    """What a record is of."""
    return Part(**{name: value for name, value in record["facts"].items() if name != "round"})


def configure_part(what: str, lane: str, count: int, batch: int, round: int) -> RunConfig:
    """The configuration of a part; it is the same for a head as for the step that it is part of, and in each round."""
    del what, round
    name, lanes = ("capsnet_fashion", "") if lane == CAPSNET else ("mlcn1_fashion", f"mlcn1:{lane}*{count}")
    return configure(name, lanes, {"fashion_mnist": ""}).replace({"train.batch_size": batch})


def measure(config: RunConfig, what: str, turn_seconds: float) -> float:
    """Seconds of a training step of a model, or of its head."""
    size = config.train.batch_size
    if what == "head":
        spec = config.model_spec(*config.data.shape())
        program = Lab(spec).head_step(len(spec.lane_specs), size)
        seconds = mean_seconds(program.run, turn_seconds)  # with warm caches, as in the whole step
    else:
        seconds = size / batch_size.measure({"": config}, 1, turn_seconds)[""][0]
    jax.clear_caches()
    return_unused_memory()
    return seconds


def gigaflops(part: Part) -> float:
    """GFLOP of a training step, with the convolutions that this platform uses."""
    config = configure_part(**dataclasses.asdict(part), round=0)
    work = describe_work.work_by_part(config, config.model_spec(*config.data.shape()))
    return 1e-9 * work["head" if part.what == "head" else "all"][1].product_flops


def step_seconds(
    seconds: Mapping[Part, float],
    lane: str,
    count: int,
    batch: int,
    mode: str,
    devices: int,
    assumed: Mapping[str, float],
) -> float | None:
    """Seconds of a step of a model on some devices: measured with one, simulated from measured parts with several.

    None where a step was not slower than its head alone, so that the time of its lanes is not known.
    """
    parts = parts_of(lane, count, batch, mode, devices)
    own, *heads = (seconds[part] for part in parts)
    if devices == 1:
        return own
    head = 0.0  # a split of the batch has its head in the step of each device
    if heads:
        of_part, of_all = heads
        own, head = own - of_part, of_all / devices
        if own <= 0:
            return None
    config = configure_part("step", lane, count, batch, 0)
    spec = config.model_spec(*config.data.shape())
    shape = (1, devices) if mode == "mlcn-lane" else (devices, 1)
    return simulate_mesh(
        *shape,
        cluster_of(devices, assumed),
        lane_seconds=[own] * devices,
        head_seconds=[head] * devices,
        forward_share=FORWARD_SHARE,
        exchanged=traffic.exchanged_bytes(spec, batch, *shape),
        num_collectives=traffic.exchanged_messages(spec, *shape),
    ).total_seconds


def summarise(records: Records, sweeps: Sweeps, assumed: Mapping[str, float]) -> list[dict[str, Any]]:
    """Each model, mode and number of devices whose parts were measured: seconds of a step, and speed-ups.

    Speed-ups are over the model itself on one device, over CapsNet on one, and over CapsNet's batch split on as many;
    all within a round, with the median over rounds, the least and the most.
    """
    measured: dict[int, dict[Part, float]] = {}
    for record in records:
        if "seconds" in record:
            measured.setdefault(record["facts"]["round"], {})[part_of(record)] = record["seconds"]

    def by_round(lane: str, count: int, mode: str, devices: int) -> dict[int, float]:
        parts = parts_of(lane, count, sweeps.batch, mode, devices)
        found = {
            turn: step_seconds(seconds, lane, count, sweeps.batch, mode, devices, assumed)
            for turn, seconds in measured.items()
            if parts and all(part in seconds for part in parts)
        }
        return {turn: taken for turn, taken in found.items() if taken is not None}

    def over(base: Mapping[int, float], taken: Mapping[int, float]) -> dict[str, float] | None:
        ratios = [base[turn] / taken[turn] for turn in taken if turn in base]
        return spread(ratios) if ratios else None

    capsnet = {devices: by_round(CAPSNET, 0, MODES[0], devices) for devices in sweeps.devices}
    rows = []
    for sweep, models in sweeps.models().items():
        for at, lane, count in models:
            for mode in modes_of(lane):
                alone = by_round(lane, count, mode, 1)
                for devices in sweeps.devices:
                    taken = by_round(lane, count, mode, devices)
                    if taken:
                        rows.append(
                            {
                                **{"sweep": sweep, "at": at, "lanes": f"mlcn1:{lane}*{count}" if count else ""},
                                **{"mode": mode, "devices": devices},
                                "where": "measured" if devices == 1 else "simulated",
                                "seconds": spread(list(taken.values())),
                                "over_itself_on_one": over(alone, taken),
                                "over_capsnet_on_one": over(capsnet[1], taken),
                                "over_capsnet_on_as_many": over(capsnet[devices], taken),
                            }
                        )
    return rows


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("workdir", "", "Folder of the measurements.", flag_values=values)
    flags.DEFINE_string("scale", "full", f"One of {', '.join(SCALES)}.", flag_values=values)
    about = "Rounds in which everything is measured; by default 3, and 1 at scale smoke."
    flags.DEFINE_integer("rounds", None, about, lower_bound=1, flag_values=values)
    about = "Begin no measurement after so many; 0 goes on."
    flags.DEFINE_float("minutes", 0.0, about, lower_bound=0.0, flag_values=values)
    about = "How long steps are timed in a measurement; at least one is. By default 2, and 0 at scale smoke."
    flags.DEFINE_float("turn_seconds", None, about, lower_bound=0.0, flag_values=values)
    for name, title in (("lanes", "Numbers of lanes"), ("widths", "Widths of lanes"), ("depths", "Depths of lanes")):
        flags.DEFINE_list(name, [], f"{title}; empty: those of the scale.", flag_values=values)
    about = "Leave out models and parts of which a step has more GFLOP, by the cost model; 0 leaves out none."
    flags.DEFINE_float("most_gflop", 0.0, about, lower_bound=0.0, flag_values=values)
    for name in LINKS:
        default, title = ASSUMED[name]
        flags.DEFINE_float(name, default, f"Assumed: {title}", lower_bound=0.0, flag_values=values)


def main(values: flags.FlagValues) -> int:
    if not values.workdir:
        raise InputError("give --workdir=FOLDER, and every other flag as --name=value")
    (scale,) = chosen("scale", [values.scale], SCALES)
    smoke = scale == "smoke"
    given = {name: _numbers(name, values[name].value) for name in ("lanes", "widths", "depths") if values[name].value}
    assumed = {name: default for name, (default, _) in ASSUMED.items()}
    names = ("scale", "rounds", "turn_seconds", "lanes", "widths", "depths", "most_gflop", *LINKS)
    rounds = values.rounds or (1 if smoke else 3)
    line = command("scaling_by_parts --workdir=FOLDER", values, names)
    return run(
        Request(Path(values.workdir).expanduser(), SCALES[scale], rounds, values.minutes, {}, line),
        sweeps=dataclasses.replace(SWEEPS[scale], **given),
        turn_seconds=(0.0 if smoke else 2.0) if values.turn_seconds is None else values.turn_seconds,
        most_gflop=values.most_gflop,
        assumed=assumed | {name: values[name].value for name in LINKS},
    )


def _numbers(flag: str, given: Sequence[str]) -> tuple[int, ...]:
    if not all(value.isdecimal() and int(value) for value in given):
        raise InputError(f"--{flag}={','.join(given)}: give whole numbers above 0 with commas between, such as 1,2,4")
    return tuple(sorted(set(map(int, given))))


def run(
    request: Request, *, sweeps: Sweeps, turn_seconds: float, most_gflop: float, assumed: Mapping[str, float]
) -> int:
    """Measures what has not been measured yet, reports all there is, whatever ends it, and returns the exit code."""

    def measured(config: RunConfig, facts: Facts) -> dict[str, Any]:
        busy = busy_cores(must_be_quiet=False) if turn_seconds else None
        return {"seconds": measure(config, facts["what"], turn_seconds), "busy_cores": busy}

    series = Series(request, "scaling_by_parts", VERSION, configure_part, False, instead=measured)
    cluster_of(max(sweeps.devices), assumed)  # refused before anything is measured
    share_heaps("")  # CapsNet, the baseline, is among the parts
    host.set_up_jax(least_seconds=0.1)
    check_place(series.records(), request.workdir)
    parts = all_parts(sweeps)
    left_out = [part for part in parts if most_gflop and gigaflops(part) > most_gflop]
    kept = [part for part in parts if part not in left_out]
    facts = [{**dataclasses.asdict(part), "round": turn} for turn in range(request.repeats) for part in kept]
    limit = [f"Left out, as a step has more than {most_gflop:g} GFLOP: {told(left_out)}."] if left_out else []
    try:
        series.train(facts, lambda: None)
    finally:
        report(series, sweeps, assumed, limit)
    return 0


def check_place(records: Records, workdir: Path) -> None:
    """Raises InputError if some were made on another device, or with other versions, than this process has."""
    here = place(host.environment())
    there = next((place(record) for record in records if place(record) != here), None)
    if there:
        raise InputError(
            f"{workdir} holds steps measured on {there}, and this is {here}: their seconds cannot be compared; give "
            "another --workdir"
        )


def told(parts: Sequence[Part]) -> str:
    """Parts in words."""
    names = (f"mlcn1:{part.lane}*{part.count}" if part.count else "CapsNet" for part in parts)
    return ", ".join(f"{name} at batch {part.batch}" for name, part in zip(names, parts, strict=True))


def report(series: Series, sweeps: Sweeps, assumed: Mapping[str, float], limit: Sequence[str]) -> None:
    """Writes and prints the table and the picture of all that was measured."""
    records = series.records()
    rows = summarise(records, sweeps, assumed)
    if not rows:
        return
    ahead = deeper_over_wider(rows, max(sweeps.devices))
    failed = [part_of(record) for record in records if "failed" in record]
    busy = max((record.get("busy_cores") or 0.0 for record in records), default=0.0)
    dates = sorted({record["date"] for record in records})
    notes = [
        sentence(ahead),
        f"Batch {sweeps.batch}. Full marks and columns: measured on one device. Open marks and columns: simulated from "
        f"parts that were measured on one; links of {assumed['link_us']:g} us and {assumed['link_gbytes']:g} GB/s, as "
        "assumed. Speed-ups are medians over rounds; those on several devices differ between rounds by up to "
        f"{100 * largest_difference(rows):.0f} %.",
        *limit,
        *([f"Too large for the memory: {told(list(dict.fromkeys(failed)))}."] if failed else []),
    ]
    lines = [
        *notes,
        f"{len(records)} measurements on {place(records[0])}, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}; "
        f"other work kept at most {busy:.2f} cores busy before one.",
        *(f"`{one}`" for one in dict.fromkeys(record["command"] for record in records)),
    ]
    figure = draw(rows, sweeps.devices)
    draw_caption(figure, lines)
    summary = {"batch": sweeps.batch, "devices": sweeps.devices, "assumed": assumed, "points": rows}
    header, *cells = table(rows, sweeps.devices)
    text = markdown(header, cells)
    summary |= {"deeper_over_wider": ahead, "table": [header, *cells], "notes": notes}
    write(series, "scaling_by_parts", summary, text, lines, figure)
    print(f"{text}\n\n{notes[0]}")


if __name__ == "__main__":
    launch_script(define, main)
