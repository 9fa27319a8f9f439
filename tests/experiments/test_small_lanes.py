"""Distilled lanes, lanes in 8 bits, forms and places: what is compared and told."""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from absl import flags
from made_records import PLACE, made_request

from experiments import REPOSITORY, distilled_lanes, export_times, forms_and_places, small_lanes
from mlcn_jax.errors import InputError
from mlcn_jax.files import write_json
from mlcn_jax.placement.cost import forward_flops
from mlcn_jax.placement.forms import FormPlacement
from mlcn_jax.placement.profile import FORM_BATCH
from mlcn_jax.serving.parts import ONNX

sys.path.append(str(REPOSITORY / "docs"))

import tables

DIRECTORIES = {"cifar10": "", "fashion_mnist": ""}
KINDS = (distilled_lanes.TEACHER, distilled_lanes.PLAIN)
TEACHERS = {(name, kind): Path(name) / kind for name in distilled_lanes.TEACHERS for kind in KINDS}


def configured(case, way, trial=False, scale="full"):
    return distilled_lanes.configure_run(DIRECTORIES, TEACHERS, distilled_lanes.SCALES[scale], trial, case, way, 1)


@pytest.mark.parametrize("case", distilled_lanes.CASES)
def test_students_have_a_tenth_of_the_flops_and_differ_in_the_teacher_only(case):
    given = distilled_lanes.CASES[case]
    shape = (28, 28, 1) if given.data == "fashion_mnist" else (32, 32, 3)
    labels, distilled, teacher = (
        configured(case, "labels"),
        configured(case, "w0.9t4"),
        configured(given.teacher, "teacher"),
    )
    assert distilled.train.teacher == str(TEACHERS[given.teacher, "teacher"])
    assert labels == distilled.replace({"train.teacher": ""})
    assert labels.train.num_epochs == teacher.train.num_epochs
    small, large = (forward_flops(config.model_spec(shape, 10)) for config in (labels, teacher))
    assert small <= 0.1 * large


def test_a_setting_may_ask_for_a_teacher_without_label_smoothing():
    plain, teacher = (configured("cifar10", way, trial=True) for way in ("plain_teacher", "teacher"))
    assert plain == teacher.replace({"model.label_smoothing": 0.0}) != teacher
    student = configured("cifar", "w0.9t4plain")
    assert student.train.teacher == str(TEACHERS["cifar10", "plain_teacher"])
    assert student == configured("cifar", "w0.9t4").replace({"train.teacher": student.train.teacher})


def distilled_record(case, way, seed, accuracy):
    facts = {"case": case, "way": way, "seed": seed}
    about = {"accuracy": accuracy, "flops": 10.0 if way.endswith("teacher") else 1.0, "lanes": "x", "epochs": 3}
    return {"facts": facts, "train_seconds": 1.0, "split": "test", **about}


def distilled_records():
    records = [distilled_record("cifar10", "teacher", 0, 94.0)]
    records += [distilled_record("cifar", "labels", seed, 90.0 + seed) for seed in range(3)]
    return records + [distilled_record("cifar", "w0.9t4", seed, 91.5 + seed) for seed in range(3)]


def test_the_share_of_the_gap_is_that_of_the_means():
    records = distilled_records()
    (row,) = distilled_lanes.summarise(records, {})
    assert row["gap"] == pytest.approx(3.0)
    assert row["recovered"] == pytest.approx(0.5)
    assert "| 50 | reached |" in distilled_lanes.text(records, {})
    records[0]["accuracy"] = 95.0
    assert "| 38 | below |" in distilled_lanes.text(records, {})
    records[0]["accuracy"] = 92.0
    assert "| small gap |" in distilled_lanes.text(records, {})


def test_nothing_is_judged_where_a_condition_of_the_target_is_not_met():
    records = distilled_records()

    def found(records, **given):
        (row,) = distilled_lanes.summarise(records, given)
        return row["verdict"]

    assert found(records) == "reached"
    assert found(records[:-1]) == "2 of 3 seeds"
    given = {"accuracy": 94.0, "lanes": "y", "flops": 10.0, "epochs": 3}
    assert found(records, cifar10=given) == "reached"
    assert found(records, cifar10=given | {"epochs": 200}) == "unequal epochs"
    assert found(records, cifar10=given | {"flops": 9.0}) == "too many FLOPs"


def test_the_gap_is_that_to_the_teacher_that_was_learned_from():
    records = [*distilled_records(), distilled_record("cifar10", "plain_teacher", 0, 93.0)]
    records += [distilled_record("cifar", "w0.9t4plain", seed, 92.0 + seed) for seed in range(3)]
    gaps = {row["setting"]: row["gap"] for row in distilled_lanes.summarise(records, {})}
    assert gaps == {"w0.9t4": pytest.approx(3.0), "w0.9t4plain": pytest.approx(2.0)}


def small_record(seed, milliseconds=(4.0, 2.0, 3.0, 1.0), after=0.899, device="machine", vnni=True):
    operators = {"milliseconds": 2.0, "share": {"Conv": 0.75, "rest": 0.25}}
    return PLACE | {
        "device": device,
        "facts": {"row": "cifar_resnet", "seed": seed, "vnni": vnni},
        "times": {
            "milliseconds": dict(zip(export_times.WAYS, milliseconds, strict=True)),
            "operators": {"float32": operators, "int8": operators},
        },
        "precision": {
            "test_accuracy": {"before": 0.9, "chosen": after},
            "bytes": {"before": 500, "chosen": 100},
            "lanes": [{"forms": [form("float32", "xla", 250), form("float32", ONNX, 200), form("int8", ONNX, 50)]}] * 2,
            "terms": {"batch": 64},
        },
    }


def form(precision, runtime, num_bytes):
    return {"precision": precision, "runtime": runtime, "bytes": num_bytes}


def test_int8_is_compared_with_the_fastest_float32_of_whole_models():
    records = [small_record(seed) for seed in range(3)]
    (row,) = small_lanes.summarise(records)
    assert row["faster"] == 2.0
    assert (row["smaller"], row["smaller_than_export"]) == (4.0, 5.0)
    assert row["points"] == pytest.approx(-0.1)
    assert row["verdicts"] == dict.fromkeys(small_lanes.TARGETS, "reached")
    assert "(Conv 75 %, rest 25 %)" in small_lanes.operators_told(row)
    for record in records:
        record["precision"]["lanes"][0]["forms"][2]["bytes"] = 100
    assert "2.00 below" in small_lanes.text(records)


def test_nothing_is_judged_from_fewer_than_three_seeds_or_without_vnni():
    (row,) = small_lanes.summarise([small_record(0), small_record(1)])
    assert set(row["verdicts"].values()) == {"2 of 3 seeds"}
    (row,) = small_lanes.summarise([small_record(seed, vnni=False) for seed in range(3)])
    assert row["verdicts"] == {"smaller": "reached", "points": "reached", "faster": "without VNNI"}


def test_times_of_two_machines_are_not_averaged():
    records = [small_record(0), small_record(1), small_record(2, (40.0, 30.0, 20.0, 20.0), 0.893, "slow one")]
    fast, slow = small_lanes.summarise(records)
    assert (fast["faster"], slow["faster"]) == (2.0, 1.0)
    assert "slow one" in slow["machine"]
    assert fast["points"] == slow["points"] == pytest.approx(-0.3), "of all machines, which have no part in it"
    assert (fast["least_points"], fast["most_points"]) == (pytest.approx(-0.7), pytest.approx(-0.1))
    assert fast["verdicts"] == {"smaller": "reached", "points": "below", "faster": "2 of 3 seeds"}


@pytest.mark.parametrize("device", ["machine", "old"])
def test_lanes_that_are_quantised_in_another_way_are_no_more_seeds(device):
    """As on a CPU without VNNI instructions, whose sums of bytes would saturate, and which may have the same name."""
    fast, slow = small_lanes.summarise([small_record(0), small_record(1), small_record(2, device=device, vnni=False)])
    assert fast["verdicts"]["points"] == "2 of 3 seeds"
    assert slow["verdicts"]["points"] == "1 of 3 seeds"


def test_kernels_are_counted_without_the_run_that_warms_up():
    def event(name, ts, dur, **more):
        return {"cat": more.pop("cat", "Node"), "name": name, "ts": ts, "dur": dur, "args": more}

    events = [event("model_run", ts, 500, cat="Session") for ts in (0, 100, 200)]
    events += [event("a_kernel_time", ts + 1, dur, op_name="Conv") for ts, dur in ((0, 900), (100, 20), (200, 40))]
    events += [event("b_kernel_time", 101, 10, op_name="Conv"), event("c_kernel_time", 202, 10, op_name="Add")]
    events += [event("a_fence_before", 101, 999, op_name="Conv")]
    found = export_times.kernel_milliseconds(events)
    assert found == pytest.approx({"Conv": 0.035, "Add": 0.005})
    assert export_times.shares(found | {"Mul": 1e-5}) == {"Conv": 0.875, "Add": 0.125, "rest": 0.0}


def test_what_is_compared_is_in_int8(tmp_path, monkeypatch):
    done = SimpleNamespace(returncode=0, stdout='a table\n{"milliseconds": {}}\n')
    monkeypatch.setattr(small_lanes.export, "export", lambda folder: folder)
    monkeypatch.setattr(small_lanes.subprocess, "run", lambda *args, **options: done)
    (tmp_path / "precision").mkdir()
    about = dict.fromkeys(("test_accuracy", "bytes", "milliseconds", "packages")) | {"terms": {"batch": 64}}
    for chosen in ("int8 onnxruntime", "bfloat16 xla"):
        lanes = [{"chosen": "int8 onnxruntime"}, {"chosen": chosen}]
        write_json(tmp_path / "precision" / "precision.json", about | {"lanes": lanes})
        if chosen.startswith("int8"):
            found = small_lanes.measure("python", 1, False, tmp_path, {})
            assert "busy_cores" in found
            assert found["times"] == {"milliseconds": {}}
        else:
            with pytest.raises(InputError, match="lanes are smaller in bfloat16 xla than in int8"):
                small_lanes.measure("python", 1, False, tmp_path, {})


def test_a_python_that_is_missing_is_one_error(tmp_path):
    options = {"rows": ["cifar_resnet"], "rounds": 1}
    with pytest.raises(InputError, match="`make precision` makes"):
        small_lanes.run(made_request(tmp_path, DIRECTORIES), onnx_python=str(tmp_path / "none"), **options)


def test_together_is_never_slower_on_simulated_devices(monkeypatch):
    monkeypatch.setattr(forms_and_places, "_SIMULATED", 5)
    found = forms_and_places.simulate()
    assert found["proven_optimal"] == 5
    exact = found["simulated"]["exact"]
    for way in ("forms first", "devices first", "the better of both"):
        assert exact[way]["min"] > 0.9999
    assert exact["the better of both"]["median"] <= exact["forms first"]["median"]


def test_lanes_are_given_to_real_devices_as_they_were_placed():
    cpu = {"infer int8 onnxruntime": {"a": 1.0, "b": 3.0}, "train float32 native": {"a": 9.0, "b": 9.0}}
    old = {"infer float32 native": {"a": 2.0, "b": 2.0}}
    problem = forms_and_places.problem_of([cpu, old], ["a", "b", "b"], "infer")
    assert problem.forms == ["infer float32 native", "infer int8 onnxruntime"]
    assert problem.seconds[0] == [[math.inf, 128.0], [64.0, math.inf]]
    assert forms_and_places.problem_of([cpu], ["a"], "train").seconds == [[[9.0 * FORM_BATCH]]]
    placed = FormPlacement((1, 0, 0), (0, 1, 1), (64.0, 256.0), 0.0)
    assert forms_and_places.given_to(placed, ["a", "b", "b"], problem.forms) == [
        [["a", "infer int8 onnxruntime"]],
        [["b", "infer float32 native"], ["b", "infer float32 native"]],
    ]


def test_a_measured_makespan_is_that_of_the_slower_device_in_each_turn(monkeypatch):
    turns = [[1.0, 4.0], [5.0, 2.0], [3.0, 3.0]]
    found = forms_and_places.measured(turns, [[2.0, 1.0], [2.0, 5.0], [6.0, 1.0]])
    assert (found["measured_seconds"], found["of_each"]) == (4.0, [3.0, 3.0])
    assert found["over_together"] == {"median": 1.0, "min": 0.5, "max": 2.0}
    monkeypatch.setattr(forms_and_places, "_TURN_SECONDS", 0.0)
    ran = []
    assert forms_and_places.turn_seconds([lambda: ran.append(1), lambda: ran.append(2)]) > 0
    assert ran == [1, 2]
    assert forms_and_places.turn_seconds([]) == 0


def test_both_ways_of_choosing_take_turns_in_the_same_processes(tmp_path, monkeypatch):
    """With made-up processes: what is asked of them, and in which order."""
    seconds = {"a": 1e-3, "b": 2e-3}
    forms = ("train float32 native", "infer float32 native")
    asked = []

    def answers(workers, line):
        asked.append((len(workers), line))
        return [dict.fromkeys(forms, seconds)] if line == "all" else [1.0 + len(asked), 1.0]

    python = tmp_path / "python"
    python.touch()
    monkeypatch.setattr(forms_and_places, "busy_cores", lambda must_be_quiet=True: 0.1)
    monkeypatch.setattr(forms_and_places.os, "sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setattr(forms_and_places, "_names", lambda entry: [entry])
    monkeypatch.setattr(forms_and_places, "_start", lambda *given: given)
    for name in ("_wait_for", "_end"):
        monkeypatch.setattr(forms_and_places, name, lambda workers: None)
    monkeypatch.setattr(forms_and_places, "_answers", answers)
    found = forms_and_places.on_real_devices(str(python), "a,b", "fashion_mnist", 2)
    ways = list(forms_and_places.WAYS)
    one, both = ways[0], ways[-1]
    assert asked[:2] == [(1, "all")] * 2
    assert [line for _, line in asked[2:]] == [*ways[::-1], *ways] * 2
    assert sorted(found["train"][both]["given"]) == [[["a", forms[0]]], [["b", forms[0]]]]
    assert found["infer"][one]["predicted_seconds"] == pytest.approx(64 * 2e-3)


def test_a_teacher_is_trained_again_for_students_that_are_missing_only():
    ways = (("cifar10", "teacher"), ("cifar", "labels"), ("cifar", "w0.9t4"), ("fashion_mnist", "teacher"))
    runs = [{"case": case, "way": way, "seed": 0} for case, way in ways]

    def needed(ended):
        series = SimpleNamespace(records=lambda: [{"facts": facts} for facts in ended])
        return distilled_lanes.teachers_needed(series, runs)

    assert needed([*runs[:2], runs[3]]) == runs[:1]
    assert needed([runs[0], runs[2], runs[3]]) == []
    runs += [{"case": c, "way": way, "seed": 0} for c, way in (("cifar10", "plain_teacher"), ("cifar", "w0.9t4plain"))]
    assert needed(runs[:4]) == [runs[4]]


def test_trials_leave_the_test_set_alone():
    for way in ("labels", "w0.5t1"):
        config = configured("cifar", way, trial=True)
        assert not config.train.score_test
        assert config.data.validation_fraction == 0.2
    assert (config.train.teacher_weight, config.train.teacher_temperature) == (0.5, 1.0)
    with pytest.raises(InputError, match="is not written as w0"):
        configured("cifar", "distilled")


@pytest.mark.parametrize(("scale", "images"), [("few", 5_000), ("fewer", 2_500)])
def test_with_few_images_others_are_held_out_and_the_test_set_is_scored(scale, images):
    for name in distilled_lanes.TEACHERS:
        config = configured(name, "plain_teacher", scale=scale)
        assert config.train.score_test
        left = distilled_lanes.SCALES[scale].num_train * (1 - config.data.validation_fraction)
        assert left == pytest.approx(images)
        assert not configured(name, "teacher", trial=True, scale=scale).train.score_test


def test_trials_take_no_teacher_that_may_have_learned_what_is_held_out(tmp_path):
    options = {"cases": ["cifar"], "settings": ["w0.9t4"]}
    teachers = {"cifar10": "mine", "fashion_mnist": ""}
    with pytest.raises(InputError, match="--trial holds training images out, which the teacher in mine may"):
        distilled_lanes.run(made_request(tmp_path, DIRECTORIES), trial=True, teachers=teachers, **options)
    options["settings"] = ["w0.9t4plain"]
    with pytest.raises(InputError, match=r"mine is a teacher as it is: give w0\.9t4, or no teacher"):
        distilled_lanes.run(made_request(tmp_path, DIRECTORIES), trial=False, teachers=teachers, **options)


def test_every_case_is_run_by_default():
    values = flags.FlagValues()
    distilled_lanes.define(values)
    assert values["cases"].default == list(distilled_lanes.CASES)


@pytest.mark.parametrize(("trial", "name"), [(True, "distilled_lanes_trial"), (False, "distilled_lanes")])
def test_trials_are_reported_under_a_name_of_their_own_from_the_first_run_on(trial, name, tmp_path, monkeypatch):
    names = []
    monkeypatch.setattr(distilled_lanes, "carry_out", lambda series, runs, text, report, again: report(series))
    monkeypatch.setattr(distilled_lanes, "write", lambda series, name, *rest: names.append(name))
    options = {"cases": ["cifar"], "settings": ["w0.9t4"]}
    teachers = {"cifar10": "", "fashion_mnist": ""}
    distilled_lanes.run(made_request(tmp_path, DIRECTORIES), trial=trial, teachers=teachers, **options)
    assert names == [name]


def test_there_are_tables_for_the_docs_once_there_are_results(monkeypatch):
    """The functions of docs/tables take what the experiments write."""
    monkeypatch.setattr(forms_and_places, "_SIMULATED", 2)
    data = {"name": "cifar10", "copy": "", "bytes": "official"}
    more = PLACE | {"data": data, "command": "python -m x", "date": "2026-01-01"}
    small = [more | record for record in (small_record(0), small_record(1), small_record(2, device="other"))]
    taught = [record | more for record in distilled_records()]
    one = {"predicted_seconds": 0.01, "measured_seconds": 0.02}
    one["over_together"] = {"median": 1.0, "min": 0.9, "max": 1.1}
    real = {task: dict.fromkeys(forms_and_places.WAYS, one) for task in ("train", "infer")}
    results = {
        "small_lanes_full": {"rows": small_lanes.summarise(small), "runs": small},
        "distilled_lanes_full": {"rows": distilled_lanes.summarise(taught, {}), "runs": taught},
        "forms_and_places": PLACE
        | {
            **forms_and_places.simulate(),
            "real": {"tables": [], "busy_cores": [0.0, 0.1], **real},
            "lanes": ["mlcn2:w4*2"],
            "rounds": 5,
        },
    }
    monkeypatch.setattr(tables.small, "experiment", results.__getitem__)
    assert (
        "| CIFAR-10, resnet | machine, 2 cores (jax 1, python 3), with VNNI | 2 | 4.00, reached |"
        in tables.small.small_lanes()
    )
    assert tables.small.small_lanes().count("| 5.00 | 90.00 | 89.90 | -0.10 (-0.10 to -0.10), reached |") == 2
    assert (
        "| CIFAR-10, resnet | machine, 2 cores (jax 1, python 3), with VNNI | int8 | 2.00 | Conv 75 %, rest 25 % |"
        in tables.small.small_lanes()
    )
    assert "| 91.00 (90.00 to 92.00) | 92.50 (91.50 to 93.50) | 3.00 | 50 | reached |" in tables.small.distilled_lanes()
    assert "| infer | together | 10.0 | 20.0 | 1.00 (0.90 to 1.10) |" in tables.small.forms_and_places()


def test_one_case_goes_on_beside_the_results_of_another(tmp_path, monkeypatch):
    """Records of cases and settings that this call does not name have their teachers, too."""
    made = []

    def carry_out(series, *rest, **more):
        made.append([series._config({"case": case, "way": way, "seed": 0}).train.teacher for case, way in others])
        return 0

    others = (("fashion", "w0.9t4"), ("cifar", "w0.5t1plain"))
    monkeypatch.setattr(distilled_lanes, "carry_out", carry_out)
    monkeypatch.setattr(distilled_lanes, "teachers_needed", lambda series, runs: [])
    options = {"cases": ["cifar"], "settings": ["w0.9t4"]}
    teachers = {"cifar10": "", "fashion_mnist": ""}
    distilled_lanes.run(made_request(tmp_path, DIRECTORIES), trial=False, teachers=teachers, **options)
    folder = tmp_path / "runs"
    assert made == [[str(folder / "fashion_mnist/teacher/seed0"), str(folder / "cifar10/plain_teacher/seed0")]]


def test_trials_are_compared_after_their_last_step(tmp_path, monkeypatch):
    """Not after the best one, which the scored images would have chosen."""
    rows = [{"step": 1, "split": "validation", "accuracy": 0.9}, {"step": 2, "split": "validation", "accuracy": 0.8}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = configured("cifar", "labels", trial=True)
    spec = config.model_spec((32, 32, 3), 10)
    monkeypatch.setattr(distilled_lanes, "read_stored", lambda folder: config)
    monkeypatch.setattr(distilled_lanes, "load_trained", lambda folder: SimpleNamespace(spec=spec))
    summary = {"steps": 2, "images_per_second": 100.0, "validation_accuracy": 0.9}
    assert distilled_lanes.measure(tmp_path, summary)["accuracy"] == pytest.approx(80)
