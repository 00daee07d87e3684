// Draws explorer.html. What is chosen (`at`) stands in the address and changes by a click; what is
// pointed at (`near`) shows as long as it is. All are numbers from 0, in the address from 1.
"use strict";
const $ = (id) => document.getElementById(id);
const PAGES = JSON.parse($("data").textContent);
const range = (n) => [...Array(n).keys()];
let run, at, near = {}, drawn = {};

// h`<b>${text}</b>`: HTML, in which what is put is text unless it is HTML itself
class Markup extends String {}
function safe(value) {
  if (Array.isArray(value)) return value.map(safe).join("");
  if (value instanceof Markup) return value;
  return String(value).replace(/[&<>"']/g, (sign) => `&#${sign.charCodeAt(0)};`);
}
const h = (parts, ...values) => new Markup(String.raw({ raw: parts }, ...values.map(safe)));

function put(id, title, note, body) {
  $(id).innerHTML = h`<h2>${title}</h2><p class="note">${note}</p>${body}`;
}
function svg(width, height, inside, label) {
  return h`<svg width="${width}" height="${height}" role="img" aria-label="${label}">${inside}</svg>`;
}
const room = (id) => Math.max(240, Math.min(560, Math.floor($(id).clientWidth)));

// ---- what is chosen, and where it stands

const sequence = () => run.sequences[at.sequence];
const look = () => (run.looked === run.steps.length ? at.moment : 0);
const isLast = () => at.moment === run.steps.length - 1;
const chain = (token) => Math.max(0, sequence().chains[token]);
const when = () => ` after ${run.steps[at.moment]} steps`;
const seen = () => (run.looked === run.steps.length ? when() : ` at the end, after ${run.steps.at(-1)} steps`);
const headName = (layer, head) => `layer ${layer + 1}${run.heads > 1 ? `, head ${head + 1}` : ""}`;
const who = (token) => {
  const one = sequence();
  return `${one.names[token]} (${one.chains[token] < 0 ? "nobody's" : run.task.roles[token]})`;
};
const inHead = () => run.paths.flatMap((path, number) =>
  path.layer === at.layer && path.head === at.head ? sequence().ends[number].filter(Boolean) : []);

function attention(layer, head) { // whole percent, a row of T for each attending token
  run.bytes ??= Uint8Array.from(atob(run.maps), (sign) => sign.charCodeAt(0));
  const size = run.task.T ** 2, before = look() * run.sequences.length + at.sequence;
  const start = ((before * run.layers + layer) * run.heads + head) * size;
  return run.bytes.subarray(start, start + size);
}

function counts() {
  return { sequence: run.sequences.length, moment: run.steps.length, layer: run.layers,
    head: run.heads, token: run.task.T, path: run.paths.length };
}
function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  const number = PAGES[given.get("run") - 1] ? given.get("run") - 1 : 0;
  run = PAGES[number];
  at = { run: number, sequence: 0, moment: run.steps.length - 1, ...run.first };
  for (const [name, count] of Object.entries(counts())) {
    const number = Number(given.get(name));
    if (Number.isInteger(number) && number >= 1 && number <= count) at[name] = number - 1;
  }
}
function writeAddress() {
  const told = new URLSearchParams();
  for (const name of ["run", ...Object.keys(counts())]) told.set(name, at[name] + 1);
  history.replaceState(null, "", `#${told}`);
}
function choosePath(number) {
  const path = run.paths[number], ends = sequence().ends[number][chain(at.token)];
  Object.assign(at, { path: number, layer: path.layer, head: path.head });
  if (ends) at.token = ends[0];
}

// ---- the controls, and what is said of a run

function drawControls() {
  const useful = new Set(run.paths.map((path) => path.layer * run.heads + path.head));
  const heads = range(run.layers * run.heads).map((one) => {
    const name = headName(Math.floor(one / run.heads), one % run.heads);
    return h`<option value="${one}">${name}${useful.has(one) ? " •" : ""}`;
  });
  const option = (name, value) => h`<option value="${value}">${name}`;
  const select = (name, options) =>
    options.length > 1 ? h`<label>${name} <select data-choose="${name}">${options}</select></label>` : "";
  const slider = h`<label>step <input type="range" data-choose="moment" min="0"
    max="${run.steps.length - 1}"><output></output></label>`;
  $("controls").innerHTML = h`${select("run", PAGES.map((page, n) => option(page.name, n)))}
    ${select("sequence", range(run.sequences.length).map((n) => option(n + 1, n)))}
    ${run.steps.length > 1 ? slider : ""}${select("head", heads)}`;
  const { said, legend, settings, made } = run.about;
  document.title = `Inside ${run.name}`;
  $("title").textContent = `Inside ${run.name}`;
  $("said").textContent = said;
  $("legend").innerHTML = h`<ul>${legend.map((line) => h`<li>${line}`)}</ul>`;
  $("made").innerHTML = h`<summary>Settings, and how this page was made</summary>
    <p>${settings}</p><p>${made}</p>`;
}
function showChosen() {
  for (const one of document.querySelectorAll("[data-choose]")) {
    const { choose } = one.dataset;
    one.value = choose === "head" ? at.layer * run.heads + at.head : at[choose];
    if (choose === "moment") one.nextElementSibling.value = run.steps[at.moment];
  }
}

// ---- question and answer

function drawAnswer(token, number) {
  const title = "Question and answer";
  if (run.missing.answer) return put("answer", title, run.missing.answer, "");
  const mine = chain(token), asks = sequence().names[sequence().queries[mine]];
  const should = run.right[at.sequence][mine].map(([name]) => name);
  const said = run.said[look()].map((each) => each[at.sequence][mine]);
  const names = (cells) => cells.map(([name]) => name.replace("~", "≈")).join(" ");
  const row = (label, cells) => h`<tr><th>${label}${cells.map(([name, error], k) => h`<td class="${
    name === should[k] ? "right" : "wrong"}"><b>${name.replace("~", "≈")}</b> ${error.toFixed(2)}`)}`;
  const without = run.paths.length ? row(`without ${run.paths[number].title}`, said[number + 1]) : "";
  put("answer", `Asked ${asks}, it should say ${should.join(" ")}, says ${names(said[0])}`,
    `${seen().trim()}; small: the squared error; ≈: near to no symbol of the sequence, least far from this one`,
    h`<div class="wide"><table><tr><th>${run.asked.map((name) => h`<th>${name}`)}
      <tr><th>should say${should.map((name) => h`<td><b>${name}</b>`)}${row("says", said[0])}${without}</table></div>`);
}

// ---- the tokens, and the attention of one head

function drawStrip() {
  const one = sequence();
  const tile = (token) => {
    const own = one.chains[token];
    return h`<button data-token="${token}"><i></i><b style="background:var(--c${own < 0 ? "none" : own % 6})"
      >${one.names[token]}</b><small>${own < 0 ? "–" : run.task.roles[token]}</small><i></i></button>`;
  };
  const slot = (start, size) => h`<span>${range(size).map((place) => tile(start + place))}</span>`;
  const blocks = run.blocks.map(([start, size, slots]) =>
    h`<div>${range(slots).map((number) => slot(start + size * number, size))}</div>`);
  put("strip", "", "bars above: how much it attends to each token; bars below: how much each attends to it; "
    + "red: a path of the circuit; point at a token, click to keep it", h`<div class="strip">${blocks}</div>`);
}
function pointStrip(token) {
  const { T } = run.task, given = run.maps && attention(at.layer, at.head), joined = inHead();
  $("strip").querySelector("h2").textContent =
    `${who(token)} in ${headName(at.layer, at.head)}${seen()}`;
  for (const tile of $("strip").querySelectorAll("button")) {
    const other = Number(tile.dataset.token);
    if (given) {
      tile.style.setProperty("--up", given[token * T + other] / 100);
      tile.style.setProperty("--down", given[other * T + token] / 100);
    }
    tile.classList.toggle("chosen", other === token);
    tile.classList.toggle("to", joined.some(([source, target]) => source === token && target === other));
    tile.classList.toggle("from", joined.some(([source, target]) => target === token && source === other));
  }
}

function drawHeads() {
  if (run.missing.map) return put("heads", "All heads", run.missing.map, "");
  const { T } = run.task, useful = (l, k) => run.paths.some((path) => path.layer === l && path.head === k);
  const one = (number) => {
    const layer = Math.floor(number / run.heads), head = number % run.heads;
    return h`<button data-layer="${layer}" data-head="${head}" class="${useful(layer, head) ? "useful" : ""}"
      aria-label="${headName(layer, head)}"><canvas width="${T}" height="${T}"></canvas>
      ${layer + 1}${run.heads > 1 ? `.${head + 1}` : ""}</button>`;
  };
  put("heads", `All heads${seen()}`, `layer${run.heads > 1 ? ".head" : ""}; red: it has a path of the circuit`,
    h`<div class="heads">${range(run.layers * run.heads).map(one)}</div>`);
  for (const button of $("heads").querySelectorAll("button")) {
    const pixels = new ImageData(T, T);
    attention(Number(button.dataset.layer), Number(button.dataset.head)).forEach((percent, cell) =>
      pixels.data.set([31, 119, 180, 2.55 * percent], 4 * cell));
    button.querySelector("canvas").getContext("2d").putImageData(pixels, 0, 0);
  }
}

function drawMap() {
  if (run.missing.map) return put("map", "Attention map", run.missing.map, "");
  const { T } = run.task, edge = 44, size = room("map") - edge - 2, cell = size / T, one = sequence();
  const given = attention(at.layer, at.head), cells = [], sides = [], rect = (x, y, w, k, more) =>
    h`<rect x="${x.toFixed(1)}" y="${y.toFixed(1)}" width="${w.toFixed(1)}" height="${k.toFixed(1)}" ${more}/>`;
  given.forEach((percent, number) => {
    if (!percent) return;
    const token = Math.floor(number / T), other = number % T;
    cells.push(rect(edge + other * cell, edge + token * cell, cell, cell, h`class="cell" opacity="${
      percent / 100}" data-token="${token}" data-say="${who(token)} attends to ${who(other)}: ${percent / 100}"`));
  });
  for (const token of range(T)) {
    const middle = edge + (token + 0.5) * cell, own = one.chains[token];
    const fill = h`style="fill:var(--c${own < 0 ? "none" : own % 6})" data-token="${token}"`;
    sides.push(rect(18, middle - cell / 2, 24, cell, fill), rect(middle - cell / 2, 18, cell, 24, fill));
    if (cell > 9) sides.push(h`<text class="name" x="30" y="${middle}">${one.names[token]}</text><text
      class="name" transform="translate(${middle} 30) rotate(-90)">${one.names[token]}</text>`);
  }
  for (const [start, width, slots] of run.blocks) {
    const far = edge + start * cell, middle = far + (width * slots * cell) / 2;
    const roles = run.task.roles.slice(start, start + width).join(" ");
    sides.push(h`<text x="${middle}" y="8">${roles}</text><text transform="translate(8 ${middle}) rotate(-90)"
      >${roles}</text><path class="block" d="M${far} ${edge}v${size}M${edge} ${far}h${size}"/>`);
  }
  const frames = inHead().map(([token, other]) =>
    rect(edge + other * cell, edge + token * cell, cell, cell, h`class="frame"`));
  put("map", `Attention of ${headName(at.layer, at.head)}${seen()}`,
    "a row for each attending token, the attended ones across; red: a path of the circuit",
    h`<p class="say">Point at a cell.</p>${svg(edge + size + 2, edge + size + 2,
      h`<g id="field">${cells}</g>${sides}${frames}${rect(edge, edge, size, cell, h`id="row" class="row"`)}`, "attention map")}`);
}

// ---- the circuit

function drawCircuit() {
  if (run.missing.circuit) return put("circuit", "The circuit", run.missing.circuit, "");
  const levels = [...new Set(run.paths.map((path) => path.layer))].sort((a, b) => a - b);
  const width = room("circuit"), left = 76, rise = 58, bottom = rise * levels.length + 16;
  const x = (column) => left + (column * (width - left - 22)) / Math.max(1, run.places.length - 1);
  const y = (level) => bottom - rise * level;
  const columns = run.places.map(([role, below], column) => h`<path class="block" d="M${x(column)} ${y(0)}V${
    y(levels.length)}"/><text x="${x(column)}" y="${bottom + 16}"><tspan class="role">${role}</tspan><tspan
    x="${x(column)}" dy="14">${below}</tspan></text>`);
  const names = ["input", ...levels.map((layer) => `layer ${layer + 1}`)].map((name, level) =>
    h`<text class="left" x="0" y="${y(level)}">${name}</text>${run.places.map((_, column) =>
      h`<circle cx="${x(column)}" cy="${y(level)}" r="3.5"/>`)}`);
  const lines = [], texts = [];
  run.paths.forEach((path, number) => {
    const before = run.paths.slice(0, number), level = levels.indexOf(path.layer), share = path.attention[at.moment];
    const same = before.filter((other) => other.layer === path.layer && other.source === path.source);
    const aside = 9 * same.filter((other) => other.target === path.target).length;
    const [x0, y0, x1, y1] = [x(path.target) + aside, y(level) - 4, x(path.source) + aside, y(level + 1) + 5];
    const up = 0.55 - 0.2 * (same.length % 3);
    lines.push(h`<g data-path="${number}"><line class="halo" x1="${x0}" y1="${y0}" x2="${x1}" y2="${y1}"/><line
      class="arrow" x1="${x0}" y1="${y0}" x2="${x1}" y2="${y1}" opacity="${Math.max(0.12, share)}"/></g>`);
    texts.push(h`<text class="share" x="${x0 + up * (x1 - x0)}" y="${y0 + up * (y1 - y0)}">${
      run.heads > 1 ? `${path.head + 1}: ` : ""}${share.toFixed(2)}</text>`);
  });
  const tip = h`<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="9" markerHeight="9"
    markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0 8 4 0 8z"/></marker>`;
  const list = run.paths.map((path, number) => h`<button data-path="${number}">${path.title}${
    path.brings.length ? `, brings ${path.brings.join(" ")}` : ""}</button>`);
  put("circuit", `The circuit${when()}`,
    `arrows run as symbols do, upward from the token attended to; the number: the mean attention${
      run.heads > 1 ? " of the head before it" : ""}; point at a path, click to keep it`,
    h`${svg(width, bottom + 38, h`${tip}${columns}${names}${lines}${texts}`, "circuit")}<div class="paths">${list}</div>`);
}

function drawPath(number) {
  if (!run.paths.length) return put("path", "A path", run.missing.history, "");
  const path = run.paths[number], kinds = [path.carried, path.alone, path.everywhere];
  const bar = (value) => h`<td><span class="bar" style="--share:${Math.max(0, Math.min(1, value / 2))}"></span>${
    value.toFixed(2)}${value > 2 ? " ▸" : ""}`;
  const rows = run.symbols.map((name, k) => h`<tr><th>${name}${kinds.map((kind) => bar(kind.partial[k]))}`);
  const interval = ({ mse, low, high }) => h`<td>${mse.toFixed(2)} <small>[${low.toFixed(2)}, ${high.toFixed(2)}]</small>`;
  put("path", path.title, h`${path.brings.length ? `Its source then holds ${path.brings.join(" and ")}, which it did not. ` : ""
    }${path.destroys.length ? `Where no head has this path, ${path.destroys.join(" ")} ${
      path.destroys.length > 1 ? "are" : "is"} lost. ` : ""}Below: by how much the squared error rises, at the end; a bar is
    full at 2, what any wrong symbol costs (▸: more).`,
    h`<div class="wide"><table><tr><th>if<th>another chain's value is read<th>this head does not attend there<th
      >no head does<tr><th>all${kinds.map(interval)}${rows}</table></div>`);
  $("path").classList.toggle("old", !isLast());
}

// ---- over training

function chart(label, steps, curves, band = "") {
  const width = Math.min(400, room("history")), height = 130, left = 34, last = Math.max(1, steps.at(-1));
  const most = Math.max(1, ...curves.flatMap(({ values }) => values));
  const x = (step) => left + (step / last) * (width - left - 14);
  const y = (value) => height - 20 - (Math.max(0, value) / most) * (height - 30);
  const points = (values) => values.map((value, n) => `${x(steps[n]).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
  const grid = [0, most / 2, most].map((value) => h`<path class="block" d="M${left} ${y(value)}H${width - 14}"/><text
    class="right" x="${left - 4}" y="${y(value)}">${value.toFixed(1)}</text>`);
  const ticks = [0, last / 2, last].map((step) => h`<text x="${x(step)}" y="${height - 7}">${Math.round(step)}</text>`);
  const area = band && h`<polygon class="band" points="${points(band[0])} ${
    band[1].map((value, n) => `${x(steps[n])},${y(value)}`).reverse().join(" ")}"/>`;
  const drawnLines = curves.map(({ name, values }) =>
    h`<polyline class="curve" style="${ink(name)}" points="${points(values)}"/>`);
  const now = x(run.steps[at.moment]);
  return h`<p class="note">${label}</p>${svg(width, height,
    h`${grid}${ticks}${area}${drawnLines}<path class="now" d="M${now} 6V${height - 20}"/>`, label)}`;
}
const ink = (name) => `--light:${run.colors[name][0]};--dark:${run.colors[name][1]}`;
const key = (names) => h`<p class="key">${names.map((name) => h`<span style="${ink(name)}"><i></i>${name}</span>`)}</p>`;

function drawHistory(number) {
  const { step, ...losses } = run.losses, path = run.paths[number], parts = [];
  const curves = (values) => Object.entries(values).map(([name, own]) => ({ name, values: own }));
  if (path?.history) {
    const { mean, low, high, hits, without } = path.history, { steps, n } = run.emerged;
    parts.push(h`<div>${key(["mean attention", "share"])}${chart(`${path.title} (${n} sequences; band: 10% to 90% of them; share of
      tokens of which this is the largest attention)`, steps, curves({ "mean attention": mean, share: hits }), [low, high])}</div>`,
      h`<div>${key(run.symbols)}${chart("Without it: rise of each symbol's error", steps, curves(without))}</div>`);
  } else parts.push(h`<p class="note">${run.missing.history ?? "emergence.json does not know this path."}</p>`);
  parts.push(h`<div>${key(run.symbols)}${chart(`Error of each symbol (MSE). ${run.plateaus.join("; ")}`, step, curves(losses))}</div>`);
  put("history", "Over training", `by training step; red: the step that is chosen, ${run.steps[at.moment]}`,
    h`<div class="columns">${parts}</div>`);
}

// ---- what can be read where

function drawInformation() {
  const title = `What can be read where${seen()}`;
  if (run.missing.information) return put("information", "What can be read where", run.missing.information, "");
  const scores = run.information[look()], tall = run.layers > 16 ? 11 : 14, K = run.task.letters.length, wide = 14;
  const useful = new Set(run.paths.map((path) => path.layer + 1)), letter = (k) => run.task.letters[k];
  const y = (level) => (run.layers - level) * tall + 2, height = (run.layers + 1) * tall + 18;
  const panel = (role) => {
    const labels = range(run.layers + 1).map((level) => h`<text class="right${useful.has(level) ? " red" : ""}" x="22"
      y="${y(level) + tall / 2}">${level || "in"}</text>`);
    const cells = range((run.layers + 1) * K).map((number) => {
      const level = Math.floor(number / K), k = number % K, score = scores[level][role][k] / 100;
      return h`<rect class="cell" x="${26 + wide * k}" y="${y(level)}" width="${wide}" height="${tall}" opacity="${
        Math.max(0.02, score)}" data-layer="${Math.max(0, level - 1)}" data-say="${letter(k)} at ${run.task.names[role]} ${
        level ? `after layer ${level}` : "before any layer"}: R² ${score.toFixed(2)}"/>`;
    });
    const below = range(K).map((k) => h`<text x="${26 + wide * (k + 0.5)}" y="${height - 7}">${letter(k)}</text>`);
    return h`<figure><figcaption>${run.task.names[role]}</figcaption>${svg(28 + wide * K, height,
      h`${labels}${cells}${below}<rect class="row" data-frame x="26" width="${wide * K}" height="${tall}"/>`, "information")}</figure>`;
  };
  put("information", title, "at each role (above), layer by layer, of each symbol of its chain (below): the bluer, the better "
    + "least squares read it from the residual stream of held-out sequences; red: layers with a path; click to choose a layer",
    h`<p class="say">Point at a cell.</p><div class="panels">${run.reading.map(panel)}</div>`);
}

// ---- all of it

const VIEWS = [[drawStrip, "sequence"], [drawHeads, "sequence", "moment"], [drawCircuit, "moment"],
  [drawMap, "sequence", "moment", "layer", "head"], [drawInformation, "moment"]];

function draw() {
  for (const [view, ...needs] of VIEWS) if (needs.some((name) => at[name] !== drawn[name])) view();
  drawn = { ...at };
  for (const id of ["answer", "strip", "heads", "map", "information"])
    $(id).classList.toggle("old", run.looked === 1 && !isLast());
  showChosen();
  point();
  writeAddress();
}
function point() {
  const token = near.token ?? at.token, path = near.path ?? at.path;
  drawAnswer(token, path);
  pointStrip(token);
  drawPath(path);
  drawHistory(path);
  for (const one of document.querySelectorAll("[data-path]"))
    one.classList.toggle("chosen", Number(one.dataset.path) === path);
  for (const one of $("heads").querySelectorAll("button")) {
    const { layer, head } = one.dataset;
    one.classList.toggle("chosen", Number(layer) === at.layer && Number(head) === at.head);
  }
  const frame = $("row"), tall = frame?.height.baseVal.value;
  frame?.setAttribute("y", 44 + tall * token);
  for (const one of document.querySelectorAll("[data-frame]"))
    one.setAttribute("y", (run.layers - at.layer - 1) * one.height.baseVal.value + 2);
}
function begin() {
  readAddress();
  drawn = {};
  drawControls();
  draw();
}

function pointedAt({ target, type }) {
  const { token, path, say } = target.closest?.("[data-token], [data-path], [data-say]")?.dataset ?? {};
  const number = (text) => (type === "pointerout" || text === undefined ? undefined : Number(text));
  const before = near;
  near = { token: number(token), path: number(path) };
  if (say) target.closest("section").querySelector(".say").textContent = say;
  if (near.token !== before.token || near.path !== before.path) point();
}
for (const kind of ["pointerover", "pointerout", "focusin"]) document.addEventListener(kind, pointedAt);
document.addEventListener("click", ({ target }) => {
  const chosen = target.closest("[data-token], [data-path], [data-layer]")?.dataset;
  if (!chosen) return;
  if (chosen.path) choosePath(Number(chosen.path));
  if (chosen.token) at.token = Number(chosen.token);
  if (chosen.layer) {
    at.layer = Number(chosen.layer);
    at.head = Number(chosen.head ?? run.paths.find((path) => path.layer === at.layer)?.head ?? 0);
  }
  draw();
});
document.addEventListener("input", ({ target }) => {
  const value = Number(target.value);
  if (target.dataset.choose === "run") {
    location.hash = `run=${value + 1}`;
    return;
  }
  if (target.dataset.choose === "head") {
    Object.assign(at, { layer: Math.floor(value / run.heads), head: value % run.heads });
  } else at[target.dataset.choose] = value;
  draw();
});
addEventListener("hashchange", begin);
addEventListener("resize", () => {
  drawn = {};
  draw();
});
begin();
