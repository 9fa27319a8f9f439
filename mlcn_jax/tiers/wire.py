"""The messages between a gateway and a node: a line of JSON, then numbers.

A request holds one row per image, pixels in uint8 or the values of a cut in 2 to 32 bits, compressed if that makes it
smaller. An answer holds K float32 numbers per image. An answer, and its signature, are bound to their request by
the digest of its body, in which a nonce makes it unlike any other.
"""

import hashlib
import json
import math
import secrets
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
from jaxtyping import Float

BITS = (2, 4, 8, 16, 32)
MOST_HEAD_BYTES = 2**14  # of the line of JSON, besides the ranges of a request
_MOST_RANGE_BYTES = 64  # of one row's
_LEVEL = 1  # of zlib: time on the trusted device costs more than the last bytes


class Refused(Exception):
    """A message cannot be used; the text says why."""


class Unfit(Refused):
    """A request cannot be answered, though others from the same gateway can; the text says why."""


class _Request(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    policy: str
    nonce: str
    count: int
    bits: int = 0  # of each value; 0 if rows are pixels
    packed: bool = False
    ranges: list[tuple[float, float]] = []  # smallest and largest value of each row, for fewer than 16 bits


class _Answer(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    policy: str
    tier: str
    request: str
    signature: str = ""


def pack_request(policy: str, rows: np.ndarray, bits: int = 32) -> bytes:
    """The body of a request for rows, [n, ...], in uint8 or float32; float32 values are sent with `bits` bits each."""
    head = _Request(policy, secrets.token_hex(8), len(rows))
    if rows.dtype == np.uint8:
        payload = rows.tobytes()
    else:
        head.bits = bits
        head.ranges, payload = _quantised(rows.reshape(len(rows), -1), bits)
    packed = zlib.compress(payload, _LEVEL)
    if len(packed) < len(payload):
        head.packed, payload = True, packed
    return msgspec.json.encode(head) + b"\n" + payload


def unpack_request(
    body: bytes, policy: str, shape: Sequence[int], dtype: np.dtype, most: int
) -> tuple[str, np.ndarray]:
    """The digest and the rows of a request.

    Args:
      body: the body of the request.
      policy: digest of this node's policy, which the request must have too.
      shape, dtype: shape and dtype of a row.
      most: largest number of rows.

    Raises:
      Unfit: it has too many rows, or values that are not finite.
      Refused: it is malformed, or for another policy.
    """
    longest = MOST_HEAD_BYTES + _MOST_RANGE_BYTES * most
    if len(body) > longest and body.find(b"\n", 0, longest + 1) < 0:
        raise Unfit(
            f"the request is malformed or has more than {most} images (its first line does not end within {longest} "
            "bytes)"
        )
    head, payload = _split(body, _Request, longest)
    if head.policy != policy:
        raise Refused(
            f"the gateway has policy {head.policy[:32]!r}, but this node has {policy!r}: give both tiers of one split"
        )
    if not 1 <= head.count <= most:
        raise Unfit(f"the request has {head.count} images; 1 to {most} are accepted")
    of_pixels = dtype == np.uint8
    if head.bits not in ((0,) if of_pixels else BITS):
        raise Refused(f"the values have {head.bits} bits; this node takes {'pixels' if of_pixels else BITS}")
    size = math.prod(shape)
    row_bytes = size if of_pixels else -(-size * head.bits // 8)
    if head.packed:
        unpacking = zlib.decompressobj()
        try:
            payload = unpacking.decompress(payload, head.count * row_bytes + 1)
        except zlib.error as error:
            raise Refused(f"the values cannot be unpacked ({error})") from error
        if not unpacking.eof:
            raise Refused(f"the values have more bytes than {head.count} times {row_bytes}, or are cut short")
    if len(payload) != head.count * row_bytes:
        raise Refused(f"the values have {len(payload)} bytes or more, not {head.count} times {row_bytes}")
    raw = np.frombuffer(payload, np.uint8).reshape(head.count, row_bytes)
    rows = raw if of_pixels else _restored(raw, head.bits, head.ranges, size)
    if not np.isfinite(rows).all():
        raise Unfit("the values are not all finite")
    return digest_of(body), rows.reshape(head.count, *shape)


def digest_of(body: bytes) -> str:
    """What names a request in its answer: the SHA-256 of its body."""
    return hashlib.sha256(body).hexdigest()


def pack_answer(
    policy: str,
    tier: str,
    request: str,
    sums: Float[np.ndarray, "n classes"],
    sign: Callable[[bytes], bytes] | None = None,
) -> bytes:
    """The body of an answer to the request of a digest; `sign` signs its content."""
    payload = np.ascontiguousarray(sums, "<f4").tobytes()
    signature = sign(_signed_content(policy, tier, request, payload)).hex() if sign else ""
    return msgspec.json.encode(_Answer(policy, tier, request, signature)) + b"\n" + payload


def unpack_answer(
    body: bytes,
    policy: str,
    tier: str,
    request: str,
    shape: tuple[int, int],
    most: float,
    is_signed: Callable[[bytes, bytes], bool] | None = None,
) -> Float[np.ndarray, "n classes"]:
    """What a tier's lanes add to the squared lengths, from the body of an answer.

    Args:
      body: the body.
      policy, tier, request: what the answer must have been made for, the request by its digest.
      shape: numbers of images and classes.
      most: largest possible value.
      is_signed: says whether a signature of some content is trusted; None accepts unsigned answers.

    Raises:
      Refused: it is malformed, of another model, not signed, not finite or out of range.
    """
    head, payload = _split(body, _Answer, MOST_HEAD_BYTES)
    if (head.policy, head.tier) != (policy, tier):
        raise Refused(f"the answer is from tier {head.tier[:32]!r} of another model or split, {head.policy[:32]!r}")
    if head.request != request:
        raise Refused("the answer belongs to another request")
    if is_signed and not is_signed(_signed_content(policy, tier, request, payload), _from_hex(head.signature)):
        raise Refused("the answer is not signed by a trusted node")
    if len(payload) != 4 * math.prod(shape):
        raise Refused(f"the answer has {len(payload)} bytes of numbers, not {4 * math.prod(shape)}")
    sums = np.frombuffer(payload, "<f4").reshape(shape)
    if not np.isfinite(sums).all() or sums.min() < 0 or sums.max() > most * 1.001:
        raise Refused(f"the answer has numbers that are not finite, or not from 0 to {most:g}")
    return sums


def _signed_content(policy: str, tier: str, request: str, payload: bytes) -> bytes:
    return json.dumps(["mlcn_jax tier answer", policy, tier, request]).encode() + b"\n" + payload


def _from_hex(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""


def _split(body: bytes, kind: type, most: int) -> tuple[Any, bytes]:
    """The head of a message and its numbers; a head of more than `most` bytes is not read."""
    end = body.find(b"\n", 0, most + 1)
    if end < 0:
        raise Refused(f"the message is malformed (its first line does not end within {most} bytes)")
    try:
        return msgspec.json.decode(body[:end], type=kind), body[end + 1 :]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(f"the message is malformed ({error})") from error


def _quantised(rows: Float[np.ndarray, "n size"], bits: int) -> tuple[list[tuple[float, float]], bytes]:
    """Values in fewer bits; below 16 bits, evenly spaced between the smallest and the largest of each row.

    With 16 bits, finite values beyond the range of float16 become its nearest.
    """
    if bits == 32:
        return [], rows.astype("<f4").tobytes()
    if bits == 16:
        most = np.finfo(np.float16).max
        return [], np.where(np.isfinite(rows), rows.clip(-most, most), rows).astype("<f2").tobytes()
    low, high = rows.min(axis=1), rows.max(axis=1)
    levels = 2**bits - 1
    scaled = (rows - low[:, None]) / np.maximum(high - low, 1e-30)[:, None] * levels
    codes = np.rint(scaled).astype(np.uint8)
    each = 8 // bits
    codes = np.pad(codes, ((0, 0), (0, -codes.shape[1] % each))).reshape(len(rows), -1, each)
    joined = np.bitwise_or.reduce(codes << (bits * np.arange(each, dtype=np.uint8)), axis=2)
    return list(zip(low.tolist(), high.tolist(), strict=True)), joined.astype(np.uint8).tobytes()


def _restored(raw: np.ndarray, bits: int, ranges: Sequence[tuple[float, float]], size: int) -> np.ndarray:
    if bits >= 16:
        return raw.reshape(-1).view("<f2" if bits == 16 else "<f4").astype(np.float32).reshape(len(raw), size)
    if len(ranges) != len(raw):
        raise Refused(f"there are {len(ranges)} ranges for {len(raw)} rows")
    each = 8 // bits
    codes = (raw[:, :, None] >> (bits * np.arange(each, dtype=np.uint8))) & (2**bits - 1)
    low, high = np.array(ranges, np.float32).T[:, :, None]
    return (low + (high - low) * codes.reshape(len(raw), -1)[:, :size] / (2**bits - 1)).astype(np.float32)
