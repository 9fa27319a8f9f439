"""The page at `/` of a gateway: answers arrive and improve, tiers can be stopped. A single file that loads no other."""

from mlcn_jax.serving.page import headers

_STYLE = """
body { font: 1rem/1.5 sans-serif; margin: 2rem auto; max-width: 52rem; padding: 0 1rem; }
img { display: block; image-rendering: pixelated; margin: 1rem 0; min-height: 8rem; max-height: 14rem; }
table { border-collapse: collapse; }
td, th { padding: .2rem 1rem .2rem 0; text-align: left; }
td.number { font-variant-numeric: tabular-nums; text-align: right; }
tr.final { font-weight: bold; }
progress { width: 12rem; }
.off { color: #a40000; }
"""

# Names and messages are inserted as text, never as markup.
_SCRIPT = """
const [file, picture, rows, tiers, message, again, deadline] =
  ["file", "picture", "rows", "tiers", "message", "again", "deadline"].map(id => document.getElementById(id));
const shown = new Map();
let last = 0, mayStop = false, unreachable = false;
const cell = (row, text, kind) => {
  const c = row.insertCell();
  c.textContent = text;
  c.className = kind || "";
  return c;
};
const read = async r => {
  const found = await r.json();
  if (!r.ok) throw new Error(found.error);
  return found;
};
const tell = error => { message.textContent = error.message; };
function rowOf(s) {
  const row = tiers.insertRow(), button = document.createElement("button");
  cell(row, s.name);
  cell(row, s.lanes.join(", "));
  const cells = ["", "number", "number"].map(kind => cell(row, "", kind));
  button.addEventListener("click", () => fetch("tiers/" + s.name, {method: "POST", body: button.dataset.stops,
    headers: {"Content-Type": "application/json"}}).then(read).then(showTiers).catch(tell));
  if ("available" in s && mayStop) row.insertCell().append(button);
  return [...cells, button];
}
function showTiers(states) {
  for (const s of states) {
    if (!shown.has(s.name)) shown.set(s.name, rowOf(s));
    const [state, answers, sent, button] = shown.get(s.name), remote = "available" in s;
    state.textContent =
      !remote ? "this device" : s.stopped ? "stopped" : s.available ? "in use" : "lost: " + s.trouble;
    state.className = remote && (s.stopped || !s.available) ? "off" : "";
    answers.textContent = remote ? s.answers : "";
    sent.textContent = remote ? (s.sent_bytes / 1024).toFixed(1) : "";
    button.textContent = s.stopped ? "Resume" : "Stop";
    button.dataset.stops = !s.stopped;
  }
  if (unreachable) message.textContent = "";
  unreachable = false;
}
function showAnswer(found) {
  const row = rows.insertRow();
  row.className = found.final ? "final" : "";
  cell(row, found.ms.toFixed(1), "number");
  cell(row, found.tier);
  cell(row, found.lanes.join(", "));
  cell(row, found.coarse ? found.coarse + " (group)" : found.class);
  const bar = document.createElement("progress");
  bar.value = found.probability;
  row.insertCell().append(bar);
  cell(row, (100 * found.probability).toFixed(1) + " %", "number");
  const lost = Object.entries(found.lost || {}).map(([name, why]) => name + ": " + why).join("; ");
  cell(row, found.final ? "final" + (lost ? "; without " + lost : "") : "");
}
async function classify() {
  const number = ++last, chosen = file.files[0];
  if (!chosen) return;
  rows.replaceChildren();
  message.textContent = "";
  URL.revokeObjectURL(picture.src);
  picture.src = URL.createObjectURL(chosen);
  picture.hidden = again.hidden = false;
  try {
    const given = deadline.value ? "?deadline_ms=" + encodeURIComponent(deadline.value) : "";
    const headers = {"Content-Type": "application/octet-stream"};
    const response = await fetch("refine" + given, {method: "POST", body: chosen, headers});
    if (!response.ok) await read(response);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (let part; !(part = await reader.read()).done;) {
      rest += part.value;
      const lines = rest.split("\\n");
      rest = lines.pop();
      if (number === last) lines.forEach(line => showAnswer(JSON.parse(line)));
    }
  } catch (error) {
    if (number === last) message.textContent = error.message;
  }
}
file.addEventListener("change", classify);
again.addEventListener("click", classify);
const missed = error => { unreachable = true; tell(error); };
const look = () => fetch("tiers").then(read).then(showTiers).catch(missed);
const start = () => fetch("./", {headers: {Accept: "application/json"}}).then(read).then(about => {
  mayStop = about.may_stop;
  deadline.placeholder = about.deadline_ms || "none";
  showTiers(about.tiers);
  setInterval(look, 1000);
}).catch(error => { missed(error); setTimeout(start, 1000); });
start();
"""

PAGE = f"""<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Answers that improve</title>
<style>{_STYLE}</style>
<h1>Answers that improve</h1>
<p><label>Picture: <input id="file" type="file" accept="image/*"></label>
<label>Deadline, ms: <input id="deadline" type="number" min="0" size="6" placeholder="none"></label>
<button id="again" hidden>Again</button></p>
<img id="picture" alt="the chosen picture" hidden>
<p id="message" role="alert"></p>
<table><thead><tr><th>ms</th><th>tier</th><th>lanes used</th><th>class</th><th></th><th>probability</th><th></th></tr>
</thead><tbody id="rows" aria-live="polite"></tbody></table>
<h2>Tiers</h2>
<table><thead><tr><th>tier</th><th>lanes</th><th>state</th><th>answers</th><th>KiB sent</th><th></th></tr></thead>
<tbody id="tiers"></tbody></table>
<script>{_SCRIPT}</script>
</html>
"""

HEADERS = headers(_SCRIPT, _STYLE)
