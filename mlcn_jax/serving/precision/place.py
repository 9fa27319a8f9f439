"""Chooses the precision of each lane together with its device, from device profiles and the accuracy of every mix."""

import contextlib
import dataclasses
import importlib.util
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from mlcn_jax.errors import InputError
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.placement.forms import FormPlacement, FormProblem, form_problem, forms_of, place_together
from mlcn_jax.placement.problem import NoRoom
from mlcn_jax.placement.profile import DeviceProfile
from mlcn_jax.serving.parts import FORMS, XLA, Form
from mlcn_jax.serving.precision.mix import is_accurate, mix_accuracy

TASK = "infer"
_MOST_MIXES = 1_000  # of precisions, all of which are looked at
_TRIES = 12
_TINY = 1e-12


def place_lanes(
    spec: ModelSpec,
    profiles: Sequence[DeviceProfile],
    parts: Sequence[Sequence[np.ndarray]],
    num_bytes: Sequence[Sequence[int]],
    labels: Int[np.ndarray, " n"],
    max_accuracy_drop: float,
    batch: int,
    mix: Sequence[int],
) -> dict[str, Any]:
    """Chooses the form and the device of each lane so that the slowest device finishes as early as possible.

    With few lanes, every mix of precisions that is accurate enough is placed, unless its lanes would take too long on
    devices that share them evenly: with OR-Tools the choice is optimal, otherwise each placement is greedy.

    With more, a lane's loss in a form is the accuracy that the model loses if only that lane has it, plus a term for
    how much the form changes the lane's part, which adds up to less than one image: lanes that lose nothing alone may
    lose much together. The sum of these losses is limited, and the largest limit that leads to an accurate enough
    choice is found by bisection, with the exact accuracy of each choice.

    Args:
      spec: the model.
      profiles: of the devices (`forms.read_profiles`).
      parts, labels: as for `mix.mix_accuracy`, with `FORMS`.
      num_bytes: bytes of the weights of each lane in each of `FORMS`, which must fit the devices' memory.
      max_accuracy_drop: percentage points that the choice may lose.
      batch: images in a call.
      mix: one of `FORMS` for each lane; if these precisions are accurate enough and fit, the choice is no slower than
        they are.

    Returns:
      The choice and what it costs, ready for JSON.

    Raises:
      InputError: a profile has times of a form that no export can hold.
      NoRoom: every choice loses more, or the weights do not fit the devices.
    """
    partitioner = "exact" if importlib.util.find_spec("ortools") else "greedy"
    forms = forms_of(profiles, TASK)
    part_of = [FORMS.index(exported_form(form)) for form in forms]
    held = [[own[part] for part in part_of] for own in num_bytes]
    room = [profile.memory_bytes for profile in profiles]
    problem = form_problem(profiles, spec.lane_specs, TASK, batch, memory_bytes=held, limit_bytes=room)
    base = mix_accuracy(parts, [0] * len(parts), labels)

    def drop(mix: Sequence[int]) -> float:
        return 100 * (base - mix_accuracy(parts, mix, labels))

    def is_enough(placed: FormPlacement) -> bool:
        return is_accurate(parts, [part_of[form] for form in placed.form_of], labels, base - max_accuracy_drop / 100)

    def alone(lane: int, part: int) -> float:
        return max(0.0, drop([part if i == lane else 0 for i in range(len(parts))]))

    def only(mix: Sequence[int]) -> FormPlacement:
        """The best placement in the precisions of a mix."""
        others = [[float(FORMS[part].precision != FORMS[wanted].precision) for part in part_of] for wanted in mix]
        return _place(problem, others, 0.0, partitioner)

    def by_losses() -> list[FormPlacement]:
        """Accurate placements within limits of the sum of losses."""
        half_image = 50 / len(labels)  # percentage points
        changed = np.array([[np.mean(np.abs(own[part] - own[0])) for part in part_of] for own in parts], np.float64)
        changed *= half_image / max(changed.max(axis=1).sum(), _TINY)
        alone_lost = [[alone(lane, part) for part in part_of] for lane in range(len(parts))]
        losses = np.add(alone_lost, changed).tolist()
        found: list[FormPlacement] = []
        low, limit, high = 0.0, max_accuracy_drop + half_image, max_accuracy_drop + half_image
        for _ in range(_TRIES):
            try:
                placed = _place(problem, losses, limit, partitioner)
            except NoRoom:
                low = limit
            else:
                if is_enough(placed):
                    found.append(placed)
                    low = limit
                else:
                    high = min(limit, placed.lost)
            if high - low <= _TINY:
                break
            limit = (low + high) / 2
        return found

    precisions = list(dict.fromkeys(FORMS[part].precision for part in part_of))
    if len(precisions) ** len(parts) <= _MOST_MIXES:
        found = _of_all_mixes(problem, part_of, precisions, len(parts), only, is_enough)
    else:
        found = by_losses()
    with contextlib.suppress(NoRoom):
        if is_enough(given := only(mix)):
            found.append(given)
    if not found:  # another runtime may lose images in float32, too
        found = [_place(problem, [[float(part != 0) for part in part_of]] * len(parts), 0.0, partitioner)]
    placed = min(found, key=lambda each: each.makespan_seconds)
    return {
        "devices": [profile.device for profile in profiles],
        "lanes": [
            {
                "lane": str(lane),
                "form": forms[f].removeprefix("infer "),
                "exported": str(exported_form(forms[f])),
                "device": d,
            }
            for lane, f, d in zip(spec.lane_specs, placed.form_of, placed.device_of, strict=True)
        ],
        "makespan_milliseconds": 1000 * placed.makespan_seconds,
        "accuracy_drop": drop([part_of[form] for form in placed.form_of]),
        "partitioner": partitioner,
    }


def _of_all_mixes(
    problem: FormProblem,
    part_of: Sequence[int],
    precisions: Sequence[str],
    lanes: int,
    only: Callable[[Sequence[int]], FormPlacement],
    is_enough: Callable[[FormPlacement], bool],
) -> list[FormPlacement]:
    """The best accurate placement over all mixes of precisions, if there is one; the fastest mixes come first."""
    wanted = [next(part for part, form in enumerate(FORMS) if form.precision == name) for name in precisions]
    fastest = [
        {
            part: min(
                seconds
                for form, row in zip(part_of, rows, strict=True)
                for seconds in row
                if FORMS[form].precision == FORMS[part].precision
            )
            for part in wanted
        }
        for rows in problem.seconds
    ]

    def least(mix: Sequence[int]) -> float:
        """Seconds that a mix takes at least."""
        own = [of_lane[part] for of_lane, part in zip(fastest, mix, strict=True)]
        return max(*own, sum(own) / problem.num_devices)

    best: list[FormPlacement] = []
    for mix in sorted(itertools.product(wanted, repeat=lanes), key=least):
        if best and least(mix) >= best[0].makespan_seconds:
            break
        with contextlib.suppress(NoRoom):
            placed = only(mix)
            if is_enough(placed) and (not best or placed.makespan_seconds < best[0].makespan_seconds):
                best = [placed]
    return best


def exported_form(name: str) -> Form:
    """The form in which an export holds a lane, by its name in a profile: the algorithms of XLA are not told apart.

    Raises:
      InputError: no export can hold lanes in that form.
    """
    _, precision, how = name.split()
    known = [form for form in (Form(precision, how), Form(precision, XLA)) if form in FORMS]
    if not known:
        raise InputError(
            f"a profile has times of {name!r}, a form that no export has: measure it again with profile --forms=LANES"
        )
    return known[0]


def _place(
    problem: FormProblem, losses: Sequence[Sequence[float]], most_lost: float, partitioner: str
) -> FormPlacement:
    return place_together(partitioner, dataclasses.replace(problem, losses=losses, most_lost=most_lost))
