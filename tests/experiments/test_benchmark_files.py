"""What benchmarks keep in their files: results of one setting, device and versions, and what is told of them."""

import importlib
import json
import sys
from types import SimpleNamespace

import pytest
from absl import flags

from benchmarks import peers
from experiments import REPOSITORY
from mlcn_jax import host
from mlcn_jax.errors import InputError
from mlcn_jax.files import write_json

sys.path.append(str(REPOSITORY / "docs"))

import tables

NAMES = ("capsnet_28x28x1", "mlcn1_4x4_28x28x1", "resnet_1xw8d2_32x32x3")
_SPREAD = {"median": 1.0, "min": 1.0, "max": 1.0}
ENTRY = {  # what any of the scripts tells of a measurement
    "milliseconds": 1.0,
    "parts_milliseconds": {},
    "throughput_over_without_batching": _SPREAD,
    "single_client_latency_over_without_batching": _SPREAD,
}
HALVES = {  # flags of two calls that measure different things
    "roofline": tuple(f"--networks={name}" for name in NAMES[:2]),
    "inference_parts": tuple(f"--networks={name}" for name in NAMES[:2]),
    "normalisation": ("--widths=2", "--widths=3"),
    "lanes_together": ("--cases=mlcn1", "--cases=mlcn2"),
    "conv_algorithms": ("--cases=first", "--cases=depth"),
    "serving": tuple(f"--networks={name}" for name in NAMES[:2]),
}


@pytest.fixture(autouse=True)
def idle(monkeypatch):
    monkeypatch.setattr(peers.host, "busy_cores", lambda: None)
    monkeypatch.setattr(peers, "check_onnx_python", lambda python: None)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a script with made-up figures; returns what its file then has, by name."""

    def call(name, *given):
        script = importlib.import_module(f"benchmarks.{name}")
        for slow in ("compile_probes", "product_rate", "table"):
            monkeypatch.setattr(script, slow, lambda *args: None, raising=False)
        monkeypatch.setattr(script, "measure", lambda *args: dict(ENTRY))
        values = flags.FlagValues()
        script.define(values)
        values([name, f"--out={tmp_path / 'out.json'}", *given])
        script.main(values)
        results = json.loads((tmp_path / "out.json").read_text())
        (part,) = {"networks", "cases", "models"} & set(results)
        return results, list(results[part])

    return call


@pytest.mark.parametrize("name", HALVES)
def test_results_of_the_same_settings_are_gone_on_with_and_others_are_not_overwritten(name, run, tmp_path, capsys):
    first, second = HALVES[name]
    before = host.today()
    results, had = run(name, first)
    assert results["version"] == peers.VERSION
    assert results["date"] in (before, host.today())
    _, both = run(name, second)
    assert set(had) < set(both)
    capsys.readouterr()
    run(name, first)
    assert capsys.readouterr().out.count("--again measures it once more") == len(had)
    before = (tmp_path / "out.json").read_bytes()
    with pytest.raises(InputError, match=r"(?s)out\.json has .* rounds: 20 there, 3 now\n.*another --out.*--again"):
        run(name, second, "--rounds=3")
    assert (tmp_path / "out.json").read_bytes() == before
    results, names = run(name, second, "--rounds=3", "--again")
    assert (results["rounds"], set(names)) == (3, set(both) - set(had))


def test_what_differs_is_named_and_the_date_is_not_among_it(run, tmp_path):
    results, _ = run("conv_algorithms", "--cases=depth")
    versions = results["versions"] | {"jax": "0.1"}
    write_json(tmp_path / "out.json", results | {"date": "2001-01-01", "device": "abacus", "versions": versions})
    with pytest.raises(InputError) as error:
        run("conv_algorithms", "--cases=depth")
    _, *differ, _ = str(error.value).splitlines()
    assert [line.split()[0] for line in differ] == ["device:", "versions.jax:"]
    (tmp_path / "out.json").write_text(json.dumps(results | {"date": "2001-01-01"}))
    results, _ = run("conv_algorithms", "--cases=first")
    assert results["date"] > "2001"


def test_the_platform_is_part_of_the_name_where_it_is_asked_for(tmp_path):
    assert peers.out_file(SimpleNamespace(out=f"{tmp_path}/x_BACKEND.json")) == tmp_path / "x_cpu.json"


def test_every_benchmark_writes_when_it_measured():
    """With the device and versions, which `peers.environment` gives."""
    scripts = (REPOSITORY / "benchmarks").glob("*.py")
    assert [path.stem for path in scripts if "host.environment()" in path.read_text()] == ["peers"]


def compared(tmp_path, *given):
    values = flags.FlagValues()
    peers.define_flags(values, "train_step")
    values(["train_step", f"--out={tmp_path / 'out.json'}", "--peers=", *given])
    return values


def test_a_comparison_goes_on_and_a_failure_does_not_end_it(tmp_path, monkeypatch, capsys):
    measured = []

    def measure(values, names, fails=""):
        results = peers.comparison_so_far(values, "train")
        for name in names:
            with peers.kept(values, results, "networks", name) as missing:
                if missing and name == fails:
                    raise InputError("it ended")
                if missing:
                    measured.append(name)
                    results["networks"][name] = {"title": name}
        return results

    closed = []
    left = SimpleNamespace(close=lambda: closed.append("left"))
    monkeypatch.setattr(peers.Process, "running", [left])
    results = measure(compared(tmp_path), NAMES, fails=NAMES[1])
    assert closed == ["left"], "a process that was left would keep its memory"
    assert measured == [NAMES[0], NAMES[2]]
    assert results["failed"] == {NAMES[1]: "it ended"}
    assert "it ended" in capsys.readouterr().err
    results = measure(compared(tmp_path), NAMES)
    assert measured == [NAMES[0], NAMES[2], NAMES[1]]
    assert list(results["networks"]) == [NAMES[1], NAMES[0], NAMES[2]], "in the order of NETWORKS"
    assert results["failed"] == {}
    assert json.loads((tmp_path / "out.json").read_text())["version"] == peers.VERSION
    assert list(measure(compared(tmp_path, "--again"), NAMES[:1])["networks"]) == [NAMES[1], NAMES[0], NAMES[2]]
    assert measured[3:] == [NAMES[0]]
    with pytest.raises(InputError, match="rounds: 20 there, 3 now"):
        measure(compared(tmp_path, "--rounds=3"), ())


@pytest.mark.parametrize(
    ("before_and_after", "kept", "warns"),
    [((0.1, 0.5), 0.5, True), ((0.15, 0.0), 0.15, False), ((None,) * 2, None, False)],
)
def test_other_work_is_noted_before_and_after_and_told(before_and_after, kept, warns, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(peers.host, "busy_cores", iter(before_and_after).__next__)
    values = compared(tmp_path)
    results = peers.comparison_so_far(values, "train")
    with peers.kept(values, results, "networks", NAMES[0]):
        results["networks"][NAMES[0]] = {}
    assert json.loads((tmp_path / "out.json").read_text())["networks"][NAMES[0]] == {"busy_cores": kept}
    assert ("other work kept 0.50 cores busy" in capsys.readouterr().err) == warns


def test_captions_tell_of_other_work_where_it_is_known(monkeypatch):
    entry = {"capsnet_over_this": 2.0, "title": "mlcn1", "thesis": None}
    shapes = {size: {"networks": {"a": entry}, "busy_cores": busy} for size, busy in (("28", 0.05), ("32", 0.25))}
    result = {"families": shapes, "rounds": 3, "device": "machine", "cpu_count": 2}
    result["versions"] = {"python": "3", "jax": "1"}
    monkeypatch.setattr(tables.speed, "benchmark", lambda name: result)
    assert "medians of 3 rounds, other work kept at most 0.25 cores busy before or after.*" in tables.speed.families()
    for shape in shapes.values():
        del shape["busy_cores"]
    assert "medians of 3 rounds.*" in tables.speed.families()


@pytest.mark.parametrize("given", ["a", "0", "1,", "-8"])
def test_numbers_of_images_are_asked_for(run, given):
    with pytest.raises(InputError, match=f"--batches={given}: give numbers of images, such as 1,8"):
        run("inference_parts", f"--batches={given}")
