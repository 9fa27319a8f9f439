"""What can happen to nodes and links of a test bed, and how that ends (`experiments.tiers_gateway`)."""

import collections
import dataclasses
import datetime
import http
import http.client
import http.server
import io
import ipaddress
import multiprocessing
import multiprocessing.connection
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID
from PIL import Image

from experiments.tiers_bed import RunningNode
from mlcn_jax.tiers import wire
from mlcn_jax.tiers.node import PATH
from mlcn_jax.tiers.policy import Policy

Fault = tuple[Callable[[list[RunningNode]], None], Callable[[list[RunningNode]], None]]
EXPIRED = "expired certificate, and a valid one again"
QUEUE = 8  # images that may wait at a node
_CLIENTS = 12  # of a flooded node, with a request each: more than it computes and lets wait
_PAUSE_SECONDS = 0.05  # of a client that was refused
FULL = "queues full of other clients' images, and empty"
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


class Flood:
    """Other clients of the nodes, so many that their queues are full; in a process of their own.

    Args:
      bodies: a request to each tier, by its name.

    Attributes:
      times_filled: how many times each node has refused a request since its queue was full.
    """

    def __init__(self, bodies: Mapping[str, bytes]):
        self.times_filled = 0
        context = multiprocessing.get_context("spawn")
        self._clients, its_end = context.Pipe()
        context.Process(target=_clients, args=(its_end, dict(bodies)), daemon=True).start()
        its_end.close()  # or nobody would notice if the process ends
        self._clients.recv()  # once it has started

    def begin(self, nodes: Sequence[RunningNode]) -> None:
        """Starts the clients of each node, past its link."""
        self._clients.send([(node.address, node.plan.artifact.name) for node in nodes])

    def end(self, nodes: Sequence[RunningNode]) -> None:
        """Ends them once each has its last answer."""
        self._clients.send(None)
        refused = self._clients.recv()
        self.times_filled += all(refused[node.plan.artifact.name] for node in nodes)


def _clients(commands: multiprocessing.connection.Connection, bodies: Mapping[str, bytes]) -> None:
    """Asks the nodes that it is told of until it is told to end, and tells how many requests each tier refused."""

    def ask(address: str, tier: str) -> None:
        connection = http.client.HTTPConnection(address, timeout=30)
        while not ended.is_set():
            try:
                connection.request("POST", PATH, bodies[tier])
                response = connection.getresponse()
                response.read()
            except (OSError, http.client.HTTPException):
                connection.close()  # the next request connects again
                ended.wait(_PAUSE_SECONDS)
                continue
            if response.status == http.HTTPStatus.TOO_MANY_REQUESTS:
                refused[tier] += 1
                ended.wait(_PAUSE_SECONDS)
        connection.close()

    commands.send("ready")
    while True:
        try:
            nodes = commands.recv()
        except EOFError:  # the measurement is over
            return
        ended, refused = threading.Event(), collections.Counter[str]()
        clients = [threading.Thread(target=ask, args=node, daemon=True) for node in nodes for _ in range(_CLIENTS)]
        for client in clients:
            client.start()
        commands.recv()
        ended.set()
        for client in clients:
            client.join()
        commands.send(refused)


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
        node.link(delay_ms=10 * node.plan.delay_ms, rate_mbit=node.plan.rate_mbit / 10)


def _as_before(nodes: list[RunningNode]) -> None:
    for node in nodes:
        node.link(delay_ms=node.plan.delay_ms, rate_mbit=node.plan.rate_mbit, mode="pass")


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
