"""Tables of lanes over end, edge and cloud."""

from collections.abc import Sequence
from typing import Any

from tables.parts import NAMES, experiment, measured_on, percent, place, table_of

_LATE = 0.001  # of the requests, at most


@place
def tiers_gateway() -> str:
    return _gateway(experiment("tiers_gateway"))


@place
def tiers_gateway_cifar() -> str:
    return _gateway(experiment("tiers_gateway_cifar"))


@place
def tiers_own_models() -> str:
    result = experiment("tiers_gateway_cifar")
    found = result["measured"]["own models"]
    names = [tier["name"] for tier in result["policy"]["tiers"]]
    rows = [
        [
            way,
            *(
                f"{percent(accuracy)} ({percent(settled, 1)})"
                for accuracy, settled in zip(row["accuracy"], row["settled"], strict=True)
            ),
            percent(row["final_accuracy"]),
            f"{row['times']['mean_ms']:.0f} ({row['times']['p95_ms']:.0f})",
        ]
        for way, row in found.items()
    ]
    told = ", ".join(f"`{own['lanes']}` in the {name}" for name, own in result["own"].items())
    header = " | ".join(["", *(f"{name}, % (settled there)" for name in names), "final answer, %"])
    what = f"`{result['about']['model']}` against models of their own: {told}; one training of each"
    return f"{table_of(f'{header} | ms to it (95 %)', rows)}\n\n{measured_on(result, what)}"


def _gateway(result: dict[str, Any]) -> str:
    """Answers of a gateway against the cloud alone, and requests under faults, where any were made."""
    about, measured, policy = result["about"], result["measured"], result["policy"]
    cloud, own = measured["cloud alone"], measured["answers"]
    rows = [
        ["accuracy, %", percent(cloud["accuracy"]), percent(own["accuracy"]), "at most 0.5 points less"],
        ["settled at the end, %", "-", percent(own["settled_at_end"], 1), "at least 60"],
        ["FLOPs of the end, %", "-", percent(own["end_flops_share"], 0), "at most 25"],
    ]
    fewest = min(len(tier["lanes"]) for tier in policy["tiers"])
    for tier in policy["tiers"][1:]:
        must = "at most 0.5 points less" if len(tier["lanes"]) == fewest else ""
        without = measured["without a tier"][tier["name"]]["accuracy"]
        rows.append([f"accuracy while the {tier['name']} is lost, %", "-", percent(without), must])
    for name, key, most in (
        ("bytes of bodies (the cloud's computed)", "sent_bytes", 0.45),
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
            given = f"{row['requests']:,}", met, row["exposed"], f"{row['deadline_ms']:.0f}", late, row["unexplained"]
            faults.append([key.removeprefix("fault: "), *given, row["unanswered"]])
    lanes = ", ".join(f"{tier['name']} {len(tier['lanes'])}" for tier in policy["tiers"])
    dates = sorted({session["date"] for session in result["sessions"]})
    what = (
        f"`{about['model']}` on {NAMES[about['data']]}, lanes: {lanes}, {own['images']:,} test images, thresholds from "
        f"{policy['validation_images']:,} validation images, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}"
    )
    parts = [table_of(" | the cloud alone | tiers | target", rows)]
    if faults:
        header = (
            "fault | requests | faults in which a node was asked | requests to nodes meanwhile | deadline, ms | late | "
            "late and unexplained | unanswered"
        )
        target = f"At most {percent(_LATE, 1)} % of the requests may be late, each explained, and none unanswered."
        parts += [table_of(header, faults), target]
    return "\n\n".join([*parts, measured_on(result, what)])


def _tables_measured_on(
    result: dict[str, Any], measured: str = "{tasks} tasks of {images} images, {runs} runs of each"
) -> str:
    about, days = result["about"], sorted({time[:10] for time in result["starts"]})
    versions = list(result["starts"].values())[-1]["versions"]
    what = (
        f"`{about['model']}` on {NAMES[about['data']]}, one lane at an end, one at an edge, the others in the cloud; "
        + measured.format_map(about)
    )
    record = {"device": about["device"], "cpu_count": about["cpu_count"], "versions": versions}
    return measured_on(record, what, " to ".join(dict.fromkeys((days[0], days[-1]))))


@place
def tiers_schedules() -> str:
    from experiments.tiers_tables_report import mean_error, predicted_by, schedule_rows

    result = experiment("tiers_tables")
    every = [row for row in schedule_rows(result) if (row["schedule"], row["ends"]) != ("End", 1)]
    slower = [row for row in every if row["bottleneck"] != "end"]
    rows = [
        [
            name,
            *(f"{percent(mean_error(some, name), 0)} ({len(predicted_by(name, some))})" for some in (every, slower)),
            target,
        ]
        for name, target in (("printed", "-"), ("corrected", "at most 15 over at least 24"))
    ]
    header = "model | mean error, % (configurations) | where ends are not the slowest, % (configurations) | target"
    return f"{table_of(header, rows)}\n\n{_tables_measured_on(result)}"


@place
def tiers_cuts() -> str:
    return _cuts(experiment("tiers_tables"))


@place
def tiers_cuts_fashion() -> str:
    return _cuts(experiment("tiers_cuts_fashion"), ["edge"])


def _cuts(result: dict[str, Any], homes: Sequence[str] = ("end", "edge")) -> str:
    """What each cut costs these trusted devices at each delay, and at a slow rate."""
    rows = [value for key, value in result["measured"].items() if key.startswith("cut ")]
    found = [row for row in rows if row["home"] in homes]
    by_link = {(row["home"], row["cut"], row["bits"], row["delay"], row["rate"]): row for row in found}
    slow = max(result["about"]["rates"])
    links = [(delay, 0.0) for delay in result["about"]["delays"]] + [(result["about"]["delays"][0], slow)]
    rows = []
    for home, cut, bits in dict.fromkeys(key[:3] for key in by_link):
        if cut == "pixels":
            continue
        mine = [by_link[home, cut, bits, *link] for link in links]
        plain = [by_link[home, "pixels", 0, *link] for link in links]
        more = [
            f"{round(100 * (own['task_seconds'] / other['task_seconds'] - 1))}"
            for own, other in zip(mine, plain, strict=True)
        ]
        size = f"{mine[0]['bytes_per_image']:,.0f} ({mine[0]['bytes_per_image'] / plain[0]['bytes_per_image']:.1f})"
        rows.append([home, cut, bits, size, *more])
    titles = [f"{delay:g} s{f', {rate:g} Mbit/s' if rate else ''}" for delay, rate in links]
    header = (
        f"trusted device | cut | bits | bytes an image (times those of pixels) | % longer at {' | at '.join(titles)}"
    )
    return f"{table_of(header, rows)}\n\n{_tables_measured_on(result, 'one task of {images} images, {runs} times')}"


@place
def tiers_failures() -> str:
    from experiments.tiers_tables_report import failure_table, monitor_table

    result = experiment("tiers_tables")
    (head, measured), (_, ratios) = failure_table(result), monitor_table(result)
    seconds = table_of(" | ".join(head), measured)
    least = table_of("dead ends | monitor, times the remaining work over the living ends | at most 1.15", ratios)
    return f"{seconds}\n\n{least}\n\n{_tables_measured_on(result)}"


@place
def tiers_leak() -> str:
    return _leak("tiers_leak")


@place
def tiers_leak_cifar() -> str:
    return _leak("tiers_leak_cifar")


def _leak(name: str) -> str:
    """What the best attack restores from each cut, by the median PSNR, and the references that need nothing sent."""
    result = experiment(name)
    about, found = result["about"], result["rows"]
    rows, best = [], dict[str, tuple[str, dict[str, Any]]]()
    for key, row in found.items():
        sent, _, attack = key.rpartition(", ")
        if "psnr_db" not in row:
            continue
        if sent == "none, nothing":
            rows.append(["nothing", "", f"the {attack}", *_restored(row), f"{percent(row['found'], 0)}", ""])
        elif sent not in best or row["psnr_db"] > best[sent][1]["psnr_db"]:
            best[sent] = attack, row
    for sent, (attack, row) in best.items():
        share, accuracy = found[f"{sent}, found"]["found"], result["accuracy"][sent]
        rows.append([*sent.split(", "), attack, *_restored(row), percent(share, 0), percent(accuracy)])
    days = sorted({time[:10] for time in result["starts"]})
    versions = list(result["starts"].values())[-1]["versions"]
    what = f"`{about['lanes']}` on {NAMES[about['data']]}, medians of {about['images']} test images, one training"
    record = {"device": about["device"], "cpu_count": about["cpu_count"], "versions": versions}
    header = "sent | in | best attack | PSNR, dB | SSIM | found, % | accuracy of these lanes, %"
    return f"{table_of(header, rows)}\n\n{measured_on(record, what, ' to '.join(dict.fromkeys((days[0], days[-1]))))}"


def _restored(row: dict[str, Any]) -> list[str]:
    return [f"{row['psnr_db']:.1f}", f"{row['ssim']:.3f}"]
