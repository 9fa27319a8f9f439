"""The tables of `experiments.tiers_gateway` from its JSON, and whether they reach what they must."""

from typing import Any

import numpy as np

from experiments import tiers_shared
from experiments.tiers_relay import described
from mlcn_jax.tiers import policy as policies

DELAY_MS = {"edge": 10.0, "cloud": 50.0}  # each way
# What must be reached: at least or at most.
_LEAST_SETTLED, _MOST_FLOPS, _MOST_LOST = 0.6, 0.25, 0.5  # shares, and points of accuracy
_MOST_BYTES, _MOST_MEAN, _MOST_P95 = 0.45, 0.6, 1.2  # of the cloud alone
_MOST_LATE = 0.001  # of the requests, each explained, and none unanswered
_MOST_LOST_WITH_TIER = 0.5  # points of accuracy, for the tier with the fewest lanes
_LEAST_VALIDATION = 5_000
_OF_FAULT = (
    "requests",
    "times",
    "deadline_ms",
    "late",
    "late_by_gateway",
    "unexplained",
    "unanswered",
    "p50_ms",
    "p999_ms",
)
_MILLISECONDS = "of requests one after the other, by the client's clock"


def packed(right: np.ndarray) -> str:
    """Which images were classified rightly, a bit each, in hexadecimal digits."""
    return np.packbits(right).tobytes().hex()


def unpacked(text: str, count: int) -> np.ndarray:
    """The same as numbers, 0 or 1."""
    return np.unpackbits(np.frombuffer(bytes.fromhex(text), np.uint8), count=count).astype(float)


def report(results: dict[str, Any]) -> str:
    """The tables in Markdown."""
    measured, policy = results["measured"], results["policy"]
    names = [tier["name"] for tier in policy["tiers"]]
    links = " and ".join(f"{2 * DELAY_MS[name]:g}" for name in names[1:])
    images, validation = measured["answers"]["images"], policy["validation_images"]
    lines = [
        f"# A gateway over {', '.join(names)}",
        "",
        f"`{results['about']['model']}`, {images:,} test images of {results['about']['data']}; {results['device']}, "
        f"jax {results['versions']['jax']}. Times {_MILLISECONDS}; links of {links} ms there and back. "
        "The points that are lost decide; the bound beside them is paired, one-sided and 95 %, as `policy.upper_bound` "
        "gives it. Lengths of all tiers together differ from the whole model's by at most "
        f"{measured['largest error']:.1g}. Cores that other work kept busy: {_busy(results)}. Thresholds from "
        f"{validation:,} validation images (at least {_LEAST_VALIDATION:,}: {_yes(validation >= _LEAST_VALIDATION)}). "
        f"The relay, before: {'; '.join(f'{given}: {found}' for given, found in map(described, measured['relay']))}.",
        "",
        "| | cloud alone | tiers | | must be | reached |",
        "|" + " --- |" * 6,
        *("| " + " | ".join(map(_text, row)) + " |" for row in answer_rows(measured)),
        "",
        "Nodes fail again and again, each time at a random moment while requests go on, and come back at another, as "
        "often as told: all nodes, unless one is named. Late ones, and why, are in the JSON. At most "
        f"{_MOST_LATE:.1%} may be late, each explained by what it waited longer than punctual ones, and none "
        "unanswered. Where no other tier answers within the deadline without a fault, nothing is judged.",
        "",
        "| fault | requests | times | deadline, ms | late | by the gateway's clock | unexplained | unanswered "
        "| median, ms | 99.9 %, ms | tiers beyond the end heard before, during, after | reached |",
        "|" + " --- |" * 12,
    ]
    alone = f"{len(policy['tiers'][0]['lanes'])} lanes"
    for key, row in measured.items():
        if key.startswith("fault: "):
            shown = [_text(row[name]) for name in _OF_FAULT]
            shown.append(", ".join(_refined(found, alone) for found in row["heard"].values()))
            good = row["late"] <= _MOST_LATE * row["requests"] and not row["unexplained"] and not row["unanswered"]
            before = row["heard"]["before"]
            asked = sum(before.values()) > before.get(alone, 0)  # or there was nothing that the fault could spoil
            told = _yes(good) if asked else "not judged"
            lines.append(f"| {key.removeprefix('fault: ')} | " + " | ".join([*shown, told]) + " |")
    lines += ["", "| tiers heard | accuracy |", "| --- | --- |"]
    lines += [f"| {name} | {accuracy:.4f} |" for name, accuracy in measured["subsets"].items()]
    lines += ["", "| tier lost | its lanes | accuracy without it | lost, points | must be | reached |"]
    lines += ["|" + " --- |" * 6, *lost_tiers(policy["tiers"], measured["subsets"])]
    if "own models" in measured:
        lines += ["", "At equal FLOPs, lanes that tiers share against a model of its own in each (`tiers_shared.py`):"]
        lines += tiers_shared.report(names, measured["own models"])
    return "\n".join(lines) + "\n"


def answer_rows(measured: dict[str, Any]) -> list[tuple]:
    """What tiers answer against the cloud alone: rows of what was measured, what it must be, and whether it is."""
    cloud, own = measured["cloud alone"], measured["answers"]
    right = {name: unpacked(row["right"], row["images"]) for name, row in (("cloud", cloud), ("own", own))}
    lost = right["cloud"] - right["own"]
    bound = policies.upper_bound(lost.mean(), lost.var(), len(lost))
    points = 100 * float(lost.mean())
    settled, share = own["settled_at_end"], own["end_flops_share"]

    def ratio(name: str, key: str, most: float) -> tuple:
        found = own[key] / cloud[key]
        return name, cloud[key], own[key], f"{found:.3f}", f"at most {most:g}", _yes(found <= most)

    return [
        (
            *("accuracy", cloud["accuracy"], own["accuracy"]),
            f"lost {points:.2f}, at most {100 * bound:.2f} points",
            *(f"lost at most {_MOST_LOST:g} points", _yes(points <= _MOST_LOST)),
        ),
        ("settled at the end", "", settled, "", f"at least {_LEAST_SETTLED:g}", _yes(settled >= _LEAST_SETTLED)),
        ("FLOPs of the end", "", share, "of all", f"at most {_MOST_FLOPS:g}", _yes(share <= _MOST_FLOPS)),
        ("answers without a tier that was asked", "", own["without_a_tier"], "no fault was made", "", ""),
        ratio("bytes of bodies", "sent_bytes", _MOST_BYTES),
        ratio("mean, ms", "mean_ms", _MOST_MEAN),
        ratio("p95, ms", "p95_ms", _MOST_P95),
    ]


def lost_tiers(tiers: list[dict[str, Any]], accuracies: dict[str, float]) -> list[str]:
    """Rows in Markdown: the accuracy of all other tiers, and what it is less than that of all."""
    whole = "+".join(tier["name"] for tier in tiers)
    fewest = min(len(tier["lanes"]) for tier in tiers)
    rows = []
    for lost in tiers:
        without = accuracies["+".join(tier["name"] for tier in tiers if tier is not lost)]
        points = 100 * (accuracies[whole] - without)
        must = (f"at most {_MOST_LOST_WITH_TIER:g}", _yes(points <= _MOST_LOST_WITH_TIER))
        shown = " | ".join(must if len(lost["lanes"]) == fewest else ("", ""))
        rows.append(f"| {lost['name']} | {len(lost['lanes'])} | {without:.4f} | {points:.2f} | {shown} |")
    return rows


def _busy(results: dict[str, Any]) -> str:
    known = [cores for cores in results.get("busy_cores", {}).values() if cores is not None]
    return f"{max(known):.2f} at most before a measurement" if known else "unknown"


def _refined(found: dict[str, int], alone: str) -> str:
    """The share of answers that have more than the end's lanes; nothing where there are no answers."""
    return f"{1 - found.get(alone, 0) / sum(found.values()):.1%}" if found else "none"


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _yes(value: bool) -> str:
    return "yes" if value else "no"
