"""A gateway's clients for the other tiers: requests to their nodes, health checks, time-outs, retries. Needs httpx."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import json
import logging
import math
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import httpx
import numpy as np

from mlcn_jax.errors import InputError
from mlcn_jax.launch import program
from mlcn_jax.tiers import wire
from mlcn_jax.tiers.health import Breaker, Times
from mlcn_jax.tiers.node import PATH
from mlcn_jax.tiers.policy import Policy

_SECONDS_BETWEEN_LOOKS, _MOST_BETWEEN_LOOKS = 0.5, 30.0  # health checks
_SECONDS_BETWEEN_TRIES = 1.0  # of a tier that has been too slow for the deadline
_GRACE_SECONDS = 0.02  # beyond a deadline, at which whoever waits answers first, and then cancels the request
_LOOK_SECONDS = 2.0  # time-out of a health check
_REQUESTS_BETWEEN_CHECKS = 50  # of the node of a tier that has gone unasked the longest
_IDLE_SECONDS = 30.0  # how long an idle connection is kept; nodes keep it longer
_WARM_SECONDS = 20.0  # after its last use, a connection is used for a health check, which keeps it open
_MOST_TEXT_BYTES = 2**14  # of an answer that is not to a request for numbers
_QUICK_BYTES = 2**16  # packing up to this many bytes of values takes less time than handing them to a thread
_OF_ONE_REQUEST = (413, 422)  # statuses of a request that cannot be answered, though the next one may be
_OF_THE_MOMENT = (408, 429)  # the same request may be answered a little later
_log = logging.getLogger("mlcn_jax")


class TierLost(Exception):
    """No node of a tier gave a usable answer; the text says why."""


class Unanswered(httpx.TransportError):
    """The connection failed before an answer began; the text says why."""


@dataclasses.dataclass
class Traffic:
    """Requests sent to a tier's nodes, bytes of bodies sent and received, answers, and failed requests by reason.

    A request that is no longer awaited because an answer had to be given counts as neither answered nor failed.
    """

    requests: int = 0
    sent: int = 0
    received: int = 0
    answers: int = 0
    failures: dict[str, int] = dataclasses.field(default_factory=dict)


class Node:
    """One node of a tier, at a URL, reached through `transport` if it is given (httpx's own otherwise).

    Attributes:
      breaker: its circuit breaker, which says whether to ask it.
      outstanding: requests that it has not answered yet.
      asked: number of the tier's request that it was last sent.
    """

    def __init__(self, url: str, tls: ssl.SSLContext | bool, transport: httpx.AsyncBaseTransport | None = None):
        self.url = url
        self.breaker = Breaker()
        self.outstanding = self.asked = 0
        self._used = -math.inf  # when a connection was last known to be open
        self._times: dict[int, Times] = {}
        self._client = httpx.AsyncClient(
            base_url=url,
            headers={"Accept-Encoding": "identity"},
            verify=tls,
            timeout=None,
            trust_env=False,
            limits=httpx.Limits(max_connections=None, keepalive_expiry=_IDLE_SECONDS),
            transport=transport,
        )

    @property
    def is_cold(self) -> bool:
        """Whether no connection is known to be open for the next request; an abandoned request closes its own."""
        return time.monotonic() > self._used + _WARM_SECONDS

    def times(self, count: int) -> Times:
        """What is known about requests with about `count` images."""
        return self._times.setdefault(count.bit_length(), Times())

    async def post(self, body: bytes, most: int) -> tuple[int, bytes]:
        """Sends a request; returns the status and body of the answer, which may have up to `most` bytes.

        Raises:
          Unanswered: the connection failed before an answer began.
          httpx.HTTPError: there is no answer, or not one in HTTP.
          wire.Refused: the answer is longer, or compressed.
        """
        headers = {"Content-Type": "application/octet-stream"}
        return await self._exchange("POST", PATH, most, content=body, headers=headers)

    async def _exchange(self, method: str, path: str, most: int, **options: Any) -> tuple[int, bytes]:
        content = bytearray()
        async with contextlib.AsyncExitStack() as stack:
            try:
                response = await stack.enter_async_context(self._client.stream(method, path, **options))
            except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
                raise Unanswered(str(error) or repr(error)) from error
            # Nothing is decoded, so that no part of an answer can grow before its size is looked at.
            if (coding := response.headers.get("Content-Encoding", "identity")) != "identity":
                raise wire.Refused(f"the answer has Content-Encoding {coding[:20]!r}, which was not asked for")
            async for part in response.aiter_bytes():
                content += part
                if len(content) > most:
                    raise wire.Refused(f"the answer has more than {most} bytes")
            if response.status_code == 200:
                self._used = time.monotonic()
            return response.status_code, bytes(content)

    def gave_up(self, times: Times, seconds: float, probe: object | None) -> None:
        """Records that an answer was no longer awaited after `seconds`: it was late, or its deadline was short."""
        self._used = -math.inf
        times.takes_more_than(seconds)
        if times.mean is not None and seconds >= times.late:
            self.breaker.failed("no answer before the deadline", probe)

    async def look(self) -> bool:
        """Checks whether it answers; returns False if that took too long. The connection stays open for a request.

        A failed check counts as a failed request: short deadlines may end all requests before they are late. After a
        pause it is the one that tries the node, unless a request already does.
        """
        probe = None if self.breaker.is_open else self.breaker.asked()
        try:
            async with asyncio.timeout(_LOOK_SECONDS):
                status = (await self._exchange("GET", "/health", _MOST_TEXT_BYTES))[0]
            if status == 200:
                self.breaker.seen()
            elif status not in _OF_THE_MOMENT:
                self.breaker.failed(f"status {status} in a health check", probe)
        except (httpx.HTTPError, wire.Refused, TimeoutError) as error:
            self.breaker.failed(f"no answer to a health check ({str(error) or repr(error)})", probe)
            return not isinstance(error, TimeoutError)
        finally:
            self.breaker.ended(probe)
        return True

    async def about(self, seconds: float) -> Any:
        """What it says of itself, within so many seconds.

        Raises:
          httpx.HTTPError, TimeoutError: there is no answer, or only that it is busy or fails.
          wire.Refused, ValueError, RecursionError: the answer is not one of a node.
        """
        async with asyncio.timeout(seconds):
            status, content = await self._exchange("GET", "/", _MOST_TEXT_BYTES)
        if status in _OF_THE_MOMENT or status >= 500:
            raise httpx.TransportError(f"its status is {status}")
        return json.loads(content)

    async def close(self) -> None:
        """Closes its connections."""
        await self._client.aclose()


class TierClient:
    """The nodes of one tier, any of which can answer its requests.

    Args:
      name: name of the tier.
      policy: the policy of the split.
      urls: URLs of its nodes; without any, it is never available.
      tls: settings for https.
      is_signed: says whether a trusted node made a signature of some content; None accepts unsigned answers.

    Attributes:
      stopped: whether it must not be asked; the gateway's page can set this.
      traffic: bytes, answers and failures so far.
      most_waiting: images that may wait for it at a time, whose values at the cut are held.
    """

    def __init__(
        self,
        name: str,
        policy: Policy,
        urls: Sequence[str],
        tls: ssl.SSLContext | bool = True,
        is_signed: Callable[[bytes, bytes], bool] | None = None,
    ):
        self.name, self.stopped, self.traffic = name, False, Traffic()
        self.nodes = [Node(url, tls) for url in urls]
        self._digest, self._classes = policy.digest, len(policy.class_names)
        self._weight, self._is_signed = policy.tier(name).weight, is_signed
        self.most_waiting, self._waiting = math.inf, 0
        self._asked = 0.0
        self._home: dict[int, Times] = {}
        self._packers = concurrent.futures.ThreadPoolExecutor()  # asyncio's own may be full of look-ups of names

    @property
    def is_available(self) -> bool:
        """Whether a node may be asked now."""
        return not self.stopped and any(not node.breaker.is_open for node in self.nodes)

    @property
    def trouble(self) -> str:
        """Why the tier is not available."""
        if self.stopped:
            return "stopped"
        if not self.nodes:
            return "--nodes names no node of it"
        return "; ".join(f"{node.url}: {node.breaker.reason}" for node in self.nodes if node.breaker.reason)

    def home(self, count: int) -> Times:
        """What is known of the time that the gateway takes to compute what is sent, for about `count` images."""
        return self._home.setdefault(count.bit_length(), Times())

    def expected(self, count: int) -> float:
        """Seconds that an answer for `count` images is expected to take, with what is computed at home for it."""
        own = [node.times(count).expected for node in self.nodes if not node.breaker.is_open]
        return (self.home(count).mean or 0.0) + min(own, default=float("inf"))

    def is_worth_asking(self, count: int, seconds: float) -> bool:
        """Whether an answer may come within `seconds`; now and then also if none has been that fast so far."""
        known = [node.times(count) for node in self.nodes if not node.breaker.is_open]
        if any(times.may_take(seconds - (self.home(count).mean or 0.0)) for times in known):
            return True
        return bool(known) and seconds > 0 and time.monotonic() > self._asked + _SECONDS_BETWEEN_TRIES

    def patience(self, count: int) -> float:
        """Seconds after which an answer is late, so that another tier should be asked as well."""
        own = [node.times(count).late for node in self.nodes if not node.breaker.is_open]
        return self.home(count).most + min(own, default=0.0)

    @contextlib.contextmanager
    def room(self, count: int) -> Iterator[None]:
        """Makes room for what `count` images send, until it has been answered.

        Raises:
          TierLost: too many images wait already.
        """
        if self._waiting and self._waiting + count > self.most_waiting:
            raise self._lost("full", f"{self._waiting} images wait for it already")
        self._waiting += count
        try:
            yield
        finally:
            self._waiting -= count

    async def ask(self, rows: np.ndarray, bits: int, deadline: float) -> np.ndarray:
        """What the tier's lanes add for each row, [n, classes]; if a node fails, another one is asked.

        Args:
          rows: what the tier receives, one row per image.
          bits: bits of each value that is sent.
          deadline: time of `time.monotonic` after which no answer is needed.

        Raises:
          TierLost: no node gave an answer.
        """
        self._asked = time.monotonic()
        tried: list[Node] = []
        reasons: list[str] = []
        while time.monotonic() < deadline:
            able = [node for node in self.nodes if node not in tried and not node.breaker.is_open]
            if not able or self.stopped:
                break
            node = self._next(able, len(rows))
            tried.append(node)
            self.traffic.requests += 1
            node.asked = self.traffic.requests
            node.outstanding += 1
            probe = node.breaker.asked()
            try:
                return await self._ask(node, rows, bits, deadline, probe)
            except TierLost as error:
                reasons.append(f"{node.url}: {error}")
            finally:
                node.outstanding -= 1
                node.breaker.ended(probe)
        raise TierLost("; ".join(reasons) or f"no node of {self.name} is available")

    def _next(self, able: Sequence[Node], count: int) -> Node:
        """The node that is expected to answer first; now and then the one that has gone unasked the longest.

        One that has failed since its last answer comes after the others. A node without an answer so far is taken to be
        as fast as the fastest, and is asked before it: its own time is known only then. A time that is known may have
        become wrong.
        """
        if (1 + self.traffic.requests) % _REQUESTS_BETWEEN_CHECKS == 0:
            return min(able, key=lambda node: node.asked)
        known = [times.mean for node in able if (times := node.times(count)).mean is not None]

        def worth(node: Node) -> tuple[bool, float, bool]:
            times = node.times(count)
            seconds = (1 + node.outstanding) * times.expected_from(min(known, default=1.0))
            return bool(node.breaker.reason), seconds, times.mean is not None

        return min(able, key=worth)

    async def _ask(self, node: Node, rows: np.ndarray, bits: int, deadline: float, probe: object | None) -> np.ndarray:
        times, started = node.times(len(rows)), time.monotonic()
        if rows.nbytes > _QUICK_BYTES:
            loop = asyncio.get_running_loop()
            body, asked = await loop.run_in_executor(self._packers, self._pack, rows, bits)
        else:
            body, asked = self._pack(rows, bits)
        sent = time.monotonic()  # nearly: a node is not to blame for what packing took
        left = deadline - sent
        if left <= 0:
            raise self._lost("time-out", "no time was left to ask it")
        patience = times.timeout
        until = left + _GRACE_SECONDS
        shape, status = (len(rows), self._classes), 0
        try:
            async with asyncio.timeout(min(until, patience)):
                try:
                    status, content = await self._post(node, body, len(rows))
                except Unanswered:  # e.g. on a stale connection; the same request, so that both have the same answer
                    status, content = await self._post(node, body, len(rows))
            self.traffic.received += len(content)
            if status != 200:
                raise wire.Refused(f"status {status}: {content[:300].decode(errors='replace')}")
            sums = wire.unpack_answer(content, self._digest, self.name, asked, shape, self._weight, self._is_signed)
        except TimeoutError as error:
            if patience <= until:
                times.timed_out()
                node.breaker.failed("no answer in time", probe)
            else:
                node.gave_up(times, time.monotonic() - sent, probe)
            raise self._lost("time-out", f"no answer within {1e3 * min(until, patience):.0f} ms") from error
        except asyncio.CancelledError:
            node.gave_up(times, time.monotonic() - sent, probe)
            raise
        except httpx.HTTPError as error:
            node.breaker.failed(str(error) or repr(error), probe)
            raise self._lost("connection", str(error) or repr(error)) from error
        except wire.Refused as error:
            if status not in _OF_ONE_REQUEST:
                node.breaker.failed(str(error), probe, surely=status < 500 and status not in _OF_THE_MOMENT)
            raise self._lost("full" if status == 429 else "refused", str(error)) from error
        except Exception as error:  # unexpected, but the other tiers can answer without this one
            _log.exception("a request to %s at %s failed", self.name, node.url)
            node.breaker.failed(repr(error), probe)
            raise self._lost("error", repr(error)) from error
        times.took(time.monotonic() - started)
        node.breaker.worked()
        self.traffic.answers += 1
        return sums

    def _pack(self, rows: np.ndarray, bits: int) -> tuple[bytes, str]:
        """The body of a request, and its digest."""
        if not np.isfinite(rows).all():  # which no node accepts, and none is to blame for
            raise self._lost("refused", "the values at the cut are not all finite")
        body = wire.pack_request(self._digest, rows, bits)
        return body, wire.digest_of(body)

    async def _post(self, node: Node, body: bytes, count: int) -> tuple[int, bytes]:
        self.traffic.sent += len(body)
        return await node.post(body, wire.MOST_HEAD_BYTES + 4 * count * self._classes)

    def _lost(self, kind: str, text: str) -> TierLost:
        self.traffic.failures[kind] = self.traffic.failures.get(kind, 0) + 1
        return TierLost(text)

    async def watch(self) -> None:
        """Checks regularly whether nodes that failed answer again, and connects to those that are cold.

        Runs until it is cancelled.
        """
        await asyncio.gather(*map(self._watch, self.nodes))

    async def _watch(self, node: Node) -> None:
        pause = _SECONDS_BETWEEN_LOOKS
        while True:
            await asyncio.sleep(pause)
            in_time = True
            if node.breaker.reason or node.is_cold:
                try:
                    in_time = await node.look()
                except Exception:
                    _log.exception("a health check of %s failed", self.name)
            # A name that does not resolve keeps a thread after its check was cancelled, and others have to wait for it.
            pause = _SECONDS_BETWEEN_LOOKS if in_time else min(2 * pause, _MOST_BETWEEN_LOOKS)

    async def close(self) -> None:
        """Closes all connections."""
        self._packers.shutdown(wait=False)
        for node in self.nodes:
            await node.close()


async def check_nodes(
    policy: Policy, urls: Mapping[str, Sequence[str]], tls: ssl.SSLContext | bool, seconds: float
) -> None:
    """Checks the nodes that can be reached, before anything is served; the others may start later.

    Raises:
      InputError: one is not a node, has another tier's lanes, or belongs to another split.
    """

    async def look(tier: str, url: str) -> None:
        node = Node(url, tls)
        try:
            about = await node.about(seconds)
            found = about["tier"], about["policy"], tuple(about["lanes"])
        except (httpx.HTTPError, TimeoutError) as error:
            _log.warning(
                "%s at %s cannot be reached (%s); it will be asked once it can be", tier, url, str(error) or repr(error)
            )
            return
        except (wire.Refused, ValueError, RecursionError, KeyError, TypeError) as error:
            raise InputError(f"{url} is not a node of a tier: start one: {program()} tiers node FOLDER") from error
        finally:
            await node.close()
        if found != (tier, policy.digest, policy.tier(tier).lanes):
            raise InputError(
                f"{url} has tier {found[0]}, lanes {', '.join(map(str, found[2]))}, policy {found[1]}; this gateway "
                f"needs tier {tier}, lanes {', '.join(map(str, policy.tier(tier).lanes))}, policy {policy.digest}: "
                "start all tiers from the same split"
            )

    await asyncio.gather(*(look(tier, url) for tier, own in urls.items() for url in own))
