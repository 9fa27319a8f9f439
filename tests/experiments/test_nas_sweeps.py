"""Sweeps of searches: what devices a point has, how models grow with them, and what the sweeps take."""

import dataclasses
import json
import random
import re
import sys

import pytest
from absl import flags
from matplotlib.figure import Figure

from configs import nas_cifar, nas_quickstart
from experiments import nas_sweeps
from mlcn_jax.errors import InputError
from mlcn_jax.nn.lane_list import parse_lanes
from mlcn_jax.placement import cost
from mlcn_jax.search import run as run_lib
from mlcn_jax.search import setup


def small(**search):
    config = nas_quickstart.get_config()
    config.model.decoder, config.model.conv = (16,), "native"
    config.search.update({"max_width": 2, "max_depth": 1, "baseline": "mlcn2:w1*2", "num_models": 3, **search})
    return setup.read_config(config.to_dict())


def devices_of(sweep, shared=False, **search):
    config, settings = small(**search)
    return [nas_sweeps.at_point(sweep, value, config, settings, shared).devices for value in nas_sweeps.SWEEPS[sweep]]


def test_points_are_those_of_the_figures():
    each = [f"memory=12GiB flops={times}x*8" for times in (1, 2, 4, 8)]
    assert devices_of("flops") == devices_of("flops", costs="published") == each
    assert devices_of("flops", shared=True)[0] == "memory=12GiB flops=0.125x*8"
    assert devices_of("devices") == [f"memory=12GiB flops=8x*{count}" for count in (4, 8, 16, 32)]
    assert devices_of("devices", shared=True)[-1] == "memory=12GiB flops=0.25x*32"
    assert devices_of("memory", costs="published") == [f"memory={gib}GiB flops=8x*8" for gib in (2, 4, 8, 12)]
    exact = [float(re.search(r", memory=([\d.]+)MiB flops=8x\*7", text)[1]) for text in devices_of("memory")]
    assert [mib / exact[-1] for mib in exact] == pytest.approx([2 / 12, 4 / 12, 8 / 12, 1], rel=0.02)


@pytest.mark.parametrize("costs", ["exact", "published"])
def test_models_grow_with_the_devices_unless_these_share_their_flops(costs):
    config, settings = small(costs=costs, tolerance=0.05)

    def mean_work(count, shared):
        space = setup.make_space(config, nas_sweeps.at_point("devices", count, config, settings, shared))
        rng = random.Random(0)
        return sum(row[space.buckets[0].unit] for _ in range(20) for row in space.report(space.draw(rng))) / 20

    assert mean_work(32, False) == pytest.approx(8 * mean_work(4, False), rel=0.05)
    assert mean_work(8, True) == pytest.approx(mean_work(4, True), rel=0.2)


def test_the_flops_of_a_search_are_those_of_its_steps():
    config, settings = small(devices="flops=1x*2", num_models=1, num_epochs=3, num_repeats=2)
    plan = nas_sweeps.propose.Plan(settings.seed, setup.make_space(config, settings))
    total = 0
    for lanes in ("mlcn2:w1*2", plan.of(0)[0].lanes):
        spec = config.replace({"model.lanes": lanes}).model_spec(*config.data.shape())
        total += 50 * cost.decoder_step_flops(spec)
        for group in parse_lanes(lanes):
            total += group.count * cost.lane_cost(group.spec, spec.lane_settings, spec.image_shape).step_flops(50)
    assert nas_sweeps.planned_flops(config, settings, 7) == total * 7 * 3 * 2


def parsed(monkeypatch, *given):
    monkeypatch.setattr(sys, "argv", ["nas_sweeps", *given])  # where ml_collections looks for --config
    values = flags.FlagValues()
    nas_sweeps.define(values)
    values(["nas_sweeps", *given])
    return values


def test_a_point_that_holds_no_lane_stays_empty_and_each_other_has_its_folder(tmp_path, monkeypatch, capsys):
    """Formula 6.1 against figure 6.3: 2 GiB hold no lane."""
    folders = []

    def fake_run(config, settings, folder, programs):
        folders.append(folder.name)
        folder.mkdir(exist_ok=True)
        rows = [
            {
                **{"state": "complete", "model": i, "accuracy": a, "step_flops": 1e9, "devices": [{"fill": 1.0}]},
                "ended": 1767225599.0 + i,  # a second before 2026, and after
            }
            for i, a in enumerate((0.5, 0.4, 0.6))
        ]
        (folder / "trials.json").write_text(json.dumps(rows))
        best = {"test_accuracies": [0.55]}
        return {"baseline_validation_accuracy": 0.45, "best": best, "train_seconds": 1.0}

    monkeypatch.setattr(run_lib, "run", fake_run)
    titles = set()
    suptitle = Figure.suptitle
    monkeypatch.setattr(Figure, "suptitle", lambda self, t, **more: titles.add(t) or suptitle(self, t, **more))
    monkeypatch.setattr(nas_sweeps, "RESULTS", tmp_path)
    monkeypatch.setattr(nas_sweeps.host, "set_up_jax", lambda **_: None)
    nas_sweeps.main(parsed(monkeypatch, "--sweep=memory", f"--workdir={tmp_path}", "--config.search.costs=published"))
    assert folders == ["memory-4", "memory-8", "memory-12"]
    result = json.loads((tmp_path / "nas_memory_published.json").read_text())
    assert [len(point["accuracies"]) for point in result["points"]] == [0, 3, 3, 3]
    assert [point.get("date") for point in result["points"]] == [None, *3 * ["2026-01-01"]]
    assert result["date"] == "2026-01-01"
    assert result["cpu_count"] > 0
    assert "jax" in result["versions"]
    assert "not even the smallest lane" in result["points"][0]["reason"]
    assert "| 2 | 0, no lane fits |" in capsys.readouterr().out
    assert (tmp_path / "nas_memory_published.png").stat().st_size > 0
    (told,) = titles
    assert told.startswith("cifar10, all training images, 10% of them for validation; published costs; ")
    assert told.endswith("64 models a point, each trained 4 times for 10 epochs")
    with pytest.raises(InputError, match=r"search\.method is 'tpe', but the sweeps are of random searches"):
        nas_sweeps.main(parsed(monkeypatch, f"--workdir={tmp_path}", "--config.search.method=tpe"))


@pytest.mark.long
def test_the_docstring_has_what_the_sweeps_take():
    """450 steps an epoch: of nine tenths of 50,000 images, 100 at a time."""
    config, settings = setup.read_config(nas_cifar.get_config().to_dict())
    published = dataclasses.replace(settings, costs="published")
    for sweep, values in nas_sweeps.SWEEPS.items():
        cells = []
        for one, shared in ((settings, False), (published, False), (settings, True)):
            points = [nas_sweeps.at_point(sweep, value, config, one, shared) for value in values]
            cells.append(", ".join(f"{nas_sweeps.planned_flops(config, point, 450) / 1e18:.2f}" for point in points))
        assert f"| {sweep} | {' | '.join(cells)} |" in nas_sweeps.__doc__
