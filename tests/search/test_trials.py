"""Trials train as runs do, share compiled programs, and score on validation images."""

import collections
import dataclasses
import math

import jax
import numpy as np
import pytest

from configs import default
from mlcn_jax.config import RunConfig
from mlcn_jax.data.batches import Augmentation, Batches
from mlcn_jax.errors import Diverged, InputError
from mlcn_jax.search import trials
from mlcn_jax.training import mesh_runner

_SHIFTS = Augmentation(max_shift=2)


def make_config(**changes):
    values = {"data.validation_fraction": 0.3, "model.decoder": "16", "train.batch_size": "50", "model.conv": "native"}
    config = RunConfig.from_dict(default.get_config().to_dict())
    return config.replace({**values, **{name.replace("__", "."): value for name, value in changes.items()}})


@pytest.mark.long
@pytest.mark.parametrize("lanes", ["mlcn2:w1*3,mlcn1:w1", "resnet:w1d1*2"])
def test_a_trial_takes_the_steps_of_the_ordinary_runner(lanes):
    config = make_config(data__max_shift="2")
    trainer = trials.Trainer(config, num_epochs=1, num_repeats=1, num_images=300)
    spec = trainer.spec(lanes)
    start = trainer._start_state(spec, 0)
    *_, (score, _, (state,)) = trainer._train(lanes)
    runner = mesh_runner.MeshRunner(
        spec,
        trainer._optimizer,
        None,
        reconstruction_weight=config.train.reconstruction_weight,
        seed=0,
        augmentation=_SHIFTS,
    )
    runner.start(start)
    batches = Batches(trainer.train.images, trainer.train.labels, 50, 0)
    runner.compile(*batches.at(0))
    for step in range(trainer.steps_per_epoch):
        runner.step(*runner.place(*batches.at(step)))
    for (path, mine), theirs in zip(
        jax.tree_util.tree_leaves_with_path(state.params), jax.tree.leaves(runner.fetch().params), strict=True
    ):
        np.testing.assert_allclose(mine, theirs, atol=2e-4, err_msg=jax.tree_util.keystr(path))
    assert score.steps == trainer.steps_per_epoch == 4
    runner.calibrate(trainer._calibration_images)
    assert score.repeats == (runner.scores(trainer.validation, 50).accuracy,)


def test_a_trial_sees_images_mirrored_and_resized_as_a_run_does(monkeypatch):
    class Runner:
        """Records the batches and sizes of its steps."""

        def __init__(self, *args, **options):
            self.compiled, self.seen = [], []

        def start(self, state):
            assert state == "start"

        def compile(self, images, labels, sizes):
            self.compiled = sizes
            return 0.0

        def place(self, images, labels):
            return (images,)

        def step(self, images, size):
            self.seen.append((images, size))
            return {"loss": np.float32(1.0)}

        def fetch(self):
            return "start"

    monkeypatch.setattr(trials, "StacksRunner", Runner)
    monkeypatch.setattr(trials.Trainer, "_start_state", lambda *args: "start")
    monkeypatch.setattr(trials.Trainer, "_accuracy", lambda *args: 0.5)
    config = make_config(data__alternate_flips="True", train__image_sizes="20:0.5")
    trainer = trials.Trainer(config, num_epochs=2, num_repeats=1, num_images=300)
    *_, (_, runner, _) = trainer._train("resnet:w1*2")
    expected = Batches(trainer.train.images, trainer.train.labels, 50, 0, alternate_flips=True)
    assert [size for _, size in runner.seen] == runner.compiled == [20] * 4 + [0] * 4
    for step, (images, _) in enumerate(runner.seen):
        np.testing.assert_array_equal(images, expected.at(step)[0])


@pytest.mark.long
def test_groups_that_were_compiled_once_are_used_again():
    trainer = trials.Trainer(make_config(), num_epochs=1, num_repeats=1, num_images=200)
    list(trainer.evaluate("mlcn2:w1*2,mlcn1:w1*2"))
    programs = set(trainer._programs)
    list(trainer.evaluate("mlcn2:w1*3,mlcn1:w1"))
    stacks = {key for key in set(trainer._programs) - programs if key[0] == "forward"}
    assert {key[2] for key in stacks} == {"mlcn2:w1d1*1", "mlcn1:w1d1*1"}  # two of mlcn2:w1 were there
    before = set(trainer._programs)
    first, again = (list(trainer.evaluate("mlcn2:w1*3,mlcn1:w1"))[-1] for _ in range(2))
    assert set(trainer._programs) == before
    assert first.accuracy == again.accuracy


def test_residual_lanes_of_small_images_have_a_start():
    trainer = trials.Trainer(make_config(), num_epochs=1, num_repeats=1, num_images=300)
    spec = dataclasses.replace(trainer.spec("resnet:w1*2"), image_shape=(12, 12, 1))
    trainer.train = dataclasses.replace(trainer.train, images=trainer.train.images[:, 6:18, 6:18])
    assert trainer._start_state(spec, 0).params["decoder"]["hidden1"]["kernel"].shape == (2 * 10, 16)


@pytest.mark.long
def test_repeats_differ_and_their_geometric_mean_counts():
    trainer = trials.Trainer(make_config(), num_epochs=2, num_repeats=2, num_images=300, scored_epochs=(1,))
    scores = list(trainer.evaluate("mlcn2:w1*2"))
    assert [score.epoch for score in scores] == [1, 2]
    assert scores[1].steps == 2 * 2 * trainer.steps_per_epoch
    assert scores[1].repeats[0] != scores[1].repeats[1]
    assert scores[1].accuracy == pytest.approx(math.sqrt(scores[1].repeats[0] * scores[1].repeats[1]))
    alone = trials.Trainer(make_config(), num_epochs=2, num_repeats=1, num_images=300)
    (only,) = alone.evaluate("mlcn2:w1*2")
    assert only.repeats[0] == scores[1].repeats[0]
    tests = trainer.test("mlcn2:w1*2")
    assert len(tests) == 2
    assert all(0 < accuracy < 1 for accuracy in tests)


def test_validation_images_are_not_trained_on_nor_tests():
    trainer = trials.Trainer(make_config(), num_epochs=1, num_repeats=1, num_images=300)

    def count(split):
        return collections.Counter(image.tobytes() for image in split.images)

    assert abs(len(trainer.train.labels) + len(trainer.validation.labels) - 300) <= 10  # a part of each class
    assert count(trainer.train) + count(trainer.validation) <= count(trainer.dataset.train)


def test_a_loss_that_is_not_finite_ends_the_trial():
    trainer = trials.Trainer(make_config(train__learning_rate="1e30"), num_epochs=1, num_repeats=1, num_images=200)
    with pytest.raises(Diverged, match="epoch 1, repeat 1: the loss is"):
        list(trainer.evaluate("mlcn2:w1"))


@pytest.mark.parametrize(
    ("config", "num_images", "message"),
    [
        ({"data__validation_fraction": "0"}, 0, "data.validation_fraction is 0: a search compares models"),
        ({}, 10**6, "search.num_images is 1000000, but there are only"),
        ({"train__batch_size": "500"}, 200, "search.num_images is 200, too few: .*batch size is 500"),
        ({}, 1, "search.num_images is 1, too few: give more, or 0 for all .*has 1 image"),
        ({"train__batch_size": "5000"}, 0, "^the batch size is 5000"),
    ],
)
def test_what_cannot_be_trained(config, num_images, message):
    with pytest.raises(InputError, match=message):
        trials.Trainer(make_config(**config), num_epochs=1, num_repeats=1, num_images=num_images)
