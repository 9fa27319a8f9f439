"""What a compiled program exchanges between devices, read from its text."""

import collections
import math
import re
from collections.abc import Iterator


def collective_bytes(compiled_text: str) -> dict[str, int]:
    """Bytes of all arrays that a compiled program (`compiled.as_text()`) gathers, scatters and reduces, by collective.

    Full arrays are counted: the output of a gather, the input of a scatter. Other collectives are listed if present.
    """
    totals = {"all-gather": 0, "reduce-scatter": 0, "all-reduce": 0}
    for name, size in _collectives(compiled_text):
        totals[name] = totals.get(name, 0) + size
    return totals


def collective_messages(compiled_text: str) -> dict[str, int]:
    """How many arrays a compiled program (`compiled.as_text()`) gathers, scatters and reduces, by kind of collective.

    A collective of several arrays counts as several: on CPUs, each of its arrays is sent by itself.
    """
    return dict(collections.Counter(name for name, _ in _collectives(compiled_text)))


def _collectives(compiled_text: str) -> Iterator[tuple[str, int]]:
    """The kind of collective and the bytes of each array."""
    pattern = r" = (\(.*?\)|\S+) (all-gather|reduce-scatter|all-reduce|all-to-all|collective-permute)(?:-start)?\((.*)"
    for shapes, name, rest in re.findall(pattern, compiled_text):
        times = 1
        if name == "reduce-scatter":
            group = re.search(r"replica_groups=\{\{([\d,]+)\}", rest)
            times = len(group.group(1).split(",")) if group else 1
        for kind, bits, dims in re.findall(r"\b([a-z]+)(\d+)\[([\d,]*)\]", shapes):
            del kind
            yield name, times * (int(bits) // 8) * math.prod(int(n) for n in dims.split(",") if n)
