"""The lane explorer: what it answers, and the page in a real browser."""

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from conftest import REPOSITORY
from PIL import Image

from mlcn_jax.analysis import explain, explorer_page
from mlcn_jax.analysis.workdir import load_with_data, stored_config
from mlcn_jax.data import images
from mlcn_jax.data.batches import Split
from mlcn_jax.errors import InputError
from mlcn_jax.files import write_json
from mlcn_jax.nn import model
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.training.checkpoint import Checkpoints
from mlcn_jax.training.trained import Trained, describe_model

SPEC = ModelSpec("mlcn", (18, 18, 3), 3, "mlcn2:w1*3", decoder=(6,), conv="native")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
CHROMIUM_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--window-size=1400,1000"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


def random_params(spec):
    rng, shapes = np.random.default_rng(1), model.param_shapes(spec)
    return jax.tree.map(lambda leaf: rng.normal(0, 0.5, leaf.shape).astype(np.float32), shapes)


@pytest.fixture(scope="module")
def explorer():
    pixels = np.random.default_rng(0).integers(0, 256, (6, 18, 18, 3)).astype(np.uint8)
    test = Split(pixels, np.array([2, 0, 2, 2, 2, 2], np.int32))
    return explorer_page.Explorer(Trained(SPEC, ("a", "<b>", "c"), random_params(SPEC), 1), test)


def test_an_image_is_encoded_as_elsewhere(explorer):
    assert {k: list(indices) for k, indices in explorer.images_of_class.items()} == {0: [1], 2: [0, 2, 3, 4, 5]}
    look = explorer.look(explorer.images[4])
    v, predicted = explain.look(SPEC, explorer._params["encoder"], explorer.images[4:5])
    np.testing.assert_allclose(look.v, v, rtol=1e-6)
    np.testing.assert_allclose(look.lengths, np.linalg.norm(v[0], axis=-1), rtol=1e-6)
    assert look.predicted == predicted[0]


def test_a_move_runs_no_encoder_and_is_answered_within_100_ms(explorer, monkeypatch):
    look = explorer.look(explorer.images[0])
    before, reconstruction = explorer.respond(look, 1, [0, 1, 2], [0.0, 0.0, 0.0])
    np.testing.assert_allclose(before, look.lengths, rtol=1e-6)
    monkeypatch.setattr(explain, "look", None)
    moved, moved_reconstruction = explorer.respond(look, 1, [0, 1, 2], [0.0, 0.0, 0.25])
    assert moved[1] != before[1]
    assert moved[0] == before[0]
    assert np.abs(moved_reconstruction - reconstruction).max() > 1e-4
    off, off_reconstruction = explorer.respond(look, 1, [0, 1], [0.0, 0.0, 0.25])
    np.testing.assert_allclose(off, np.linalg.norm(look.v[0, :, :2], axis=-1), rtol=1e-6)
    assert np.abs(off_reconstruction - moved_reconstruction).max() > 1e-4
    seconds = []
    for place in range(20):
        start = time.perf_counter()
        lengths, pixels = explorer.respond(look, 1, [0, 2], [0.01 * place, 0.0, 0.0])
        explorer_page.picture_html(pixels, "")
        explorer_page.lengths_html(explorer.class_names, lengths, before, 1.0)
        seconds.append(time.perf_counter() - start)
    assert np.median(seconds) < 0.1


def test_class_names_are_shown_as_text(explorer):
    lengths = np.array([0.1, 0.5, 0.2])
    shown = explorer_page.lengths_html(explorer.class_names, lengths, lengths, 1.0)
    assert "&lt;b&gt;" in shown
    assert "<b>" not in shown
    assert "<b>" not in explorer_page.picture_html(np.zeros((2, 2, 1), np.uint8), "<b>")
    many = explorer_page.lengths_html([f"class {k}" for k in range(100)], np.arange(100) / 100, np.zeros(100), 1.0)
    assert many.count('class="row') == 20
    assert many.index("class 99") < many.index("class 98")


def test_a_bar_is_full_at_the_length_of_a_certain_class():
    shown = explorer_page.lengths_html(["a", "b"], np.array([1.0, 2.5]), np.array([0.5, 0.0]), 2.0)
    assert [float(width) for width in re.findall(r"(?:width|left):([\d.]+)%", shown)] == [50, 25, 100, 0]


def test_classes_may_have_one_test_image_or_none(explorer):
    pytest.importorskip("gradio")
    parts = [part["props"] for part in explorer_page.build(explorer).get_config_file()["components"]]
    [choices] = [part["choices"] for part in parts if part.get("label") == "Test images of class"]
    assert [name for name, _ in choices] == ["a", "c"]
    [capsules] = [part["choices"] for part in parts if part.get("label") == "Capsule of class"]
    assert [name for name, _ in capsules] == ["a", "<b>", "c"]


def test_a_port_in_use_is_told():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=rf"--port={port} cannot be used \(Address already in use\)"):
            explorer_page.listen(port)
    with pytest.raises(InputError, match="--port=70000 cannot be used"):
        explorer_page.listen(70000)


def test_gradio_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    with pytest.raises(InputError, match=r"pip install 'mlcn_jax\[explorer\]'"):
        explorer_page.check_gradio()


@pytest.fixture
def run(tmp_path, tiny):
    """A workdir with a model of random parameters."""
    dataset = tiny.data.load()
    spec = tiny.model_spec(dataset.test.images.shape[1:], len(dataset.class_names))
    write_json(tmp_path / "config.json", tiny.to_dict())
    write_json(tmp_path / "model.json", describe_model(spec, dataset.class_names, ""))
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(1, {"params": random_params(spec), "optimizer": {"count": np.zeros(1)}}, {})
    checkpoints.close()
    return tmp_path


@pytest.fixture
def url(run):
    """Where the command serves its page; at the end Ctrl-C must end it at once."""
    pytest.importorskip("gradio")
    command = [sys.executable, "-m", "mlcn_jax", "explore", f"--workdir={run}", "--port=0"]
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background job ignores it, and so would this
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    signal.signal(signal.SIGINT, before)
    line = process.stdout.readline()
    if not line:
        errors = process.communicate()[1]
        pytest.fail(f"it ended with exit code {process.returncode}: {errors}")
    yield line.split()[2]
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, f"exit code {process.returncode}: {errors}"
    assert errors.strip().endswith("interrupted")
    assert "Traceback" not in errors


@pytest.fixture
def browser():
    webdriver = pytest.importorskip("selenium.webdriver")
    driver = shutil.which("chromedriver")
    if CHROMIUM is None or driver is None:
        pytest.skip("no chromium with its driver on this machine")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in CHROMIUM_FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield browser
    browser.quit()


class Page:
    """What a person sees and does."""

    def __init__(self, browser, url):
        self.browser = browser
        browser.get(url)
        self.wait(self.lengths)

    def all(self, selector):
        return self.browser.find_elements("css selector", selector)

    def texts(self, selector):
        script = "return [...document.querySelectorAll(arguments[0])].map(element => element.textContent)"
        return self.browser.execute_script(script, selector)

    def wait(self, condition, seconds=60):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "what is expected does not come"
            time.sleep(0.02)

    def click(self, selector):
        self.wait(lambda: any(element.is_displayed() for element in self.all(selector)))
        next(element for element in self.all(selector) if element.is_displayed()).click()

    def drop(self, path):
        self.wait(lambda: self.all("input[type=file]"))
        self.all("input[type=file]")[0].send_keys(str(path))

    def lengths(self):
        return self.texts("#lengths .row > :last-child")

    def picture(self):
        return self.browser.execute_script("return document.querySelector('#picture img').src")

    def original(self):
        return self.texts("#original figcaption")[0]


def test_the_page_in_a_browser(run, browser, url, tmp_path):
    trained, dataset = load_with_data(run, stored_config(run))
    explorer = explorer_page.Explorer(trained, dataset.test)
    zeros = explorer.images_of_class[0]
    look = explorer.look(explorer.images[zeros[0]])

    def expected(*args):
        return [f"{length:.3f}" for length in explorer.respond(*args)[0]]

    page = Page(browser, url)
    assert page.lengths() == expected(look, look.predicted, [0, 1], [0, 0])
    picture = page.picture()
    page.all("input[type=range]")[2].send_keys("\ue014" * 25)  # the arrow to the right, on the slider of lane 1
    page.wait(lambda: page.lengths() == expected(look, look.predicted, [0, 1], [0, 0.25]))
    page.wait(lambda: page.picture() != picture)
    picture = page.picture()
    page.all("input[type=checkbox]")[1].click()  # lane 0; the first box is for all lanes
    page.wait(lambda: page.lengths() == expected(look, look.predicted, [1], [0, 0.25]))
    page.wait(lambda: page.picture() != picture)

    (tmp_path / "note.png").write_text("not an image")
    page.drop(tmp_path / "note.png")
    page.wait(lambda: "not an image" in page.texts("#notice")[0])
    assert page.original().startswith(f"test image {zeros[0]}: 0, predicted")
    page.click("button[aria-label=Clear]")
    Image.fromarray(dataset.test.images[5].squeeze()).resize((90, 60)).save(tmp_path / "own.png")
    page.drop(tmp_path / "own.png")
    own = explorer.look(images.read_pixels(tmp_path / "own.png", trained.spec.image_shape))
    page.wait(lambda: page.original() == f"your image, predicted {dataset.class_names[own.predicted]}")
    page.wait(lambda: page.lengths() == expected(own, own.predicted, [1], [0, 0.25]))
    assert not page.texts("#notice")[0].strip()
    page.click("#reset")
    page.wait(lambda: page.lengths() == expected(own, own.predicted, [0, 1], [0, 0]))

    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    assert len(asked) > 10
    assert [address for address in asked if not address.startswith((url, "data:", "blob:"))] == []
