"""The plan found from device profiles is the fastest by them, and what cannot be planned says why."""

import dataclasses
import importlib
import json
import math
import types

import jax
import numpy as np
import pytest
from absl import flags
from made_profile import make_profile

from mlcn_jax.commands import front
from mlcn_jax.distributed import links
from mlcn_jax.errors import InputError
from mlcn_jax.launch import program
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.placement import cost, partition, simulate
from mlcn_jax.training import loop, plan, session, speeds, splits

EQUAL = ModelSpec("mlcn", (28, 28, 1), 10, "mlcn1:w2*4")
LINK = {"latency_seconds": 1e-5, "bytes_per_second": 1e9}


@pytest.fixture(scope="module")
def profile():
    return make_profile()


def fastest(spec, profiles, num_processes, batch_size=100):
    found = splits.candidates(spec, batch_size, profiles, ["greedy"], num_processes)
    return min(found, key=lambda candidate: candidate.step.total_seconds)


def test_devices_that_share_the_cores_of_a_process_bring_nothing(profile):
    best = fastest(EQUAL, [dataclasses.replace(profile, crowding=0.0)] * 4, 1)
    assert (best.data, best.lane) == (1, 1)


def test_a_slow_link_favours_lanes_and_lanes_that_do_not_divide_go_to_stacks(profile):
    two = [dataclasses.replace(profile, link=LINK)] * 2
    found = {(c.data, c.lane, c.placement is None) for c in splits.candidates(EQUAL, 100, two, ["greedy"], 2)}
    assert found == {(1, 1, True), (2, 1, True), (1, 2, True), (1, 2, False)}
    best = fastest(EQUAL, [dataclasses.replace(profile, link=LINK | {"bytes_per_second": 1e7})] * 2, 2)
    assert (best.data, best.lane) == (1, 2)
    odd = dataclasses.replace(EQUAL, lanes="mlcn1:w2*3")
    assert fastest(odd, two, 2, batch_size=99).placement is not None


def test_a_slower_device_gets_fewer_lanes(profile):
    scaled = {name: [(size, 3 * s) for size, s in pairs] for name, pairs in profile.layer_seconds.items()}
    slow = dataclasses.replace(profile, layer_seconds=scaled)
    no_head = dict.fromkeys(profile.head_seconds_of, 1e-6)
    both = [dataclasses.replace(one, link=LINK, head_seconds_of=no_head) for one in (profile, slow)]
    best = fastest(EQUAL, both, 2)
    assert best.placement.device_of.count(0) == 3
    assert best.placement.device_of.count(1) == 1


def test_without_profiles_lanes_weigh_what_they_compute():
    spec = dataclasses.replace(EQUAL, lanes="mlcn1:w1*2,mlcn1:w4d2")
    problem = splits.placement_problem(spec, 100, [None, None], ["a", "b"])
    (small, same), (_, other), (large, _) = problem.seconds
    assert small == same == other
    assert large > 10 * small
    assert partition.partition("greedy", problem).device_of.count(0) in (1, 2)


def test_a_run_takes_the_plan_that_is_found(tiny, tmp_path, profile):
    path = tmp_path / "profile.json"
    dataclasses.replace(profile, crowding=0.0).save(path)
    few = tiny.replace({"train.num_steps": 2, "parallel.plan": "auto", "parallel.profile": str(path)})
    assert loop.train(few, tmp_path / "run")["parallel"] == {"plan": "mesh", "data": 1, "lane": 1}
    stacks = few.replace({"parallel.plan": "stacks", "parallel.lane": 2, "train.num_steps": 3})
    laid_out = loop.train(stacks, tmp_path / "run")["parallel"]["lanes"]
    assert laid_out == {"cpu 0": "mlcn1:w1d1*1", "cpu 1": "mlcn1:w1d1*1"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "parallel.plan=auto needs parallel.profile: measure the devices with"),
        ({"parallel.lane": 2}, "parallel.lane is 2; it must be 1 with parallel.plan=auto, which chooses it"),
        ({"profile": {"cpu_count": 77}}, "measured on another device:\n  cpu_count: 77 in the profile"),
        ({"profile": {"platform": "gpu"}}, "profiles for gpu, but none for cpu"),
        ({"profile": {"image_shape": [32, 32, 3]}}, "measured with other lanes:\n  image_shape"),
    ],
)
def test_a_plan_that_cannot_be_found_says_why(tiny, tmp_path, profile, changes, message):
    changes = dict(changes)
    if "profile" in changes:
        path = tmp_path / "profile.json"
        path.write_text(json.dumps({**profile.to_dict(), **changes.pop("profile")}))
        changes["parallel.profile"] = str(path)
    with pytest.raises(InputError, match=message):
        loop.train(tiny.replace({"parallel.plan": "auto", **changes}), tmp_path / "run")


@pytest.mark.long
def test_devices_that_differ_are_timed_once_and_named(tiny, tmp_path, monkeypatch):
    timed = []

    def seconds(lane, spec, batch_size, device):
        timed.append((str(lane), device.id))
        return 1.0 + 2.0 * device.id

    monkeypatch.setattr(speeds, "_kind", lambda device: f"kind {device.id}")
    monkeypatch.setattr(speeds, "_seconds", seconds)
    few = tiny.replace(
        {"train.num_steps": 1, "parallel.plan": "stacks", "parallel.lane": 2, "model.lanes": "mlcn1:w1*4"}
    )
    about = loop.train(few, tmp_path / "run")["parallel"]
    assert timed == [("mlcn1:w1d1", 0), ("mlcn1:w1d1", 1)]
    assert about["lanes"] == {"cpu 0": "mlcn1:w1d1*3", "cpu 1": "mlcn1:w1d1*1"}
    assert about["measured_seconds"]["cpu 1, kind 1"] == {"mlcn1:w1d1": 3.0}
    loop.train(few.replace({"train.num_steps": 2}), tmp_path / "run")
    assert len(timed) == 2
    (tmp_path / "run" / "device_speeds.json").write_text("{")
    loop.train(few.replace({"train.num_steps": 3}), tmp_path / "run")
    assert len(timed) == 4


def test_devices_of_one_kind_are_not_timed(monkeypatch):
    monkeypatch.setattr(speeds, "_seconds", None)
    assert speeds.speeds_of(EQUAL, 100, jax.devices()[:2]) is None


def test_processes_of_one_kind_are_timed_if_one_is_slow(monkeypatch):
    tiny_seconds = [0.001, 0.002]
    monkeypatch.setattr(speeds.jax, "process_count", lambda: 2)
    monkeypatch.setattr(speeds.processes, "everywhere", lambda function: tiny_seconds)
    assert speeds._speeds_differ(jax.devices())
    tiny_seconds[1] = 0.0011
    assert not speeds._speeds_differ(jax.devices())


def test_what_was_kept_is_taken_before_anything_is_timed(tmp_path, monkeypatch):
    """Near the threshold, a second measurement could decide otherwise than the first."""
    answers, two = [True, False], jax.devices()[:2]
    monkeypatch.setattr(speeds.jax, "process_count", lambda: 2)
    monkeypatch.setattr(speeds.processes, "everywhere", lambda function: [function()])
    monkeypatch.setattr(speeds.processes, "in_first", lambda function: function())
    monkeypatch.setattr(speeds, "_speeds_differ", lambda devices: answers.pop(0))
    monkeypatch.setattr(speeds, "_seconds", lambda *args: 1.0)
    differ = [speeds.speeds_of(EQUAL, 100, two, tmp_path / "differ.json") for _ in range(2)]
    assert differ[0].seconds == ({"mlcn1:w2d1": 1.0},) * 2
    assert differ[1] == differ[0]
    assert [speeds.speeds_of(EQUAL, 100, two, tmp_path / "alike.json") for _ in range(2)] == [None, None]
    assert not answers


def test_a_mesh_over_devices_of_one_kind_but_unequal_speed_says_so(monkeypatch, caplog):
    measured = speeds.Speeds(("cpu", "cpu"), 100, ({"mlcn1:w2d1": 1.0}, {"mlcn1:w2d1": 2.0}))
    monkeypatch.setattr(plan, "speeds_of", lambda *args: measured)
    with caplog.at_level("WARNING", logger="mlcn_jax"):
        found = plan.make_plan(EQUAL, 100, data=2)
    assert list(found.about["measured_seconds"].values()) == list(measured.seconds)
    assert any("devices differ, and a mesh gives each an equal share" in r.getMessage() for r in caplog.records)


def test_lanes_between_the_timed_ones_are_interpolated():
    spec = dataclasses.replace(EQUAL, lanes="mlcn1:w1,mlcn1:w2,mlcn1:w4")
    known = ({"mlcn1:w1d1": 1.0, "mlcn1:w4d1": 9.0}, {"mlcn1:w1d1": 2.0, "mlcn1:w4d1": 2.0})
    problem = speeds.Speeds(("a", "b"), 100, known).problem(spec, ["a", "b"])
    assert problem.seconds[0] == pytest.approx([1.0, 2.0])
    assert 1.0 < problem.seconds[1][0] < 9.0
    assert problem.seconds[2] == pytest.approx([9.0, 2.0])


def test_no_split_is_predicted_to_bring_more_than_its_devices(profile):
    spec = dataclasses.replace(EQUAL, lanes="mlcn1:w2*8")
    crowded = dataclasses.replace(
        profile, crowding=0.2, link=LINK, head_seconds_of=dict.fromkeys(profile.head_seconds_of, 0.0)
    )
    alone = splits.predict_mesh(spec, 100, 1, 1, [crowded], [1.0]).total_seconds
    for count in (2, 4, 8):
        many, ones = [crowded] * count, [1.0] * count
        meshes = [splits.predict_mesh(spec, 100, 1, count, many, ones)]
        meshes += [splits.predict_mesh(spec, 100, count, 1, many, ones)] if count < 8 else []
        assert all(alone / mesh.total_seconds <= count for mesh in meshes)
        placement = partition.partition("greedy", splits.placement_problem(spec, 100, many, [""] * count))
        assert alone / splits.predict_stacks(spec, 100, placement, many, ones, "ring").total_seconds <= count
    shared = dataclasses.replace(crowded, sharing={"devices": 2, "slowdown": 1.25, "spread": 0.0})
    step = splits.predict_mesh(spec, 100, 1, 2, [shared] * 2, [1.0] * 2).total_seconds
    assert alone / step <= 2 / 1.25
    apart = simulate.Cluster([0, 1], simulate.Link(**LINK), simulate.Link(**LINK))
    assert splits.predict_mesh(spec, 100, 1, 2, [shared] * 2, [1.0] * 2, apart).total_seconds < step


def test_a_prediction_says_how_sure_it_is(profile):
    assert splits.interval(1.0, EQUAL, [profile]) is None
    kept = dataclasses.replace(profile, residuals={"lane": [0.1, -0.1, 0.1, -0.1], "stack": [0.2, -0.2]})
    alone = splits.interval(1.0, dataclasses.replace(EQUAL, lanes="mlcn1:w2"), [kept])
    assert alone.low_seconds < 1.0 < alone.high_seconds
    assert alone.high_seconds == pytest.approx(np.exp(0.1 * 2.132), rel=1e-3)  # Student's t, four residuals
    lanes_only = dataclasses.replace(kept, residuals={"lane": kept.residuals["lane"]})
    equal = splits.interval(1.0, EQUAL, [lanes_only])
    assert equal.high_seconds == pytest.approx(np.exp(0.1 * 2.132), rel=1e-3), "equal lanes have the same error"
    mixed = splits.interval(1.0, dataclasses.replace(EQUAL, lanes="mlcn1:w2,mlcn2:w2"), [lanes_only])
    assert np.exp(0.1 * 2.132 / np.sqrt(2)) <= mixed.high_seconds < equal.high_seconds, "others partly cancel"
    stack = splits.interval(1.0, EQUAL, [kept])
    assert stack.high_seconds == pytest.approx(np.exp(0.2 * 2.132), rel=1e-3), "what several lanes have in excess"
    shared = dataclasses.replace(kept, sharing={"devices": 2, "slowdown": 1.0, "spread": 0.3})
    assert splits.interval(1.0, EQUAL, [shared] * 2).high_seconds > stack.high_seconds


@pytest.mark.long
def test_residual_lanes_are_split_by_their_profile():
    spec = ModelSpec("mlcn", (28, 28, 1), 10, "resnet:w1*2,resnet:w2*2", norm_group=50)
    residual = dataclasses.replace(make_profile("resnet"), link=LINK)
    found = splits.candidates(spec, 100, [residual] * 2, ["greedy"], 2)
    kinds = {(c.data, c.lane, c.placement is None) for c in found}
    assert kinds == {(1, 1, True), (2, 1, True), (1, 2, True), (1, 2, False)}
    placed = next(c.placement for c in found if c.placement)
    assert sorted(placed.device_of) == [0, 0, 1, 1]
    together = dataclasses.replace(spec, norm_group=100)  # groups of a whole batch cannot be split
    assert {c.data for c in splits.candidates(together, 100, [residual] * 2, ["greedy"], 2)} == {1}


def test_lanes_take_longer_in_whole_steps_by_what_was_measured(profile):
    spec = dataclasses.replace(EQUAL, lanes="mlcn1:w2*8")
    free = dataclasses.replace(profile, link=LINK, head_seconds_of=dict.fromkeys(profile.head_seconds_of, 0.0))
    one_lane = cost.lane_cost(spec.lane_specs[0], spec.lane_settings, spec.image_shape)

    def seconds(ratio):
        one = dataclasses.replace(free, whole_ratio=ratio)
        problem = splits.placement_problem(spec, 100, [one] * 2, ["", ""])
        assert one.lane_seconds(one_lane, 100) == free.lane_seconds(one_lane, 100)
        return np.array(
            [
                splits.predict_mesh(spec, 100, 1, 1, [one], [1.0]).total_seconds,
                partition.partition("greedy", problem).makespan_seconds,
            ]
        )

    np.testing.assert_allclose(seconds(1.25), 1.25 * seconds(1.0))


def test_the_plan_that_is_found_says_how_sure_it_is(tiny, tmp_path, profile, caplog):
    kept = dataclasses.replace(profile, crowding=0.0, residuals={"lane": [0.1, -0.1], "stack": [0.1, -0.1]})
    kept.save(tmp_path / "profile.json")
    changes = {"train.num_steps": 1, "parallel.plan": "auto", "parallel.profile": str(tmp_path / "profile.json")}
    with caplog.at_level("INFO", logger="mlcn_jax"):
        loop.train(tiny.replace(changes), tmp_path / "run")
    assert any("ms a step predicted (90 % within " in record.getMessage() for record in caplog.records)


def cluster_of(link, count=2):
    """Processes on a machine each."""
    return simulate.Cluster(range(count), simulate.Link(0.0, math.inf), link)


def chosen(spec, profile, link, **how):
    found = splits.candidates(
        spec, 100, [profile] * 2, ["greedy"], 2, cluster_of(link), splits.Messages(**how) if how else splits.Messages()
    )
    return min(found, key=lambda candidate: candidate.step.total_seconds)


def test_the_measured_link_decides_the_split(profile):
    """Loopback splits, a slow link stays on one device, and one in between sends columns but no gradients."""
    free = dataclasses.replace(profile, crowding=0.0, head_seconds_of=dict.fromkeys(profile.head_seconds_of, 1e-6))
    alone = splits.predict_alone(EQUAL, 100, [free] * 2).total_seconds
    spread = chosen(EQUAL, free, simulate.Link(1e-5, 1e10))
    assert spread.data * spread.lane == 2
    assert spread.step.total_seconds < 0.6 * alone
    between = chosen(EQUAL, free, simulate.Link(1e-5, 10 * 16e3 * 4 / alone))
    assert (between.data, between.lane) == (1, 2)
    slow = chosen(EQUAL, free, simulate.Link(alone, 1e6))
    assert (slow.data, slow.lane, slow.placement) == (1, 1, None)
    assert slow.step.communication_seconds == 0


def test_few_bytes_and_messages_are_predicted_to_be_faster(profile):
    link, placed = simulate.Link(0.01, 1e6), partition.Placement("greedy", (0, 0, 1, 1), (1.0, 1.0), (0.0, 0.0), 1.0)
    args = (EQUAL, 100, placed, [profile] * 2, [1.0] * 2, "ring", cluster_of(link))
    plain, half, clipped = (
        splits.predict_stacks(*args, splits.Messages(*how)).communication_seconds
        for how in (("float32", False), ("bfloat16", False), ("float32", True))
    )
    columns = 2 * 2 * 100 * 10  # of two stacks of two lanes
    assert plain == pytest.approx(2 * (0.01 + 4 * columns / 2 / 1e6))
    assert half == pytest.approx(2 * (0.01 + 2 * columns / 2 / 1e6))
    assert clipped == pytest.approx(plain + 2 * (0.01 + 2 / 1e6))
    far = cluster_of(simulate.Link(0.01, math.inf))
    for dtype, sums in (("float32", 1), ("bfloat16", 2)):  # of the gradients and the metrics
        messages = splits.Messages(dtype)
        mesh = splits.predict_mesh(EQUAL, 100, 2, 1, [profile] * 2, [1.0] * 2, far, messages)
        assert mesh.reduce_seconds == pytest.approx(sums * 2 * 0.01)


def test_rounds_and_lanes_apart_are_recommended_where_they_are_faster(profile):
    profile = dataclasses.replace(profile, head_seconds_of=dict.fromkeys(profile.head_seconds_of, 1e-6))
    apart = dataclasses.replace(EQUAL, margin_loss="per_lane_sum", decoder_gradient="none")
    slow, fast = cluster_of(simulate.Link(0.05, 1.25e6)), cluster_of(simulate.Link(0.0, math.inf))
    seconds = splits.predict_alone(EQUAL, 100, [profile] * 2).total_seconds
    joint = plan.faster_otherwise(EQUAL, 100, [profile] * 2, slow, 0.0, seconds)
    (rounds,) = joint
    assert rounds.startswith("rounds of 50 steps")
    local = splits.predict_alone(EQUAL, 50, [profile] * 2).total_seconds
    sent = cost.estimated_parameters(EQUAL) / 1.25e6
    assert joint[rounds] == pytest.approx(local + 2 * (0.05 + sent) / 50)
    both = plan.faster_otherwise(apart, 100, [profile] * 2, slow, 0.0, seconds)
    assert [what.split(" (")[0] for what in both] == ["rounds of 50 steps", "lanes apart"]
    for what in both:
        command, *given = what.split(f"{program()} ")[1].rstrip(")").split()
        values = flags.FlagValues()
        importlib.import_module(f"mlcn_jax.{front.COMMANDS[command][0]}").define(values)
        assert all(flag.lstrip("-").split("=")[0] in values for flag in given), what
    assert both.popitem()[1] == splits.predict_apart(apart, 100, [profile] * 2, fast), "which sends nothing"
    assert list(plan.faster_otherwise(apart, 100, [profile] * 2, slow, 0.5, seconds)) == [rounds], "clipping couples"
    free = dataclasses.replace(profile, crowding=0.0)
    fastest = chosen(EQUAL, free, simulate.Link(0.0, math.inf)).step.total_seconds
    assert plan.faster_otherwise(EQUAL, 100, [free] * 2, fast, 0.0, fastest) == {}, "over a link that costs nothing"
    (left,) = plan.faster_otherwise(apart, 100, [profile] * 2, slow, 0.0, seconds, rounds=False)
    assert left.startswith("lanes apart")


@pytest.mark.parametrize("changes", [{}, {"train.lookahead": 0.5}, {"train.teacher": "runs/large"}])
def test_rounds_that_would_be_refused_are_not_recommended(tiny, monkeypatch, changes):
    given = {}

    def make_plan(*args, **how):
        given.update(how)
        return plan.Plan()

    monkeypatch.setattr(session, "make_plan", make_plan)
    session.plan_of(tiny.replace(changes), EQUAL)
    assert given["rounds"] == (not changes)


def test_a_run_of_processes_measures_its_links_and_takes_the_fastest(profile, tmp_path, monkeypatch, caplog):
    """Over a link that is slow, each process computes by itself, and the log says what else would be faster."""
    monkeypatch.setattr(plan.jax, "process_count", lambda: 2)
    two = [types.SimpleNamespace(process_index=i, platform="cpu", device_kind="cpu", id=i) for i in range(2)]
    monkeypatch.setattr(plan.jax, "devices", lambda: two)
    monkeypatch.setattr(plan, "_profiles", lambda files, devices: [profile] * 2)
    monkeypatch.setattr(links.processes, "everywhere", lambda function: [function()] * 2)
    measured = []

    def measure(pair):
        measured.append(pair)
        return simulate.Link(5.0, 1.25e6)

    monkeypatch.setattr(links, "measure", measure)
    monkeypatch.setattr(links.processes, "in_first", lambda function: function())
    with caplog.at_level("INFO", logger="mlcn_jax"):
        found = plan.make_plan(EQUAL, 100, kind="auto", kept=tmp_path)
    monkeypatch.setattr(plan, "candidates", None)
    assert plan.make_plan(EQUAL, 100, kind="auto", kept=tmp_path) == found
    assert measured == [two], "the second run takes what was kept"
    assert found.about["in each process"]
    assert found.in_each_process
    assert (found.mesh, found.head) == (None, None)
    assert found.about["measured_links"] == {"process 1": {"latency_seconds": 5.0, "bytes_per_second": 1.25e6}}
    line = next(record.getMessage() for record in caplog.records if "parallel.plan=auto" in record.getMessage())
    assert "each process by itself" in line
    assert "faster, but trained in another way: rounds of 50 steps (train.rounds.steps, " in line


@pytest.mark.parametrize(
    ("changes", "parts"),
    [({}, 2), ({"lanes": "resnet:w1*4", "norm_group": 50, "ensemble_weight": 0.5}, 1)],
)
def test_stacks_that_would_be_refused_are_no_candidates(changes, parts):
    spec = dataclasses.replace(EQUAL, **changes)
    both = [dataclasses.replace(make_profile("resnet" if changes else "mlcn1"), link=LINK)] * 2
    found = splits.candidates(spec, 100, both, ["greedy"], 2, messages=splits.Messages(parts=parts))
    assert len(found) > 1
    assert all(candidate.placement is None for candidate in found)
    assert any(candidate.placement for candidate in splits.candidates(EQUAL, 100, [make_profile()] * 2, ["greedy"], 2))


def test_a_plan_is_kept_however_fast_the_links_are_now(tmp_path):
    asked, path = {"batch_size": 100, "links": {"process 1": {"latency_seconds": 1e-4}}}, tmp_path / "plan.json"
    path.write_text(json.dumps({"asked": asked, "choice": {"lane": 2}}))
    assert [plan._chosen_before(path, asked | new) for new in ({"links": {}}, {"batch_size": 5})] == [{"lane": 2}, None]
    for other in ("{}", "[]", "{", '{"asked": [7]}'):
        path.write_text(other)
        assert plan._chosen_before(path, asked) is None


def test_what_was_kept_and_cannot_be_read_is_not_taken_for_damage(tmp_path):
    """Else a fault of the disk would replace a plan, links and speeds that a resumed run must have again."""
    for name, read in (
        ("plan.json", lambda path: plan._chosen_before(path, {"links": {}})),
        ("links.json", lambda path: links._stored(path, ["a"])),
        ("speeds.json", lambda path: speeds._stored(path, {"lanes": []})),
    ):
        (tmp_path / name).mkdir()
        with pytest.raises(InputError, match=r"cannot be read \(Is a directory\)"):
            read(tmp_path / name)
        (tmp_path / name).rmdir()
        (tmp_path / name).write_text("{")
        assert read(tmp_path / name) is None
