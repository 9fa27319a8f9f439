"""The case of docs/howto/cheapest.md: what `describe` and `cheapest` print of eight lanes on machines of one core.

    mlcn_jax profile --cores=1 --output=profile.json
    python -m experiments.cheapest_case --profile=profile.json --data_dir=FOLDER

The machines are alike, some of them spot machines, and their prices are made up. Writes
`experiments/results/cheapest_case.json` and `.png`, the picture that `cheapest` draws.
"""

import contextlib
import datetime
import io
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from experiments import RESULTS, workers
from mlcn_jax import host
from mlcn_jax.commands import cheapest, describe
from mlcn_jax.files import write_json
from mlcn_jax.launch import launch_script

LANES = "mlcn1:w2*8"
MACHINES = """\
machine,price,spot_price,profile,available,priced_on
small,0.05,0.02,profile.json,4,{today}
"""
DESCRIBE = "--profile=profile.json --latency_seconds=1e-4 --bytes_per_second=1e8 --devices=8 --tables"
CHEAPEST = (
    "--catalog=machines.csv --deadline={deadline} --interruptions_per_hour=0.05 --latency_seconds=1e-4 "
    "--bytes_per_second=1e8 --most_machines=4"
)


def printed(command: Callable[[Sequence[str]], Any], argv: Sequence[str]) -> str:
    """What a command prints."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        command(argv)
    return output.getvalue()


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("profile", "profile.json", "Profile of one core.", flag_values=values)
    flags.DEFINE_string("data_dir", "", "Folder of Fashion-MNIST; if empty, it is downloaded.", flag_values=values)
    flags.DEFINE_string("deadline", "30m", "Of the case.", flag_values=values)


def main(values: flags.FlagValues) -> None:
    profile = workers.one_core_profile(values.profile)
    about: dict[str, Any] = {**host.environment(), "lanes": LANES}
    model = ["--config=mlcn1_fashion", f"--config.model.lanes={LANES}"]
    machines = MACHINES.format(today=datetime.date.today())
    images = Path(values.data_dir).expanduser().resolve()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        profile.save(Path("profile.json"))
        Path("machines.csv").write_text(machines)
        data = []
        if values.data_dir:
            os.symlink(images, "data")
            data = ["--config.data.dir=data"]
        commands = {
            "describe": (describe.main, [*model, *DESCRIBE.split()]),
            "cheapest": (cheapest.main, [*model, *data, *CHEAPEST.format(deadline=values.deadline).split()]),
        }
        for name, (command, argv) in commands.items():
            about[name] = {"command": shlex.join(["mlcn_jax", name, *argv]), "printed": printed(command, argv)}
            print(about[name]["command"], about[name]["printed"], sep="\n")
        shutil.copy("cheapest/cheapest.png", RESULTS / "cheapest_case.png")
    write_json(RESULTS / "cheapest_case.json", {**about, "machines": machines})


if __name__ == "__main__":
    launch_script(define, main)
