"""Records of repeated runs, made up instead of trained, and what is asked of a script."""

from experiments.repeated_runs import Request, Scale

ROW = "fashion_mlcn2_2x4"
PLACE = {"device": "machine", "platform": "cpu", "cpu_count": 2, "versions": {"jax": "1", "python": "3"}}

SMOKE = Scale("smoke", 1, 2, 600, 100)


def made_request(workdir, directories, scale=SMOKE, repeats=1, minutes=0.0):
    return Request(workdir, scale, repeats, minutes, directories, "python")


def made_record(accuracy=None, seconds=None, data_name="fashion_mnist", copy="", **facts):
    images = {"train_images": 6, "all_train_images": 60, "test_images": 1, "all_test_images": 10}
    record = {"facts": facts, "data": {"name": data_name, "copy": copy, **images}, **PLACE}
    record |= {"command": "python", "date": "2026-01-01"}
    if accuracy is None:
        return record | {"failed": "the loss is nan"}
    return record | {"test_accuracy": accuracy, "seconds_per_epoch": seconds, "parameters": 1_000_000}
