"""Tables of memory: what is predicted of training steps, and what settings that save memory cost in time."""

from tables.parts import benchmark, experiment, measured_on, percent, place, table_of

_WAYS = {
    "none": "all activations held",
    "full": "`model.remat=full`",
    "nothing": "the same, but for what convolutions give, which is not held",
    "offload": "`model.remat=offload`",
    "accumulated": "`train.accumulation_steps=4`",
}


@place
def remat() -> str:
    result = benchmark("remat")
    rows = []
    for name, found in result["policies"].items():
        time = found["time_ratio"]
        times = f"{time['median']:.2f} ({time['min']:.2f} to {time['max']:.2f})"
        rows.append([_WAYS[name], f"{found['temporary_bytes'] / 2**20:.0f}", f"{found['memory_ratio']:.2f}", times])
    shape = "x".join(map(str, result["image"]))
    what = f"`{result['lanes']}`, images of {shape}, batch {result['batch']}; temporary memory, without parameters"
    return f"{table_of(' | MiB | memory | time', rows)}\n\n{measured_on(result, what)}"


@place
def memory_plan() -> str:
    result = experiment("memory_plan")
    rows = []
    for row in result["rows"]:
        given = dict(row["changes"])
        data, lanes = given.pop("data.name"), given.pop("model.lanes")
        sizes = (f"{row[name] / 2**20:.0f}" for name in ("compiled_bytes", "predicted_bytes"))
        changes = ", ".join(f"`{name}={value}`" for name, value in given.items())
        chose = "yes" if row["chose_the_margin"] else "no"
        rows.append([f"{data}, `{lanes}`", changes, *sizes, f"{100 * row['over']:+.1f} %", chose])
    header = "model | with | compiled, MiB | predicted, MiB | over | chose the margin"
    least, most = (percent(share, 1) for share in result["of_others"])
    what = f"extrapolated predictions of models that did not choose the margin: {least} to {most} % over"
    return f"{table_of(header, rows)}\n\n{measured_on(result, what)}"
