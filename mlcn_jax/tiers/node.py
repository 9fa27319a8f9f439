"""`tiers node`: a tier's server. `POST /part` takes what its lanes need of images, and answers with their part."""

import dataclasses
import logging
import math
from collections.abc import Callable

import numpy as np
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from mlcn_jax.serving.http_service import IS_GONE, SMALL_BYTES, BatchService, Limits
from mlcn_jax.tiers import wire
from mlcn_jax.tiers.artifact import TierArtifact

PATH = "/part"
_SMALL_ROWS_BYTES = 2**17  # unpacking rows up to this size takes less time than handing them to a thread
KEEP_ALIVE_SECONDS = 60  # of idle connections; gateways close them earlier, so no request meets a closed one
_log = logging.getLogger("mlcn_jax")


class NodeService(BatchService):
    """The lanes of one tier as a service.

    Args:
      artifact: the artifact of the tier.
      limits: what is accepted.
      sign: signs the answers, if given.
    """

    computing = (PATH,)

    def __init__(self, artifact: TierArtifact, limits: Limits, sign: Callable[[bytes], bytes] | None = None):
        super().__init__(artifact.part, np.zeros(artifact.row_shape, artifact.row_dtype), limits)
        self.artifact, self._sign = artifact, sign
        self._digest = artifact.policy.digest
        self._most_rows = min(limits.max_images, limits.max_queue)  # of a request
        row_bytes = math.prod(artifact.row_shape) * artifact.row_dtype.itemsize
        # A small body may hold many rows that it has packed, as a malicious one would.
        self._small_bytes = SMALL_BYTES if self._most_rows * row_bytes <= _SMALL_ROWS_BYTES else 0

    def routes(self) -> list[Route]:
        return [Route("/", self._about), Route(PATH, self, methods=["POST"])]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.check_room()
        try:
            (asked, rows), _ = await self.receive(
                dict(scope["headers"]), receive, self._read, lambda body: len(body) <= self._small_bytes
            )
            sums = np.stack(await self.rows(list(rows), scope.get(IS_GONE, lambda: False)))
        except ClientDisconnect:
            return
        except wire.Unfit as error:
            raise HTTPException(422, str(error)) from error
        except wire.Refused as error:
            raise HTTPException(400, str(error)) from error
        body = wire.pack_answer(self._digest, self.artifact.name, asked, sums, self._sign)
        await Response(body, media_type="application/octet-stream")(scope, receive, send)

    def _read(self, body: bytes, check: Callable[[], None]) -> tuple[str, np.ndarray]:
        del check
        artifact = self.artifact
        return wire.unpack_request(
            body,
            self._digest,
            artifact.row_shape,
            artifact.row_dtype,
            self._most_rows,
        )

    async def _about(self, request: Request) -> Response:
        return JSONResponse(
            {
                "tier": self.artifact.name,
                "lanes": self.artifact.lanes,
                "policy": self._digest,
                "model": self.artifact.policy.model,
                "cut": self.artifact.policy.cut,
                "step": self.artifact.step,
                "limits": dataclasses.asdict(self.limits),
            }
        )
