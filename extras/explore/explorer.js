// Draws the page. A click changes what is selected, and all is drawn again.
"use strict";
const $ = (id) => document.getElementById(id);
const RUNS = JSON.parse($("data").textContent);
let run, at; // the run, and what is selected in it: numbers from 0

// h`<p>${list}` is a string of HTML with all items of a list; names come escaped
const h = (parts, ...values) =>
  String.raw({ raw: parts }, ...values.map((value) => [value].flat().join("")));
function put(id, title, note, body) {
  $(id).innerHTML = h`<h2>${title}</h2><p class="note">${note}</p>${body}`;
}
const marked = (yes) => (yes ? "chosen" : "");

// ---- what is selected

const tokens = () => run.tokens[at.sequence];
const chainOf = (token) => run.chains[at.sequence][token];
const chain = () => chainOf(at.token);
const label = (symbol) => run.labels[symbol] ?? "none";
const nameOf = (token) => label(tokens()[token]);
const roleOf = (token) => run.names[run.roles[at.sequence][token]];
const query = () => run.chains[at.sequence].slice(-run.N).indexOf(chain()); // from 0
const queryName = () => label(tokens().at(query() - run.N));
const targets = () => run.targets[at.sequence][query()];
const pathsOf = (layer, head) => run.paths.filter((p) => p.layer === layer && p.head === head);

// a row for each attending token, in percent
const attention = (layer, head) =>
  run.attention[at.checkpoint][at.sequence][layer * run.heads + head];

// [[reading token, token that is read], ...], in all chains
const pairsOfHead = (layer, head) =>
  pathsOf(layer, head).flatMap((path) => path.pairs[at.sequence].flat());

// [[symbol, error], ...] of the full model (0) or the circuit alone (1), without a path, or -1
const answers = (kind, path) => run.answers[at.checkpoint][path + 1][kind][at.sequence][query()];

// remove a path, or put it back
function togglePath(number) {
  const { layer, head, pairs } = run.paths[number];
  const token = pairs[at.sequence][chain()][0]?.[0] ?? at.token;
  Object.assign(at, { layer, head, token, path: at.path === number ? -1 : number });
}

// ---- the views

function drawControls() {
  const select = (name, texts) => h`<label>${name} <select data-choose="${name}">${
    texts.map((text, number) => h`<option value="${number}" ${
      number === at[name] ? "selected" : ""}>${text}</option>`)}</select></label>`;
  $("controls").innerHTML = h`${select("run", RUNS.map(({ name }) => name))}
    ${select("sequence", run.tokens.map((_, number) => number + 1))}
    ${select("checkpoint", run.steps.map((step) => `step ${step}`))}`;
}

function drawStrip() {
  $("about").textContent = `${run.about}. ${run.found}`;
  const { layer, head } = at, shares = attention(layer, head)[at.token];
  const most = shares.indexOf(Math.max(...shares));
  const ownPairs = pairsOfHead(layer, head).filter(([reader]) => reader === at.token);
  const read = ownPairs.map(([, token]) => token);
  const tiles = tokens().map((_, token) => h`<button data-token="${token}"
    style="--share:${shares[token]}%" class="${marked(token === at.token)} ${
    read.includes(token) ? "read" : ""}"><i></i><b
    style="background:var(--c${chainOf(token) % 6})">${nameOf(token)}</b><small>${
    roleOf(token)}</small></button>`);
  put("strip", `In L${layer}H${head}, ${nameOf(at.token)} (${roleOf(at.token)}) attends most to ${
    nameOf(most)} (${roleOf(most)}): ${(shares[most] / 100).toFixed(2)}`,
    `A colour is a chain A B C ..., whose pairs are shuffled; the queries come last. Below each
    token is its role: 1a 1b in the first pair of its chain. Click a token to see what it attends
    to (bars). A red frame is a path of the circuit.`, h`<div class="strip">${tiles}</div>`);
}

function drawAnswers() {
  const removed = run.paths[at.path];
  const row = (name, kind, path) => h`<tr><th>${name}${answers(kind, path).map(
    ([symbol, error], k) => h`<td class="${symbol === targets()[k] ? "right" : "wrong"}"><b>${
    label(symbol)}</b> <small>${error.toFixed(2)}</small>`)}`;
  const kinds = ["full model", ...(run.paths.length ? ["circuit alone"] : [])];
  const rows = kinds.map((name, kind) => row(name, kind, -1) +
    (removed ? row(`${name} without ${removed.title}`, kind, at.path) : ""));
  put("answers", `Query ${queryName()}: the model should answer ${
    targets().map(label).join(" ")}`,
    `The nearest symbol of the sequence (or none), and the squared error. What is removed, and all
    outside of the circuit alone, is set to its mean over other sequences.`,
    h`<div class="wide"><table><tr><th>${run.symbols.map((name) => h`<th>${name}`)}
    ${rows}</table></div><p class="note">${removed ? removed.text : ""}</p>`);
}

function drawCircuit() {
  const levels = [...new Set(run.paths.map((path) => path.layer))].sort((a, b) => a - b);
  const bottom = 42 * levels.length + 14, width = 98 + 48 * (run.columns.length - 1);
  const x = (column) => 76 + 48 * column, y = (level) => bottom - 42 * level;
  const columns = run.columns.map(([end, letter], column) => h`<path class="line"
    d="M${x(column)} ${y(0)}V${y(levels.length)}"/><text x="${x(column)}" y="${bottom + 16}">${
    end}<tspan x="${x(column)}" dy="14">${letter}</tspan></text>`);
  const names = ["input", ...levels.map((layer) => `after L${layer}`)].map((name, level) =>
    h`<text x="28" y="${y(level)}">${name}</text>${run.columns.map((_, column) =>
      h`<circle cx="${x(column)}" cy="${y(level)}" r="3.5"/>`)}`);
  const lines = [], texts = [], attributes = (number) =>
    h`data-path="${number}" class="${marked(at.path === number)}"`;
  run.paths.forEach((path, number) => {
    const pattern = attention(path.layer, path.head), level = levels.indexOf(path.layer);
    const share = path.pairs[at.sequence][chain()].reduce((sum, [reader, read]) =>
      sum + pattern[reader][read] / 100, 0);
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
  put("circuit", `The circuit, and its attention in the chain of ${queryName()}`,
    `Arrows point from what is read to the token that reads it. Click a path to remove it, and
    again to put it back.`,
    h`<div class="wide"><svg width="${width}" height="${bottom + 38}">${tip}${columns}${names}${
    lines}${texts}</svg></div><div class="list">${list}</div>`);
}

function paint(canvas, layer, head) {
  const T = tokens().length, pixels = new ImageData(T, T);
  attention(layer, head).flat().forEach((percent, cell) =>
    pixels.data.set([31, 119, 180, 2.55 * percent], 4 * cell));
  for (const [reader, read] of pairsOfHead(layer, head))
    pixels.data.set([214, 39, 40], 4 * (reader * T + read));
  canvas.getContext("2d").putImageData(pixels, 0, 0);
}

function drawHeads() {
  const T = tokens().length, canvas = h`<canvas width="${T}" height="${T}"></canvas>`;
  const heads = [...Array(run.layers * run.heads).keys()].map((number) =>
    [Math.floor(number / run.heads), number % run.heads]);
  const buttons = heads.map(([layer, head]) => h`<button data-layer="${layer}" data-head="${head}"
    class="${marked(layer === at.layer && head === at.head)} ${
    pathsOf(layer, head).length ? "useful" : ""}">${canvas}L${layer}H${head}</button>`);
  put("heads", "All heads", "Click a head. Red: it has a path of the circuit.",
    h`<div class="list">${buttons}</div>`);
  put("map", `Attention of L${at.layer}H${at.head}`,
    "Rows attend to columns, in the order of the sequence. Red: a path of the circuit.", canvas);
  $("heads").querySelectorAll("canvas").forEach((canvas, number) =>
    paint(canvas, ...heads[number]));
  paint($("map").querySelector("canvas"), at.layer, at.head);
}

function draw() {
  const focused = document.activeElement, view = focused.closest("section");
  const number = view && [...view.querySelectorAll("button")].indexOf(focused);
  for (const view of [drawStrip, drawAnswers, drawCircuit, drawHeads]) view();
  view?.querySelectorAll("button")[number]?.focus(); // the new button in the place of the old one
}
function begin(number) {
  run = RUNS[number];
  at = { run: number, sequence: 0, checkpoint: run.steps.length - 1, path: -1,
    layer: 0, head: 0, token: run.tokens[0].length - run.N };

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
begin(0);
