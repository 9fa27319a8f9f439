"""The page at `/` of the server: choose a picture, see its classes. A single file that loads nothing else."""

import base64
import hashlib

_STYLE = """
body { font: 1rem/1.5 sans-serif; margin: 2rem auto; max-width: 40rem; padding: 0 1rem; }
img { display: block; margin: 1rem 0; max-height: 16rem; max-width: 100%; }
td { padding-right: 1rem; }
progress { width: 14rem; }
"""

# Class names and messages are inserted as text, never as markup.
_SCRIPT = """
const SHOWN = 10;
const [file, picture, rows, message] = ["file", "picture", "rows", "message"].map(id => document.getElementById(id));
let last = 0;
file.addEventListener("change", async () => {
  const number = ++last, chosen = file.files[0];
  rows.replaceChildren();
  URL.revokeObjectURL(picture.src);
  picture.hidden = !chosen;
  message.textContent = chosen ? "Classifying ..." : "";
  if (!chosen) return;
  picture.src = URL.createObjectURL(chosen);
  try {
    const headers = {"Content-Type": "application/octet-stream"};
    const response = await fetch("predict?top=all", {method: "POST", body: chosen, headers});
    const answer = await response.json();
    if (number !== last) return;
    const found = (answer.predictions || [{}])[0];
    message.textContent = found.error || answer.error || "";
    for (const {class: name, probability} of (found.top || []).slice(0, SHOWN)) {
      const cells = rows.insertRow(), bar = document.createElement("progress");
      bar.value = probability;
      cells.insertCell().textContent = name;
      cells.insertCell().append(bar);
      cells.insertCell().textContent = (100 * probability).toFixed(1) + " %";
    }
  } catch (error) {
    if (number === last) message.textContent = "The server did not answer: " + error.message;
  }
});
"""

PAGE = f"""<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Image classifier</title>
<style>{_STYLE}</style>
<h1>Image classifier</h1>
<p><label>Picture: <input id="file" type="file" accept="image/*"></label></p>
<img id="picture" alt="the chosen picture" hidden>
<p id="message" role="status"></p>
<table id="rows"></table>
<p>Each class has a probability of its own, so they need not add up to 100 %.
For programs: <a href="openapi.json">openapi.json</a>.</p>
<script>{_SCRIPT}</script>
</html>
"""


def _digest(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def headers(script: str, style: str) -> dict[str, str]:
    """HTTP headers of a page that may run only this script and style, and connect only to its own server."""
    return {
        "Content-Security-Policy": f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}; "
        "img-src blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
    }


HEADERS = headers(_SCRIPT, _STYLE)
