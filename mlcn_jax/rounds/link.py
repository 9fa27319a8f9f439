"""The connection between workers and their coordinator: gRPC calls, TLS, and retries over an unreliable link.

gRPC rather than a framework for federated learning: in Flower 1.42 a run whose server process dies has failed and
cannot be resumed (`SqlCoreState._cleanup_expired_task_tokens`), and deploying it needs a database, FastAPI and uv.
"""

import concurrent.futures
import dataclasses
import ipaddress
import logging
import ssl
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import grpc
import msgspec

from mlcn_jax.distributed.processes import host_and_port
from mlcn_jax.errors import InputError
from mlcn_jax.rounds import messages

SERVICE = "mlcn_jax.Rounds"
CALLS: dict[str, tuple[type, type]] = {
    "join": (messages.Join, str),
    "fetch": (messages.Fetch, messages.Begin),
    "push": (messages.Change, messages.Receipt),
    "diverge": (messages.Divergence, bool),
}
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 15.0  # between tries
_LONGEST_BACKOFF_SECONDS = 10.0  # of gRPC, in addition
FOUND_SECONDS = _LONGEST_PAUSE_SECONDS + _LONGEST_BACKOFF_SECONDS + 5.0  # until all find a restarted coordinator
_CALL_SECONDS = 3600.0  # enough for many megabytes over a slow link; pings find a dead link sooner
_PINGS = [("grpc.keepalive_time_ms", 20_000), ("grpc.keepalive_timeout_ms", 20_000)]
_OF_SERVER = [
    ("grpc.so_reuseport", 0),  # otherwise a second coordinator on the same port would get some of the calls
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
]
_OF_WORKER = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", int(1000 * _LONGEST_BACKOFF_SECONDS)),
]
_NOT_DECODED = "Exception deserializing"  # gRPC's details of a message that the decoder does not know
_FINAL = (  # what no further try changes
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
)
_TLS_WORDS = ("certificate", "tsi_protocol_failure", "ssl routines")  # a handshake may also fail because of the link
_CLOSED_WORDS = ("Socket closed", "Connection reset")  # for example by a server that requires a certificate
_OVERHEAD_BYTES = 2**16  # of a message, besides the change
_REFUSAL_BYTES = 2000  # of a refusal's text: gRPC sends up to three times as many, and drops what has over 8 KiB
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Tls:
    """PEM files for TLS: the process's own certificate and key, and the CA certificates that signed those of others.

    Raises:
      InputError: there is a certificate without its key, or a key without its certificate.
    """

    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None

    def __post_init__(self):
        if (self.cert is None) != (self.key is None):
            raise InputError("--tls_cert and --tls_key are a pair: give both")

    def of_server(self) -> grpc.ServerCredentials | None:
        """Credentials of the coordinator; None without a certificate. With `ca`, workers need a certificate it signed.

        Raises:
          InputError: there is a `ca` but no certificate, so nothing would be encrypted; or a file cannot be read.
        """
        if self.cert is None or self.key is None:
            if self.ca is not None:
                raise InputError("--ca at the coordinator needs its own --tls_cert and --tls_key")
            return None
        self._check()
        pair = (_read(self.key), _read(self.cert))
        return grpc.ssl_server_credentials([pair], _read(self.ca), require_client_auth=self.ca is not None)

    def of_worker(self) -> grpc.ChannelCredentials | None:
        """Credentials of a worker; None without `ca`.

        Raises:
          InputError: there is a certificate but no `ca`, so nothing would be encrypted; or a file cannot be read.
        """
        if self.cert is not None and self.ca is None:
            raise InputError("--tls_cert at a worker needs --ca, the CA certificates that signed the coordinator's")
        if self.ca is None:
            return None
        self._check()
        return grpc.ssl_channel_credentials(_read(self.ca), _read(self.key), _read(self.cert))

    def _check(self) -> None:
        """Checks the files, since gRPC itself would only fail to connect."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            if self.cert is not None:
                context.load_cert_chain(self.cert, self.key, password="")  # without a password it would ask for one
        except ssl.SSLError as error:
            raise InputError(
                f"{self.cert} and {self.key} are not a certificate and its key ({error}): give PEM files that belong "
                "together, not encrypted"
            ) from error
        except OSError:
            _read(self.cert), _read(self.key)  # raises with the name of the file
            raise
        try:
            if self.ca is not None:
                context.load_verify_locations(self.ca)
        except ssl.SSLError as error:
            raise InputError(f"--ca={self.ca} holds no certificates ({error}): give a PEM file") from error
        except OSError:
            _read(self.ca)
            raise


def serve(
    handlers: Mapping[str, Callable[..., Any]], address: str, tls: Tls, workers: int, largest_bytes: int
) -> tuple[grpc.Server, int]:
    """Starts answering calls with `handlers`, by name; returns the server and its port.

    If a handler raises InputError, the call is refused, which is logged, and the worker ends with its message.

    Args:
      handlers: by the names of `CALLS`; that of `fetch` is also given a function that says whether the caller is there.
      address: HOST:PORT to listen on; port 0 picks a free one.
      tls: certificates.
      workers: number of workers, which may all call at once.
      largest_bytes: largest size of a change.

    Raises:
      InputError: the address cannot be used.
    """

    host, _ = host_and_port("--serve", address, least=0)
    if tls.ca is None and not is_this_machine(host):
        _log.warning(
            "anyone who can reach %s can take part in this run and change it: --ca admits only your own", address
        )

    def handler(name: str) -> grpc.RpcMethodHandler:
        taken, _ = CALLS[name]

        def answer(request: Any, context: grpc.ServicerContext) -> Any:
            more = [context.is_active] if name == "fetch" else []
            try:
                return handlers[name](request, *more)
            except InputError as error:
                _log.warning("worker %d is refused: %s", request.worker, error)
                return context.abort(grpc.StatusCode.FAILED_PRECONDITION, _shortened(str(error)))

        decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(taken)
        return grpc.unary_unary_rpc_method_handler(answer, decoder.decode, msgspec.msgpack.Encoder().encode)

    # Every worker may wait in one call while an earlier call whose connection was lost has not yet timed out.
    pool = concurrent.futures.ThreadPoolExecutor(2 * workers + 2)
    limit = ("grpc.max_receive_message_length", largest_bytes + _OVERHEAD_BYTES)
    server = grpc.server(pool, options=[limit, *_OF_SERVER, *_PINGS])
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(SERVICE, {name: handler(name) for name in CALLS}),)
    )
    credentials = tls.of_server()
    try:
        port = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    except RuntimeError as error:
        raise InputError(f"--serve={address} cannot be used ({error}): give HOST:PORT of a free port") from error
    server.start()
    return server, port


class Client:
    """A worker's calls to its coordinator, repeated until they are answered.

    Args:
      address: HOST:PORT of the coordinator.
      tls: certificates.
      check: called before each try; may raise to give up.
    """

    def __init__(self, address: str, tls: Tls, check: Callable[[], None]):
        host, _ = host_and_port("--coordinator", address)
        # A proxy of the environment leads to other machines; gRPC would send calls to this one through it, too.
        options = [*_OF_WORKER, *_PINGS, ("grpc.enable_http_proxy", int(not is_this_machine(host)))]
        credentials = tls.of_worker()
        self._address, self._check = address, check
        self._channel = (
            grpc.secure_channel(address, credentials, options)
            if credentials
            else grpc.insecure_channel(address, options)
        )
        self._calls = {
            name: self._channel.unary_unary(
                f"/{SERVICE}/{name}", msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(given).decode
            )
            for name, (_, given) in CALLS.items()
        }
        self.sent = self.received = 0  # bytes of messages

    def call(self, name: str, request: Any) -> Any:
        """The answer to one of `CALLS`.

        Raises:
          InputError: the coordinator refuses the call.
        """
        pause, told = _PAUSE_SECONDS, False
        while True:
            self._check()
            try:
                answer = self._calls[name](request, timeout=_CALL_SECONDS)
            except grpc.RpcError as error:
                details = error.details() or str(error.code())
                if details.startswith(_NOT_DECODED):
                    raise InputError(
                        f"the coordinator at {self._address} does not understand this worker: run the same version of "
                        "mlcn_jax on all machines"
                    ) from error
                if error.code() in _FINAL:
                    raise InputError(f"the coordinator at {self._address} refuses: {details}") from error
                if any(word in details.lower() for word in _TLS_WORDS):
                    raise InputError(
                        f"no secure connection to the coordinator at {self._address} ({details}): check --tls_cert, "
                        "--tls_key and --ca of the worker and of the coordinator, whose certificate must name this host"
                    ) from error
                if not told:
                    closed = any(words in details for words in _CLOSED_WORDS)
                    hint = "; it may require a certificate, or another one" if closed else ""
                    _log.info("the coordinator at %s cannot be reached (%s)%s: retrying", self._address, details, hint)
                told = True
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            else:
                if told:
                    _log.info("the coordinator at %s is back", self._address)
                self.sent += len(getattr(request, "content", b""))
                self.received += len(getattr(answer, "content", b""))
                return answer

    def close(self) -> None:
        """Ends the connection."""
        self._channel.close()


def is_this_machine(host: str) -> bool:
    """Whether an address is of the loopback interface, which no other machine reaches."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _shortened(text: str) -> str:
    content = text.encode(errors="replace")
    short = content[:_REFUSAL_BYTES].decode(errors="ignore")
    return f"{short}... see the coordinator's log" if len(content) > _REFUSAL_BYTES else short


def _read(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}): give a PEM file") from error
