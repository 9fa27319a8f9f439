"""Setups of the schedules in `experiments.tiers_tables`: how many devices, behind which links, mapped how."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from experiments import tiers_schedules
from experiments.tiers_bed import CORES

DELAY_MS = {"end": 0.0, "edge": 10.0, "cloud": 50.0}  # each way, unless a table says otherwise


@dataclasses.dataclass(frozen=True)
class Setup:
    """A schedule, numbers of ends and edges, and the delays to edges and cloud in ms each way.

    With `as_printed`, `Mapping` maps the ends to edges and cloud by the report's equations 4 and 5.
    """

    schedule: str
    ends: int
    edges: int
    edge_ms: float
    cloud_ms: float
    as_printed: bool = False

    @property
    def name(self) -> str:
        """Of the schedule."""
        return self.schedule + (" as printed" if self.as_printed else "")

    @property
    def key(self) -> str:
        """Its name in the results."""
        delays = f"{2 * self.edge_ms:g} and {2 * self.cloud_ms:g} ms"
        return f"schedule {self.name}, {self.ends} ends, {self.edges} edges, {delays}"

    def is_of_figure(self, edges: int) -> bool:
        """Whether it has all edges, and the usual delays."""
        return (self.edges, self.edge_ms, self.cloud_ms) == (edges, DELAY_MS["edge"], DELAY_MS["cloud"])

    def system(self, devices: Mapping[str, Any], tasks: int) -> tiers_schedules.System:
        """What models predict from: single tasks on single devices, with these numbers and delays."""
        counts = {"end": self.ends, "edge": self.edges, "cloud": 1}
        links = {"end": devices["end"]["communication"], "edge": 2e-3 * self.edge_ms, "cloud": 2e-3 * self.cloud_ms}
        kinds = {
            name: tiers_schedules.Device(count, links[name], devices[name]["processing"], devices[name]["work"])
            for name, count in counts.items()
        }
        system = tiers_schedules.System(**kinds, tasks=tasks, dispatch=devices["dispatch"], cores=CORES)
        if self.as_printed:
            return dataclasses.replace(system, share=tiers_schedules.printed_cloud_share(system))
        return system


def with_printed_mapping(setups: Iterable[Setup], devices: Mapping[str, Any], tasks: int) -> Iterator[Setup]:
    """The setups, and `Mapping` by the report's equations as well, where these give another mapping that can be run."""
    for setup in setups:
        yield setup
        if setup.schedule == "Mapping":
            system = setup.system(devices, tasks)
            share = tiers_schedules.printed_cloud_share(system)
            if share >= 0 and share != tiers_schedules.cloud_share(system):
                yield dataclasses.replace(setup, as_printed=True)
