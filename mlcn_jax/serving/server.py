"""Answers HTTP requests with a trained or exported model; needs the extra `serve` (pip install 'mlcn_jax[serve]').

    mlcn_jax serve runs/mlcn2/export --port=8000
    mlcn_jax serve runs/mlcn2    # a training run, exported or not
    mlcn_jax serve digits        # the model that comes with the package
    curl --data-binary @image.png -H 'Content-Type: image/png' http://127.0.0.1:8000/predict
    curl -F a=@one.png -F b=@two.jpg http://127.0.0.1:8000/predict

`POST /predict` takes a picture as the body (`image/*` or `application/octet-stream`), files in a
`multipart/form-data` body, or `application/json` as `{"images": [base64, ...]}`, and answers `{"predictions": [...]}`:
for each picture, in order, its `class` and `probability` (`artifact.Classifier.probabilities`), or an `error` if it
cannot be read. `?top=K` (or a field `top` of the form or the JSON) adds `top`, the K most probable classes, `?top=all`
all of them; `?probabilities` adds the probabilities of all classes by name. `GET /` is a page to try it in a browser
and, for programs, describes the model; `GET /openapi.json` describes the requests, `GET /health` is 200 while the model
answers, and `GET /metrics` is for Prometheus.

Status codes: 200 some picture was classified; 400 none was, or the request is malformed; 404, 405 there is no such path
or method; 408 the request arrived too slowly; 413 it has too many bytes or pictures; 415 its content type is not
supported; 429 too many requests are waiting, try again; 431 the head of the request is too long; 500, and 503 of
`/health`, the model itself failed; 503 of `/predict`, it could not be answered within the deadline, or memory is short.

The server listens once the model is ready. On SIGTERM or Ctrl-C it answers the requests that have arrived, then exits.
Exit codes: 0 it ended in this way, 2 the input cannot be used.
"""

import argparse
import asyncio
import dataclasses
import errno
import functools
import gc
import importlib.util
import ipaddress
import json
import logging
import math
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mlcn_jax.errors import InputError
from mlcn_jax.launch import EXIT_INPUT, launch
from mlcn_jax.serving.predict import MODEL_HELP, RUNTIME_HELP, open_model

if TYPE_CHECKING:
    from mlcn_jax.serving.http_service import BatchService, Limits


_PACKAGES = ("httptools", "prometheus_client", "python_multipart", "starlette", "uvicorn")
_MAX_HEAD_BYTES = 2**16  # of a request's head, plus the framing of its body
_MAX_PIPELINED = 16  # requests that a client may send before the first is answered
_MOST = 2**31  # of any limit
_DRAIN_SECONDS = 0.3  # for requests that were on their way when the signal arrived
_SWITCH_SECONDS = 2e-4  # how long the computing thread waits for the GIL; Python's default is as long as a batch takes
_log = logging.getLogger("mlcn_jax")


def serve(service: "BatchService", listener: socket.socket, message: str, **settings: Any) -> None:
    """Answers requests until a signal arrives.

    Args:
      service: the service, warmed up.
      listener: a bound socket that does not listen yet.
      message: printed once it listens.
      settings: further settings of uvicorn, such as `ssl_*` for TLS; without those it serves plain HTTP.

    Raises:
      InputError: the address is in use.
    """
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets=None):
            if config.ssl is not None:  # connections count only after the handshake, which asyncio grants 60 seconds
                loop, patience = asyncio.get_running_loop(), service.limits.timeout_seconds
                listening = functools.partial(loop.create_server, ssl_handshake_timeout=patience)
                loop.create_server = listening  # type: ignore[method-assign]
            await super().startup(sockets)
            print(message, flush=True)

        async def shutdown(self, sockets=None):
            await asyncio.sleep(_DRAIN_SECONDS)
            await super().shutdown(sockets)

    config = uvicorn.Config("", **_settings(service.limits), **settings)
    try:
        listener.listen(config.backlog)  # here, because uvloop does not tell if it fails
    except OSError as error:
        raise _cannot_listen(listener.getsockname(), error) from error
    _complete(service, config)
    server = Server(config)
    for number in (signal.SIGTERM, signal.SIGINT):  # until uvicorn sets its own; at the end it raises the signal again
        signal.signal(number, lambda *_: setattr(server, "should_exit", True))
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup sets it
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))  # or it ends without answering
    server.run(sockets=[listener])


def _settings(limits: "Limits") -> dict[str, Any]:
    """uvicorn's settings that do not depend on the model."""
    return {
        "ws": "none",
        "lifespan": "on",
        "log_config": None,
        "log_level": logging.ERROR,
        "access_log": False,
        "proxy_headers": False,
        "server_header": False,
        "timeout_graceful_shutdown": int(3 * limits.timeout_seconds) + 1,
    }


def _complete(service: "BatchService", config: Any) -> None:
    """Adds the application and protocol of a warm model to uvicorn's settings, and configures this process."""
    from mlcn_jax.serving.http_service import application

    config.app, config.http = application(service), _protocol(service)
    queued = service.batcher.seconds_for(service.limits.max_queue)  # accepted requests are answered, however slow
    config.timeout_graceful_shutdown += math.ceil(2 * queued)
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # the client gets its errors in the answer
    sys.setswitchinterval(_SWITCH_SECONDS)
    gc.collect()
    gc.freeze()  # a full collection looks through all that the libraries have loaded, and takes as long as many answers


def _complete_worker(arguments: argparse.Namespace, limits: "Limits", config: Any) -> None:
    launch(lambda: _complete(_warm_service(arguments, limits), config))  # a new process inherits no settings of memory


def _warm_service(arguments: argparse.Namespace, limits: "Limits") -> "BatchService":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # silences XLA's messages about slow constant folding
    from mlcn_jax.serving.service import Service  # slow to import, so only after the arguments were checked

    model = open_model(arguments.model, arguments.runtime)
    model.warm_up(limits.max_batch)
    service = Service(model, limits)
    service.warm_up()
    return service


def _protocol(service: "BatchService"):
    """uvicorn's HTTP protocol, which also ends stuck connections and requests that arrive too slowly or never end."""
    from starlette.responses import JSONResponse
    from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

    from mlcn_jax.serving.http_service import IS_GONE

    limits, metrics = service.limits, service.metrics
    too_many = {"error": f"more than {limits.max_connections} connections are open: try again"}
    busy = metrics.counting(JSONResponse(too_many, 429, {"Retry-After": "1", "Connection": "close"}))

    class Protocol(HttpToolsProtocol):
        def connection_made(self, transport):
            super().connection_made(transport)
            self._coming_since: float | None = self.loop.time()  # None while no request is incomplete
            self._head_bytes = 0  # received for a request, minus twice those of its body
            self._unread = math.inf  # bytes that the client had not read when this was last looked at
            self._is_ending = False
            self._refused: tuple[int, str] | None = None  # status and message, sent after the earlier answers
            self._running = None
            self._timer = self.loop.call_later(limits.timeout_seconds, self._look)
            if len(self.connections) > limits.max_connections:
                self.app = busy
            if len(self.connections) > 2 * limits.max_connections:
                transport.abort()

        def connection_lost(self, exc):
            self._timer.cancel()
            if self._running is not None:  # uvicorn tells only the latest request, which may be another one
                self._running.disconnected = True
            super().connection_lost(exc)

        def _start_asgi_task(self, cycle, app):
            self._running = cycle
            cycle.keep_alive &= not self._is_ending or bool(self.pipeline)  # those that wait have arrived, too
            cycle.scope[IS_GONE] = lambda: cycle.disconnected
            super()._start_asgi_task(cycle, app)

        def data_received(self, data):
            if self._refused is not None:
                return
            if self._coming_since is None:
                self._coming_since = self.loop.time()
            self._head_bytes += len(data)
            super().data_received(data)
            self._head_bytes = max(self._head_bytes, 0)  # after a long body, trailers may be no longer than a head
            if self._head_bytes > _MAX_HEAD_BYTES:
                self._refuse(431, "the head of the request is too long")
            if len(self.pipeline) > _MAX_PIPELINED:
                self._refuse(429, "too many requests were sent before the first was answered")
            if self._coming_since is None and self.cycle.response_complete and not self.pipeline:
                # It was answered before its body came, which has stopped the timer that closes idle connections.
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )

        def on_message_begin(self):
            super().on_message_begin()
            self._coming_since = self.loop.time()
            self._head_bytes = 0

        def on_body(self, body):
            self._head_bytes -= 2 * len(body)
            super().on_body(body)

        def on_message_complete(self):
            super().on_message_complete()
            if self.cycle is not None:  # uvicorn leaves it at that where the answer came before the body
                self.cycle.more_body = False
            self._coming_since = None
            if not self.pipeline:  # uvicorn would see only when it has answered that the client has gone
                self.flow.resume_reading()

        def on_response_complete(self):
            super().on_response_complete()
            is_last = self._running is not None and self._running.response_complete
            if self._refused is not None and is_last:
                self._refuse(*self._refused)

        def shutdown(self):
            """Announces the end of the connection in the next answer; closes it if no other request arrives."""
            self._is_ending = True
            if self.cycle is not None and not self.cycle.response_started:
                self.cycle.keep_alive = False
            self.loop.call_later(_DRAIN_SECONDS, super().shutdown)

        def send_400_response(self, msg):
            self._refuse(400, "this is not HTTP")

        def _refuse(self, status, message):
            if self.transport.is_closing():
                return
            running = self._running
            if running is not None and not running.response_complete and not running.more_body:
                if self._refused is None:  # a request after others; an answer now would be taken for one to them
                    self._refused = status, message
                while self.pipeline and (self.pipeline[0][0].more_body or len(self.pipeline) > _MAX_PIPELINED):
                    self.pipeline.popleft()
                return
            if self.cycle is None or not (self.cycle.response_started and self.cycle.more_body):
                metrics.count(status)
                body = json.dumps({"error": message}).encode()
                head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
                self.transport.write(STATUS_LINE[status] + head + body)
            self.transport.close()

        def _look(self):
            """Checks now and then whether this connection still makes progress."""
            unread = math.inf
            if self.flow.write_paused or self.transport.is_closing():
                unread = self.transport.get_write_buffer_size()
                if unread >= self._unread:  # the client does not read
                    self.transport.abort()
                    return
            self._unread = unread
            left = limits.timeout_seconds
            if self._coming_since is not None:
                left -= self.loop.time() - self._coming_since
                if left <= 0:
                    self._refuse(408, f"the request took more than {limits.timeout_seconds:g} seconds")
                    left = limits.timeout_seconds
            self._timer = self.loop.call_later(left, self._look)

    return Protocol


def bind(host: str, port: int, secure: bool = False) -> socket.socket:
    """Binds a socket, which does not listen yet; warns if other machines can reach it without `secure` (TLS).

    Raises:
      InputError: the address is in use, or is not valid.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, UnicodeError) as error:
        raise _cannot_listen((host, port), error) from error
    if not secure and not ipaddress.ip_address(address[0]).is_loopback:
        _log.warning(
            "%s can be reached from other machines: anyone who reaches it may use it, and nothing is encrypted", host
        )
    return listener


def _cannot_listen(address: tuple, error: Exception) -> InputError:
    host, port = address[:2]
    return InputError(f"cannot listen on {host}, port {port} ({error}): give another --host or --port")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlcn_jax serve",
        description=(__doc__ or "").split("\n")[0],
        epilog="Takes no configuration: mlcn_jax train --help lists the fields of one.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("model", help=MODEL_HELP)
    parser.add_argument("--runtime", default="auto", help=RUNTIME_HELP)
    deadline = "seconds from a request to its answer; what cannot be answered by then is refused (503); 0 sets no limit"
    parser.add_argument("--deadline_seconds", default=0.0, type=float, help=deadline)
    workers = "processes, each with the model; with 2 or more, SIGHUP replaces them one by one without losing a request"
    parser.add_argument("--workers", default=1, type=int, help=workers)
    add_limits(parser)
    return parser


def add_limits(parser: argparse.ArgumentParser) -> None:
    """Adds the options of every server: where it listens, and what it accepts (`limits_of`)."""
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", default=8000, type=int, help="port to listen on; 0 picks a free one")
    add("--max_batch", default=64, type=int, help="images computed together, a power of two; 1 turns batching off")
    add("--max_queue", default=256, type=int, help="images that may wait while others are computed")
    add("--max_body_mib", default=16.0, type=float, help="largest request body, in MiB")
    add("--max_images", default=64, type=int, help="maximum number of images in a request")
    add("--max_connections", default=400, type=int, help="maximum number of open connections")
    add("--timeout_seconds", default=10.0, type=float, help="time within which a request must have arrived completely")


def limits_of(arguments: argparse.Namespace) -> "Limits":
    """The limits that the options of `add_limits` give; raises InputError if a value is out of range."""
    from mlcn_jax.serving.http_service import Limits

    if arguments.max_batch not in (1, 2, 4, 8, 16, 32, 64, 128):
        raise InputError(f"--max_batch={arguments.max_batch} must be a power of two from 1 to 128")
    if not 0 <= arguments.port < 2**16:
        raise InputError(f"--port={arguments.port} must be from 0 to {2**16 - 1}")
    for name in ("max_queue", "max_body_mib", "max_images", "max_connections", "timeout_seconds"):
        if not 0 < getattr(arguments, name) <= _MOST:
            raise InputError(f"--{name}={getattr(arguments, name)} must be above 0 and at most {_MOST:,}")
    if arguments.max_images > arguments.max_queue:
        raise InputError(
            f"--max_images={arguments.max_images} is more than --max_queue={arguments.max_queue}, so a "
            "request with that many would never be accepted: raise one or lower the other"
        )
    return Limits(
        max_batch=arguments.max_batch,
        max_queue=arguments.max_queue,
        max_body_bytes=int(arguments.max_body_mib * 2**20),
        max_images=arguments.max_images,
        max_connections=arguments.max_connections,
        timeout_seconds=arguments.timeout_seconds,
    )


def check_packages(others: Sequence[str] = (), extra: str = "serve") -> None:
    """Raises InputError if a package that a server needs, or one of `others`, is not installed."""
    missing = [name for name in (*_PACKAGES, *others) if not importlib.util.find_spec(name)]
    if missing:
        raise InputError(f"serving needs {', '.join(missing)}: pip install 'mlcn_jax[{extra}]'")


def leave_other_servers_metrics() -> None:
    """Forgets the folder in which the processes of another server keep metrics; called before the first import of them.

    Prometheus's package reads the variable when it is imported, and would add up what ended processes have counted.
    """
    os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None)


def url_of(listener: socket.socket, secure: bool = False) -> str:
    """The address at which a bound socket is reached, as a URL without a path."""
    host, port = listener.getsockname()[:2]
    return f"{'https' if secure else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def main(argv: Sequence[str] | None = None) -> None:
    """Serves the model named in `argv` (by default on the command line) until a signal arrives."""
    arguments = _parser().parse_args(argv)
    check_packages()
    leave_other_servers_metrics()
    if not 0 <= arguments.deadline_seconds < float("inf"):
        raise InputError(f"--deadline_seconds={arguments.deadline_seconds} must be 0 or more")
    if arguments.workers < 1:
        raise InputError(f"--workers={arguments.workers} must be 1 or more")
    limits = dataclasses.replace(limits_of(arguments), deadline_seconds=arguments.deadline_seconds)
    listener = bind(arguments.host, arguments.port)

    url = url_of(listener)
    message = f"serving {arguments.model} at {url}/predict, and a page at {url}/"
    if arguments.workers == 1:
        serve(_warm_service(arguments, limits), listener, message)
        return
    from mlcn_jax.serving import workers

    complete = functools.partial(_complete_worker, arguments, limits)
    try:
        could_start = workers.run(complete, listener, arguments.workers, message, **_settings(limits))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise _cannot_listen(listener.getsockname(), error) from error
    if not could_start:
        sys.exit(EXIT_INPUT)
