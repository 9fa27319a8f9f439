"""Tiers as real processes on real sockets: commands, TLS, nodes that are killed, stopped and started again, floods."""

import contextlib
import http.client
import json
import random
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import REPOSITORY
from cryptography.hazmat.primitives import serialization
from made_certificates import certificate
from made_tiers import png

from experiments.tiers_bed import url_of
from mlcn_jax import host
from mlcn_jax.commands.tiers import _client_tls, _listen, _parser, main
from mlcn_jax.errors import InputError

SMALL = ("--max_batch=1", "--max_images=1")


class Started:
    """A node or a gateway in a process of its own."""

    def __init__(self, *arguments):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mlcn_jax", "tiers", *map(str, arguments), *SMALL],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.url = url_of(self.process)
        self.scheme, _, address = self.url.partition("://")
        self.port = int(address.rpartition(":")[2])

    def begin(self, path, body=None, method="POST"):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request(method, path, body, {"Content-Type": "application/octet-stream"})
        return connection, connection.getresponse()

    def ask(self, path, body=None, method="POST"):
        connection, response = self.begin(path, body, method)
        content = response.read().decode()
        connection.close()
        return response.status, [json.loads(line) for line in content.splitlines()]

    def resident_kib(self):
        return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{self.process.pid}/status").read_text())[1])

    def end(self):
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()


@pytest.fixture
def start():
    running = []

    def begin(*arguments):
        running.append(Started(*arguments))
        return running[-1]

    yield begin
    for one in running:
        one.end()


@pytest.fixture
def picture():
    return png(np.random.default_rng(1).integers(0, 256, (28, 28, 1)).astype(np.uint8))


@pytest.fixture
def thorough(tiers_folder, tmp_path):
    """The tiers with thresholds that no answer reaches, so that each tier is asked; with manifests to match."""
    import shutil

    from mlcn_jax.files import read_json, write_json
    from mlcn_jax.serving import artifact

    folder = shutil.copytree(tiers_folder, tmp_path / "tiers")
    for tier in folder.iterdir():
        policy = read_json(tier / "policy.json")
        for threshold in policy["thresholds"].values():
            threshold["margin"] = None
        write_json(tier / "policy.json", policy)
        manifest = read_json(tier / "manifest.json")
        content = (tier / "policy.json").read_bytes()
        digest = host.sha256_of(tier / "policy.json")
        manifest["files"]["policy.json"] = {"bytes": len(content), "sha256": digest}
        write_json(tier / "manifest.json", artifact.signed(manifest))
    return folder


def lanes(gateway, picture, query=""):
    status, lines = gateway.ask(f"/refine{query}", picture)
    assert status == 200
    assert lines[-1]["final"] or query
    return lines[-1]["lanes"]


@pytest.mark.long
def test_answers_go_on_while_nodes_are_killed_stopped_and_come_back(thorough, start, picture, held_port):
    edge, cloud = start("node", thorough / "edge", f"--port={held_port}"), start("node", thorough / "cloud", "--port=0")
    nodes = f"--nodes=edge={edge.url},cloud={cloud.url}"
    gateway = start("gateway", thorough / "end", "--port=0", nodes)

    def until(wanted):
        """Waits for such an answer: one of the others may be late on a busy machine."""
        end = time.monotonic() + 60
        while lanes(gateway, picture) != wanted:
            assert time.monotonic() < end
            time.sleep(0.2)

    # Before the first answer: nothing is known yet of the time that it takes, so it is awaited for seconds.
    cloud.process.send_signal(signal.SIGSTOP)
    connection, response = gateway.begin("/refine", picture)
    assert json.loads(response.readline())["lanes"] == [1], "each answer arrives at once"
    cloud.process.send_signal(signal.SIGCONT)
    assert json.loads(response.read().splitlines()[-1])["lanes"] == [0, 1, 2]
    connection.close()
    edge.process.kill()
    until([1, 2])
    cloud.process.send_signal(signal.SIGSTOP)
    for _ in range(20):
        started = time.monotonic()
        assert lanes(gateway, picture, "?deadline_ms=300") == [1]
        assert time.monotonic() - started < 20
    cloud.process.send_signal(signal.SIGCONT)
    start("node", thorough / "edge", f"--port={held_port}")
    until([0, 1, 2])


def test_an_option_of_several_values_may_be_given_several_times():
    given = ["gateway", "end", "--nodes=edge=http://a,edge=http://b", "--nodes=cloud=http://c", "--trust="]
    arguments = _parser().parse_args(given)
    assert arguments.nodes == "edge=http://a,edge=http://b,cloud=http://c"
    assert (arguments.trust, arguments.node_keys) == ("", None)


@pytest.mark.long
def test_ten_thousand_malformed_requests_change_nothing(thorough, start, picture):
    node = start("node", thorough / "edge", "--port=0")
    gateway = start("gateway", thorough / "end", "--port=0", f"--nodes=edge={node.url}")
    rng = random.Random(0)
    assert lanes(gateway, picture) == [0, 1]
    before = gateway.resident_kib(), node.resident_kib()
    for server, paths in ((gateway, ("/refine", "/predict", "/tiers/edge")), (node, ("/part",))):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        for _ in range(5000):
            body = rng.randbytes(rng.randrange(400)) if rng.random() < 0.5 else picture[: rng.randrange(40)]
            connection.request("POST", rng.choice(paths), body, {"Content-Type": "application/octet-stream"})
            response = connection.getresponse()
            assert 400 <= response.status < 500
            assert "error" in json.loads(response.read())
        connection.close()
    assert lanes(gateway, picture) == [0, 1]
    for kib, server in zip(before, (gateway, node), strict=True):
        assert server.resident_kib() < kib + 50 * 1024


@pytest.mark.long
def test_nodes_and_gateways_show_each_other_certificates(thorough, start, picture, tmp_path):
    ca = certificate(tmp_path, "ca")
    node_own, mine = certificate(tmp_path, "node", ca), certificate(tmp_path, "mine", ca)
    late, stranger = certificate(tmp_path, "late", ca, days=-1), certificate(tmp_path, "stranger")
    secure = (f"--tls_cert={node_own[0]}", f"--tls_key={node_own[1]}", f"--tls_clients={ca[0]}")
    edge = start("node", thorough / "edge", "--port=0", "--timeout_seconds=3", *secure)
    expired = start("node", thorough / "cloud", "--port=0", f"--tls_cert={late[0]}", f"--tls_key={late[1]}")
    assert edge.scheme == "https"
    with socket.create_connection(("127.0.0.1", edge.port), timeout=20) as silent:
        assert silent.recv(1) == b"", "it is not waited for longer than for a request"
    nodes = f"--nodes=edge={edge.url},cloud={expired.url}"
    known = (f"--ca={ca[0]}", f"--cert={mine[0]}", f"--cert_key={mine[1]}")
    gateway = start("gateway", thorough / "end", "--port=0", nodes, *known)
    status, lines = gateway.ask("/refine", picture)
    assert status == 200
    assert lines[-1]["lanes"] == [0, 1]
    assert "expired" in lines[-1]["lost"]["cloud"]
    unknown = (f"--ca={ca[0]}", f"--cert={stranger[0]}", f"--cert_key={stranger[1]}")
    other = start("gateway", thorough / "end", "--port=0", nodes, *unknown)
    assert lanes(other, picture) == [1]
    context = ssl.create_default_context(cafile=str(ca[0]))
    connection = http.client.HTTPSConnection("127.0.0.1", edge.port, context=context, timeout=10)

    def ask():
        connection.request("GET", "/health")
        return connection.getresponse()

    with pytest.raises(OSError, match=r"(?i)certificate|reset|closed|eof"):  # nobody without one is let in
        ask()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gateway", "{}/edge"], "is the tier edge, but a gateway needs the first tier, end"),
        (["gateway", "{}/end", "--nodes=other=http://x"], "--nodes has 'other=http://x'; give NAME=URL"),
        (["gateway", "{}/end", "--nodes=edge=ftp://x"], "--nodes has 'edge=ftp://x'"),
        (["gateway", "{}/end", "--nodes=edge=http://me:secret@x"], "a URL without user, password or query"),
        (
            ["gateway", "{}/end", "--nodes=edge=http://edge:8001/?token=x"],
            "--nodes has 'edge=http://edge:8001/?token=x'",
        ),
        (["gateway", "{}/end", "--nodes=edge=http://edge:0"], "--nodes has 'edge=http://edge:0'"),
        (["gateway", "{}/end", "--nodes=edge=http://edge:80O1"], "80O1'; give NAME=URL,... with a name of edge, cloud"),
        (["gateway", "{}/end", "--nodes=edge=http://edge:80010"], "80010'; give NAME=URL"),
        (["gateway", "{}/end", "--nodes=edge=http://"], "'edge=http://'; give NAME=URL"),
        (["gateway", "{}/end", "--deadline_ms=0.01"], "a deadline of 0.01 ms is too short"),
        (["gateway", "{}/end", "--noise=-1"], "must both be 0 or more"),
        (["gateway", "{}/end", "--noise=nan"], "--noise=nan and --deadline_ms=0 must both be 0 or more and finite"),
        (["gateway", "{}/end", "--deadline_ms=nan"], "--deadline_ms=nan must both be 0 or more and finite"),
        (["gateway", "{}/end", "--deadline_ms=inf"], "--deadline_ms=inf must both be 0 or more and finite"),
        (["gateway", "{}/end", "--ca=/none.pem"], "--ca, --cert or --cert_key cannot be used"),
        (["node", "{}/edge", "--trust=,"], "--trust=, has an empty file name"),
        (["node", "{}/edge", "--trust="], "--trust= has an empty file name"),
        (["node", "{}/edge", "--key="], "--key= has an empty file name"),
        (["node", "{}/edge", "--tls_cert=a", "--tls_clients="], "--tls_clients= has an empty file name"),
        (["node", "{}/edge", "--tls_cert="], "--tls_cert= has an empty file name"),
        (["gateway", "{}/end", "--ca="], "--ca= has an empty file name"),
        (["gateway", "{}/end", "--ca={}/end/model.json", "--nodes=edge=http://x"], "--ca, --cert or --cert_key cannot"),
        (["gateway", "{}/end", "--node_keys=a,,b"], "--node_keys=a,,b has an empty file name"),
        (["split", "/none", "--tiers=/none.json", "--key="], "--key= has an empty file name"),
        (["node", "{}"], "holds the folders of several tiers: give that of one, "),
        (["node", "{}/edge", "--tls_cert=/none.pem"], "--tls_cert, --tls_key or --tls_clients cannot be used"),
        (["node", "{}/edge", "--tls_clients=/none.pem"], "--tls_key and --tls_clients need --tls_cert"),
        (["gateway", "{}/end", "--cert_key=/none.pem"], "give --cert as well"),
        (["node", "{}/edge", "--key=/none.pem"], "/none.pem is missing: openssl genpkey"),
        (["node", "{}/edge", "--key=/"], "/ cannot be read (Is a directory): make it readable"),
        (["split", "/none", "--tiers=/none.json", "--out=.."], "--out=.. must be the name of a folder"),
        (["split", "/none", "--tiers=/none.json"], "/none"),
    ],
)
def test_arguments_that_make_no_sense_are_named(tiers_folder, arguments, said):
    given = [argument.format(tiers_folder) for argument in arguments]
    with pytest.raises(InputError, match=re.escape(said)):
        main([*given, *(("--port=0", *SMALL) if given[0] != "split" else ())])


def test_files_for_tls_are_found_in_the_home_folder_and_their_keys_have_no_password(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    pair = certificate(tmp_path, "a")
    options = {"node": ("tls_cert", "tls_key", "tls_clients"), "gateway": ("cert", "cert_key", "ca")}

    def load(command, cert, key):
        files = (f"--{option}={file}" for option, file in zip(options[command], (cert, key, "~/a.crt"), strict=True))
        arguments = _parser().parse_args([command, "end", "--port=0", *files])
        return _listen(arguments, ()) if command == "node" else _client_tls(arguments)

    _, listener, tls = load("node", "~/a.crt", "~/a.key")
    listener.close()
    assert [Path(tls[name]) for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")] == [*pair[:2], pair[0]]
    load("gateway", "~/a.crt", "~/a.key")
    how = serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
    (tmp_path / "encrypted.key").write_bytes(pair[3].private_bytes(serialization.Encoding.PEM, *how))
    for command in options:
        with pytest.raises(InputError, match=r"encrypted.key is encrypted, .* give an unencrypted one, as `openssl"):
            load(command, "~/a.crt", "~/encrypted.key")
        with pytest.raises(InputError, match=rf"cannot be used: .*{tmp_path}/none.key"):
            load(command, "~/a.crt", "~/none.key")


def test_a_split_needs_nothing_that_only_servers_need(monkeypatch):
    monkeypatch.setattr("mlcn_jax.serving.server.check_packages", lambda *given: pytest.fail("it serves nothing"))
    with pytest.raises(InputError, match="/none"):
        main(["split", "/none", "--tiers=/none.json", "--key=/none.pem"])


def test_each_command_has_help(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    told = capsys.readouterr().out
    assert all(flag in told for flag in ("--cut", "--tls_cert", "--deadline_ms", "--node_keys"))
