"""The report's tables from measurements: what is measured and what is predicted stand apart."""

import dataclasses
import json
import logging
import types
from pathlib import Path

import httpx
import numpy as np
import pytest
from made_tiers import policy

from experiments import quiet, tiers_home, tiers_schedules, tiers_tables, tiers_tables_report
from experiments.tiers_dispatch import Outcome, summary
from experiments.tiers_setups import Setup, with_printed_mapping
from experiments.tiers_tables_report import mean_error, schedule_rows, write_report
from mlcn_jax.errors import InputError
from mlcn_jax.files import read_json
from mlcn_jax.tiers import wire

RELAY = [{"delay_ms": 5.0, "measured_ms": 5.2}, {"rate_mbit": 2.0, "measured_mbit": 1.97}]


def cut(name, bits, rate, seconds, error=0.0):
    return {
        "home": "edge",
        "cut": name,
        "bits": bits,
        "delay": 0.5,
        "rate": rate,
        "own_seconds": 0.2,
        "home_seconds": 0.1,
        "task_seconds": seconds,
        "tasks": [seconds],
        "bytes_per_image": 9000.0,
        "largest_error": error,
        "runs": 3,
    }


def made():
    tier = {"communication": 0.0, "processing": 0.1, "work": 0.0, "processing_of_each": [0.05, 0.15]}
    measured = {
        "devices": {"end": tier, "edge": tier, "cloud": tier, "dispatch": 0.0},
        "tier end, 0 ms": {"seconds": 1.25, "devices": 2, "core_seconds": 0.75, "runs": 1, "largest_error": 2e-7},
        "cut pixels": cut("pixels", 0, 0.0, 1.0, 3e-6),
        "cut conv1": cut("conv1", 32, 0.0, 1.5),
        "cut pixels over a link": cut("pixels", 0, 20.0, 1.0),
        "cut conv1 in 8 bits": cut("conv1", 8, 20.0, 4.0, 0.02),
    }
    setups = [Setup(name, ends, 1, 10.0, 50.0) for name in tiers_schedules.SCHEDULES for ends in (1, 2)]
    for setup in [*setups, Setup("End-Edge", 2, 1, 500.0, 50.0)]:
        found = {"seconds": 2.0, "first_seconds": 1.0, "runs": 1, "largest_error": 0.0}
        measured[setup.key] = {"setup": dataclasses.asdict(setup)} | found
    for mode, seconds in (("none", None), ("reassign", 4.0), ("monitor", 2.2)):
        for dead in (0, 1):
            taken = {"seconds": 2.0 if not dead else seconds, "tasks_before": 2, "timeout": 0.5, "timeouts": 3 * dead}
            measured[f"failures {mode}, {dead} dead"] = taken | {"all_seconds": [1.9, 2.5], "largest_error": 0.0}
    about = {
        "model": "mlcn1:w1*3",
        "data": "digits",
        "device": "a CPU",
        "cpu_count": 2,
        "ends": 2,
        "edges": 1,
        "tasks": 10,
        "images": 4,
        "failing_tasks": 20,
    }
    time = "2026-01-02T03:04:05+00:00"
    starts = {time: {"command": "python", "versions": {"jax": "0"}, "relay": RELAY}}
    of_each = {key: {"start": time, "busy_cores": [0.01, None]} for key in measured}
    of_each["devices"]["busy_cores"] = [0.01, 0.19]
    return {"about": about, "starts": starts, "made": of_each, "measured": measured}


def test_tables_tell_what_was_measured_and_how_far_models_are_off(tmp_path):
    results = made()
    results["measured"]["devices"]["end"] = results["measured"]["devices"]["end"] | {"processing": 0.4}
    write_report(json.loads(json.dumps(results)), tmp_path / "tables.json")
    text = (tmp_path / "tables.md").read_text()
    for picture in ("tables.png", "tables_failures.png"):
        assert (tmp_path / picture).stat().st_size > 1000
    assert "| 1 | never | 4 (1.9 to 2.5) | 2.2 (1.9 to 2.5) |" in text
    assert "| 0 | 2 | 2 |" in text, "predicted from the run without failures: 2 on each end, then 8 on each"
    assert "| 1 | 3.6 | 10 | 3.5 |" in text
    assert "| 1 | 0.61 | yes |" in text, "what was measured over what was predicted, in a table of its own"
    assert "It must be at most 15% over at least 24: no." in text
    assert (
        "| edge | conv1 | 32 | 0.5 | unlimited | 9000 | 0.2 | 0.1 | 1.5 | 1.5 to 1.5 | 0.5 | 50.0% | 0.0e+00 |" in text
    )
    assert "| edge | conv1 | 8 | 0.5 | 20 Mbit/s | 9000 | 0.2 | 0.1 | 4 | 4 to 4 | 3 | 300.0% | 2.0e-02 |" in text
    assert "to 3.0e-06 (at most 1e-05: yes) where nothing is rounded" in text
    assert "what their lanes add up to, to 2.0e-07 (at most 1e-05: yes)" in text
    assert "| end | 2 | 0 ms | 1.25 | 0.75 | 1 |" in text
    assert "| end | 2 | 0.0 | 0.4 | 0.05 to 0.15 | 0.0 |" in text.replace("| 0 |", "| 0.0 |")
    assert "| 2026-01-02 | 5 ms each way | 5.20 ms | yes |" in text
    assert "other work kept at most 0.19 cores busy" in text
    assert "the 8 configurations that no prediction is made from" in text
    assert "| Mapping | 2 | 1 | 20 | 100 | 1 | 0.5 | 0.5 |" in text.replace("20.0", "20").replace("100.0", "100")
    rows = schedule_rows(results)
    assert len(rows) == 9
    end = rows[0]
    assert (end["schedule"], end["ends"], end["corrected"]) == ("End", 1, 4.0)
    assert mean_error([end], "corrected") == 1
    lines = [line for line in text.splitlines() if "End-Cloud | 2" in line]
    assert len(lines) == 2, "measured and predicted are in tables of their own"


def test_models_are_also_judged_where_ends_are_not_what_all_wait_for(tmp_path):
    results = made()
    rows = schedule_rows(results)
    slower = [row for row in rows if row["bottleneck"] != "end"]
    assert [(row["schedule"], row["ends"], row["edge"], row["bottleneck"]) for row in slower] == [
        ("End-Cloud", 1, 20, "cloud"),
        ("End-Cloud", 2, 20, "cloud"),
        ("End-Edge", 1, 20, "edge"),
        ("End-Edge", 2, 20, "edge"),
        ("Mapping", 1, 20, "edge"),
        ("Mapping", 2, 20, "cloud"),
        ("End-Edge", 2, 1000, "edge"),
    ]
    assert rows[-1]["corrected"] == pytest.approx(10 * 1.1 + 0.1), "with its own delay"
    assert [row["is_of_figure"] for row in rows] == [True] * 8 + [False]
    write_report(results, tmp_path / "tables.json")
    assert mean_error(slower, "corrected") > mean_error(rows, "corrected")
    printed, corrected = (f"{mean_error(slower, model):.0%}" for model in ("printed", "corrected"))
    told = f"over the 7 where something else is: printed {printed} (over 5 of them), corrected {corrected}."
    assert told in (tmp_path / "tables.md").read_text()


def test_mapping_is_also_run_as_printed_where_that_is_another_and_can_be():
    devices = made()["measured"]["devices"]
    devices = devices | {"edge": devices["edge"] | {"processing": 0.04}}
    setups = [Setup("Mapping", ends, edges, 10.0, 50.0) for ends, edges in ((8, 2), (1, 2))]
    as_printed = dataclasses.replace(setups[0], as_printed=True)
    found = list(with_printed_mapping([*setups, Setup("End", 8, 2, 10.0, 50.0)], devices, 10))
    assert found[:-1] == [setups[0], as_printed, setups[1]], "two edges for one end: a share of -1"
    system, own = as_printed.system(devices, 40), setups[0].system(devices, 40)
    assert tiers_schedules.cloud_share(system) == tiers_schedules.printed_cloud_share(system) == 0.75
    assert tiers_schedules.cloud_share(own) == pytest.approx(1 / 8)
    assert tiers_schedules.corrected("Mapping", system) == pytest.approx(30 * 0.2 + 0.1), (
        "three quarters go to the cloud"
    )
    assert tiers_schedules.corrected("Mapping", own) < 0.5 * tiers_schedules.corrected("Mapping", system)
    results = made()
    for setup, seconds in ((setups[0], 1.0), (as_printed, 6.0)):
        found = {"seconds": seconds, "first_seconds": 1.0, "runs": 1, "largest_error": 0.0}
        results["measured"][setup.key] = {"setup": dataclasses.asdict(setup)} | found
    rows = schedule_rows(results)[-2:]
    assert [row["schedule"] for row in rows] == ["Mapping", "Mapping as printed"]
    assert mean_error(rows, "printed") == mean_error(rows[1:], "printed"), "the other has another share"


def test_most_of_the_other_setups_are_not_bound_by_ends():
    """With times that mlcn2 of width 2 has on Fashion-MNIST."""
    scale = tiers_tables.SCALES["full"]
    times = {"end": 0.16, "edge": 0.08, "cloud": 0.03}
    devices = {name: {"communication": 0.0, "processing": own, "work": 0.01} for name, own in times.items()}
    assert len(scale.others) >= 12
    assert len({setup.key for setup in scale.others}) == len(scale.others)
    for setup in scale.others:
        assert setup.ends <= scale.ends
        assert setup.edges <= scale.edges
        assert not setup.is_of_figure(scale.edges)
        system = setup.system(devices | {"dispatch": 0.005}, scale.tasks)
        assert tiers_schedules.bottleneck(setup.schedule, system) in ("edge", "cloud"), setup


def test_a_report_leaves_out_what_was_not_measured_yet(tmp_path, monkeypatch):
    for name in ("draw_schedules", "draw_failures"):  # once is enough
        monkeypatch.setattr(tiers_tables_report, name, lambda *given: None)
    results = made()
    keys = list(results["measured"])
    for count in range(1, len(keys) + 1):
        some = results | {"measured": {key: results["measured"][key] for key in keys[:count]}}
        write_report(some, tmp_path / "tables.json")
    text = (tmp_path / "tables.md").read_text()
    assert text.count("\n## ") == 5
    write_report(results | {"measured": {"devices": results["measured"]["devices"]}}, tmp_path / "tables.json")
    assert (tmp_path / "tables.md").read_text().count("\n## ") == 1


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """Tables that have no model, on a quiet machine."""
    spec = types.SimpleNamespace(lanes="mlcn1:w1*3")
    trained, data = types.SimpleNamespace(spec=spec, step=5), types.SimpleNamespace(name="digits", test=None)
    data.test = types.SimpleNamespace(images=np.zeros((8, 2, 2, 1), np.uint8))
    machine = {"device": "a CPU", "cpu_count": 2, "versions": {"jax": "0"}}
    monkeypatch.setattr(tiers_tables, "stored_config", lambda *given: types.SimpleNamespace(hash=lambda: "c0"))
    monkeypatch.setattr(tiers_tables, "load_with_data", lambda *given: (trained, data))
    monkeypatch.setattr(tiers_tables.host, "environment", lambda: dict(machine))
    monkeypatch.setattr(quiet.host, "busy_cores", lambda: 0.1)
    monkeypatch.setattr(quiet, "busiest", lambda: "process 7, python: 0.98")
    monkeypatch.setattr(tiers_tables, "checked", lambda: RELAY)

    def start(scale="full", **changes):
        machine.update(changes)
        made = tiers_tables.Tables(tmp_path, "", tiers_tables.SCALES[scale], tmp_path / f"{scale}.json")
        made.start["relay"] = []  # `measure` checks it
        return made

    return start


FOUND = {"seconds": 1.25, "devices": 2, "core_seconds": 0.75, "runs": 1, "largest_error": 0.0}


def test_each_measurement_keeps_its_start_and_another_machine_does_not_go_on(tables, tmp_path, monkeypatch):
    for time, key in (("2026-01-02", "tier end, 0 ms"), ("2026-01-03", "tier edge, 0 ms")):
        started = tables()
        started.time = time
        for done in ("_devices", "_cuts", "_failures"):
            monkeypatch.setattr(started, done, lambda: None)
        monkeypatch.setattr(started, "_tiers_alone", lambda s=started, k=key: s._once(k, lambda: FOUND))
        monkeypatch.setattr(started, "_schedules", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            started.measure()
        assert key.split(",")[0].split()[1] in (tmp_path / "full.md").read_text(), "there after each measurement"
    results = read_json(tmp_path / "full.json")
    assert {key: of["start"] for key, of in results["made"].items()} == {
        "tier end, 0 ms": "2026-01-02",
        "tier edge, 0 ms": "2026-01-03",
    }
    assert [start["relay"] for start in results["starts"].values()] == [RELAY, RELAY]
    assert "| 2026-01-02 | 5 ms each way" in (tmp_path / "full.md").read_text()
    with pytest.raises(SystemExit, match=r"another CPU.*move it away"):
        tables(device="another CPU")
    with pytest.raises(SystemExit, match="move it away"):
        tables(device="a CPU", cpu_count=4)


def test_the_report_is_there_after_the_first_measurement_and_once_more_at_the_end(tables, tmp_path, monkeypatch):
    started = tables()
    written = tmp_path / "full.md"
    started._once("tier end, 0 ms", lambda: FOUND)
    assert "| end | 2 | 0 ms |" in written.read_text()
    written.unlink()
    monkeypatch.setattr(started, "_devices", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        started.measure()
    assert "| end | 2 | 0 ms |" in written.read_text()


def test_a_measurement_waits_for_other_work_to_end(monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("mlcn_jax"), "propagate", True)
    busy = iter(7 * [1.7] + [0.1])
    monkeypatch.setattr(quiet.host, "busy_cores", lambda: next(busy))
    monkeypatch.setattr(quiet, "busiest", lambda: "process 7, python: 0.98")
    assert quiet.busy_cores() == 0.1
    assert "process 7, python: 0.98): waiting for it to end" in caplog.text
    assert len({id(record) for record in caplog.records}) == 1, "told once"


def test_nothing_is_measured_beside_other_work(tables, tmp_path, monkeypatch):
    started = tables()
    monkeypatch.setattr(quiet, "_PATIENCE_SECONDS", 0)
    monkeypatch.setattr(quiet.host, "busy_cores", lambda: 1.7)
    message = "1.70 cores busy, more than 0.2 .process 7, python: 0.98.: end it, then run the same command again"
    with pytest.raises(InputError, match=message):
        started._once("tier end, 0 ms", lambda: pytest.fail("was measured"))
    busy, made = iter(3 * [0.1, 1.7, 1.7, 1.7]), []
    monkeypatch.setattr(quiet.host, "busy_cores", lambda: next(busy))
    with pytest.raises(InputError, match=message):
        started._once("tier end, 0 ms", lambda: made.append(1))
    assert len(made) == 3, "it is measured again"
    assert not started.results["measured"], "what began while it was measured has changed it"
    assert not (tmp_path / "full.json").exists()
    busy = iter([0.5, 0.02, None])
    started._once("tier end, 0 ms", lambda: FOUND)
    assert started.results["made"]["tier end, 0 ms"]["busy_cores"] == [0.02, None], "it was busy for a moment"


def test_the_smoke_scale_only_warns_of_other_work(tables, monkeypatch, caplog):
    started = tables("smoke")
    monkeypatch.setattr(quiet.host, "busy_cores", lambda: 1.7)
    monkeypatch.setattr(logging.getLogger("mlcn_jax"), "propagate", True)
    assert started._once("tier end, 0 ms", lambda: FOUND) == FOUND
    assert "other work keeps 1.70 cores busy" in caplog.text


def test_whoever_keeps_the_machine_busy_is_named(tmp_path, monkeypatch):
    def use(ticks):
        for number, own in ticks.items():
            (tmp_path / str(number)).mkdir(exist_ok=True)
            (tmp_path / str(number) / "stat").write_text(f"{number} (a (b) c) R {'0 ' * 10}{own} 0 0 0")

    use({11: 100, 12: 100, 13: 100})
    monkeypatch.setattr(tiers_tables.time, "sleep", lambda seconds: use({11: 100, 12: 101, 13: 1_000_000}))
    found = quiet.busiest(0.0, tmp_path)
    assert found.startswith("process 13, a (b) c: ")
    assert "process 11" not in found
    monkeypatch.setattr(tiers_tables.time, "sleep", lambda seconds: None)
    assert quiet.busiest(0.0, tmp_path) == "no process that is seen here"


def test_all_devices_predict_and_not_the_first_alone(tables, monkeypatch):
    started = tables()
    seconds = {"end0": 1.0, "end1": 3.0, "edge0": 2.0, "cloud0": 4.0}

    async def dispatched(schedule, devices, edges, clouds, tasks):
        return Outcome(len(tasks) * seconds[devices[0].url], 0.0, len(tasks) * 0.5, 0, [], [])

    monkeypatch.setattr(tiers_tables, "dispatch", dispatched)
    plans = {"end": 0.0, "edge": 10.0, "cloud": 50.0}
    nodes = [
        types.SimpleNamespace(plan=types.SimpleNamespace(delay_ms=plans[url[:-1]]), core_seconds=lambda: 0.0)
        for url in seconds
    ]
    devices = [types.SimpleNamespace(url=url, tier=types.SimpleNamespace(name=url[:-1])) for url in seconds]
    found = started._single_tasks(nodes, devices)
    assert found["end"]["processing"] == pytest.approx(2.0)
    assert found["end"]["processing_of_each"] == pytest.approx((1.0, 3.0))
    assert found["edge"]["communication"] == pytest.approx(0.02)
    assert found["cloud"]["processing"] == pytest.approx(3.9)
    assert found["dispatch"] == pytest.approx(0.5)


def test_runs_tell_medians_and_how_far_sums_are_from_what_lanes_add():
    parts = {
        "end": [np.ones((2, 3)), np.ones((2, 3))],
        "edge": [np.full((2, 3), 0.5)] * 2,
        "cloud": [np.zeros((2, 3))] * 2,
    }
    right = np.full((2, 3), 1.5)

    def outcome(seconds, timeouts, second=right, tiers=("end", "edge")):
        return Outcome(seconds, 1.0, 0.1, timeouts, [right, second], [("end", "edge"), tiers])

    runs = [outcome(1.0, 1), outcome(9.0, 30), outcome(2.0, 2)]
    found = summary(runs, parts)
    assert (found["seconds"], found["timeouts"], found["all_seconds"]) == (2.0, 2, [1.0, 9.0, 2.0])
    assert found["largest_error"] == 0
    assert summary([*runs, outcome(3.0, 0, right + 0.25)], parts)["largest_error"] == 0.25
    assert summary([outcome(3.0, 0, right, ("end", "cloud"))], parts)["largest_error"] == 0.5
    endless = summary([outcome(float("inf"), 0, np.float64(0.0), ())], parts)
    assert (endless["seconds"], endless["largest_error"]) == (None, 0)


def test_the_trusted_device_computes_packs_and_sends_with_the_bits_that_it_is_told():
    given, own = policy(), np.full((2, 3), 0.25, np.float32)
    values = np.linspace(0, 1, 2 * 500, dtype=np.float32).reshape(2, 500)
    artifact = types.SimpleNamespace(
        policy=given, class_names=given.class_names, part=lambda images: own, home=lambda tier, images: values
    )
    sent = []

    def answer(request):
        body = request.read()
        asked, rows = wire.unpack_request(body, given.digest, (500,), np.dtype("f4"), 4)
        sent.append(rows)
        return httpx.Response(200, content=wire.pack_answer(given.digest, "edge", asked, rows[:, :3]))

    with httpx.Client(transport=httpx.MockTransport(answer)) as client:
        exact, coarse = (
            tiers_home.task(client, "http://edge/part", artifact, "edge", np.zeros((2, 4, 4, 1), np.uint8), bits)
            for bits in (32, 8)
        )
    np.testing.assert_array_equal(sent[0], values)
    assert 0 < np.max(np.abs(sent[1] - values)) < 1 / 255
    assert coarse[0]["bytes"] < exact[0]["bytes"]
    np.testing.assert_array_equal(exact[1]["answered"], values[:, :3])
    told = [exact[0] | exact[1]]
    cloud = np.full((2, 3), 0.5, np.float32)
    whole = np.sqrt(own + values[:, :3] + cloud)
    found = tiers_home.one_cut(told, cloud, whole)
    assert found["task_seconds"] == pytest.approx(sum(exact[0][f"{n}_seconds"] for n in ("own", "home", "away")))
    assert found["bytes_per_image"] == exact[0]["bytes"] / 2
    assert found["largest_error"] == 0
    assert tiers_home.one_cut(told, cloud, whole + np.array([[0, 0, 0], [0, 0.125, 0]]))[
        "largest_error"
    ] == pytest.approx(0.125)


def test_medians_of_cuts_are_those_of_whole_tasks():
    zero = np.zeros((1, 2))
    runs = [(1.0, 5.0, 1.0), (2.0, 1.0, 1.0), (3.0, 2.0, 1.0)]
    names = ("own_seconds", "home_seconds", "away_seconds")
    told = [dict(zip(names, run, strict=True)) | {"bytes": 10, "own": zero, "answered": zero} for run in runs]
    found = tiers_home.one_cut(told, zero, zero)
    assert (found["own_seconds"], found["home_seconds"], found["task_seconds"]) == (2.0, 2.0, 6.0)


def test_every_cut_but_pixels_is_also_sent_in_8_bits(tables, monkeypatch):
    started = tables("smoke")
    asked = []
    monkeypatch.setattr(tiers_tables, "cuts_of", lambda spec: ("pixels", "conv1"))
    monkeypatch.setattr(started, "_missing", lambda keys: asked.extend(keys) or False)
    started._cuts()
    assert asked == [
        key
        for home in ("end", "edge")
        for key in (
            f"cut pixels at the {home}, 0.1 s",
            f"cut pixels at the {home}, 0.1 s, 20 Mbit/s",
            f"cut conv1 at the {home}, 32 bits, 0.1 s",
            f"cut conv1 at the {home}, 32 bits, 0.1 s, 20 Mbit/s",
            f"cut conv1 at the {home}, 8 bits, 0.1 s",
            f"cut conv1 at the {home}, 8 bits, 0.1 s, 20 Mbit/s",
        )
    ]


def test_tiers_alone_are_also_measured_with_the_delays_of_the_report(tables, monkeypatch):
    started = tables()
    asked = []
    monkeypatch.setattr(started, "_missing", lambda keys: asked.extend(keys) or False)
    started._tiers_alone()
    assert asked == [
        "tier end, 0 ms",
        "tier edge, 0 ms",
        "tier edge, 20 ms",
        "tier edge, 500 ms",
        "tier cloud, 0 ms",
        "tier cloud, 100 ms",
        "tier cloud, 1000 ms",
    ]


def test_a_model_that_was_trained_further_is_split_again(tmp_path, monkeypatch):
    tables = object.__new__(tiers_tables.Tables)
    tables.workdir, tables.data_dir, tables.path = tmp_path, "", tmp_path / "tables.json"
    tables.trained, tables.spec = None, types.SimpleNamespace(lane_specs=range(3))
    (tmp_path / "tiers-pixels").mkdir()  # of the model as it was
    made, wishes = [], []
    monkeypatch.setattr(tiers_tables, "TierArtifact", Path)
    monkeypatch.setattr(tiers_tables, "load_trained", lambda workdir: made.append("with its weights"))
    monkeypatch.setattr(tiers_tables.split, "is_of", lambda folder, trained: folder.name in made)
    monkeypatch.setattr(
        tiers_tables.split, "split", lambda *given: made.append(given[-1]) or wishes.append(read_json(given[1]))
    )
    for _ in range(2):
        assert tables._split()["edge"] == tmp_path / "tiers-pixels" / "edge"
    assert made == ["tiers-pixels", "with its weights"]
    assert list(tables._split("conv1", "edge").values()) == [
        tmp_path / "tiers-conv1-from-edge" / name for name in ("edge", "cloud")
    ]
    own = [{tier["name"]: tier["lanes"] for tier in wish["tiers"]} for wish in wishes]
    assert own == [{"end": [0], "edge": [1], "cloud": [2]}, {"edge": [0, 1], "cloud": [2]}]
