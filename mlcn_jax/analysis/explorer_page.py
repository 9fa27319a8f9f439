"""The lane explorer's page and its local server."""

import base64
import dataclasses
import html
import io
import os
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from mlcn_jax.analysis import explain
from mlcn_jax.data import images
from mlcn_jax.data.batches import Split
from mlcn_jax.errors import InputError
from mlcn_jax.nn.model import class_lengths
from mlcn_jax.training.trained import Trained

if TYPE_CHECKING:
    import gradio


HOST = "127.0.0.1"
_RANGE = 0.5  # of a slider; figure 4.3 of the thesis moves lanes by half of it
_SHOWN_CLASSES = 20
_CSS = """
#seen { position: sticky; top: 0; align-self: flex-start; }
figure { margin: 0; }
figure img { image-rendering: pixelated; width: 100%; border: 1px solid #8888; }
#notice { color: #c0392b; }
#lengths .row { display: grid; grid-template-columns: 9em 1fr 3em; gap: 8px; line-height: 1.4; }
#lengths .track { background: #8882; position: relative; }
#lengths .bar { background: #8aa9c8; height: 100%; display: block; }
#lengths .longest .bar { background: #2f6fb0; }
#sliders { display: grid; grid-template-columns: repeat(auto-fill, minmax(220px, 1fr)); }
#lengths .before { position: absolute; top: 0; bottom: 0; width: 2px; background: #d9822b; }
"""


@dataclasses.dataclass(frozen=True)
class Look:
    """A chosen image and its encoding: everything needed to respond to a slider."""

    pixels: UInt8[np.ndarray, "h w channels"]
    v: Float[np.ndarray, "1 classes dim"]
    lengths: Float[np.ndarray, " classes"]
    predicted: int


class Explorer:
    """A trained model and its test images, which answers the page's requests.

    Attributes:
      columns: names of the lanes.
      images: the test images.
      images_of_class: for each class that has test images, their indices.
    """

    def __init__(self, trained: Trained, test: Split):
        self.spec, self.class_names = trained.spec, trained.class_names
        self.columns = explain.column_names(trained.spec)
        self.images = test.images
        self._params = trained.params
        places = [np.flatnonzero(test.labels == k) for k in range(len(self.class_names))]
        self.images_of_class = {k: indices for k, indices in enumerate(places) if len(indices)}

    def look(self, pixels: UInt8[np.ndarray, "h w channels"]) -> Look:
        """Encodes an image, once."""
        v = np.asarray(explain.look(self.spec, self._params["encoder"], pixels[None])[0])
        lengths = np.asarray(class_lengths(self.spec, v[0]))
        return Look(pixels, v, lengths, int(np.argmax(lengths)))

    def respond(
        self, look: Look, class_index: int, switched_on: Sequence[int], added: Sequence[float]
    ) -> tuple[Float[np.ndarray, " classes"], Float[np.ndarray, "h w channels"]]:
        """Class lengths, and the reconstruction from the given class's capsule.

        Args:
          switched_on: indices of the lanes whose columns are not zeroed.
          added: values added to each lane's entry of that capsule.
        """
        kept = np.isin(np.arange(len(self.columns)), switched_on).astype(np.float32)
        classes, added32 = np.array([class_index], np.int32), np.array(added, np.float32)
        found = explain.respond(self.spec, self._params["decoder"], look.v, classes, added32, kept)
        lengths, reconstructions = jax.device_get(found)
        return lengths[0], reconstructions[0]


def picture_html(pixels: np.ndarray, caption: str) -> str:
    """An image, uint8 or in [0, 1], embedded in the page, so that showing it takes no second request."""
    if pixels.dtype != np.uint8:
        pixels = np.round(255 * pixels).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels.squeeze()).save(file, "PNG")
    source = base64.b64encode(file.getvalue()).decode()
    caption = html.escape(caption)
    return f'<figure><img alt="" src="data:image/png;base64,{source}"><figcaption>{caption}</figcaption></figure>'


def lengths_html(class_names: Sequence[str], lengths: np.ndarray, before: np.ndarray, longest: float) -> str:
    """One bar per class, with a mark at its previous length; if there are many classes, only the longest.

    A bar is full at the length `longest`.
    """
    shares, marks = (np.minimum(100, 100 * each / longest) for each in (lengths, before))
    shown = range(len(lengths)) if len(lengths) <= _SHOWN_CLASSES else np.argsort(-lengths)[:_SHOWN_CLASSES]
    rows = [
        f'<div class="row {"longest" if k == np.argmax(lengths) else ""}"><span>{html.escape(class_names[k])}</span>'
        f'<span class="track"><span class="bar" style="width:{shares[k]:.1f}%"></span>'
        f'<span class="before" style="left:{marks[k]:.1f}%"></span></span>'
        f"<span>{lengths[k]:.3f}</span></div>"
        for k in shown
    ]
    return "".join(rows)


def check_gradio() -> None:
    """Raises InputError if Gradio is not installed; otherwise turns off its usage statistics."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    try:
        import gradio  # noqa: F401
    except ImportError as error:
        raise InputError(f"the lane explorer needs Gradio: pip install 'mlcn_jax[explorer]' ({error})") from error


def build(explorer: Explorer) -> "gradio.Blocks":
    """Builds the page: an image to choose or drop, a slider per lane, and the effect."""
    import gradio as gr

    names, columns, longest = explorer.class_names, explorer.columns, explorer.spec.certain_length
    kind = columns[0].split()[0]

    def show(look: Look, class_index: int, switched_on: list[int], *added: float) -> tuple[str, str]:
        lengths, reconstruction = explorer.respond(look, class_index, switched_on, added)
        caption = f"reconstruction from {names[class_index]}"
        return picture_html(reconstruction, caption), lengths_html(names, lengths, look.lengths, longest)

    def start(look: Look, caption: str, *rest) -> tuple:
        original = picture_html(look.pixels, f"{caption}, predicted {names[look.predicted]}")
        return "", look, original, names[look.predicted], *show(look, look.predicted, *rest)

    def last_place(class_index: int) -> int:  # a slider needs two places
        return max(len(explorer.images_of_class[class_index]) - 1, 1)

    def choose_place(class_index: int, place: int, *rest) -> tuple:
        indices = explorer.images_of_class[class_index]
        index = indices[min(int(place), len(indices) - 1)]
        return start(explorer.look(explorer.images[index]), f"test image {index}: {names[class_index]}", *rest)

    def choose_class(class_index: int, *rest) -> tuple:
        return gr.Slider(maximum=last_place(class_index), value=0), *choose_place(class_index, 0, *rest)

    def drop(file: bytes | None, *rest) -> tuple:
        if file is None:
            return (gr.skip(),) * 6
        try:
            pixels = images.read_pixels(file, explorer.spec.image_shape)
        except InputError as error:
            return html.escape(f"this file cannot be used: {error}"), *(gr.skip(),) * 5
        return start(explorer.look(pixels), "your image", *rest)

    first_class = next(iter(explorer.images_of_class))
    everything, nothing = range(len(columns)), [0.0] * len(columns)
    _, look, *first = choose_place(first_class, 0, everything, *nothing)
    model = explorer.spec.lanes or "CapsNet"
    with gr.Blocks(title="Lane explorer", analytics_enabled=False, delete_cache=(600, 600), fill_width=True) as page:
        state = gr.State(look)
        gr.Markdown(
            f"# What each {kind} encodes\n{model}, {len(explorer.images):,} test images of {len(names)} classes.\n\n"
            f"Choose a test image or drop one of your own. Move a slider to change that {kind}'s entry of the chosen "
            f"class, or switch {kind}s off: the reconstruction and the class lengths are updated. The longest "
            "class capsule is the predicted class."
        )
        with gr.Row():
            with gr.Column(scale=2, min_width=520, elem_id="seen"):
                with gr.Row():
                    choices = [(names[k], k) for k in explorer.images_of_class]
                    test_class = gr.Dropdown(choices, value=first_class, label="Test images of class")
                    place = gr.Slider(0, last_place(first_class), value=0, step=1, label="Which of them", buttons=[])
                own = gr.File(label="Or drop an image of your own", type="binary", height=110)
                notice = gr.HTML(elem_id="notice")
                with gr.Row():
                    original = gr.HTML(first[0], elem_id="original")
                    picture = gr.HTML(first[2], elem_id="picture")
                gr.Markdown("Class lengths; the marks show them with nothing changed:")
                lengths = gr.HTML(first[3], elem_id="lengths")
            with gr.Column(scale=3, min_width=520):
                with gr.Row():
                    capsule = gr.Dropdown(list(names), value=first[1], type="index", label="Capsule of class")
                    reset = gr.Button("Reset all", elem_id="reset")
                switched_on = gr.CheckboxGroup(
                    columns,
                    value=columns,
                    type="index",
                    show_select_all=True,
                    label=f"{kind.capitalize()}s that are on",
                )
                gr.Markdown(f"Added to each {kind}'s entry of that capsule:")
                with gr.Row(elem_id="sliders"):
                    sliders = [
                        gr.Slider(-_RANGE, _RANGE, value=0, step=0.01, label=name, min_width=220) for name in columns
                    ]

        # For fast responses: no queue, and only the last of the slider moves that arrive in the meantime.
        quick: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
        latest = {"trigger_mode": "always_last", **quick}
        changes: list = [switched_on, *sliders]
        shown = [picture, lengths]
        started = [notice, state, original, capsule, *shown]
        test_class.input(choose_class, [test_class, *changes], [place, *started], **quick)
        place.input(choose_place, [test_class, place, *changes], started, **latest)
        own.change(drop, [own, *changes], started, **quick)
        moves = [capsule.input, *(control.change for control in changes)]
        gr.on(moves, show, [state, capsule, *changes], shown, **latest)
        reset.click(lambda: [columns, *nothing], None, changes, **quick)
    return page


def listen(port: int) -> socket.socket:
    """A socket that only this machine can reach; port 0 picks a free one.

    Raises:
      InputError: the port is in use, or invalid.
    """
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
        listener.listen()
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"--port={port} cannot be used ({reason}): give another, or 0 for any that is free") from error
    return listener


def serve(page: "gradio.Blocks", listener: socket.socket) -> None:
    """Prints the address of the page and serves it until Ctrl-C; nothing is shared or sent anywhere."""
    import fastapi
    import gradio as gr
    import uvicorn

    port = listener.getsockname()[1]

    class Server(uvicorn.Server):
        async def startup(self, sockets=None):
            await super().startup(sockets)
            print(f"lane explorer: http://{HOST}:{port}  (Ctrl-C to stop)", flush=True)

    app = gr.mount_gradio_app(
        fastapi.FastAPI(),
        page,
        path="/",
        server_name=HOST,
        server_port=port,
        footer_links=[],
        run_history=False,
        max_file_size=images.MAX_FILE_BYTES,
        ssr_mode=False,
        css=_CSS,
    )
    # An open page keeps a connection, and uvicorn would report its end as an error.
    config = uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1)
    Server(config).run(sockets=[listener])
