"""When an answer is final, what it means, and lanes that tiers miss or mix up."""

import dataclasses

import msgspec
import numpy as np
import pytest

from mlcn_jax.errors import InputError
from mlcn_jax.files import write_json
from mlcn_jax.tiers import policy as policies
from mlcn_jax.tiers.policy import Policy, Threshold, Tier, check_lanes, threshold, thresholds


def made(**changes):
    values = {
        "format": policies.FORMAT,
        "model": "0" * 64,
        "class_names": ("a", "b", "c"),
        "cut": "pixels",
        "tiers": (Tier("end", (1,), 1.0, 10), Tier("edge", (0, 2), 3.0, 30)),
        "power": 1,
        "groups": {"ab": (0, 1), "c": (2,)},
        "tolerance": 0.01,
        "validation_images": 100,
        "thresholds": {"end": Threshold(0.3, 0.5, 0.0, 0.0), "edge": Threshold(None, 0.0, 0.0, 0.0)},
    }
    return Policy(**{**values, **changes})


def test_an_answer_is_final_from_its_threshold_on_or_if_all_have_answered():
    policy = made()
    sums = np.array([[0.8, 0.4, 0.1], [0.5, 0.3, 0.1]], np.float32)
    assert policy.is_final(sums, {"end"}).tolist() == [True, False]
    assert policy.is_final(sums, {"edge"}).tolist() == [False, False], "never, by its threshold"
    assert policy.is_final(sums, {"end", "edge"}).tolist() == [True, True]
    assert policy.lanes({"edge", "end"}) == [0, 1, 2]


def test_probabilities_are_means_over_the_lanes_heard_and_groups_add_their_classes():
    policy = made()
    sums = np.array([[1.0, 0.25, 0.04]], np.float32)
    np.testing.assert_allclose(policy.probabilities(sums, {"end"}), [[1.0, 0.5, 0.2]], rtol=1e-6)
    np.testing.assert_allclose(policy.probabilities(sums, {"end", "edge"}), [[0.5, 0.25, 0.1]], rtol=1e-6)
    assert made(power=2).group(np.float32([0.5, 0.25, 0.25]), {"end"}) == ("ab", 0.75)


def test_of_two_groups_that_are_certain_the_longer_is_named():
    four = made(class_names=("a", "b", "c", "d"), groups={"ab": (0, 1), "cd": (2, 3)})
    assert four.group(np.float32([0.6, 0.5, 0.8, 0.7]), {"end"}) == ("cd", 1.0)


def test_a_policy_is_read_as_it_was_written_and_its_digest_tells_it_from_others(tmp_path):
    policy = made()
    write_json(tmp_path / "policy.json", policy.to_dict())
    assert Policy.read(tmp_path / "policy.json") == policy
    assert Policy.read(tmp_path / "policy.json").digest == policy.digest
    assert made(tolerance=0.02).digest != policy.digest
    write_json(tmp_path / "policy.json", {**msgspec.to_builtins(policy), "format": 99})
    with pytest.raises(InputError, match="has format 99"):
        Policy.read(tmp_path / "policy.json")
    write_json(tmp_path / "policy.json", {"format": 1})
    with pytest.raises(InputError, match="not a policy of this version"):
        Policy.read(tmp_path / "policy.json")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"groups": {"ab": (0, 1), "c": (3,)}}, "groups that do not contain each class once"),
        ({"groups": {"ab": (0, 1), "c": (1, 2)}}, "groups that do not contain each class once"),
        ({"groups": {"ab": (0, -1), "c": (2,)}}, "groups that do not contain each class once"),
        ({"thresholds": {"end": Threshold(0.3, 0.5, 0.0, 0.0)}}, "a threshold for each subset of the tiers"),
        ({"thresholds": {}}, "a threshold for each subset of the tiers"),
    ],
)
def test_a_policy_that_would_fail_while_it_is_used_is_not_read(tmp_path, changes, said):
    write_json(tmp_path / "policy.json", made(**changes).to_dict())
    with pytest.raises(InputError, match=said):
        Policy.read(tmp_path / "policy.json")


def test_the_bound_is_one_sided_and_not_zero_without_a_loss():
    assert policies.upper_bound(0.0, 0.0, 1000) == pytest.approx(2.706 / 1000, rel=1e-3)
    rng = np.random.default_rng(0)
    lost = rng.choice([1, 0, -1], (4000, 500), p=[0.03, 0.96, 0.01])
    over = lost.mean(axis=1)
    bounds = policies.upper_bound(over, lost.var(axis=1), 500)
    assert 0.94 < np.mean(bounds >= 0.02) < 0.99, "it is below the truth in at most about 5 of 100 cases"
    assert np.mean(policies.upper_bound(over, lost.var(axis=1), 500, bounds=5) >= 0.02) > 0.985


@pytest.mark.parametrize(
    ("lanes", "names", "said"),
    [
        ([[0], [2]], ["a", "b"], "lanes that no tier has are 1"),
        ([[0, 1], [1, 2]], ["a", "b"], "lanes given twice are 1"),
        ([[0, 1], [2, 7]], ["a", "b"], "lanes that the model does not have are 7"),
        ([[0, 1, 2], []], ["a", "b"], "tiers without lanes are b"),
        ([[0, 1], [2]], ["a", "a"], "names given twice are a"),
        ([[0, 1], [2]], ["a", "B/.."], "names with characters other than"),
        ([[0, 1, 2]], ["a"], "there are 1 tiers"),
    ],
)
def test_tiers_that_miss_repeat_or_mix_up_lanes_give_one_error(lanes, names, said):
    with pytest.raises(InputError, match=said):
        check_lanes("tiers.json", lanes, names, 3)
    check_lanes("tiers.json", [[2], [0, 1]], ["a", "b"], 3)


def test_a_threshold_costs_no_more_than_it_may_and_settles_what_it_can():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, 6000)
    truth = np.eye(10)[labels]
    parts = {
        name: np.clip(truth * 0.5 + rng.normal(0.25, noise, truth.shape), 0, 1).astype(np.float32)
        for name, noise in (("end", 0.25), ("edge", 0.15), ("cloud", 0.05))
    }
    found = thresholds(("end", "edge", "cloud"), parts, dict.fromkeys(parts, 1.0), labels, 0.01)
    assert set(found) == {"end", "edge", "cloud", "end+edge", "end+cloud", "edge+cloud"}
    whole = np.argmax(sum(parts.values()), axis=1)
    for name, own in found.items():
        heard = name.split("+")
        sums = np.sum([parts[tier] for tier in heard], axis=0)
        settled = policies.margins(sums, len(heard)) >= own.margin
        assert settled.mean() == pytest.approx(own.settled)
        assert own.loss <= own.loss_bound <= 0.005, "half of the tolerance: two thresholds may be passed"
    for path in (("end", "edge"), ("end", "cloud")):  # in the order in which tiers answer
        taken, open_, losses = whole.copy(), np.ones(len(labels), bool), []
        for heard in (path[:1], path):
            own, sums = found["+".join(heard)], np.sum([parts[tier] for tier in heard], axis=0)
            ends = open_ & (policies.margins(sums, len(heard)) >= own.margin)
            taken[ends], open_ = np.argmax(sums, axis=1)[ends], open_ & ~ends
            losses.append(own.loss)
        assert np.mean(whole == labels) - np.mean(taken == labels) == pytest.approx(sum(losses))
    assert found["end"].settled < found["end+edge"].settled
    strict = thresholds(("end", "edge", "cloud"), parts, dict.fromkeys(parts, 1.0), labels, 0.0)
    assert strict["end"].settled < found["end"].settled


def test_what_a_nearer_tier_has_settled_makes_up_for_nothing():
    """8 losses may not pass because of 6 gains in images that never come so far."""
    labels = np.zeros(5000, int)
    end, edge, cloud = (np.zeros((5000, 2)) for _ in range(3))
    end[:3000], end[3000:] = [1.0, 0.0], [0.0, 0.01]  # right and sure, or wrong and unsure
    cloud[:6] = [0.0, 3.0]  # the whole model is wrong, but the end has settled these
    edge[3000:], cloud[3000:] = [0.6, 0.5], [0.6, 0.5]
    edge[3000:3008], cloud[3000:3008] = [0.5, 0.6], [0.9, 0.0]  # the edge makes it wrong, the cloud right again
    parts = {"end": end, "edge": edge, "cloud": cloud}
    found = thresholds(tuple(parts), parts, dict.fromkeys(parts, 1.0), labels, 0.005)
    assert found["end"].settled == pytest.approx(0.6)
    assert found["end+edge"].settled == pytest.approx(0.6), "with the 8 images next in line it would cost too much"


def test_few_images_show_little_and_what_comes_after_a_loss_does_not_make_up_for_it():
    few, many = np.linspace(1, 0.1, 100), np.linspace(1, 0.1, 5000)
    assert threshold(few, np.zeros(100, int), 0.005).margin is None
    found = threshold(many, np.zeros(5000, int), 0.005)
    assert found.settled == 1
    assert found.loss == 0
    assert found.loss_bound == pytest.approx(2.7 / 5000, rel=0.01)
    lost = np.zeros(5000, int)
    lost[1000:1100], lost[1100:1300] = 1, -1
    found = threshold(many, lost, 0.005)
    assert 1000 <= found.settled * 5000 < 1025
    assert threshold(np.full(5000, 0.5), lost, 0.005).settled == 1, "equal margins belong together"


def test_useless_lanes_never_settle_anything():
    labels = np.arange(1000) % 10
    good = np.eye(10, dtype=np.float32)[labels]
    found = thresholds(("a", "b"), {"a": good[::-1].copy(), "b": 3 * good}, {"a": 1.0, "b": 3.0}, labels, 0.005)
    assert found["a"].margin is None
    assert found["a"].settled == 0


def test_fields_are_frozen():
    with pytest.raises((AttributeError, dataclasses.FrozenInstanceError)):
        made().cut = "conv1"
