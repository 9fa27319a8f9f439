"""How long tasks take on ends, edges and a cloud: the equations of a report as printed, and a corrected model.

A task is a batch of images. Every task is answered by an end's lanes; under the other schedules it then goes on to an
edge or the cloud, whose lanes refine it.

Source: Zhang 2018, End, edge and cloud: heterogeneous distributed deep neural networks, equations 1 to 6. The corrected
model is this project's.
"""

import dataclasses
import math

SCHEDULES = ("End", "End-Cloud", "End-Edge", "Mapping")


@dataclasses.dataclass(frozen=True)
class Device:
    """One kind of device.

    Attributes:
      count: how many there are.
      communication, processing: seconds per task, t_c and t_p in the report.
      work: core-seconds per task on cores that all devices of a test bed share; 0 if they share none.
    """

    count: int
    communication: float
    processing: float
    work: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds per task, t_c + t_p."""
        return self.communication + self.processing


@dataclasses.dataclass(frozen=True)
class System:
    """Devices, and what they share.

    Attributes:
      end, edge, cloud: the tiers.
      tasks: number of tasks, N_t.
      dispatch: seconds that the single dispatcher spends on each task that it hands to a device.
      cores: number of cores that all devices share; 0 for no limit.
      share: of the ends, those that `Mapping` maps to the cloud; None for the share of `cloud_share`.
    """

    end: Device
    edge: Device
    cloud: Device
    tasks: int
    dispatch: float = 0.0
    cores: float = 0.0
    share: float | None = None


def printed(schedule: str, system: System) -> float:
    """Seconds by equations 1, 2, 3 and 6 as printed, which add up times that overlap."""
    tasks = system.tasks
    end = tasks / system.end.count * system.end.seconds
    with_cloud = end + tasks / system.cloud.count * system.cloud.seconds
    with_edge = end + tasks / system.edge.count * system.edge.seconds
    if schedule == "Mapping":
        share = printed_cloud_share(system)
        return share * with_cloud + (1 - share) * with_edge
    return {"End": end, "End-Cloud": with_cloud, "End-Edge": with_edge}[schedule]


def printed_ends_per_edge(system: System) -> int:
    """Equation 4, N_map, as printed. For ends that work in parallel it is upside down: its inverse is right."""
    return math.ceil(system.edge.seconds / system.end.seconds)


def printed_cloud_share(system: System) -> float:
    """Equation 5, theta_cloud, as printed; negative where the edges have more ends mapped to them than there are."""
    return (system.end.count - system.edge.count * printed_ends_per_edge(system)) / system.end.count


def cloud_share(system: System) -> float:
    """Share of the ends that are mapped to the cloud: `system.share`, or else, in whole ends, so that edges and cloud
    finish together."""
    if system.share is not None:
        return system.share
    to_cloud = system.cloud.count / system.cloud.seconds
    to_edges = system.edge.count / system.edge.seconds
    ends = system.end.count
    return min(max(round(ends * to_cloud / (to_cloud + to_edges)), 0), ends) / ends


def corrected(schedule: str, system: System) -> float:
    """Seconds if devices work in parallel on a pipeline of tasks: the slowest resource, plus filling the pipeline.

    The pipeline is filled once, in a task's time on the other tiers that it passes.
    """
    busy = _busy(schedule, system)
    slowest = max(busy.values())
    passed = [getattr(system, name).seconds for name in ("edge", "cloud") if name in busy]
    if not passed:
        return slowest
    return slowest + (max(passed) if busy["end"] == slowest else system.end.seconds)


def bottleneck(schedule: str, system: System) -> str:
    """What is slowest by the corrected model: the devices of `end`, `edge` or `cloud`, `dispatcher`, or `cores`."""
    busy = _busy(schedule, system)
    return max(busy, key=busy.__getitem__)


def _busy(schedule: str, system: System) -> dict[str, float]:
    """Seconds for which each resource is busy: each tier's devices, the dispatcher, and the cores that all share.

    Under `Mapping` each end has a fixed edge, so the edge with the most ends is the slowest; otherwise edges take tasks
    from one queue.
    """
    tasks, cloud = system.tasks, cloud_share(system)
    shares = {"End": (0.0, 0.0), "End-Cloud": (0.0, 1.0), "End-Edge": (1.0, 0.0), "Mapping": (1 - cloud, cloud)}
    share = shares[schedule]
    stages = {
        "end": (system.end, float(tasks)),
        "edge": (system.edge, tasks * share[0]),
        "cloud": (system.cloud, tasks * share[1]),
    }
    stages = {name: (device, number) for name, (device, number) in stages.items() if number}
    most = {name: math.ceil(number / device.count) for name, (device, number) in stages.items()}  # tasks of one device
    if schedule == "Mapping" and share[0]:
        mapped = round(share[0] * system.end.count)
        most["edge"] = math.ceil(tasks * math.ceil(mapped / system.edge.count) / system.end.count)
    busy = {name: most[name] * device.seconds for name, (device, _) in stages.items()}
    busy["dispatcher"] = sum(number for _, number in stages.values()) * system.dispatch
    work = sum(number * device.work for device, number in stages.values())
    return busy | {"cores": work / system.cores if system.cores else 0.0}


def reassigned(seconds: float, tasks: int, ends: int, dead: int, tasks_before: int, timeout: float) -> float:
    """Seconds of "reassign" by equation 8, summed: each dead end's tasks wait for a time-out, one after the other.

    Args:
      seconds: time without a failure.
      tasks: number of all tasks, dealt out to the ends.
      ends: number of ends, of which `dead` die after `tasks_before` tasks each.
      timeout: time-out in seconds.
    """
    if dead >= ends:
        return math.inf
    return seconds + timeout * (tasks / ends - tasks_before) * dead * (1 + dead / (ends - dead))


def living(tasks: int, ends: int, dead: int, tasks_before: int, task_seconds: float) -> float:
    """Seconds if dead ends are not asked again: the ends that live do what is left when the others die."""
    done = min(ends * tasks_before, tasks)
    return tasks_before * task_seconds + (tasks - done) / (ends - dead) * task_seconds
