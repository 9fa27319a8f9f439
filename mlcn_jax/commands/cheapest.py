"""Finds the machines that train a configuration by a deadline at the least cost. Rents nothing and trains nothing.

    mlcn_jax cheapest --config=mlcn1_fashion --catalog=machines.csv --profiles=laptop=laptop.json --deadline=6h
    mlcn_jax cheapest --config=resnet_cifar --catalog=vms.csv --profiles=h100.json,a100.json \\
        --interruptions_per_hour=0.05 --latency_seconds=5e-5 --bytes_per_second=1e9

The catalog is SkyPilot's (`vms.csv`) or a plain CSV with `machine` and `price`; each kind of machine needs a profile
that `mlcn_jax profile` measured on one. Single machines, and with the speed of a link several at once, are compared
under every split, and, where lanes learn without each other, machines that train lanes apart. Writes the Pareto front
of time and cost to `cheapest.json` and `cheapest.png`, and prints the commands of the best.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from mlcn_jax.commands import arguments
from mlcn_jax.commands.run_config import config_of
from mlcn_jax.errors import InputError

_NUMBERS = (
    ("startup_seconds", 180.0, "Time from requesting a machine to its first step, compilation included."),
    ("minimum_seconds", 60.0, "Minimum billed time."),
    ("checkpoint_seconds", 1.0, "Training time lost to saving a checkpoint."),
    ("download_bytes_per_second", 1e7, "Rate at which a machine gets its images."),
    ("interruptions_per_hour", None, "Of spot machines without it in the catalog; without either, they are left out."),
    ("latency_seconds", None, "Latency between machines; without a link, none train one run together."),
    ("bytes_per_second", None, "Bandwidth between machines."),
)


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("catalog", "", "CSV file of machines and prices.", flag_values=values)
    text = "Device profiles, FILE or NAME=FILE of a machine or accelerator, separated by commas."
    flags.DEFINE_string("profiles", "", text, flag_values=values)
    text = "Time by which training must be done, such as 6h or 1h30m; empty for the cheapest of all."
    flags.DEFINE_string("deadline", "", text, flag_values=values)
    flags.DEFINE_string("output", "cheapest", "Folder for cheapest.json and cheapest.png.", flag_values=values)
    text = "Day of the prices, such as 2026-01-31; empty for the day on which the file was last changed."
    flags.DEFINE_string("priced_on", "", text, flag_values=values)
    text = "Most machines to rent at once."
    flags.DEFINE_integer("most_machines", 2, text, lower_bound=1, upper_bound=8, flag_values=values)
    for name, default, text in _NUMBERS:
        flags.DEFINE_float(name, default, text, lower_bound=0.0, flag_values=values)


def main(argv: Sequence[str]) -> None:
    values = arguments.parse("cheapest", __doc__, define, argv, config="run")
    if not values.catalog:
        raise InputError("--catalog=FILE is needed: SkyPilot's vms.csv, or a CSV with the columns machine and price")
    for name, *_ in _NUMBERS:
        if not math.isfinite(values[name].value or 0.0):
            raise InputError(f"--{name} is {values[name].value}: give a finite number")
    if (values.latency_seconds is None) != (values.bytes_per_second is None):
        raise InputError("--latency_seconds and --bytes_per_second describe one link: give both or neither")
    if values.bytes_per_second == 0 or values.download_bytes_per_second == 0:
        raise InputError("--bytes_per_second and --download_bytes_per_second must be above 0")
    config = config_of(values)

    from mlcn_jax.analysis import cheapest, cheapest_report
    from mlcn_jax.analysis.market import Market
    from mlcn_jax.analysis.ways import Terms
    from mlcn_jax.files import make_folder
    from mlcn_jax.placement.catalog import read_catalog
    from mlcn_jax.placement.simulate import Link
    from mlcn_jax.training.session import open_session

    deadline = cheapest.seconds_of(values.deadline, "deadline") if values.deadline else math.inf
    offers, passed = read_catalog(Path(values.catalog).expanduser(), values.priced_on)
    profiles = cheapest.read_profiles(values.profiles, offers)
    link = None if values.bytes_per_second is None else Link(values.latency_seconds, values.bytes_per_second)
    terms = Terms(
        startup_seconds=values.startup_seconds,
        minimum_seconds=values.minimum_seconds,
        checkpoint_seconds=values.checkpoint_seconds,
        download_bytes_per_second=values.download_bytes_per_second,
        interruptions_per_hour=values.interruptions_per_hour,
        link=link,
        most_machines=values.most_machines,
    )
    judged, without = cheapest.with_profiles(offers, profiles, terms)
    passed += without
    if not judged:
        raise InputError("no machine of the catalog can be judged:\n" + "\n".join(f"  {reason}" for reason in passed))
    market = Market(cheapest.task_of(config, open_session(config)), terms, judged)
    passed += market.passed
    ways = market.ways(deadline)
    best = cheapest.best_way(market, ways, deadline)
    launch = cheapest_report.commands(market, best, _config_flags(argv, values["config"]))
    output = Path(values.output).expanduser()
    make_folder(output, "output")
    cheapest_report.write(market, ways, best, deadline, passed, launch, output)
    print(cheapest_report.table(market, ways, best))
    for line in (cheapest_report.advice(best), *(f"passed over: {reason}" for reason in passed[:10])):
        print(line) if line else None
    print(f"the best, for {best.cost:.4g}:", *launch, sep="\n")
    print(f"cheapest.json and cheapest.png in {output}")


def _config_flags(argv: Sequence[str], config: Any) -> list[str]:
    """`--config` and the fields that were given, each as one argument.

    Args:
      argv: the arguments, which name the configuration.
      config: the parsed flag `--config`, which has the fields and their values, however they were written.
    """
    named = ""
    for place, argument in enumerate(argv):
        name, equals, file = argument.partition("=")
        if name in ("-config", "--config"):
            named = file if equals else argv[place + 1]
    return [f"--config={named}", *(f"--config.{field}={value}" for field, value in config.override_values.items())]
