"""A gateway's clients for the other tiers: requests to their nodes, health checks, time-outs, retries. Needs httpx."""

import asyncio
import contextlib
import dataclasses
import logging
import secrets
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx
import numpy as np

from mlcn_jax.errors import InputError
from mlcn_jax.launch import program
from mlcn_jax.tiers import wire
from mlcn_jax.tiers.health import Breaker, Times
from mlcn_jax.tiers.node import PATH
from mlcn_jax.tiers.policy import Policy

_SECONDS_BETWEEN_LOOKS = 0.5  # health checks
_SECONDS_BETWEEN_TRIES = 1.0  # of a tier that has been too slow for the deadline
_LOOK_SECONDS = 2.0  # time-out of a health check
_IDLE_SECONDS = 30.0  # how long an idle connection is kept; nodes keep it longer
_MOST_HEAD_BYTES = 2**14  # of an answer, besides its numbers
_QUICK_BYTES = 2**16  # packing up to this many bytes of values takes less time than handing them to a thread
_OF_ONE_REQUEST = (413, 422)  # statuses of a request that cannot be answered, though the next one may be
_OF_THE_MOMENT = (408, 429)  # the same request may be answered a little later
_log = logging.getLogger("mlcn_jax")


class TierLost(Exception):
    """No node of a tier gave a usable answer; the text says why."""


@dataclasses.dataclass
class Traffic:
    """Bytes of bodies sent to a tier and received from it, numbers of answers, and of failed requests by reason."""

    sent: int = 0
    received: int = 0
    answers: int = 0
    failures: dict[str, int] = dataclasses.field(default_factory=dict)


class Node:
    """One node of a tier, at a URL, reached through `transport` if it is given (httpx's own otherwise).

    Attributes:
      breaker: its circuit breaker, which says whether to ask it.
      outstanding: requests that it has not answered yet.
      is_cold: whether no connection to it is known to be open; a request that is given up closes its connection.
    """

    def __init__(self, url: str, tls: ssl.SSLContext | bool, transport: httpx.AsyncBaseTransport | None = None):
        self.url = url
        self.breaker = Breaker()
        self.outstanding = 0
        self.is_cold = True
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

    def times(self, count: int) -> Times:
        """What is known about requests with about `count` images."""
        return self._times.setdefault(count.bit_length(), Times())

    async def post(self, body: bytes, most: int) -> tuple[int, bytes]:
        """Sends a request; returns the status and body of the answer, which may have up to `most` bytes.

        Raises:
          httpx.HTTPError: there is no answer, or not one in HTTP.
          wire.Refused: the answer is longer, or compressed.
        """
        headers = {"Content-Type": "application/octet-stream"}
        return await self._exchange("POST", PATH, most, content=body, headers=headers)

    async def _exchange(self, method: str, path: str, most: int, **options: Any) -> tuple[int, bytes]:
        content = bytearray()
        async with self._client.stream(method, path, **options) as response:
            # Nothing is decoded, so that no part of an answer can grow before its size is looked at.
            if (coding := response.headers.get("Content-Encoding", "identity")) != "identity":
                raise wire.Refused(f"the answer has Content-Encoding {coding[:20]!r}, which was not asked for")
            async for part in response.aiter_bytes():
                content += part
                if len(content) > most:
                    raise wire.Refused(f"the answer has more than {most} bytes")
            return response.status_code, bytes(content)

    def gave_up(self, times: Times, seconds: float) -> None:
        """Records that an answer was no longer awaited after `seconds`: it was late, or its deadline was short."""
        self.is_cold = True
        times.takes_more_than(seconds)
        if times.mean is not None and seconds >= times.late:
            self.breaker.failed("no answer before the deadline")

    async def look(self) -> None:
        """Checks whether it answers; the connection stays open for the next request."""
        with contextlib.suppress(httpx.HTTPError, wire.Refused, TimeoutError):
            async with asyncio.timeout(_LOOK_SECONDS):
                if (await self._exchange("GET", "/health", _MOST_HEAD_BYTES))[0] == 200:
                    self.breaker.seen()
                    self.is_cold = False

    async def close(self) -> None:
        """Closes its connections."""
        await self._client.aclose()


class TierClient:
    """The nodes of one tier, any of which can answer its requests.

    Args:
      name: name of the tier.
      policy: the policy of the split.
      urls: URLs of its nodes.
      tls: settings for https.
      is_signed: says whether a trusted node made a signature of some content; None accepts unsigned answers.

    Attributes:
      stopped: whether it must not be asked; the gateway's page can set this.
      traffic: bytes, answers and failures so far.
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
        self._asked = 0.0

    @property
    def is_available(self) -> bool:
        """Whether a node may be asked now."""
        return not self.stopped and any(not node.breaker.is_open for node in self.nodes)

    @property
    def trouble(self) -> str:
        """Why the tier is not available."""
        if self.stopped:
            return "stopped"
        return "; ".join(f"{node.url}: {node.breaker.reason}" for node in self.nodes if node.breaker.reason)

    def expected(self, count: int) -> float:
        """Seconds that an answer for `count` images is expected to take."""
        return min(
            (node.times(count).expected for node in self.nodes if not node.breaker.is_open), default=float("inf")
        )

    def is_worth_asking(self, count: int, seconds: float) -> bool:
        """Whether an answer may come within `seconds`; now and then also if none has been that fast so far."""
        known = [node.times(count) for node in self.nodes if not node.breaker.is_open]
        if any(times.may_take(seconds) for times in known):
            return True
        return bool(known) and time.monotonic() > self._asked + _SECONDS_BETWEEN_TRIES

    def patience(self, count: int) -> float:
        """Seconds after which an answer is late, so that another tier should be asked as well."""
        return min((node.times(count).late for node in self.nodes if not node.breaker.is_open), default=0.0)

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
            node = min(able, key=lambda node: (1 + node.outstanding) * node.times(len(rows)).expected)
            tried.append(node)
            try:
                return await self._ask(node, rows, bits, deadline)
            except TierLost as error:
                reasons.append(f"{node.url}: {error}")
        raise TierLost("; ".join(reasons) or f"no node of {self.name} is available")

    async def _ask(self, node: Node, rows: np.ndarray, bits: int, deadline: float) -> np.ndarray:
        nonce = secrets.token_hex(8)
        if rows.nbytes > _QUICK_BYTES:
            body = await asyncio.to_thread(wire.pack_request, self._digest, nonce, rows, bits)
        else:
            body = wire.pack_request(self._digest, nonce, rows, bits)
        times, started = node.times(len(rows)), time.monotonic()
        left = deadline - started
        patience = times.timeout
        shape, status = (len(rows), self._classes), 0
        node.outstanding += 1
        node.breaker.asked()
        try:
            async with asyncio.timeout(min(left, patience)):
                self.traffic.sent += len(body)
                status, content = await node.post(body, _MOST_HEAD_BYTES + 4 * len(rows) * self._classes)
            self.traffic.received += len(content)
            if status != 200:
                raise wire.Refused(f"status {status}: {content[:300].decode(errors='replace')}")
            sums = wire.unpack_answer(content, self._digest, self.name, nonce, shape, self._weight, self._is_signed)
        except TimeoutError as error:
            if patience <= left:
                times.timed_out()
                node.breaker.failed("no answer in time")
            else:
                node.gave_up(times, time.monotonic() - started)
            raise self._lost("time-out", f"no answer within {1e3 * min(left, patience):.0f} ms") from error
        except asyncio.CancelledError:
            node.gave_up(times, time.monotonic() - started)
            raise
        except httpx.HTTPError as error:
            node.breaker.failed(str(error) or repr(error))
            raise self._lost("connection", str(error) or repr(error)) from error
        except wire.Refused as error:
            if status not in _OF_ONE_REQUEST:
                node.breaker.failed(str(error), surely=status < 500 and status not in _OF_THE_MOMENT)
            raise self._lost("full" if status == 429 else "refused", str(error)) from error
        except Exception as error:  # unexpected, but the other tiers can answer without this one
            _log.exception("a request to %s at %s failed", self.name, node.url)
            node.breaker.failed(repr(error))
            raise self._lost("error", repr(error)) from error
        finally:
            node.outstanding -= 1
            node.breaker.ended()
        times.took(time.monotonic() - started)
        node.breaker.worked()
        self.traffic.answers += 1
        return sums

    def _lost(self, kind: str, text: str) -> TierLost:
        self.traffic.failures[kind] = self.traffic.failures.get(kind, 0) + 1
        return TierLost(text)

    async def watch(self) -> None:
        """Checks regularly whether nodes that failed answer again, and connects to those that are cold.

        Runs until it is cancelled.
        """
        while True:
            await asyncio.sleep(_SECONDS_BETWEEN_LOOKS)
            looks = [node.look() for node in self.nodes if node.breaker.reason or node.is_cold]
            for error in await asyncio.gather(*looks, return_exceptions=True):
                if error is not None:
                    _log.error("a health check of %s failed", self.name, exc_info=error)

    async def close(self) -> None:
        """Closes all connections."""
        for node in self.nodes:
            await node.close()


async def check_nodes(
    policy: Policy, urls: Mapping[str, Sequence[str]], tls: ssl.SSLContext | bool, seconds: float
) -> None:
    """Checks the nodes that can be reached, before anything is served; the others may start later.

    Raises:
      InputError: one is not a node, has another tier's lanes, or belongs to another split.
    """

    async def look(client: httpx.AsyncClient, tier: str, url: str) -> None:
        try:
            about = (await client.get(url)).json()
            found = about["tier"], about["policy"], tuple(about["lanes"])
        except httpx.HTTPError as error:
            _log.warning(
                "%s at %s cannot be reached (%s); it will be asked once it can be", tier, url, str(error) or repr(error)
            )
            return
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{url} is not a node of a tier: start one: {program()} tiers node FOLDER") from error
        if found != (tier, policy.digest, policy.tier(tier).lanes):
            raise InputError(
                f"{url} has tier {found[0]}, lanes {', '.join(map(str, found[2]))}, policy {found[1]}; this gateway "
                f"needs tier {tier}, lanes {', '.join(map(str, policy.tier(tier).lanes))}, policy {policy.digest}: "
                "start all tiers from the same split"
            )

    async with httpx.AsyncClient(verify=tls, timeout=seconds, trust_env=False) as client:
        await asyncio.gather(*(look(client, tier, url) for tier, own in urls.items() for url in own))
