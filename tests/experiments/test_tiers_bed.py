"""The test bed of tiers: its relay, dispatcher and attacks."""

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import httpx
import numpy as np
import pytest
from absl import flags
from conftest import in_no_time

from experiments import quota, tiers_bed, tiers_dispatch, tiers_leak, tiers_relay
from experiments.tiers_relay import Link, Relay
from mlcn_jax.data.batches import Split
from mlcn_jax.errors import InputError
from mlcn_jax.files import read_json
from mlcn_jax.nn.model import init_params
from mlcn_jax.nn.resnet import whiten, whitening
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.serving.export import flat_weights
from mlcn_jax.tiers.cuts import Part


@pytest.fixture
def echo():
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=tiers_relay._echo, args=(listener,), daemon=True).start()
    yield listener.getsockname()
    listener.close()


def connect(relay):
    return socket.create_connection(("127.0.0.1", relay.port), timeout=5)


def test_links_delay_and_limit_what_goes_over_them():
    delay, rate = tiers_relay.check((20.0,), (4.0,))
    assert 20 <= delay["measured_ms"] < 400, "a busy machine adds to it"
    assert 0.2 < rate["measured_mbit"] < 4.4, "a busy machine takes from it"


def test_connections_share_the_rate_of_a_link(echo):
    relay, size = Relay(echo, Link(rate_mbit=8.0)), 100_000
    with connect(relay) as one, connect(relay) as other:
        started = time.perf_counter()
        waiting = [threading.Thread(target=tiers_relay._exchange, args=(each, size)) for each in (one, other)]
        for thread in waiting:
            thread.start()
        for thread in waiting:
            thread.join()
    assert time.perf_counter() - started > 0.18, "200 kB at 1 MB a second"
    relay.close()


def test_a_relay_is_checked_again_on_a_busy_machine_and_nothing_is_reported_if_it_is_wrong(monkeypatch):
    right, wrong = {"delay_ms": 5.0, "measured_ms": 5.9}, {"delay_ms": 5.0, "measured_ms": 6.1}
    found = iter([[right, wrong], [right]])
    monkeypatch.setattr(tiers_relay, "check", lambda: next(found))
    assert tiers_relay.checked() == [right]
    monkeypatch.setattr(tiers_relay, "check", lambda: [right, wrong])
    with pytest.raises(InputError, match=r"in each of 5 checks: .*6\.1.*: leave it a core"):
        tiers_relay.checked()


def test_links_stall_break_and_come_back(echo):
    relay = Relay(echo, Link())
    with connect(relay) as connection:
        connection.sendall(b"a")
        assert connection.recv(1) == b"a"
        relay.change(mode="stall")
        connection.sendall(b"b")
        connection.settimeout(0.1)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        relay.change(mode="pass")
        connection.settimeout(5)
        assert connection.recv(1) == b"b"
        assert (relay.sent, relay.received) == (2, 2)
        relay.change(mode="drop")
        with contextlib.suppress(OSError):
            assert connection.recv(1) == b""
    with connect(relay) as connection, contextlib.suppress(OSError):
        assert connection.recv(1) == b""
    relay.change(mode="pass")
    with connect(relay) as connection:
        connection.sendall(b"c")
        assert connection.recv(1) == b"c"
    for wrong in ({"mode": "other"}, {"speed": 1}):
        with pytest.raises(InputError, match="a link has delay_ms"):
            relay.change(**wrong)
    relay.close()


def test_a_link_that_stalls_or_whose_end_takes_nothing_holds_no_more_than_so_much(echo, monkeypatch):
    monkeypatch.setattr(tiers_relay, "_MOST_WAITING", 4)
    relay, size = Relay(echo, Link()), 2**18
    with connect(relay) as connection:
        relay.change(mode="stall")
        sender = threading.Thread(target=connection.sendall, args=(bytes(size),))
        sender.start()
        until = time.monotonic() + 30
        while not relay.sent:
            assert time.monotonic() < until
            time.sleep(0.01)
        time.sleep(0.3)
        assert relay.sent <= 5 * tiers_relay._CHUNK
        relay.change(mode="pass")
        left = size
        while left:
            left -= len(connection.recv(65536))
        sender.join()
    assert relay.sent == relay.received == size
    relay.close()


def test_no_byte_is_lost_where_many_connections_are_counted():
    relay = Relay(("127.0.0.1", 9), Link())
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    counting = [
        threading.Thread(target=lambda: [relay._takes("sent", 1, 0.0) for _ in range(20_000)]) for _ in range(4)
    ]
    for thread in counting:
        thread.start()
    for thread in counting:
        thread.join()
    sys.setswitchinterval(before)
    assert relay.sent == 80_000
    relay.close()


class Ends:
    """Devices that take a while for each task, and may stop."""

    def __init__(self, seconds):
        self.stopped, self.seconds, self.work, self.errors = set(), seconds, [], []

    async def _post(self, run, client, device, number):
        if device in self.stopped:
            await asyncio.sleep(3600)
        if self.errors and self.errors[0][0] == device[:2]:
            raise self.errors.pop(0)[1]
        await asyncio.sleep(self.seconds[device])
        self.work.append((device, number, time.perf_counter()))
        run_parts = run.parts[number]
        if device[:2] not in run_parts:
            run_parts[device[:2]] = np.ones(1)
            if len(run_parts) == run.stages:
                run.left -= 1
                if not run.left:
                    run.done.set()


@pytest.fixture
def devices(monkeypatch):
    made = Ends({**{f"en{i}": 0.02 for i in range(4)}, "ed0": 0.01, "ed1": 0.01, "cl0": 0.01})

    async def post(run, client, device, number):
        await made._post(run, client, device, number)

    monkeypatch.setattr(tiers_dispatch._Run, "_post", post)
    monkeypatch.setattr(tiers_dispatch._Run, "_connect", lambda run, client, device: asyncio.sleep(0))
    monkeypatch.setattr(tiers_dispatch._Run, "_answers_again", lambda run, client, i: asyncio.sleep(3600))
    return made


def run(schedule, failures=None, tasks=16, share=0.5):
    ends, edges = [f"en{i}" for i in range(4)], ["ed0", "ed1"]
    images = [np.zeros(1)] * tasks
    return in_no_time(tiers_dispatch.dispatch(schedule, ends, edges, ["cl0"], images, share, failures))


@pytest.mark.parametrize(
    ("schedule", "tiers"),
    [("End", {"en"}), ("End-Edge", {"en", "ed"}), ("End-Cloud", {"en", "cl"}), ("Mapping", {"en", "ed", "cl"})],
)
def test_every_schedule_does_each_task_once_on_each_of_its_tiers(devices, schedule, tiers):
    outcome = run(schedule)
    assert {device[:2] for device, _, _ in devices.work} == tiers
    stages = 1 if schedule == "End" else 2
    assert len(devices.work) == 16 * stages
    assert all(total.sum() == stages for total in outcome.sums)
    assert outcome.seconds < 0.2, "tiers and devices work side by side"


def status(number):
    request = httpx.Request("POST", "http://node/part")
    return httpx.HTTPStatusError(f"status {number}", request=request, response=httpx.Response(number))


def test_errors_of_connections_and_servers_are_failed_attempts(devices, monkeypatch):
    monkeypatch.setattr(tiers_dispatch, "_LOOK_SECONDS", 0.01)
    devices.errors = [("en", httpx.ReadError("reset")), ("en", status(503)), ("ed", status(500))]
    outcome = run("End-Edge")
    assert outcome.timeouts == 3
    assert all(total.sum() == 2 for total in outcome.sums), "each task was done"
    for mode in tiers_dispatch.MODES:
        devices.errors = [("en", httpx.ConnectError("refused"))]
        monkeypatch.setattr(tiers_dispatch._Run, "_answers_again", lambda run, client, i: asyncio.sleep(0))
        assert run("End", tiers_dispatch.Failures(mode, 0, 2, 5.0, lambda i: None)).timeouts == 1


def test_a_wrong_task_and_errors_without_end_end_a_run(devices, monkeypatch):
    monkeypatch.setattr(tiers_dispatch, "_LOOK_SECONDS", 0.0)
    devices.errors = [("en", status(400))]
    with pytest.raises(httpx.HTTPStatusError, match="status 400"):
        run("End")
    devices.errors = [("en", httpx.ConnectError("refused"))] * 200
    with pytest.raises(httpx.ConnectError, match="refused"):
        run("End")


def failing(devices, mode, dead):
    return tiers_dispatch.Failures(mode, dead, 2, 0.1, lambda i: devices.stopped.add(f"en{i}"))


def test_dead_ends_stop_everything_are_asked_again_and_again_or_left_alone(devices):
    assert run("End", failing(devices, "none", 1)).seconds == float("inf")
    devices.stopped.clear()
    again = run("End", failing(devices, "reassign", 2), tasks=40)
    devices.stopped.clear()
    left_alone = run("End", failing(devices, "monitor", 2), tasks=40)
    assert left_alone.timeouts == 2
    assert again.timeouts > 2
    assert again.seconds < float("inf")
    assert sorted({number for _, number, _ in devices.work}) == list(range(40))


def test_whoever_has_the_weights_restores_the_image_from_the_first_feature_map():
    spec = ModelSpec("mlcn", (20, 20, 1), 10, lanes="mlcn2:w2,mlcn1:w1*2", margin_loss="per_lane")
    import jax

    weights = flat_weights(init_params(spec, jax.random.key(0))["encoder"])
    part = Part(spec, (1.0,) * 3, "conv1")
    images = np.random.default_rng(0).integers(0, 256, (3, 20, 20, 1)).astype(np.uint8)
    attacker = tiers_leak.Attacker(part, part.split_weights(weights)[0], images, 2, 1)
    values = attacker.values(images)
    linear, constant = attacker._linear
    exact = linear @ (images[0].ravel() / 255) + constant
    np.testing.assert_allclose(np.maximum(exact, 0), values[0], atol=1e-3, err_msg="all lanes, in their order")
    restored = attacker.restore("least squares", values[:1], 0.0, lambda v: v)
    assert tiers_leak.scores(restored, images[:1])["psnr_db"] > 60
    coarse = attacker.restore("least squares", tiers_leak.as_sent(values[:1], 4, 0.0), 0.0, lambda v: v)
    assert 10 < tiers_leak.scores(coarse, images[:1])["psnr_db"] < 60
    noised = tiers_leak.as_sent(values[:1], 32, 0.5)
    known, blind = (attacker.restore("least squares", noised, noise, lambda v: v) for noise in (0.5, 0.0))
    told = [tiers_leak.scores(restored, images[:1])["psnr_db"] for restored in (known, blind)]
    assert told[0] > told[1], "who knows how much noise there is leaves out what it let pass"
    assert tiers_leak.share_found(values[:2], attacker.parts(images)) == 1
    assert tiers_leak.share_found(values[:2], [values[:1], values[1:]]) == 1
    assert tiers_leak.share_found(values[[1, 0]], [values]) == 0


def test_gelu_after_the_first_convolution_of_a_residual_lane_hides_nothing_either(rng):
    spec = ModelSpec("mlcn", (10, 10, 3), 10, lanes="resnet:w1d2*2", margin_loss="per_lane")
    images = rng.integers(0, 256, (3, 10, 10, 3)).astype(np.uint8)
    import jax

    encoder = init_params(spec, jax.random.key(0))["encoder"]
    (name,) = encoder
    encoder = {name: whiten(encoder[name], *whitening(images.astype(np.float32) / 255))}
    part = Part(spec, (1.0, 1.0), "stem")
    attacker = tiers_leak.Attacker(part, part.split_weights(flat_weights(encoder))[0], images, 2, 1)
    values = attacker.values(images)
    assert values.min() < 0
    restored = attacker.restore("least squares", values, 0.0, lambda v: v)
    assert tiers_leak.scores(restored, images)["psnr_db"] > 60
    noised = attacker.restore("least squares", tiers_leak.as_sent(values, 32, 0.1), 0.1, lambda v: v)
    assert 15 < tiers_leak.scores(noised, images)["psnr_db"] < 60
    np.testing.assert_allclose(
        tiers_leak.gelu_undone(np.asarray(jax.nn.gelu(np.linspace(0, 9, 50)))), np.linspace(0, 9, 50), atol=1e-5
    )


def test_references_are_what_the_class_alone_tells():
    def flat(*values):
        return np.array(values, np.uint8)[:, None, None, None] * np.ones((1, 2, 2, 1), np.uint8)

    train = Split(flat(0, 100, 200, 51), np.array([0, 0, 0, 1]))
    known = tiers_leak.references(train, Split(flat(190, 90, 255), np.array([0, 0, 1])))
    mean, nearest = (255 * known[name][:, 0, 0, 0] for name in tiers_leak.REFERENCES)
    np.testing.assert_allclose(mean, [100, 100, 51], rtol=1e-6)
    np.testing.assert_allclose(nearest, [200, 100, 51], rtol=1e-6, err_msg="of the own class")
    assert tiers_leak.share_found(known[tiers_leak.REFERENCES[1]], [flat(190, 90) / 255, flat(255) / 255]) == 2 / 3


def test_accuracy_is_that_of_what_was_sent(monkeypatch):
    def after(weights, rows):
        return rows @ weights["sums"]

    attacker = types.SimpleNamespace(
        part=types.SimpleNamespace(after=after), parts=lambda images: iter([images[:2], images[2:]])
    )
    rows = np.array([[0.1, 0.2, 0.0], [0.4, 0.3, 5.0], [0.0, 1.0, 0.0]], np.float32)
    split, weights = Split(rows, np.array([1, 0, 1])), {"sums": np.eye(3)[:, :2].astype(np.float32)}
    assert tiers_leak.accuracy(attacker, weights, split, 32, 0.0) == 1
    assert tiers_leak.accuracy(attacker, weights, split, 2, 0.0) == 1
    rows[1] = [2.6, 2.7, 5.0]
    split.labels[1] = 1
    assert tiers_leak.accuracy(attacker, weights, split, 32, 0.0) == 1
    assert tiers_leak.accuracy(attacker, weights, split, 2, 0.0) == pytest.approx(2 / 3), "both are sent as one value"


def leak_values(workdir, results):
    values = flags.FlagValues()
    tiers_leak.define(values)
    values(["tiers_leak", f"--workdir={workdir}", f"--results={results}", "--scale=smoke"])
    return values


@pytest.mark.long
def test_attacks_run_from_end_to_end_and_go_on_where_they_stopped(per_lane, tmp_path, monkeypatch):
    values = leak_values(per_lane, tmp_path)
    path = tmp_path / "tiers_leak_smoke.json"
    share_found, calls = tiers_leak.share_found, []

    def stops(*given):
        calls.append(given)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return share_found(*given)

    monkeypatch.setattr(tiers_leak, "share_found", stops)
    with pytest.raises(KeyboardInterrupt):
        tiers_leak.main(values)
    assert "| conv1 | 32 bits | inverter |" in path.with_suffix(".md").read_text(), "what was there when it stopped"
    assert path.with_suffix(".png").stat().st_size > 1000
    (before,) = read_json(path)["starts"]
    monkeypatch.setattr(tiers_leak, "share_found", share_found)
    time.sleep(1)
    tiers_leak.main(values)
    found = read_json(path)
    assert (found["about"]["lanes"], found["about"]["numbers"]) == ("mlcn2:w1d1*1", [2])
    attacks = sum(len(tiers_leak.keys_of(cut)) for cut in ("conv1", "capsules", "columns"))
    assert len(found["rows"]) == attacks + len(tiers_leak.REFERENCES)
    row = found["rows"]["conv1, 32 bits, found"]
    assert (row["found"], row["images"]) == (1.0, 200)
    assert len(found["starts"]) == 2
    assert found["rows"]["conv1, 32 bits, inverter"]["start"] == before, "a later start does not change it"
    exact = found["accuracy"]["conv1, 32 bits"]
    assert exact == found["accuracy"]["columns, 32 bits"], "no cut loses anything"
    assert len(found["accuracy"]) == 3 * len(tiers_leak.SETTINGS)
    text = path.with_suffix(".md").read_text()
    assert "The lanes of one tier, `mlcn2:w1d1*1`" in text
    assert "lower bounds on the leak" in text
    assert f"| conv1 | 32 bits | found |  |  |  | 100.0% | {exact:.2%} |" in text
    assert "| none | nothing | nearest training image of the class |" in text
    monkeypatch.setattr(tiers_leak, "Attacker", lambda *given: pytest.fail("it is computed again"))
    monkeypatch.setattr(tiers_leak, "references", lambda *given: pytest.fail("they are looked for again"))
    tiers_leak.main(values)
    assert read_json(path)["rows"] == found["rows"]
    monkeypatch.setattr(tiers_leak.host, "environment", lambda: {"device": "other", "cpu_count": 1, "versions": {}})
    with pytest.raises(SystemExit, match="move it away"):
        tiers_leak.main(values)


def test_each_cut_and_setting_is_attacked_once():
    keys = tiers_leak.keys_of("conv1")
    assert len(keys) == len(set(keys)) == 4 * len(tiers_leak.SETTINGS)
    assert len(tiers_leak.keys_of("columns")) == 3 * len(tiers_leak.SETTINGS)
    assert ("8 bits", "least squares") in tiers_leak.keys_of("stem")


def test_scores_of_pictures():
    image = np.random.default_rng(0).uniform(size=(20, 20, 1))
    assert tiers_leak.ssim(image, image) == pytest.approx(1)
    assert tiers_leak.ssim(image, 1 - image) < 0
    assert tiers_leak.psnr(image, np.clip(image + 0.1, 0, 2)) == pytest.approx(20, abs=0.1)


@pytest.mark.parametrize(("cores", "written"), [(0.3, "3000 10000"), (0.0625, "2000 32000"), (1.2, "12000 10000")])
def test_no_quota_is_less_than_the_kernel_takes(tmp_path, cores, written):
    group = quota.Quota(tmp_path / "group", cores)  # where there are no cgroups, these are files
    assert (tmp_path / "group" / "cpu.max").read_text() == written
    (tmp_path / "group" / "cpu.stat").write_text("nr_periods 5\nthrottled_time 2500000000\n")
    assert group.held_back() == pytest.approx(2.5)
    (tmp_path / "group" / "cpu.stat").write_text("usage_usec 5\nthrottled_usec 1500000\n")
    assert group.held_back() == pytest.approx(1.5)


def test_a_process_beside_a_bed_has_a_quota_of_its_own_and_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(quota.Quota, "root", staticmethod(lambda: tmp_path))
    monkeypatch.setattr(quota.time, "sleep", lambda seconds: None)  # the group is a folder with files: it stays
    monkeypatch.setattr(tiers_bed, "_end_when_asked", lambda: None)
    ended = []
    monkeypatch.setattr(tiers_bed.os, "kill", lambda pid, number: ended.append((pid, number)))
    monkeypatch.setattr(tiers_bed.os, "waitpid", lambda pid, options: ended.append(pid))
    kept = []
    monkeypatch.setattr(tiers_bed.os, "sched_setaffinity", lambda pid, cores: kept.append((pid, len(cores))))
    with tiers_bed.limited(1234, "cloud", 0.9):
        assert not kept
    ended.clear()
    pid = os.getpid()  # a process whose threads are known
    with tiers_bed.limited(pid, "end", 0.3, on_one_core=True) as given:
        assert {(thread.native_id, 1) for thread in threading.enumerate()} <= set(kept)
        assert given.folder == tmp_path / f"mlcn_tiers_{os.getpid()}_end", "the next bed finds it if this script dies"
        assert (given.folder / "cpu.max").read_text() == "3000 10000"
        assert (given.folder / "cgroup.procs").read_text() == str(pid)
        assert not ended
    assert ended == [(pid, signal.SIGKILL), pid]


def test_a_node_that_starts_again_has_its_quota_while_it_loads(monkeypatch):
    done = []

    def start(*arguments):
        number = len(done)
        process = types.SimpleNamespace(pid=number, kill=lambda: done.append("killed"), wait=lambda: None)
        done.append(("starts", arguments[-1], number))
        return process

    monkeypatch.setattr(tiers_bed, "start_server", start)
    monkeypatch.setattr(tiers_bed, "url_of", lambda process: done.append("listens") or f"http://node:{process.pid}")
    monkeypatch.setattr(tiers_bed, "start_relay", lambda *given: (None, 9))
    monkeypatch.setattr(tiers_bed.RunningNode, "link", lambda node, to: done.append(("leads to", to)))
    given = types.SimpleNamespace(add=lambda pid: done.append(("quota", pid)))
    node = tiers_bed.RunningNode(tiers_bed.NodePlan(Path("edge"), 0.3), given, 1, ("--own",))
    node.ready()
    done.clear()
    node.start_again()
    assert done == ["killed", ("starts", "--own", 1), ("quota", 1)]
    node.come_back()
    assert done[3:] == ["listens", ("leads to", "node:1")]
    assert node.address == "node:1"
    done.clear()
    assert node.start_beside(("--other",)) == "node:0"
    assert done == [("starts", "--other", 0), "listens", ("quota", 0)]
    assert node.address == "node:1"


def test_waiting_for_a_core_is_that_of_the_first_threads_of_a_quotas_processes(tmp_path):
    group = quota.Quota(tmp_path / "group", 0.3)
    own = Path(f"/proc/{os.getpid()}/schedstat")
    if not own.exists():
        pytest.skip("this kernel does not tell")
    (tmp_path / "group" / "cgroup.procs").write_text(f"{os.getpid()}\n")
    before = int(own.read_text().split()[1]) / 1e9
    assert before <= group.waited() <= int(own.read_text().split()[1]) / 1e9
    (tmp_path / "group" / "cgroup.procs").write_text("")
    assert group.waited() == 0


def test_the_url_of_a_server_is_what_it_prints_and_nothing_that_it_logs(monkeypatch):
    def start(script):
        monkeypatch.setattr(tiers_bed, "_python", lambda module: ["sh", "-c", script])
        return tiers_bed.start_server("tiers")

    with start("echo edge at http://127.0.0.1:9 is away >&2; echo gateway at http://127.0.0.1:80/refine") as one:
        assert tiers_bed.url_of(one) == "http://127.0.0.1:80"
    with start("exit 2") as one, pytest.raises(InputError, match="tiers --port=0 did not start"):
        tiers_bed.url_of(one)
    with start("echo other; exec sleep 60") as one:
        with pytest.raises(InputError, match="did not start, as said above: other"):
            tiers_bed.url_of(one)
        one.kill()


def test_nodes_are_idle_once_they_use_no_more_time(monkeypatch):
    monkeypatch.setattr(tiers_bed.time, "sleep", lambda seconds: None)
    used = iter([0.0, 1.0, 1.0, 9.0])
    tiers_bed.until_idle([types.SimpleNamespace(core_seconds=lambda: next(used))])
    assert next(used) == 9.0
    with pytest.raises(InputError, match=r"still busy after 0\.01 seconds"):
        tiers_bed.until_idle([types.SimpleNamespace(core_seconds=itertools.count().__next__)], seconds=0.01)


def test_what_a_killed_script_left_is_ended_and_what_others_run_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(quota.time, "sleep", lambda seconds: None)
    ended = subprocess.Popen([sys.executable, "-c", "pass"])
    ended.wait()
    running = {script: subprocess.Popen(["sleep", "60"]) for script in (ended.pid, os.getpid())}
    for script, process in running.items():
        group = tmp_path / f"mlcn_tiers_{script}" / "node0"
        group.mkdir(parents=True)
        for folder, pids in ((group, f"{process.pid}\n"), (group.parent, "")):
            (folder / "cgroup.procs").write_text(pids)
    quota.end_left_over(tmp_path)
    assert running[ended.pid].wait(timeout=5) == -signal.SIGKILL
    assert running[os.getpid()].poll() is None
    running[os.getpid()].kill()
    running[os.getpid()].wait()
