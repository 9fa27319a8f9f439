"""The HTTP server: answers, batches, limits, hostile clients and its end; and the batcher by itself."""

import asyncio
import base64
import concurrent.futures
import contextlib
import hashlib
import http.client
import io
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from conftest import REPOSITORY
from made_files import huge_png
from PIL import Image

from mlcn_jax.data.images import read_pixels
from mlcn_jax.errors import InputError
from mlcn_jax.serving import artifact
from mlcn_jax.serving import server as server_lib
from mlcn_jax.serving.batching import Batcher, Full
from mlcn_jax.serving.http_service import IS_GONE, Limits, application
from mlcn_jax.serving.server import bind, main
from mlcn_jax.serving.service import Service

TIMEOUT_SECONDS = 1.5
MAX_CONNECTIONS = 60
JSON = {"Content-Type": "application/json"}
RAW = {"Content-Type": "image/png"}
FORM = {"Content-Type": "multipart/form-data; boundary=XX"}


@pytest.fixture(scope="module")
def folder(exported):
    return exported / "export"


@pytest.fixture(scope="module")
def model(folder):
    return artifact.Artifact(folder)


class Started:
    """A server in a process of its own."""

    def __init__(self, folder, *options):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mlcn_jax.serve", str(folder), "--port=0", *options],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        line = self.process.stdout.readline()
        found = re.search(r"http://127.0.0.1:(\d+)/predict", line)
        assert found, line + self.process.stdout.read()
        self.port = int(found[1])

    def ask(self, method, path, body=None, headers=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        content = response.read()
        connection.close()
        return response.status, json.loads(content) if path != "/metrics" else content.decode()

    def metric(self, name):
        return float(re.search(rf"^{re.escape(name)} (\S+)$", self.ask("GET", "/metrics")[1], re.M)[1])

    def connect(self):
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    def exchange(self, sent):
        """Status codes of what comes back for some bytes."""
        with self.connect() as connection:
            with contextlib.suppress(OSError):  # it had enough
                connection.sendall(sent)
            return statuses_of(connection)


def statuses_of(connection):
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            received += part
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", received)]


@pytest.fixture(scope="module")
def server(folder):
    started = Started(
        folder,
        "--max_batch=8",
        "--max_images=4",
        "--max_body_mib=1",
        f"--timeout_seconds={TIMEOUT_SECONDS}",
        f"--max_connections={MAX_CONNECTIONS}",
    )
    yield started
    assert started.process.poll() is None, "the server ended by itself"
    started.process.send_signal(signal.SIGTERM)
    assert started.process.wait(30) == 0
    assert started.process.stdout.read() == ""


@pytest.fixture(scope="module")
def pictures(model):
    """PNG files of random pixels in the shape of the model's images."""
    rng = np.random.default_rng(0)
    files = []
    for _ in range(40):
        buffer = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, model.image_shape[:2]).astype(np.uint8)).save(buffer, "PNG")
        files.append(buffer.getvalue())
    return files


def form(files):
    parts = [
        b'--XX\r\nContent-Disposition: form-data; name="%d"; filename="a.png"\r\n\r\n%s\r\n' % (i, file)
        for i, file in enumerate(files)
    ]
    return b"".join(parts) + b"--XX--\r\n"


def in_json(files):
    return json.dumps({"images": [base64.b64encode(file).decode() for file in files]})


def request(body, headers, method="POST", path="/predict"):
    lines = [f"{method} {path} HTTP/1.1", "Host: x", "Connection: close", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, *(f"{k}: {v}" for k, v in headers.items()), "", ""]).encode() + body


def check(predictions, files, model):
    probabilities = model.probabilities(np.stack([read_pixels(file, model.image_shape) for file in files]))
    assert [p["class"] for p in predictions] == [model.class_names[i] for i in probabilities.argmax(axis=1)]
    np.testing.assert_allclose([p["probability"] for p in predictions], probabilities.max(axis=1), atol=1e-5)


def test_every_kind_of_request_is_answered_as_the_artifact_would(server, pictures, model):
    some = pictures[:4]
    for path, body, headers in (
        ("/predict", form(some), FORM),
        ("/predict", in_json(some), JSON),
    ):
        status, answer = server.ask("POST", path, body, headers)
        assert status == 200
        check(answer["predictions"], some, model)
    for headers in (RAW, {"Content-Type": "application/octet-stream"}, {}):
        status, answer = server.ask("POST", "/predict?probabilities", pictures[5], headers)
        check(answer["predictions"], [pictures[5]], model)
    (prediction,) = answer["predictions"]
    assert list(prediction["probabilities"]) == list(model.class_names)
    assert max(prediction["probabilities"].values()) == prediction["probability"]


def test_large_pictures_are_made_to_fit(server, model):
    buffer = io.BytesIO()
    Image.effect_noise((600, 500), 80).save(buffer, "PNG")
    status, answer = server.ask("POST", "/predict", buffer.getvalue(), RAW)
    assert status == 200
    check(answer["predictions"], [buffer.getvalue()], model)


def test_many_clients_get_each_their_own_answer_in_batches(server, pictures, model):
    before = server.metric("mlcn_jax_batch_images_count"), server.metric("mlcn_jax_batch_images_sum")
    waiting = [server.connect() for _ in pictures]
    for connection, file in zip(waiting, pictures, strict=True):
        connection.sendall(request(file, RAW))
    answers = []
    for connection in waiting:
        response = http.client.HTTPResponse(connection)
        response.begin()
        assert response.status == 200
        answers += json.loads(response.read())["predictions"]
        connection.close()
    check(answers, pictures, model)
    batches = server.metric("mlcn_jax_batch_images_count") - before[0]
    assert server.metric("mlcn_jax_batch_images_sum") - before[1] == len(pictures)
    assert batches < len(pictures)


def test_health_description_and_counts(server, pictures, model):
    assert server.ask("GET", "/health") == (200, {"status": "ready"})
    status, answer = server.ask("GET", "/")
    assert status == 200
    assert answer["classes"] == list(model.class_names)
    assert answer["limits"]["max_batch"] == 8
    counted = 'mlcn_jax_requests_total{path="/health",status="200"}'
    before = server.metric(counted)
    server.ask("GET", "/health")
    assert server.metric(counted) == before + 1
    assert server.metric("mlcn_jax_waiting_images") == 0
    asked = 'mlcn_jax_predict_seconds_bucket{le="+Inf"}'
    before = server.metric(asked)
    server.ask("POST", "/predict", pictures[0], RAW)
    assert server.metric(asked) == before + 1


def test_what_cannot_be_read_is_named_and_the_others_are_answered(server, pictures, model):
    text, bomb, cut = b"no picture", huge_png(10_000, 10_000), pictures[0][:-60]
    for body, headers in (
        (form([text, pictures[1], bomb, cut]), FORM),
        (in_json([text, pictures[1], bomb, cut]), JSON),
    ):
        status, answer = server.ask("POST", "/predict", body, headers)
        assert status == 200
        check(answer["predictions"][1:2], pictures[1:2], model)
        errors = [prediction.get("error", "") for prediction in answer["predictions"]]
        assert "not an image" in errors[0]
        assert "megapixels" in errors[2]
        assert "cannot be read" in errors[3]
    for body in (text, bomb, cut, b""):
        status, answer = server.ask("POST", "/predict", body, RAW)
        assert status == 400
        assert answer["predictions"][0]["error"]
    status, answer = server.ask("POST", "/predict", json.dumps({"images": ["?", 3]}), JSON)
    assert (status, answer["predictions"]) == (400, [{"error": "it is not base64"}] * 2)


@pytest.mark.parametrize(
    ("status", "method", "path", "headers", "body"),
    [
        (404, "POST", "/predict/", RAW, b""),
        (404, "GET", "/%ff", {}, b""),
        (405, "GET", "/predict", {}, b""),
        (405, "POST", "/health", {}, b""),
        (413, "POST", "/predict", RAW, bytes(2**20 + 1)),
        (413, "POST", "/predict", FORM, form([b"1"] * 5)),
        (413, "POST", "/predict", JSON, b'{"images": ["", "", "", "", ""]}'),
        (415, "POST", "/predict", {"Content-Type": "text/plain"}, b""),
        (415, "POST", "/predict", {**RAW, "Content-Encoding": "gzip"}, b""),
        (400, "POST", "/predict", {**RAW, "Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c"}, b"1"),
        (400, "POST", "/predict", JSON, b'{"images": ['),
        (400, "POST", "/predict", JSON, b"\xff"),
        (400, "POST", "/predict", JSON, b'{"images": []}'),
        (400, "POST", "/predict", JSON, b'{"images": "abcd"}'),
        (400, "POST", "/predict", JSON, b'{"images":' + b"[" * 500_000),
        (400, "POST", "/predict", FORM, b"--XX--\r\n"),
        (400, "POST", "/predict", FORM, form([b"1", b"2"])[:-10]),
        (400, "POST", "/predict", FORM, b"anything"),
        (400, "POST", "/predict", {"Content-Type": "multipart/form-data"}, form([b"1"])),
    ],
)
def test_what_is_not_taken_is_named(server, status, method, path, headers, body):
    found, answer = server.ask(method, path, body, headers)
    assert (found, list(answer)) == (status, ["error"])


def test_a_body_that_is_too_large_is_refused_before_it_has_come(server):
    announced = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n"
    endless = b"POST /predict HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + 17 * (
        b"10000\r\n" + bytes(2**16) + b"\r\n"
    )
    for sent in (announced, endless):
        with server.connect() as connection:
            started = time.monotonic()
            connection.sendall(sent)
            assert b" 413 " in connection.recv(1000)
            assert time.monotonic() - started < TIMEOUT_SECONDS
            assert statuses_of(connection) == []


def test_slow_clients_are_cut_off_and_others_answered_meanwhile(server, pictures, model):
    head = b"POST /predict HTTP/1.1\r\nHost: x\r\n"
    beginnings = (b"", head, head + b"Content-Length: 100\r\n\r\n", head + b"Transfer-Encoding: chunked\r\n\r\nff\r\n")
    slow = [(server.connect(), beginning) for beginning in beginnings for _ in range(10)]
    started = time.monotonic()
    for connection, beginning in slow:
        connection.sendall(beginning)

    def dribble():
        for _ in range(10):
            time.sleep(TIMEOUT_SECONDS / 5)
            for connection, beginning in slow:
                with contextlib.suppress(OSError):
                    connection.sendall(b"X" if beginning else b"\r\n")

    threading.Thread(target=dribble, daemon=True).start()
    for _ in range(5):
        assert server.ask("POST", "/predict", pictures[0], RAW)[0] == 200
    assert time.monotonic() - started < TIMEOUT_SECONDS
    for connection, _ in slow:
        assert statuses_of(connection) == [408]
        connection.close()
    assert TIMEOUT_SECONDS <= time.monotonic() - started < 3 * TIMEOUT_SECONDS


def test_heads_and_trailers_without_an_end_are_refused(server):
    for start in (
        b"GET / HTTP/1.1\r\nX: ",
        b"GET /",
        b"POST /predict HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: ",
    ):
        assert server.exchange(start + b"x" * 2**20)[:1] == [431]


def test_too_many_connections_are_refused_and_room_comes_again(server):
    idle = [server.connect() for _ in range(MAX_CONNECTIONS)]
    deadline = time.monotonic() + 20
    while server.exchange(request(b"", {}, "GET", "/health")) != [429]:
        assert time.monotonic() < deadline
    for connection in idle:
        connection.close()
    while server.exchange(request(b"", {}, "GET", "/health")) != [200]:
        assert time.monotonic() < deadline


def hostile(rng, pictures):
    """Requests of all kinds that no honest client sends."""
    bodies = [(pictures[0], RAW), (form(pictures[:2]), FORM), (in_json(pictures[:2]).encode(), JSON)]
    chunked = b"POST /predict HTTP/1.1\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    post = b"POST /predict HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    yield from (
        request(huge_png(10_000, 10_000), RAW),
        request(huge_png(7000, 7000), RAW),
        request(b'{"images":' * 50_000, JSON),
        request(b'{"images": [' + b"9" * 10_000 + b"]}", JSON),
        request(b'{"images": [NaN, null, {}, []]}', JSON),
        request(b'{"images": ["\\ud800"]}', JSON),
        request(form(pictures[:1]).replace(b"\r\n\r\n", b"\r\nContent-Transfer-Encoding: base64\r\n\r\n", 1), FORM),
        request(form(pictures[:1]), {"Content-Type": "multipart/form-data; boundary=" + "é" * 10}),
        request(form(pictures[:1]), {"Content-Type": "multipart/form-data; boundary=" + "b" * 5000}),
        request(form(pictures[:1]), {"Content-Type": 'multipart/form-data; boundary=""; charset=\\"'}),
        request(pictures[0], {**RAW, "Upgrade": "websocket", "Connection": "Upgrade"}),
        request(pictures[0], {**RAW, "Upgrade": "h2c"}),
        request(pictures[0], {**RAW, "Expect": "100-continue"}),
        request(pictures[0], {**RAW, "Transfer-Encoding": "chunked"}),
        request(pictures[0], {**RAW, "Content-Length": "5"}),
        request(b"", RAW, "POST", "/predict?" + "a=%ff&" * 2000),
        request(b"", {}, "CONNECT", "x:1"),
        request(b"", {}, "GET", "http://[::1/"),
        request(b"", {}, "OPTIONS", "*"),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.0\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 5000 + b"\r\n",
        b"GET / HTTP/1.1\r\nHost: \x00\xff\r\n\r\n",
        b"GET /\xc3\xa9 HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 500,
        post + b"Content-Length: -1\r\n\r\n",
        post + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n12345",
        post + b"Content-Length: 5000\r\n\r\n" + pictures[0],
        chunked + b"-5\r\nhello\r\n0\r\n\r\n",
        chunked + b"ffffffffffffffffff\r\n",
        chunked + b"1\r\nx\r\n" * 20_000 + b"0\r\n\r\n",
        chunked + b"0\r\na: b\r\n\r\n",
    )
    for _ in range(60):
        yield rng.randbytes(rng.randrange(1, 400))
        yield chunked + rng.randbytes(rng.randrange(1, 400))
        body, headers = rng.choice(bodies)
        yield request(mutated(rng, body), headers)
        yield mutated(rng, request(body, headers))


def mutated(rng, content):
    """Some bytes altered, cut out, doubled or put in."""
    content = bytearray(content)
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(content) + 1)
        end = at + rng.randrange(20)
        content[at:end] = rng.choice([b"", rng.randbytes(end - at), content[at:end] * 2, b"\r\n", b'"', b"\x00"])
    return bytes(content)


def test_nothing_that_a_client_sends_is_a_fault_of_the_server(server, pictures):
    sent = list(hostile(random.Random(0), pictures))
    with concurrent.futures.ThreadPoolExecutor(MAX_CONNECTIONS // 2) as pool:
        found = list(pool.map(server.exchange, sent))
    for request_sent, statuses in zip(sent, found, strict=True):
        assert all(100 <= status < 300 or 400 <= status < 500 for status in statuses), (statuses, request_sent[:500])
    answered = {status for statuses in found for status in statuses}
    assert {200, 400, 404, 408, 429} <= answered
    for status in (400, 408, 429):
        assert server.metric(f'mlcn_jax_requests_total{{path="",status="{status}"}}') > 0
    assert server.ask("POST", "/predict", pictures[0], RAW)[0] == 200
    assert server.ask("GET", "/health") == (200, {"status": "ready"})


def test_a_signal_ends_it_once_all_that_came_is_answered(folder, pictures):
    server = Started(folder, "--max_batch=1", "--max_queue=1000")
    idle = server.connect()
    asking = [server.connect() for _ in range(8)]
    for connection in asking:
        connection.sendall(request(form(pictures), FORM))
    time.sleep(0.05)
    server.process.send_signal(signal.SIGTERM)
    assert [statuses_of(connection) for connection in asking] == [[200]] * len(asking)
    assert statuses_of(idle) == []
    assert server.process.wait(30) == 0
    with pytest.raises(ConnectionRefusedError):
        server.connect()
    assert server.process.stdout.read() == ""


class Slow:
    """A model that takes its time: it answers once `go` is set."""

    class_names, image_shape, step, exported = ("dark", "light"), (2, 2, 1), 1, "today"

    def __init__(self):
        self.entered, self.go, self.sizes = threading.Event(), threading.Event(), []

    def probabilities(self, images):
        self.entered.set()
        self.go.wait(30)
        self.sizes.append(len(images))
        if images[0].max() == 13:
            raise RuntimeError("thirteen")
        light = images.mean(axis=(1, 2, 3)) / 255
        return np.stack([1 - light, light], axis=1)


def pixel(value):
    buffer = io.BytesIO()
    Image.new("L", (2, 2), value).save(buffer, "PNG")
    return buffer.getvalue()


async def until(condition):
    while not condition():
        await asyncio.sleep(0.01)


async def ask(
    app, body, path="/predict", method="POST", whole=None, query=b"", headers=(), parse=json.loads, scope=None
):
    """Status, headers and answer of an ASGI application, if there is one; the body ends once `whole` is set."""
    scope = {**(scope or {}), "type": "http", "method": method, "path": path, "query_string": query, "root_path": ""}
    scope["headers"] = [(name.lower().encode(), value.encode()) for name, value in dict(headers).items()]
    sent, parts = [], [body, b""] if whole else [body]

    async def receive():
        part = parts.pop(0)
        if whole and not parts:
            await whole.wait()
        return {"type": "http.request", "body": part, "more_body": bool(parts)}

    async def send(message):
        sent.append(message)

    await app(scope, receive, send)
    return (sent[0]["status"], dict(sent[0]["headers"]), parse(sent[1]["body"])) if sent else None


def in_process(check, **limits):
    """Runs `check(app, slow, service)`, a coroutine, with a server without HTTP before a slow model."""
    slow = Slow()
    values = {"max_batch": 8, "max_queue": 8, "max_body_bytes": 1000, "max_images": 4, "max_connections": 9} | limits
    service = Service(slow, Limits(timeout_seconds=5, **values))

    async def run():
        async with service.running(None):
            await asyncio.wait_for(check(application(service), slow, service), 30)

    asyncio.run(run())


def test_a_training_run_is_served_without_exporting_it(folder, monkeypatch):
    workdir, served = folder.parent, []
    manifest = (folder / artifact.MANIFEST).stat()
    os.utime(folder / artifact.MANIFEST, (0, 0))  # older than the checkpoint
    monkeypatch.setattr(server_lib, "serve", lambda service, listener, message: served.append((service, message)))
    try:
        main([str(workdir), "--port=0", "--max_batch=1"])
    finally:
        os.utime(folder / artifact.MANIFEST, (manifest.st_atime, manifest.st_mtime))
    (service, message) = served[0]
    assert message.startswith(f"serving {workdir} at http://127.0.0.1:")
    assert not isinstance(service.model, artifact.Artifact)

    async def check():
        async with service.running(None):
            app = application(service)
            return await ask(app, b"", "/", "GET"), await ask(app, pixel(0))

    (status, _, about), (predicted, _, answer) = asyncio.run(check())
    assert (status, about["step"], "exported" in about) == (200, service.model.step, False)
    assert (predicted, answer["predictions"][0]["class"] in service.model.class_names) == (200, True)


def test_what_comes_while_the_model_computes_goes_together_and_too_much_is_refused():
    async def check(app, slow, service):
        asked = [asyncio.create_task(ask(app, pixel(0)))]
        await until(slow.entered.is_set)
        asked += [asyncio.create_task(ask(app, pixel(200 + i))) for i in range(8)]
        await until(lambda: service.batcher.waiting == 8)
        status, headers, answer = await ask(app, pixel(1))
        assert (status, headers[b"retry-after"], list(answer)) == (429, b"1", ["error"])
        slow.go.set()
        answers = [answer["predictions"][0] for _, _, answer in await asyncio.gather(*asked)]
        assert slow.sizes == [1, 8]
        assert [answer["class"] for answer in answers] == ["dark"] + ["light"] * 8
        np.testing.assert_allclose([a["probability"] for a in answers[1:]], np.arange(200, 208) / 255)
        assert (await ask(app, pixel(1)))[0] == 200

    in_process(check)


def test_without_batching_each_goes_by_itself():
    async def check(app, slow, service):
        asked = [asyncio.create_task(ask(app, pixel(i))) for i in range(8)]
        slow.go.set()
        assert [status for status, _, _ in await asyncio.gather(*asked)] == [200] * 8
        assert slow.sizes == [1] * 8

    in_process(check, max_batch=1)


def test_a_model_that_fails_is_told_apart_from_a_bad_request():
    async def check(app, slow, service):
        slow.go.set()
        assert (await ask(app, pixel(13)))[0] == 500
        assert (await ask(app, b"", "/health", "GET"))[::2] == (503, {"status": "failing"})
        assert (await ask(app, pixel(14)))[0] == 200
        assert (await ask(app, b"", "/health", "GET"))[::2] == (200, {"status": "ready"})

    in_process(check)


def test_too_many_bytes_at_once_are_refused():
    async def check(app, slow, service):
        slow.go.set()
        whole = asyncio.Event()
        asked = [asyncio.create_task(ask(app, bytes(20_000), whole=whole)) for _ in range(8)]
        await asyncio.sleep(0)
        assert (await ask(app, bytes(20_000)))[0] == 429
        assert (await ask(app, pixel(1)))[0] == 200
        whole.set()
        assert [status for status, _, _ in await asyncio.gather(*asked)] == [400] * 8
        assert (await ask(app, bytes(20_000)))[0] == 400

    in_process(check, max_body_bytes=20_000)


def test_the_most_probable_classes_are_told_as_many_as_are_asked_for():
    light = pixel(153)
    first, second = {"class": "light", "probability": 0.6}, {"class": "dark", "probability": 0.4}
    field = b'--XX\r\nContent-Disposition: form-data; name="top"\r\n\r\n%s\r\n'

    async def check(app, slow, service):
        slow.go.set()

        async def tops(body=light, query=b"", headers=RAW):
            status, _, answer = await ask(app, body, query=query, headers=headers)
            if status != 200:
                return status, answer["error"]
            (prediction,) = answer["predictions"]
            assert (prediction["class"], round(prediction["probability"], 6)) == ("light", 0.6)
            return [one | {"probability": round(one["probability"], 6)} for one in prediction.get("top", [])]

        assert await tops() == []
        assert await tops(query=b"top=1") == [first]
        assert await tops(query=b"top=2") == await tops(query=b"top=all") == [first, second]
        body = json.loads(in_json([pixel(153)]))
        for value, expected in ((1, [first]), ("1", [first]), ("all", [first, second]), (None, [])):
            assert await tops(json.dumps(body | {"top": value}).encode(), headers=JSON) == expected
        assert await tops(field % b"1" + form([pixel(153)]), headers=FORM) == [first]
        assert await tops(field % b"1" + form([pixel(153)]), b"top=all", FORM) == [first, second]
        expected = "give a number from 1 to 2, or all"
        for query in (
            b"top",
            b"top=0",
            b"top=3",
            b"top=-1",
            b"top=1.5",
            b"top=%b2",
            b"top=some",
            b"top=" + b"9" * 5000,
        ):
            status, error = await tops(query=query)
            assert status == 400
            assert expected in error
            assert len(error) < 100
        for value in (0, 3, True, 1.0, "\ud800", [1], {}):
            status, error = await tops(json.dumps(body | {"top": value}).encode(), headers=JSON)
            assert (status, expected in error) == (400, True)
        assert (await tops(field % b"x" + form([pixel(153)]), headers=FORM))[0] == 400

    in_process(check)


def test_browsers_get_a_page_and_programs_the_description():
    async def check(app, slow, service):
        accept = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
        status, headers, text = await ask(app, b"", "/", "GET", headers=accept, parse=bytes.decode)
        assert status == 200
        assert headers[b"content-type"].startswith(b"text/html")
        assert not re.search(r"(src|href)=[\"']?(https?:)?//", text)
        policy = headers[b"content-security-policy"].decode()
        assert policy.startswith("default-src 'none'")
        for tag in ("script", "style"):
            content = re.search(f"<{tag}>(.*?)</{tag}>", text, re.S)[1]
            digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
            assert f"{tag}-src 'sha256-{digest}'" in policy
        _, headers, answer = await ask(app, b"", "/", "GET", headers={"Accept": "*/*"})
        assert answer["classes"] == ["dark", "light"]
        assert headers[b"vary"] == b"Accept"

    in_process(check)


def test_the_description_names_every_route_and_what_is_taken():
    async def check(app, slow, service):
        _, _, found = await ask(app, b"", "/openapi.json", "GET")
        missing = (await ask(app, b"", "/nothing", "GET"))[2]["error"]
        for path, operations in found["paths"].items():
            (method,) = operations
            assert f"{method.upper()} {path}" in missing
            status = (await ask(app, b"", path, method.upper(), parse=bytes))[0]
            assert str(status) in operations[method]["responses"]
        assert len(found["paths"]) == len(re.findall("GET|POST", missing))
        predict = found["paths"]["/predict"]["post"]
        for kind, schema in predict["requestBody"]["content"].items():
            status, _, answer = await ask(app, b"?", headers={"Content-Type": kind})
            assert status == 400, answer
            assert schema["schema"]["type"] in ("string", "object")
        images = predict["requestBody"]["content"]["application/json"]["schema"]["properties"]["images"]
        assert images["maxItems"] == service.limits.max_images
        for name in re.findall("#/components/schemas/([A-Za-z]+)", json.dumps(found)):
            assert name in found["components"]["schemas"]

    in_process(check)


def test_another_method_is_answered_with_the_one_to_take():
    async def check(app, slow, service):
        status, headers, answer = await ask(app, b"", "/predict", "GET")
        assert (status, headers[b"allow"], answer) == (405, b"POST", {"error": "/predict takes POST only"})

    in_process(check)


@pytest.mark.parametrize(("waiting", "taken"), [(1, 1), (3, 2), (5, 5), (6, 6), (8, 8), (9, 8), (50, 8)])
def test_fewer_are_taken_where_padding_would_cost_more(waiting, taken):
    batcher = Batcher(lambda items: items, 8, 100)
    batcher._seconds = {1: 1.0, 2: 1.2, 4: 2.4, 8: 3.0}
    assert batcher.batch_size(waiting) == taken


def test_a_size_that_computes_slowly_is_not_taken():
    batcher = Batcher(lambda items: items, 8, 100)
    batcher._seconds = {1: 1.0, 2: 1.2, 4: 10.0, 8: 20.0}
    assert [batcher.batch_size(waiting) for waiting in (1, 2, 4, 8, 50)] == [1, 2, 2, 2, 2]


def test_more_than_may_wait_is_not_taken():
    batcher = Batcher(lambda items: items, 8, 3)
    with pytest.raises(Full):
        batcher.submit([np.zeros(1)] * 4)


def test_a_batch_is_no_larger_than_its_first_item_has_time_for():
    batcher = Batcher(lambda items: items, 8, 100)
    batcher._seconds = {1: 1.0, 2: 1.2, 4: 1.6, 8: 2.4}
    assert [batcher.batch_size(50, left) for left in (5, 2.4, 2, 1.3, 0.1)] == [8, 8, 4, 2, 1]


def test_what_cannot_be_answered_by_the_deadline_is_refused_at_once_and_late_items_are_not_computed():
    async def check(app, slow, service):
        service.batcher._seconds = {1: 0.2, 2: 0.2, 4: 0.2, 8: 0.2}
        asked = [asyncio.create_task(ask(app, pixel(0)))]
        await until(slow.entered.is_set)
        asked.append(asyncio.create_task(ask(app, pixel(200))))
        await until(lambda: service.batcher.waiting == 1)
        service.batcher._seconds |= {1: 0.6, 2: 1.1}
        status, headers, answer = await ask(app, pixel(201))
        assert (status, headers[b"retry-after"]) == (503, b"1")
        assert answer == {"error": "no answer within 1 seconds: try again"}
        assert service.batcher.waiting == 1
        await asyncio.sleep(1)  # until the waiting one is late
        slow.go.set()
        first, second = await asyncio.gather(*asked)
        assert (first[0], second[0], slow.sizes) == (200, 503, [1])
        assert (await ask(app, pixel(202)))[0] == 200

    in_process(check, deadline_seconds=1.0)


def test_a_model_too_slow_for_the_deadline_is_named():
    slow = Slow()
    slow.go.set()
    slow.probabilities = lambda images: time.sleep(0.02) or np.zeros((len(images), 2))
    limits = Limits(2, 8, 1000, 4, 9, timeout_seconds=5, deadline_seconds=0.01)
    with pytest.raises(InputError, match=r"one image alone takes 0\.02\d? seconds.*--deadline_seconds=0\.01"):
        Service(slow, limits).warm_up()


def test_what_a_client_no_longer_waits_for_is_not_computed():
    async def check(app, slow, service):
        gone = []
        asked = [asyncio.create_task(ask(app, pixel(0)))]
        await until(slow.entered.is_set)
        for value in (100, 101):
            asked.append(asyncio.create_task(ask(app, pixel(value), scope={IS_GONE: lambda v=value: v in gone})))
        await until(lambda: service.batcher.waiting == 2)
        gone.append(100)
        slow.go.set()
        first, left, stayed = await asyncio.gather(*asked)
        assert (first[0], left, stayed[0]) == (200, None, 200)
        assert slow.sizes == [1, 1]

    in_process(check)


def run_serve(*options):
    done = subprocess.run(
        [sys.executable, "-m", "mlcn_jax.serve", *options], cwd=REPOSITORY, capture_output=True, text=True, timeout=100
    )
    assert done.stdout == ""
    return done.returncode, done.stderr


def test_an_address_in_use_gives_one_error(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, message = run_serve(str(tmp_path), f"--port={taken.getsockname()[1]}")
    assert code == 2
    assert re.fullmatch(r"error: cannot listen on 127.0.0.1, port \d+ \(.*in use\).*--port\n", message)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--max_batch=48", "power of two"),
        ("--max_batch=256", "power of two"),
        ("--port=70000", "0 to 65535"),
        ("--max_body_mib=0", "above 0"),
        ("--timeout_seconds=nan", "above 0"),
        ("--deadline_seconds=-1", "0 or more"),
        ("--workers=0", "1 or more"),
        ("--max_images=300", "max_queue=256"),
        ("--host=no.such.host.invalid", "cannot listen"),
        ("--port=0", "folder does not exist"),
    ],
)
def test_options_that_make_no_sense_are_named(monkeypatch, option, said):
    monkeypatch.setattr(sys, "argv", ["serve", "folder", option])
    with pytest.raises(InputError, match=said):
        main()


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["serve", "folder"])
    monkeypatch.setattr(server_lib, "_PACKAGES", ("uvicorn", "no_such_package"))
    with pytest.raises(InputError, match=r"needs no_such_package: pip install 'mlcn_jax\[serve\]'"):
        main()


def test_an_address_that_others_can_reach_is_warned_of(caplog, monkeypatch):
    monkeypatch.setattr("mlcn_jax.serving.server._log.propagate", True)
    bind("localhost", 0).close()
    assert not caplog.records
    bind("0.0.0.0", 0).close()
    assert "other machines" in caplog.text
