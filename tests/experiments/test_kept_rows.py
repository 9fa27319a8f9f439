"""Measurements that go on: rows of a subset are added to those that are there."""

from types import SimpleNamespace

from absl import flags

from experiments import links, memory_plan, workers
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
    assert len(run("--links=loopback", "--models=mlcn1:w4*4")["rows"]) == 1


def test_memory_of_other_models_stays(tmp_path, monkeypatch):
    path, version = tmp_path / "memory_plan.json", [1]
    monkeypatch.setattr(
        memory_plan, "row_of", lambda changes: {"changes": changes, "compiled_bytes": version[0], "over": 0.0}
    )

    def bytes_of(*given):
        memory_plan.main(parsed(memory_plan, f"--output={path}", *given))
        return [row["compiled_bytes"] for row in read_json(path)["rows"]]

    assert bytes_of("--only=0,1") == [1] * 6
    version[0] = 2
    assert bytes_of("--only=0") == [2] * 3 + [1] * 3
    assert bytes_of("--only=0", "--batch=7") == [2] * 3 + [1] * 3 + [2] * 3
    write_json(path, read_json(path) | {"cpu_count": 77})
    assert bytes_of("--only=2") == [2] * 3
