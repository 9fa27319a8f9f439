"""Fits to measurements on a device: seconds and bytes of lanes."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from mlcn_jax.placement.cost import LaneCost, Layer
from mlcn_jax.placement.profile import log_size

_MEMORY_MARGIN = 1.03  # over what the fitted lanes need: lanes between them were up to 2.6 % above the fit
_STRAIGHTNESS = 0.03  # weight of smoothness in seconds per FLOP over layer size, against relative errors of the fit
_CROWDINGS = tuple(i / 100 for i in range(21))


def fit_lane_seconds(
    stacks: Sequence[Sequence["LaneCost"]],
    batch_sizes: Sequence[int],
    seconds: Sequence[float],
    platform: str,
    crowdings: Sequence[float] = _CROWDINGS,
) -> dict[str, Any]:
    """The fields of a profile with which `DeviceProfile.stack_seconds` is closest to the measurements.

    Some values of `crowding` are tried; the others are fitted by nonnegative least squares of the relative errors.
    Where measurements are few, seconds per FLOP are pulled towards a straight line over the log of a layer's size.

    Args:
      stacks: the lanes of each measured program.
      batch_sizes, seconds: those of each program.
      platform: that of the device.
      crowdings: the values to try.
    """
    from scipy import optimize

    layers = _layers_by_class(stacks, batch_sizes, platform)
    sizes: dict[str, list[float]] = {}
    for name, layer in itertools.chain.from_iterable(layers):
        sizes.setdefault(name, []).append(log_size(layer))
    knots = {name: np.arange(math.floor(min(of)), math.ceil(max(of)) + 1) for name, of in sizes.items()}
    places = dict(zip(knots, itertools.accumulate((len(of) for of in knots.values()), initial=0), strict=False))
    num_knots = sum(len(of) for of in knots.values())

    families = sorted({layer.family for own in layers for _, layer in own if layer.family})
    table = np.zeros((len(stacks), num_knots + len(families) + 2))
    for row, costs, own, batch_size in zip(table, stacks, layers, batch_sizes, strict=True):
        for name, layer in own:
            near = np.maximum(0.0, 1.0 - np.abs(knots[name] - log_size(layer)))
            row[places[name] :][: len(near)] += batch_size * layer.flops * near
            if layer.family:
                row[num_knots + families.index(layer.family)] += batch_size * layer.outputs
        row[-2:] = len(costs), sum(cost.parameters for cost in costs)
    relative = table / np.asarray(seconds)[:, None]
    units = np.full(table.shape[1], relative[:, :num_knots].sum(axis=1).mean())  # 1 is the mean speed
    units[num_knots:] = relative[:, num_knots:].max(axis=0)
    inner = [place for name, first in places.items() for place in range(first, first + len(knots[name]) - 2)]
    bends = _STRAIGHTNESS * np.diff(np.eye(table.shape[1]), n=2, axis=0)[inner]
    images = np.array([len(costs) * batch_size for costs, batch_size in zip(stacks, batch_sizes, strict=True)])
    targets = np.concatenate([np.ones(len(stacks)), np.zeros(len(bends))])

    def fit(crowding: float) -> tuple[np.ndarray, float]:
        slower = (images / images.min()) ** crowding
        return optimize.nnls(np.vstack([relative / units * slower[:, None], bends]), targets)

    # Of equally good ones the first, and not the one that rounding favours, which differs between CPUs.
    crowding = min(crowdings, key=lambda power: round(fit(power)[1], 6))
    found = fit(crowding)[0] / units / images.min() ** crowding
    return {
        "layer_seconds": {
            name: [(float(size), float(x)) for size, x in zip(of, found[places[name] :], strict=False)]
            for name, of in knots.items()
        },
        "value_seconds": {name: float(found[num_knots + i]) for i, name in enumerate(families)},
        "step_seconds": float(found[-2]),
        "parameter_seconds": float(found[-1]),
        "crowding": crowding,
        "crowded_images": (int(images.min()), int(images.max())),
    }


def _layers_by_class(
    stacks: Sequence[Sequence["LaneCost"]], batch_sizes: Sequence[int], platform: str
) -> list[list[tuple[str, "Layer"]]]:
    """The layers of each stack with their classes of speed."""
    return [
        [
            (layer.speed_class(form), layer)
            for cost in costs
            for layer, form in zip(cost.layers, cost.forms(platform, batch_size), strict=True)
        ]
        for costs, batch_size in zip(stacks, batch_sizes, strict=True)
    ]


def residuals(
    stacks: Sequence[Sequence["LaneCost"]],
    batch_sizes: Sequence[int],
    seconds: Sequence[float],
    platform: str,
    predict: Callable[[dict[str, Any], Sequence["LaneCost"], int], float],
) -> dict[str, list[float]]:
    """Leave-one-out residuals: log(measured / predicted seconds) of each program, predicted by a fit to all others.

    Args:
      stacks, batch_sizes, seconds, platform: as for `fit_lane_seconds`.
      predict: seconds of a program, given the fields fitted, its lanes and its batch size.

    Returns:
      Those of single lanes as `lane` and of several as `stack`. A program is passed over if one of its layers is of a
      class that no other has, or larger or smaller than all of that class in the others.
    """
    found: dict[str, list[float]] = {"lane": [], "stack": []}
    crowding = fit_lane_seconds(stacks, batch_sizes, seconds, platform)["crowding"]
    layers = _layers_by_class(stacks, batch_sizes, platform)
    for i, own in enumerate(stacks):
        others = [j for j in range(len(stacks)) if j != i]
        sizes: dict[str, list[float]] = {}
        for name, layer in (pair for j in others for pair in layers[j]):
            sizes.setdefault(name, []).append(log_size(layer))
        mine = [(sizes.get(name), log_size(layer)) for name, layer in layers[i]]
        if not all(known and min(known) <= size <= max(known) for known, size in mine):
            continue
        fitted = fit_lane_seconds(
            [stacks[j] for j in others],
            [batch_sizes[j] for j in others],
            [seconds[j] for j in others],
            platform,
            crowdings=_CROWDINGS if len(own) > 1 else (crowding,),
        )
        predicted = predict(fitted, own, batch_sizes[i])
        found["stack" if len(own) > 1 else "lane"].append(math.log(seconds[i] / predicted))
    return found


def fit_seconds(features: Sequence[Mapping[str, float]], seconds: Sequence[float]) -> dict[str, float]:
    """Nonnegative seconds per unit of each feature, with the least sum of squared relative errors."""
    from scipy import optimize

    names, sizes, largest = _table(features)
    solution, _ = optimize.nnls(sizes / np.asarray(seconds)[:, None], np.ones(len(sizes)))
    return dict(zip(names, (solution / largest).tolist(), strict=True))


def fit_bytes(features: Sequence[Mapping[str, float]], num_bytes: Sequence[float]) -> dict[str, float]:
    """Nonnegative bytes per unit of each feature; predictions exceed all measurements by a small margin.

    Of all such fits, the one with the least sum of relative excesses, found by linear programming.
    """
    from scipy import optimize

    names, sizes, largest = _table(features)
    relative = sizes / np.asarray(num_bytes)[:, None]
    found = optimize.linprog(relative.sum(axis=0), A_ub=-relative, b_ub=-np.ones(len(relative)), bounds=(0, None))
    if found.x is None:
        raise ArithmeticError(f"the fit of the memory failed: {found.message}")
    return dict(zip(names, (_MEMORY_MARGIN * found.x / largest).tolist(), strict=True))


def _table(features: Sequence[Mapping[str, float]]) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Names of the features, a row of their values for each point, scaled to 1, and the scales."""
    names = sorted({name for row in features for name in row})
    sizes = np.array([[row.get(name, 0.0) for name in names] for row in features], float)
    largest = np.maximum(sizes.max(axis=0), 1.0)
    return names, sizes / largest, largest
