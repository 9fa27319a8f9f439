"""What can happen to nodes and links, and requests with short deadlines meanwhile (`experiments.tiers_gateway`)."""

import collections
import concurrent.futures
import dataclasses
import datetime
import http.server
import io
import ipaddress
import random
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID
from PIL import Image

from experiments.quota import Quota
from experiments.tiers_bed import RunningNode
from mlcn_jax.tiers import wire
from mlcn_jax.tiers.policy import Policy

Fault = tuple[Callable[[list[RunningNode]], None], Callable[[list[RunningNode]], None]]
EXTRA_MS, LONG_EXTRA_MS = 50.0, 250.0  # of a deadline, beyond the end's own lanes
_WAITS = ("held_back_ms", "gateway_waited_ms", "waited_ms")
_PHASES = ("before", "during", "after")  # of a fault
_REQUESTS_OF_TIME, _MOST_TIMES = 200, 50  # a fault comes once in at least so many requests, and at most so often
_WELL_SECONDS, _LOOK_SECONDS = 60.0, 0.2  # longest wait until a fault is forgotten, and between looks
_NEAR_MS, _USUAL = 15.0, 0.9  # waits of answers that came this long before the deadline are usual up to this quantile
_MOMENT_SECONDS = 0.05  # within which a fault comes, at random, once it is its turn
EXPIRED = "expired certificate, and a valid one again"
EDGE_ALONE = "SIGSTOP of the edge alone, and SIGCONT"


def make_keys(folder: Path) -> tuple[Path, Path]:
    """A private key for the nodes, and its public one."""
    key, public = folder / "tiers-node.pem", folder / "tiers-node.pub.pem"
    private = Ed25519PrivateKey.generate()
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    key.write_bytes(private.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    public.write_bytes(private.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))
    return key, public


@dataclasses.dataclass(frozen=True)
class Certificates:
    """Who signs (a file), and options of nodes that show a certificate which is valid, or has expired."""

    ca: Path
    valid: tuple[str, ...]
    expired: tuple[str, ...]


def make_certificates(folder: Path) -> Certificates:
    """Certificates for nodes on this machine, in files of a folder."""
    key, name = ec.generate_private_key(ec.SECP256R1()), _name("tiers of a test bed")
    ca = folder / "tiers-ca.crt"
    ca.write_bytes(_signed(name, key, name, key, 1).public_bytes(serialization.Encoding.PEM))

    def node(kind: str, days: int) -> tuple[str, ...]:
        own = ec.generate_private_key(ec.SECP256R1())
        files = folder / f"tiers-{kind}.crt", folder / f"tiers-{kind}.key"
        made = _signed(_name("127.0.0.1"), own, name, key, days)
        files[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
        plain = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        files[1].write_bytes(own.private_bytes(serialization.Encoding.PEM, *plain))
        return f"--tls_cert={files[0]}", f"--tls_key={files[1]}"

    return Certificates(ca, node("valid", 1), node("expired", -1))


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _signed(
    name: x509.Name, key: ec.EllipticCurvePrivateKey, by: x509.Name, by_key: ec.EllipticCurvePrivateKey, days: int
) -> x509.Certificate:
    now, address = datetime.datetime.now(datetime.UTC), ipaddress.ip_address("127.0.0.1")
    builder = x509.CertificateBuilder(by, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - datetime.timedelta(days=10))
    builder = builder.not_valid_after(now + datetime.timedelta(days=days))
    for extension, critical in (
        (x509.BasicConstraints(name == by, None), True),
        (x509.SubjectAlternativeName([x509.IPAddress(address)]), False),
        (x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(by_key.public_key()), False),
    ):
        builder = builder.add_extension(extension, critical)
    return builder.sign(by_key, hashes.SHA256())


class FalseNode:
    """A server that stands in for a tier's node and answers gateways with what it must not.

    Args:
      policy: of the split.
      tier: whose node it stands in for.
      sign: signs as the tier's nodes do, so that an answer is wrong in one thing only.

    Attributes:
      kind: one of the keys of `kinds`.
    """

    def __init__(self, policy: Policy, tier: str, sign: Callable[[bytes], bytes]):
        digest, classes, stranger = policy.digest, len(policy.class_names), Ed25519PrivateKey.generate()
        numbers = np.full((1, classes), 0.01, np.float32)
        self.kinds: dict[str, Callable[[str], tuple[int, bytes]]] = {
            "not finite": lambda asked: (200, wire.pack_answer(digest, tier, asked, numbers * np.nan, sign)),
            "of another model": lambda asked: (200, wire.pack_answer("0" * 32, tier, asked, numbers, sign)),
            "signed by nobody known": lambda asked: (
                200,
                wire.pack_answer(digest, tier, asked, numbers, stranger.sign),
            ),
            "answers 429, as a full queue does": lambda asked: (429, b"full"),
        }
        self.kind, false = "not finite", self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # or an answer, sent in two parts, waits 40 ms

            def do_POST(self):
                asked = wire.digest_of(self.rfile.read(int(self.headers["Content-Length"])))
                self._answer(*false.kinds[false.kind](asked))

            def do_GET(self):
                self._answer(200, b"{}")

            def _answer(self, status, body):
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


def led_to(addresses: Sequence[str]) -> Fault:
    """A fault: the nodes' links lead elsewhere, each to its own address, and then to the nodes again."""

    def begin(nodes: list[RunningNode]) -> None:
        for node, address in zip(nodes, addresses, strict=True):
            node.link(to=address)

    def end(nodes: list[RunningNode]) -> None:
        for node in nodes:
            node.link(to=node.address)

    return begin, end


def taken_over(false: Sequence[FalseNode], kind: str) -> Fault:
    """A fault: the nodes' links lead to false ones of a kind, one for each, and then to the nodes again."""
    lead_there, lead_back = led_to([own.address for own in false])

    def begin(nodes: list[RunningNode]) -> None:
        for own in false:
            own.kind = kind
        lead_there(nodes)

    return begin, lead_back


def png(image: np.ndarray) -> bytes:
    """An image as a PNG file."""
    buffer = io.BytesIO()
    Image.fromarray(image.squeeze()).save(buffer, "PNG")
    return buffer.getvalue()


def _stop(nodes: list[RunningNode]) -> None:
    for node in nodes:
        node.signal(signal.SIGSTOP)


def _go_on(nodes: list[RunningNode]) -> None:
    for node in nodes:
        node.signal(signal.SIGCONT)


def _kill(nodes: list[RunningNode]) -> None:
    for node in nodes:
        node.signal(signal.SIGKILL)


def _start_again(nodes: list[RunningNode]) -> None:
    for node in nodes:
        node.start_again()
    for node in nodes:  # all load at the same time
        node.come_back()


def _link(**changes: float | str) -> Callable[[list[RunningNode]], None]:
    def change(nodes: list[RunningNode]) -> None:
        for node in nodes:
            node.link(**changes)

    return change


def _slow(nodes: list[RunningNode]) -> None:
    for node in nodes:
        node.link(delay_ms=10 * node.plan.delay_ms)


def _as_before(nodes: list[RunningNode]) -> None:
    for node in nodes:
        node.link(delay_ms=node.plan.delay_ms, mode="pass")


def _of_edge(change: Callable[[list[RunningNode]], None]) -> Callable[[list[RunningNode]], None]:
    return lambda nodes: change([node for node in nodes if node.plan.artifact.name == "edge"])


# What happens to all nodes, if no others are named, and how that ends.
FAULTS: dict[str, Fault] = {
    "none": (lambda nodes: None, lambda nodes: None),
    "SIGSTOP, and SIGCONT": (_stop, _go_on),
    EDGE_ALONE: (_of_edge(_stop), _of_edge(_go_on)),
    "link ten times slower, and as before": (_slow, _as_before),
    "link stalls, and goes on": (_link(mode="stall"), _as_before),
    "partition, and as before": (_link(mode="drop"), _as_before),
    "SIGKILL, and started again": (_kill, _start_again),
}


def waited_for_core() -> float:
    """Seconds for which this thread was ready to run but had no core so far; 0 where the kernel does not tell."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


class Asked:
    """What a gateway's tiers have been asked, and whether they are well, from its `/tiers`."""

    def __init__(self, client: httpx.Client, url: str):
        self._client, self._url = client, f"{url}/tiers"
        self._well = {state["name"] for state in self._others() if not state["trouble"]}

    def _others(self) -> list[dict[str, Any]]:
        return [state for state in self._client.get(self._url).json() if "trouble" in state]

    def requests(self) -> int:
        """Requests that nodes have answered or failed to answer."""
        return sum(state["answers"] + sum(state["failures"].values()) for state in self._others())

    def wait(self) -> bool:
        """Waits until tiers that were well at first are so again, or too long; returns whether they are."""
        end = time.monotonic() + _WELL_SECONDS
        while any(state["trouble"] and state["name"] in self._well for state in self._others()):
            if time.monotonic() > end:
                return False
            time.sleep(_LOOK_SECONDS)
        return True


def under_fault(
    url: str,
    images: np.ndarray,
    requests: int,
    nodes: list[RunningNode],
    fault: Fault,
    quota: Quota,
    extra_ms: float = EXTRA_MS,
) -> dict[str, Any]:
    """Requests with a short deadline while nodes or links fail: how many were late, or not answered, and why.

    A fault begins after a quarter of some requests, once the gateway has forgotten the one before, and ends after half
    of them more, each at a random moment and while requests go on, so that it meets those that are under way. What
    takes longer, as a node that starts again does, is waited for: then half as many requests at least come before the
    next change, and there are fewer faults. Those count that ended before the last request.

    Requests come one after the other, so one that takes long keeps others from being sent. Those that would have been
    sent meanwhile, at the usual pace, are added to the requests and, as far as they would have been late, to the late
    ones, as HdrHistogram corrects for coordinated omission.

    Args:
      url: of the gateway.
      images: that are sent, one a request.
      requests: how many, one after the other.
      nodes: that fail.
      fault: how they begin to fail, and how that ends.
      quota: of the gateway, which tells how long it was kept waiting.
      extra_ms: of the deadline, beyond the 95 % time of the end's own lanes.
    """
    deadline = round(httpx.get(f"{url}/", trust_env=False).json()["own_p95_ms"] + extra_ms, 3)
    met = exposed = at_begin = unwell = 0
    bodies = [png(image) for image in images]
    late: list[dict[str, Any]] = []
    punctual: list[tuple[float, dict[str, float]]] = []  # with the time by the gateway's clock
    unanswered: list[str] = []
    taken = []
    heard: dict[str, collections.Counter[str]] = {phase: collections.Counter() for phase in _PHASES}
    times = min(max(requests // _REQUESTS_OF_TIME, 1), _MOST_TIMES)
    each, rng, now = requests // times, random.Random(0), [_PHASES[0]]
    under_way: concurrent.futures.Future | None = None
    changes, turn = 0, each // 4  # those that are finished, and the request at which the next one starts

    def change(ends: bool) -> None:
        nonlocal met, exposed, at_begin, unwell
        if not ends:
            unwell += not asked.wait()
            at_begin = asked.requests()
        time.sleep(rng.uniform(0, _MOMENT_SECONDS))
        if not ends:
            now[0] = "during"
        else:
            meanwhile = asked.requests() - at_begin
            exposed, met = exposed + meanwhile, met + (meanwhile > 0)
        fault[ends](nodes)
        if ends:
            now[0] = "after"

    with (
        httpx.Client(timeout=30, trust_env=False) as client,
        httpx.Client(timeout=30, trust_env=False) as another,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        asked = Asked(another, url)
        for i in range(requests):
            if under_way is not None and under_way.done():
                under_way.result()  # which raises what went wrong
                under_way, changes, turn = None, changes + 1, max(turn + each // 2, i + each // 4)
            if under_way is None and changes < 2 * times and i >= turn:
                under_way = pool.submit(change, changes % 2 == 1)
            phase, waited = now[0], waited_for_core()
            held, waited_there, started = quota.held_back(), quota.waited_for_core(), time.perf_counter()
            try:
                response = client.post(f"{url}/predict?deadline_ms={deadline}", content=bodies[i % len(bodies)])
                answer = response.raise_for_status().json()["predictions"][0]
            except (httpx.HTTPError, ValueError, LookupError) as error:  # none, or none that is one
                unanswered.append(repr(error))
                continue
            milliseconds = 1e3 * (time.perf_counter() - started)
            taken.append(milliseconds)
            heard[phase][f"{len(answer['lanes'])} lanes"] += 1
            waits = {
                "held_back_ms": 1e3 * (quota.held_back() - held),
                "gateway_waited_ms": 1e3 * (quota.waited_for_core() - waited_there),
                "waited_ms": 1e3 * (waited_for_core() - waited),
            }
            if milliseconds > deadline:
                one = {"request": i, "phase": phase, "ms": milliseconds, "by_gateway_ms": answer["ms"]}
                late.append(one | waits | {"lanes": answer["lanes"]})
            else:
                punctual.append((answer["ms"], waits))
    if under_way is not None:
        under_way.result()
    if now[0] == "during":
        fault[1](nodes)  # so that the next finds all as it was
    time.sleep(1)
    usual = usual_waits(punctual, deadline)
    for one in late:
        one["why"] = why_late(one, deadline, usual)
    unsent, late_unsent = omitted(taken, deadline)
    return {
        "requests": requests + unsent,
        "omitted": unsent,
        "times": changes // 2,
        "times_met": met,
        "exposed": exposed,
        "begun_unwell": unwell,
        "planned_times": times,
        "deadline_ms": deadline,
        "late": len(late) + late_unsent,
        "late_by_gateway": sum(one["by_gateway_ms"] > deadline for one in late),
        "unexplained": sum(not one["why"] for one in late),
        "unanswered": len(unanswered),
        "p50_ms": float(np.quantile(taken, 0.5)) if taken else None,
        "p999_ms": float(np.quantile(taken, 0.999)) if taken else None,
        "max_ms": max(taken, default=None),
        "heard": {phase: dict(found) for phase, found in heard.items()},
        "usual_waits": usual,
        "late_ones": late[:100],
        "unanswered_ones": unanswered[:20],
    }


def omitted(taken: Sequence[float], deadline: float) -> tuple[int, int]:
    """Requests that were not sent because another took long, and those of them that would have been late.

    A request that takes t instead of the median m keeps t / m - 1 others from being sent, of which the first would have
    taken t - m, the next t - 2 m and so on.

    Args:
      taken: milliseconds of requests that were sent one after the other.
      deadline: milliseconds after which an answer is late.
    """
    if not taken:
        return 0, 0
    usual = float(np.median(taken))
    slow = [time for time in taken if time > deadline]
    unsent = sum(int(time / usual) - 1 for time in slow)
    return unsent, sum(int((time - deadline) / usual) for time in slow)


def usual_waits(punctual: Sequence[tuple[float, Mapping[str, float]]], deadline: float) -> dict[str, float]:
    """What punctual answers waited, at most usually: of those that took nearly as long as the deadline, if any did.

    An answer that waits for another tier collects more waits than one of the end alone, whether or not it is late.
    """
    near = [waits for took, waits in punctual if took > deadline - _NEAR_MS] or [waits for _, waits in punctual]
    return {name: float(np.quantile([waits[name] for waits in near], _USUAL)) for name in (_WAITS if near else ())}


def why_late(one: Mapping[str, Any], deadline: float, usual: Mapping[str, float]) -> str:
    """Why an answer was late, from what was measured beside it; empty if what was measured is less than the lateness.

    Only what it waited longer than punctual answers usually do counts: the deadline has room for that. The gateway's
    waiting for a core counts within the time that it took by its own clock, less what its quota kept it
    waiting, which may be part of it; the client's counts outside that time.
    """
    more = {name: max(one[name] - usual.get(name, 0.0), 0.0) for name in _WAITS}
    held = min(more["held_back_ms"], one["by_gateway_ms"])
    there = max(min(more["gateway_waited_ms"], one["by_gateway_ms"]) - held, 0.0)
    waited = min(more["waited_ms"], max(one["ms"] - one["by_gateway_ms"], 0.0))
    if held + there + waited < one["ms"] - deadline:
        return ""
    reasons = {
        "the gateway had used up its quota and was kept waiting": held,
        "the gateway waited for a core": there,
        "the client waited for a core": waited,
    }
    return ", and ".join(f"{reason} for {each:.1f} ms" for reason, each in reasons.items() if each)
