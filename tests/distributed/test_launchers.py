"""The job files of the docs, run by a Slurm of one node and by Open MPI: `make launchers`, not a part of `test-long`.

They start daemons as root and wait minutes for a job to be queued again, which a machine with a Slurm need not expect.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import REPOSITORY

from mlcn_jax.training.trained import load_trained

FILES = REPOSITORY / "docs" / "launchers"
_STEPS = 200  # with fewer, a job may end before what interrupts it reaches it
FIELDS = [
    "--config.model.lanes=mlcn1:w1*2",
    "--config.model.decoder=8",
    "--config.train.batch_size=50",
    "--config.train.checkpoint_every=10",
    "--config.train.score_test=false",
    f"--config.train.num_steps={_STEPS}",
]
_WAIT_SECONDS = 400.0
# Processes without a launcher have a core each; what more cores add up differs in the last bits.
ONE_CORE = ["taskset", "--cpu-list", str(min(os.sched_getaffinity(0)))]


def needs(*programs):
    """Skips a test unless MLCN_JAX_LAUNCHERS is set, where programs are missing, or where it is not root."""
    missing = [name for name in programs if not shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")]
    skip = not os.environ.get("MLCN_JAX_LAUNCHERS") or missing or os.geteuid() != 0
    return pytest.mark.skipif(bool(skip), reason=f"needs `make launchers`, root, {', '.join(programs)}")


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """The environment of commands that find `mlcn_jax`, one CPU device each."""
    folder = tmp_path_factory.mktemp("bin")
    (folder / "mlcn_jax").write_text(f'#!/bin/sh\nexec {sys.executable} -m mlcn_jax "$@"\n')
    (folder / "mlcn_jax").chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}:/usr/sbin",
        "PYTHONPATH": str(REPOSITORY),
        "JAX_NUM_CPU_DEVICES": "1",
        "CONFIG": "quickstart",
    }


@pytest.fixture(scope="module")
def slurm(tmp_path_factory, environment):
    """A Slurm of one node, with a munge of its own; the environment of its commands."""
    folder, host = tmp_path_factory.mktemp("slurm"), socket.gethostname().partition(".")[0]
    folder.chmod(0o755)
    ports = [_free_port() for _ in range(2)]
    key, munge = folder / "munge.key", folder / "munge.socket"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    (folder / "slurm.conf").write_text(
        "\n".join(
            [
                "ClusterName=test",
                f"SlurmctldHost={host}(127.0.0.1)",
                "SlurmUser=root",
                "AuthType=auth/munge",
                f"AuthInfo=socket={munge}",
                f"StateSaveLocation={folder / 'state'}",
                f"SlurmdSpoolDir={folder / 'spool'}",
                f"SlurmctldPidFile={folder / 'slurmctld.pid'}",
                f"SlurmdPidFile={folder / 'slurmd.pid'}",
                f"SlurmctldPort={ports[0]}",
                f"SlurmdPort={ports[1]}",
                "ProctrackType=proctrack/linuxproc",
                "TaskPlugin=task/none",
                "SelectType=select/cons_tres",
                "SelectTypeParameters=CR_Core",
                "JobRequeue=1",
                "ReturnToService=2",
                "MinJobAge=300",
                "KillWait=60",
                "SchedulerParameters=requeue_delay=0",
                f"NodeName={host} NodeAddr=127.0.0.1 CPUs={os.cpu_count()} State=UNKNOWN",
                f"PartitionName=all Nodes={host} Default=YES State=UP MaxTime=INFINITE",
            ]
        )
        + "\n"
    )
    (folder / "state").mkdir()
    (folder / "spool").mkdir()
    own = {**environment, "SLURM_CONF": str(folder / "slurm.conf")}
    munged = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={munge}"]
    munged += [f"--pid-file={folder / 'munged.pid'}", f"--log-file={folder / 'munged.log'}"]
    munged += [f"--seed-file={folder / 'munged.seed'}"]
    daemons = [munged, ["slurmctld", "-D"], [*ONE_CORE, "slurmd", "-D"]]
    started = []
    try:
        for name, command in zip(("munged", "slurmctld", "slurmd"), daemons, strict=True):
            with (folder / f"{name}.out").open("w") as log:
                started.append(subprocess.Popen(command, env=own, stdout=log, stderr=log))
            time.sleep(1.0)
        _until(lambda: "idle" in _said(["sinfo", "-h", "-o", "%T"], own), f"no node is idle: see {folder}")
        yield own
    finally:
        for daemon in reversed(started):
            daemon.terminate()
            daemon.wait(30)


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _said(command, environment):
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout


def _until(true, message):
    deadline = time.monotonic() + _WAIT_SECONDS
    while not true():
        assert time.monotonic() < deadline, message() if callable(message) else message
        time.sleep(0.5)


def submit(folder, slurm):
    """Submits the job of the docs; returns its number."""
    out = _said(
        ["sbatch", "--parsable", f"--output={folder}.out", str(FILES / "job.sbatch"), *FIELDS],
        slurm | {"WORKDIR": str(folder)},
    )
    assert out.strip().isdigit(), out
    return out.strip()


def wait_for(job, slurm, folder):
    """Waits until a job has ended, however often it was requeued."""
    _until(
        lambda: "JobState=COMPLETED" in _said(["scontrol", "show", "job", job], slurm),
        lambda: Path(f"{folder}.out").read_text(),
    )


def parameters(folder):
    return jax.tree.leaves(load_trained(folder).params)


@pytest.fixture(scope="module")
def expected(tmp_path_factory, environment):
    """The parameters after all steps of two processes without a launcher."""
    folder = tmp_path_factory.mktemp("expected") / "run"
    command = ["mlcn_jax", "train", "--config=quickstart", f"--workdir={folder}", *FIELDS]
    command += ["--config.parallel.processes=2", "--config.parallel.lane=2"]
    subprocess.run(command, env=environment, check=True, timeout=_WAIT_SECONDS)
    return parameters(folder)


@pytest.fixture(scope="module")
def alone(slurm, tmp_path_factory):
    """The parameters after all steps of a job of Slurm that is left alone."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    wait_for(submit(folder, slurm), slurm, folder)
    return parameters(folder)


def assert_equal(found, expected):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.long
@needs("srun", "slurmctld", "munged", "taskset")
def test_two_processes_under_slurm(alone, expected):
    assert_equal(alone, expected)


def interrupt(slurm, folder, *command):
    """Submits a job, and calls a command with its number once it has saved; returns the number."""
    job = submit(folder, slurm)
    _until(lambda: any((folder / "checkpoints").glob("[0-9]*")), lambda: Path(f"{folder}.out").read_text())
    subprocess.run([*command, job], env=slurm, check=True)
    return job


@pytest.mark.long
@needs("srun", "slurmctld", "munged", "taskset")
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(("scontrol", "requeue"), id="requeued"),
        pytest.param(("scancel", "--signal=TERM"), id="at its time limit"),  # the steps get it, and not the shell
    ],
)
def test_a_job_that_is_interrupted_resumes_to_the_same_bits(slurm, alone, tmp_path, command):
    folder = tmp_path / "run"
    wait_for(interrupt(slurm, folder, *command), slurm, folder)
    assert "resuming from step" in Path(f"{folder}.out").read_text()
    assert_equal(parameters(folder), alone)


@pytest.mark.long
@needs("srun", "slurmctld", "munged", "taskset")
def test_a_job_that_is_cancelled_saves_and_stays_cancelled(slurm, tmp_path):
    folder = tmp_path / "run"
    job = interrupt(slurm, folder, "scancel")
    _until(
        lambda: (
            "JobState=CANCELLED" in _said(["scontrol", "show", "job", job], slurm)
            and not _said(["squeue", "-h", "-j", job], slurm)
        ),
        lambda: Path(f"{folder}.out").read_text(),
    )
    told = Path(f"{folder}.out").read_text()
    (step,) = set(re.findall(rf"stopped by SIGTERM after step (\d+) of {_STEPS}", told))
    assert (folder / "checkpoints" / step).exists()


@pytest.mark.long
@needs("mpirun", "taskset")
def test_two_processes_under_open_mpi(environment, expected, tmp_path):
    own = environment | {"WORKDIR": str(tmp_path / "run")}
    own |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = [*ONE_CORE, str(FILES / "mpi.sh"), *FIELDS]
    subprocess.run(command, env=own, check=True, timeout=_WAIT_SECONDS)
    assert_equal(parameters(tmp_path / "run"), expected)


def test_the_jobset_is_yaml_of_two_processes():
    yaml = pytest.importorskip("yaml")
    spec = yaml.safe_load((FILES / "jobset.yaml").read_text())["spec"]["replicatedJobs"][0]["template"]["spec"]
    (arguments,) = spec["template"]["spec"]["containers"][0]["args"]
    assert f"--config.parallel.processes={spec['completions']} " in arguments


def test_an_image_holds_nothing_that_git_leaves_out():
    ignored = (FILES / "Containerfile.containerignore").read_text().split("\n")
    for name in (REPOSITORY / ".gitignore").read_text().split():
        assert {name.rstrip("/"), f"**/{name.rstrip('/')}"} & {*ignored}, name
    assert ".git" in ignored
