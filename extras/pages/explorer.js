// Draws explorer.html. A click changes the selection (`at`); `near` is what the mouse points at.
// Both hold numbers from 0.
"use strict";
const $ = (id) => document.getElementById(id);
const PAGES = JSON.parse($("data").textContent);
const range = (n) => [...Array(n).keys()];
let run, at, near = {}, drawn = {};

// h`<b>${text}</b>` is HTML; a value in it is escaped unless it is such HTML itself
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
const svg = (width, height, label, inside) => h`<svg width="${width}" height="${height}"
  role="img" aria-label="${label}">${inside}</svg>`;
const rect = (x, y, width, height, more) => h`<rect x="${x.toFixed(1)}" y="${y.toFixed(1)}"
  width="${width.toFixed(1)}" height="${height.toFixed(1)}" ${more}/>`;
const room = (id) => Math.max(240, Math.min(560, Math.floor($(id).clientWidth)));

// ---- the selection

const sequence = () => run.sequences[at.sequence];
const chain = (token) => Math.max(0, sequence().chains[token]);
const when = () => ` after ${run.steps[at.checkpoint]} steps`;
const atTheEnd = () => ` at the end, after ${run.steps.at(-1)} steps`;
const headName = (layer, head) => `L${layer}H${head}`;
const role = (token) => (sequence().chains[token] < 0 ? "–" : run.task.roles[token]);
const color = (token) => {
  const number = sequence().chains[token];
  return `var(--c${number < 0 ? "none" : number % 6})`;
};
const tokenName = (token) => `${sequence().names[token]} (${role(token)})`;
const allHeads = () => range(run.layers * run.heads).map((number) =>
  [Math.floor(number / run.heads), number % run.heads]);
const inCircuit = (layer, head) =>
  run.paths.some((path) => path.layer === layer && path.head === head);
const pairsOfHead = () => run.paths.flatMap((path, number) =>
  path.layer === at.layer && path.head === at.head ? sequence().ends[number].filter(Boolean) : []);

function attention(layer, head) { // whole percent, a row of T for each attending token
  run.bytes ??= Uint8Array.from(atob(run.attention), (sign) => sign.charCodeAt(0));
  const size = run.task.T ** 2, before = at.checkpoint * run.sequences.length + at.sequence;
  const start = ((before * run.layers + layer) * run.heads + head) * size;
  return run.bytes.subarray(start, start + size);
}

function choosePath(number) {
  const path = run.paths[number], ends = sequence().ends[number][chain(at.token)];
  Object.assign(at, { path: number, layer: path.layer, head: path.head });
  if (ends) at.token = ends[0];
}

// ---- the controls

function drawControls() {
  const option = (name, value) => h`<option value="${value}">${name}`;
  const heads = allHeads().map(([layer, head], number) =>
    option(headName(layer, head) + (inCircuit(layer, head) ? " •" : ""), number));
  const select = (name, options) => options.length > 1
    ? h`<label>${name} <select data-choose="${name}">${options}</select></label>` : "";
  const slider = h`<label>step <input type="range" data-choose="checkpoint" min="0"
    max="${run.steps.length - 1}"><output></output></label>`;
  $("controls").innerHTML = h`${select("run", PAGES.map((page, n) => option(page.name, n)))}
    ${select("sequence", range(run.sequences.length).map((n) => option(n, n)))}
    ${run.steps.length > 1 ? slider : ""}${select("head", heads)}`;
  document.title = $("title").textContent = `Inside ${run.name}`;
  $("summary").textContent = run.about.summary;
  $("legend").innerHTML = h`<ul>${run.about.legend.map((line) => h`<li>${line}`)}</ul>`;
  $("settings").innerHTML = h`<summary>Settings of this run</summary><p>${run.about.settings}</p>`;
}
function showChosen() {
  for (const control of document.querySelectorAll("[data-choose]")) {
    const { choose } = control.dataset;
    control.value = choose === "head" ? at.layer * run.heads + at.head : at[choose];
    if (choose === "checkpoint") control.nextElementSibling.value = run.steps[at.checkpoint];
  }
}

// ---- query and answer

function drawAnswer(token, number) {
  const mine = chain(token), query = sequence().names[sequence().queries[mine]];
  const targets = run.targets[at.sequence][mine].map(([name]) => name);
  const answers = run.answers[at.checkpoint].map((each) => each[at.sequence][mine]);
  const cell = ([name, error], k) => h`<td class="${name === targets[k] ? "right" : "wrong"}"
    ><b>${name}</b> ${error.toFixed(2)}`;
  const row = (label, cells) => h`<tr><th>${label}${cells.map(cell)}`;
  const path = run.paths[number], answer = answers[0].map(([name]) => name).join(" ");
  put("answer", `Query ${query}: the targets are ${targets.join(" ")}, the model answers ${answer}`,
    `${when().trim()}; small: the squared error; ≈: no symbol is near, this one is the nearest`,
    h`<div class="wide"><table><tr><th>${run.symbols.map((name) => h`<th>${name}`)}
    <tr><th>targets${targets.map((name) => h`<td><b>${name}</b>`)}${row("full model", answers[0])}
    ${path ? row(`without ${path.title}`, answers[number + 1]) : ""}</table></div>`);
}

// ---- the tokens, and the attention of one head

function drawStrip() {
  const tile = (token) => h`<button data-token="${token}"><i></i><b
    style="background:${color(token)}">${sequence().names[token]}</b><small>${role(token)}</small
    ><i></i></button>`;
  const slot = (start, size) => h`<span>${range(size).map((place) => tile(start + place))}</span>`;
  const blocks = run.blocks.map(([start, size, slots]) =>
    h`<div>${range(slots).map((number) => slot(start + size * number, size))}</div>`);
  put("strip", "", `bars above a token: how much the selected token attends to it; bars below: how
    much it attends to the selected one; red: a path of the circuit; click to select a token`,
    h`<div class="strip">${blocks}</div>`);
}
function pointStrip(token) {
  const { T } = run.task, pattern = attention(at.layer, at.head), pairs = pairsOfHead();
  $("strip").querySelector("h2").textContent =
    `${tokenName(token)} in ${headName(at.layer, at.head)}${when()}`;
  for (const tile of $("strip").querySelectorAll("button")) {
    const other = Number(tile.dataset.token);
    tile.style.setProperty("--up", pattern[token * T + other] / 100);
    tile.style.setProperty("--down", pattern[other * T + token] / 100);
    const joined = (from, to) => pairs.some(([source, target]) => source === from && target === to);
    tile.classList.toggle("chosen", other === token);
    tile.classList.toggle("to", joined(token, other));
    tile.classList.toggle("from", joined(other, token));
  }
}

function drawHeads() {
  const { T } = run.task;
  const heads = allHeads().map(([layer, head]) => h`<button data-layer="${layer}"
    data-head="${head}" class="${inCircuit(layer, head) ? "useful" : ""}"><canvas width="${T}"
    height="${T}"></canvas>${headName(layer, head)}</button>`);
  put("heads", `Attention of all heads${when()}`, "red: the head has a path of the circuit",
    h`<div class="heads">${heads}</div>`);
  for (const button of $("heads").querySelectorAll("button")) {
    const pixels = new ImageData(T, T), { layer, head } = button.dataset;
    attention(Number(layer), Number(head)).forEach((percent, cell) =>
      pixels.data.set([31, 119, 180, 2.55 * percent], 4 * cell));
    button.querySelector("canvas").getContext("2d").putImageData(pixels, 0, 0);
  }
}

function drawMap() {
  const { T, roles } = run.task, edge = 44, size = room("map") - edge - 2, cell = size / T;
  const box = (token, other, more) =>
    rect(edge + other * cell, edge + token * cell, cell, cell, more);
  const cells = [], sides = [];
  attention(at.layer, at.head).forEach((percent, number) => {
    const token = Math.floor(number / T), other = number % T, share = percent / 100;
    const text = `${tokenName(token)} attends to ${tokenName(other)}: ${share}`;
    if (percent) cells.push(box(token, other,
      h`class="cell" opacity="${share}" data-token="${token}" data-say="${text}"`));
  });
  for (const token of range(T)) {
    const start = edge + token * cell, middle = start + cell / 2, name = sequence().names[token];
    const fill = h`style="fill:${color(token)}" data-token="${token}"`;
    sides.push(rect(18, start, 24, cell, fill), rect(start, 18, cell, 24, fill));
    if (cell > 9) sides.push(h`<text class="name" x="30" y="${middle}">${name}</text><text
      class="name" transform="translate(${middle} 30) rotate(-90)">${name}</text>`);
  }
  for (const [start, width, slots] of run.blocks) {
    const far = edge + start * cell, middle = far + (width * slots * cell) / 2;
    const names = roles.slice(start, start + width).join(" ");
    sides.push(h`<text x="${middle}" y="8">${names}</text><text
      transform="translate(8 ${middle}) rotate(-90)">${names}</text><path class="block"
      d="M${far} ${edge}v${size}M${edge} ${far}h${size}"/>`);
  }
  const frames = pairsOfHead().map(([token, other]) => box(token, other, h`class="frame"`));
  const row = rect(edge, edge, size, cell, h`id="row" class="row"`), whole = edge + size + 2;
  put("map", `Attention of ${headName(at.layer, at.head)}${when()}`,
    "rows: attending tokens; columns: attended tokens; red: a path of the circuit",
    h`<p class="say">Point at a cell.</p>${svg(whole, whole, "attention map",
      h`${cells}${sides}${frames}${row}`)}`);
}

// ---- the circuit

function drawCircuit() {
  if (!run.paths.length) return put("circuit", "The circuit", run.missing, "");
  const levels = [...new Set(run.paths.map((path) => path.layer))].sort((a, b) => a - b);
  const width = room("circuit"), left = 76, rise = 58, bottom = rise * levels.length + 16;
  const apart = (width - left - 22) / Math.max(1, run.places.length - 1);
  const x = (column) => left + column * apart, y = (level) => bottom - rise * level;
  const columns = run.places.map(([name, below], column) => h`<path class="block"
    d="M${x(column)} ${y(0)}V${y(levels.length)}"/><text x="${x(column)}" y="${bottom + 16}"><tspan
    class="role">${name}</tspan><tspan x="${x(column)}" dy="14">${below}</tspan></text>`);
  const names = ["input", ...levels.map((layer) => `after L${layer}`)].map((name, level) =>
    h`<text class="left" x="0" y="${y(level)}">${name}</text>${run.places.map((_, column) =>
      h`<circle cx="${x(column)}" cy="${y(level)}" r="3.5"/>`)}`);
  const lines = [], texts = [];
  run.paths.forEach((path, number) => {
    const level = levels.indexOf(path.layer), share = path.attention[at.checkpoint];
    const same = run.paths.slice(0, number).filter((other) =>
      other.layer === path.layer && other.reader === path.reader);
    const aside = 9 * same.filter((other) => other.read === path.read).length;
    const [x0, x1] = [path.read, path.reader].map((column) => x(column) + aside);
    const y0 = y(level) - 4, y1 = y(level + 1) + 5, up = 0.55 - 0.2 * (same.length % 3);
    const ends = h`x1="${x0}" y1="${y0}" x2="${x1}" y2="${y1}"`;
    lines.push(h`<g data-path="${number}"><line class="halo" ${ends}/><line class="arrow" ${ends}
      opacity="${Math.max(0.12, share)}"/></g>`);
    texts.push(h`<text class="share" x="${x0 + up * (x1 - x0)}" y="${y0 + up * (y1 - y0)}">${
      run.heads > 1 ? `H${path.head}: ` : ""}${share.toFixed(2)}</text>`);
  });
  const tip = h`<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="9"
    markerHeight="9" markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0 8 4 0 8z"/></marker>`;
  const list = run.paths.map((path, number) => h`<button data-path="${number}">${path.title}${
    path.brings.length ? `, brings ${path.brings.join(" ")}` : ""}</button>`);
  put("circuit", `The circuit${when()}`,
    `arrows point from the attended token to the token that reads it; numbers: mean attention;
    click to select a path`,
    h`${svg(width, bottom + 38, "circuit", h`${tip}${columns}${names}${lines}${texts}`)}
    <div class="paths">${list}</div>`);
}

function drawPath(number) {
  if (!run.paths.length) return $("path").replaceChildren();
  const { title, brings, cost, without } = run.paths[number];
  const share = (value) => Math.max(0, Math.min(1, value / 2));
  const bar = ([mean, low, high]) => h`<td><span class="bar" style="--share:${share(mean)}"></span>
    ${mean.toFixed(2)} <small>[${low.toFixed(2)}, ${high.toFixed(2)}]</small>`;
  const rows = run.symbols.map((name) => h`<tr><th>${name}${[cost, without].map((losses) =>
    bar(losses[name]))}`);
  const brought = brings.length ? `It brings ${brings.join(" and ")} to its reader. ` : "";
  put("path", `${title},${atTheEnd()}`, `${brought}Squared errors when the path is
    ablated to its mean, with two standard errors; a full bar is 2, the error of an unrelated symbol.`,
    h`<div class="wide"><table><tr><th>symbol<th>rise of the full model's loss<th>loss of the
    circuit without it${rows}</table></div>`);
}

// ---- over training

function chart(label, steps, curves) {
  const width = Math.min(400, room("history")), height = 130, left = 34, right = width - 14;
  const most = Math.max(1, ...Object.values(curves).flat()), last = Math.max(1, steps.at(-1));
  const x = (step) => left + (step / last) * (right - left);
  const y = (value) => height - 20 - (Math.max(0, value) / most) * (height - 30);
  const point = (value, n) => `${x(steps[n]).toFixed(1)},${y(value).toFixed(1)}`;
  const grid = [0, most / 2, most].map((value) => h`<path class="block"
    d="M${left} ${y(value)}H${right}"/><text class="right" x="${left - 4}" y="${y(value)}">${
    value.toFixed(1)}</text>`);
  const ticks = [0, last / 2, last].map((step) =>
    h`<text x="${x(step)}" y="${height - 7}">${Math.round(step)}</text>`);
  const lines = Object.entries(curves).map(([name, values]) => h`<polyline class="curve"
    style="${ink(name)}" points="${values.map(point).join(" ")}"/>`);
  const now = h`<path class="now" d="M${x(run.steps[at.checkpoint])} 6V${height - 20}"/>`;
  const key = Object.keys(curves).map((name) =>
    h`<span style="${ink(name)}"><i></i>${name}</span>`);
  return h`<div><p class="key">${key}</p><p class="note">${label}</p>${svg(width, height, label,
    h`${grid}${ticks}${lines}${now}`)}</div>`;
}
const ink = (name) => `--ink:${run.colors[name.slice(2) - 1] ?? "var(--blue)"}`;

function drawHistory(number) {
  const { step, ...losses } = run.losses, path = run.paths[number], parts = [];
  if (path?.history) {
    const { mean, rises } = path.history, { steps, sequences, ablation } = run.emergence;
    parts.push(
      chart(`${path.title} (n = ${sequences} sequences)`, steps, { "mean attention": mean }));
    if (Object.keys(rises).length)
      parts.push(chart(`Rise of each symbol's MSE without it (${ablation ?? "mean"} ablation)`,
        steps, rises));
  } else parts.push(h`<p class="note">The history of a path is drawn here if the run has a circuit
    and was trained with --save-every.</p>`);
  parts.push(chart(`Validation MSE of each symbol. ${run.plateaus.join("; ")}`, step, losses));
  put("history", "Over training", `red line: the selected step, ${run.steps[at.checkpoint]}`,
    h`<div class="columns">${parts}</div>`);
}

// ---- information in the residual stream

function drawInformation() {
  const { letters, names } = run.task;
  const layers = new Set(run.paths.map((path) => path.layer));
  const panel = (role) => {
    const row = (scores, level) => {
      const where = `${names[role]} ${level ? `after L${level - 1}` : "before any layer"}`;
      const cells = scores[role].map((score, k) => h`<td><i style="opacity:${score / 100}"
        data-say="${letters[k]} at ${where}: R² ${(score / 100).toFixed(2)}"></i>`);
      return h`<tr data-layer="${level - 1}"><th class="${layers.has(level - 1) ? "red" : ""}">${
        level ? `L${level - 1}` : "in"}${cells}`;
    };
    return h`<table><caption>${names[role]}</caption>${run.information.map(row).reverse()}
      <tr><th>${letters.map((letter) => h`<th>${letter}`)}</table>`;
  };
  put("information", `Information in the residual stream${atTheEnd()}`,
    `a panel for each role, a row for the state after each layer, a column for each
    symbol: the bluer, the better least squares read the symbol from the residual stream (R² on
    held-out sequences); red: layers of the circuit; click on a layer`,
    h`<p class="say">Point at a cell.</p><div class="panels">${run.reading.map(panel)}</div>`);
}

// ---- all of it

const VIEWS = [[drawStrip, "sequence"], [drawHeads, "sequence", "checkpoint"],
  [drawCircuit, "checkpoint"], [drawMap, "sequence", "checkpoint", "layer", "head"],
  [drawInformation, "run"]];

function draw() {
  for (const [view, ...needs] of VIEWS) if (needs.some((name) => at[name] !== drawn[name])) view();
  drawn = { ...at };
  for (const id of ["path", "information"])
    $(id).classList.toggle("old", at.checkpoint < run.steps.length - 1);
  showChosen();
  point();
}
function point() {
  const token = near.token ?? at.token, path = near.path ?? at.path;
  drawAnswer(token, path);
  pointStrip(token);
  drawPath(path);
  drawHistory(path);
  for (const item of document.querySelectorAll("[data-path]"))
    item.classList.toggle("chosen", Number(item.dataset.path) === path);
  for (const item of document.querySelectorAll("[data-layer]")) {
    const { layer, head = at.head } = item.dataset;
    item.classList.toggle("chosen", Number(layer) === at.layer && Number(head) === at.head);
  }
  const frame = $("row"), tall = frame?.height.baseVal.value;
  frame?.setAttribute("y", 44 + tall * token);
}
function begin(number) {
  run = PAGES[number];
  at = { run: number, sequence: 0, checkpoint: run.steps.length - 1, ...run.first };
  drawn = {};
  drawControls();
  draw();
}

function pointedAt({ target, type }) {
  const spot = target.closest?.("[data-token], [data-path], [data-say]");
  const { token, path, say } = spot?.dataset ?? {};
  const number = (text) => (type === "pointerout" || text === undefined ? undefined : Number(text));
  const before = near;
  near = { token: number(token), path: number(path) };
  if (say) target.closest("section").querySelector(".say").textContent = say;
  if (near.token !== before.token || near.path !== before.path) point();
}
for (const kind of ["pointerover", "pointerout", "focusin"])
  document.addEventListener(kind, pointedAt);
document.addEventListener("click", ({ target }) => {
  const chosen = target.closest("[data-token], [data-path], [data-layer]")?.dataset;
  if (!chosen) return;
  if (chosen.path) choosePath(Number(chosen.path));
  if (chosen.token) at.token = Number(chosen.token);
  if (chosen.layer >= 0) {
    at.layer = Number(chosen.layer);
    at.head = Number(chosen.head ?? run.paths.find((path) => path.layer === at.layer)?.head ?? 0);
  }
  draw();
});
for (const kind of ["input", "change"]) document.addEventListener(kind, ({ target }) => {
  const value = Number(target.value), { choose } = target.dataset;
  if (choose === "run") begin(value);
  else {
    if (choose === "head") [at.layer, at.head] = allHeads()[value];
    else at[choose] = value;
    draw();
  }
});
addEventListener("resize", () => {
  drawn = {};
  draw();
});
begin(0);
