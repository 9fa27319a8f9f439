"""The ways to train a model on rented machines as a table, JSON, a picture and the commands of the best."""

import dataclasses
import itertools
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlcn_jax.analysis.cheapest import duration
from mlcn_jax.analysis.market import Market
from mlcn_jax.analysis.ways import Choice, Way
from mlcn_jax.files import markdown, write_figure, write_json
from mlcn_jax.launch import program

_PORT = 29500
_KEPT = ("--config.parallel.exchange_dtype=", "--config.parallel.timeout_seconds=")


def machines_of(market: Market, way: Way) -> str:
    """The machines of a way: `2 x a + b`."""
    names = [market.choices[n].offer.name for n in way.machines]
    return " + ".join(f"{names.count(n)} x {n}" if names.count(n) > 1 else n for n in dict.fromkeys(names))


def split_of(way: Way) -> str:
    """How a way splits the model."""
    if way.kind == "mesh":
        return "one device" if way.data * way.lane == 1 else f"mesh, data={way.data}, lane={way.lane}"
    return f"stacks over {way.lane} devices" if way.kind == "stacks" else "lanes apart"


def table(market: Market, ways: Sequence[Way], best: Way) -> str:
    """The Pareto front in Markdown; the best is marked."""
    head = ["", "machines", "split", "time", "90 % within", "cost", "save every", "lost if interrupted"]
    lines = []
    for way in ways:
        ends = (way.interval.low_seconds, way.interval.high_seconds) if way.interval else ()
        lines.append(
            [
                "best" if way == best else "",
                machines_of(market, way),
                split_of(way),
                duration(way.seconds),
                " to ".join(map(duration, ends)) or "not known",
                f"{way.cost:.4g}",
                f"{way.save_every:,} steps",
                duration(way.lost_seconds) if way.lost_seconds else "",
            ]
        )
    return markdown(head, lines)


def rows(market: Market, ways: Sequence[Way], best: Way) -> list[dict[str, Any]]:
    """The Pareto front, ready for JSON."""
    return [
        {
            **{
                f.name: getattr(way, f.name) for f in dataclasses.fields(way) if f.name not in ("interval", "placement")
            },
            "machines": [market.choices[n].offer.name for n in way.machines],
            "split": split_of(way),
            "interval": dataclasses.asdict(way.interval) if way.interval else None,
            "device_of": way.placement.device_of if way.placement else None,
            "best": way == best,
        }
        for way in ways
    ]


def draw(market: Market, ways: Sequence[Way], best: Way, deadline_seconds: float, path: Path) -> None:
    """Draws the cost of the ways over their time, with intervals, the deadline and the best way."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    units = ((3600, "hours"), (60, "minutes"))
    unit, name = next(((u, n) for u, n in units if ways[0].seconds > u), (1, "seconds"))
    hours = [way.seconds / unit for way in ways]
    axes.step(hours, [way.cost for way in ways], where="post", color="0.7", zorder=0)
    for kind, marker in (("mesh", "o"), ("stacks", "s"), ("apart", "^")):
        own = [way for way in ways if way.kind == kind]
        if own:
            ends = [way.interval or None for way in own]
            low = [(w.seconds - e.low_seconds) / unit if e else 0 for w, e in zip(own, ends, strict=True)]
            high = [(e.high_seconds - w.seconds) / unit if e else 0 for w, e in zip(own, ends, strict=True)]
            x, y = [way.seconds / unit for way in own], [way.cost for way in own]
            label = {"mesh": "one device or a mesh", "stacks": "stacks", "apart": "lanes apart"}[kind]
            axes.errorbar(x, y, xerr=[low, high], fmt=marker, capsize=2, label=f"{label}, with its 90 % interval")
    axes.annotate(machines_of(market, best), (best.seconds / unit, best.cost), (5, 5), textcoords="offset points")
    if deadline_seconds < math.inf:
        axes.axvline(deadline_seconds / unit, color="C3", linewidth=1, label="deadline")
    axes.set(xlabel=name, ylabel="cost", ylim=(0, None))
    axes.legend(fontsize=8)
    write_figure(figure, path, dpi=120)


def commands(market: Market, way: Way, base: Sequence[str]) -> list[str]:
    """The commands that rent the machines of a way and train on them.

    Args:
      market, way: the answer.
      base: `--config` and the fields that were given; those that say where to train are replaced.
    """
    base = [flag for flag in base if not flag.startswith("--config.parallel.") or flag.startswith(_KEPT)]
    choices = [market.choices[n] for n in way.machines]
    lines = [_rent(choice, i) for i, choice in enumerate(choices) if choice.offer.cloud]
    if way.kind == "apart":
        return [*lines, *_apart(market, way, choices, base)]
    fields = [f"--config.train.checkpoint_every={way.save_every}"]
    if way.placement is None:
        fields += ["--config.parallel.plan=mesh", f"--config.parallel.data={way.data}"]
        fields += [f"--config.parallel.lane={way.lane}"]
    else:
        fields += ["--config.parallel.plan=stacks", f"--config.parallel.lane={way.lane}"]
        fields += [f"--config.parallel.partitioner={way.placement.partitioner}"]
    used = [min(choice.offer.devices, way.data * way.lane) for choice in choices]
    processes = sum(choice.processes(count) for choice, count in zip(choices, used, strict=True))
    number = 0
    for i, choice in enumerate(choices):
        own = list(fields)
        if way.kind == "stacks":
            own.append(f"--config.parallel.profile={choice.profile_file}")
        if len(choices) == 1:
            own += [f"--config.parallel.processes={processes}"] if processes > 1 else []
            command = _train(base, own, "cheapest")
            idle = choice.profile.platform == "cpu" and used[0] < choice.offer.devices
            lines.append(_on(choice, i, _on_cores(choice, 0, used[0], command) if idle else command))
            continue
        host = "$(sky status --ip mlcn-0)" if choices[0].offer.cloud else "HOST"
        here = choice.processes(used[i])
        for k in range(here):
            address = [f"--config.parallel.processes={processes}", f"--config.parallel.process={number}"]
            address.append(f"--config.parallel.coordinator={host}:{_PORT}")
            command = _train(base, [*own, *address], "cheapest")
            lines.append(_on(choice, i, _on_cores(choice, k, 1, command) if here > 1 else command))
            number += 1
    return lines


def _on_cores(choice: Choice, first: int, count: int, command: str) -> str:
    """A command bound to the cores of `count` of a machine's devices, starting with device `first`."""
    cores = choice.profile.cpu_count
    return f"taskset --cpu-list {first * cores}-{(first + count) * cores - 1} {command}"


def _apart(market: Market, way: Way, choices: Sequence[Choice], base: Sequence[str]) -> list[str]:
    groups, lines, folders = market.task.spec.lane_groups, [], []
    done = [0] * len(groups)
    of_model, of_run = ("lanes", "lane_seeds", "lane_weights"), ("lanes_apart", "checkpoint_every")
    replaced = ["data.split_seed", *(f"model.{name}" for name in of_model), *(f"train.{name}" for name in of_run)]
    kept = [flag for flag in base if not flag.startswith(tuple(f"--config.{name}=" for name in replaced))]
    kept += [f"--config.data.split_seed={market.task.split_seed}", "--config.train.lanes_apart=true"]
    kept += ["--config.model.lane_weights=()"] if market.task.spec.lane_weights else []  # `join` gives weights
    seeds = market.task.spec.lane_seeds or range(sum(market.counts))
    first = [0, *itertools.accumulate(market.counts)]
    for i, (choice, held) in enumerate(zip(choices, way.lanes, strict=True)):
        for kind, count in enumerate(held):
            for _ in range(count):
                name, seed = f"lanes/{groups[kind].name}_{done[kind]}", seeds[first[kind] + done[kind]]
                done[kind] += 1
                folders.append(f"runs/{name}")
                own = [f"--config.model.lanes={groups[kind].spec}", f"--config.model.lane_seeds={seed}"]
                own.append(f"--config.train.checkpoint_every={market.lane_save_every(way.machines[i], kind)}")
                lines.append(_on(choice, i, _train(kept, own, name)))
    weights = "" if market.task.validation_images else " --weights=equal"
    joined = f"{program()} join --workdir={','.join(folders)} --output=runs/cheapest{weights}"
    return [*lines, f"{joined}  # where the folders of all machines are"]


def _train(base: Sequence[str], fields: Sequence[str], name: str) -> str:
    return f"{program()} train {shlex.join([*base, *fields, f'--workdir=runs/{name}'])}"


def _rent(choice: Choice, number: int) -> str:
    offer = choice.offer
    place = [f"--zone={offer.zone}"] if offer.zone else [f"--region={offer.region}"] if offer.region else []
    spot = ["--use-spot"] if offer.spot else []
    return shlex.join(
        ["sky", "launch", "--yes", f"--cluster=mlcn-{number}", f"--instance-type={offer.machine}", *place, *spot]
    )


def _on(choice: Choice, number: int, command: str) -> str:
    """The command as it is entered for a machine."""
    if choice.offer.cloud:
        quoted = f'"{command}"' if "$(" in command else shlex.quote(command)
        return f"sky exec --detach-run mlcn-{number} {quoted}"
    return f"{command}  # on {choice.offer.machine}"


def write(
    market: Market,
    ways: Sequence[Way],
    best: Way,
    deadline_seconds: float,
    passed: Sequence[str],
    launch: Sequence[str],
    output: Path,
) -> None:
    """Writes `cheapest.json` and `cheapest.png`."""
    task = dataclasses.asdict(market.task)
    values = {
        "deadline_seconds": deadline_seconds if deadline_seconds < math.inf else None,
        "task": {**{name: value for name, value in task.items() if name != "spec"}, "lanes": market.task.spec.lanes},
        "terms": dataclasses.asdict(market.terms),
        "passed_over": list(passed),
        "ways": rows(market, ways, best),
        "commands": list(launch),
    }
    write_json(output / "cheapest.json", values)
    draw(market, ways, best, deadline_seconds, output / "cheapest.png")


def advice(best: Way) -> str:
    """How often to save, and why, where machines of the best way may be interrupted."""
    if not best.interruptions:
        return ""
    every = f"saving every {duration(best.save_every * best.step_seconds)} of work"
    if best.kind == "apart":
        every = "saving each lane as often as its command says"
    return (
        f"{best.interruptions:.2f} interruptions expected; {every} costs least, and an interruption then undoes "
        f"{'up to ' if best.kind == 'apart' else ''}{duration(best.lost_seconds)}"
    )
