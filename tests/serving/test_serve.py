"""The HTTP server: answers, batches, limits, hostile clients and its end."""

import base64
import concurrent.futures
import contextlib
import http.client
import io
import json
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
from made_files import FORM, JSON, RAW, form, huge_png, in_json
from made_requests import hostile, request
from PIL import Image

from mlcn_jax.data.images import read_pixels
from mlcn_jax.serving import artifact

TIMEOUT_SECONDS = 1.5
MAX_CONNECTIONS = 60


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
    broken = base64.encodebytes(pictures[1]).decode()
    status, answer = server.ask("POST", "/predict", json.dumps({"images": [broken]}), JSON)
    check(answer["predictions"], pictures[1:2], model)
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
            connection.sendall(sent)
            assert b" 413 " in connection.recv(1000)  # one that waited for it would answer 408
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
    for connection, _ in slow:
        assert statuses_of(connection) == [408]
        connection.close()
    assert time.monotonic() - started >= TIMEOUT_SECONDS


def test_heads_and_trailers_without_an_end_are_refused(server):
    for start in (
        b"GET / HTTP/1.1\r\nX: ",
        b"GET /",
        b"POST /predict HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: ",
    ):
        assert server.exchange(start + b"x" * 2**20)[:1] == [431]


def test_a_long_body_is_no_room_for_long_trailers(server):
    """Of a request that is answered before its body, which is read on and thrown away."""

    def send_trailers(connection):
        for _ in range(60):
            connection.sendall(b"a:\r\n" * 10_000)
            time.sleep(0.02)

    with server.connect() as connection:
        connection.sendall(b"POST /nothing HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")
        connection.sendall(b"800000\r\n" + b"x" * 2**23 + b"\r\n0\r\n")
        with pytest.raises(ConnectionError):
            send_trailers(connection)


def test_too_many_connections_are_refused_and_room_comes_again(server):
    deadline, idle = time.monotonic() + 60, []
    while server.exchange(request(b"", {}, "GET", "/health")) != [429]:
        assert time.monotonic() < deadline
        idle += [server.connect() for _ in range(MAX_CONNECTIONS)]  # again: the first may have been cut off
    for connection in idle:
        connection.close()
    while server.exchange(request(b"", {}, "GET", "/health")) != [200]:
        assert time.monotonic() < deadline


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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_once_all_that_came_is_answered(folder, pictures, number):
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the server ignores it if nohup runs these tests
    server = Started(folder, "--max_batch=1", "--max_queue=1000")
    signal.signal(signal.SIGHUP, before)
    idle = server.connect()
    asking = [server.connect() for _ in range(8)]
    for connection in asking:
        connection.sendall(request(form(pictures), FORM))
    time.sleep(0.05)
    server.process.send_signal(number)
    assert [statuses_of(connection) for connection in asking] == [[200]] * len(asking)
    assert statuses_of(idle) == []
    assert server.process.wait(30) == 0
    with pytest.raises(ConnectionRefusedError):
        server.connect()
    assert server.process.stdout.read() == ""
