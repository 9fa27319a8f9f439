import dataclasses
import functools
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from made_params import made_params

from mlcn_jax.analysis import join, prune
from mlcn_jax.config import RunConfig, read_stored
from mlcn_jax.data.batches import Augmentation
from mlcn_jax.distributed import mesh as mesh_lib
from mlcn_jax.errors import InputError
from mlcn_jax.nn import losses
from mlcn_jax.nn.calibration import calibrate
from mlcn_jax.nn.capsules import lengths
from mlcn_jax.nn.distillation import Distillation, model_probabilities
from mlcn_jax.nn.lane_losses import outputs_and_loss
from mlcn_jax.nn.model import encode, init_params
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.training import loop, teacher
from mlcn_jax.training.mesh_runner import MeshRunner
from mlcn_jax.training.session import open_session
from mlcn_jax.training.stack_programs import make_stacks
from mlcn_jax.training.stacks_runner import StacksRunner
from mlcn_jax.training.step import TrainState, lane_options, lane_view, make_input, make_loss
from mlcn_jax.training.teacher import Teacher, open_teacher
from mlcn_jax.training.trained import Trained, load_trained
from tests.conftest import TINY

MARGIN = ModelSpec("mlcn", (17, 17, 1), 3, lanes="mlcn1:w1*2", decoder=(4,))
ALONE = ModelSpec("mlcn", (17, 17, 1), 3, lanes="resnet:w1*2", decoder=(4,), norm_group=4)
OPTIMIZER = optax.sgd(0.01)
IMAGES = np.random.default_rng(0).integers(0, 256, (8, 17, 17, 1), np.uint8)
LABELS = np.arange(8, dtype=np.int32) % 3
OWN_VIEWS = Augmentation(max_shift=2, per_lane=True)


def probabilities(images):
    """A teacher that tells images apart, and an image from its shifted one."""
    return jax.nn.softmax(
        20
        * jnp.stack(
            [images[:, :6].mean((1, 2, 3)), images[:, 6:12].mean((1, 2, 3)), images[:, 12:].mean((1, 2, 3))], -1
        )
    )


def settings(spec, weight=0.7, **more):
    distillation = Distillation(probabilities, weight, 3.0) if weight else None
    return {"reconstruction_weight": 0.4, "seed": 0, "distillation": distillation, **more}


def two_steps(runner, spec, *soft):
    runner.start(TrainState.create(init_params(spec, jax.random.key(0)), OPTIMIZER))
    runner.compile(IMAGES, LABELS, *soft)
    for _ in range(2):
        metrics = runner.step(*runner.place(IMAGES, LABELS, *soft))
    return jax.device_get(runner.fetch().params), {k: float(v) for k, v in metrics.items()}


def on_one_device(spec, *soft, **more):
    return two_steps(MeshRunner(spec, OPTIMIZER, None, **settings(spec, **more)), spec, *soft)


CASES = {"margin": (MARGIN, Augmentation(max_shift=1)), "alone": (ALONE, OWN_VIEWS)}


@pytest.fixture(scope="module", params=CASES)
def case(request):
    spec, augmentation = CASES[request.param]
    return spec, augmentation, on_one_device(spec, augmentation=augmentation)


def assert_same(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)


@pytest.mark.long
def test_in_parts_lanes_learn_the_same_from_the_teacher(case):
    spec, augmentation, expected = case
    assert_same(on_one_device(spec, augmentation=augmentation, accumulation_steps=2), expected)
    known = np.asarray(probabilities(IMAGES / np.float32(255)))
    plain = on_one_device(spec, known)
    assert_same(on_one_device(spec, known, accumulation_steps=2), plain)


def test_on_a_mesh_lanes_learn_the_same_from_the_teacher(case):
    spec, augmentation, expected = case
    runner = MeshRunner(spec, OPTIMIZER, mesh_lib.make_mesh(2, 2), **settings(spec, augmentation=augmentation))
    assert_same(two_steps(runner, spec), expected)


@pytest.mark.long
def test_in_stacks_lanes_learn_the_same_from_the_teacher(case):
    spec, augmentation, expected = case
    stacks = make_stacks(jax.devices()[:2], [1, 0])
    runner = StacksRunner(spec, OPTIMIZER, stacks, jax.devices()[0], **settings(spec, augmentation=augmentation))
    assert_same(two_steps(runner, spec), expected)


def test_the_teacher_sees_what_each_lane_sees_at_full_size():
    distillation = Distillation(probabilities, 1.0, 3.0)
    augmentation = dataclasses.replace(OWN_VIEWS, size=12)
    pixels, _, draws = jax.jit(make_input(ALONE, 0, augmentation))(jnp.zeros((), jnp.int32), jnp.asarray(IMAGES))
    encoder = init_params(ALONE, jax.random.key(0))["encoder"]
    options = lane_options(augmentation, distillation)
    outputs, loss = jax.jit(functools.partial(outputs_and_loss, ALONE, **options))(encoder, pixels, LABELS, draws)
    seen = [lane_view(OWN_VIEWS)(pixels, draws, jnp.array(lane)) for lane in range(2)]
    assert np.abs(seen[0] - seen[1]).max() > 0.1
    expected = sum(losses.soft_divergence(outputs[..., i], probabilities(x), 3.0).mean() for i, x in enumerate(seen))
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_the_margin_loss_takes_labels_and_teacher_mixed():
    distillation = Distillation(probabilities, 0.7, 3.0)
    params, pixels = init_params(MARGIN, jax.random.key(0)), jnp.asarray(IMAGES / np.float32(255))
    loss = jax.jit(make_loss(MARGIN, 0.4, distillation=distillation))
    _, metrics = loss(params, pixels, LABELS, jax.random.key(0), {})
    powers = np.asarray(probabilities(pixels)) ** (1 / 3)
    target = 0.3 * jax.nn.one_hot(LABELS, 3) + 0.7 * powers / powers.sum(-1, keepdims=True)
    v = jax.jit(encode, static_argnums=0)(MARGIN, params["encoder"], pixels)
    expected = losses.margin_loss(lengths(v), target).mean()
    np.testing.assert_allclose(metrics["margin"], expected, rtol=1e-6)


def test_kept_outputs_teach_what_computed_ones_do():
    computed = on_one_device(MARGIN)
    kept = on_one_device(MARGIN, np.asarray(probabilities(jnp.asarray(IMAGES / np.float32(255)))))
    assert_same(kept, computed)


@pytest.mark.parametrize(("flips", "shift", "kept"), [(False, 0, True), (True, 0, True), (False, 1, False)])
def test_outputs_are_kept_where_a_run_sees_images_in_no_other_way(flips, shift, kept):
    config = RunConfig().replace(TINY | {"data.alternate_flips": flips, "data.max_shift": shift})
    session = types.SimpleNamespace(config=config, train=types.SimpleNamespace(images=IMAGES))
    found = Teacher(Distillation(probabilities, 0.5, 1.0)).kept(session)
    assert (found is not None) == kept
    if kept:
        np.testing.assert_allclose(found[:, 0], probabilities(jnp.asarray(IMAGES / np.float32(255))), rtol=1e-5)
        assert found.shape == (8, 1 + flips, 3)


def test_the_teacher_is_asked_about_as_many_images_as_a_step_computes_at_a_time(monkeypatch):
    config = RunConfig().replace(TINY | {"train.accumulation_steps": 25})
    session = types.SimpleNamespace(config=config, train=types.SimpleNamespace(images=IMAGES))
    asked = []

    def counted(images):
        asked.append(len(images))
        return probabilities(images)

    assert len(Teacher(Distillation(counted, 0.5, 1.0)).kept(session)) == len(IMAGES)
    assert set(asked) == {2}


@pytest.fixture
def student(tiny, finished):
    return tiny.replace({"train.teacher": str(finished), "model.lanes": "mlcn2:w1*2"})


OF_LANES_ALONE = {
    "model.lanes": "resnet:w1*2",
    "model.norm_group": 25,
    "data.max_shift": 1,
    "data.augment_lanes": True,
    "train.optimizer": "muon",
    "train.learning_rate": 0.1,
    "train.num_steps": 12,
}


@pytest.mark.parametrize("changes", [{"data.max_shift": 1}, {"data.alternate_flips": True}, OF_LANES_ALONE])
@pytest.mark.long
def test_a_resumed_student_equals_an_uninterrupted_one(student, changes, tmp_path):
    config = student.replace(changes)
    loop.train(config, tmp_path / "whole")
    loop.train(config.replace({"train.num_steps": 10}), tmp_path / "parts")
    loop.train(config, tmp_path / "parts")
    whole, parts = (load_trained(tmp_path / name).params for name in ("whole", "parts"))
    jax.tree.map(np.testing.assert_array_equal, parts, whole)


def test_a_finished_student_needs_its_teacher_no_more(tiny, finished, tmp_path):
    teacher = shutil.copytree(finished, tmp_path / "teacher")
    config = tiny.replace({"train.teacher": str(teacher), "train.num_steps": 2})
    summary = loop.train(config, tmp_path / "student")
    shutil.rmtree(teacher)
    assert loop.train(config, tmp_path / "student") == summary
    with pytest.raises(InputError, match=r"train\.teacher="):
        loop.train(config.replace({"train.num_steps": 3}), tmp_path / "student")


@pytest.mark.long
def test_a_trained_teacher_teaches_on_a_mesh(student, tmp_path):
    config = student.replace({"data.max_shift": 1, "train.num_steps": 3})
    loop.train(config, tmp_path / "one")
    loop.train(config.replace({"parallel.data": 2, "parallel.lane": 2}), tmp_path / "four")
    assert_same(*(load_trained(tmp_path / name).params for name in ("four", "one")))


def test_a_teacher_whose_lanes_weigh_otherwise_is_another(per_lane):
    model = load_trained(per_lane)
    other = dataclasses.replace(model, spec=dataclasses.replace(model.spec, lane_weights=(0.5, 1.5, 1.0)))
    assert teacher._digest(model) != teacher._digest(other)


@pytest.mark.parametrize("spec", [ALONE, ModelSpec("capsnet", (17, 17, 1), 3, decoder=(4,))], ids=["resnet", "capsnet"])
def test_models_of_other_kinds_teach_as_well(spec):
    """The probabilities of a model are the shares of its squared lengths; of residual lanes, the mean of theirs."""
    pixels = jnp.asarray(IMAGES / np.float32(255))
    params = jax.jit(functools.partial(calibrate, spec))(made_params(spec), [pixels])
    encoder = teacher._encoder(Trained(spec, ("a", "b", "c"), params, 1))
    found = jax.jit(model_probabilities(spec, encoder))(pixels)
    squares = np.square(jax.jit(encode, static_argnums=0)(spec, encoder, pixels))
    np.testing.assert_allclose(found.sum(-1), 1, rtol=1e-5)
    if spec is ALONE:
        np.testing.assert_allclose(found, squares.mean(-1), rtol=1e-4, atol=1e-6)
    else:
        np.testing.assert_allclose(found, squares.sum(-1) / squares.sum((1, 2))[:, None], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("changes", [{"lanes": "mlcn1:w1d2*2"}, {"lanes": "mlcn2:w1*2", "conv": "native"}])
def test_a_teacher_of_any_convolution_algorithm_can_be_asked(changes):
    spec = dataclasses.replace(MARGIN, **changes)
    params, pixels = made_params(spec), jnp.asarray(IMAGES / np.float32(255))
    encoder = teacher._encoder(Trained(spec, ("a", "b", "c"), params, 1))
    found = jax.jit(model_probabilities(spec, encoder))(pixels)
    expected = jax.jit(lambda encoder: model_probabilities(spec, encoder)(pixels))(params["encoder"])
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_a_teacher_that_learned_validation_images_is_told_of(student, finished, per_lane, caplog):
    """`finished` learned all images; `per_lane` held a fifth out, of which another seed holds others out."""

    def learned(workdir, **changes):
        held = {"data.validation_fraction": 0.2} | {f"data.{name}": value for name, value in changes.items()}
        session = open_session(student.replace(held | {"train.teacher": str(workdir)}))
        return teacher.validation_images_learned(workdir, session), len(session.validation.labels)

    count, held = learned(finished)
    assert count == held > 0
    assert learned(per_lane)[0] == 0
    assert learned(per_lane, validation_fraction=0.1)[0] == 0, "a part of what it held out"
    count, held = learned(per_lane, split_seed=1)
    assert 0.6 * held < count < held
    assert learned(finished, validation_fraction=0.0) == (0, 0)
    with caplog.at_level("WARNING", logger="mlcn_jax"):
        open_teacher(open_session(student.replace({"data.validation_fraction": 0.2})))
    assert "validation images, so validation accuracy will look too good" in caplog.text


@pytest.mark.long
def test_a_student_is_pruned_and_joined_like_any_other_run(tiny, per_lane, tmp_path):
    student, smaller, joined = (tmp_path / name for name in ("student", "smaller", "joined"))
    taught = {"train.teacher": str(per_lane), "model.margin_loss": "per_lane", "data.validation_fraction": 0.2}
    loop.train(tiny.replace(taught | {"train.num_steps": 2}), student)
    prune.save_run(prune.prune_run(prune.load_prunable(student), [1]), smaller, None, {})
    assert load_trained(smaller).spec.lanes == "mlcn1:w1d1*1"
    assert loop.train(read_stored(smaller).replace({"train.num_steps": 3}), smaller)["steps"] == 3
    join.join([student], joined, decoder_epochs=0)
    assert load_trained(joined).spec.lanes == "mlcn1:w1d1*2"
    assert read_stored(joined).train.teacher == str(per_lane)


def test_an_ensemble_says_the_mean(student, finished, per_lane):
    session = open_session(student.replace({"train.teacher": f"{finished},{per_lane}"}))
    images = jnp.asarray(session.train.images[:4] / np.float32(255))
    both = open_teacher(session).distillation.probabilities(images)
    each = [
        open_teacher(open_session(student.replace({"train.teacher": str(name)}))).distillation.probabilities(images)
        for name in (finished, per_lane)
    ]
    np.testing.assert_allclose(both, np.mean(each, axis=0), rtol=1e-5)
    np.testing.assert_allclose(both.sum(-1), 1, rtol=1e-5)


@pytest.mark.long
def test_another_teacher_at_the_same_place_is_refused(student, finished, per_lane, tmp_path):
    teacher = shutil.copytree(finished, tmp_path / "teacher")
    config = student.replace({"train.teacher": str(teacher), "train.num_steps": 5})
    loop.train(config, tmp_path / "student")
    shutil.rmtree(teacher)
    shutil.copytree(per_lane, teacher)
    with pytest.raises(InputError, match="with another teacher:\n  teachers_sha256"):
        loop.train(config.replace({"train.num_steps": 10}), tmp_path / "student")
    for other in (str(per_lane), ""):
        with pytest.raises(InputError, match=r"train\.teacher: "):
            loop.train(config.replace({"train.teacher": other}), tmp_path / "student")
    moved = config.replace({"train.teacher": str(finished), "train.num_steps": 10})
    assert loop.train(moved, tmp_path / "student")["steps"] == 10


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train.teacher": "nowhere"}, "train.teacher=nowhere: nowhere holds no trained model"),
        ({"train.teacher": "digits,"}, "or several separated by commas"),
        ({"model.lanes": "resnet:w1*2", "model.ensemble_weight": 0.5}, "leave model.ensemble_weight at 0"),
    ],
)
def test_a_teacher_that_cannot_be_used_is_one_error(student, changes, message):
    with pytest.raises(InputError, match=message):
        open_teacher(open_session(student.replace(changes)))


def test_a_teacher_whose_training_was_interrupted_is_refused(student, finished, tmp_path):
    interrupted = shutil.copytree(finished, tmp_path / "teacher")
    session = open_session(student.replace({"train.teacher": str(interrupted)}))
    open_teacher(session)
    (interrupted / "summary.json").unlink()
    with pytest.raises(InputError, match="is not finished: its training was interrupted or is still running"):
        open_teacher(session)


def test_a_teacher_of_other_images_or_classes_is_one_error(student):
    session = open_session(student)
    with pytest.raises(InputError, match="takes images of 28x28x1, and digits has 32x32x1"):
        open_teacher(dataclasses.replace(session, spec=dataclasses.replace(session.spec, image_shape=(32, 32, 1))))
    names = ("a", *session.dataset.class_names[1:])
    with pytest.raises(InputError, match=r"has 10 classes \(0, 1, 2, 3, 4, ...\), and digits has 10 \(a, 1"):
        open_teacher(dataclasses.replace(session, dataset=dataclasses.replace(session.dataset, class_names=names)))


@pytest.mark.parametrize("changes", [{"train.teacher_weight": 0.0}, {"train.teacher_temperature": 0.0}])
def test_weight_and_temperature_are_checked(changes):
    with pytest.raises(InputError, match="it must be"):
        RunConfig().replace(TINY | changes)
