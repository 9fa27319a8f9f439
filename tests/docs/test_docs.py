"""The docs are true: their tables and messages are made, their examples run, their commands and files exist."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY

sys.path.append(str(REPOSITORY / "docs"))

import make_tables
import tables

from mlcn_jax.config import RunConfig, flat

PAGES = {str(page.relative_to(REPOSITORY)): page.read_text(encoding="utf-8") for page in make_tables.pages()}
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def _blocks(text: str, language: str) -> list[str]:
    return [match[2] for match in _BLOCK.finditer(text) if match[1] == language]


def _without_made(text: str) -> str:
    return re.sub(r"<!-- made: \w+ -->.*?<!-- end -->", "", text, flags=re.DOTALL)


# ---- what is made


def test_every_table_and_message_is_what_the_script_makes():
    done = subprocess.run(
        [sys.executable, "docs/make_tables.py", "--check"], cwd=REPOSITORY, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_figure_that_was_changed_by_hand_is_found():
    page = "# Page\n\n<!-- made: quickstart_seeds -->\n\n98.7 %\n\n<!-- end -->\n"
    assert make_tables.filled(page) != page
    assert make_tables.filled(make_tables.filled(page)) == make_tables.filled(page)


def test_every_table_has_a_place():
    placed = {name for text in PAGES.values() for name, _ in make_tables.places(text)}
    assert set(tables.MADE) <= placed


def test_tables_of_joined_lanes_show_pairs_and_curves_beside_lanes_of_their_cost():
    run = {"facts": {"part": "fashion"}, "data": {"name": "fashion_mnist", "copy": "", "bytes": "official"}}
    run |= {"device": "some CPU", "cpu_count": 2, "versions": {"python": "3", "jax": "1"}, "date": "2026-01-01"}
    run["command"] = "python -m experiments.lanes_apart"
    difference = {"mode": "alike", "means": [90.0, 90.1], "pairs": 8}
    difference |= {"mean": -0.1, "low": -0.3, "high": 0.1, "inside": True}
    points = [{"lanes": count, "megaflops": 12.5 * count, "accuracy": 85 + count} for count in (1, 2, 3, 4)]
    part = {
        "pairs": [{"equal": 90.2}, {"equal": 90.4}],
        "differences": [difference, {"mode": "together", "means": [], "pairs": 0}],
        "curves": {"equal": points},
        "single": [{"lane": "mlcn2:w3d3", "lanes": 4, "megaflops": 49.7, "accuracy": 88.0}],
    }
    none = {"differences": [], "curves": {}, "single": []}
    text = tables.lanes.lanes_apart_tables({"fashion": part, "cifar": none, "runs": [run]})
    assert "| with the settings of lanes apart | 8 | 90.00 | 90.30 | 90.10 | -0.10 (-0.30 to +0.10) | yes |" in text
    assert "by default" not in text
    assert "| Fashion-MNIST, joined, equal | 86.00 (12) | 87.00 (25) | 89.00 (50) | - | - |" in text
    assert "| Fashion-MNIST, one lane of that cost | - | - | 88.00 (50), `mlcn2:w3d3` | - | - |" in text
    assert "CIFAR" not in text


def test_images_made_from_the_official_ones_are_no_copy():
    facts = {"name": "fashion_mnist", "bytes": "not official"}
    assert tables.parts.data_title(facts | {"copy": ""}) == "Fashion-MNIST"
    assert tables.parts.data_title(facts) == "Fashion-MNIST (JPEG copy)", "as older files mean it"


def test_tables_of_pose_show_what_each_change_costs_beside_the_accuracy():
    run = {"device": "some CPU", "cpu_count": 2, "versions": {"python": "3", "jax": "1"}, "date": "2026-01-01"}
    run["command"] = "python -m experiments.pose"
    told = {"none": {"mean": 90.0}, "rotation": {"mean": 85.5}}
    lost, sure = {"none": {"mean": 0.0}, "rotation": {"mean": 4.5}}, {"none": {"mean": 0.9}, "rotation": {"mean": 0.8}}
    row = {"model": "capsnet", "megaflops": 4742.2, "runs": 3, "accuracy": told, "drop": lost, "confidence": sure}
    text = tables.lanes.pose_tables({"rows": [row], "runs": [run]})
    assert "| CapsNet | 4,742 | 3 | 90.00 (0.00) | 85.50 (4.50) |" in text
    assert "| CapsNet | 0.900 | 0.800 |" in text


def test_tables_of_removed_lanes_show_what_is_left_and_how_far_a_lane_means_the_same():
    run = {"device": "some CPU", "cpu_count": 2, "versions": {"python": "3", "jax": "1"}, "date": "2026-01-01"}
    run |= {"command": "python -m experiments.lane_removal", "lane_dropout": 0.1, "facts": {"seed": 0}}
    speed = {"median": 2.0, "min": 1.5, "max": 2.5}
    run["removed"] = [{"test_accuracy": 0.91 - removed / 100, "speedup": speed} for removed in range(16)]
    row = {"alive": 12, "lanes": 16, "same_lane": 0.625, "other_lanes": None}
    text = tables.lanes.lane_removal_tables({"rows": [row], "runs": [run]})
    assert "lane dropout 0.1: test accuracy in %" in text
    assert "| 14 | 89.00 | 2.00 (1.50 to 2.50) |" in text
    assert "| lane dropout 0.1 | 12 of 16 | 0.62 | - |" in text


def test_the_table_of_simulated_devices_says_which_figures_were_measured():
    run = {"device": "some CPU", "cpu_count": 1, "versions": {"python": "3", "jax": "1"}, "date": "2026-01-01"}
    run["command"] = "python -m experiments.scaling_by_parts"
    header = ["lanes", "ms on 1 device, measured", "over itself on 1: 2, 4 devices, simulated"]
    result = {"table": [header, ["CapsNet", "900", "1.90, 3.60"]], "notes": ["Deeper.", "Batch 150."], "runs": [run]}
    text = tables.devices.scaling_by_parts_table(result)
    assert "| lanes | ms on 1 device, measured | over itself on 1: 2, 4 devices, simulated |" in text
    assert "| CapsNet | 900 | 1.90, 3.60 |\n\nDeeper. Batch 150." in text
    assert "1 measurement, 2026-01-01.*" in text


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs/results/") or page == "README.md"])
def test_no_measured_figure_is_written_by_hand(page):
    prose = _BLOCK.sub("", _without_made(PAGES[page]))
    of_papers = r"figures? 4\.\d+(, 4\.\d+)*( and 4\.\d+)?|table 4\.1|1e-3|times 0\.9"
    prose = re.sub(rf"`[^`]*`|\]\([^)]*\)|Python 3\.11|within 0\.5|{of_papers}", "", prose)
    assert not re.findall(r"\d+\.\d+|\d+ ?%(?! or more)", prose)


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs/howto/")])
def test_measured_tables_are_among_the_results(page):
    """A how-to shows the output of its commands at most."""
    found = {name for name, _ in make_tables.places(PAGES[page]) if name in tables.MADE}
    assert all(name.startswith("cheapest_") for name in found), found


# ---- examples


def _python_pages() -> list[str]:
    return [page for page, text in PAGES.items() if _blocks(text, "python") and page != "README.md"]  # see test_api.py


@pytest.mark.parametrize("page", _python_pages())
def test_python_examples_print_what_the_page_says(page, tmp_path):
    code = "\n".join(_blocks(PAGES[page], "python"))
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(REPOSITORY / ".pytest_cache" / "docs"),  # its second run is quick
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    expected = [line.removeprefix("# ") for line in re.findall(r"^# .*", code, re.MULTILINE)]
    assert done.stdout.splitlines() == expected


@pytest.mark.long
def test_the_tutorial_works_from_pictures_to_predictions(tmp_path):
    text = PAGES["docs/tutorial.md"].replace("num_epochs=10", "num_epochs=2")
    lines = [words for block in _blocks(text, "bash") for words in _lines(block)]
    steps = [words[1:] for words in lines if words[0] == "mlcn_jax" and words[1] != "serve"]
    assert [words[0] for words in steps[:2]] == ["train", "evaluate"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu"}
    commands = [["-c", *_blocks(text, "python")], *(["-m", "mlcn_jax", *words] for words in steps)]
    for command in commands:
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
    assert "digit_3" in done.stdout


# ---- commands


def _lines(block: str) -> list[list[str]]:
    """The command lines of a shell block, each as its words."""
    lines = block.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def _commands() -> list[tuple[str, list[str]]]:
    """Every command line in a shell block, with its page."""
    return [(page, words) for page, text in PAGES.items() for block in _blocks(text, "bash") for words in _lines(block)]


@pytest.mark.parametrize(("page", "words"), _commands())
def test_what_a_command_line_names_exists(page, words):
    for word in words:
        flag, _, value = word.partition("=")
        if flag == "--config" and value.startswith("configs/"):
            assert (REPOSITORY / value).is_file(), f"{page}: {value}"
        if flag == "-m" or word.startswith(("experiments.", "benchmarks.")):
            module = REPOSITORY.joinpath(*words[words.index("-m") + 1].split("."))
            assert module.is_dir() or module.with_suffix(".py").is_file() or module.name == "pytest", f"{page}: {word}"
        if flag.startswith("--config."):
            name = flag.removeprefix("--config.")
            known = set(flat(RunConfig().to_dict())) | _search_fields()
            assert name in known, f"{page}: there is no field {name}"
    if words[0] == "make":
        targets = re.findall(r"^([\w.-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
        named = [word for word in words[1:] if "=" not in word]
        assert set(named) <= set(targets), f"{page}: {words}"


@pytest.mark.parametrize("page", PAGES)
def test_scripts_that_a_page_names_exist(page):
    for name in re.findall(r"python -m ((?:experiments|benchmarks)\.\w+)", PAGES[page]):
        assert REPOSITORY.joinpath(*name.split(".")).with_suffix(".py").is_file(), f"{page}: {name}"


def _search_fields() -> set[str]:
    import dataclasses

    from mlcn_jax.search.settings import SearchSettings

    return {f"search.{field.name}" for field in dataclasses.fields(SearchSettings)}


@pytest.fixture(scope="module")
def help_of():
    import reference_pages

    return reference_pages.help_of()


def test_commands_and_their_flags_exist(help_of):
    for page, words in _commands():
        if words[0] != "mlcn_jax" or words[1] == "--help":
            continue
        assert words[1] in help_of, f"{page}: there is no command {words[1]}"
        for word in words[2:]:
            flag = word.partition("=")[0]
            if flag.startswith("--") and not flag.startswith("--config."):
                assert re.search(rf"{flag}\b", help_of[words[1]]), f"{page}: {words[1]} has no flag {flag}"


# ---- the pages themselves


def test_readme_is_short_and_names_the_two_commands():
    assert len(PAGES["README.md"].splitlines()) <= 150
    assert "make train" in PAGES["README.md"]
    assert "make test" in PAGES["README.md"]


@pytest.mark.parametrize("page", PAGES)
def test_links_and_pictures_exist(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", PAGES[page]):
        if not target.startswith(("http://", "https://")):
            assert (REPOSITORY / page).parent.joinpath(target).resolve().exists(), f"{page}: {target}"


def test_every_module_is_in_the_reference():
    import reference_pages

    named = {name for names in reference_pages.modules().values() for name in names}
    for file in (REPOSITORY / "mlcn_jax").rglob("*.py"):
        parts = file.relative_to(REPOSITORY).with_suffix("").parts
        if file.name != "__init__.py" and "commands" not in parts and not any(p.startswith("_") for p in parts):
            assert ".".join(parts) in named


def test_the_citation_names_the_software_and_its_papers():
    text = Path(REPOSITORY / "CITATION.cff").read_text()
    for what in ("cff-version:", "title: mlcn_jax", "1710.09829", "1902.08431", "1908.03935"):
        assert what in text


def test_the_table_of_unequal_lanes_shows_what_each_arm_has_over_equal_ones():
    run = {"device": "some CPU", "cpu_count": 2, "versions": {"python": "3", "jax": "1"}, "date": "2026-01-01"}
    run["command"] = "python -m experiments.unequal_lanes"
    told = {"test_accuracy": {"mean": 90.0, "runs": 8}, "validation_accuracy": {"mean": 90.5, "runs": 8}}
    between = {"mean": 0.25, "low": -0.1, "high": 0.6, "visible": True}
    over = ("over_equal", "over_drawn", "over_random")
    arms = [
        {"arm": "equal", "lanes": ["resnet:w2d1*4"], **dict.fromkeys(over), **told},
        {"arm": "random", "lanes": ["resnet:w1d1*11", "resnet:w3d1*2"], **dict.fromkeys(over, between), **told},
    ]
    text = tables.searches.unequal_lanes_table({"parts": {"resnet": arms}, "runs": [run]})
    assert "| resnet | equal | `resnet:w2d1*4` | 8 | 90.00 | 90.50 | - | - |" in text
    assert "| resnet | random | 2 mixes | 8 | 90.00 | 90.50 | +0.25 (-0.10 to +0.60) | yes |" in text
    assert "| resnet | random | drawn | +0.25 (-0.10 to +0.60) |" in text
