"""A small model whose lanes classify alone, split over three tiers: what each holds, and what is refused."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from made_profile import make_profile
from made_tiers import key_files

from mlcn_jax import files, host
from mlcn_jax.config import read_stored
from mlcn_jax.errors import InputError
from mlcn_jax.files import read_json, write_json
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.placement.cost import lane_cost
from mlcn_jax.serving import artifact as artifacts
from mlcn_jax.serving.trained import TrainedModel
from mlcn_jax.tiers import artifact as tier_artifacts
from mlcn_jax.tiers import placing, signatures, split
from mlcn_jax.tiers.artifact import TierArtifact
from mlcn_jax.training.trained import load_trained


@pytest.fixture
def images(tiers):
    return np.random.default_rng(0).integers(0, 256, (5, *tiers["end"].image_shape)).astype(np.uint8)


@pytest.mark.parametrize("cut", ["pixels", "capsules"])
def test_the_sum_over_the_tiers_is_the_whole_model(per_lane, images, cut, request):
    tiers_folder = request.getfixturevalue("tiers_folder" if cut == "pixels" else "cut_folder")
    tiers = {name: TierArtifact(tiers_folder / name) for name in ("end", "edge", "cloud")}
    whole = TrainedModel(per_lane)
    rows = {name: tiers["end"].home(name, images) for name in ("edge", "cloud")} | {"end": images}
    total = sum(tier.part(rows[name]) for name, tier in tiers.items())
    np.testing.assert_allclose(np.sqrt(total), whole.lengths(images), atol=1e-5)
    policy = tiers["end"].policy
    np.testing.assert_allclose(policy.probabilities(total, policy.names), whole.probabilities(images), atol=1e-5)
    assert [tier.lanes for tier in policy.tiers] == [(1,), (0,), (2,)]
    assert all(tier.policy.digest == policy.digest for tier in tiers.values())
    if cut != "pixels":
        assert rows["edge"].shape == (5, *tiers["edge"].row_shape)
        held = artifacts.read_weights(tiers_folder / "edge" / artifacts.WEIGHTS)
        assert {name.split("/")[-1] for name in held} == {"capsule_weights", "prior_bias"}, (
            "what is at home stays there"
        )


@pytest.mark.long
def test_lanes_that_compute_in_bfloat16_add_up_as_far_as_that_goes(per_lane, images, tmp_path, monkeypatch):
    workdir = shutil.copytree(per_lane, tmp_path / "run", ignore=shutil.ignore_patterns("tiers"))
    about = read_json(workdir / "model.json")
    write_json(workdir / "model.json", about | {"spec": about["spec"] | {"compute_dtype": "bfloat16"}})
    check, allowed = split._check, []
    monkeypatch.setattr(split, "_check", lambda *given: allowed.append(given[-1]) or check(*given))
    folder = split.split(workdir, workdir / "tiers.json")
    assert 1e-3 < allowed[0] < 0.1
    total = sum(TierArtifact(folder / name).part(images) for name in ("end", "edge", "cloud"))
    np.testing.assert_allclose(np.sqrt(total), TrainedModel(workdir).lengths(images), atol=allowed[0])


def test_a_workdir_cannot_be_trained_further_while_it_is_split(per_lane, tmp_path, monkeypatch):
    def look(*given):
        with pytest.raises(InputError, match="another process is using"), files.hold(per_lane):
            pass
        raise InterruptedError

    monkeypatch.setattr(split, "read_wishes", look)
    with pytest.raises(InterruptedError):
        split.split(per_lane, per_lane / "tiers.json")
    with pytest.raises(InputError, match="none"):
        split.split(tmp_path / "none", per_lane / "tiers.json")
    assert not (tmp_path / "none").exists()


def test_a_split_is_of_the_model_with_the_parameters_it_had(per_lane, tiers_folder, tmp_path):
    trained = load_trained(per_lane)
    assert split.is_of(tiers_folder, trained)
    further = jax.tree.map(lambda array: 2 * array, trained.params)
    assert not split.is_of(tiers_folder, dataclasses.replace(trained, params=further))
    assert not split.is_of(tmp_path / "none", trained)


def test_the_manifest_has_the_command_that_splits_the_model_again(per_lane, tmp_path, monkeypatch):
    def write(*given):
        raise InterruptedError(given[6])

    monkeypatch.setattr(split, "_write", write)
    wishes, key = per_lane / "tiers.json", key_files(tmp_path, "key")[0]
    with pytest.raises(InterruptedError) as written:
        split.split(per_lane, wishes, "capsules", key, out="my tiers")
    assert str(written.value) == (
        f"mlcn_jax tiers split {per_lane} --tiers={wishes} --cut=capsules '--out=my tiers' --key={key}"
    )
    with pytest.raises(InterruptedError, match=rf"{wishes}$"):
        split.split(per_lane, wishes)


def test_an_altered_artifact_is_refused(tiers_folder, tmp_path):
    for file in ("weights.npz", "policy.json", "model.json", "part-cpu-1.jaxexport", "manifest.json"):
        copy = shutil.copytree(tiers_folder / "edge", tmp_path / file)
        content = bytearray((copy / file).read_bytes())
        content[len(content) // 2] ^= 1
        (copy / file).write_bytes(bytes(content))
        with pytest.raises(InputError, match=r"is damaged \(.* make it again: .* tiers split WORKDIR"):
            TierArtifact(copy)


@pytest.mark.parametrize("read", ["verified_manifest", "read_weights"])
@pytest.mark.parametrize(
    ("error", "expected"), [(PermissionError(13, "Permission denied"), InputError), (OSError(5, "I/O error"), OSError)]
)
def test_a_failing_disk_is_not_taken_for_a_tier_that_nobody_may_read(tiers_folder, monkeypatch, read, error, expected):
    monkeypatch.setattr(tier_artifacts, read, Mock(side_effect=error))
    with pytest.raises(expected, match="make it readable" if expected is InputError else "I/O error$"):
        TierArtifact(tiers_folder / "edge")


def test_lanes_that_are_not_the_policys_and_other_exports_are_refused(tiers_folder, exported, tmp_path):
    copy = shutil.copytree(tiers_folder / "edge", tmp_path / "edge")
    write_json(copy / "model.json", read_json(copy / "model.json") | {"lanes": [2]})
    manifest = read_json(copy / "manifest.json")
    found = (copy / "model.json").read_bytes()
    manifest["files"]["model.json"] = {"bytes": len(found), "sha256": host.sha256_of(copy / "model.json")}
    write_json(copy / "manifest.json", artifacts.signed(manifest))
    with pytest.raises(InputError, match="has the lanes 2 of tier edge, but its policy gives other lanes"):
        TierArtifact(copy)
    with pytest.raises(InputError, match="is not a tier of a split model"):
        TierArtifact(exported / "export")


def test_a_tier_that_is_replaced_while_it_is_read_is_named_as_such(tiers_folder, exported, tmp_path, monkeypatch):
    copy = shutil.copytree(tiers_folder / "edge", tmp_path / "edge")

    def replaced(*given):
        shutil.rmtree(copy)
        raise FileNotFoundError(2, "No such file", str(copy))

    monkeypatch.setattr(tier_artifacts, "load_functions", replaced)
    with pytest.raises(InputError, match="was replaced while it was read"):
        TierArtifact(copy)
    with pytest.raises(InputError, match=r"several tiers: give that of one, .*/run/tiers/"):
        TierArtifact(shutil.copytree(tiers_folder, tmp_path / "run" / "tiers").parent)
    with pytest.raises(InputError, match=r"it has no manifest.json; .*tiers split WORKDIR writes one"):
        TierArtifact(exported)


def test_a_share_that_lanes_fit_exactly_is_enough(tmp_path):
    spec = ModelSpec("mlcn", (28, 28, 1), 10, lanes="mlcn1:w1d2*10")
    fits = placing._limit(tmp_path, placing.TierWish(name="a", flops_share=0.7), spec, placing.lane_flops(spec))
    assert fits(range(7))
    assert not fits(range(8))


def resigned(folder, changes):
    """Changes the manifest of an artifact as if it had been written so."""
    manifest = read_json(folder / "manifest.json") | changes
    model = {"bytes": (folder / "model.json").stat().st_size, "sha256": host.sha256_of(folder / "model.json")}
    manifest["files"] = {**manifest["files"], "model.json": model} if "files" not in changes else changes["files"]
    write_json(folder / "manifest.json", artifacts.signed(manifest))


def test_what_a_manifest_lacks_is_damage_and_programs_that_are_not_there_are_named(tiers_folder, tmp_path):
    files = read_json(tiers_folder / "edge" / "manifest.json")["files"]
    for i, changes in enumerate(({"functions": None}, {"files": {name: {"bytes": 1} for name in files}})):
        copy = shutil.copytree(tiers_folder / "edge", tmp_path / str(i))
        resigned(copy, changes)
        with pytest.raises(InputError, match=r"is damaged \(manifest.json cannot be read"):
            TierArtifact(copy)
    copy = shutil.copytree(tiers_folder / "edge", tmp_path / "no_part")
    resigned(copy, {"functions": []})
    with pytest.raises(InputError, match="has no program of its lanes"):
        TierArtifact(copy)
    copy = shutil.copytree(tiers_folder / "end", tmp_path / "home")
    write_json(copy / "model.json", read_json(copy / "model.json") | {"home": ["cloud"]})
    resigned(copy, {})
    with pytest.raises(InputError, match="has what is computed for cloud before anything is sent, but its policy"):
        TierArtifact(copy)


def test_only_what_a_trusted_key_signed_is_taken(tiers_folder, tmp_path):
    (private, public), (_, other) = key_files(tmp_path, "mine"), key_files(tmp_path, "other")
    copy = shutil.copytree(tiers_folder / "edge", tmp_path / "edge")
    with pytest.raises(InputError, match="is not signed, but only what"):
        TierArtifact(copy, [public])
    manifest = (copy / "manifest.json").read_bytes()
    (copy / "manifest.sig").write_bytes(signatures.private_key(private).sign(manifest))
    assert TierArtifact(copy, [other, public]).name == "edge"
    with pytest.raises(InputError, match=r"is not signed by .*other"):
        TierArtifact(copy, [other])
    for wrong, said in ((private, "is not a public key"), (tmp_path / "none.pem", "is missing")):
        with pytest.raises(InputError, match=f"^{re.escape(str(wrong))} {said}"):
            TierArtifact(copy, [wrong])


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            {"lanes": "mlcn1:w1*2"},
            "do not classify alone.*margin_loss=per_lane or per_lane_sum, or lanes of the kind resnet",
        ),
        ({"lanes": "mlcn1:w1", "margin_loss": "per_lane"}, "cannot be split: train a model with 2 lanes"),
        ({"name": "capsnet"}, "CapsNet, which has no lanes"),
    ],
)
def test_models_that_cannot_be_split_are_named(model, said):
    with pytest.raises(InputError, match=said):
        split.check_lanes_classify(ModelSpec(**{"name": "mlcn", "image_shape": (28, 28, 1), "num_classes": 10} | model))
    split.check_lanes_classify(ModelSpec("mlcn", (28, 28, 1), 10, lanes="resnet:w1*2"))
    for alone in ("per_lane", "per_lane_sum"):  # the latter is that of lanes trained apart
        split.check_lanes_classify(ModelSpec("mlcn", (28, 28, 1), 10, lanes="mlcn1:w1*2", margin_loss=alone))


def test_images_that_the_model_did_not_learn_from_are_refused(per_lane, tmp_path):
    other = shutil.copytree(per_lane, tmp_path / "other")
    write_json(other / "config.json", read_stored(other).replace({"data.split_seed": 7}).to_dict())
    with pytest.raises(InputError, match=r"digits is not the data that .*other was trained on"):
        split.split(other, other / "tiers.json")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tiers": [{"name": "a", "lanes": [0]}, {"name": "b", "lanes": [0, 1]}]}, "given twice are 0"),
        ({"tiers": [{"name": "a", "lane": [0]}, {"name": "b"}]}, "unknown field `lane`"),
        ({"tiers": [{"name": "a"}, {"name": "b"}]}, "give tier a either lanes, or flops_share"),
        (
            {"tiers": [{"name": "a", "flops_share": 0.01}, {"name": "b"}]},
            "not even the smallest lane fits flops_share of tier a: raise it, or name its lanes",
        ),
        (
            {"tiers": [{"name": "a", "lanes": [0], "flops_share": 0.5}, {"name": "b"}]},
            "tier a is given its lanes: leave out its flops_share",
        ),
        (
            {"tiers": [{"name": "a", "lanes": [0]}, {"name": "b", "profile": "p.json", "max_ms": 1}]},
            "tier b is the last, which takes what is left: leave out its profile and max_ms",
        ),
        (
            {"tiers": [{"name": "a", "lanes": [0]}, {"name": "b"}], "groups": {"x": ["0"]}},
            "each class of the model once",
        ),
        ({"tiers": [{"name": "a", "lanes": [0]}, {"name": "b"}], "tolerance": 2}, "tolerance is 2"),
    ],
)
def test_tiers_that_make_no_sense_are_named(per_lane, tmp_path, given, said):
    (tmp_path / "tiers.json").write_text(json.dumps(given))
    with pytest.raises(InputError, match=said):
        split.split(per_lane, tmp_path / "tiers.json")


def test_a_file_of_tiers_with_a_slip_is_not_called_damaged(per_lane, tmp_path):
    with pytest.raises(InputError, match=r"--tiers=.*tiers\.json cannot be read \(No such file"):
        split.split(per_lane, tmp_path / "tiers.json")
    (tmp_path / "tiers.json").write_text('{"tiers": [{"name": "a", "lanes": [0]}, {"name": "b"},]}')
    with pytest.raises(InputError, match=r"tiers\.json: JSON is malformed: .* must hold a list of tiers"):
        split.split(per_lane, tmp_path / "tiers.json")


@pytest.mark.parametrize(
    ("tiers", "out", "said"),
    [
        ([{"name": "Edge", "lanes": [0]}, {"name": "b"}], "", "names with characters other than .* are Edge"),
        ([{"name": "a", "lanes": [0, 0]}, {"name": "b"}], "", "lanes given twice are 0"),
        ([{"name": "a", "lanes": [0, 1, 2]}, {"name": "b"}], "", "tiers without lanes are b"),
        ([{"name": "a", "lanes": [0]}, {"name": "b"}], "checkpoints", "exists but holds no split model"),
    ],
)
def test_mistakes_are_told_before_anything_is_computed(per_lane, tmp_path, monkeypatch, tiers, out, said):
    monkeypatch.setattr(split, "class_capsules", lambda *given: pytest.fail("it computed the lanes"))
    (tmp_path / "tiers.json").write_text(json.dumps({"tiers": tiers}))
    with pytest.raises(InputError, match=said):
        split.split(per_lane, tmp_path / "tiers.json", out=out)


def test_a_path_as_the_name_of_the_folder_is_refused_at_once(per_lane, tmp_path):
    with pytest.raises(InputError, match=r"--out=new/tiers must be the name of a folder"):
        split.split(per_lane, tmp_path / "tiers.json", out="new/tiers")


SPEC = ModelSpec("mlcn", (28, 28, 1), 10, lanes="mlcn1:w2,mlcn1:w1*3", margin_loss="per_lane")


def seen():
    """What its lanes, of which every second is right, say of some images, and the classes of these."""
    labels = np.arange(100) % 10
    truth = np.eye(10, dtype=np.float32)[labels]
    wrong = np.roll(truth, 1, axis=1)
    return np.stack([truth, wrong, truth, wrong], axis=-1), labels


def test_lanes_go_where_they_fit_and_help():
    spec, (squares, labels) = SPEC, seen()
    wishes = placing.Wishes(
        [placing.TierWish("end", flops_share=0.25), placing.TierWish("edge"), placing.TierWish("x")]
    )
    with pytest.raises(InputError, match="give tier edge either"):
        placing.place(Path("tiers.json"), wishes, spec, squares, labels)
    wishes = placing.Wishes([placing.TierWish("end", flops_share=0.25), placing.TierWish("edge")])
    end, edge = placing.place(Path("tiers.json"), wishes, spec, squares, labels)
    assert 2 in end, "the best lane that fits"
    assert 0 in edge, "the large one does not"


def adding():
    """The same of lanes of which each is right where no other is, and lane 2 more often."""
    labels = 1 + np.arange(100) % 9
    truth = np.eye(10, dtype=np.float32)[labels][..., None]
    lane = np.array([0, 1, 2, 2, 3])[np.arange(100) % 5]
    return truth * np.eye(4, dtype=np.float32)[lane][:, None], labels


def test_a_generous_limit_leaves_lanes_to_later_tiers_and_takes_none_that_adds_nothing():
    generous = [placing.TierWish(name, flops_share=0.99) for name in ("end", "edge")]
    wishes = placing.Wishes([*generous, placing.TierWish("cloud")])
    squares, labels = adding()
    end, edge, cloud = placing.place(Path("tiers.json"), wishes, SPEC, squares, labels)
    assert (len(end), len(edge), len(cloud)) == (2, 1, 1)
    assert 2 in end
    assert placing.place(Path("tiers.json"), placing.Wishes(wishes.tiers[1:]), SPEC, *seen())[0] == [2]


def test_lanes_go_where_they_take_no_longer_than_the_device_may(tmp_path):
    profile = make_profile()
    profile.save(tmp_path / "phone.json")
    costs = [lane_cost(lane, SPEC.lane_settings, SPEC.image_shape) for lane in SPEC.lane_specs]
    times = [1e3 * cost.forward_flops_per_image / cost.step_flops(1) * profile.lane_seconds(cost, 1) for cost in costs]
    squares, labels = adding()

    def place(most):
        end = placing.TierWish("end", profile="phone.json", max_ms=most)
        wishes = placing.Wishes([end, placing.TierWish("edge")])
        return placing.place(tmp_path / "tiers.json", wishes, SPEC, squares, labels)

    for most in (1.01 * times[2], 2.5 * times[2], 0.99 * sum(times)):
        end, edge = place(most)
        assert 2 in end, "the best lane that fits"
        assert sum(times[lane] for lane in end) <= most
        assert all(sum(times[lane] for lane in [*end, further]) > most for further in edge), "no other fits as well"
    with pytest.raises(InputError, match="not even the smallest lane fits profile and max_ms of tier end"):
        place(0.5 * min(times))
    with pytest.raises(InputError, match="give tier end either lanes, or flops_share, or profile and max_ms"):
        place(None)


def without_weights(per_lane, folder, weights=()):
    """A copy of the run whose model has other weights of its lanes."""
    workdir = shutil.copytree(per_lane, folder, ignore=shutil.ignore_patterns("tiers*"))
    write_json(workdir / "tiers.json", read_json(per_lane / "tiers.json"))
    about = read_json(workdir / "model.json")
    write_json(workdir / "model.json", about | {"spec": about["spec"] | {"lane_weights": list(weights)}})
    return workdir


def test_weights_are_fitted_where_there_are_none_and_are_those_of_the_model(per_lane, images, tmp_path):
    workdir = without_weights(per_lane, tmp_path / "run")
    before = read_json(workdir / "model.json")
    folder = split.split(workdir, workdir / "tiers.json")
    trained = load_trained(workdir)
    weights = trained.spec.lane_weights
    assert len(weights) == 3
    assert min(weights) >= split.LEAST_WEIGHT
    after = read_json(workdir / "model.json")
    assert after == before | {"spec": before["spec"] | {"lane_weights": list(weights)}}, "nothing else has changed"
    assert split.is_of(folder, trained)
    tiers = [TierArtifact(folder / name) for name in ("end", "edge", "cloud")]
    assert [tier.policy.tier(tier.name).weight for tier in tiers] == [weights[1], weights[0], weights[2]]
    total = sum(tier.part(images) for tier in tiers)
    np.testing.assert_allclose(np.sqrt(total), TrainedModel(workdir).lengths(images), atol=1e-5)
    shown = ", ".join(f"{weight:g}" for weight in weights)
    assert f"weights of the lanes, in {workdir / 'model.json'}: {shown}" in split.describe(folder)


def test_weights_that_a_model_has_are_kept_and_no_tier_is_left_without_any(per_lane, tmp_path, monkeypatch):
    def write(*given):
        raise InterruptedError("before anything is written")

    monkeypatch.setattr(split, "_write", write)
    monkeypatch.setattr(split, "fit_weights", lambda *given: pytest.fail("they are there"))
    workdir = without_weights(per_lane, tmp_path / "run", (1.0, 2.0, 3.0))
    before = (workdir / "model.json").read_text()
    with pytest.raises(InterruptedError):
        split.split(workdir, workdir / "tiers.json")
    assert (workdir / "model.json").read_text() == before
    workdir = without_weights(per_lane, tmp_path / "other", (1.0, 0.0, 3.0))
    with pytest.raises(InputError, match=r"the lanes of tier end, 1, have weight 0 in .*model\.json"):
        split.split(workdir, workdir / "tiers.json")
