"""Tables of lanes over end, edge and cloud."""

from typing import Any

from tables.parts import NAMES, experiment, measured_on, percent, place, table_of

_LATE = 0.001  # of the requests, at most


@place
def tiers_gateway() -> str:
    return _gateway(experiment("tiers_gateway"))


@place
def tiers_gateway_cifar() -> str:
    return _gateway(experiment("tiers_gateway_cifar"))


def _gateway(result: dict[str, Any]) -> str:
    """Answers of a gateway against the cloud alone, and requests under faults, where any were made."""
    about, measured, policy = result["about"], result["measured"], result["policy"]
    cloud, own = measured["cloud alone"], measured["answers"]
    rows = [
        ["accuracy, %", percent(cloud["accuracy"]), percent(own["accuracy"]), "at most 0.5 points less"],
        ["settled at the end, %", "-", percent(own["settled_at_end"], 1), "at least 60"],
        ["FLOPs of the end, %", "-", percent(own["end_flops_share"], 0), "at most 25"],
    ]
    for name, key, most in (
        ("bytes of bodies", "sent_bytes", 0.45),
        ("mean time, ms", "mean_ms", 0.6),
        ("95 % time, ms", "p95_ms", 1.2),
    ):
        ratio = f"{own[key]:,.0f}, {own[key] / cloud[key]:.2f} of it"
        rows.append([name, f"{cloud[key]:,.0f}", ratio, f"at most {most:g} of it"])
    faults = []
    for key, row in measured.items():
        if key.startswith("fault: "):
            late = f"{row['late']} ({percent(row['late'] / row['requests'])} %)"
            met = f"{row['times_met']} of {max(row['times'], row['times_met'])}"
            given = f"{row['requests']:,}", met, f"{row['deadline_ms']:.0f}", late, row["unexplained"]
            faults.append([key.removeprefix("fault: "), *given, row["unanswered"]])
    lanes = ", ".join(f"{tier['name']} {len(tier['lanes'])}" for tier in policy["tiers"])
    dates = sorted({session["date"] for session in result["sessions"]})
    what = (
        f"`{about['model']}` on {NAMES[about['data']]}, lanes: {lanes}, {own['images']:,} test images, thresholds from "
        f"{policy['validation_images']:,} validation images, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}"
    )
    parts = [table_of(" | the cloud alone | tiers | target", rows)]
    if faults:
        header = "fault | requests | faults that met one | deadline, ms | late | of these unexplained | unanswered"
        target = f"At most {percent(_LATE, 1)} % of the requests may be late, each explained, and none unanswered."
        parts += [table_of(header, faults), target]
    return "\n\n".join([*parts, measured_on(result, what)])
