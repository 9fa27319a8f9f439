"""Which machines train a model by a deadline at the lowest cost: the question, and the answer or what prevents it."""

import collections
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlcn_jax.analysis.market import Market
from mlcn_jax.analysis.ways import Task, Terms, Way
from mlcn_jax.errors import InputError, did_you_mean
from mlcn_jax.launch import program
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.placement import cost
from mlcn_jax.placement.catalog import Offer
from mlcn_jax.placement.cost import LaneCost
from mlcn_jax.placement.profile import DeviceProfile
from mlcn_jax.training.accumulate import check_parts
from mlcn_jax.training.apart import couplings_of_losses
from mlcn_jax.training.session import calibration_images
from mlcn_jax.training.splits import Messages, needed_bytes


def best_way(market: Market, ways: Sequence[Way], deadline_seconds: float) -> Way:
    """The cheapest way that finishes by the deadline; among equally cheap ones, the fastest.

    Raises:
      InputError: the model fits no machine, or no way finishes by then; the message says what would help.
    """
    if not ways:
        raise InputError(_fits_nowhere(market))
    in_time = [way for way in ways if way.seconds <= deadline_seconds]
    if not in_time:
        fastest = ways[0]
        names = " + ".join(market.choices[n].offer.name for n in fastest.machines)
        raise InputError(
            f"no way trains it in {duration(deadline_seconds)}: the earliest deadline that can be met is "
            f"--deadline={round_up(fastest.seconds)} ({names}, {fastest.kind}, for {fastest.cost:.2f}); allow more "
            f"time, {_more_machines(market)} or fewer steps"
        )
    return min(in_time, key=lambda way: (way.cost, way.seconds))


def _more_machines(market: Market) -> str:
    if market.terms.link is None and not market.task.apart:
        return "several machines (--latency_seconds and --bytes_per_second say how fast the link between them is)"
    return "more machines (--most_machines)"


def _fits_nowhere(market: Market) -> str:
    task, devices = market.task, [choice.devices[0] for choice in market.choices]
    roomiest, parts = max(devices, key=lambda profile: profile.memory_bytes), task.messages.parts
    costs = [cost.cost_of(task.spec, group.spec) for group in task.spec.lane_groups]
    lanes = [one for one, count in zip(costs, market.counts, strict=True) for _ in range(count)]

    def needed(some: Sequence[LaneCost], batch: int) -> float:
        return needed_bytes(task.spec, some, batch, roomiest, parts)

    largest = max(costs, key=lambda one: needed([one], task.batch_size))
    of_all, batch = needed(lanes, task.batch_size), task.batch_size
    while batch // parts > min(roomiest.batch_sizes) and needed(lanes, batch) > roomiest.memory_bytes:
        batch //= 2
    fits = needed(lanes, batch) <= roomiest.memory_bytes
    smaller = f"a batch of {batch}, " if fits and batch < task.batch_size else ""
    in_parts = f" in {parts} parts" if parts > 1 else ""
    return (
        f"the model fits none of the {len(market.choices)} machines: {largest.spec} needs "
        f"{needed([largest], task.batch_size) / 2**30:.2f} GiB for batches of {task.batch_size}{in_parts}, and all "
        f"lanes {of_all / 2**30:.2f} GiB, but the largest device has {roomiest.memory_bytes / 2**30:.2f} GiB: it would "
        f"fit with {smaller}narrower lanes, or a device with {of_all / 2**30:.2f} GiB; more train.accumulation_steps "
        f"need less, as does model.remat=full, which device profiles do not predict ({program()} describe "
        "--memory_gib=N does)"
    )


def task_of(config: Any, session: Any) -> Task:
    """What a configuration trains.

    Args:
      config: a `RunConfig`.
      session: its `Session`.

    Raises:
      InputError: the model has no lanes whose costs a profile could predict, it recomputes activations, it has a
        teacher or trains in rounds, or its batch cannot be computed in as many parts as it asks for.
    """
    spec, train = session.spec, config.train
    if not spec.lane_groups:
        raise InputError("device profiles predict lanes, and CapsNet has none: give a configuration of an mlcn")
    if spec.remat != "none":
        raise InputError(
            f"model.remat is {spec.remat}, but device profiles predict time and memory of steps that keep all "
            f"activations: ask with model.remat=none ({program()} describe --memory_gib=N says what fits with full)"
        )
    if train.teacher:
        raise InputError(
            "device profiles do not predict what a teacher takes to classify a batch: ask without train.teacher"
        )
    if train.rounds.steps:
        raise InputError(
            f"train.rounds.steps is {train.rounds.steps}, but training in rounds is not compared: ask with 0"
        )
    check_parts(spec, train.batch_size, 1, train.accumulation_steps)
    validation = len(session.validation.labels)
    residual = spec.normalises
    views = 2 if config.data.mirrors else 1
    test, epochs = len(session.dataset.test.labels), session.num_steps // session.steps_per_epoch
    scored = views * (validation + train.score_test * test) + train.test_every_epoch * epochs * test
    images = (session.train.images, session.validation.images, session.dataset.test.images)
    return Task(
        spec=spec,
        batch_size=train.batch_size,
        steps=session.num_steps,
        save_every=train.checkpoint_every or session.steps_per_epoch,
        scored_images=scored,
        data_bytes=sum(part.nbytes for part in images),
        apart=not any(coupled for coupled, _, _ in couplings_of_losses(spec, train.clip_norm)),
        validation_images=validation,
        split_seed=config.split_seed,
        messages=Messages(config.parallel.exchange_dtype, train.clip_norm > 0, train.accumulation_steps),
        step_share=_step_share(spec, train.batch_size, map(session.image_size, range(1, session.num_steps + 1))),
        calibration_images=sum(map(len, calibration_images(session.train, train.batch_size))) if residual else 0,
    )


def _step_share(spec: ModelSpec, batch_size: int, sizes: Iterable[int]) -> float:
    """The mean FLOPs of a training step by those of one at full size, for the image size of each step, 0 if full."""

    def flops(size: int) -> float:
        shape = (size, size, spec.image_shape[2]) if size else spec.image_shape
        lanes = [(g.count, cost.lane_cost(g.spec, spec.lane_settings, shape)) for g in spec.lane_groups]
        of_lanes = sum(count * lane.step_flops(batch_size) for count, lane in lanes)
        return of_lanes + batch_size * cost.decoder_step_flops(spec)

    steps = collections.Counter(sizes)
    return sum(count * flops(size) for size, count in steps.items()) / (steps.total() * flops(0))


def with_profiles(
    offers: Sequence[Offer], profiles: Mapping[str, tuple[DeviceProfile, str]], terms: Terms
) -> tuple[list[tuple[Offer, DeviceProfile, str]], list[str]]:
    """The offers that have a usable profile, and why the others are left out.

    Args:
      offers: the offers of a catalog.
      profiles: as of `read_profiles`.
      terms: if they give no interruptions, spot machines whose catalog gives none are left out.
    """
    found, passed = [], []
    for offer in offers:
        names = [offer.profile] if offer.profile else [offer.machine.lower(), offer.accelerator.lower()]
        key = next((name for name in names if name in profiles), "")
        cores = profiles[key][0].cpu_count * offer.devices if key and profiles[key][0].platform == "cpu" else None
        if not key:
            passed.append(
                f"{offer.accelerator or offer.machine}: no profile (measure one there with {program()} profile "
                "--output=FILE, and give --profiles=NAME=FILE)"
            )
        elif offer.spot and offer.interruptions_per_hour is None and terms.interruptions_per_hour is None:
            passed.append("spot machines: no --interruptions_per_hour")
        elif offer.cpus and cores not in (None, offer.cpus):
            passed.append(
                f"{offer.machine}: it has {offer.cpus:g} cores, but the profile {profiles[key][1]} was measured on "
                f"{cores} (measure one there)"
            )
        elif offer.devices > 1 and profiles[key][0].link is None:
            passed.append(
                f"{offer.machine}: the profile {profiles[key][1]} has no link between two devices (measure it on a "
                "machine with two or more)"
            )
        else:
            found.append((offer, *profiles[key]))
    return found, list(dict.fromkeys(passed))


def duration(seconds: float) -> str:
    """Seconds as readable text: `3.2 h`, `12 min`, `40 s`."""
    if seconds >= 2 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.1f} min" if seconds >= 120 else f"{seconds:.0f} s"


def round_up(seconds: float) -> str:
    """Seconds as a `--deadline`, rounded up."""
    return f"{math.ceil(seconds / 60)}m" if seconds >= 600 else f"{math.ceil(seconds)}s"


_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def seconds_of(text: str, flag: str) -> float:
    """Seconds of a text such as `6h`, `1h30m` or `90s`; raises InputError, naming the flag, if it is no such time."""
    parts = re.fullmatch(r"(?:(\d+(?:\.\d+)?)([dhms]))+", text)
    found = re.findall(r"(\d+(?:\.\d+)?)([dhms])", text) if parts else []
    total = sum(float(number) * _UNITS[unit] for number, unit in found)
    if not total:
        raise InputError(f"--{flag}={text} is not a time above 0: give days, hours, minutes or seconds, such as 1h30m")
    return total


def read_profiles(text: str, offers: Sequence[Offer]) -> dict[str, tuple[DeviceProfile, str]]:
    """The profiles of a catalog's machines, with their files, by machine or accelerator in lower case.

    Profiles that the catalog itself names are keyed by file: machines with the same name may have several.

    Args:
      text: `FILE` or `NAME=FILE`, separated by commas. A file without a name is for the accelerator whose name is part
        of the profile's device name.
      offers: the offers of the catalog, which may itself name files.

    Raises:
      InputError: a file cannot be used, a name is not in the catalog, or no machine has a profile.
    """
    found: dict[str, tuple[DeviceProfile, str]] = {}
    loaded: dict[str, DeviceProfile] = {}

    def load(file: str) -> DeviceProfile:
        if file not in loaded:
            loaded[file] = DeviceProfile.load(Path(file).expanduser())
        return loaded[file]

    known = {name.lower(): name for offer in offers for name in (offer.machine, offer.accelerator) if name}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, equals, file = entry.rpartition("=")
        if equals:
            if name.lower() not in known:
                meant = did_you_mean(name, known.values())
                raise InputError(f"--profiles={entry}: the catalog has no machine or accelerator {name!r}{meant}")
            found[name.lower()] = (load(file), file)
            continue
        words = set(re.split(r"[^a-z0-9]+", load(file).device.lower()))
        names = {o.accelerator.lower() for o in offers if o.accelerator}
        words_of = {name: set(re.split(r"[^a-z0-9]+", name)) for name in names}
        fitting = [name for name in names if words_of[name] <= words]
        fitting = [name for name in fitting if not any(words_of[name] < words_of[other] for other in fitting)]
        if not fitting:
            raise InputError(
                f"--profiles={file} was measured on {load(file).device}, which is not an accelerator of the catalog: "
                f"name its machine, as in --profiles=NAME={file}"
            )
        found |= dict.fromkeys(fitting, (load(file), file))
    for offer in offers:
        if offer.profile:
            found[offer.profile] = (load(offer.profile), offer.profile)
    if not found:
        kinds = list(dict.fromkeys(offer.accelerator or offer.machine for offer in offers))
        raise InputError(
            f"no machine of the catalog has a device profile: on one of each kind ({', '.join(kinds[:5])}"
            f"{', ...' if len(kinds) > 5 else ''}), measure it with {program()} profile --output=FILE, then give "
            "--profiles=NAME=FILE,NAME=FILE"
        )
    return found
