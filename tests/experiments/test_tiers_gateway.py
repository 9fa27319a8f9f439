"""The measurements of a gateway: quotas, lanes that tiers share, and the tables."""

import contextlib
import json
import shutil
import types

import httpx
import numpy as np
import pytest
from absl import flags
from made_tiers import policy

from experiments import tiers_gateway, tiers_shared, tiers_tables
from experiments.quota import Quota
from mlcn_jax.analysis.workdir import stored_config
from mlcn_jax.errors import InputError
from mlcn_jax.files import read_json, write_json
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.training import loop


def test_nothing_is_measured_over_a_relay_that_is_wrong(tmp_path, monkeypatch):
    def wrong():
        raise InputError("the relay is wrong")

    monkeypatch.setattr(tiers_gateway.tiers_relay, "checked", wrong)
    monkeypatch.setattr(tiers_tables, "checked", wrong)
    monkeypatch.setattr(tiers_gateway, "stored_config", lambda *given: None)
    monkeypatch.setattr(tiers_gateway, "load_with_data", lambda *given: (None, None))
    values = flags.FlagValues()
    tiers_gateway.define(values)
    values(["tiers_gateway", f"--results={tmp_path}"])
    with pytest.raises(InputError, match="the relay is wrong"):
        tiers_gateway.main(values)
    tables = object.__new__(tiers_tables.Tables)
    tables.results = {"measured": {}}
    with pytest.raises(InputError, match="the relay is wrong"):
        tables.measure()


def test_a_server_has_its_quota_before_it_times_its_lanes(monkeypatch):
    done = []
    running = types.SimpleNamespace(pid=7, kill=lambda: done.append("killed"), wait=lambda: done.append("waited"))

    @contextlib.contextmanager
    def limited(pid, name, cores, on_one_core):
        done.append(("limited", pid, name, cores, on_one_core))
        yield "quota"

    monkeypatch.setattr(tiers_gateway, "start_server", lambda *_: running)
    monkeypatch.setattr(tiers_gateway, "limited", limited)
    monkeypatch.setattr(tiers_gateway, "url_of", lambda server: done.append("listens") or "http://x")
    with tiers_gateway.gateway("artifact", [], "key") as found:
        assert found == ("http://x", "quota")
    cores = tiers_gateway.CORES_OF["end"]
    assert done == [("limited", 7, "end", cores, True), "listens", "killed", "waited"]


@pytest.fixture
def parts():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, 4000)
    truth = np.eye(10)[labels]
    noise = {"end": 0.3, "edge": 0.3, "cloud": 0.2}
    made = [np.clip(truth * 0.5 + rng.normal(0.25, noise[name], truth.shape), 0, 1) for name in noise]
    return made, labels


def test_lanes_that_add_up_are_better_at_each_further_tier_than_a_model_of_its_own(parts):
    made, labels = parts
    weights = [1.0, 1.0, 1.0]
    found, least = {}, {}
    for way in tiers_shared.WAYS:
        least[way] = tiers_shared.margins(way, made, weights, labels, 0.02)
        found[way] = tiers_shared.settled(way, made, weights, least[way], labels)
        assert sum(found[way]["settled"]) == pytest.approx(1)
    shared, own = found[tiers_shared.SHARED], found[tiers_shared.OWN]
    assert shared["accuracy"][0] == own["accuracy"][0], "nothing has been added yet"
    assert shared["accuracy"][1] > own["accuracy"][1]
    assert shared["final_accuracy"] > own["final_accuracy"]
    whole = np.mean(np.argmax(sum(made), axis=1) == labels)
    assert shared["accuracy"][-1] == pytest.approx(whole)
    assert shared["final_accuracy"] >= whole - 0.02
    asked = []

    def answered(way, number):
        def ask(image):
            asked.append((way, number))
            return made[number][image[0, 0, 0]][None]

        return ask

    ways = {way: (least[way], weights) for way in tiers_shared.WAYS}
    ask = {way: [answered(way, number) for number in range(3)] for way in ways}
    images = np.arange(100, dtype=np.uint8)[:, None, None, None]
    times = tiers_shared.timed(ways, ask, images)
    for way in tiers_shared.WAYS:
        first = tiers_shared.settled(way, [part[:100] for part in made], weights, least[way], labels[:100])
        assert times[way]["settled"] == pytest.approx(first["settled"])
        assert asked.count((way, 0)) == 100
        assert 0 < asked.count((way, 2)) < 100


@pytest.fixture
def models(tmp_path, monkeypatch):
    """Workdirs with a model of its own for each tier of `policy`, and one of the model that was split."""
    lanes = {"whole": "mlcn1:w1*4", "end": "mlcn1:w1*1", "edge": "mlcn1:w1*1", "cloud": "mlcn1:w2*1"}
    lanes["two"] = "mlcn1:w1*2"
    for name in lanes:
        (tmp_path / name).mkdir()
        write_json(tmp_path / name / "model.json", {"training_images_sha256": "0"})
    specs = {name: ModelSpec("mlcn", (28, 28, 1), 3, lanes=text) for name, text in lanes.items()}
    monkeypatch.setattr(tiers_shared, "load_trained", lambda folder: types.SimpleNamespace(spec=specs[folder.name]))
    monkeypatch.setattr(tiers_shared, "lane_flops", lambda spec: [lane.width for lane in spec.lane_specs])

    def read(**given):
        text = ",".join(f"{tier}={tmp_path / name}" for tier, name in given.items())
        return tiers_shared.own_folders(text, policy(), tmp_path / "whole", specs["whole"])

    return read


def test_a_model_of_its_own_has_the_flops_of_its_tier_and_learned_from_the_same_images(models, tmp_path):
    assert models() == {}
    names = ["end", "edge", "cloud"]
    assert list(models(cloud="cloud", end="end", edge="edge").items()) == [(name, tmp_path / name) for name in names]
    with pytest.raises(InputError, match="must have a workdir for each of the tiers end, edge, cloud"):
        models(end="end")
    with pytest.raises(InputError, match=r"0\.50 times the FLOPs of the lanes of tier cloud, mlcn1:w1d1\*2: train a"):
        models(end="end", edge="edge", cloud="edge")
    with pytest.raises(InputError, match=r"two has the lanes mlcn1:w1.*\*2: train one lane"):
        models(end="end", edge="edge", cloud="two")
    write_json(tmp_path / "edge" / "model.json", {"training_images_sha256": "1"})
    with pytest.raises(InputError, match="edge learned from other images than that in"):
        models(end="end", edge="edge", cloud="cloud")


def fault():
    made = {
        "requests": 40,
        "planned_times": 40,
        "times": 30,
        "begun_unwell": 1,
        "times_met": 20,
        "exposed": 7,
        "deadline_ms": 51.5,
        "extra_ms": 50.0,
        "late": 1,
        "late_by_gateway": 0,
        "unexplained": 0,
        "unanswered": 0,
    }
    heard = {"before": {"1 lanes": 3, "2 lanes": 1}, "during": {"1 lanes": 4}, "after": {}}
    return made | {"p50_ms": 5.0, "p999_ms": 50.0, "max_ms": 60.0, "heard": heard}


def results():
    right = {"images": 8, "accuracy": 1.0, "failed": 0, "right": tiers_shared.packed(np.ones(8, bool))}
    wrong = {"images": 8, "accuracy": 0.75, "right": tiers_shared.packed(np.arange(8) > 1)}
    times = {"mean_ms": 100.0, "p95_ms": 120.0, "sent_bytes": 1000}
    names = ("end", "edge", "cloud", "end+edge", "end+cloud", "edge+cloud", "end+edge+cloud")
    way = {"accuracy": [0.5, 0.6, 0.7], "settled": [0.5, 0.3, 0.2], "final_accuracy": 0.69}
    way["right"] = right["right"]
    way["times"] = {"mean_ms": 30.0, "p95_ms": 130.0, "images": 20, "settled": [0.5, 0.3, 0.2]}
    return {
        "about": {"model": "mlcn1:w1*4", "data": "digits"},
        "device": "a CPU",
        "versions": {"jax": "0"},
        "policy": policy().to_dict(),
        "busy_cores": {"answers": [0.01, 0.02], "own models": [None, None]},
        "sessions": [
            {
                "date": "2026-01-02",
                "relay": [{"delay_ms": 5.0, "measured_ms": 5.2}, {"rate_mbit": 2.0, "measured_mbit": 1.97}],
            }
        ],
        "measured": {
            "largest error": 3e-7,
            "largest error, cut at columns": 3e-5,
            "without a tier": {"": right, "edge": right, "cloud": wrong},
            "subsets": dict(zip(names, (0.5, 0.6, 0.7, 0.65, 0.75, 0.72, 0.76), strict=True)),
            "cloud alone": right | times,
            "answers": right | times | {"settled_at_end": 0.7, "without_a_tier": 0, "end_flops_share": 0.25},
            "fault: SIGSTOP, and SIGCONT": fault(),
            "own models": dict.fromkeys(tiers_shared.WAYS, way),
        },
    }


def test_tables_tell_what_was_reached_and_what_was_not():
    made = json.loads(json.dumps(results()))
    text = tiers_gateway.report(made)
    assert "| cloud | 2 | 0.7500 | 25.00, at most 72.24 |  |  |" in text
    assert "| edge | 1 | 1.0000 | 0.00, at most 33.82 | at most 0.5 | yes |" in text
    assert "| end | 1 | " not in text, "without it there is no gateway"
    assert "| largest error | 3e-07, yes |" in text
    assert "| largest error, cut at columns | 3e-05, no |" in text
    late = "SIGCONT | 40 | 40 | 30 | 1 | 20 | 7 | 51.5 | 1 | 0 | 0 | 0 | 5 | 50 | 60 | 25.0%, 0.0%, none | no |"
    assert late in text, "1 of 40 is too many"
    assert late.replace("51.5 | 1 | 0 |", "51.5 | 0 | 0 |").replace("| no |", "| yes |") in tiers_gateway.report(
        {**made, "measured": made["measured"] | {"fault: SIGSTOP, and SIGCONT": {**fault(), "late": 0}}}
    )
    alone = {**fault(), "late": 0, "heard": {"before": {"1 lanes": 9}, "during": {"1 lanes": 4}, "after": {}}}
    assert "| 0.0%, 0.0%, none | not judged |" in tiers_gateway.report(
        {**made, "measured": made["measured"] | {"fault: SIGSTOP, and SIGCONT": alone}}
    ), "no other tier answers in time anyway"
    for few, shown in (
        ({"times_met": 14}, "not judged"),
        ({"times_filled": 14}, "not judged"),
        ({"times_filled": 15}, "yes"),
        ({"times": 9, "times_met": 9}, "not judged"),
        ({"extra_ms": 250.0}, "yes, with 250 ms"),
    ):
        assert f"| 25.0%, 0.0%, none | {shown} |" in tiers_gateway.report(
            {**made, "measured": made["measured"] | {"fault: SIGSTOP, and SIGCONT": {**fault(), "late": 0, **few}}}
        ), "a fault that came too seldom shows nothing, and the target has one deadline"
    lacking = {**made["measured"]["answers"], "without_a_tier": 1, "sent_bytes": 1}
    assert (
        "| bytes of bodies (the cloud's computed) | 1000 | 1 | 0.001 | at most 0.45 | no: answers lack tiers |"
        in tiers_gateway.report({**made, "measured": made["measured"] | {"answers": lacking}})
    )
    assert "| accuracy | 1 | 1 | lost 0.00, at most 33.82 points | lost at most 0.5 points | yes |" in text
    assert "| settled at the end |  | 0.7 |  | at least 0.6 | yes |" in text
    assert "| bytes of bodies (the cloud's computed) | 1000 | 1000 | 1.000 | at most 0.45 | no |" in text
    assert "| p95, ms | 120 | 120 | 1.000 | at most 1.2 | yes |" in text
    assert "one-sided" in text
    assert "jax 0, 2026-01-02. Times" in text
    assert "Cores that other work kept busy: 0.02 at most before or after a measurement." in text
    assert "+0.00 points more often, -33.82 to +33.82" in text
    assert "| shared lanes | edge | 0.6000 | 30.0% |" in text
    assert "| a model of its own | the final answer | 0.6900 | |" in text
    for way in tiers_shared.WAYS:
        assert f"| {way} | 30.0 | 130.0 | 20 |" in text
    assert "5 ms each way: 5.20 ms; 2 Mbit/s: 1.97 Mbit/s." in text
    del made["measured"]["own models"]
    assert "a model of its own" not in tiers_gateway.report(made), "it was not asked for"
    some = tiers_gateway.report({**made, "measured": {"subsets": made["measured"]["subsets"]}})
    assert "| end+edge | 0.6500 |" in some, "the others are still to come"


def test_a_split_of_other_tiers_is_not_taken_for_these(tmp_path, monkeypatch):
    made = []
    model, further = (types.SimpleNamespace(spec=types.SimpleNamespace(lane_specs=range(4))) for _ in range(2))

    def split(workdir, path, cut, key, data_dir, out):
        made.append(json.loads(path.read_text()))
        (workdir / out).mkdir(exist_ok=True)
        return workdir / out

    monkeypatch.setattr(tiers_gateway.split, "split", split)
    monkeypatch.setattr(tiers_gateway.split, "is_of", lambda folder, trained: trained is model)
    assert tiers_gateway.split_model(tmp_path, "", model, "") == tmp_path / "tiers-gateway"
    assert [tier["lanes"] for tier in made[0]["tiers"]] == [[0], [1], [2, 3]]
    two = {"tiers": [{"name": "end", "lanes": [0]}, {"name": "cloud", "lanes": [1, 2, 3]}]}
    (tmp_path / "two.json").write_text(json.dumps(two))
    for _ in range(2):
        assert tiers_gateway.split_model(tmp_path, str(tmp_path / "two.json"), model, "") == tmp_path / "tiers-two"
    assert len(made) == 2, "it has been split"
    tiers_gateway.split_model(tmp_path, str(tmp_path / "two.json"), further, "")
    assert len(made) == 3, "it was trained further"
    (tmp_path / "two.json").write_text(json.dumps({**two, "tolerance": 0.01}))
    with pytest.raises(SystemExit, match="is of other tiers than these"):
        tiers_gateway.split_model(tmp_path, str(tmp_path / "two.json"), model, "")
    (tmp_path / "two.json").write_text(json.dumps({"tiers": [{"name": "a"}, {"name": "b"}]}))
    with pytest.raises(SystemExit, match="give end, edge, cloud, or end, cloud"):
        tiers_gateway.split_model(tmp_path, str(tmp_path / "two.json"), model, "")


def test_the_largest_error_is_that_of_all_tiers_together(tmp_path, monkeypatch):
    images = np.arange(1200, dtype=np.uint8).reshape(-1, 1, 1, 1)
    whole = types.SimpleNamespace(lengths=lambda some: np.sqrt(np.full((len(some), 2), 0.5)))
    off = np.where(np.arange(1200) == 1100, 0.6 - 0.25, 0.25)

    class Tier:
        def __init__(self, folder):
            self.name, self.last, self.seen = folder.name, folder.name == "cloud", 0

        def home(self, name, some):
            return some

        def part(self, some):
            self.seen += len(some)
            own = off[self.seen - len(some) : self.seen] if self.last else np.full(len(some), 0.25)
            return np.stack([own, np.full(len(some), 0.25)], axis=1)

    monkeypatch.setattr(tiers_gateway, "TrainedModel", lambda folder: whole)
    monkeypatch.setattr(tiers_gateway, "TierArtifact", Tier)
    found = tiers_gateway.largest_error(tmp_path, types.SimpleNamespace(names=("end", "cloud")), tmp_path, images)
    assert found == pytest.approx(0.6**0.5 - 0.5**0.5)


def test_what_is_answered_without_a_tier_is_final_where_the_policy_says_so(monkeypatch, tmp_path):
    """Two images: of the first the end is sure, and wrong; of the second only all tiers are right."""
    sums = {"end": [[0.9, 0.0, 0], [0.5, 0.4, 0]], "edge": [[0.0, 0.9, 0], [0.1, 0.1, 0]]}
    sums["cloud"] = [[0.0, 0.9, 0], [0.0, 0.3, 0]]

    class Tier:
        def __init__(self, folder):
            self.part = lambda images: np.array(sums[folder.name])

    monkeypatch.setattr(tiers_gateway, "TierArtifact", Tier)
    made = types.SimpleNamespace(names=("end", "edge", "cloud"))
    made.is_final = lambda sums, heard: np.array([heard == ["end"], False])
    found = tiers_gateway.without_a_tier(tmp_path, made, np.zeros(2), np.array([1, 1]))
    right = {lost: tiers_shared.unpacked(one["right"], 2).tolist() for lost, one in found.items()}
    assert right == {"": [0, 1], "edge": [0, 1], "cloud": [0, 0]}


def test_a_request_that_fails_counts_as_wrong_and_does_not_end_the_measurement(monkeypatch):
    seen = []

    def handler(request):
        if request.method == "GET":
            return httpx.Response(200, json={"classes": ["a"]})
        seen.append(request)
        answer = {"predictions": [{"class": "a", "lanes": [0]}]}
        return httpx.Response(500) if len(seen) == 2 else httpx.Response(200, json=answer)

    client = httpx.Client
    monkeypatch.setattr(httpx, "Client", lambda **given: client(transport=httpx.MockTransport(handler)))
    found = tiers_gateway.send("http://x/predict", np.zeros((3, 4, 4, 1), np.uint8))
    assert [one["class"] for one in found["answers"]] == ["a", "", "a"]
    assert found["times"]["failed"] == 1


def test_the_cloud_has_the_model_as_it_is_now(tmp_path, monkeypatch):
    (tmp_path / "export").mkdir()
    exported, ended = [], []
    relay = types.SimpleNamespace(kill=lambda: ended.append("killed"), wait=lambda: ended.append("waited"))
    sent = {"answers": [{"class": "b"}, {"class": "a"}], "classes": ["a", "b"], "times": {"mean_ms": 1.0}}
    monkeypatch.setattr(tiers_gateway.export, "export", exported.append)
    monkeypatch.setattr(tiers_gateway, "process", lambda *_: contextlib.nullcontext(("http://127.0.0.1:1", None)))
    monkeypatch.setattr(tiers_gateway, "start_relay", lambda *_: (relay, 2))
    monkeypatch.setattr(tiers_gateway, "send", lambda url, images: sent)
    found = tiers_gateway.cloud_alone(tmp_path, np.zeros((2, 4, 4, 1), np.uint8), np.array([1, 1]))
    assert exported == [tmp_path]
    assert found["accuracy"] == 0.5
    assert ended == ["killed", "waited"]


@pytest.mark.long
def test_a_small_bed_compares_lanes_with_models_of_their_own(per_lane, tmp_path, monkeypatch):
    """Real nodes, links and quotas: each way's nodes answer what was computed here, and so settle the same images."""
    try:
        Quota.of("test", 0.5).remove()
    except InputError:
        pytest.skip("needs root, and cgroups to write to")
    workdir = shutil.copytree(per_lane, tmp_path / "run")
    config = stored_config(workdir, "")
    own = []
    for seed, (name, lane) in enumerate({"end": "mlcn1:w1", "edge": "mlcn1:w1", "cloud": "mlcn2:w1"}.items()):
        changes = {"model.lanes": lane, "train.seed": seed + 1, "data.split_seed": config.split_seed}
        loop.train(config.replace(changes), tmp_path / name)
        own.append(f"{name}={tmp_path / name}")
    monkeypatch.setattr(tiers_gateway.tiers_relay, "checked", list)  # its delays are not judged here
    values = flags.FlagValues()
    tiers_gateway.define(values)
    given = ("--scale=smoke", "--parts=own", f"--own_models={','.join(own)}", f"--results={tmp_path}")
    values(["tiers_gateway", f"--workdir={workdir}", *given])
    tiers_gateway.main(values)
    measured = read_json(tmp_path / "tiers_gateway_smoke.json")["measured"]
    assert measured["largest error"] < 1e-5
    count = tiers_gateway.SCALES["smoke"][-1]
    for way in tiers_shared.WAYS:
        found = measured["own models"][way]
        assert found["times"]["images"] == count
        assert sum(found["times"]["settled"]) == pytest.approx(1)
        assert len(found["margins"]) == 2
    assert "| a model of its own | cloud |" in (tmp_path / "tiers_gateway_smoke.md").read_text()
