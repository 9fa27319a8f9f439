"""Nodes and gateways in this process, whose wires a test can change, and what is asked of them."""

import contextlib
import io
import json

import httpx
import msgspec
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from PIL import Image

from mlcn_jax.serving.http_service import Limits, application
from mlcn_jax.tiers import policy as policies
from mlcn_jax.tiers.client import Node, TierClient
from mlcn_jax.tiers.gateway import GatewayService
from mlcn_jax.tiers.node import NodeService
from mlcn_jax.tiers.policy import Policy, Tier

LIMITS = Limits(max_batch=2, max_queue=16, max_body_bytes=2**20, max_images=4, max_connections=50, timeout_seconds=5.0)


def policy():
    """A policy of four lanes and three classes, without a model."""
    return Policy(
        format=policies.FORMAT,
        model="0" * 64,
        class_names=("a", "b", "c"),
        cut="pixels",
        tiers=(Tier("end", (0,), 1.0, 10), Tier("edge", (1,), 1.0, 10), Tier("cloud", (2, 3), 2.0, 20)),
        power=1,
        groups={},
        tolerance=0.02,
        validation_images=100,
        thresholds={},
    )


class Wire(httpx.ASGITransport):
    """A node in this process, whose answers and arrival a test can change."""

    def __init__(self, app):
        super().__init__(app)
        self.asked = 0
        self.change = lambda response: response

    async def handle_async_request(self, request):
        self.asked += request.url.path == "/part"
        changed = self.change(await super().handle_async_request(request))
        return await changed if hasattr(changed, "__await__") else changed


@contextlib.asynccontextmanager
async def started(tiers, sign=None, is_signed=None, **options):
    """A gateway's client, the gateway, and the wires to its nodes."""
    async with contextlib.AsyncExitStack() as stack:
        wires, clients = {}, {}
        for name in ("edge", "cloud"):
            service = NodeService(tiers[name], LIMITS, sign)
            await stack.enter_async_context(service.running(None))
            wires[name] = Wire(application(service))
            clients[name] = TierClient(name, tiers["end"].policy, ["http://node"], True, is_signed)
            clients[name].nodes = [Node("http://node", True, wires[name])]
        gateway = GatewayService(tiers["end"], clients, LIMITS, **options)
        await stack.enter_async_context(gateway.running(None))
        client = httpx.AsyncClient(transport=httpx.ASGITransport(application(gateway)), base_url="http://gateway")
        yield await stack.enter_async_context(client), gateway, wires


def png(pixels):
    buffer = io.BytesIO()
    Image.fromarray(pixels[..., 0]).save(buffer, "PNG")
    return buffer.getvalue()


def key_files(folder, name):
    """A private key and its public one."""
    private = Ed25519PrivateKey.generate()
    pem = serialization.Encoding.PEM
    plain = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    public = private.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    paths = folder / f"{name}.pem", folder / f"{name}.pub.pem"
    paths[0].write_bytes(private.private_bytes(pem, *plain))
    paths[1].write_bytes(public)
    return paths


def strict(policy, margin=None):
    """A policy whose answers are final from this margin on only."""
    changed = {k: msgspec.structs.replace(v, margin=margin) for k, v in policy.thresholds.items()}
    return msgspec.structs.replace(policy, thresholds=changed)


def with_policy(tiers, policy):
    changed = {}
    for name, tier in tiers.items():
        changed[name] = tier.__class__.__new__(tier.__class__)
        changed[name].__dict__ |= tier.__dict__ | {"policy": policy}
    return changed


async def lines_of(client, pixels, query=""):
    response = await client.post(f"/refine{query}", content=png(pixels), headers={"Content-Type": "image/png"})
    assert response.status_code == 200, response.text
    return [json.loads(line) for line in response.text.splitlines()]
