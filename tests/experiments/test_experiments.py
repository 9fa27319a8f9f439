"""What the experiments compute from their measurements."""

from experiments import balance, scaling, simulator_check


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


def test_the_simulator_is_checked_on_thirty_splits_of_two_devices():
    rows = simulator_check.configurations()
    assert len({str(row) for row in rows}) == 30
    assert all(row["data"] * row["lane"] == 2 for row in rows)
