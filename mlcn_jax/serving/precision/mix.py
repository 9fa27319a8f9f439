"""Chooses a precision for each lane: the cheapest mix that is accurate enough.

The squared length of a class capsule is a sum over lanes, so the accuracy of every mix follows exactly from what each
lane gives in each form, computed once.
"""

import heapq
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float, Int

_SLACK = 1e-9  # differences of accuracies are rounded
Mix = tuple[int, ...]  # the form of each lane
MOST_TRIED = 20_000  # mixes to try before one that may not be the cheapest is accepted


def accuracy(squares: Float[np.ndarray, "n classes"], labels: Int[np.ndarray, " n"]) -> float:
    """Fraction of images whose longest class capsule, from squared lengths, is that of their class."""
    return float(np.mean(np.argmax(squares, axis=-1) == labels))


def mix_accuracy(parts: Sequence[Sequence[np.ndarray]], mix: Sequence[int], labels: Int[np.ndarray, " n"]) -> float:
    """Accuracy of a mix.

    Args:
      parts: what each lane adds to the squared lengths in each form, `parts[lane][form]`, [n, classes].
      mix: the form of each lane.
      labels: classes of the images.
    """
    total = np.sum([parts[lane][form] for lane, form in enumerate(mix)], axis=0, dtype=np.float32)
    return accuracy(np.asarray(total), labels)


def is_accurate(
    parts: Sequence[Sequence[np.ndarray]], mix: Sequence[int], labels: Int[np.ndarray, " n"], least_accuracy: float
) -> bool:
    """Whether a mix is at least that accurate, up to rounding. Other arguments are those of `mix_accuracy`."""
    return mix_accuracy(parts, mix, labels) >= least_accuracy - _SLACK


def cheapest_mix(
    parts: Sequence[Sequence[np.ndarray]],
    costs: Sequence[Sequence[tuple[float, ...]]],
    labels: Int[np.ndarray, " n"],
    least_accuracy: float,
) -> tuple[Mix, bool]:
    """The mix with the smallest total cost among those accurate enough, and whether that is proven.

    Mixes are tried in order of their cost, so the first that is accurate enough is the cheapest. After `MOST_TRIED`
    mixes, lanes of the cheapest mix are made more accurate one by one, and nothing is proven.

    Args:
      parts, labels: as for `mix_accuracy`.
      costs: cost of each lane in each form, as tuples that are compared number by number.
      least_accuracy: accuracy to reach; the mix of every lane's first form must reach it.
    """
    orders = [sorted(range(len(own)), key=own.__getitem__) for own in costs]

    def cost(places: Sequence[int]) -> tuple[float, ...]:
        own = [costs[lane][orders[lane][place]] for lane, place in enumerate(places)]
        return tuple(map(sum, zip(*own, strict=True)))

    def forms(places: Sequence[int]) -> Mix:
        return tuple(orders[lane][place] for lane, place in enumerate(places))

    first = (0,) * len(costs)
    heap, seen, tried = [(cost(first), first)], {first}, 0
    while heap and tried < MOST_TRIED:
        _, places = heapq.heappop(heap)
        tried += 1
        if is_accurate(parts, forms(places), labels, least_accuracy):
            return forms(places), True
        for lane, place in enumerate(places):
            after = (*places[:lane], place + 1, *places[lane + 1 :])
            if after[lane] < len(orders[lane]) and after not in seen:
                seen.add(after)
                heapq.heappush(heap, (cost(after), after))
    return _step_by_step(parts, costs, labels, least_accuracy, forms(first)), False


def _step_by_step(parts, costs, labels, least_accuracy, mix: Mix) -> Mix:
    """Changes one lane's form at a time, the one that gains most accuracy; at worst every lane gets its first form."""
    while not is_accurate(parts, mix, labels, least_accuracy):
        changes = [
            (*mix[:lane], form, *mix[lane + 1 :])
            for lane, own in enumerate(costs)
            for form in range(len(own))
            if form != mix[lane]
        ]
        best = max(changes, key=lambda change: mix_accuracy(parts, change, labels))
        if mix_accuracy(parts, best, labels) <= mix_accuracy(parts, mix, labels):
            return (0,) * len(mix)
        mix = best
    return mix


def mixes_timed(
    start: Mix,
    kinds: Sequence[str],
    num_forms: int,
    accurate: Callable[[Mix], bool],
    seconds: Callable[[Sequence[Mix]], Sequence[float]],
) -> tuple[Mix, dict[Mix, float]]:
    """A descent on measured times, since times of lanes do not add up to the time of a model.

    It begins with `start` and with the mixes in which all lanes have the same form. From the fastest, the lanes of one
    kind change their form together, as long as that is faster.

    Args:
      start: a mix that is accurate enough.
      kinds: the kind of each lane.
      num_forms: forms that a lane can have.
      accurate: whether a mix is accurate enough; others are not timed.
      seconds: times of some mixes, measured side by side.

    Returns:
      The fastest mix, and the seconds of every mix that was tried. Mixes that were not measured side by side are
      compared by their ratios to one that was measured with both.
    """
    tried: dict[Mix, float] = {}
    best, near = start, [start, *((form,) * len(kinds) for form in range(num_forms))]
    while new := [each for each in dict.fromkeys(near) if each not in tried and accurate(each)]:
        turn = list(dict.fromkeys([best, *new]))
        measured = dict(zip(turn, seconds(turn), strict=True))
        scale = tried.get(best, measured[best]) / measured[best]
        tried |= {each: scale * s for each, s in measured.items()}
        best = min(turn, key=tried.__getitem__)
        near = [
            tuple(form if own == kind else before for own, before in zip(kinds, best, strict=True))
            for kind in dict.fromkeys(kinds)
            for form in range(num_forms)
        ]
    return best, tried
