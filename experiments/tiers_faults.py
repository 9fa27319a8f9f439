"""What can happen to nodes and links, and requests with short deadlines meanwhile (`experiments.tiers_gateway`)."""

import http.server
import io
import json
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from PIL import Image

from experiments.tiers_bed import RunningNode
from mlcn_jax.tiers import wire
from mlcn_jax.tiers.policy import Policy

Fault = tuple[Callable[[list[RunningNode]], None], Callable[[list[RunningNode]], None]]
_EXTRA_MS = 50.0  # of a deadline, beyond the end's own lanes


def make_keys(folder: Path) -> tuple[Path, Path]:
    """A private key for the nodes, and its public one."""
    key, public = folder / "tiers-node.pem", folder / "tiers-node.pub.pem"
    private = Ed25519PrivateKey.generate()
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    key.write_bytes(private.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    public.write_bytes(private.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))
    return key, public


class FalseNode:
    """A server that answers gateways with what it must not; `kind` is one of its keys."""

    def __init__(self, policy: Policy):
        digest, classes, stranger = policy.digest, len(policy.class_names), Ed25519PrivateKey.generate()
        numbers = np.full((1, classes), 0.01, np.float32)
        self.kinds: dict[str, Callable[[str, str], tuple[int, bytes]]] = {
            "not finite": lambda tier, nonce: (200, wire.pack_answer(digest, tier, nonce, numbers * np.nan)),
            "of another model": lambda tier, nonce: (200, wire.pack_answer("0" * 32, tier, nonce, numbers)),
            "signed by nobody known": lambda tier, nonce: (
                200,
                wire.pack_answer(digest, tier, nonce, numbers, stranger.sign),
            ),
            "a full queue": lambda tier, nonce: (429, b"full"),
        }
        self.kind, false = "not finite", self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                head = self.rfile.read(int(self.headers["Content-Length"])).partition(b"\n")[0]
                status, body = false.kinds[false.kind]("edge", json.loads(head)["nonce"])
                self._answer(status, body)

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
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def takes_over(self, kind: str) -> Fault:
        """A fault: the nodes' links lead here, and then to the nodes again."""

        def begin(nodes: list[RunningNode]) -> None:
            self.kind = kind
            for node in nodes:
                node.link(to=f"127.0.0.1:{self.server.server_address[1]}")

        def end(nodes: list[RunningNode]) -> None:
            for node in nodes:
                node.link(to=node.address)

        return begin, end


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


# What happens to both nodes after a quarter of the requests, and after three quarters.
FAULTS: dict[str, Fault] = {
    "none": (lambda nodes: None, lambda nodes: None),
    "SIGSTOP, and SIGCONT": (_stop, _go_on),
    "link ten times slower, and as before": (_slow, _as_before),
    "link stalls, and goes on": (_link(mode="stall"), _as_before),
    "partition, and as before": (_link(mode="drop"), _as_before),
    "SIGKILL": (lambda nodes: [node.signal(signal.SIGKILL) for node in nodes] and None, lambda nodes: None),
}


def under_fault(url: str, images: np.ndarray, requests: int, nodes: list[RunningNode], fault: tuple) -> dict[str, Any]:
    """Requests with a short deadline while nodes or links fail: how many were late, or not answered."""
    deadline = httpx.get(f"{url}/").json()["own_p95_ms"] + _EXTRA_MS
    bodies = [png(image) for image in images]
    late: list[dict[str, Any]] = []
    unanswered, times = 0, []
    with httpx.Client(timeout=30, trust_env=False) as client:
        for i in range(requests):
            if i in (requests // 4, 3 * requests // 4):
                fault[i > requests // 2](nodes)
            started = time.perf_counter()
            try:
                response = client.post(f"{url}/predict?deadline_ms={deadline}", content=bodies[i % len(bodies)])
                answer = response.raise_for_status().json()["predictions"][0]
            except httpx.HTTPError:
                unanswered += 1
                continue
            milliseconds = 1e3 * (time.perf_counter() - started)
            times.append(milliseconds)
            if milliseconds > deadline:
                late.append({"request": i, "ms": milliseconds, "by_gateway_ms": answer["ms"], "lanes": answer["lanes"]})
    time.sleep(1)
    return {
        "requests": requests,
        "deadline_ms": deadline,
        "late": len(late),
        "late_by_gateway": sum(one["by_gateway_ms"] > deadline for one in late),
        "unanswered": unanswered,
        "p50_ms": float(np.quantile(times, 0.5)),
        "p999_ms": float(np.quantile(times, 0.999)),
        "late_ones": late[:20],
    }
