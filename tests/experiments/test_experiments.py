"""What the experiments compute from their measurements."""

import json
import subprocess
import sys

import pytest

from experiments import RESULTS, balance, links, packet_link, rented, scaling, simulator_check
from mlcn_jax.errors import InputError
from mlcn_jax.placement.profile import DeviceProfile


def test_balance_compares_every_partitioner_with_random_and_the_exact_one():
    entry = balance.simulate((1.0, 4.0), num_lanes=5, draws=3, seed=0)
    ratios = entry["mean_makespan_over_exact"]
    assert ratios["exact"] == 1.0
    assert min(ratios.values()) >= 1.0 - 1e-9
    assert entry["mean_random_over_this"]["random"] == 1.0
    assert entry["proved_optimal"] == 3


def test_settings_on_real_cores_are_no_more_than_there_are():
    rows = scaling.settings(100, "mlcn1:w4*8", num_cores=2)
    assert {row.data * row.lane for row in rows if row.where == scaling.REAL} == {2}
    assert {row.data * row.lane for row in rows if row.where == scaling.OVERSUBSCRIBED} == {2, 4, 8}
    assert {row.mode for row in rows} == {"capsnet-data", "mlcn-data", "mlcn-lane", "mlcn-hybrid"}


def test_a_batch_is_only_split_evenly_and_all_that_is_split_is_also_simulated():
    rows = scaling.settings(150, "mlcn1:w4*8", num_cores=2)
    assert all(150 % row.data == 0 for row in rows)
    simulated = {(row.mode, row.devices) for row in rows if row.where == scaling.SIMULATED}
    assert {("mlcn-data", 2), ("mlcn-lane", 8), ("mlcn-hybrid", 4)} <= simulated


def test_the_simulator_is_checked_on_enough_splits_of_two_devices():
    rows = simulator_check.configurations()
    assert len({str(row) for row in rows}) == 48
    assert all(row["data"] * row["lane"] == 2 for row in rows)


def test_the_check_of_the_simulator_holds_what_is_promised():
    """No split beats the lower bound, and intervals hold as many of the measured steps as they claim."""
    found = json.loads((RESULTS / "simulator_check.json").read_text())
    assert found["least_over_measured"] <= 1
    assert found["configurations"] >= 40
    for name in ("inside_interval", "inside_scaled_interval"):
        assert 0.80 <= found[name] <= 0.97, name


def test_a_check_of_the_simulator_goes_on_where_it_was(tmp_path):
    path, about = tmp_path / "check.json", {"version": 2, "rounds": 3, "profile": "abc"}
    assert simulator_check.stored_checks(path, about) == ([], [])
    ended = {**about, "rows": 48 * [{"lanes": "a"}]}
    path.write_text(json.dumps({"checks": [ended, {**about, "rows": [{"lanes": "a"}]}]}))
    assert simulator_check.stored_checks(path, about) == ([ended], [{"lanes": "a"}])
    assert simulator_check.stored_checks(path, {**about, "rounds": 4}) == ([ended], [])
    with pytest.raises(InputError, match=r"has 2 checks of another version of this script: move it away"):
        simulator_check.stored_checks(path, {**about, "version": 3})


def test_rented_machines_are_nine_and_choices_are_judged_by_what_was_measured():
    assert len(set(rented.sets())) == 9
    rows = []
    for name, seconds, cost in (("a", 100.0, 3.0), ("b", 200.0, 2.0)):
        row = {"machines": [name], "interval": [0.9 * seconds, 1.1 * seconds]}
        for how in ("predicted", "measured"):
            row |= {f"{how}_seconds": seconds, f"{how}_cost": cost}
        rows.append(row)
    times = [[{"seconds": 80.0, "slowness": 0.8}], [{"seconds": 200.0, "slowness": 1.0}]]
    found = rented.summarize(rows, times)
    assert (found["largest_error_seconds"], found["latest"], found["inside_interval"]) == (0.0, 0.0, 1.0)
    assert found["unscaled"] == {"mean_error_seconds": 0.125, "largest_error_seconds": 0.25}
    assert [(one["picked"], one["deadline_seconds"]) for one in found["choices"]] == [(["a"], [100.0, 200.0])]
    assert found["well_chosen"]["share_of_deadlines"] == 1.0
    rows[1]["measured_seconds"] = 250.0  # predicted to be in time for all deadlines from 100 on
    rows[1]["predicted_seconds"] = 90.0
    found = rented.summarize(rows, times)
    assert found["latest"] == 250 / 90 - 1, "the earliest deadline that is taken"
    assert [one["over_cheapest"] for one in found["choices"]] == [None, 2 / 3]
    assert found["well_chosen"]["share_of_deadlines"] == 0.0, "cheap, but late"
    rows[1] |= {"measured_seconds": 150.0, "predicted_seconds": 200.0}  # from 150 to 200 it is not seen, and is cheaper
    found = rented.summarize(rows, times)
    assert found["well_chosen"]["share_of_deadlines"] == 0.5
    assert [one["over_cheapest"] for one in found["choices"]] == [1.0, 1.5]
    rows[0]["predicted_seconds"] = 180.0  # nothing is predicted to be in time before
    found = rented.summarize(rows, times)
    assert [one["picked"] for one in found["choices"]] == [None, None, ["a"]]
    assert found["well_chosen"]["share_of_deadlines"] == 0.0


def test_every_split_of_two_processes_is_measured_and_predicted():
    profile = DeviceProfile.load(RESULTS / "profile_one_core.json")
    spec = links.config_of("mlcn1:w2*4", "fashion_mnist", "float32").model_spec((28, 28, 1), 10)
    fast, slow = (
        links.candidates_over({"latency_seconds": seconds, "bytes_per_second": 1e8}, spec, profile, "float32")
        for seconds in (0.0, 10.0)
    )
    assert {"alone", "mesh, data=2, lane=1", "mesh, data=1, lane=2"} < fast.keys() == slow.keys()
    assert any(name.startswith("stacks, ") for name in fast)
    assert min(slow, key=lambda name: slow[name].step.total_seconds) == "alone"
    assert min(fast, key=lambda name: fast[name].step.total_seconds) != "alone"


@pytest.mark.skipif(not packet_link.possible(), reason="needs root and /dev/net/tun")
def test_a_packet_link_delays_what_goes_over_it():
    answer = (
        "import socket; s = socket.create_server(('10.77.0.1', 5555)); print(flush=True);"
        " c, _ = s.accept(); c.send(c.recv(1))"
    )
    ask = (
        "import socket, time; c = socket.create_connection(('10.77.0.1', 5555)); t = time.perf_counter(); c.send(b'.');"
        " c.recv(1); print(time.perf_counter() - t)"
    )
    with packet_link.PacketLink(20, 10) as link:
        server = subprocess.Popen([*link.prefix(0), sys.executable, "-c", answer], stdout=subprocess.PIPE)
        server.stdout.readline()
        asked = subprocess.run([*link.prefix(1), sys.executable, "-c", ask], capture_output=True, check=True)
        server.wait()
    assert 0.04 <= float(asked.stdout) < 0.2
