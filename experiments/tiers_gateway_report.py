"""The tables of `experiments.tiers_gateway` from its JSON, and whether they reach what they must."""

from typing import Any

from experiments import tiers_shared
from experiments.tiers_relay import described
from experiments.tiers_shared import unpacked
from mlcn_jax.tiers import policy as policies

EXTRA_MS, LONG_EXTRA_MS = 50.0, 250.0  # of a deadline, beyond the end's own lanes; the first is to be met
DELAY_MS = {"edge": 10.0, "cloud": 50.0}  # each way
RATE_MBIT = {"edge": 100.0, "cloud": 20.0}  # in each direction
# What must be reached: at least or at most.
_LEAST_SETTLED, _MOST_FLOPS, _MOST_LOST = 0.6, 0.25, 0.5  # shares, and points of accuracy
_MOST_BYTES, _MOST_MEAN, _MOST_P95 = 0.45, 0.6, 1.2  # of the cloud alone
_LARGEST_ERROR = 1e-5  # of lengths
_MOST_WITHOUT = 0.001  # of the answers may lack a tier that was asked, where no fault was made
_MOST_LATE = 0.001  # of the requests, each explained, and none unanswered
_LEAST_MET, _LEAST_FAULTS = 0.5, 10  # of the faults, and so many
_MOST_LOST_WITH_TIER = 0.5  # points of accuracy, for the tier with the fewest lanes
_LEAST_VALIDATION = 5_000
_OF_FAULT = {
    "requests": "requests",
    "planned_times": "planned faults",
    "times": "faults",
    "begun_unwell": "while another was not forgotten",
    "times_met": "with a request to a node",
    "exposed": "requests to a node meanwhile",
    "deadline_ms": "deadline, ms",
    "late": "late",
    "late_by_gateway": "by the gateway's clock",
    "unexplained": "unexplained",
    "unanswered": "unanswered",
    "p50_ms": "median, ms",
    "p999_ms": "99.9 %, ms",
    "max_ms": "longest, ms",
}
_MILLISECONDS = "of requests one after the other, by the client's clock"


def report(results: dict[str, Any]) -> str:
    """The tables in Markdown, of what has been measured."""
    measured, policy, sessions = results["measured"], results["policy"], results["sessions"]
    names = [tier["name"] for tier in policy["tiers"]]
    links = " and ".join(f"{2 * DELAY_MS[name]:g} ms there and back, {RATE_MBIT[name]:g} Mbit/s" for name in names[1:])
    validation = policy["validation_images"]
    days = sorted({session["date"] for session in sessions})
    relay = "; ".join(f"{given}: {found}" for given, found in map(described, sessions[-1]["relay"]))
    lines = [
        f"# A gateway over {', '.join(names)}",
        "",
        f"`{results['about']['model']}`, test images of {results['about']['data']}; {results['device']}, "
        f"jax {results['versions']['jax']}, {' to '.join(dict.fromkeys((days[0], days[-1])))}. Times {_MILLISECONDS}; "
        f"links of {links}. "
        "The points that are lost decide; the bound beside them is paired, one-sided and 95 %, as `policy.upper_bound` "
        f"gives it. Cores that other work kept busy: {_busy(results)}. Thresholds from "
        f"{validation:,} validation images (at least {_LEAST_VALIDATION:,}: {_yes(validation >= _LEAST_VALIDATION)}). "
        f"The relay, before: {relay}.",
    ]
    if errors := {key: error for key, error in measured.items() if key.startswith("largest error")}:
        lines += ["", "| lengths of all tiers together against the whole model's | at most 1e-5 |", "| --- | --- |"]
        lines += [f"| {key} | {error:.1g}, {_yes(error <= _LARGEST_ERROR)} |" for key, error in errors.items()]
    if {"cloud alone", "answers"} <= measured.keys():
        lines += ["", "| | cloud alone | tiers | | must be | reached |", "|" + " --- |" * 6]
        lines += ["| " + " | ".join(map(_text, row)) + " |" for row in answer_rows(measured)]
    faults = {key.removeprefix("fault: "): row for key, row in measured.items() if key.startswith("fault: ")}
    if faults:
        lines += fault_rows(faults, f"{len(policy['tiers'][0]['lanes'])} lanes")
    if "subsets" in measured:
        lines += ["", "| tiers heard | accuracy |", "| --- | --- |"]
        lines += [f"| {name} | {accuracy:.4f} |" for name, accuracy in measured["subsets"].items()]
    if "without a tier" in measured:
        lines += ["", "What is answered while a tier is lost, final where the policy says so:", ""]
        lines += ["| tier lost | its lanes | accuracy | lost, points | must be | reached |", "|" + " --- |" * 6]
        lines += lost_tiers(policy["tiers"], measured["without a tier"])
    if "own models" in measured:
        lines += ["", "At equal FLOPs, lanes that tiers share against a model of its own in each (`tiers_shared.py`):"]
        lines += tiers_shared.report(names, measured["own models"], measured["answers"]["images"])
    return "\n".join(lines) + "\n"


def fault_rows(faults: dict[str, dict[str, Any]], alone: str) -> list[str]:
    """What was late under each fault; `alone` is how answers without any other tier are counted."""
    lines = [
        "",
        "Nodes fail again and again, each time at a random moment while requests go on, and come back at another, as "
        "often as told: all nodes, unless one is named. Requests that would have been sent while another took long "
        f"are counted too. Late ones, and why, are in the JSON. At most {_MOST_LATE:.1%} may be late, each explained "
        "by waits without which it would have been punctual, and none unanswered. Only tiers that answer within the "
        f"deadline are put to the test. Where none does without a fault, or fewer than {_LEAST_FAULTS} faults, or "
        "less than half of them, met a request to a node, nothing is judged. A node that starts again takes long, so "
        f"that there are fewer of these faults. The deadline to be met is {EXTRA_MS:g} ms after the end's own lanes; "
        "others are told.",
        "",
        f"| fault | {' | '.join(_OF_FAULT.values())} | tiers beyond the end heard before, during, after | reached |",
        "|" + " --- |" * (3 + len(_OF_FAULT)),
    ]
    for name, row in faults.items():
        shown = [_text(row[key]) for key in _OF_FAULT]
        shown.append(", ".join(_refined(found, alone) for found in row["heard"].values()))
        good = row["late"] <= _MOST_LATE * row["requests"] and not row["unexplained"] and not row["unanswered"]
        before = row["heard"]["before"]
        asked = sum(before.values()) > before.get(alone, 0)  # or there was nothing that the fault could spoil
        came = min(row["times_met"], row.get("times_filled", row["times_met"]))
        verdict = _yes(good) if row["extra_ms"] == EXTRA_MS else f"{_yes(good)}, with {row['extra_ms']:g} ms"
        least = max(_LEAST_FAULTS, _LEAST_MET * row["times"])
        shown.append(verdict if asked and came >= least else "not judged")
        lines.append(f"| {name} | " + " | ".join(shown) + " |")
    return lines


def answer_rows(measured: dict[str, Any]) -> list[tuple]:
    """What tiers answer against the cloud alone: rows of what was measured, what it must be, and whether it is."""
    cloud, own = measured["cloud alone"], measured["answers"]
    right = {name: unpacked(row["right"], row["images"]) for name, row in (("cloud", cloud), ("own", own))}
    lost = right["cloud"] - right["own"]
    bound = policies.upper_bound(lost.mean(), lost.var(), len(lost))
    points = 100 * float(lost.mean())
    settled, share = own["settled_at_end"], own["end_flops_share"]
    whole = own["without_a_tier"] <= _MOST_WITHOUT * own["images"] and not own["failed"] and not cloud["failed"]

    def ratio(name: str, key: str, most: float) -> tuple:
        found = own[key] / cloud[key]
        reached = _yes(found <= most) if whole else "no: answers lack tiers"
        return name, cloud[key], own[key], f"{found:.3f}", f"at most {most:g}", reached

    return [
        (
            *("accuracy", cloud["accuracy"], own["accuracy"]),
            f"lost {points:.2f}, at most {100 * bound:.2f} points",
            *(f"lost at most {_MOST_LOST:g} points", _yes(points <= _MOST_LOST)),
        ),
        ("settled at the end", "", settled, "", f"at least {_LEAST_SETTLED:g}", _yes(settled >= _LEAST_SETTLED)),
        ("FLOPs of the end", "", share, "of all", f"at most {_MOST_FLOPS:g}", _yes(share <= _MOST_FLOPS)),
        ("answers without a tier that was asked", "", own["without_a_tier"], "no fault was made", "", ""),
        ("requests that failed", cloud["failed"], own["failed"], "", "", ""),
        ratio("bytes of bodies (the cloud's computed)", "sent_bytes", _MOST_BYTES),
        ratio("mean, ms", "mean_ms", _MOST_MEAN),
        ratio("p95, ms", "p95_ms", _MOST_P95),
    ]


def lost_tiers(tiers: list[dict[str, Any]], found: dict[str, dict[str, Any]]) -> list[str]:
    """Rows in Markdown: the accuracy of what is answered without each tier but the end, and the points lost by it.

    The tier with the fewest lanes is judged, unless that is the end. Bounds are paired, one-sided and 95 %.
    """
    others = tiers[1:]
    fewest = min(len(tier["lanes"]) for tier in tiers)
    right = {name: unpacked(row["right"], row["images"]) for name, row in found.items()}
    rows = []
    for tier in others:
        lost = right[""] - right[tier["name"]]
        points, bound = 100 * lost.mean(), 100 * policies.upper_bound(lost.mean(), lost.var(), len(lost))
        must = (f"at most {_MOST_LOST_WITH_TIER:g}", _yes(points <= _MOST_LOST_WITH_TIER))
        shown = " | ".join(must if len(tier["lanes"]) == fewest else ("", ""))
        told = f"{found[tier['name']]['accuracy']:.4f} | {points:.2f}, at most {bound:.2f}"
        rows.append(f"| {tier['name']} | {len(tier['lanes'])} | {told} | {shown} |")
    return rows


def _busy(results: dict[str, Any]) -> str:
    known = [cores for both in results.get("busy_cores", {}).values() for cores in both if cores is not None]
    return f"{max(known):.2f} at most before or after a measurement" if known else "unknown"


def _refined(found: dict[str, int], alone: str) -> str:
    """The share of answers that have more than the end's lanes; nothing where there are no answers."""
    return f"{1 - found.get(alone, 0) / sum(found.values()):.1%}" if found else "none"


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _yes(value: bool) -> str:
    return "yes" if value else "no"
