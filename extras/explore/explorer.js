// Draws the page. A click changes what is selected, and all is drawn again.
"use strict";
const $ = (id) => document.getElementById(id);
const RUNS = JSON.parse($("data").textContent);
const range = (n) => [...Array(n).keys()];
let run, at; // the run, and what is selected in it: numbers from 0

// h`<p>${list}` is a string of HTML with all items of a list; names come escaped
const h = (parts, ...values) =>
  String.raw({ raw: parts }, ...values.map((value) => [value].flat().join("")));
function put(id, title, note, body) {
  $(id).innerHTML = h`<h2>${title}</h2><p class="note">${note}</p>${body}`;
}
const marked = (yes) => (yes ? "chosen" : "");
const room = (id) => Math.max(240, Math.min(560, $(id).clientWidth));

// ---- what is selected

const chainOf = (token) => run.chains[at.sequence][token];
const chain = () => Math.max(0, chainOf(at.token));
const label = (symbol) => run.labels[symbol] ?? "none";
const nameOf = (token) => label(run.tokens[at.sequence][token]);
const roleOf = (token) => run.names[run.roles[at.sequence][token]] ?? "–";
const titleOf = (token) => `${nameOf(token)} (${roleOf(token)})`;
const color = (token) => `var(--c${chainOf(token) % 6})`;
const query = () => run.chains[at.sequence].indexOf(chain(), run.T - run.N);
const pathsOf = (layer, head) => run.paths.filter((p) => p.layer === layer && p.head === head);

// [[reading token, token that is read], ...] of a path, in one chain
const pairsOf = (path, chain) => path.readers[at.sequence][chain].flatMap((reader) =>
  path.read[at.sequence][chain].map((read) => [reader, read]));
const pairsOfHead = () => pathsOf(at.layer, at.head).flatMap((path) =>
  range(run.N).flatMap((chain) => pairsOf(path, chain)));
const bytesOf = (text) => Uint8Array.from(atob(text), (sign) => sign.charCodeAt(0));

// the attention of a head: T rows of T shares, a row for each attending token
function attention(layer, head) {
  run.bytes ??= bytesOf(run.attention);
  const size = run.T ** 2, before = at.checkpoint * run.tokens.length + at.sequence;
  const start = ((before * run.layers + layer) * run.heads + head) * size;
  return Array.from(run.bytes.subarray(start, start + size), (percent) => percent / 100);
}

// [{symbol, error}, ...] of the full model (0) or the circuit alone (1) without some paths
function answers(kind, removed) {
  run.codes ??= new Uint32Array(bytesOf(run.answers).buffer);
  const sorted = `${[...removed].sort((a, b) => a - b)}`;
  const set = run.removals.findIndex((set) => `${set}` === sorted);
  const model = 2 * (at.checkpoint * run.removals.length + set) + kind, size = run.symbols.length;
  const place = (model * run.tokens.length + at.sequence + 1) * run.N - run.T + query();
  const codes = run.codes.subarray(place * size, (place + 1) * size);
  return Array.from(codes, (code) => ({ symbol: (code >> 16) - 1, error: (code & 65535) / 1000 }));
}

// remove a path, or put it back; the oldest comes back if they are too many
function togglePath(number) {
  const { layer, head, readers } = run.paths[number];
  const token = readers[at.sequence][chain()][0] ?? at.token, before = at.paths;
  Object.assign(at, { layer, head, token, paths: before.filter((other) => other !== number) });
  if (at.paths.length === before.length) at.paths = [...before, number].slice(-run.most);
}

// ---- the views

function drawControls() {
  const select = (name, texts) => h`<label>${name} <select data-choose="${name}">${
    texts.map((text, number) => h`<option value="${number}" ${
      number === at[name] ? "selected" : ""}>${text}</option>`)}</select></label>`;
  const slider = h`<label>checkpoint <input type="range" data-choose="checkpoint" min="0"
    max="${run.steps.length - 1}" value="${at.checkpoint}"></label>`;
  $("controls").innerHTML = h`${select("run", RUNS.map(({ name }) => name))}
    ${select("sequence", run.tokens.map((_, number) => number + 1))}
    ${run.steps.length > 1 ? slider : ""}`;
}

function drawStrip() {
  $("about").textContent = `${run.about}, step ${run.steps[at.checkpoint]}. ${run.found}`;
  const shares = attention(at.layer, at.head).slice(at.token * run.T, (at.token + 1) * run.T);
  const most = shares.indexOf(Math.max(...shares));
  const read = pairsOfHead().filter(([reader]) => reader === at.token).map(([, token]) => token);
  const tile = (token) => h`<button data-token="${token}" style="--share:${shares[token]}"
    class="${marked(token === at.token)} ${read.includes(token) ? "read" : ""}"><i></i><b
    style="background:${color(token)}">${nameOf(token)}</b><small>${roleOf(token)}</small></button>`;
  const blocks = run.blocks.map((slots) => h`<div>${slots.map((slot) =>
    h`<span>${slot.map(tile)}</span>`)}</div>`);
  put("strip", `In L${at.layer}H${at.head}, ${titleOf(at.token)} attends most to ${
    titleOf(most)}: ${shares[most].toFixed(2)}`,
    `A colour is a chain A B C ..., whose pairs are shuffled; the queries come last. Below each
    token is its role: 1a 1b in the first pair of its chain. Click a token to see what it attends
    to (bars). A red frame is a path of the circuit.`, h`<div class="strip">${blocks}</div>`);
}

function drawAnswers() {
  const targets = run.targets[at.sequence][query() - (run.T - run.N)];
  const removed = at.paths.map((number) => run.paths[number]);
  const without = removed.map(({ title }) => title).join(", ");
  const row = (name, kind, paths) => h`<tr><th>${name}${answers(kind, paths).map(
    ({ symbol, error }, k) => h`<td class="${symbol === targets[k] ? "right" : "wrong"}"><b>${
    label(symbol)}</b> <small>${error.toFixed(2)}</small>`)}`;
  const rows = ["full model", ...(run.paths.length ? ["circuit alone"] : [])].map((name, kind) =>
    row(name, kind, []) + (without && row(`${name} without ${without}`, kind, at.paths)));
  put("answers", `Query ${nameOf(query())}: the model should answer ${targets.map(label).join(" ")}`,
    `The nearest symbol of the sequence (or none), and the squared error. What is removed, and all
    outside of the circuit alone, is set to its mean over other sequences.`,
    h`<div class="wide"><table><tr><th>${run.symbols.map((name) => h`<th>${name}`)}
    ${rows}</table></div><p class="note">${removed.map(({ text }) => `${text} `)}</p>`);
}

function drawCircuit() {
  const levels = [...new Set(run.paths.map((path) => path.layer))].sort((a, b) => a - b);
  const left = 76, rise = 42, bottom = rise * levels.length + 14;
  const width = Math.max(room("circuit"), left + 22 + 34 * (run.columns.length - 1));
  const apart = (width - left - 22) / Math.max(1, run.columns.length - 1);
  const x = (column) => left + column * apart, y = (level) => bottom - rise * level;
  const columns = run.columns.map(([end, letter], column) => h`<path class="line"
    d="M${x(column)} ${y(0)}V${y(levels.length)}"/><text x="${x(column)}" y="${bottom + 16}">${
    end}<tspan x="${x(column)}" dy="14">${letter}</tspan></text>`);
  const names = ["input", ...levels.map((layer) => `after L${layer}`)].map((name, level) =>
    h`<text x="28" y="${y(level)}">${name}</text>${run.columns.map((_, column) =>
      h`<circle cx="${x(column)}" cy="${y(level)}" r="3.5"/>`)}`);
  const lines = [], texts = [], attributes = (number) =>
    h`data-path="${number}" class="${marked(at.paths.includes(number))}"`;
  run.paths.forEach((path, number) => {
    const pattern = attention(path.layer, path.head), level = levels.indexOf(path.layer);
    const share = pairsOf(path, chain()).reduce((sum, [reader, read]) =>
      sum + pattern[reader * run.T + read], 0);
    const same = run.paths.slice(0, number).filter((other) =>
      other.layer === path.layer && other.x1 === path.x1);
    const aside = 9 * same.filter((other) => other.x0 === path.x0).length; // of other heads
    const x0 = x(path.x0) + aside, x1 = x(path.x1) + aside, up = 0.55 - 0.2 * (same.length % 3);
    const y0 = y(level) - 4, y1 = y(level + 1) + 5;
    const ends = h`x1="${x0}" y1="${y0}" x2="${x1}" y2="${y1}"`;
    lines.push(h`<g ${attributes(number)}><line class="halo" ${ends}/><line
      class="arrow" ${ends} opacity="${Math.max(0.12, share)}"/></g>`);
    texts.push(h`<text class="share" x="${x0 + up * (x1 - x0)}" y="${y0 + up * (y1 - y0)}">${
      run.heads > 1 ? `H${path.head}: ` : ""}${share.toFixed(2)}</text>`);
  });
  const tip = h`<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="9" fill="#d62728"
    markerHeight="9" markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0 8 4 0 8z"/></marker>`;
  const list = run.paths.map((path, number) =>
    h`<button ${attributes(number)}>${path.title}</button>`);
  put("circuit", `The circuit, and its attention in the chain of ${nameOf(query())}`,
    `Arrows point from what is read to the token that reads it. Click a path to remove it (up to
    ${run.most} at once), and again to put it back.`,
    h`<div class="wide"><svg width="${width}" height="${bottom + 38}">${tip}${columns}${names}${
    lines}${texts}</svg></div><div class="list">${list}</div>`);
}

function drawHeads() {
  const button = (layer, head) => h`<button data-layer="${layer}" data-head="${head}" class="${
    pathsOf(layer, head).length ? "useful" : ""} ${marked(layer === at.layer && head === at.head)}"
    ><canvas width="${run.T}" height="${run.T}"></canvas>L${layer}H${head}</button>`;
  const heads = range(run.layers * run.heads).map((number) =>
    button(Math.floor(number / run.heads), number % run.heads));
  put("heads", "All heads", "Click a head. Red: it has a path of the circuit.",
    h`<div class="list">${heads}</div>`);
  for (const button of $("heads").querySelectorAll("button")) {
    const pixels = new ImageData(run.T, run.T), { layer, head } = button.dataset;
    attention(Number(layer), Number(head)).forEach((share, cell) =>
      pixels.data.set([31, 119, 180, 255 * share], 4 * cell));
    button.querySelector("canvas").getContext("2d").putImageData(pixels, 0, 0);
  }
}

function drawMap() {
  const { T } = run, edge = 26, size = room("map") - edge - 2, cell = size / T;
  const rect = (row, column, more, width = cell, height = cell) => h`<rect x="${
    edge + column * cell}" y="${edge + row * cell}" width="${width}" height="${height}" ${more}>`;
  const cells = attention(at.layer, at.head).map((share, number) => {
    const row = Math.floor(number / T), column = number % T;
    const text = `${titleOf(row)} attends to ${titleOf(column)}: ${share.toFixed(2)}`;
    return share ? h`${rect(row, column, h`fill="#1f77b4" opacity="${share}"
      data-token="${row}"`)}<title>${text}</title></rect>` : "";
  });
  const sides = range(T).map((token) => {
    const fill = h`style="fill:${color(token)}" data-token="${token}"`;
    const far = edge + (token + 0.5) * cell, text = cell > 9 ? nameOf(token) : "";
    return h`${rect(token, -edge / cell, fill, edge - 2)}</rect>${
      rect(-edge / cell, token, fill, cell, edge - 2)}</rect><text x="12" y="${far}">${text}</text>
      <text transform="translate(${far} 12) rotate(-90)">${text}</text>`;
  });
  const lines = run.blocks.map(([[start]]) => h`<path class="line" d="M${edge + start * cell} ${
    edge}v${size}M${edge} ${edge + start * cell}h${size}"/>`);
  const frames = pairsOfHead().map((pair) => h`${rect(...pair, `class="frame"`)}</rect>`);
  put("map", `Attention of L${at.layer}H${at.head}`,
    "Rows attend to columns. Red: a path of the circuit.",
    h`<svg width="${edge + size + 2}" height="${edge + size + 2}">${cells}${sides}${lines}${frames}${
    rect(at.token, 0, h`fill="none" stroke="black" pointer-events="none"`, size)}</rect></svg>`);
}

function draw() {
  const focused = document.activeElement, view = focused.closest("section");
  const number = view && [...view.querySelectorAll("button")].indexOf(focused);
  for (const view of [drawStrip, drawAnswers, drawCircuit, drawHeads, drawMap]) view();
  view?.querySelectorAll("button")[number]?.focus(); // the new button in the place of the old one
}
function begin(number) {
  run = RUNS[number];
  run.most = run.removals.at(-1).length; // paths that can be removed at once
  at = { run: number, sequence: 0, checkpoint: run.steps.length - 1, paths: [],
    layer: run.layers - 1, head: 0, token: run.T - run.N };

  // the path to the query that the full model needs most
  const costs = run.paths.map((path) => path.cost * path.title.includes(" q "));
  if (costs.length) togglePath(costs.indexOf(Math.max(...costs)));
  $("circuit").hidden = !costs.length;
  drawControls();
  draw();
}

document.addEventListener("click", ({ target }) => {
  const chosen = target.closest("[data-token], [data-path], [data-layer]");
  if (!chosen) return;
  const { token, path, layer, head } = chosen.dataset;
  if (path) togglePath(Number(path));
  if (token) at.token = Number(token);
  if (layer) Object.assign(at, { layer: Number(layer), head: Number(head) });
  draw();
});
document.addEventListener("input", ({ target }) => {
  at[target.dataset.choose] = Number(target.value);
  (target.dataset.choose === "run" ? begin : draw)(at.run);
});
addEventListener("resize", draw);
begin(0);
