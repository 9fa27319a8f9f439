"""Chooses the form of every lane (its precision and algorithm) together with its device.

Which form is the fastest depends on the device, and a form that loses accuracy is worth it only where it shortens the
makespan. Choosing forms first and devices afterwards sees neither.

Source: do Rosario 2021 (thesis), chapters 3 and 5, for lanes that are placed by measured costs; forms are ours.
"""

import contextlib
import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mlcn_jax.errors import InputError, differences
from mlcn_jax.launch import program
from mlcn_jax.nn.lanes import LaneSpec
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.placement.cost import cost_of
from mlcn_jax.placement.partition import PARTITIONERS, partition
from mlcn_jax.placement.problem import UNLIMITED, NoRoom, Problem, mib, or_tools
from mlcn_jax.placement.profile import FORM_BATCH, DeviceProfile

_BISECTIONS = 60


@dataclasses.dataclass(frozen=True)
class FormProblem:
    """Lanes to place in one of several forms each.

    Attributes:
      seconds: `seconds[i][f][d]`, the time of lane i in form f on device d; infinite where it cannot run.
      forms: names of the forms.
      memory_bytes: `memory_bytes[i][f]`; if empty, memory is ignored.
      limit_bytes: memory of each device; if empty, there is no limit.
      base_seconds: each device's other work; if empty, none.
      losses: `losses[i][f]`, what lane i loses in form f, in any unit; if empty, nothing. They are added up.
      most_lost: upper limit of the sum of losses.

    Raises:
      InputError: lengths are inconsistent, a number is out of range, or a lane can run nowhere.
    """

    seconds: Sequence[Sequence[Sequence[float]]]
    forms: Sequence[str]
    memory_bytes: Sequence[Sequence[float]] = ()
    limit_bytes: Sequence[float] = ()
    base_seconds: Sequence[float] = ()
    losses: Sequence[Sequence[float]] = ()
    most_lost: float = UNLIMITED

    def __post_init__(self):
        if not self.seconds or not self.forms or not self.seconds[0][0]:
            raise InputError("nothing to place: give at least one lane, one form and one device")
        lanes, forms, devices = len(self.seconds), len(self.forms), len(self.seconds[0][0])
        nothing = [[0.0] * forms] * lanes
        for field, empty in (
            ("memory_bytes", nothing),
            ("losses", nothing),
            ("limit_bytes", [UNLIMITED] * devices),
            ("base_seconds", [0.0] * devices),
        ):
            object.__setattr__(self, field, getattr(self, field) or empty)
        sizes = {
            "seconds": (lanes, forms, devices),
            "memory_bytes": (lanes, forms),
            "losses": (lanes, forms),
            "limit_bytes": (devices,),
            "base_seconds": (devices,),
        }
        for field, size in sizes.items():
            try:
                values = np.asarray(getattr(self, field), np.float64)
            except ValueError:  # rows of different lengths
                values = np.full(1, np.nan)
            if values.shape != size:
                raise InputError(
                    f"{field} must hold {' x '.join(map(str, size))} numbers: there are {lanes} lanes, {forms} forms "
                    f"and {devices} devices"
                )
            if field != "seconds" and not (values >= 0).all():
                raise InputError(f"{field} must be at least 0")
            if field in ("memory_bytes", "base_seconds") and np.isinf(values).any():
                raise InputError(f"{field} must be finite")
        if not all(value > 0 for lane in self.seconds for row in lane for value in row):
            raise InputError("every lane's seconds must be above 0 on every device, or infinite")
        for lane, rows in enumerate(self.seconds):
            if not any(math.isfinite(value) for row in rows for value in row):
                raise InputError(f"lane {lane} can run on no device in any of the forms {', '.join(self.forms)}")

    @property
    def num_devices(self) -> int:
        return len(self.seconds[0][0])

    def can(self, lane: int, form: int, device: int) -> bool:
        """Whether a lane in a form fits a device and `most_lost`, if it were alone."""
        fits = self.memory_bytes[lane][form] <= self.limit_bytes[device]
        return fits and self.losses[lane][form] <= self.most_lost


def form_problem(
    profiles: Sequence[DeviceProfile], lanes: Sequence[LaneSpec], task: str, batch_size: int, **more: Any
) -> FormProblem:
    """The problem of placing lanes on devices given by their profiles.

    Args:
      profiles: of the devices, measured with `mlcn_jax profile --forms=LANES`.
      lanes: all lanes.
      task: `train` or `infer`.
      batch_size: images in a step or a call.
      more: other fields of `FormProblem`; lists over forms are in the order of `forms_of`.

    Raises:
      InputError: a lane was not measured on a device.
    """
    forms = forms_of(profiles, task)
    for number, profile in enumerate(profiles):
        measured = {lane for form in forms for lane in profile.form_seconds.get(form, {})}
        if missing := sorted({str(lane) for lane in lanes} - measured):
            raise InputError(
                f"device profile {number} ({profile.device}) has no {task} seconds of {', '.join(missing)}: measure it "
                f"again with {program()} profile --forms={','.join(sorted({str(lane) for lane in lanes}))}"
            )
    seconds = [
        [[batch_size * p.form_seconds.get(form, {}).get(str(lane), math.inf) for p in profiles] for form in forms]
        for lane in lanes
    ]
    return FormProblem(seconds, forms, **more)


def read_profiles(spec: ModelSpec, files: Sequence[Path], task: str) -> list[DeviceProfile]:
    """Device profiles with the forms of a model's lanes in a task.

    Raises:
      InputError: a profile cannot be read, was measured with other inputs, or lacks a lane.
    """
    profiles = [DeviceProfile.load(file) for file in files]
    wanted = {"images": spec.image_shape, "classes": spec.num_classes, "routing": spec.lane_routing}
    for file, profile in zip(files, profiles, strict=True):
        measured = {
            "images": tuple(profile.image_shape),
            "classes": profile.num_classes,
            "routing": profile.lane_routing,
        }
        if rows := differences(measured, wanted, there="in the profile", here="in the model"):
            raise InputError(
                f"{file} was measured with other inputs:\n"
                + "\n".join(rows)
                + f"\nmeasure one with {program()} profile --forms=... --data=NAME"
            )
    form_problem(profiles, spec.lane_specs, task, 1)
    return profiles


def training_bytes(profiles: Sequence[DeviceProfile], spec: ModelSpec, batch_size: int) -> list[list[float]]:
    """Memory that a training step of each lane needs at most, in each of `forms_of`; empty if a profile has none.

    Parameters and moments are held once, and the rest grows with the number of images. Fewer images than were measured
    count as many.
    """
    if not all(profile.form_bytes for profile in profiles):
        return []
    more = max(1.0, batch_size / FORM_BATCH)

    def needed(lane: LaneSpec, form: str) -> float:
        held = cost_of(spec, lane).state_bytes
        measured = max(profile.form_bytes.get(form, {}).get(str(lane), 0.0) for profile in profiles)
        return held + more * max(0.0, measured - held)

    return [[needed(lane, form) for form in forms_of(profiles, "train")] for lane in spec.lane_specs]


def forms_of(profiles: Sequence[DeviceProfile], task: str) -> list[str]:
    """The forms of a task that were measured on at least one device."""
    return sorted({form for profile in profiles for form in profile.form_seconds if form.split()[0] == task})


@dataclasses.dataclass(frozen=True)
class FormPlacement:
    """The form and the device of each lane, and the resulting times.

    Attributes:
      form_of, device_of: of each lane.
      seconds: each device's time for its lanes and its base.
      lost: the sum of the lanes' losses.
      optimal: whether no choice has a shorter makespan, up to a millionth.
    """

    form_of: tuple[int, ...]
    device_of: tuple[int, ...]
    seconds: tuple[float, ...]
    lost: float
    optimal: bool = False

    @property
    def makespan_seconds(self) -> float:
        """When the last device finishes."""
        return max(self.seconds)


def place_together(name: str, problem: FormProblem, *, time_limit_seconds: float = 5.0) -> FormPlacement:
    """The form and the device of every lane, chosen at once.

    `exact` is optimal; the others see each lane in its fastest form on each device, where a unit of loss has a price in
    seconds at which the sum of losses is small enough (a Lagrange multiplier, found by bisection).

    Args:
      name: one of `partition.PARTITIONERS`.
      problem: the lanes, forms and devices.
      time_limit_seconds: time after which `exact` returns the best choice found.

    Raises:
      InputError: the name is unknown, or OR-Tools is needed and not installed; NoRoom: the lanes do not fit, or lose
        too much in every form that does.
    """
    if name not in PARTITIONERS:
        raise InputError(f"partitioner {name!r} is unknown: use one of {', '.join(PARTITIONERS)}")
    if name == "exact":
        return _exactly(problem, time_limit_seconds)
    low, high = 0.0, _LARGEST_PRICE
    found = _at_price(name, problem, low)
    if found.lost <= problem.most_lost:
        return _that_runs(found)
    best = _at_price(name, problem, high)
    if best.lost > problem.most_lost:
        _check_least_loss(problem)
        raise NoRoom(
            f"{name} found no placement that loses at most {problem.most_lost:g}, only one that loses {best.lost:g}: "
            "try exact, or allow more"
        )
    for _ in range(_BISECTIONS):
        price = math.sqrt(max(low, 1 / _LARGEST_PRICE) * high)
        found = _at_price(name, problem, price)
        if found.lost <= problem.most_lost:
            high = price
            best = min(best, found, key=lambda each: each.makespan_seconds)
        else:
            low = price
    return _that_runs(best)


def _that_runs(found: FormPlacement) -> FormPlacement:
    """A placement, unless a lane is on a device where it runs in no form that may be chosen, which raises NoRoom."""
    if math.isinf(found.makespan_seconds):
        raise NoRoom(
            "no placement was found in which each lane runs in a form that fits its device and loses no more than "
            "allowed: try exact"
        )
    return found


_LARGEST_PRICE = 1e12  # seconds for a unit of loss


def place_forms_first(name: str, problem: FormProblem) -> FormPlacement:
    """Forms first, devices afterwards: a baseline for choosing both at once.

    Each lane gets the form that is the fastest on average over the devices, of those that run on all of them.

    Raises:
      NoRoom: as for `place_together`.
    """
    form_of = _faster_forms(problem, _plain_forms(problem), functools.partial(_mean_seconds, problem))
    return _that_runs(_placement(problem, form_of, _devices_of(name, problem, form_of)))


def place_devices_first(name: str, problem: FormProblem) -> FormPlacement:
    """Devices first, by the forms that lose least, and then each lane's fastest form on its device: another baseline.

    Raises:
      NoRoom: as for `place_together`.
    """
    plain = _plain_forms(problem)
    device_of = _devices_of(name, problem, plain)
    form_of = _faster_forms(problem, plain, lambda i, f: problem.seconds[i][f][device_of[i]], device_of)
    return _that_runs(_placement(problem, form_of, device_of))


def _mean_seconds(problem: FormProblem, lane: int, form: int) -> float:
    return sum(problem.seconds[lane][form]) / problem.num_devices


def _plain_forms(problem: FormProblem) -> list[int]:
    """The form in which each lane loses least, the fastest on average of several."""
    _check_least_loss(problem)
    return [
        min((own, _mean_seconds(problem, lane, form), form) for form, own in enumerate(losses))[2]
        for lane, losses in enumerate(problem.losses)
    ]


def _faster_forms(
    problem: FormProblem, form_of: Sequence[int], seconds: Callable[[int, int], float], device_of: Sequence[int] = ()
) -> list[int]:
    """Lanes in faster forms, as far as losses, and the memory of their devices if given, allow; largest gains first."""
    form_of, forms = list(form_of), range(len(problem.forms))
    lost = sum(problem.losses[lane][form] for lane, form in enumerate(form_of))
    room = list(problem.limit_bytes)
    for lane, device in enumerate(device_of):
        room[device] -= problem.memory_bytes[lane][form_of[lane]]
    gains = [(seconds(i, own) - seconds(i, f), i, f) for i, own in enumerate(form_of) for f in forms]
    for _, lane, form in sorted((change for change in gains if change[0] > 0), reverse=True):
        own = form_of[lane]
        more = problem.losses[lane][form] - problem.losses[lane][own]
        if seconds(lane, form) >= seconds(lane, own) or lost + more > problem.most_lost:
            continue
        if device_of:
            larger = problem.memory_bytes[lane][form] - problem.memory_bytes[lane][own]
            if larger > room[device_of[lane]]:
                continue
            room[device_of[lane]] -= larger
        form_of[lane], lost = form, lost + more
    return form_of


def _devices_of(name: str, problem: FormProblem, form_of: Sequence[int]) -> Sequence[int]:
    """Where a partitioner places lanes whose forms are given."""
    seconds = [[_finite(s) for s in problem.seconds[i][f]] for i, f in enumerate(form_of)]
    memory = [problem.memory_bytes[i][f] for i, f in enumerate(form_of)]
    return partition(name, Problem(seconds, memory, problem.limit_bytes, problem.base_seconds)).device_of


def _at_price(name: str, problem: FormProblem, price: float) -> FormPlacement:
    """Each lane in its best form on each device, where a unit of loss costs `price` seconds.

    Memory has a price as well where lanes do not fit without: the least of some at which they do.
    """
    typical = statistics.fmean(s for rows in problem.seconds for row in rows for s in row if math.isfinite(s))
    byte_seconds = typical / max(statistics.fmean(held for row in problem.memory_bytes for held in row), 1.0)
    for byte_price in (0.0, *(byte_seconds * 10.0**power for power in range(-2, 4))):
        try:
            return _at_prices(name, problem, price, byte_price)
        except NoRoom as error:
            no_room = error
    raise no_room


def _at_prices(name: str, problem: FormProblem, price: float, byte_price: float) -> FormPlacement:
    """The same where a byte costs `byte_price` seconds in the choice of forms."""
    forms, devices = range(len(problem.forms)), range(problem.num_devices)

    def seconds(i: int, f: int, d: int) -> float:
        if not problem.can(i, f, d):
            return math.inf
        return problem.seconds[i][f][d] + (price * problem.losses[i][f] if price else 0.0)

    def choice(i: int, f: int, d: int) -> tuple[float, float, int]:
        held = problem.memory_bytes[i][f]
        return seconds(i, f, d) + byte_price * held, held, f

    best = [[min(choice(i, f, d) for f in forms)[2] for d in devices] for i in range(len(problem.seconds))]
    priced = [[_finite(seconds(i, f, d)) for d, f in enumerate(row)] for i, row in enumerate(best)]
    memory = [max(problem.memory_bytes[i][f] for f in row) for i, row in enumerate(best)]
    placed = partition(name, Problem(priced, memory, problem.limit_bytes, problem.base_seconds))
    form_of = [best[i][d] for i, d in enumerate(placed.device_of)]
    return _placement(problem, form_of, placed.device_of)


def _finite(seconds: float) -> float:
    return min(seconds, 1e18)


def _placement(
    problem: FormProblem, form_of: Sequence[int], device_of: Sequence[int], optimal: bool = False
) -> FormPlacement:
    seconds = list(problem.base_seconds)
    for lane, (form, device) in enumerate(zip(form_of, device_of, strict=True)):
        seconds[device] += problem.seconds[lane][form][device]
    lost = sum(problem.losses[lane][form] for lane, form in enumerate(form_of))
    return FormPlacement(tuple(form_of), tuple(device_of), tuple(seconds), lost, optimal)


def _check_least_loss(problem: FormProblem) -> None:
    """Raises NoRoom if the lanes lose too much even in the forms that lose least."""
    least = sum(map(min, problem.losses))
    if least > problem.most_lost:
        raise NoRoom(f"the lanes lose at least {least:g}, but may lose only {problem.most_lost:g}: allow more")


def _exactly(problem: FormProblem, time_limit_seconds: float) -> FormPlacement:
    """By integer programming (OR-Tools CP-SAT); seconds are rounded to a millionth of an achievable makespan."""
    cp_model = or_tools()
    model, devices = cp_model.CpModel(), range(problem.num_devices)
    enough = _possible_makespan(problem)
    unit = enough / 10**6
    possible = {
        (i, f, d): model.new_bool_var("")
        for i, rows in enumerate(problem.seconds)
        for f, row in enumerate(rows)
        for d, value in enumerate(row)
        if value <= enough and problem.can(i, f, d)
    }
    for lane in range(len(problem.seconds)):
        model.add_exactly_one(v for (i, _, _), v in possible.items() if i == lane)
    longest = model.new_int_var(0, 10**6 + len(problem.seconds), "")  # as many numbers may be rounded up
    for device in devices:
        here = {(i, f): v for (i, f, d), v in possible.items() if d == device}
        load = sum(v * round(problem.seconds[i][f][device] / unit) for (i, f), v in here.items())
        model.add(load + round(problem.base_seconds[device] / unit) <= longest)
        if problem.limit_bytes[device] < UNLIMITED:
            held = sum(v * math.ceil(problem.memory_bytes[i][f]) for (i, f), v in here.items())
            model.add(held <= int(problem.limit_bytes[device]))
    if 0 < problem.most_lost < UNLIMITED:  # none of these forms loses more by itself
        share = problem.most_lost / 10**12
        lost = sum(v * round(problem.losses[i][f] / share) for (i, f, _), v in possible.items())
        model.add(lost <= round(problem.most_lost / share) + len(problem.seconds))  # a rounding error for each lane
    model.minimize(longest)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit_seconds
    status = solver.solve(model)
    if status == cp_model.UNKNOWN:  # out of time
        try:
            return place_together("greedy", problem)
        except NoRoom as error:
            raise NoRoom(
                f"no placement was found in {time_limit_seconds:g} s, and greedy finds none: use fewer lanes or larger "
                "devices, or allow more loss"
            ) from error
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        room = ", ".join(mib(b) for b in problem.limit_bytes)
        raise NoRoom(
            f"no form and device of every lane fits into {room} and loses at most {problem.most_lost:g}: allow more "
            "loss, or use fewer lanes or larger devices"
        )
    chosen = {i: (f, d) for (i, f, d), v in possible.items() if solver.value(v)}
    form_of, device_of = zip(*(chosen[i] for i in range(len(problem.seconds))), strict=True)
    return _placement(problem, form_of, device_of, status == cp_model.OPTIMAL)


def _possible_makespan(problem: FormProblem) -> float:
    """An achievable makespan, used as an upper bound."""
    slowest = [max(s for row in rows for s in row if math.isfinite(s)) for rows in problem.seconds]
    found = math.inf
    with contextlib.suppress(NoRoom):  # greedy may find no room where there is some
        found = place_together("greedy", problem).makespan_seconds
    return min(found, sum(slowest) + max(problem.base_seconds))
