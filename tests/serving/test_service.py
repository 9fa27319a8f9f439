"""The application without HTTP before it: batches, deadlines, answers and the page; and the batcher by itself."""

import asyncio
import base64
import hashlib
import json
import re
import time
import warnings

import numpy as np
import pytest
from made_files import FORM, JSON, RAW, form, huge_png, in_json
from made_service import Slow, ask, in_process, pixel, until
from PIL import Image

from mlcn_jax.errors import InputError
from mlcn_jax.serving import artifact
from mlcn_jax.serving import server as server_lib
from mlcn_jax.serving.batching import Batcher, Full, Late
from mlcn_jax.serving.http_service import IS_GONE, Limits, application
from mlcn_jax.serving.server import main
from mlcn_jax.serving.service import Service


@pytest.fixture(scope="module")
def folder(exported):
    return exported / "export"


@pytest.fixture(scope="module")
def model(folder):
    return artifact.Artifact(folder)


def test_a_training_run_is_served_without_exporting_it(finished, monkeypatch):
    served: list = []
    monkeypatch.setattr(server_lib, "serve", lambda service, listener, message: served.append((service, message)))
    main([str(finished), "--port=0", "--max_batch=1"])
    (service, message) = served[0]
    assert message.startswith(f"serving {finished} at http://127.0.0.1:")
    assert not isinstance(service.model, artifact.Artifact)

    async def check():
        async with service.running(None):
            app = application(service)
            return await ask(app, b"", "/", "GET"), await ask(app, pixel(0))

    (status, _, about), (predicted, _, answer) = asyncio.run(check())
    assert (status, about["step"], "exported" in about) == (200, service.model.step, False)
    assert about["runtime"] == "xla"
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
        assert (await ask(app, pixel(14)))[0] == 503, "memory ran out, and may be free again"
        service._row, usual = np.full_like(service._row, 13), service._row
        assert (await ask(app, b"", "/health", "GET"))[::2] == (503, {"status": "failing"})
        service._row = usual  # it works again, which no request has shown yet
        assert (await ask(app, b"", "/health", "GET"))[::2] == (200, {"status": "ready"})

    in_process(check)


def test_a_picture_for_which_there_is_no_memory_is_refused_for_now(monkeypatch):
    def short(*_):
        raise MemoryError

    async def check(app, slow, service):
        monkeypatch.setattr(service, "_pixels", short)
        status, headers, answer = await ask(app, pixel(0))
        assert (status, headers[b"retry-after"], list(answer)) == (503, b"1", ["error"])

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


def test_items_that_are_due_earlier_are_computed_even_if_they_are_late():
    async def check():
        batcher = Batcher(lambda items: items, 1, 100, deadline_seconds=60)
        batcher._seconds, batcher._loop = {1: 1.0}, asyncio.get_running_loop()
        due = time.monotonic() + 2.5
        batcher.submit([np.zeros(1)], due=due)
        batcher.submit([np.zeros(1)] * 2, due=due)
        with pytest.raises(Late):
            batcher.submit([np.zeros(1)] * 60, due=due + 1000)
        assert batcher.waiting == 3

    asyncio.run(check())


def test_items_whose_request_has_failed_are_not_computed():
    async def check():
        computed = []
        batcher = Batcher(lambda items: computed.append(items.item()) or items, 1, 100)
        loop = batcher._loop = asyncio.get_running_loop()
        futures = batcher.submit([np.full(1, number) for number in range(3)])
        futures[1].cancel()
        batcher.start(loop)
        assert (await futures[0], await futures[2]) == (0, 2)
        batcher.stop()
        assert computed == [0, 2]

    asyncio.run(check())


def test_an_item_that_can_no_longer_be_ready_in_time_is_not_computed():
    async def check():
        computed = []
        batcher = Batcher(lambda items: computed.append(len(items)) or items, 1, 100, deadline_seconds=0.5)
        loop = batcher._loop = asyncio.get_running_loop()
        (future,) = batcher.submit([np.zeros(1)])
        batcher._seconds = {1: 1.0}  # it takes longer than what is left
        batcher.start(loop)
        with pytest.raises(Late):
            await future
        batcher.stop()
        assert not computed

    asyncio.run(check())


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
        assert answer == {"error": "no answer can be ready by the deadline: try again"}
        assert service.batcher.waiting == 1
        await asyncio.sleep(1)  # until the waiting one is late
        slow.go.set()
        first, second = await asyncio.gather(*asked)
        assert (first[0], second[0], slow.sizes) == (200, 503, [1])
        assert (await ask(app, pixel(202)))[0] == 200

    in_process(check, deadline_seconds=1.0)


def test_the_deadline_counts_from_the_arrival_of_a_request_not_from_when_it_was_decoded():
    async def check(app, slow, service):
        slow.go.set()
        assert (await ask(app, pixel(0)))[0] == 200
        decode = service._pixels
        service._pixels = lambda *given: (decode(*given), time.sleep(1.1))[0]
        assert (await ask(app, pixel(0)))[0] == 503
        assert slow.sizes == [1]

    in_process(check, deadline_seconds=1.0)


def test_what_a_client_that_has_left_sent_is_not_decoded():
    async def check(app, slow, service):
        decoded = []
        service._pixels = lambda find, body, check: decoded.append(body)
        for body in (pixel(0), bytes(20_000)):  # by the event loop, and by a thread
            assert await ask(app, body, scope={IS_GONE: lambda: True}) is None
        assert decoded == []

    in_process(check, max_body_bytes=20_000)


@pytest.mark.parametrize("late", [False, True])
def test_pictures_of_a_request_that_nobody_waits_for_any_more_are_not_decoded(monkeypatch, late):
    decoded = []

    def decode(image, shape):
        decoded.append(image)
        time.sleep(0.3 if late else 0)
        return np.zeros(shape, np.uint8)

    async def check(app, slow, service):
        slow.go.set()
        monkeypatch.setattr("mlcn_jax.serving.service.read_pixels", decode)
        body, scope = in_json([pixel(0)] * 3).encode(), {} if late else {IS_GONE: lambda: bool(decoded)}
        answer = await ask(app, body, headers=JSON, scope=scope)
        assert answer[0] == 503 if late else answer is None
        assert len(decoded) == 1

    in_process(check, deadline_seconds=0.2)


def test_a_request_without_a_readable_picture_is_not_too_late():
    """There is nothing to compute, however busy the model is."""

    async def check(app, slow, service):
        asked = [asyncio.create_task(ask(app, pixel(0)))]
        await until(slow.entered.is_set)
        asked.append(asyncio.create_task(ask(app, pixel(1))))
        await until(lambda: service.batcher.waiting == 1)
        service.batcher._seconds = {1: 100.0}
        status, _, answer = await ask(app, b"no picture")
        assert (status, answer["error"]) == (400, "none of the images can be read")
        slow.go.set()
        await asyncio.gather(*asked)

    in_process(check, deadline_seconds=60.0)


def test_classes_are_in_the_order_of_their_scores_and_no_probability_is_above_1():
    slow = Slow()
    slow.scores = lambda images: np.tile(np.float32([1.1, 1.3]), (len(images), 1))
    service = Service(slow, Limits(2, 8, 1000, 4, 9, timeout_seconds=5))

    async def asked():
        async with service.running(None):
            return await ask(application(service), pixel(0), query=b"top=all&probabilities")

    (found,) = asyncio.run(asked())[2]["predictions"]
    both = [{"class": "light", "probability": 1.0}, {"class": "dark", "probability": 1.0}]
    assert found == {**both[0], "probabilities": {"dark": 1.0, "light": 1.0}, "top": both}


def test_a_model_too_slow_for_the_deadline_is_named():
    slow = Slow()
    slow.go.set()
    slow.scores = lambda images: time.sleep(0.02) or np.zeros((len(images), 2))
    limits = Limits(2, 8, 1000, 4, 9, timeout_seconds=5, deadline_seconds=0.01)
    with pytest.raises(InputError, match=r"a single image takes 0\.\d+ seconds.*--deadline_seconds=0\.01"):
        Service(slow, limits).warm_up()


def test_a_refused_picture_of_too_many_pixels_leaves_no_warning_in_the_log():
    async def check(app, slow, service):
        status, _, answer = await ask(app, huge_png(10_000, 10_000))
        assert (status, "more than 50 megapixels" in str(answer)) == (400, True)

    with warnings.catch_warnings(record=True) as shown:
        warnings.resetwarnings()
        in_process(check, max_body_bytes=2**20)
    assert not [str(one.message) for one in shown if one.category is Image.DecompressionBombWarning]


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
