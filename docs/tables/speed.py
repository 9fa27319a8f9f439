"""Tables of speed, against the peers and of the parts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tables.parts import benchmark, measured_on, percent, place, table_of


def _mebibytes(framework: Mapping[str, Any]) -> str:
    return f"{framework['peak_bytes'] / 2**20:,.0f}"


_TITLES = {
    "mlcn_jax": "mlcn_jax",
    "chosen": "with the runtime chosen",
    "onnxruntime": "ONNX Runtime",
    "keras": "Keras",
    "torch": "PyTorch",
}


def _frameworks(result: Mapping[str, Any]) -> list[str]:
    """The frameworks that took part, in the order of `_TITLES`."""
    there = next(iter(result["networks"].values()))["frameworks"]
    return [name for name in _TITLES if name in there]


def _header(before: str, frameworks: Sequence[str], unit: str, *between: str) -> str:
    first, *others = (_TITLES[name] for name in frameworks)
    return " | ".join([before, f"{first}, {unit}", *others, *between, f"peak MiB: {first}", *others])


def _peer_versions(result: Mapping[str, Any]) -> str:
    frameworks = next(iter(result["networks"].values()))["frameworks"]
    versions = {name: v for entry in frameworks.values() for name, v in entry["versions"].items()}
    there = (name for name in ("keras", "tensorflow", "torch", "onnxruntime") if name in versions)
    return ", ".join(f"{name} {versions[name]}" for name in there)


def _other_work(entries: Mapping[str, Any]) -> list[str]:
    """What a caption says of the cores that other work kept busy beside the measurements, where it is known."""
    known = [entry["busy_cores"] for entry in entries.values() if entry.get("busy_cores") is not None]
    return [f"other work kept at most {max(known):.2f} cores busy before or after"] if known else []


def _training(file: str) -> str:
    result = benchmark(file)
    names = _frameworks(result)
    of_torch = all("peak_over_torch" in network for network in result["networks"].values())
    rows = []
    for network in result["networks"].values():
        frameworks = network["frameworks"]
        fastest = min(names[1:], key=lambda name: frameworks[name]["ours_over_theirs"]["median"])
        ratio = frameworks[fastest]["ours_over_theirs"]
        rows.append(
            [
                network["title"],
                network["batch"],
                *(f"{frameworks[name]['images_per_second']:,.0f}" for name in names),
                f"**{network['ours_over_fastest_peer']:.2f}** ({ratio['min']:.2f} to {ratio['max']:.2f})",
                *(_mebibytes(frameworks[name]) for name in names),
                *([f"{network['peak_over_torch']:.2f}"] if of_torch else []),
            ]
        )
    header = _header("network | batch", names, "images/s", "ratio (min to max)")
    header += " | memory, ours over PyTorch's" if of_torch else ""
    about = measured_on(result, _peer_versions(result), *_other_work(result["networks"]))
    return f"{table_of(header, rows)}\n\n{about}"


@place
def train_step() -> str:
    return _training("train_step")


@place
def train_step_residual() -> str:
    return _training("train_step_residual")


@place
def train_step_other() -> str:
    return _training("train_step_other")


_LEAST, _HOPED, _MOST_MEMORY = 1.1, 1.6, 1.15
_LEAST_OF_LANES = {1: 1.0, 4: 1.15, 8: 1.15}  # of residual lanes, by their number
_LEAST_OF_BATCH, _LEAST_CHOSEN = {1: 0.8}, 0.97  # in inference; 1 for other batches


def _missed_by(named: Sequence[str]) -> str:
    return f"missed by {len(named)}: {'; '.join(named)}" if named else "missed by none"


@place
def train_goals() -> str:
    files = "train_step", "train_step_residual", "train_step_other"  # later ones replace rows of earlier ones
    networks = {name: network for file in files for name, network in benchmark(file)["networks"].items()}
    slow, large = [], []
    for name, network in networks.items():
        kind, lanes = name.split("_")[:2]
        goal = _LEAST_OF_LANES[int(lanes.split("x")[0])] if kind == "resnet" else _LEAST
        if network["ours_over_fastest_peer"] < goal:
            slow.append(f"{network['title']} ({network['ours_over_fastest_peer']:.3f} of {goal:g})")
        if network["peak_over_torch"] > _MOST_MEMORY:
            large.append(f"{network['title']} ({network['peak_over_torch']:.2f})")

    hoped = {name: network for name, network in networks.items() if name.startswith("mlcn1")}
    reached = sum(network["ours_over_fastest_peer"] >= _HOPED for network in hoped.values())
    residual = any(name.startswith("resnet") for name in networks)
    more = ", and residual lanes 1.15 times, one alone just as fast" if residual else ""
    return (
        f"Goals that were set beforehand, for {len(networks)} networks: {_LEAST:g} times as fast as the faster "
        f"peer{more}, {_missed_by(slow)}; {_HOPED:g} times, as was hoped for `mlcn1`, is reached by {reached} of its "
        f"{len(hoped)} networks. At most {_MOST_MEMORY:g} times PyTorch's memory, {_missed_by(large)}."
    )


@place
def inference_parts() -> str:
    result = benchmark("inference_parts")
    ways = {
        "export": "export",
        "weights compiled in": "jitted, weights compiled in",
        "weights as arguments": "weights as arguments",
        "nothing": "a program that computes nothing",
    }
    rows = [
        [
            network["title"],
            network["batch"],
            *(f"{network['milliseconds'][way]:.{3 if way == 'nothing' else 2}f}" for way in ways),
            f"{network['flops'] / 1e6:.0f}",
            f"{percent(network['share_of_product_rate'], 0)} %",
        ]
        for network in result["networks"].values()
    ]
    header = " | ".join(
        ["network | batch", *(f"{told}, ms" for told in ways.values()), "MFLOP", "share of the product rate"]
    )
    return f"{table_of(header, rows)}\n\n{measured_on(result, *_other_work(result['networks']))}"


@place
def allocator() -> str:
    result = benchmark("allocator")
    names = list(result["models"][0]["over_kept"])
    rows = [
        [
            row["lanes"].replace("capsnet", "CapsNet"),
            row["batch"],
            "{:.0f} ({:.0f})".format(*(1000 * row[each]["kept"] for each in ("median_seconds", "slowest_seconds"))),
            *(f"**{row['over_kept'][name]:.2f}**" for name in names if name != "kept"),
        ]
        for row in result["models"]
    ]
    header = ["lanes", "batch", "as trained, ms (slowest turn)", *names[1:]]
    return f"{table_of(' | '.join(header), rows)}\n\n{measured_on(result)}"


def _inference(file: str) -> str:
    result = benchmark(file)
    names = _frameworks(result)
    ratios = {"ours_over_fastest_peer": "ratio", "chosen_over_fastest": "chosen over the fastest of all"}
    ratios = {name: title for name, title in ratios.items() if name in next(iter(result["networks"].values()))}
    rows = [
        [
            network["title"],
            network["batch"],
            *(f"{network['frameworks'][name]['milliseconds']['median']:.2f}" for name in names),
            *(f"**{network[name]:.2f}**" for name in ratios),
            *(_mebibytes(network["frameworks"][name]) for name in names),
        ]
        for network in result["networks"].values()
    ]
    header = _header("network | batch", names, "ms", *ratios.values())
    about = measured_on(result, _peer_versions(result), *_other_work(result["networks"]))
    return f"{table_of(header, rows)}\n\n{about}"


@place
def inference() -> str:
    return _inference("inference")


@place
def inference_residual() -> str:
    return _inference("inference_residual")


@place
def inference_other() -> str:
    return _inference("inference_other")


@place
def inference_goals() -> str:
    files = "inference", "inference_residual", "inference_other"
    cells = [cell for file in files for cell in benchmark(file)["networks"].values()]

    def missed(ratio: str, least: Callable[[Mapping[str, Any]], float]) -> str:
        below = (cell for cell in cells if cell[ratio] < least(cell))
        return _missed_by([f"{cell['title']}, batch {cell['batch']} ({cell[ratio]:.3f})" for cell in below])

    alone = missed("ours_over_fastest_peer", lambda cell: _LEAST_OF_BATCH.get(cell["batch"], 1))
    chosen = missed("chosen_over_fastest", lambda cell: _LEAST_CHOSEN)
    return (
        f"Goals that were set beforehand, for {len(cells)} cases: XLA as fast as the faster of PyTorch and Keras, "
        f"single images {_LEAST_OF_BATCH[1]:g} times as fast, {alone}. The runtime "
        f"chosen {_LEAST_CHOSEN:g} times as fast as the fastest of all, {chosen}."
    )


@place
def families() -> str:
    result = benchmark("train_step")
    rows = [
        [family["title"], f"{family['capsnet_over_this']:.2f}", f"{family['thesis']:.2f}" if family["thesis"] else "-"]
        for shape in result["families"].values()
        for family in shape["networks"].values()
        if "capsnet_over_this" in family
    ]
    about = measured_on(result, *_other_work(result["families"]))
    return f"{table_of('CapsNet over | here | thesis, on a P100', rows)}\n\n{about}"


@place
def roofline() -> str:
    result = benchmark("roofline")
    rows = [
        [
            network["title"],
            network.get("batch", 100),  # of every network when it was not written down
            f"{1e3 * network['seconds']:.0f}",
            f"{network['flops'] / 1e9:.1f}",
            f"{network['flops_of_plain_convolutions'] / 1e9:.1f}",
            f"{percent(network['share_of_product_roof'], 0)} %",
            f"{network['bytes'] / 1e9:.2f}" if network["bytes"] else "-",
            f"{percent(network['share_of_bandwidth_roof'], 0)} %" if network["bytes"] else "-",
            f"{network['largest_part']}, {percent(network['parts'][network['largest_part']], 0)} %",
        ]
        for network in result["networks"].values()
    ]
    header = (
        "network | batch | ms | GFLOP | direct | share of the product rate | GB | share of the bandwidth | "
        "largest part of the step"
    )
    return f"{table_of(header, rows)}\n\n{measured_on(result, *_other_work(result['networks']))}"


@place
def routing() -> str:
    result = benchmark("routing")
    rows = [
        [
            title,
            f"{case['ours']['median_milliseconds']:.0f}",
            f"{case['plain_over_ours_median']:.2f}",
            f"{case['plain']['temporary_mebibytes'] / case['ours']['temporary_mebibytes']:.2f}",
        ]
        for title, case in result["cases"].items()
    ]
    header = "case | ms | the procedure as printed: time over this | temporary memory over this"
    return f"{table_of(header, rows)}\n\n{measured_on(result, result['what'])}"


@place
def serving() -> str:
    result = benchmark("serving")
    clients = f"{result['clients']}_clients"
    rows = [
        [
            model["title"],
            f"{model['with_batching'][clients]['requests_per_second']:,.0f}",
            f"{model['without_batching'][clients]['requests_per_second']:,.0f}",
            *(f"**{model[ratio]['median']:.2f}**" for ratio in _SERVING_RATIOS),
            *(f"{model['open_loop'][load]['milliseconds_p99']:.1f}" for load in _LOADS),
        ]
        for model in result["models"].values()
    ]
    titles = [f"model, {result['clients']} clients", "with batching, requests/s", "without"]
    titles += [title.format(workers=result["workers"]) for title in _SERVING_RATIOS.values()]
    titles += [f"p99 at {title} of the load, ms" for title in _LOADS.values()]
    about = measured_on(result, "clients and server on the same cores", *_other_work(result["models"]))
    return f"{table_of(' | '.join(titles), rows)}\n\n{about}"


_LOADS = {"half": "half", "nine_tenths": "nine tenths"}
_SERVING_RATIOS = {
    "throughput_over_without_batching": "ratio",
    "throughput_over_computing_in_process": "over computing in process",
    "throughput_over_decoding_and_computing_in_process": "and decoding",
    "throughput_of_workers_over_one_process": "{workers} processes over one",
    "throughput_of_workers_over_computing_in_process": "{workers} processes over computing in process",
    "single_client_latency_over_without_batching": "latency of a single client, ratio",
}
_LEAST_OVER_IN_PROCESS = 0.85


@place
def serving_goals() -> str:
    models = benchmark("serving")["models"].values()

    def missed(least: float, *ratios: str) -> str:
        best = {model["title"]: max(model[ratio]["median"] for ratio in ratios) for model in models}
        return _missed_by([f"{title} ({ratio:.3f})" for title, ratio in best.items() if ratio < least])

    without = missed(1.0, "throughput_over_without_batching")
    names = ("throughput_over_computing_in_process", "throughput_of_workers_over_computing_in_process")
    return (
        f"Goals that were set beforehand, for {len(models)} models: batching never answers fewer requests than none, "
        f"{without}; with one process or several, {_LEAST_OVER_IN_PROCESS:g} times as many as images are computed in "
        f"process in batches of the same size, {missed(_LEAST_OVER_IN_PROCESS, *names)}."
    )


def _images(result: Mapping[str, Any]) -> str:
    return f"{result['batch']} images"


@place
def normalisation() -> str:
    result = benchmark("normalisation")
    forms = {"jax": "gradients of JAX", "lanes": "as lanes do it", "fused": "one gradient for both"}
    rows = [
        [title, *(f"{case[form]:.1f}" for form in forms), f"{case['fused'] / case['lanes']:.2f}"]
        for title, case in result["cases"].items()
    ]
    header = " | ".join(["map", *(f"{told}, ms" for told in forms.values()), "one gradient over lanes"])
    return f"{table_of(header, rows)}\n\n{measured_on(result, _images(result))}"


@place
def lanes_together() -> str:
    result = benchmark("lanes_together")
    rows = []
    for title, case in result["cases"].items():
        taken = {name: ms for name, ms in case.items() if name.endswith("at once")}
        (_, in_turn), *others = taken.items()
        told = "; ".join(f"{name}: {ms:.0f} ({ms / in_turn:.2f})" for name, ms in others)
        rows.append([title, f"{in_turn:.0f}", told])
    table = table_of("lanes | in turn, ms | several together, ms (over in turn)", rows)
    return f"{table}\n\n{measured_on(result, _images(result))}"


def _conv_table(result: Mapping[str, Any], *ways: str) -> str:
    names = list(dict.fromkeys(name for case in result["cases"].values() for name in case["forward_milliseconds"]))

    def told(case: Mapping[str, Any], name: str) -> str:
        return ", ".join(f"{case[way][name]:.2f}" if name in case[way] else "-" for way in ways)

    rows = [
        [title, *(told(case, name) for name in names), f"`{case['chosen']}`"] for title, case in result["cases"].items()
    ]
    return table_of(" | ".join(["convolution", *(f"`{name}`, ms" for name in names), "chosen"]), rows)


@place
def conv_exports() -> str:
    result = benchmark("conv_exports_cpu")
    about = measured_on(result, *_other_work(result["cases"]))
    return f"{_conv_table(result, 'forward_milliseconds')}\n\n{about}"


@place
def conv_pooled() -> str:
    result = benchmark("conv_pooled_cpu")
    table = _conv_table(result, "with_gradients_milliseconds", "forward_milliseconds")
    return f"{table}\n\n{measured_on(result, 'with gradients, forward alone', *_other_work(result['cases']))}"


@place
def conv_algorithms() -> str:
    result = benchmark("conv_algorithms_cpu")
    table = _conv_table(result, "with_gradients_milliseconds", "forward_milliseconds")
    errors = [case["errors"] for case in result["cases"].values() if "errors" in case]
    largest = {name: max(error[name] for error in errors) for name in errors[0]}
    told_errors = ", ".join(f"`{name}` {value:.0e}" for name, value in largest.items())
    about = measured_on(result, "with gradients, forward alone", *_other_work(result["cases"]))
    return (
        f"{table}\n\nLargest error of a 3x3 convolution in float32, relative to its largest value: "
        f"{told_errors}.\n\n{about}"
    )
