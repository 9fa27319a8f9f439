"""Measurements that go on: rows of a subset are added to those that are there."""

from types import SimpleNamespace

import pytest
from absl import flags
from made_records import ROW

from experiments import balance, lane_collapse, links, memory_plan, scaling, workers
from mlcn_jax import host
from mlcn_jax.errors import InputError
from mlcn_jax.files import read_json, write_json


def parsed(script, *given):
    values = flags.FlagValues()
    script.define(values)
    values(["script", *given])
    return values


def test_links_and_models_are_measured_in_any_subsets(tmp_path, monkeypatch):
    path, measured = tmp_path / "links.json", []

    def measure(row, profile, values):
        measured.append((row["link"], row["lanes"]))
        return {**row, "chosen": "alone", "chosen_over_fastest": 1.0 + len(measured) / 100}

    monkeypatch.setattr(links, "measure", measure)
    profile = SimpleNamespace(to_dict=lambda: {"of": "a core"})
    monkeypatch.setattr(workers, "one_core_profile", lambda name: profile)

    def run(*given):
        links.main(parsed(links, f"--output={path}", *given))
        return read_json(path)

    run("--links=loopback", "--models=mlcn1:w4*4")
    run("--links=10 Mbit/s, 50 ms", "--models=mlcn1:w4*4;resnet:w2*4", "--rounds=5")
    found = run("--links=loopback;10 Mbit/s, 50 ms", "--models=mlcn1:w4*4;resnet:w2*4")
    slow = "10 Mbit/s, 50 ms"
    assert measured == [
        ("loopback", "mlcn1:w4*4"),
        (slow, "mlcn1:w4*4"),
        (slow, "resnet:w2*4"),
        ("loopback", "resnet:w2*4"),
    ]
    assert found["chosen_over_fastest"] == {"largest": 1.04, "within": 4, "of": 4}
    assert len(run("--links=loopback", "--models=mlcn1:w4*4", "--exchange_dtype=bfloat16")["rows"]) == 5
    monkeypatch.setattr(links, "VERSION", links.VERSION + 1)
    message = r"links\.json holds results that cannot stand .*\n  version: \d+ there, \d+ now\nmove it away"
    with pytest.raises(InputError, match=message):
        run("--links=loopback", "--models=mlcn1:w4*4")


def test_memory_of_other_models_stays(tmp_path, monkeypatch):
    path, version = tmp_path / "memory_plan.json", [1]

    def row_of(changes):
        lanes = changes["model.lanes"]
        over, extrapolated = 0.01 * len(lanes), "resnet:" in lanes
        return {"changes": changes, "compiled_bytes": version[0], "over": over, "is_extrapolated": extrapolated}

    monkeypatch.setattr(memory_plan, "row_of", row_of)

    def bytes_of(*given):
        memory_plan.main(parsed(memory_plan, f"--output={path}", *given))
        return [row["compiled_bytes"] for row in read_json(path)["rows"]]

    assert bytes_of("--only=0,6") == [1] * 5, "lanes that classify alone have no remat"
    version[0] = 2
    assert bytes_of("--only=0") == [2] * 2 + [1] * 3
    assert bytes_of("--only=0", "--batch=7") == [2] * 2 + [1] * 3 + [2] * 2
    bytes_of("--only=0,3")
    others, every = (read_json(path)[name] for name in ("of_others", "least_and_most_over"))
    assert others == pytest.approx([0.14, 0.14]), "of resnet:w1d1*16"
    assert every == pytest.approx([0.13, 0.14]), "of resnet:w1d2*6, too"
    write_json(path, read_json(path) | {"cpu_count": 77})
    with pytest.raises(InputError, match="cpu_count: 77 there, "):
        bytes_of("--only=1")


def stopping(calls, most):
    """A measurement that is stopped after some calls."""

    def measure(*given):
        if len(calls) == most:
            raise KeyboardInterrupt
        calls.append(given)
        return {"call": len(calls)}

    return measure


@pytest.fixture
def balance_path(tmp_path, monkeypatch):
    """Where `balance` writes; nothing is simulated, and a profile is what its name says."""
    monkeypatch.setattr(balance, "RESULTS", tmp_path)
    for name, found in (("simulate", {}), ("draw_picture", None), ("table", ""), ("measured_table", "")):
        monkeypatch.setattr(balance, name, lambda *given, found=found: found)
    monkeypatch.setattr(workers, "one_core_profile", lambda name: SimpleNamespace(to_dict=lambda: {"of": name}))
    monkeypatch.setattr(balance, "LANES", (6, 12))
    return tmp_path / "balance.json"


def test_balance_goes_on_and_keeps_what_was_measured(balance_path, monkeypatch):
    measured, path, before = [], balance_path, host.today()
    monkeypatch.setattr(balance, "measure", stopping(measured, 3))
    given = "--profile=p", "--measured_draws=3"
    with pytest.raises(KeyboardInterrupt):
        balance.main(parsed(balance, *given))
    assert [(row["num_lanes"], row["seed"]) for row in read_json(path)["measured"]] == [(6, 0), (6, 1), (6, 2)]
    balance.main(parsed(balance, "--draws=1"))
    assert len(read_json(path)["measured"]) == 3
    monkeypatch.setattr(balance, "measure", stopping(measured, 6))
    balance.main(parsed(balance, *given))
    assert [row["call"] for row in read_json(path)["measured"]] == [1, 2, 3, 4, 5, 6]
    dates = {read_json(path)["date"], *(row["date"] for row in read_json(path)["measured"])}
    assert dates <= {before, host.today()}


@pytest.mark.parametrize(
    ("changed", "stored", "told"),
    [
        ("--profile=other", {}, r"  profile: '\w+' there, '\w+' now"),
        ("--rounds=7", {}, r"  rounds: 3 there, 7 now"),
        ("--rounds=3", {"cpu_count": 77}, r"  cpu_count: 77 there, \d+ now"),
    ],
)
def test_balance_does_not_replace_what_was_measured_with_something_else(
    changed, stored, told, balance_path, monkeypatch
):
    monkeypatch.setattr(balance, "measure", stopping([], 100))
    given = "--profile=p", "--measured_draws=1"
    balance.main(parsed(balance, *given))
    write_json(balance_path, read_json(balance_path) | stored)
    before = balance_path.read_text()
    monkeypatch.setattr(balance, "simulate", lambda *given: pytest.fail("it is refused before anything is done"))
    message = rf"(?s)balance\.json holds results that cannot stand .*\n{told}\nmove it away to begin anew"
    with pytest.raises(InputError, match=message):
        balance.main(parsed(balance, *given, changed))
    assert balance_path.read_text() == before
    monkeypatch.setattr(balance, "simulate", lambda *given: {})
    other = balance_path.with_name("other.json")
    balance.main(parsed(balance, *given, changed, f"--output={other}"))
    assert len(read_json(other)["measured"]) == 2
    assert balance_path.read_text() == before


def test_scaling_goes_on_and_simulates_beside_it(tmp_path, monkeypatch):
    measured, path = [], tmp_path / "scaling.json"

    def measure(settings, over, values):
        if len(measured) == 3:
            raise KeyboardInterrupt
        measured.append(settings)
        return [{**vars(setting), "call": len(measured)} for setting in settings]

    monkeypatch.setattr(scaling, "RESULTS", tmp_path)
    monkeypatch.setattr(scaling, "measure", measure)
    monkeypatch.setattr(scaling, "simulate", lambda settings, *given: [dict(vars(setting)) for setting in settings])
    monkeypatch.setattr(workers, "one_core_profile", lambda name: name)
    for name in ("draw", "table"):
        monkeypatch.setattr(scaling, name, lambda *given: "")
    with pytest.raises(KeyboardInterrupt):
        scaling.main(parsed(scaling, "--batches=100,150,300,600", "--profile=p"))
    before = read_json(path)["batches"]
    assert {row["batch"] for row in before} == {100, 150, 300}
    measured.append("stopped")
    scaling.main(parsed(scaling, "--batches=600"))
    found = read_json(path)
    assert found["batches"][: len(before)] == before, "simulated rows stay too"
    assert {row["batch"] for row in found["batches"]} == {100, 150, 300, 600}
    count = len(measured)
    scaling.main(parsed(scaling, "--profile=p"))
    assert len(measured) == count
    assert len(read_json(path)["lanes"]) > len(found["lanes"])


def test_settings_of_lane_collapse_stay(directories, tmp_path, monkeypatch):
    trained = []

    def follow(config, dataset, scale, num_steps):
        trained.append(config.train.optimizer)
        return {"steps": [0, num_steps], "spreads": [[0.1, 0.2], [0.0, 0.3]], "alive": 1, "test_accuracy": 50.0}

    monkeypatch.setattr(lane_collapse, "follow", follow)

    def steps_of(settings, num_steps):
        lane_collapse.compare(ROW, settings, num_steps, 0, directories, tmp_path, "command")
        runs = read_json(tmp_path / f"lane_collapse_{ROW}.json")["runs"]
        return {run["setting"]: run["steps"][-1] for run in runs}

    assert steps_of(["published", "warm_up"], 2) == {"published": 2, "warm_up": 2}
    assert steps_of(["warm_up", "published"], 2) == {"published": 2, "warm_up": 2}
    assert trained == ["adam", "adamw"]
    assert steps_of(["warm_up"], 3) == {"published": 2, "warm_up": 3}
