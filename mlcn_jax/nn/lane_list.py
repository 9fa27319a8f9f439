"""How a list of lanes is written: `KIND:wWIDTHdDEPTH*COUNT`, separated by commas."""

import re

from mlcn_jax.errors import InputError
from mlcn_jax.nn.lanes import LANE_KINDS, LaneGroup, LaneSpec

_MOST = {"width": 1_000, "depth": 100, "count": 10_000}  # more is most likely a typo, and would take hours


def parse_lanes(text: str) -> tuple[LaneGroup, ...]:
    """Reads a list of lanes such as `"mlcn1:w4*8"` or `"mlcn1:w2d1*2, mlcn2:w4d3"`.

    Each entry is `KIND:wWIDTH[dDEPTH][*COUNT]`; depth and count default to 1. Equal lanes are merged
    into one group, at the position of the first of them.

    Raises:
      InputError: the text is not such a list (the message points at the position), or a number in it is too large.

    >>> [str(group) for group in parse_lanes("mlcn1:w4*2, mlcn2:w1d3, mlcn1:w4")]
    ['mlcn1:w4d1*3', 'mlcn2:w1d3*1']
    """
    counts: dict[LaneSpec, int] = {}
    start = 0
    for entry in text.split(","):
        spec, count = _parse_entry(text, entry, start)
        counts[spec] = counts.get(spec, 0) + count
        start += len(entry) + 1
    if sum(counts.values()) > _MOST["count"]:
        raise InputError(f"model.lanes has {sum(counts.values()):,} lanes; at most {_MOST['count']:,} are allowed")
    return tuple(LaneGroup(spec, count) for spec, count in counts.items())


def _parse_entry(text: str, entry: str, start: int) -> tuple[LaneSpec, int]:
    position = len(entry) - len(entry.lstrip())
    entry = entry.rstrip()

    def take(pattern: str, expected: str) -> str:
        nonlocal position
        match = re.compile(pattern).match(entry, position)
        if match is None:
            pointer = " " * (start + position) + "^"
            raise InputError(
                f"model.lanes: expected {expected} at character {start + position + 1}\n"
                f"  {text}\n  {pointer}\n"
                "a list of lanes looks like mlcn1:w4*8 or mlcn1:w2d1*2,mlcn2:w4d3 (KIND:wWIDTHdDEPTH*COUNT)"
            )
        position = match.end()
        return match.group()

    def number(what: str) -> int:
        digits = take("[1-9][0-9]*", f"a {what} of 1 or more")
        if len(digits) > 9 or int(digits) > _MOST[what]:
            raise InputError(
                f"model.lanes: a {what} of {digits[:9]}{'...' * (len(digits) > 9)} is above {_MOST[what]:,}"
            )
        return int(digits)

    known = sorted(LANE_KINDS, key=len, reverse=True)
    kind = take("(?:" + "|".join(known) + ")(?![A-Za-z0-9_])", "a lane kind (" + ", ".join(LANE_KINDS) + ")")
    take(":", "':'")
    take("w", "'w' and a width")
    width = number("width")
    depth = count = 1
    if entry[position : position + 1] == "d":
        take("d", "'d'")
        depth = number("depth")
    if entry[position : position + 1] == "*":
        take(r"\*", "'*'")
        count = number("count")
    take("$", "'d' and a depth, '*' and a count, ',' or the end")
    return LaneSpec(kind, width, depth), count
