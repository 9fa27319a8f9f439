"""What lanes encode: measured against slow loops, and the command from a trained run to its files."""

import json
import logging
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from mlcn_jax.analysis import explain
from mlcn_jax.analysis import explain_report as script
from mlcn_jax.analysis.workdir import load_with_data, stored_config
from mlcn_jax.commands.explain import read_numbers
from mlcn_jax.data.batches import Split
from mlcn_jax.errors import InputError
from mlcn_jax.nn import capsules, model
from mlcn_jax.nn.spec import ModelSpec

SPEC = ModelSpec("mlcn", (18, 18, 1), 3, "mlcn2:w1*2, mlcn1:w1d2", decoder=(6,), conv="native")
CAPSNET = ModelSpec("capsnet", (18, 18, 1), 3, decoder=(6,), conv="native")


def random_params(spec):
    rng, shapes = np.random.default_rng(1), model.param_shapes(spec)
    return jax.tree.map(lambda leaf: rng.normal(0, 0.3, leaf.shape).astype(np.float32), shapes)


@pytest.fixture(scope="module")
def params():
    return random_params(SPEC)


@pytest.fixture(scope="module")
def pixels():
    return np.random.default_rng(0).integers(0, 256, (7, 18, 18, 1)).astype(np.uint8)


def decode(params, v, k):
    """One capsule matrix [classes, lanes], reconstructed from class k."""
    return np.asarray(model.reconstruct(SPEC, params["decoder"], jnp.asarray(v)[None], jnp.array([k])))[0]


def test_columns_have_the_names_of_their_lanes():
    assert explain.column_names(SPEC) == ["lane 0 (mlcn2:w1d1)", "lane 1 (mlcn2:w1d1)", "lane 2 (mlcn1:w1d2)"]
    assert explain.column_names(CAPSNET) == [f"dimension {i}" for i in range(16)]


def test_perturb_adds_each_offset_to_one_lane_of_the_given_class(params, pixels):
    v, _ = explain.look(SPEC, params["encoder"], pixels[:2])
    classes, offsets = np.array([2, 0], np.int32), np.array([-0.25, 0.0, 0.1], np.float32)
    found = np.asarray(explain.perturb(SPEC, params["decoder"], v, classes, offsets))
    assert found.shape == (3, 3, 2, 18, 18, 1)
    for lane in range(3):
        for o, offset in enumerate(offsets):
            for i, k in enumerate(classes):
                altered = np.array(v[i])
                altered[k, lane] += offset
                np.testing.assert_allclose(found[lane, o, i], decode(params, altered, k), atol=1e-6)
    assert np.abs(found[0, 0] - found[0, 2]).max() > 1e-4


def test_a_lane_that_is_switched_off_counts_neither_for_lengths_nor_for_the_reconstruction(params, pixels):
    v, _ = explain.look(SPEC, params["encoder"], pixels[:1])
    added, kept = jnp.array([0.1, 0.2, 0.3]), jnp.array([1.0, 0.0, 1.0])
    lengths, reconstruction = explain.respond(SPEC, params["decoder"], v, jnp.array([1]), added, kept)
    altered = np.array(v[0])
    altered[1] += np.asarray(added)
    altered[:, 1] = 0.0
    np.testing.assert_allclose(lengths[0], np.linalg.norm(altered, axis=-1), rtol=1e-6)
    np.testing.assert_allclose(reconstruction[0], decode(params, altered, 1), atol=1e-6)


def test_rank_equals_a_slow_loop_over_images(params, pixels, monkeypatch):
    monkeypatch.setattr(explain, "_BATCH_SIZE", 4)  # so that the last batch is padded
    offsets = [-0.2, 0.0, 0.05]
    ranking = explain.rank(SPEC, params, pixels, offsets)
    v, predicted = explain.look(SPEC, params["encoder"], pixels)
    v, predicted = np.asarray(v), np.asarray(predicted)
    for row in ranking:
        lane, found = row["index"], {measure: [] for measure in explain.MEASURES}
        for capsule, k in zip(v, predicted, strict=True):
            before, before_length = decode(params, capsule, k), np.linalg.norm(capsule, axis=-1)
            for offset in (-0.2, 0.05):
                moved = capsule.copy()
                moved[k, lane] += offset
                change = np.abs(decode(params, moved, k) - before).mean()
                found["pixel_change_per_unit"].append(change / abs(offset))
                length_change = abs(np.linalg.norm(moved[k]) - before_length[k])
                found["length_change_per_unit"].append(length_change / abs(offset))
            without = capsule.copy()
            without[:, lane] = 0.0
            found["pixel_change_without"].append(np.abs(decode(params, without, k) - before).mean())
            found["length_change_without"].append(np.abs(np.linalg.norm(without, axis=-1) - before_length).mean())
        for measure, values in found.items():
            assert row[measure] == pytest.approx(np.mean(values), rel=1e-3), measure


def test_a_lane_that_the_decoder_does_not_read_is_last(params, pixels):
    decoder = jax.tree.map(np.array, params["decoder"])
    decoder["hidden1"]["kernel"].reshape(3, 3, -1)[:, 0] = 0.0  # [classes, lanes, hidden]
    last = explain.rank(SPEC, {**params, "decoder": decoder}, pixels)[-1]
    assert last["index"] == 0
    assert max(last["pixel_change_per_unit"], last["pixel_change_without"]) < 1e-6
    assert last["length_change_without"] > 0.0


def test_capsnet_has_16_dimensions_to_move(pixels):
    capsnet = random_params(CAPSNET)
    v, predicted = explain.look(CAPSNET, capsnet["encoder"], pixels[:1])
    assert explain.perturb(CAPSNET, capsnet["decoder"], v, predicted, np.zeros(2, np.float32)).shape[:3] == (16, 2, 1)
    ranking = explain.rank(CAPSNET, capsnet, pixels[:1])
    assert sorted(row["index"] for row in ranking) == list(range(16))
    changes = [row["pixel_change_per_unit"] for row in ranking]
    assert changes == sorted(changes, reverse=True)
    assert changes[-1] > 0.0


def test_first_correct_takes_one_image_of_each_class_that_has_one(monkeypatch):
    predicted = np.array([2, 0, 2, 1, 0, 1, 2], np.int32)
    pixels = np.tile(predicted.astype(np.uint8)[:, None, None, None], (1, 18, 18, 1))
    monkeypatch.setattr(explain, "look", lambda spec, encoder, images: (None, images[:, 0, 0, 0]))
    monkeypatch.setattr(explain, "_BATCH_SIZE", 3)
    none = {"encoder": {}}
    assert explain.first_correct(SPEC, none, Split(pixels, predicted)) == [1, 3, 0]
    assert explain.first_correct(SPEC, none, Split(pixels, (predicted + 1) % 3)) == []
    labels = np.where(np.arange(7) >= 5, predicted, 0).astype(np.int32)
    assert explain.first_correct(SPEC, none, Split(pixels, labels)) == [1, 5, 6]


def test_explain_a_run(finished, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "mlcn_jax")
    with monkeypatch.context() as patch:  # drawn below, for one image
        for name in ("draw_offsets", "draw_reconstructions", "draw_ranking"):
            patch.setattr(script, name, lambda path, *args: path.touch())
        patch.setattr(script, "MOST_IMAGES", 2)
        results = script.explain_run(finished, tmp_path / "a", [], num_ranked=30)
    assert caplog.messages[0] == f"loading {finished}, and the images"
    assert caplog.messages[-1] == "measuring what each lane changes, on 30 test images"
    trained, dataset = load_with_data(finished, stored_config(finished))
    pixels = dataset.test.images / np.float32(255)
    v, reconstructions = model.apply_model(trained.spec, trained.params, pixels)
    predicted = np.argmax(capsules.lengths(v), axis=-1)
    correct = predicted == dataset.test.labels
    first = [int(np.flatnonzero(correct & (predicted == k))[0]) for k in sorted(set(predicted[correct].tolist()))]
    assert len(first) > 2
    first = first[:2]
    assert [row["index"] for row in results["pictures"]] == first
    assert all(row["class"] == row["predicted"] for row in results["pictures"])
    assert results["step"] == trained.step == 20
    assert results["data"]["name"] == "digits"
    assert {row["name"] for row in results["ranking"]} == {"lane 0 (mlcn1:w1d1)", "lane 1 (mlcn1:w1d1)"}

    drawn = {path.name for path in (tmp_path / "a").iterdir()}
    assert drawn == {"ranking.json", "ranking.png", "reconstructions.png", *(f"image_{i}.png" for i in first)}

    drawings, draw = [], script.draw_reconstructions
    monkeypatch.setattr(script, "draw_reconstructions", lambda *drawing: drawings.append(drawing) or draw(*drawing))
    script.explain_run(finished, tmp_path / "b", [3], num_ranked=30)
    for name in ("image_3.png", "ranking.png", "reconstructions.png"):
        with Image.open(tmp_path / "b" / name) as picture:
            assert min(picture.size) > 100
            assert len(picture.convert("RGB").getcolors(1 << 24)) > 20
    [(_, _, [original], [reconstruction])] = drawings
    np.testing.assert_array_equal(original, dataset.test.images[3])
    np.testing.assert_allclose(reconstruction, reconstructions[3], atol=1e-5)
    again = json.loads((tmp_path / "b" / "ranking.json").read_text())
    names = dataset.class_names
    picture = {"index": 3, "class": names[dataset.test.labels[3]], "predicted": names[predicted[3]]}
    assert again["pictures"] == [picture]
    stored = json.loads((tmp_path / "a" / "ranking.json").read_text())
    assert {**again, "pictures": []} == {**stored, "pictures": []}


def test_the_picture_of_an_image_says_what_is_added_to_what(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(script, "write_figure", lambda figure, path, **how: drawn.append(figure))
    row = {"index": 7, "class": "cat", "predicted": "dog"}
    changed = np.random.default_rng(0).random((2, 3, 4, 4, 1))
    names = ["lane 0 (mlcn1:w1d1)", "lane 1 (mlcn1:w1d1)"]
    script.draw_offsets(tmp_path / "a.png", row, names, (-0.1, 0.0, 0.1), np.zeros((4, 4, 1), np.uint8), changed)
    title = drawn[0].get_suptitle()
    assert title.startswith("test image 7, class cat, predicted dog: in each row, a number is added to one lane of")
    row |= {"class": "$#1", "predicted": "$5 {"}
    script.draw_offsets(tmp_path / "a.png", row, names, (-0.1, 0.0, 0.1), np.zeros((4, 4, 1), np.uint8), changed)
    script.draw_reconstructions(tmp_path / "b.png", [row], np.zeros((1, 4, 4, 1), np.uint8), changed[:1, 0])
    for figure in drawn:
        figure.canvas.draw()  # names of classes are no formulas


def test_a_change_of_hue_alone_is_drawn_as_a_difference(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(script, "write_figure", lambda figure, path, **how: drawn.append(figure))
    changed = np.full((1, 2, 4, 4, 3), 0.5)
    changed[0, 1] += [0.3, 0.0, -0.4]
    row, image = {"index": 7, "class": "cat", "predicted": "dog"}, np.zeros((4, 4, 3), np.uint8)
    script.draw_offsets(tmp_path / "a.png", row, ["lane 0"], (0.0, 0.1), image, changed)
    [difference] = [shown for axes in drawn[0].axes for shown in axes.images if shown.get_cmap().name == "RdBu_r"]
    assert difference.get_array().min() == pytest.approx(-0.4)


def test_numbers_of_images():
    assert read_numbers("") == []
    assert read_numbers("7, 0,7") == [7, 0]
    with pytest.raises(InputError, match=r"--images=1,two is not a list of integers"):
        read_numbers("1,two")


@pytest.mark.parametrize("index", [-1, 10**6])
def test_an_image_that_does_not_exist_is_named(finished, tmp_path, index):
    with pytest.raises(InputError, match=f"no test image {index}; they are numbered 0 to"):
        script.explain_run(finished, tmp_path, [0, index], num_ranked=1)


def test_more_images_than_there_are_cannot_be_ranked(finished, tmp_path):
    results = script.explain_run(finished, tmp_path, [0], num_ranked=10**12)
    total = results["ranking_images"].split()[2]
    assert results["ranking_images"].startswith(f"{total} of {total} ")


def test_an_output_that_cannot_be_written_is_told_before_any_work(finished, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be written to"):
        script.explain_run(finished, tmp_path / "file", [0], num_ranked=1)


def test_a_workdir_without_a_model(tmp_path):
    with pytest.raises(InputError, match="holds no run"):
        script.explain_run(tmp_path, tmp_path / "out", [0], num_ranked=1)
    assert not (tmp_path / "out").exists()


def test_a_description_of_another_model_is_refused(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    path = tmp_path / "run" / "model.json"
    path.write_text(path.read_text().replace("mlcn1:w1*2", "mlcn1:w1*3"))
    with pytest.raises(InputError, match=r"model\.json does not match .*checkpoints.*restore the file"):
        load_with_data(tmp_path / "run", stored_config(tmp_path / "run"))
