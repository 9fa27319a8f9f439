"""Forms and devices chosen at once: against brute force, and against one after the other, in both orders."""

import dataclasses
import importlib.util
import itertools
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

from mlcn_jax.analysis import measure_forms
from mlcn_jax.analysis.place_forms import place_training
from mlcn_jax.commands import front
from mlcn_jax.errors import InputError
from mlcn_jax.nn.lanes import LaneSpec
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.placement.cost import lane_cost
from mlcn_jax.placement.forms import (
    FormProblem,
    form_problem,
    place_devices_first,
    place_forms_first,
    place_together,
    training_bytes,
)
from mlcn_jax.placement.partition import PARTITIONERS
from mlcn_jax.placement.problem import NoRoom
from mlcn_jax.placement.profile import FORM_BATCH, DeviceProfile
from tests.made_profile import make_profile

FORMS = ("float32", "bfloat16", "int8")


def random_problem(seed, lanes=4, devices=2):
    """Each device has a form that it is good at; smaller forms lose more and need less memory."""
    rng = np.random.default_rng(seed)
    seconds = rng.uniform(1, 4, (lanes, 1, 1)) * rng.uniform(0.5, 2, (1, len(FORMS), devices))
    seconds[:, 2, 0] = math.inf if seed % 3 == 0 else seconds[:, 2, 0]
    memory = np.ones((lanes, 1)) * np.array([[4.0, 2.0, 1.0]])
    losses = rng.uniform(0, 1, (lanes, 1)) * np.array([[0.0, 0.2, 1.0]])
    return FormProblem(
        seconds.tolist(),
        FORMS,
        memory.tolist(),
        [9.0, 12.0],
        [0.5, 0.0],
        losses.tolist(),
        most_lost=0.6,
    )


def test_without_time_for_the_best_the_exact_way_still_finds_one():
    pytest.importorskip("ortools")
    problem = random_problem(1, lanes=40)
    problem = dataclasses.replace(problem, limit_bytes=[90.0, 120.0], most_lost=6.0)
    assert place_together("exact", problem, time_limit_seconds=1e-6).lost <= 6.0
    with pytest.raises(NoRoom, match=r"no placement was found in 1e-06 s, and greedy finds none: use fewer lanes"):
        place_together("exact", dataclasses.replace(problem, limit_bytes=[25.0, 25.0]), time_limit_seconds=1e-6)


def brute_force(problem):
    lanes, devices = len(problem.seconds), problem.num_devices
    best = math.inf
    for choice in itertools.product(itertools.product(range(len(FORMS)), range(devices)), repeat=lanes):
        loads, held = list(problem.base_seconds), [0.0] * devices
        for lane, (form, device) in enumerate(choice):
            loads[device] += problem.seconds[lane][form][device]
            held[device] += problem.memory_bytes[lane][form]
        lost = sum(problem.losses[lane][form] for lane, (form, _) in enumerate(choice))
        if lost <= problem.most_lost and all(h <= m for h, m in zip(held, problem.limit_bytes, strict=True)):
            best = min(best, max(loads))
    return best


@pytest.mark.parametrize("seed", range(8))
def test_exact_equals_brute_force_and_nothing_beats_it(seed):
    problem = random_problem(seed)
    best = brute_force(problem)
    exact = place_together("exact", problem)
    assert exact.optimal
    assert exact.lost <= problem.most_lost
    assert exact.makespan_seconds == pytest.approx(best, rel=1e-4)
    for name in PARTITIONERS:
        for place in (place_together, place_forms_first, place_devices_first):
            try:
                found = place(name, problem)
            except NoRoom:  # heuristics may miss a placement that fits
                continue
            assert found.lost <= problem.most_lost
            for device, room in enumerate(problem.limit_bytes):
                here = [i for i, d in enumerate(found.device_of) if d == device]
                assert sum(problem.memory_bytes[i][found.form_of[i]] for i in here) <= room
            assert found.makespan_seconds >= best * (1 - 1e-9)


def test_together_is_faster_than_one_after_the_other_where_devices_prefer_other_forms():
    """The CPU is fast in int8, the GPU in bfloat16: one form for all is right on one device only."""
    lane = [[4.0, 4.0], [6.0, 1.0], [1.0, 5.0]]
    problem = FormProblem([lane] * 4, FORMS)
    together, after = (place("exact", problem) for place in (place_together, place_forms_first))
    assert together.makespan_seconds == pytest.approx(2.0)
    assert after.makespan_seconds > 1.5 * together.makespan_seconds
    assert {(FORMS[f], d) for f, d in zip(together.form_of, together.device_of, strict=True)} == {
        ("bfloat16", 1),
        ("int8", 0),
    }


@pytest.mark.parametrize(
    ("lanes", "room", "seconds"),
    [
        (1, 100.0, 2.0),  # the faster form fits no device
        (2, 140.0, 4.0),  # it fits, but not twice
    ],
)
def test_without_or_tools_lanes_take_smaller_forms_where_faster_ones_do_not_fit(lanes, room, seconds):
    memory = [[130.0 if lanes == 2 else 150.0, 60.0]] * lanes
    problem = FormProblem([[[1.0], [2.0]]] * lanes, ["fast", "small"], memory, [room])
    placed = place_together("greedy", problem)
    assert placed.form_of == (1,) * lanes
    assert placed.makespan_seconds == seconds
    with pytest.raises(NoRoom):
        place_together("greedy", FormProblem([[[1.0], [2.0]]], ["fast", "small"], [[150.0, 101.0]], [100.0]))


def test_devices_first_uses_forms_that_one_device_lacks():
    """The first device is fast in int8, which the second cannot do, but was given half of the lanes before."""
    lane = [[4.0, 4.0], [math.inf, math.inf], [1.0, math.inf]]
    problem = FormProblem([lane] * 4, FORMS)
    forms_first, devices_first, together = (
        place("exact", problem).makespan_seconds for place in (place_forms_first, place_devices_first, place_together)
    )
    assert (forms_first, devices_first, together) == pytest.approx((8.0, 8.0, 4.0))
    memory = [[1.0, 1.0, 3.0]] * 4
    limited = FormProblem([lane] * 4, FORMS, memory, [4.0, 4.0])
    placed = place_devices_first("exact", limited)
    assert sorted(placed.form_of) == [0, 0, 0, 2], "a second lane in int8 has no room"


def test_a_device_that_cannot_run_a_lane_does_not_hide_how_fast_the_others_are():
    seconds = [[1.0, 1.07, math.inf]] * 7 + [[1.1, 1.13, 1.2]]
    problem = FormProblem([[row] for row in seconds], ["a"])
    best = place_together("exact", problem).makespan_seconds
    for place in (place_forms_first, place_devices_first):
        assert place("exact", problem).makespan_seconds == pytest.approx(best, rel=1e-5)


@pytest.mark.parametrize("name", sorted(set(PARTITIONERS) - {"random"}))
def test_no_lane_is_placed_where_it_cannot_run(name):
    """The first device runs both lanes, and has memory for one."""
    problem = FormProblem([[[1.0, math.inf]], [[1.0, math.inf]]], ["a"], [[5.0], [5.0]], [5.0, 5.0])
    with pytest.raises(NoRoom):
        place_together(name, problem)


def test_a_loss_that_is_too_large_keeps_lanes_as_they_are():
    lane = [[4.0, 4.0], [2.0, 2.0], [1.0, 1.0]]
    losses = [[0.0, 0.1, 1.0]] * 2
    for name in ("exact", "greedy"):
        found = place_together(name, FormProblem([lane] * 2, FORMS, losses=losses, most_lost=0.25))
        assert found.form_of == (1, 1)
        assert found.device_of[0] != found.device_of[1]
    with pytest.raises(NoRoom, match="loses at most 0: allow more"):
        place_together("exact", FormProblem([lane], FORMS, losses=[[0.1, 0.1, 1.0]], most_lost=0.0))
    with pytest.raises(NoRoom, match=r"lose at least 0\.1"):
        place_together("greedy", FormProblem([lane], FORMS, losses=[[0.1, 0.1, 1.0]], most_lost=0.0))


def test_a_loss_that_a_partitioner_cannot_keep_to_is_not_called_the_least():
    """Each lane loses nothing on the device that the other one gets."""
    never = math.inf
    lanes = [[[never, 1.0], [1.0, never]], [[1.0, never], [never, 1.0]]]
    problem = FormProblem(lanes, FORMS[:2], losses=[[0.0, 0.2]] * 2, most_lost=0.3)
    assert place_together("exact", problem).lost <= 0.3
    with pytest.raises(NoRoom, match=r"round_robin found no placement .* at most 0\.3, only one .*0\.4: try exact"):
        place_together("round_robin", problem)


def test_forms_that_lose_too_much_by_themselves_change_nothing():
    lane = [[1.0], [0.5]]
    for name in ("exact", "greedy"):
        for much in (math.inf, 1e10):
            problem = FormProblem([lane] * 3, FORMS[:2], losses=[[0, 1e-3], [0, 1e-3], [0, much]], most_lost=0.0)
            assert place_together(name, problem).form_of == (0, 0, 0)
            some = dataclasses.replace(problem, most_lost=1.5e-3)
            assert place_together(name, some).lost == 1e-3 or name != "exact"
            assert place_together(name, some).lost <= 1.5e-3
        unlimited = FormProblem([lane], FORMS[:2], losses=[[0, math.inf]])
        assert place_together(name, unlimited).form_of == (1,)


@pytest.mark.parametrize(
    ("seconds", "more", "message"),
    [
        ([], {}, "nothing to place"),
        ([[[1.0], [1.0]]], {}, "seconds must hold 1 x 3 x 1 numbers"),
        ([[[1.0, 2.0]] * 3, [[1.0]] * 3], {}, "seconds must hold 2 x 3 x 2 numbers: there are 2 lanes, 3 forms and 2"),
        ([[[1.0], [1.0], [-1.0]]], {}, "above 0"),
        ([[[math.inf]] * 3], {}, "lane 0 can run on no device"),
        ([[[1.0]] * 3], {"losses": [[0.0, 0.1]]}, "losses must hold 1 x 3 numbers"),
        ([[[1.0]] * 3], {"losses": [[0.0, -0.1, 0.0]]}, "losses must be at least 0"),
        ([[[1.0, 1.0]] * 3], {"limit_bytes": [1.0]}, "limit_bytes must hold 2 numbers"),
        ([[[1.0]] * 3], {"base_seconds": [math.inf]}, "base_seconds must be finite"),
        ([[[1.0]] * 3], {"memory_bytes": [[1.0, math.inf, 1.0]]}, "memory_bytes must be finite"),
    ],
)
def test_bad_problems_are_refused(seconds, more, message):
    with pytest.raises(InputError, match=message):
        FormProblem(seconds, FORMS, **more)


LANE = LaneSpec("mlcn2", 1)
CPU = {
    "infer float32 native": {str(LANE): 2e-3},
    "infer int8 onnxruntime": {str(LANE): 1e-3},
    "train float32 native": {},
}
GPU = {"infer float32 native": {str(LANE): 5e-4}}


def test_profiles_hold_forms_and_make_a_problem():
    profile = make_profile()
    cpu, gpu = (dataclasses.replace(profile, form_seconds=seconds) for seconds in (CPU, GPU))
    assert DeviceProfile.from_dict(json.loads(json.dumps(cpu.to_dict()))).form_seconds == CPU
    problem = form_problem([cpu, gpu], [LANE, LANE], "infer", 10)
    assert problem.forms == ["infer float32 native", "infer int8 onnxruntime"]
    np.testing.assert_allclose(problem.seconds, [[[0.02, 0.005], [0.01, math.inf]]] * 2)
    with pytest.raises(InputError, match=r"has no train seconds of mlcn2:w1d1: measure it again"):
        form_problem([cpu, gpu], [LANE], "train", 10)


def test_a_profile_without_forms_is_read_as_before():
    stored = make_profile().to_dict()
    del stored["form_seconds"], stored["form_bytes"]
    found = DeviceProfile.from_dict(stored)
    assert found.form_seconds == found.form_bytes == {}


def test_what_is_measured_of_a_form_in_training_is_its_time_and_its_memory(monkeypatch):
    form, lane = "train float32 native", str(LANE)
    monkeypatch.setattr(measure_forms, "lane_programs", lambda *args: {(form, lane): SimpleNamespace(bytes=7)})
    monkeypatch.setattr(measure_forms, "typical_seconds", lambda programs, rounds: dict.fromkeys(programs, 5.0))
    seconds, num_bytes = measure_forms.measure_training(SPEC, [LANE], 1)
    assert seconds == {form: {lane: 5.0 / FORM_BATCH}}
    assert num_bytes == {form: {lane: 7}}


SPEC = ModelSpec("mlcn", (28, 28, 1), 10, f"{LANE}*4")
TRAIN = ({"float32": 4e-3, "bfloat16": 1e-3}, {"float32": 1e-3, "bfloat16": 3e-3})  # seconds an image, on two devices


def saved_profiles(folder, **num_bytes):
    """Two profiles with the seconds of `TRAIN`, and with the bytes of each precision if these are given."""
    files = []
    for number, seconds in enumerate(TRAIN):
        forms = {f"train {precision} native": {str(LANE): value} for precision, value in seconds.items()}
        sizes = {f"train {precision} native": {str(LANE): value} for precision, value in num_bytes.items()}
        files.append(folder / f"{number}.json")
        dataclasses.replace(make_profile(), form_seconds=forms, form_bytes=sizes).save(files[-1])
    return files


def test_lanes_are_placed_for_training_in_a_form_each(tmp_path, monkeypatch):
    found = place_training(SPEC, 100, saved_profiles(tmp_path))
    assert found["makespan_seconds"] == pytest.approx(0.2)
    assert found["in_one_precision_seconds"] == pytest.approx({"float32": 0.4, "bfloat16": 0.3})
    assert found["optimal"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not place_training(SPEC, 100, saved_profiles(tmp_path))["optimal"], "without OR-Tools"
    assert sorted((lane["form"], lane["device"]) for lane in found["lanes"]) == [
        *[("bfloat16 native", 0)] * 2,
        *[("float32 native", 1)] * 2,
    ]
    assert not found["memory"]
    with pytest.raises(InputError, match="CapsNet has no lanes to place"):
        place_training(ModelSpec("capsnet", (28, 28, 1), 10), 100, saved_profiles(tmp_path))


def test_memory_of_forms_limits_where_lanes_are_trained(tmp_path):
    """Of lanes in bfloat16, one fits a device."""
    files = saved_profiles(tmp_path, float32=2**26, bfloat16=2**29)
    profiles = [DeviceProfile.load(file) for file in files]
    held = lane_cost(LANE, SPEC.lane_settings, SPEC.image_shape).state_bytes
    (sizes, *_) = training_bytes(profiles, SPEC, 100)
    assert sizes == pytest.approx([held + 2 * (2**29 - held), held + 2 * (2**26 - held)])
    assert training_bytes(profiles, SPEC, 10)[0][0] == 2**29, "as many images as were measured, at least"
    found = place_training(SPEC, 100, files)
    assert found["memory"]
    assert found["makespan_seconds"] == pytest.approx(0.3)
    assert [lane["form"] for lane in found["lanes"]].count("bfloat16 native") == 1
    with pytest.raises(NoRoom):
        place_training(SPEC, 100_000, files)


def test_a_command_tells_form_and_device_of_each_lane_in_training(tmp_path, capsys):
    profiles = ",".join(map(str, saved_profiles(tmp_path)))
    front.run(["describe", "--config=quickstart", f"--config.model.lanes={LANE}*4", f"--profiles={profiles}"])
    assert len(json.loads(capsys.readouterr().out)["forms"]["lanes"]) == 4
