"""Models over devices, simulated from measured parts: what is measured, and what follows from it."""

import json
import math
import os
import signal

import pytest
from absl import flags
from matplotlib.figure import Figure

from experiments import batch_size, lanes_and_width, repeated_report, scaling_by_parts
from experiments.scaling_by_parts import Part, step_seconds, summarise
from experiments.scaling_by_parts_report import deeper_over_wider, draw, sentence, table
from mlcn_jax.errors import InputError, Stopped

FULL = scaling_by_parts.SWEEPS["full"]
FREE = {"link_us": 0.0, "link_gbytes": math.inf, "network_us": 0.0, "network_gbits": math.inf}


def test_the_sweeps_are_those_of_the_thesis():
    models = FULL.models()
    assert [at for at, *_ in models["lanes"]] == [int(count) for count in lanes_and_width.LANES]
    assert [at for at, *_ in models["width"]] == [int(width) for width in lanes_and_width.WIDTHS]
    assert models["depth"] == [(depth, f"w2d{depth}", 8) for depth in (1, 2, 3, 4, 5)]
    assert models["width"][2][1:] == models["lanes"][2][1:] == ("w4d1", 8)
    assert (FULL.batch, FULL.devices) == (150, (1, 2, 4, 8))
    assert str(FULL.batch) in batch_size.BATCH_SIZES


def test_the_device_with_most_images_counts_and_lanes_are_split_only_evenly():
    capsnet = [part for part in scaling_by_parts.all_parts(FULL) if part.lane == "capsnet"]
    assert [part.batch for part in capsnet] == [150, 75, 38, 19]
    assert scaling_by_parts.parts_of("w4d1", 4, 150, "mlcn-lane", 8) == []
    assert Part("step", "w4d1", 4, 19) in scaling_by_parts.all_parts(FULL)


def test_capsnet_sums_the_gradients_of_all_its_parameters_over_its_devices():
    measured = {Part("step", "capsnet", 0, 150): 8.0, Part("step", "capsnet", 0, 38): 2.5}
    links = FREE | {"link_gbytes": 1.0}
    one, four = (step_seconds(measured, "capsnet", 0, 150, "capsnet-data", n, links) for n in (1, 4))
    sent = 2 * 3 / 4 * 4 * 8_215_568 / 1e9  # a ring, float32, 1 GB/s
    assert one == 8.0
    assert four == pytest.approx(2.5 + sent, abs=1e-6)


def test_lanes_take_their_part_of_the_model_and_of_the_decoder():
    measured = {Part("step", "w4d1", 1, 150): 1.0, Part("head", "w1d1", 1, 150): 0.2, Part("head", "w1d1", 8, 150): 0.4}
    assert step_seconds(measured, "w4d1", 8, 150, "mlcn-lane", 8, FREE) == pytest.approx(1.0 - 0.2 + 0.4 / 8)
    columns_and_layers = 4 * 150 * (8 * 10 + 512 + 1024 + 784)
    slower = step_seconds(measured, "w4d1", 8, 150, "mlcn-lane", 8, FREE | {"link_gbytes": 1e-3})
    assert slower == pytest.approx(0.85 + 2 * 7 / 8 * columns_and_layers / 1e6, rel=1e-4), "gathered, and scattered"
    noisy = measured | {Part("head", "w1d1", 1, 150): 1.0}
    assert step_seconds(noisy, "w4d1", 8, 150, "mlcn-lane", 8, FREE) is None


def record(part, turn, seconds):
    names = ("what", "lane", "count", "batch")
    facts = {name: getattr(part, name) for name in names} | {"round": turn}
    return {"facts": facts, "seconds": seconds}


def test_speed_ups_are_taken_within_a_round():
    """The second round is twice as slow; CapsNet takes 8 and 2.5, eight lanes 4, a lane 0.6 with 0.2 for the head."""
    parts = {Part("step", "capsnet", 0, 150): 8.0, Part("step", "capsnet", 0, 19): 2.5}
    parts |= {Part("step", "w4d1", 8, 150): 4.0, Part("step", "w4d1", 1, 150): 0.6}
    parts |= {Part("head", "w1d1", 1, 150): 0.2, Part("head", "w1d1", 8, 150): 0.8}
    records = [record(part, turn, seconds * (1 + turn)) for turn in (0, 1) for part, seconds in parts.items()]
    rows = summarise([*records, {"facts": {}, "failed": "RESOURCE_EXHAUSTED"}], FULL, FREE)
    (row,) = (r for r in rows if (r["sweep"], r["mode"], r["devices"]) == ("lanes", "mlcn-lane", 8))
    assert (row["lanes"], row["where"]) == ("mlcn1:w4d1*8", "simulated")
    assert (row["seconds"]["min"], row["seconds"]["max"]) == (pytest.approx(0.5), pytest.approx(1.0))
    for name, expected in (("itself_on_one", 8.0), ("capsnet_on_one", 16.0), ("capsnet_on_as_many", 5.0)):
        assert row[f"over_{name}"] == {end: pytest.approx(expected) for end in ("median", "min", "max")}
    assert {r["where"] for r in rows if r["devices"] == 1} == {"measured"}
    header, capsnet, *_ = table(rows, FULL.devices)
    assert all("measured" in title or "simulated" in title for title in header[2:])
    assert capsnet[:4] == ["CapsNet", "capsnet-data", "12000", "-, -, 3.20"]
    assert len(draw(rows, FULL.devices).axes) == 6


def gain(sweep, at, alone, most):
    ends = {"median": most, "min": 0.99 * most, "max": 1.01 * most}
    row = {"sweep": sweep, "at": at, "mode": "mlcn-lane", "seconds": {"median": alone}}
    return [
        row | {"devices": 1, "over_itself_on_one": dict.fromkeys(ends, 1.0)},
        row | {"devices": 8, "over_itself_on_one": ends},
    ]


@pytest.mark.parametrize(
    ("deeper", "ratio", "said"),
    [
        (6.6, 1.1, "deeper lanes gain more, the opposite"),
        (5.4, 0.9, "wider lanes gain more, as"),
        (6.1, 6.1 / 6, "neither"),
    ],
)
def test_deeper_lanes_are_compared_with_wider_ones_that_take_as_long(deeper, ratio, said):
    rows = [*gain("width", 1, 1.0, 5.0), *gain("width", 2, 4.0, 7.0), *gain("depth", 2, 2.0, deeper)]
    found = deeper_over_wider([*rows, *gain("depth", 5, 9.0, 8.0), *gain("depth", 1, 1.0, 1.0)], 8)
    assert (found["depths"], found["ratio"]) == ([2], pytest.approx(ratio)), "half way between the widths"
    assert found["least"] == pytest.approx(0.99 / 1.01 * ratio)
    assert said in sentence(found)
    assert "8 devices" in sentence(found)


def test_without_a_deeper_lane_that_takes_as_long_nothing_is_said_of_it():
    rows = [*gain("width", 1, 1.0, 5.0), *gain("depth", 2, 2.0, 6.0)]
    assert deeper_over_wider(rows, 8) is None
    assert "was not measured" in sentence(None)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the script with made-up seconds; returns what was measured and what was written."""
    taken = []

    def measure(config, what, turn_seconds):
        taken.append((what, config.model["name"], config.model["lanes"], config.train.batch_size, turn_seconds))
        return 0.01 if what == "head" else 0.1 * config.train.batch_size

    monkeypatch.setattr(scaling_by_parts, "measure", measure)
    monkeypatch.setattr(scaling_by_parts, "draw", lambda *given: Figure())  # which is quick
    monkeypatch.setattr(repeated_report, "RESULTS", tmp_path / "results")

    def run(*given):
        taken.clear()
        values = flags.FlagValues()
        scaling_by_parts.define(values)
        values(["script", f"--workdir={tmp_path / 'runs'}", "--scale=smoke", *given])
        assert scaling_by_parts.main(values) == 0
        assert not (tmp_path / "results").exists()
        return list(taken), json.loads((tmp_path / "runs" / "scaling_by_parts_smoke.json").read_text())

    return run


def test_a_smoke_run_measures_each_part_once(run, tmp_path):
    taken, result = run()
    assert len(taken) == len(set(taken)) == 7
    assert taken[:2] == [("step", "capsnet", "", size, 0.0) for size in (8, 4)]
    assert len(list((tmp_path / "runs").glob("runs/**/run.json"))) == 7
    assert {row["mode"] for row in result["points"]} == {"capsnet-data", "mlcn-data", "mlcn-lane"}
    taken, result = run("--rounds=2", "--depths=1,2", "--turn_seconds=1")
    assert len(taken) == 7 + 2 * 3, "another round, and another model in two"
    assert not run("--rounds=2", "--depths=1,2")[0]


def test_a_stopped_run_reports_what_there_is_and_goes_on(run, tmp_path, monkeypatch):
    made_up = scaling_by_parts.measure

    def stopped(config, *given):
        if config.train.batch_size == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return made_up(config, *given)

    monkeypatch.setattr(scaling_by_parts, "measure", stopped)
    with pytest.raises(Stopped, match="stopped by SIGTERM; 2 of 7 runs have ended"):
        run()
    rows = json.loads((tmp_path / "runs" / "scaling_by_parts_smoke.json").read_text())["points"]
    assert [(row["mode"], row["devices"], row["where"]) for row in rows] == [
        ("capsnet-data", 1, "measured"),
        ("capsnet-data", 2, "simulated"),
    ]
    monkeypatch.setattr(scaling_by_parts, "measure", made_up)
    assert len(run()[0]) == 5


def test_what_is_too_large_is_left_out_and_said(run, tmp_path):
    taken, result = run("--most_gflop=1")
    assert "capsnet" not in {model for _, model, *_ in taken}
    assert any("more than 1 GFLOP: CapsNet at batch 8, CapsNet at batch 4." in note for note in result["notes"])
    assert all(row["over_capsnet_on_one"] is None for row in result["points"])
    draw(result["points"], (1, 2)).savefig(tmp_path / "picture.png")


def test_steps_measured_elsewhere_are_refused(run, tmp_path):
    run()
    path = next((tmp_path / "runs").glob("runs/**/run.json"))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"device": "another"}))
    with pytest.raises(InputError, match="holds steps measured on another"):
        run()


@pytest.mark.parametrize(
    ("given", "message"),
    [("--widths=0", "--widths=0: give whole numbers"), ("--scale=cpu", "--scale: cpu is not one of")],
)
def test_mistakes_are_told_before_anything_is_measured(run, given, message):
    with pytest.raises(InputError, match=message):
        run(given)
