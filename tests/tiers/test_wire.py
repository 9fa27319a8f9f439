"""Messages: what goes in comes out, and what is malformed is refused."""

import random

import numpy as np
import pytest

from mlcn_jax.tiers import wire

PIXELS = np.dtype(np.uint8)
FLOAT = np.dtype(np.float32)


def test_pixels_arrive_as_they_were_and_are_packed_where_that_is_smaller():
    rng = np.random.default_rng(0)
    noisy = rng.integers(0, 256, (2, 8, 8, 1)).astype(np.uint8)
    for rows in (noisy, np.zeros_like(noisy)):
        body = wire.pack_request("p", rows)
        asked, found = wire.unpack_request(body, "p", (8, 8, 1), PIXELS, 2)
        assert asked == wire.digest_of(body) != wire.digest_of(wire.pack_request("p", rows))
        np.testing.assert_array_equal(found, rows)
    assert len(body) < 100 < len(wire.pack_request("p", noisy))


@pytest.mark.parametrize(("bits", "error"), [(32, 0), (16, 1e-3), (8, 1 / 255), (4, 1 / 15), (2, 1 / 3)])
def test_values_arrive_to_the_precision_of_their_bits(bits, error):
    rows = np.random.default_rng(0).uniform(-1, 3, (3, 101)).astype(np.float32)
    body = wire.pack_request("p", rows, bits)
    found = wire.unpack_request(body, "p", (101,), FLOAT, 4)[1]
    assert np.abs(found - rows).max() <= 4 * error / 2 + 1e-6
    constant = np.full((1, 101), 7, np.float32)
    np.testing.assert_allclose(wire.unpack_request(wire.pack_request("p", constant, bits), "p", (101,), FLOAT, 1)[1], 7)


def test_values_too_large_for_16_bits_become_the_largest_but_not_those_that_are_not_finite():
    rows = np.array([[70_000, -1e30, 1]], np.float32)
    found = wire.unpack_request(wire.pack_request("p", rows, 16), "p", (3,), FLOAT, 1)[1]
    np.testing.assert_array_equal(found, [[65_504, -65_504, 1]])
    rows[0, 2] = np.inf
    with pytest.raises(wire.Unfit, match="not all finite"):
        wire.unpack_request(wire.pack_request("p", rows, 16), "p", (3,), FLOAT, 1)


def test_fewer_bits_are_fewer_bytes():
    rows = np.random.default_rng(0).uniform(-1, 3, (1, 4000)).astype(np.float32)
    sizes = [len(wire.pack_request("p", rows, bits)) for bits in wire.BITS]
    assert sizes == sorted(sizes)
    assert sizes[0] < 4000 / 4 + 200


def test_what_cannot_be_used_is_refused_with_the_reason():
    rows = np.ones((2, 5), np.float32)
    body = wire.pack_request("p", rows)
    for changed, said in (
        (wire.pack_request("other", rows), "the gateway has policy 'other', but this node has 'p'"),
        (wire.pack_request("p", np.ones((9, 5), np.float32)), "9 images; 1 to 4"),
        (wire.pack_request("p", np.full((2, 5), np.nan, np.float32)), "not all finite"),
        (wire.pack_request("p", np.ones((2, 5), np.uint8)), "have 0 bits"),
        (body[:-1], "cut short"),
        (b"{}\n", "malformed"),
        (b"", "malformed"),
    ):
        with pytest.raises(wire.Refused, match=said):
            wire.unpack_request(changed, "p", (5,), FLOAT, 4)


def test_what_is_wrong_with_one_request_only_is_told_apart():
    for rows in (np.ones((9, 5), np.float32), np.full((2, 5), np.nan, np.float32)):
        with pytest.raises(wire.Unfit):
            wire.unpack_request(wire.pack_request("p", rows), "p", (5,), FLOAT, 4)
    with pytest.raises(wire.Refused) as refused:
        wire.unpack_request(wire.pack_request("other", np.ones((2, 5), np.float32)), "p", (5,), FLOAT, 4)
    assert not isinstance(refused.value, wire.Unfit)


def test_a_long_head_is_not_read_but_that_of_a_large_request_is(monkeypatch):
    rows = np.full((512, 5), 1 / 3, np.float32) * np.array([-1e-30, 1e30, 1, 1, 1], np.float32)
    body = wire.pack_request("p", rows, 8)
    assert body.index(b"\n") > wire.MOST_HEAD_BYTES
    assert wire.unpack_request(body, "p", (5,), FLOAT, 512)[1].shape == (512, 5)
    monkeypatch.setattr(wire.msgspec.json, "decode", lambda *given, **kinds: pytest.fail("it is read"))
    endless = b'{"policy":"p","nonce":"n","count":1,"ranges":[' + b"[0,0]," * 100_000 + b"[0,0]]}\n"
    for read in (
        lambda: wire.unpack_request(endless, "p", (5,), FLOAT, 4),
        lambda: wire.unpack_answer(endless, "p", "t", "n", (2, 3), 1.0),
    ):
        with pytest.raises(wire.Refused, match=r"its first line does not end within \d+ bytes"):
            read()
    with pytest.raises(wire.Unfit, match="has more than 4 images"):  # others of the same gateway may be answered
        wire.unpack_request(endless, "p", (5,), FLOAT, 4)


def test_a_small_body_cannot_become_a_large_one():
    bomb = wire.pack_request("p", np.zeros((4, 10_000), np.uint8))
    with pytest.raises(wire.Refused, match="more bytes than 4 times 5"):
        wire.unpack_request(bomb, "p", (5,), PIXELS, 4)


def test_ten_thousand_altered_messages_are_read_or_refused():
    rng = random.Random(0)
    bodies = [wire.pack_request("p", np.arange(10, dtype=np.float32).reshape(2, 5), bits) for bits in wire.BITS] + [
        wire.pack_answer("p", "t", "n", np.ones((2, 3)))
    ]
    refused = 0
    for _ in range(10_000):
        body = bytearray(rng.choice(bodies))
        for _ in range(rng.randint(1, 4)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        body = bytes(body[: rng.randint(0, len(body))]) if rng.random() < 0.3 else bytes(body)
        try:
            wire.unpack_request(body, "p", (5,), FLOAT, 4)
            wire.unpack_answer(body, "p", "t", "n", (2, 3), 5.0)
        except wire.Refused:
            refused += 1
    assert refused > 5000


def test_answers_of_others_altered_or_out_of_range_are_refused():
    sums = np.full((2, 3), 0.5, np.float32)

    def read(body, **changes):
        given = {"policy": "p", "tier": "t", "request": "n", "shape": (2, 3), "most": 1.0, **changes}
        return wire.unpack_answer(body, **given)

    body = wire.pack_answer("p", "t", "n", sums)
    np.testing.assert_array_equal(read(body), sums)
    for wrong, said in (
        (lambda: read(body, request="m"), "another request"),
        (lambda: read(body, tier="u"), "another model or split"),
        (lambda: read(body, policy="q"), "another model or split"),
        (lambda: read(body, shape=(3, 3)), "bytes of numbers"),
        (lambda: read(wire.pack_answer("p", "t", "n", sums * np.nan)), "not finite"),
        (lambda: read(wire.pack_answer("p", "t", "n", -sums)), "not from 0"),
        (lambda: read(wire.pack_answer("p", "t", "n", 9 * sums)), "not from 0 to 1"),
        (lambda: read(body, is_signed=lambda content, signature: False), "not signed by a trusted node"),
    ):
        with pytest.raises(wire.Refused, match=said):
            wrong()


def test_a_signed_answer_to_other_images_is_refused():
    """Someone on the way who sends a node other images, with the nonce of a gateway's request, gains nothing."""
    asked = wire.pack_request("p", np.zeros((1, 4), np.uint8))
    other = asked.partition(b"\n")[0] + b"\n" + bytes([9] * 4)
    digest, _ = wire.unpack_request(other, "p", (4,), PIXELS, 1)
    answer = wire.pack_answer("p", "t", digest, np.ones((1, 2)), sign=lambda content: content[:5])
    with pytest.raises(wire.Refused, match="another request"):
        wire.unpack_answer(answer, "p", "t", wire.digest_of(asked), (1, 2), 1.0, lambda content, signature: True)
