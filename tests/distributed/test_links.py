"""Links are measured, kept, and measured again between other machines."""

import contextlib
import json

import jax
import pytest

from mlcn_jax.distributed import links
from mlcn_jax.errors import InputError
from mlcn_jax.placement.simulate import Link


def test_a_link_between_two_devices_is_measured(monkeypatch):
    monkeypatch.setattr(links, "_SECONDS", 0.01)
    monkeypatch.setattr(links, "_CLEARED_BYTES", 2**16)
    found = None
    while found is None:
        with contextlib.suppress(InputError):  # the machine was busy
            found = links.measure(jax.devices()[:2])
    assert 0 <= found.latency_seconds < 1
    assert 1e3 < found.bytes_per_second < 1e13


@pytest.mark.parametrize(
    ("stored", "used"),
    [
        ({"machines": ["a", "b"], "links": [{"latency_seconds": 0.1, "bytes_per_second": 5.0}]}, True),
        ({"machines": ["a", "c"], "links": [{"latency_seconds": 0.1, "bytes_per_second": 5.0}]}, False),
        ({"machines": ["a", "b"], "links": []}, False),
        ({"machines": ["a", "b"], "links": [{"latency_seconds": -1.0, "bytes_per_second": 5.0}]}, False),
        ({"machines": ["a", "b"], "links": [7]}, False),
        ([], False),
    ],
)
def test_links_are_kept_for_the_same_machines(tmp_path, stored, used):
    path = tmp_path / "links.json"
    assert links._stored(path, ["a", "b"]) is None
    path.write_text(json.dumps(stored))
    assert links._stored(path, ["a", "b"]) == (stored["links"] if used else None)


def test_each_process_has_its_link_to_the_first(monkeypatch):
    seconds = {1: 0.1, 2: 0.02}
    monkeypatch.setattr(links.jax, "process_count", lambda: 3)
    monkeypatch.setattr(links, "_measure_with_first", lambda first, other: vars(Link(seconds[other], 1e6 * other)))
    monkeypatch.setattr(links.processes, "everywhere", lambda function: ["x", "x", "y"])
    monkeypatch.setattr(links.processes, "in_first", lambda function: function())

    class Device:
        def __init__(self, process):
            self.process_index = process

    cluster = links.between_processes([Device(i) for i in range(3)], Link(0.0, 1e9))
    assert cluster.link(0, 1) == Link(0.1, 1e6)
    assert cluster.link(0, 2) == Link(0.02, 2e6)
    assert cluster.link(1, 2) == Link(0.1, 1e6)
    assert cluster.machines == ("x", "x", "y")
