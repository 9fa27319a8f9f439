"""The tables and curves of repeated runs, from made-up records."""

from types import SimpleNamespace

import pytest
from made_records import ROW, made_record
from matplotlib.figure import Figure
from PIL import Image

from experiments import batch_size, repeated_report, table_4_1
from mlcn_jax.files import read_json


def test_the_table_shows_spread_difference_and_what_is_missing():
    records = [
        *(made_record(a, 10.0, row=ROW, column="published", seed=i) for i, a in enumerate((90.0, 91.0, 92.5))),
        made_record(90.6, row=ROW, column="augmented", seed=0),
        made_record(90.4, row=ROW, column="tuned", seed=0),
        made_record(row=ROW, column="tuned", seed=1),
        made_record(70.0, 20.0, "cifar10", "JPEG copy", row="cifar_mlcn2_4x4", column="published", seed=0),
    ]
    lines = {line[0]: line[1:] for line in table_4_1.cells(records, table_4_1.SCALES["full"])}
    assert lines["Fashion-MNIST, mlcn2 2x4"] == [
        *("1,000,000", "-", "10", "20", "91.01"),
        "91.17 ± 1.26, 90.00 to 92.50, 3 runs, +0.16 reached",
        "not run",
        "90.60, 1 run, -0.41 within 0.5",
        "not run",
        "90.40, 1 run, 1 failed, -0.61 below",
        "not run",
    ]
    assert lines["CIFAR-10 (JPEG copy), mlcn2 4x4"][5] == "70.00, 1 run, +0.95 reached"
    assert lines["Fashion-MNIST, CapsNet"] == ["-", "8,227,088", "-", "220", "91.30", "not run", *"-----"]
    shorter = table_4_1.cells(records, table_4_1.SCALES["cpu"])
    assert shorter[3][6] == "70.00, 1 run, +0.95"


def test_a_table_is_drawn_with_its_verdicts(tmp_path):
    rows = [["one", "90.00, 1 run, +0.10 reached"], ["other", "80.00, 1 run, -9.00 below"]]
    repeated_report.draw_table(["", "accuracy"], rows, ["A sentence."]).savefig(tmp_path / "table.png")
    with Image.open(tmp_path / "table.png") as picture:
        colors = {color for _, color in picture.convert("RGB").getcolors(1 << 24)}
    assert colors >= {(0xD8, 0xF0, 0xD8), (0xF6, 0xDC, 0xDC), (0, 0, 0), (255, 255, 255)}


def test_curves_are_drawn_a_panel_a_row_and_a_line_a_run():
    records = [
        *(
            made_record(90.0, row=ROW, column="published", seed=i) | {"test_accuracy_per_epoch": [80, i]}
            for i in (0, 1)
        ),
        made_record(60.0, row="cifar_mlcn2_4x4", column="tuned", seed=0) | {"test_accuracy_per_epoch": [50.0]},
        made_record(row="cifar_mlcn1_4x4", column="tuned", seed=0),
    ]
    cifar, fashion = table_4_1.draw_curves(records).axes
    assert [line.get_ydata().tolist() for line in fashion.lines[:2]] == [[80, 0], [80, 1]]
    assert [line.get_label() for line in cifar.lines] == ["tuned", "thesis, after 20"]


def test_the_caption_says_how_many_images_are_held_out_and_in_which_runs():
    records = [made_record(90.0, row=ROW, seed=seed) for seed in range(3)]
    records.append(made_record(70.0, data_name="cifar10", copy="JPEG copy", row=ROW, seed=0))

    def told(counts):
        held_out = dict(zip(map(id, records), counts, strict=True))
        series = SimpleNamespace(scale=table_4_1.SCALES["full"], held_out=lambda record: held_out[id(record)])
        return repeated_report.caption(series, records)[1:3]

    fashion, cifar = "fashion_mnist: 6 of 60 train and 1 of 10 test images", "cifar10 (JPEG copy): 6 of 60 train and "
    assert told([0, 0, 0, 0]) == [f"{fashion}.", f"{cifar}1 of 10 test images."]
    everywhere, some = told([1, 1, 1, 0]), told([0, 2, 2, 0])
    assert everywhere[0] == f"{fashion}; 1 of the train images are held out for validation."
    assert some[0] == f"{fashion}; in 2 of 3 runs, 2 of the train images are held out for validation."
    assert everywhere[1] == some[1] == f"{cifar}1 of 10 test images."


def test_batch_sizes_are_told_relative_to_100():
    made = (("fashion_capsnet", 100, 90.0), ("fashion_capsnet", 600, 88.0), (ROW, 300, 90.0))
    records = [made_record(a, row=row, batch_size=size, seed=0) for row, size, a in made]
    rates = {"fashion_capsnet": {"100": [100.0, 50.0, 100.0], "600": [200.0, 150.0, 250.0]}, ROW: {"300": [7.0]}}
    speeds = {row: {"images_per_second": found} for row, found in rates.items()}
    points = {(p["row"], p["batch_size"]): p for p in batch_size.summarise(records, speeds)}
    assert points["fashion_capsnet", 600]["accuracy_difference"] == pytest.approx(-2.0)
    assert points["fashion_capsnet", 600]["speedup"] == pytest.approx((2.5, 2.0, 3.0))
    assert points[ROW, 300]["images_per_second"] == 7.0
    assert points[ROW, 300]["speedup"] is None
    assert "| 600 | 88.00, 1 run | -2.00 | 200 | 2.50 (2.00 to 3.00) |" in batch_size.text(records, speeds)


def test_results_are_not_replaced_by_fewer(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(repeated_report, "RESULTS", tmp_path / "results")

    def write(*seeds, accuracy=90.0):
        records = [made_record(accuracy, row=ROW, seed=seed) | {"config": {}} for seed in seeds]
        scale = table_4_1.SCALES["full"]
        series = SimpleNamespace(records=lambda: records, scale=scale, workdir=tmp_path / "runs", marker={"version": 1})
        repeated_report.write(series, "name", {}, "text", [], Figure())
        return [
            {
                run["facts"]["seed"]: run["test_accuracy"]
                for run in read_json(tmp_path / folder / "name_full.json")["runs"]
            }
            for folder in ("runs", "results")
        ]

    assert write(0, 1) == [{0: 90.0, 1: 90.0}] * 2
    assert write(0, 1, 2, accuracy=91.0) == [{0: 91.0, 1: 91.0, 2: 91.0}] * 2
    assert not caplog.messages
    assert write(0, 2, 3) == [{0: 90.0, 2: 90.0, 3: 90.0}, {0: 91.0, 1: 91.0, 2: 91.0}]
    assert "name_full.json stays as it is. It has runs of another version" in caplog.text
    assert "'seed': 1}. These results are in" in caplog.text
