"""Faults of a test bed: false nodes, what happens to nodes and links, requests meanwhile, and why answers are late."""

import datetime
import functools
import http.client
import http.server
import itertools
import json
import signal
import threading
import time
import types
from pathlib import Path

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from made_tiers import policy

from experiments import tiers_faults, tiers_late
from experiments.tiers_bed import NodePlan
from mlcn_jax.errors import InputError
from mlcn_jax.tiers import signatures, wire


def asked(address, body):
    connection = http.client.HTTPConnection(address, timeout=10)
    connection.request("POST", "/part", body)
    response = connection.getresponse()
    found = response.status, response.read()
    connection.close()
    return found


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("not finite", "not finite"),
        ("of another model", "of another model"),
        ("signed by nobody known", "not signed by a trusted node"),
    ],
)
@pytest.mark.parametrize("tier", ["edge", "cloud"])
def test_what_a_false_node_says_is_wrong_in_one_thing_only(kind, said, tier):
    key = Ed25519PrivateKey.generate()
    false = tiers_faults.FalseNode(policy(), tier, key.sign)
    false.kind = kind
    body = wire.pack_request(policy().digest, np.zeros((1, 4, 4, 1), np.uint8))
    status, content = asked(false.address, body)
    false.server.shutdown()
    false.server.server_close()
    assert status == 200

    def is_signed(signed, signature):
        return signatures.is_signed(signed, signature, [key.public_key()])

    with pytest.raises(wire.Refused, match=said):
        wire.unpack_answer(content, policy().digest, tier, wire.digest_of(body), (1, 3), 1.0, is_signed)


@pytest.fixture
def gateway(monkeypatch):
    """A server that is a gateway as far as requests go, and fails at one."""
    seen = []
    monkeypatch.setattr(tiers_late, "_FIRST_REQUESTS", 0)

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # or an answer, sent in two parts, waits 40 ms

        def do_GET(self):
            edge = {"name": "edge", "trouble": "", "requests": len(seen)}
            self.answer(200, [{"name": "end"}, edge] if self.path == "/tiers" else {"own_p95_ms": 1000.0})

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            number = len(seen)
            seen.append(self.path)
            lanes = [0] if 10 <= number < 30 else [0, 1]
            self.answer(500 if number == 5 else 200, {"predictions": [{"ms": 1.0, "lanes": lanes}]})

        def answer(self, status, content):
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", seen
    server.shutdown()
    server.server_close()


QUOTA = types.SimpleNamespace(held_back=lambda: 0.0, waited=lambda: 0.0)


def test_faults_that_take_long_are_waited_for_and_those_that_ended_count(gateway, monkeypatch):
    monkeypatch.setattr(tiers_late, "_MOMENT_SECONDS", 0.001)
    monkeypatch.setattr(tiers_late, "_REQUESTS_OF_TIME", 20)
    url, seen = gateway
    changed = []

    def begin(nodes):
        changed.append(("begins", len(seen)))

    def end(nodes):
        wanted = len(seen) + 90
        while len(seen) < min(wanted, 200):
            threading.Event().wait(0.001)
        changed.append(("ends", len(seen)))

    found = tiers_late.under_fault(url, np.zeros((3, 4, 4, 1), np.uint8), 200, [], (begin, end), QUOTA)
    assert [name for name, _ in changed] == ["begins", "ends"] * (len(changed) // 2), "none is left failing"
    assert found["planned_times"] == 10
    assert 0 <= len(changed) // 2 - found["times"] <= 1, "the last may only be ended so that the next finds all well"
    assert found["times_met"] == found["times"]
    assert 0 < found["times"] < 3
    assert all(after[1] - before[1] >= 5 for before, after in itertools.pairwise(changed) if after[1] < 200)


def test_faults_come_while_requests_are_under_way_and_requests_are_counted_by_when(gateway, monkeypatch):
    monkeypatch.setattr(tiers_late, "_MOMENT_SECONDS", 0.001)
    monkeypatch.setattr(tiers_late, "_REQUESTS_OF_TIME", 20)
    monkeypatch.setattr(tiers_late, "_MOST_TIMES", 4)
    monkeypatch.setattr(tiers_late, "_FIRST_REQUESTS", 3)
    url, seen = gateway
    changed = []

    def change(name):
        def until_two_more_requests_have_come(nodes):
            wanted = len(seen) + 2
            for _ in range(5000):
                if len(seen) >= wanted:
                    break
                threading.Event().wait(0.001)
            changed.append((name, len(seen) >= wanted))

        return until_two_more_requests_have_come

    images = np.zeros((3, 4, 4, 1), np.uint8)
    found = tiers_late.under_fault(url, images, 800, [], (change("begins"), change("ends")), QUOTA)
    assert changed == [("begins", True), ("ends", True)] * 4, "more often in more requests, but not without end"
    assert found["exposed"] >= 2 * 4
    assert seen[0] == "/predict?deadline_ms=1050.0"
    assert (found["requests"], found["times"], found["late"], found["unanswered"]) == (800, 4, 0, 1)
    assert len(seen) == 3 + 800, "the first do not count"
    heard = {phase: sum(counts.values()) for phase, counts in found["heard"].items()}
    assert sum(heard.values()) == 799
    assert heard["before"] >= 9
    assert min(heard.values()) > 0
    assert "500" in found["unanswered_ones"][0]


def test_a_fault_waits_until_the_one_before_is_forgotten(monkeypatch):
    """A tier that is too far for the deadline is not waited for."""
    states = [
        [{"name": "edge", "trouble": trouble, "requests": 4} for trouble in (edge,)]
        + [{"name": "cloud", "trouble": "too far", "requests": 0}]
        for edge in ("", "no answer", "no answer", "")
    ]
    looks = []

    def get(url):
        looks.append(url)
        return types.SimpleNamespace(json=lambda: [{"name": "end"}, *states[min(len(looks), 4) - 1]])

    monkeypatch.setattr(tiers_late, "_LOOK_SECONDS", 0.001)
    asked = tiers_late.Asked(types.SimpleNamespace(get=get), "http://x", {"edge"})
    assert asked.wait()
    assert asked.wait()
    assert len(looks) == 1 + 3
    assert asked.requests() == 4
    states[3][0]["trouble"] = "no answer"
    monkeypatch.setattr(tiers_late, "_WELL_SECONDS", 0.01)
    assert not asked.wait()


def test_requests_that_a_long_one_kept_back_count():
    assert tiers_late.omitted([], 50.0) == (0, 0)
    assert tiers_late.omitted([100.0] * 10 + [60.0], 50.0)[0] == 0, "late, but faster than the median"
    assert tiers_late.omitted([10.0] * 99 + [45.0], 50.0) == (0, 0)
    # After a request of 105 ms, others would have taken 95, 85, ... and 5 ms, of which five are late.
    assert tiers_late.omitted([10.0] * 99 + [105.0], 50.0) == (9, 5)


def test_what_goes_wrong_in_a_fault_ends_the_measurement(gateway, monkeypatch):
    monkeypatch.setattr(tiers_late, "_MOMENT_SECONDS", 0.001)

    def begin(nodes):
        raise InputError("a node did not start")

    with pytest.raises(InputError, match="a node did not start"):
        tiers_late.under_fault(gateway[0], np.zeros((1, 4, 4, 1), np.uint8), 8, [], (begin, lambda nodes: None), QUOTA)


class Link:
    """A node as far as its link goes."""

    def __init__(self, address):
        self.address, self.led = address, []

    def link(self, to):
        self.led.append(to)


def test_links_are_led_to_processes_that_run_already_and_back():
    nodes = [Link("edge:1"), Link("cloud:1")]
    begin, end = tiers_faults.led_to(["edge:2", "cloud:2"])
    begin(nodes)
    nodes[0].address = "edge:3"
    end(nodes)
    assert [node.led for node in nodes] == [["edge:2", "edge:3"], ["cloud:2", "cloud:1"]]
    false = types.SimpleNamespace(address="false:1", kind="")
    tiers_faults.taken_over([false], "not finite")[0](nodes[:1])
    assert (false.kind, nodes[0].led[-1]) == ("not finite", "false:1")


@pytest.fixture
def node():
    """A node that computes one request at a time, and has room for others; it is a server of HTTP only."""
    found = types.SimpleNamespace(plan=NodePlan(Path("edge"), 1.0), room=1, bodies=[], refused=0)

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            found.room -= 1
            full = found.room < 0
            found.refused += full
            if not full:
                found.bodies.append(body)
                threading.Event().wait(0.02)
            found.room += 1
            self.send_response(429 if full else 200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    found.address = f"127.0.0.1:{server.server_address[1]}"
    yield found
    server.shutdown()
    server.server_close()


def test_a_flood_fills_the_queue_until_it_ends_and_tells_if_it_does_not(node):
    flood = tiers_faults.Flood({"edge": b"of the edge", "cloud": b"of the cloud"})
    for room in (1, 100):
        node.room = room
        before = len(node.bodies)
        flood.begin([node])
        while len(node.bodies) == before or (room == 1 and not node.refused):
            threading.Event().wait(0.01)
        flood.end([node])
        assert flood.times_filled == 1, "only the first time"
        computed = len(node.bodies)
        threading.Event().wait(0.05)
        assert len(node.bodies) == computed > 0, "none is left that asks"
        assert set(node.bodies) == {b"of the edge"}


def test_a_link_that_is_ten_times_slower_has_a_tenth_of_its_rate():
    changes = []
    node = types.SimpleNamespace(plan=NodePlan(Path("edge"), 1.0, 10.0, 20.0), link=lambda **how: changes.append(how))
    for change in tiers_faults.FAULTS["link ten times slower, and as before"]:
        change([node])
    assert changes == [
        {"delay_ms": 100.0, "rate_mbit": 2.0},
        {"delay_ms": 10.0, "rate_mbit": 20.0, "mode": "pass"},
    ]


def test_nodes_that_start_again_load_at_the_same_time():
    done = []
    nodes = [
        types.SimpleNamespace(
            start_again=lambda name=name: done.append(f"{name} starts"),
            come_back=lambda name=name: done.append(f"{name} is back"),
        )
        for name in ("edge", "cloud")
    ]
    tiers_faults.FAULTS["SIGKILL, and started again"][1](nodes)
    assert done == ["edge starts", "cloud starts", "edge is back", "cloud is back"]


def test_a_fault_of_the_edge_is_of_the_edge_alone():
    signals = []

    def node(name):
        send = lambda number: signals.append((name, number))  # noqa: E731
        return types.SimpleNamespace(plan=NodePlan(Path(name), 1.0), signal=send)

    for change in tiers_faults.FAULTS[tiers_faults.EDGE_ALONE]:
        change([node("edge"), node("cloud")])
    assert signals == [("edge", signal.SIGSTOP), ("edge", signal.SIGCONT)]


@pytest.mark.parametrize(
    ("one", "why"),
    [
        ({"held_back_ms": 12.0}, "had used up its quota and was kept waiting for 12.0 ms"),
        ({"held_back_ms": 9.0}, None),
        ({"gateway_waited_ms": 12.0}, "the gateway waited for a core for 12.0 ms"),
        ({"held_back_ms": 8.0, "gateway_waited_ms": 9.0}, None),
        ({"held_back_ms": 8.0, "gateway_waited_ms": 11.0}, "for 8.0 ms, and the gateway waited for a core for 3.0 ms"),
        ({"by_gateway_ms": 40.0, "waited_ms": 15.0}, "the client waited for a core for 15.0 ms"),
        ({"waited_ms": 15.0}, None),
        ({"by_gateway_ms": 54.0, "held_back_ms": 5.0, "waited_ms": 15.0}, "5.0 ms, and the client waited for a core"),
    ],
)
def test_late_answers_are_explained_by_as_much_as_was_measured(one, why):
    usual = {"by_gateway_ms": 59.0, "held_back_ms": 0.0, "gateway_waited_ms": 0.0, "waited_ms": 0.0}
    told = tiers_late.why_late({"ms": 60.0, **usual, **one}, 50.0)
    assert why in told if why else told == ""


def test_it_is_known_when_processes_were_kept_waiting():
    quota = types.SimpleNamespace(held=0.0, held_back=lambda: quota.held, waited=lambda: 0.0)
    waits, start, near = tiers_late.Waits(quota), time.perf_counter() - 1, functools.partial(pytest.approx, abs=1e-6)
    seen = [(0, 0, 0), (29, 0, 0), (30, 10, 0), (31, 10, 0), (69, 10, 0), (70, 40, 20)]
    seen += [(75, 70, 20), (100, 70, 20)]  # of another core, of which most was at the same time
    waits._seen = [(start + at / 1e3, held / 1e3, waited / 1e3) for at, held, waited in seen]

    def between(first, last):
        return waits.between(start + first / 1e3, start + last / 1e3)

    assert between(10, 31) == near((0.010, 0.0))
    assert between(26, 31) == near((0.004, 0.0)), "the rest was before"
    assert between(10, 26) == near((0.006, 0.0))
    assert between(32, 76) == near((0.035, 0.020))
    assert between(85, 95) == (0.0, 0.0)
    with tiers_late.Waits(quota) as waits:
        quota.held = 0.010
        until = time.monotonic() + 30
        while waits._seen[-1][1] < quota.held:
            assert time.monotonic() < until, "a thread looks"
            time.sleep(0.001)
        assert waits.between(start, time.perf_counter()) == near((0.010, 0.0))


def test_waiting_for_a_core_is_told_by_the_kernel_or_nothing(monkeypatch):
    before = tiers_late.waited_for_core()
    assert 0 <= before <= tiers_late.waited_for_core()

    def unknown(path):
        raise OSError

    monkeypatch.setattr(tiers_late.Path, "read_text", unknown)
    assert tiers_late.waited_for_core() == 0


def test_certificates_are_signed_by_one_whom_gateways_know_and_one_has_expired(tmp_path):
    made = tiers_faults.make_certificates(tmp_path)
    by = x509.load_pem_x509_certificate(made.ca.read_bytes())
    now = datetime.datetime.now(datetime.UTC)
    for options, valid in ((made.valid, True), (made.expired, False)):
        own = x509.load_pem_x509_certificate(Path(options[0].removeprefix("--tls_cert=")).read_bytes())
        own.verify_directly_issued_by(by)
        assert (own.not_valid_after_utc > now) == valid
