"""Requests as bytes: those of clients, and all kinds that no honest client sends."""

from made_files import FORM, JSON, RAW, form, huge_png, in_json


def request(body, headers, method="POST", path="/predict"):
    lines = [f"{method} {path} HTTP/1.1", "Host: x", "Connection: close", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, *(f"{k}: {v}" for k, v in headers.items()), "", ""]).encode() + body


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
