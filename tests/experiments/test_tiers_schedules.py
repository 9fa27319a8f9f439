"""The report's equations on its own figures, and what the corrected model says instead."""

import math

import pytest

from experiments.tiers_schedules import (
    Device,
    System,
    cloud_share,
    corrected,
    living,
    printed,
    printed_cloud_share,
    printed_ends_per_edge,
    reassigned,
)

# Table 2, seconds a task: overall at 8, 4 and 1 devices, with the delays of 0.5 and 1 s.
REPORT = System(Device(8, 0.0, 0.52), Device(4, 0.0, 0.915), Device(1, 0.0, 1.55), tasks=200, dispatch=0.125)


def test_equations_as_printed_give_what_the_notes_on_the_report_say():
    assert printed("End", REPORT) == pytest.approx(13.0)
    assert printed("End-Cloud", REPORT) == pytest.approx(323.0)
    assert printed_ends_per_edge(REPORT) == 2
    assert printed_cloud_share(REPORT) == 0, "nothing reaches the cloud"
    assert printed("Mapping", REPORT) == pytest.approx(printed("End-Edge", REPORT))
    crowded = System(Device(2, 0.0, 0.1), REPORT.edge, REPORT.cloud, 200)
    assert printed_cloud_share(crowded) < 0


def test_the_corrected_model_overlaps_and_knows_the_dispatcher():
    assert corrected("End", REPORT) == pytest.approx(25.0), "24.9 s in table 5"
    assert corrected("End-Cloud", REPORT) == pytest.approx(200 * 1.55 + 0.52)
    assert corrected("Mapping", REPORT) < corrected("End-Cloud", REPORT) < printed("End-Cloud", REPORT)
    assert 0 < cloud_share(REPORT) < 0.5


def test_devices_that_share_cores_cannot_be_faster_than_these():
    system = System(Device(8, 0.0, 0.1, work=0.05), Device(4, 0.0, 0.1, 0.1), Device(1, 0.0, 0.1, 0.1), 100, 0.0, 1.0)
    assert corrected("End", system) == pytest.approx(5.0)
    assert corrected("End-Edge", system) == pytest.approx(15.0 + 0.1)


def test_under_mapping_the_edge_with_most_ends_is_the_slowest():
    system = System(Device(5, 0.0, 0.1), Device(4, 0.0, 1.0), Device(1, 0.0, 100.0), tasks=100)
    assert cloud_share(system) == 0
    assert corrected("Mapping", system) == pytest.approx(40 * 1.0 + 0.1), "one of four edges has two of five ends"
    assert corrected("End-Edge", system) == pytest.approx(25 * 1.0 + 0.1)


def test_dead_ends_cost_a_time_out_for_each_task_or_what_they_would_have_done():
    table = {0: 25.7, 1: 33.7, 2: 43.2, 3: 65.2}
    for dead, seconds in list(table.items())[:3]:
        assert reassigned(25.7, 200, 8, dead, 12, 0.5) == pytest.approx(seconds, rel=0.1)
    assert reassigned(5.0, 8, 2, 1, 2, 0.5) == pytest.approx(5.0 + 0.5 * 2 * 2), "two of its four tasks wait"
    assert reassigned(25.7, 200, 8, 8, 12, 0.5) == math.inf
    assert living(200, 8, 0, 12, 1.0) == pytest.approx(25.0)
    assert living(200, 8, 4, 12, 1.0) == pytest.approx(12 + 104 / 4)
