"""Calls between workers and a coordinator: refusals, restarts and certificates."""

import re
import threading
import time
from pathlib import Path

import grpc
import pytest
from made_certificates import certificate

from mlcn_jax.distributed.processes import free_port
from mlcn_jax.errors import InputError
from mlcn_jax.rounds import link
from mlcn_jax.rounds.link import Client, Tls, serve
from mlcn_jax.rounds.messages import Begin, Change, Fetch, Receipt

PLAIN = Tls()
REQUEST = Fetch("run", 0, "")


def answer(request, is_there=None):
    if request.run != "run":
        raise InputError("of another run")
    return Begin(3, "full", bytes(10_000_000))


def take(change):
    return Receipt(True, str(len(change.content)))


def started(address="127.0.0.1:0", tls=PLAIN, **calls):
    handlers = {"fetch": answer, "join": answer, "push": take} | calls
    return serve(handlers, address, tls, workers=1, largest_bytes=5_000_000)


def client(port, tls=PLAIN):
    return Client(f"127.0.0.1:{port}", tls, lambda: None)


class Failed(grpc.RpcError):
    """A call that failed."""

    def __init__(self, code, details=""):
        self.code, self.details = lambda: code, lambda: details


def test_messages_up_to_a_size_and_refusals(caplog):
    server, port = started()
    mine = client(port)
    begin = mine.call("fetch", REQUEST)
    assert (begin.round, len(begin.content), mine.received) == (3, 10_000_000, 10_000_000)
    with pytest.raises(InputError, match="refuses: of another run"):
        mine.call("fetch", Fetch("other", 4, ""))
    assert caplog.messages == ["worker 4 is refused: of another run"]
    assert mine.call("push", Change("run", 0, 3, "", bytes(5_000_000), {})).reason == "5000000"
    with pytest.raises(InputError, match=r"refuses: .*larger than max"):
        mine.call("push", Change("run", 0, 3, "", bytes(5_100_000), {}))
    server.stop(None)


@pytest.mark.parametrize("letter", ["a", "ä", "\n"], ids=["ascii", "two bytes", "newline"])
def test_a_refusal_that_is_too_long_for_grpc_is_cut(letter):
    def refuse(request, is_there):
        raise InputError("the configurations differ: " + 20_000 * letter)

    server, port = started(fetch=refuse)
    with pytest.raises(
        InputError, match=r"(?s)refuses: the configurations differ: .{900,}\.\.\. see the coordinator's log"
    ):
        client(port).call("fetch", REQUEST)
    server.stop(None)


def test_it_is_known_whether_a_worker_still_waits():
    seen, called, ended = [], threading.Event(), threading.Event()

    def wait(request, is_there):
        seen.append(is_there())
        called.set()
        until = time.monotonic() + 10
        while is_there() and time.monotonic() < until:
            time.sleep(0.01)
        seen.append(is_there())
        ended.set()
        return Begin(3, "finished")

    server, port = started(fetch=wait)
    mine = client(port)
    call = mine._calls["fetch"].future(REQUEST)
    assert called.wait(10)
    assert not call.done()
    mine.close()
    assert ended.wait(20)
    assert seen == [True, False]
    server.stop(None)


def test_a_coordinator_that_comes_back_is_found_again(held_port):
    found = []
    mine = client(held_port)
    asking = threading.Thread(target=lambda: found.append(mine.call("fetch", REQUEST)), daemon=True)
    asking.start()
    time.sleep(1.0)
    assert asking.is_alive(), "it keeps trying"
    server, _ = started(f"127.0.0.1:{held_port}")
    asking.join(20)
    assert found
    server.stop(None)


@pytest.mark.parametrize("code", [grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.ABORTED])
def test_a_call_that_fails_for_another_reason_is_tried_again(code, monkeypatch):
    monkeypatch.setattr(link, "_PAUSE_SECONDS", 0.01)
    answers = iter([Failed(code), Failed(grpc.StatusCode.UNAVAILABLE), Begin(3, "wait")])

    def call(request, timeout):
        found = next(answers)
        if isinstance(found, Failed):
            raise found
        return found

    mine = client(1)
    mine._calls["fetch"] = call
    assert mine.call("fetch", REQUEST).round == 3


@pytest.mark.parametrize("code", link._FINAL)
def test_a_refusal_is_final(code):
    def call(request, timeout):
        raise Failed(code, "no")

    mine = client(1)
    mine._calls["fetch"] = call
    with pytest.raises(InputError, match="refuses: no"):
        mine.call("fetch", REQUEST)


def test_another_version_is_told():
    server, port = started()
    mine = client(port)
    mine._calls["fetch"] = mine._channel.unary_unary(f"/{link.SERVICE}/fetch")  # sends bytes
    with pytest.raises(InputError, match="does not understand this worker: run the same version of mlcn_jax"):
        mine.call("fetch", b"other")
    server.stop(None)


def test_a_proxy_of_the_environment_has_no_part_in_calls_to_this_machine(monkeypatch):
    for name in ("grpc_proxy", "http_proxy", "https_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    monkeypatch.delenv("no_proxy", raising=False)
    server, port = started()
    tries = iter(range(2))
    assert Client(f"127.0.0.1:{port}", PLAIN, lambda: next(tries)).call("fetch", REQUEST).round == 3
    server.stop(None)


@pytest.mark.parametrize(
    ("address", "warned"), [("127.0.0.1:0", 0), ("[::1]:0", 0), ("localhost:0", 0), ("0.0.0.0:0", 1)]
)
def test_an_open_port_without_certificates_is_warned_of(address, warned, caplog):
    server, _ = started(address)
    assert sum("anyone who can reach" in message for message in caplog.messages) == warned
    server.stop(None)


def test_whoever_waits_can_be_stopped():
    tries = iter(range(2))

    def stop():
        if next(tries) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Client(f"127.0.0.1:{free_port()}", PLAIN, stop).call("fetch", REQUEST)


def test_an_address_in_use_is_named():
    server, port = started()
    with pytest.raises(InputError, match=r"--serve=127\.0\.0\.1:\d+ cannot be used"):
        started(f"127.0.0.1:{port}")
    server.stop(None)


def test_only_who_has_a_certificate_is_let_in(tmp_path, caplog):
    ca = certificate(tmp_path, "ca")
    own, mine = (certificate(tmp_path, name, ca) for name in ("own", "mine"))
    stranger = certificate(tmp_path, "stranger")
    server, port = started(tls=Tls(own[0], own[1], ca[0]))
    assert client(port, Tls(mine[0], mine[1], ca[0])).call("fetch", REQUEST).round == 3
    with pytest.raises(InputError, match="no secure connection"):
        client(port, Tls(mine[0], mine[1], stranger[0])).call("fetch", REQUEST)
    for tls in (Tls(ca=ca[0]), Tls(stranger[0], stranger[1], ca[0]), PLAIN):
        tries, before = iter(range(2)), len(caplog.records)

        def give_up(tries=tries):
            if next(tries, None) is None:
                raise KeyboardInterrupt

        with caplog.at_level("INFO", logger="mlcn_jax"), pytest.raises(KeyboardInterrupt):
            Client(f"127.0.0.1:{port}", tls, give_up).call("fetch", REQUEST)
        assert "it may require a certificate" in caplog.records[before].getMessage()
    server.stop(None)


@pytest.mark.parametrize("said", ["Socket closed", "recvmsg:Connection reset by peer"])
def test_a_connection_that_is_closed_may_want_a_certificate(said, caplog):
    def lose(request, timeout):
        raise Failed(grpc.StatusCode.UNAVAILABLE, said)

    tries = iter(range(1))

    def give_up():
        if next(tries, None) is None:
            raise KeyboardInterrupt

    mine = Client("127.0.0.1:1", PLAIN, give_up)
    mine._calls["fetch"] = lose
    with caplog.at_level("INFO", logger="mlcn_jax"), pytest.raises(KeyboardInterrupt):
        mine.call("fetch", REQUEST)
    assert "it may require a certificate" in caplog.text


def test_half_of_what_encryption_needs_is_refused():
    with pytest.raises(InputError, match="--ca at the coordinator needs its own --tls_cert"):
        started(tls=Tls(ca=Path("ca.pem")))
    with pytest.raises(InputError, match="--tls_cert at a worker needs --ca"):
        client(1, Tls(Path("a.pem"), Path("b.pem")))
    for half in ({"cert": Path("a.pem")}, {"key": Path("b.pem"), "ca": Path("ca.pem")}):
        with pytest.raises(InputError, match="--tls_cert and --tls_key are a pair"):
            Tls(**half)


@pytest.mark.parametrize(
    "address", ["somewhere", "127.0.0.1:", "127.0.0.1:70000", ":80", "::1:80", "http://127.0.0.1:80", "[]:80"]
)
def test_an_address_without_a_port_is_named(address):
    for flag, use in (("--serve", started), ("--coordinator", lambda given: Client(given, PLAIN, lambda: None))):
        with pytest.raises(InputError, match=re.escape(f"{flag} is '{address}'; it must be HOST:PORT")):
            use(address)


def test_nothing_can_be_found_at_port_0():
    with pytest.raises(InputError, match=r"--coordinator is '127\.0\.0\.1:0'; .* with a port from 1 to 65535"):
        client(0)


def test_files_that_hold_no_certificates_are_named(tmp_path):
    own, other = certificate(tmp_path, "own"), certificate(tmp_path, "other")
    broken = tmp_path / "broken.pem"
    broken.write_text("not PEM")
    with pytest.raises(InputError, match=r"own.* and .*other.* are not a certificate and its key"):
        started(tls=Tls(own[0], other[1]))
    with pytest.raises(InputError, match=r"broken\.pem and .* are not a certificate and its key"):
        started(tls=Tls(broken, own[1]))
    with pytest.raises(InputError, match=r"--ca=.*broken\.pem holds no certificates"):
        client(1, Tls(ca=broken))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"none\.pem cannot be read"):
        started(tls=Tls(tmp_path / "none.pem", tmp_path / "none.pem"))
