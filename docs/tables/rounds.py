"""Tables of training in rounds over slow links."""

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from tables.parts import NAMES, experiment, measured_on, percent, place, table_of


def verdicts_table(verdicts: Mapping[str, Mapping[str, Any]]) -> str:
    """Targets of `experiments.round_runs.judged`, a row each."""
    rows = [
        [what, "never" if one["measured"] is None else f"{one['measured']:.3g}", f"{one['at_most']:g}", one["verdict"]]
        for what, one in verdicts.items()
    ]
    return table_of(" | measured | at most | ", rows)


@place
def local_rounds() -> str:
    result = experiment("local_rounds")
    seeds, training, sums = (result[name] for name in ("seeds", "training", "sum_in_every_step"))
    rows = []
    for name in ("slow", "loopback", "sum in every step"):
        accuracies = [percent(one["test_accuracy"][name]) if name in one["test_accuracy"] else "-" for one in seeds]
        timed = [one.get("seconds_to_it", {}) for one in seeds]
        seconds = [f"{one[name]:.0f}" if one.get(name) is not None else "-" for one in timed]
        rows.append([name if name.startswith("sum") else f"rounds, {name}", ", ".join(accuracies), ", ".join(seconds)])
    reached = percent(result["stated_accuracy"], 0)
    header = f" | test accuracy of seeds | seconds from the first round's end to {reached} % in validation"
    step = {link: sums[link]["seconds_per_step"] for link in ("loopback", "slow")}
    moved = fmean(one["bytes_per_step"] for one in seeds if "bytes_per_step" in one)
    bits_of_a_round = 8 * result["bytes_expected"]["round"] / training["train.rounds.workers"]
    transfers = bits_of_a_round / (1e6 * result["slow_link"]["rate_mbit"])
    told = (
        f"A step with a sum of gradients takes {step['loopback']:.2f} s over loopback and {step['slow']:.1f} s over "
        f"the slow link, on which it moves {sums['slow']['bytes_per_step'] / 1e6:.1f} MB; in rounds a step moves "
        f"{moved / 1e6:.3f} MB. The accuracy of such sums is that of an ordinary training of one process, which "
        f"computes the same. The transfers of a round take at least {transfers:.0f} s over the slow link. Here the "
        "coordinator shares the workers' cores and scores each round while they transfer; with a machine of its own it "
        "would delay workers over loopback less, and the slow link would cost more than shown."
    )
    what = (
        f"`{training['model.lanes']}` on {NAMES[training['data.name']]}, {training['train.num_epochs']} epochs, batch "
        f"{training['train.batch_size']}, {training['train.rounds.steps']} steps a round, outer learning rate "
        f"{training['train.rounds.learning_rate']:g} and momentum {training['train.rounds.momentum']:g}, "
        f"{len(seeds)} seed{'s' * (len(seeds) > 1)}"
    )
    return "\n\n".join([verdicts_table(result["verdicts"]), table_of(header, rows), told, measured_on(result, what)])


@place
def round_kills() -> str:
    result = experiment("round_kills")
    runs = [run for name, run in result.items() if name.startswith("quorum")]
    kills = [one for run in runs for one in run["kills"]]
    twice, coordinator = sum(one["twice"] for one in kills), sum(one["process"] == "coordinator" for one in kills)
    present = ", ".join(f"{run['workers_in_a_round']:.2f}" for run in runs)
    again = fmean(max(one["computed_again"].values()) for one in kills)
    what = (
        f"{len(kills)} kills at random moments, {coordinator} of them of the coordinator, {twice} of them followed by "
        f"another while the process started; {again:.2f} rounds computed again in the mean; workers in a round, with a "
        f"quorum of 2 and of 1: {present}"
    )
    return f"{verdicts_table(result['verdicts'])}\n\n{measured_on(result, what)}"
