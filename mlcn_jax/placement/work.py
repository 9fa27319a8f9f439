"""Work, depth and bytes of a program, counted from its trace.

Unit operations: an element-wise operation takes one per result, a product or convolution of contracted length K takes
K multiplications and K additions per result, and a reduction of n values takes n. Moving, reshaping, casting and
choosing constants takes none. Depth is the longest chain of operations of which each needs the one before: 1 for an
element-wise operation, ceil(log2 n) for a reduction of n values, 1 + ceil(log2 K) for a product. A loop of known length
is followed iteration by iteration, one of unknown length counts once, and the largest of several branches counts.

Source: Blelloch 1996 (Communications of the ACM 39(3)) for work and depth.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core as jex_core
from jax.interpreters import partial_eval

from mlcn_jax.placement.cost import PRODUCT_FLOPS, inner_jaxprs

_STEADY_TURNS = 3  # iterations of a loop after which constant growth of the depths is extrapolated


@dataclasses.dataclass(frozen=True)
class Work:
    """What a program computes and moves.

    Attributes:
      work: W, unit operations.
      depth: D, unit operations on the longest chain.
      product_flops: the part of `work` in products and convolutions.
      moved_bytes: operands and results of all products and convolutions, and the program's arguments and results;
        everything else is assumed to be computed along with them.
      least_bytes: arguments and results of the program, which any device must read and write.
    """

    work: int
    depth: int
    product_flops: int
    moved_bytes: int
    least_bytes: int

    @property
    def parallelism(self) -> float:
        """W / D, the number of devices beyond which no schedule gets faster in proportion."""
        return self.work / max(1, self.depth)

    @property
    def intensity(self) -> float:
        """Arithmetic intensity, W over the bytes moved."""
        return self.work / max(1, self.moved_bytes)

    def to_dict(self) -> dict[str, float]:
        """All fields, ready for JSON."""
        return {**dataclasses.asdict(self), "parallelism": self.parallelism, "intensity": self.intensity}


def work_of(function: Callable, *args: Any) -> Work:
    """Work, depth and bytes of `function(*args)`; nothing is compiled or run.

    Args:
      function: a pure function; results that nothing reads cost nothing.
      args: arrays, or `jax.ShapeDtypeStruct` objects.
    """
    whole = jax.make_jaxpr(function)(*args).jaxpr
    jaxpr, used = partial_eval.dce_jaxpr(whole, [True] * len(whole.outvars))
    del used
    count = _Count()
    ends = count.follow(jaxpr, [0] * len(jaxpr.invars), 1)
    outside = sum(_bytes(v) for v in (*jaxpr.invars, *jaxpr.outvars))
    return Work(count.work, max(ends, default=0), count.product_flops, count.product_bytes + outside, outside)


def combined(parts: Sequence[tuple[int, Work]], depth: int, least_bytes: int) -> Work:
    """The work of several programs, each run a number of times, given the depth and least bytes of all together."""
    totals = {
        name: sum(times * getattr(part, name) for times, part in parts)
        for name in ("work", "product_flops", "moved_bytes")
    }
    return Work(depth=depth, least_bytes=least_bytes, **totals)


class _Count:
    """Adds up work and bytes while depths are followed through a program."""

    def __init__(self) -> None:
        self.work = self.product_flops = self.product_bytes = 0

    def follow(self, jaxpr: Any, starts: Sequence[int], times: int) -> list[int]:
        """Depths of the results, given those of the arguments; work counts `times` times."""
        depths = dict(zip(map(id, jaxpr.invars), starts, strict=True))
        for equation in jaxpr.eqns:
            before = [depths.get(id(v), 0) for v in equation.invars]
            after = self._equation(equation, before, times)
            depths |= dict(zip(map(id, equation.outvars), after, strict=True))
        return [depths.get(id(v), 0) for v in jaxpr.outvars]

    def _equation(self, equation: Any, before: list[int], times: int) -> list[int]:
        name, inner = equation.primitive.name, list(inner_jaxprs(equation.params))
        if name == "scan":
            return self._scan(equation, inner[0], before, times)
        if name == "cond":
            return self._branches(inner, before[1:], times)
        if name == "while":
            body = equation.params["body_jaxpr"].jaxpr
            return self.follow(body, before[equation.params["cond_nconsts"] :], times)
        if inner and len(inner[0].invars) == len(before):
            return self.follow(inner[0], before, times)
        work, depth = _cost(equation)
        self.work += times * work
        if name in PRODUCT_FLOPS:
            self.product_flops += times * work
            self.product_bytes += times * sum(_bytes(v) for v in (*equation.invars, *equation.outvars))
        return [max(before, default=0) + depth] * len(equation.outvars)

    def _scan(self, equation: Any, body: Any, before: list[int], times: int) -> list[int]:
        fixed, carry, rows = scan_parts(equation.params, before)
        length, carried = equation.params["length"], len(carry)
        last, ends = [0] * (len(body.outvars) - carried), carry
        steps: list[list[int]] = []
        for turn in range(length):
            counting = self if turn == 0 else _Count()  # every iteration computes as much as the first
            out = counting.follow(body, [*fixed, *ends, *rows], times * length)
            steps.append([new - old for new, old in zip(out[:carried], ends, strict=True)])
            ends, last = out[:carried], list(map(max, last, out[carried:]))  # results of all turns are stacked
            if turn >= _STEADY_TURNS and len({tuple(step) for step in steps[-_STEADY_TURNS:]}) == 1:
                # Depths are maxima of sums, which are convex: if the last iteration adds as much, so do all before it.
                near = [end + (length - turn - 2) * step for end, step in zip(ends, steps[-1], strict=True)]
                out = _Count().follow(body, [*fixed, *near, *rows], 1)
                if out[:carried] == [end + step for end, step in zip(near, steps[-1], strict=True)]:
                    return [*out[:carried], *map(max, last, out[carried:])]
        return [*ends, *last]

    def _branches(self, branches: Sequence[Any], before: list[int], times: int) -> list[int]:
        counts = [_Count() for _ in branches]
        ends = [count.follow(branch, before, times) for count, branch in zip(counts, branches, strict=True)]
        largest = max(counts, key=lambda count: count.work)
        self.work += largest.work
        self.product_flops += largest.product_flops
        self.product_bytes += largest.product_bytes
        return [max(depths) for depths in zip(*ends, strict=True)]


def scan_parts(params: Mapping[str, Any], values: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Values of a scan's arguments by what they are: constant, carried, or one row for each iteration."""
    if "ft_in" in params:  # jax 0.11
        fixed, carry, rows = params["ft_in"].update(values).unpack()
        return list(fixed), list(carry), list(rows)
    fixed, last = params["num_consts"], params["num_consts"] + params["num_carry"]
    return list(values[:fixed]), list(values[fixed:last]), list(values[last:])


def _cost(equation: Any) -> tuple[int, int]:
    """Work and depth of one operation without inner programs."""
    name = equation.primitive.name
    if name in _MOVES or name.startswith("random_"):
        return 0, 0
    size = max((v.aval.size for v in equation.outvars), default=0)
    if name in PRODUCT_FLOPS:
        flops = PRODUCT_FLOPS[name](equation)
        return flops, 1 + _levels(_contracted(equation))
    if name.startswith(("reduce_", "arg")) and not name.startswith("reduce_precision"):
        read = equation.invars[0].aval.size
        if name.startswith("reduce_window"):
            window = math.prod(equation.params["window_dimensions"])
            return size * window, _levels(window)
        return read, _levels(read // max(1, size))
    if name.startswith("cum"):
        return size, _levels(equation.invars[0].aval.shape[equation.params["axis"]])
    if name == "sort":
        levels = _levels(equation.invars[0].aval.shape[equation.params["dimension"]])
        return size * levels, levels * (levels + 1) // 2
    if name == "fft":
        levels = sum(map(_levels, equation.params["fft_lengths"]))
        return 5 * size * levels, 2 * levels
    if name.startswith(("scatter", "select_and_scatter")):
        return equation.invars[-1].aval.size, 1
    return size, 1


def _contracted(equation: Any) -> int:
    """The number of products summed in each result of a product or convolution."""
    shape = equation.invars[1].aval.shape
    numbers = equation.params["dimension_numbers"]
    if equation.primitive.name == "dot_general":
        (_, contracted), _ = numbers
        return math.prod(shape[d] for d in contracted)
    return math.prod(shape) // shape[numbers.rhs_spec[0]]


def _levels(length: int) -> int:
    return math.ceil(math.log2(length)) if length > 1 else 0


def _bytes(value: Any) -> int:
    if isinstance(value, jex_core.Literal) or not hasattr(value.aval, "dtype"):
        return 0
    try:
        return value.aval.size * value.aval.dtype.itemsize
    except TypeError:  # a key of random numbers
        return 0


_MOVES = frozenset(
    (
        *("reshape", "transpose", "broadcast_in_dim", "squeeze", "expand_dims", "slice", "dynamic_slice", "split"),
        *("dynamic_update_slice", "concatenate", "pad", "rev", "gather", "copy", "copy_p", "iota", "device_put"),
        *("convert_element_type", "bitcast_convert_type", "reduce_precision", "optimization_barrier", "stop_gradient"),
        *("pcast", "pvary", "sharding_constraint", "full", "empty", "stack", "unstack", "tile", "name"),
    )
)
