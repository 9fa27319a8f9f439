"""Splits a model's lanes over devices: the nearest device answers at once, and the others refine its answer.

    mlcn_jax tiers split runs/mlcn2 --tiers=tiers.json      # one artifact per tier, in runs/mlcn2/tiers
    mlcn_jax tiers node runs/mlcn2/tiers/edge --port=8001   # on the edge
    mlcn_jax tiers gateway runs/mlcn2/tiers/end --nodes=edge=http://edge:8001,cloud=http://cloud:8002
    curl -N --data-binary @image.png -H 'Content-Type: image/png' http://127.0.0.1:8000/refine

The gateway accepts the same requests as `mlcn_jax serve`. `POST /refine` answers one picture with a JSON line for each
answer that improves on the one before; `POST /predict` returns only the last. `?deadline_ms=N` returns the best answer
available by then. `GET /` is a page that shows answers as they arrive, `GET /tiers` returns the state of the tiers.

Takes no configuration: mlcn_jax train --help lists the fields of one.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import shlex
import ssl
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mlcn_jax.errors import InputError
from mlcn_jax.files import given_file, given_files
from mlcn_jax.serving import server
from mlcn_jax.tiers import wire

_WITH_KEYS = ("cryptography",)
_OF_GATEWAY = ("httpx",)
_LOOK_SECONDS = 2.0
_log = logging.getLogger("mlcn_jax")


class _Several(argparse.Action):
    """An option with values separated by commas, which may also be given several times."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, values if before is None else f"{before},{values}")


def _parser() -> argparse.ArgumentParser:
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="mlcn_jax tiers",
        description=summary,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, meaning: str) -> argparse.ArgumentParser:
        kind = argparse.ArgumentDefaultsHelpFormatter
        return commands.add_parser(name, help=meaning, description=meaning, formatter_class=kind)

    split = command("split", "writes one artifact per tier, and chooses when an answer is final")
    split.add_argument("workdir", help="folder of a training run")
    split.add_argument("--tiers", required=True, help='JSON file: the tiers, nearest first (see "Tiers" in the docs)')
    split.add_argument(
        "--cut", default="pixels", help="what leaves the first tier: pixels, conv1, capsules, columns, ..."
    )
    split.add_argument("--key", default=None, help="Ed25519 private key (PEM) to sign the artifacts with")
    split.add_argument("--data_dir", default="", help="overrides the run's config.data.dir, if not empty")
    split.add_argument("--out", default="tiers", help="name of the folder in WORKDIR")
    split.add_argument("--precision", default="", help="export of the model that `mlcn_jax precision` wrote")

    node = command("node", "answers gateways with the lanes of one tier")
    node.add_argument("artifact", help="folder of the tier, as `tiers split` wrote it")
    node.add_argument("--key", default=None, help="Ed25519 private key (PEM) to sign answers with")

    gateway = command("gateway", "answers clients with its own lanes, and refines answers with the other tiers")
    gateway.add_argument("artifact", help="folder of the first tier, as `tiers split` wrote it")
    several: dict[str, Any] = {"default": None, "action": _Several}
    gateway.add_argument("--nodes", **several, help="NAME=URL,... of the other tiers; a tier may have several nodes")
    gateway.add_argument("--deadline_ms", default=0.0, type=float, help="ms per answer; 0 waits until it is final")
    gateway.add_argument("--bits", default=32, type=int, choices=wire.BITS, help="bits per value sent to other tiers")
    gateway.add_argument("--noise", default=0.0, type=float, help="noise added to these values, relative to their std")
    gateway.add_argument("--may_stop", action="store_true", help="allows the page to stop tiers")
    gateway.add_argument("--node_keys", **several, help="public keys (PEM), one of which must sign a node's answer")
    gateway.add_argument("--ca", default=None, help="CA certificates (PEM) that signed the nodes' certificates")
    gateway.add_argument("--cert", default=None, help="certificate (PEM) to present to the nodes, with --cert_key")
    gateway.add_argument("--cert_key", default=None, help="private key (PEM) of --cert")
    for each in (node, gateway):
        each.add_argument("--trust", **several, help="public keys (PEM), one of which must have signed the artifact")
        each.add_argument(
            "--tls_cert", default=None, help="certificate (PEM) of this server, which then accepts only https"
        )
        each.add_argument("--tls_key", default=None, help="private key (PEM) of --tls_cert")
        each.add_argument("--tls_clients", default=None, help="CA certificates (PEM) that sign client certificates")
        server.add_limits(each)
    parser.epilog = "\n\n".join([rest.rstrip(), *(each.format_help().strip() for each in (split, node, gateway))])
    return parser


def main(argv: Sequence[str]) -> None:
    arguments = _parser().parse_args(argv)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # silences XLA's messages about slow constant folding
    {"split": _split, "node": _node, "gateway": _gateway}[arguments.command](arguments)


def _split(arguments: argparse.Namespace) -> None:
    from mlcn_jax import pretrained
    from mlcn_jax.tiers import split

    workdir = pretrained.find_workdir(arguments.workdir)
    pretrained.check_writable(workdir, "tiers split")
    key = given_file("key", arguments.key)
    precision = Path(arguments.precision).expanduser() if arguments.precision else None
    folder = split.split(
        workdir, Path(arguments.tiers).expanduser(), arguments.cut, key, arguments.data_dir, arguments.out, precision
    )
    print(split.describe(folder))


def _node(arguments: argparse.Namespace) -> None:
    key, trust = given_file("key", arguments.key), given_files("trust", arguments.trust)
    limits, listener, tls = _listen(arguments, _WITH_KEYS if key or trust else ())
    from mlcn_jax.tiers.artifact import TierArtifact
    from mlcn_jax.tiers.node import KEEP_ALIVE_SECONDS, NodeService

    sign = None
    if key:
        from mlcn_jax.tiers import signatures

        sign = signatures.private_key(key).sign
    service = NodeService(TierArtifact(arguments.artifact, trust), limits, sign)
    service.warm_up()
    name, url = service.artifact.name, server.url_of(listener, bool(tls))
    server.serve(service, listener, f"tier {name} at {url}", timeout_keep_alive=KEEP_ALIVE_SECONDS, **tls)


def _gateway(arguments: argparse.Namespace) -> None:
    node_keys, trust = given_files("node_keys", arguments.node_keys), given_files("trust", arguments.trust)
    limits, listener, tls = _listen(arguments, (*_OF_GATEWAY, *(_WITH_KEYS if node_keys or trust else ())))
    if not all(0 <= value < float("inf") for value in (arguments.noise, arguments.deadline_ms)):
        raise InputError(
            f"--noise={arguments.noise:g} and --deadline_ms={arguments.deadline_ms:g} must both be 0 or more and finite"
        )
    from mlcn_jax.tiers.artifact import TierArtifact
    from mlcn_jax.tiers.client import TierClient, check_nodes
    from mlcn_jax.tiers.gateway import GatewayService

    artifact = TierArtifact(arguments.artifact, trust)
    policy = artifact.policy
    if artifact.name != policy.names[0]:
        raise InputError(
            f"{arguments.artifact} is the tier {artifact.name}, but a gateway needs the first tier, {policy.names[0]}: "
            f"give its folder, or start this one with: mlcn_jax tiers node {arguments.artifact}"
        )
    is_signed = None
    if node_keys:
        from mlcn_jax.tiers import signatures

        trusted = signatures.public_keys(node_keys)

        def is_signed(content: bytes, signature: bytes) -> bool:
            return signatures.is_signed(content, signature, trusted)

    context = _client_tls(arguments)
    urls = _urls(arguments.nodes or "", policy.names[1:])
    plain = [url for each in urls.values() for url in each if not url.lower().startswith("https:")]
    if plain and (arguments.ca or arguments.cert):
        raise InputError(
            f"--nodes has {plain[0]}, to which everything would go unencrypted, and --ca or --cert is given: give "
            "https URLs, or leave both out"
        )
    clients = {name: TierClient(name, policy, urls[name], context, is_signed) for name in urls}
    asyncio.run(check_nodes(policy, urls, context, _LOOK_SECONDS))
    service = GatewayService(
        artifact, clients, limits, arguments.deadline_ms, arguments.bits, arguments.noise, arguments.may_stop
    )
    service.warm_up()
    if arguments.noise or arguments.bits != wire.BITS[-1]:
        _log.warning("noise and fewer bits change answers: thresholds and `tolerance` were chosen without them")
    url = server.url_of(listener, bool(tls))
    server.serve(service, listener, f"gateway at {url}/refine, and a page at {url}/", **tls)


def _listen(arguments: argparse.Namespace, packages: Sequence[str]) -> tuple[Any, Any, dict[str, Any]]:
    """The limits, a bound socket, and uvicorn's settings of TLS."""
    server.check_packages(packages, "tiers,serve")
    server.leave_other_servers_metrics()
    limits = server.limits_of(arguments)
    tls: dict[str, Any] = {}
    cert, key, clients = (given_file(name, getattr(arguments, name)) for name in ("tls_cert", "tls_key", "tls_clients"))
    if not cert and (key or clients):
        raise InputError("--tls_key and --tls_clients need --tls_cert, the certificate of this server: give it as well")
    if cert:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        with _usable("--tls_cert, --tls_key or --tls_clients", cert, key, clients):
            _load_pair(context, cert, key)
            if clients:
                context.load_verify_locations(clients)
        tls = {"ssl_certfile": cert, "ssl_keyfile": key}
        if clients:
            tls |= {"ssl_ca_certs": clients, "ssl_cert_reqs": ssl.CERT_REQUIRED}
    return limits, server.bind(arguments.host, arguments.port, secure=bool(tls)), tls


def _client_tls(arguments: argparse.Namespace) -> ssl.SSLContext:
    """What a gateway asks nodes with."""
    ca, cert, key = (given_file(name, getattr(arguments, name)) for name in ("ca", "cert", "cert_key"))
    if key and not cert:
        raise InputError("--cert_key is the key of a certificate: give --cert as well")
    with _usable("--ca, --cert or --cert_key", ca, cert, key):
        context = ssl.create_default_context(cafile=ca)
        if cert:
            _load_pair(context, cert, key)
    return context


@contextlib.contextmanager
def _usable(options: str, *files: Path | None) -> Iterator[None]:
    """Raises InputError, which names the options, if a file cannot be read, or used in the block."""
    try:
        for file in filter(None, files):
            file.open("rb").close()  # the errors of ssl do not name the file
        yield
    except InputError:
        raise
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise InputError(f"{options} cannot be used: {error}") from error


def _load_pair(context: ssl.SSLContext, cert: Path, key: Path | None) -> None:
    """Loads a certificate and its private key, by default in the same file; raises InputError if it is encrypted."""

    def refuse() -> str:
        file = key or cert
        raise InputError(
            f"the private key in {file} is encrypted, but passwords are not asked for: give an unencrypted one, "
            f"as `openssl pkey -in {shlex.quote(str(file))} -out plain.pem` writes it"
        )

    context.load_cert_chain(cert, key, refuse)


def _urls(text: str, names: Sequence[str]) -> dict[str, list[str]]:
    """The URLs of each tier that has any."""
    found: dict[str, list[str]] = {}
    for item in filter(None, text.split(",")):
        name, _, url = item.partition("=")
        if name not in names or not _is_url(url):
            raise InputError(
                f"--nodes has {item!r}; give NAME=URL,... with a name of {', '.join(names)}, and a URL without user, "
                "password or query, which all clients would see, such as http://edge:8001"
            )
        found.setdefault(name, []).append(url)
    return found


def _is_url(text: str) -> bool:
    """Whether `httpx`, which asks nodes, can use a text as the URL of one."""
    import httpx

    try:
        url = httpx.URL(text)
    except httpx.InvalidURL:
        return False
    port = 80 if url.port is None else url.port
    plain = not (url.userinfo or url.query or url.fragment)  # what is asked comes after it, and clients see it
    return url.scheme in ("http", "https") and plain and bool(url.raw_host) and 0 < port < 2**16
