"""Tables of training in rounds over slow links."""

from statistics import fmean

from tables.parts import experiment, measured_on, place, table_of


@place
def round_kills() -> str:
    result = experiment("round_kills")
    rows = [
        [what, "never" if one["measured"] is None else f"{one['measured']:.3g}", f"{one['at_most']:g}", one["verdict"]]
        for what, one in result["verdicts"].items()
    ]
    runs = [run for name, run in result.items() if name.startswith("quorum")]
    kills = [one for run in runs for one in run["kills"]]
    twice, coordinator = sum(one["twice"] for one in kills), sum(one["process"] == "coordinator" for one in kills)
    present = ", ".join(f"{run['workers_in_a_round']:.2f}" for run in runs)
    again = fmean(max(one["computed_again"].values()) for one in kills)
    what = (
        f"{len(kills)} kills at random moments, {coordinator} of them of the coordinator, {twice} of them followed by "
        f"another while the process started; {again:.1f} rounds computed again in the mean; workers in a round, with a "
        f"quorum of 2 and of 1: {present}"
    )
    return f"{table_of(' | measured | at most | ', rows)}\n\n{measured_on(result, what)}"
