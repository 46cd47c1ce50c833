"use strict";
(() => {
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const BUFFERS = ["input", "output", "scratch", "packets"];
const KINDS = ["launch", "order", "signal", "packets", "put", "semaphore", "barrier"];
/** What an operation's bar looks like. */
const LOOKS = {
  move: "move", reduce: "reduce", put: "put", signal: "signal", wait: "wait", flush: "wait",
  acquire: "meet", release: "meet", barrier: "meet", sync: "meet",
};
const EDGE_LOOKS = { signal: "signal", packets: "move", put: "put", semaphore: "meet", barrier: "meet" };
const LEGEND = [
  ["move", "copy"], ["reduce", "reduce"], ["put", "put"], ["signal", "signal"], ["meet", "barrier, semaphore"],
  ["wait", "wait, flush"], ["hatch", "waiting"], ["ink", "critical path"],
];

// --- what is shown of numbers ---

const trim = (x, digits) => x.toFixed(digits).replace(/\.?0+$/, "");
const time = (ns) => ns >= 1e6 ? trim(ns / 1e6, 2) + " ms" : trim(ns / 1000, ns < 1e5 ? 2 : 1) + " µs";
function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (bytes >= 1024 && unit + 1 < units.length) { bytes /= 1024; unit += 1; }
  return trim(bytes, 2) + " " + units[unit];
}
const rate = (bytes, ns) => ns > 0 ? Number((bytes / ns).toPrecision(3)) + " GB/s" : "";
const many = (n, one) => n + " " + one + (n === 1 ? "" : "s");

// --- small DOM helpers: text only, never markup ---

function make(tag, attributes, ...children) {
  const svg = ["svg", "path", "line", "rect", "circle", "text", "polyline"].includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) node.setAttribute(name, value);
  for (const child of children) node.append(child);
  return node;
}

// --- the plan ---

const ops = data.ops;
const lanes = data.lanes.map(([rank, block, count]) => ({ rank, block, count }));
{
  let op = 0;
  lanes.forEach((lane, index) => {
    lane.firstOp = op;
    for (let i = 0; i < lane.count; i += 1) ops[op + i].lane = index;
    op += lane.count;
  });
}
const lanesOf = Array.from({ length: data.ranks }, () => []);
lanes.forEach((lane, index) => lanesOf[lane.rank].push(index));
const faulty = new Map();
for (const fault of data.faults) {
  if (fault.op === null) continue;
  for (const lane of lanesOf[fault.rank] || []) {
    if (lanes[lane].block !== fault.block) continue;
    for (let i = 0; i < lanes[lane].count; i += 1) {
      const op = lanes[lane].firstOp + i;
      if (ops[op].o === fault.op) faulty.set(op, [...(faulty.get(op) || []), fault]);
    }
  }
}

/** A size's timeline, decoded. */
function decode(index) {
  const raw = data.timelines[index];
  if (raw.decoded) return raw.decoded;
  const shared = (field) => {
    let at = index;
    while (data.timelines[at][field] === null) at -= 1;
    return data.timelines[at][field];
  };
  const opOf = shared("ops"), spans = raw.spans, n = opOf.length;
  const start = new Float64Array(n), ready = new Float64Array(n), end = new Float64Array(n);
  const first = new Uint32Array(lanes.length + 1), state = new Uint8Array(n);
  let lane = -1, now = 0, stuck = false;
  for (let i = 0; i < n; i += 1) {
    while (lane < ops[opOf[i]].lane) { lane += 1; first[lane] = i; now = data.launch; stuck = false; }
    start[i] = now;
    if (spans[2 * i] < 0) {
      // 1: waits for ever; 2: never begun.
      state[i] = stuck ? 2 : 1;
      stuck = true;
      ready[i] = end[i] = raw.end;
      continue;
    }
    ready[i] = now + spans[2 * i];
    now = end[i] = ready[i] + spans[2 * i + 1];
  }
  while (lane < lanes.length) { lane += 1; first[lane] = n; }
  const edges = shared("edges"), incoming = new Map(), outgoing = new Map();
  const add = (map, key, value) => { if (map.has(key)) map.get(key).push(value); else map.set(key, [value]); };
  for (let i = 0; i < edges.length; i += 3) {
    add(outgoing, edges[i], i);
    add(incoming, edges[i + 1], i);
  }
  const hops = [];
  for (let i = 0; i < raw.path.length; i += 4) {
    hops.push({ step: raw.path[i], reason: KINDS[raw.path[i + 1]], from: raw.path[i + 2], to: raw.path[i + 3] });
  }
  const hopOf = new Map(hops.map((hop, index) => [hop.step, index]));
  const span = Math.max(raw.end, 1);
  raw.decoded = { moved: raw.moved, bound: new Set(raw.bound), bytes: raw.bytes, total: raw.total, span, opOf, start, ready, end, state, first, edges, incoming, outgoing, hops, hopOf };
  return raw.decoded;
}

// --- state ---

let current = 0;
let line = decode(0);
let view = { from: 0, to: line.span };
let hovered = -1, selected = -1, hoveredRank = -1;
const expanded = new Set();
let filter = null;
let rows = [], height = 0;
const GUTTER = 120, AXIS = 26, LANE = 22, RANK = data.ranks <= 8 && lanes.length > data.ranks ? 48 : 26;
if (lanes.length <= 40) for (let rank = 0; rank < data.ranks; rank += 1) expanded.add(rank);
else if (line.hops.length) {
  // One rank as an example: where it ends.
  const rank = lanes[ops[line.opOf[line.hops[line.hops.length - 1].step]].lane].rank;
  if (lanesOf[rank].length <= 40) expanded.add(rank);
}

/** The box is as high as all lanes need, up to what the screen has; opening ranks does not change it. */
function measure() {
  const all = lanesOf.reduce((sum, own) => sum + 3 + (own.length === 1 ? RANK : own.length * LANE), AXIS + 8);
  const tall = Math.max(Math.min(all, 0.62 * window.innerHeight), 120);
  document.querySelector("main").style.setProperty("--tall", tall + "px");
}
/** Rows from top to bottom: one a lane of an expanded rank, one a collapsed rank. */
function layOut() {
  rows = [];
  let top = AXIS;
  for (let rank = 0; rank < data.ranks; rank += 1) {
    if (filter && !filter.has(rank)) continue;
    const own = lanesOf[rank];
    if (own.length === 1 || !expanded.has(rank)) {
      rows.push({ rank, lanes: own, top, height: RANK, title: own.length === 1 ? "" : "▸" });
      top += RANK;
    } else {
      own.forEach((lane, i) => {
        rows.push({ rank, lanes: [lane], top, height: LANE, title: i === 0 ? "▾" : null, block: lanes[lane].block });
        top += LANE;
      });
    }
    top += 3;
  }
  height = top + 6;
  rowOfLane = new Map();
  rows.forEach((row) => row.lanes.forEach((lane, i) => rowOfLane.set(lane, [row, i])));
  $("space").style.height = height + "px";
  draw();
}
let rowOfLane = new Map();

/** Top and height of a lane's bars. */
function strip(lane) {
  const found = rowOfLane.get(lane);
  if (!found) return null;
  const [row, index] = found;
  const inner = row.height - 4;
  return [row.top + 2 + inner * index / row.lanes.length, inner / row.lanes.length];
}

// --- drawing ---

const canvas = $("canvas"), box = $("lanes"), context = canvas.getContext("2d");
let colours = {}, hatch = null, pending = false;
function readColours() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["ground", "card", "ink", "soft", "line", "row", "accent", "bad", "move", "reduce", "put", "signal", "wait", "meet", "on-bar"]) {
    colours[name] = style.getPropertyValue("--" + name).trim();
  }
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const ink = tile.getContext("2d");
  ink.strokeStyle = colours.wait;
  ink.lineWidth = 1.1;
  ink.beginPath();
  for (const x of [-3, 3, 9]) { ink.moveTo(x - 3, 6); ink.lineTo(x + 3, 0); }
  ink.stroke();
  hatch = context.createPattern(tile, "repeat");
}
function draw() {
  if (pending) return;
  pending = true;
  requestAnimationFrame(() => { pending = false; paint(); });
}
const width = () => box.clientWidth;
const x = (ns) => GUTTER + (ns - view.from) / (view.to - view.from) * (width() - GUTTER - 8);
const back = (px) => view.from + (px - GUTTER) / (width() - GUTTER - 8) * (view.to - view.from);

function paint() {
  const ratio = window.devicePixelRatio || 1, w = width(), h = box.clientHeight, scroll = box.scrollTop;
  if (canvas.width !== Math.round(w * ratio) || canvas.height !== Math.round(h * ratio)) {
    canvas.width = Math.round(w * ratio);
    canvas.height = Math.round(h * ratio);
    canvas.style.width = w + "px";
    canvas.style.height = h + "px";
  }
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.fillStyle = colours.ground;
  context.fillRect(0, 0, w, h);
  const shown = rows.filter((row) => row.top + row.height > scroll + AXIS && row.top < scroll + h);
  context.save();
  context.beginPath();
  context.rect(0, AXIS, w, h - AXIS);
  context.clip();
  context.translate(0, -scroll);
  for (const row of shown) {
    context.fillStyle = colours.row;
    context.fillRect(GUTTER, row.top, w - GUTTER, row.height);
  }
  context.save();
  context.beginPath();
  context.rect(GUTTER, scroll, w - GUTTER, h);
  context.clip();
  for (const [at] of ticks()) {
    context.fillStyle = colours.line;
    context.globalAlpha = 0.6;
    context.fillRect(Math.round(x(at)), scroll, 1, h);
    context.globalAlpha = 1;
  }
  for (const row of shown) for (const lane of row.lanes) paintLane(lane);
  paintEdges(scroll, h);
  if ($("path").checked) paintPath();
  for (const step of [selected, hovered]) if (step >= 0) outline(step, step === selected ? 3 : 2, colours.accent);
  context.restore();
  context.font = "12px system-ui, 'DejaVu Sans', sans-serif";
  context.textBaseline = "middle";
  for (const row of shown) paintLabel(row);
  context.restore();
  paintAxis(w);
}

function paintLabel(row) {
  const middle = row.top + row.height / 2;
  const onPath = row.lanes.some((lane) => lanesOnPath().has(lane));
  const text = row.title === null ? "" : (row.title ? row.title + " " : "") + "rank " + row.rank;
  context.textAlign = "left";
  context.fillStyle = colours.ink;
  context.fillText(text, 8, middle);
  context.textAlign = "right";
  context.fillStyle = colours.soft;
  if (row.block !== undefined) context.fillText("tb " + row.block, GUTTER - 12, middle);
  else if (row.lanes.length > 1) context.fillText(row.lanes.length + " tb", GUTTER - 12, middle);
  if (onPath && $("path").checked) {
    context.fillStyle = colours.ink;
    context.fillRect(GUTTER - 6, row.top + 3, 3, row.height - 6);
  }
}
function lanesOnPath() {
  line.pathLanes ??= new Set(line.hops.map((hop) => ops[line.opOf[hop.step]].lane));
  return line.pathLanes;
}

function ticks() {
  const room = Math.max(2, Math.floor((width() - GUTTER) / 90)), span = view.to - view.from;
  const raw = span / room, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw);
  const all = [];
  for (let at = Math.ceil(view.from / step) * step; at <= view.to; at += step) all.push([at, step]);
  return all;
}
function paintAxis(w) {
  context.fillStyle = colours.card;
  context.fillRect(0, 0, w, AXIS);
  context.fillStyle = colours.line;
  context.fillRect(0, AXIS - 1, w, 1);
  context.font = "12px system-ui, 'DejaVu Sans', sans-serif";
  context.textBaseline = "middle";
  context.fillStyle = colours.soft;
  context.textAlign = "left";
  context.fillText("time, µs", 8, AXIS / 2);
  context.textAlign = "center";
  for (const [at, step] of ticks()) {
    if (x(at) < GUTTER - 1) continue;
    const digits = Math.max(0, Math.min(4, -Math.floor(Math.log10(step / 1000))));
    context.fillText((at / 1000).toFixed(digits), Math.min(Math.max(x(at), GUTTER + 6), w - 22), AXIS / 2);
  }
}

/** First step of a lane that ends after a time. */
function firstAfter(lane, ns) {
  let low = line.first[lane], high = line.first[lane + 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (line.end[middle] < ns) low = middle + 1; else high = middle;
  }
  return low;
}
function paintLane(lane) {
  const [top, tall] = strip(lane);
  const roomy = tall >= 12;
  let painted = -1;
  if (view.from < data.launch && line.first[lane] < line.first[lane + 1]) {
    const until = x(data.launch);
    context.fillStyle = colours.line;
    context.globalAlpha = 0.55;
    context.fillRect(Math.max(x(0), GUTTER), top, until - Math.max(x(0), GUTTER), tall);
    context.globalAlpha = 1;
    if (roomy) name("launch", Math.max(x(0), GUTTER), until, top + tall / 2, colours.soft);
  }
  for (let step = firstAfter(lane, view.from); step < line.first[lane + 1]; step += 1) {
    if (line.state[step] === 2 || line.start[step] > view.to) break;
    const left = x(line.start[step]), right = x(line.end[step]);
    // Bars of less than a pixel: one of them is enough.
    if (right - painted < 0.4) continue;
    painted = right;
    const op = ops[line.opOf[step]];
    const look = LOOKS[op.n] || "meet";
    const begin = line.ready[step] - line.start[step] > data.op ? x(line.start[step] + data.op) : left;
    const middle = line.ready[step] - line.start[step] > data.op ? x(line.ready[step]) : left;
    if (middle > begin) {
      context.fillStyle = hatch;
      context.fillRect(begin, top, Math.max(middle - begin, 0.5), tall);
    }
    context.fillStyle = colours[look];
    if (line.state[step] === 1) {
      context.fillStyle = hatch;
      context.fillRect(left, top, right - left, tall);
      context.fillStyle = colours.bad;
      context.fillRect(left, top, right - left, 2);
      context.fillRect(left, top + tall - 2, right - left, 2);
    } else {
      if (begin > left) context.fillRect(left, top, begin - left, tall);
      context.fillRect(middle, top, Math.max(right - middle, roomy ? 1 : 0.5), tall);
    }
    if (roomy && right - left > 3) {
      context.fillStyle = colours.ground;
      context.fillRect(right - 1, top, 1, tall);
    }
    if (roomy) {
      // The name, on whichever part has room for it.
      const [from, to] = line.state[step] === 1 ? [left, right]
        : right - middle >= begin - left ? [middle, right] : [left, begin];
      const colour = line.state[step] === 1 ? colours.bad : colours["on-bar"];
      name(line.state[step] === 1 ? called(op) + ", for ever" : called(op), from, to, top + tall / 2, colour);
    }
    if (faulty.has(line.opOf[step])) paintFault(left, Math.max(right, left + 8), top, tall);
  }
}
/** Moves are copies to everybody else. */
const called = (op) => op.n === "move" ? "copy" : op.n;
/** A bar's name, if it fits. */
function name(text, from, to, middle, colour) {
  const [left, right] = [Math.max(from, GUTTER), Math.min(to, width())];
  context.font = "11px system-ui, 'DejaVu Sans', sans-serif";
  if (right - left < context.measureText(text).width + 6) return;
  context.fillStyle = colour;
  context.textAlign = "left";
  context.textBaseline = "middle";
  context.fillText(text, left + 4, middle + 0.5);
}
function paintFault(left, right, top, tall) {
  context.strokeStyle = colours.bad;
  context.lineWidth = 2.5;
  context.strokeRect(left, top, right - left, tall);
  context.beginPath();
  context.moveTo(left, top); context.lineTo(right, top + tall);
  context.moveTo(left, top + tall); context.lineTo(right, top);
  context.lineWidth = 1.2;
  context.stroke();
}
function outline(step, thick, colour) {
  const place = strip(ops[line.opOf[step]].lane);
  if (!place || line.state[step] === 2) return;
  context.strokeStyle = colour;
  context.lineWidth = thick;
  const left = x(line.start[step]);
  context.strokeRect(left, place[0] - 1, Math.max(x(line.end[step]) - left, 2), place[1] + 2);
}

/** Where something left a lane, and where it arrived. */
function ends(edge) {
  const [from, to] = [line.edges[edge], line.edges[edge + 1]];
  const kind = KINDS[line.edges[edge + 2]];
  const a = strip(ops[line.opOf[from]].lane), b = strip(ops[line.opOf[to]].lane);
  if (!a || !b) return null;
  // Packets leave while they are written, everything else when its operation is over.
  const leaves = kind === "packets" ? line.ready[from] : line.end[from];
  const arrives = Math.max(kind === "barrier" ? line.end[to] : line.ready[to], leaves);
  return [x(leaves), a[0] + a[1] / 2, x(arrives), b[0] + b[1] / 2, kind];
}
function arrow(x0, y0, x1, y1, colour, dash, thick) {
  context.strokeStyle = context.fillStyle = colour;
  context.lineWidth = thick;
  context.setLineDash(dash);
  context.beginPath();
  context.moveTo(x0, y0);
  const bend = Math.min(40, Math.max(10, Math.abs(x1 - x0) / 2));
  context.bezierCurveTo(x0 + bend, y0, x1 - bend, y1, x1, y1);
  context.stroke();
  context.setLineDash([]);
  context.beginPath();
  context.moveTo(x1, y1);
  context.lineTo(x1 - 6, y1 - 3.5);
  context.lineTo(x1 - 6, y1 + 3.5);
  context.fill();
}
const MANY = 260;
function say(note) {
  if ($("fewer").textContent !== note) $("fewer").textContent = note;
}
function paintEdges(scroll, h) {
  const mode = $("arrows").value;
  let note = "";
  if (mode === "none") return say(note);
  const chosen = new Set();
  for (const step of [selected, hovered]) {
    if (step < 0) continue;
    for (const edge of line.incoming.get(step) || []) chosen.add(edge);
    for (const edge of line.outgoing.get(step) || []) chosen.add(edge);
  }
  const strong = new Set(chosen);
  const rank = hoveredRank;
  if (rank >= 0 && chosen.size === 0) {
    for (const lane of lanesOf[rank]) for (let step = line.first[lane]; step < line.first[lane + 1]; step += 1) {
      for (const edge of line.outgoing.get(step) || []) if (chosen.size < 2 * MANY) chosen.add(edge);
    }
  }
  if (mode === "auto" && strong.size === 0) {
    const inside = [];
    for (let edge = 0; edge < line.edges.length && inside.length <= MANY; edge += 3) {
      const [from, to] = [line.edges[edge], line.edges[edge + 1]];
      if (line.end[to] < view.from || line.start[from] > view.to) continue;
      const place = ends(edge);
      if (!place || Math.max(place[1], place[3]) < scroll || Math.min(place[1], place[3]) > scroll + h) continue;
      inside.push(edge);
    }
    if (inside.length <= MANY) inside.forEach((edge) => chosen.add(edge));
    else note = "too many here: zoom in, or point at a rank or an operation";
  }
  say(note);
  for (const edge of chosen) {
    const place = ends(edge);
    if (!place) continue;
    const [x0, y0, x1, y1, kind] = place;
    context.globalAlpha = strong.has(edge) ? 1 : 0.75;
    const dash = { put: [6, 3], semaphore: [2, 3], barrier: [2, 3] }[kind] || [];
    arrow(x0, y0, x1, y1, strong.has(edge) ? colours.accent : colours[EDGE_LOOKS[kind]] || colours.ink, dash, strong.has(edge) ? 2 : 1.2);
  }
  context.globalAlpha = 1;
  // Writes and reads across ranks that nobody is told about: to and from the peer's lanes.
  for (const step of [selected, hovered]) if (step >= 0) paintReaches(step);
}
function paintReaches(step) {
  const op = ops[line.opOf[step]], own = strip(op.lane);
  if (!own || line.state[step] === 2) return;
  const me = lanes[op.lane].rank, y = own[0] + own[1] / 2;
  const middle = x((line.ready[step] + line.end[step]) / 2);
  const peers = (places) => new Set(places.filter((place) => place[0] !== me).map((place) => place[0]));
  const reach = (rank, outward) => {
    const row = rows.find((row) => row.rank === rank);
    if (!row) return;
    const there = row.top + row.height / 2;
    context.globalAlpha = 0.8;
    if (outward) arrow(middle, y, middle + 10, there, colours.accent, [1, 3], 1.4);
    else arrow(middle - 10, there, middle, y, colours.accent, [1, 3], 1.4);
    context.globalAlpha = 1;
  };
  for (const rank of peers(op.t || [])) reach(rank, true);
  for (const rank of peers(op.f || [])) reach(rank, false);
}
function paintPath() {
  let last = null;
  for (const hop of line.hops) {
    const place = strip(ops[line.opOf[hop.step]].lane);
    if (!place) { last = null; continue; }
    const left = x(Math.max(hop.from, line.start[hop.step])), right = x(hop.to);
    context.strokeStyle = colours.ink;
    context.lineWidth = 2.2;
    context.strokeRect(left, place[0], Math.max(right - left, 1.5), place[1]);
    const middle = place[1] / 2 + place[0];
    const into = Math.max(x(line.ready[hop.step]), last ? last[0] : 0);
    if (last && last[1] !== middle) arrow(last[0], last[1], into, middle, colours.ink, [], 2.2);
    last = [right, middle];
  }
}

// --- what an operation does, in words ---

function place([rank, buffer, index]) {
  const what = buffer > 1 ? " slot " : " chunk ";
  return "rank " + rank + " " + BUFFERS[buffer] + what + index;
}
function places(list) {
  const shown = list.slice(0, 12).map(place).join("; ");
  return list.length > 12 ? shown + "; and " + (list.length - 12) + " more" : shown;
}
function title(op) {
  const lane = lanes[op.lane];
  const inside = op.i === undefined ? "" : "." + op.i;
  return "rank " + lane.rank + ", thread block " + lane.block + ", op " + op.o + inside;
}
function channel(rank, id) {
  const [peer, port] = data.channels[rank][id];
  return id + " (" + (port ? "port, " : "") + "rank " + peer + ")";
}
function describe(step) {
  const detail = $("detail");
  detail.replaceChildren();
  if (step < 0) {
    detail.append(make("h3", {}, "What is this?"),
      make("p", {}, "Point at an operation, or move to one with the arrow keys, to see its operands and what it waits for. Click to keep it here."),
      make("p", {}, "Click a rank's name to open or close its thread blocks."));
    return;
  }
  const op = ops[line.opOf[step]], rank = lanes[op.lane].rank;
  const list = make("dl");
  const row = (name, ...value) => list.append(make("dt", {}, name), make("dd", {}, ...value));
  detail.append(make("h3", {}, called(op) + (op.x ? " (" + op.x + ")" : "")), make("p", { class: "small" }, title(op)));
  for (const fault of faulty.get(line.opOf[step]) || []) detail.append(make("p", { class: "bad" }, fault.code + ": " + fault.message));
  if (line.state[step] === 1) row("time", "waits for ever, from " + time(line.start[step]));
  else row("time", time(line.start[step]) + " to " + time(line.end[step]) + ", " + time(line.end[step] - line.start[step]));
  const waited = line.ready[step] - line.start[step] - data.op;
  if (line.state[step] === 0 && waited > 0) row("of it", "waiting " + time(waited));
  if (line.moved[step]) row("bytes", size(line.moved[step]));
  if (line.bound.has(step)) row("limit", "links or memory, which others may share, not its thread block");
  if (op.c) {
    const [first, count, index, of] = op.c;
    row("part", (count === 1 ? "chunk " + first : "chunks " + first + " to " + (first + count - 1)) + (of > 1 ? ", slice " + index + " of " + of : ""));
  }
  if (op.l) row("loop", "pieces of " + size(op.l[0]));
  if (op.f) row("reads", places(op.f));
  if (op.t) row("writes", places(op.t));
  if (op.h && ["acquire", "release"].includes(op.n)) row("semaphore", op.h.join(", "));
  else if (op.h) row("channel", op.h.map((id) => channel(rank, id)).join(", "));
  if (op.b) row("barrier", op.b[0] + ", of " + op.b[1] + " thread blocks");
  if (op.s !== undefined) row("source", data.sources[op.s]);
  const edges = (map, name, other) => {
    const found = map.get(step) || [];
    if (!found.length) return;
    const text = found.slice(0, 6).map((edge) => KINDS[line.edges[edge + 2]] + ": " + title(ops[line.opOf[line.edges[edge + other]]]));
    if (found.length > 6) text.push("and " + (found.length - 6) + " more");
    row(name, ...text.flatMap((t) => [t, make("br")]));
  };
  edges(line.incoming, "needs", 0);
  edges(line.outgoing, "needed by", 1);
  const hop = line.hopOf.get(step);
  if (hop !== undefined) row("on path", "hop " + (hop + 1) + " of " + line.hops.length + ", " + time(line.hops[hop].to - line.hops[hop].from) + "; " + why(line.hops[hop]));
  detail.append(list);
}
function why(hop) {
  return {
    launch: "the call begins", order: "after the operation before it", signal: "after a signal", packets: "after packets",
    put: "after a put", semaphore: "after a release", barrier: "after the last at the barrier",
  }[hop.reason];
}

// --- pointing, selecting, moving ---

function stepAt(px, py) {
  const y = py + box.scrollTop;
  if (py < AXIS || px < GUTTER) return -1;
  const row = rows.find((row) => y >= row.top && y < row.top + row.height);
  if (!row) return -1;
  const lane = row.lanes[Math.min(row.lanes.length - 1, Math.max(0, Math.floor((y - row.top - 2) / (row.height - 4) * row.lanes.length)))];
  const ns = back(px), slack = 3 / (width() - GUTTER) * (view.to - view.from);
  const step = firstAfter(lane, ns - slack);
  if (step >= line.first[lane + 1] || line.start[step] > ns + slack || line.state[step] === 2) return -1;
  return step;
}
const rowAt = (py) => rows.find((row) => py + box.scrollTop >= row.top && py + box.scrollTop < row.top + row.height);
function select(step, keepView) {
  selected = step;
  describe(step);
  if (step >= 0 && !keepView) reveal(step);
  draw();
}
/** Brings a step into view. */
function reveal(step) {
  const lane = ops[line.opOf[step]].lane, rank = lanes[lane].rank;
  if (filter && !filter.has(rank)) { filter = null; $("ranks").value = ""; layOut(); }
  const [top, tall] = strip(lane);
  if (top < box.scrollTop + AXIS + 4) box.scrollTop = top - AXIS - 8;
  if (top + tall > box.scrollTop + box.clientHeight) box.scrollTop = top + tall - box.clientHeight + 8;
  const span = view.to - view.from;
  if (line.start[step] < view.from || line.end[step] > view.to) {
    const middle = (line.start[step] + Math.min(line.end[step], line.start[step] + span)) / 2;
    setView(middle - span / 2, middle + span / 2);
  }
}
function setView(from, to) {
  const least = Math.min(20, line.span), span = Math.min(Math.max(to - from, least), line.span * 1.02);
  from = Math.min(Math.max(from, 0), Math.max(line.span * 1.02 - span, 0));
  view = { from, to: from + span };
  draw();
}
function zoom(factor, around) {
  const at = around ?? (view.from + view.to) / 2;
  setView(at - (at - view.from) * factor, at + (view.to - at) * factor);
}
const fit = () => setView(0, line.span * 1.02);

const pointers = new Map();
let dragged = false, pinch = 0;
canvas.addEventListener("pointerdown", (event) => {
  pointers.set(event.pointerId, [event.offsetX, event.offsetY]);
  dragged = false;
  canvas.setPointerCapture(event.pointerId);
});
canvas.addEventListener("pointermove", (event) => {
  const before = pointers.get(event.pointerId);
  if (!before) {
    const step = stepAt(event.offsetX, event.offsetY);
    const row = rowAt(event.offsetY);
    const rank = row ? row.rank : -1;
    if (step === hovered && rank === hoveredRank) return;
    const changed = step !== hovered;
    hovered = step;
    hoveredRank = rank;
    if (changed) describe(step >= 0 ? step : selected);
    draw();
    return;
  }
  const others = [...pointers.entries()].filter(([id]) => id !== event.pointerId);
  if (others.length) {
    const other = others[0][1], distance = Math.abs(other[0] - event.offsetX);
    if (pinch > 0 && distance > 0) zoom(pinch / distance, back((other[0] + event.offsetX) / 2));
    pinch = distance;
    dragged = true;
  } else {
    const dx = event.offsetX - before[0];
    if (!dragged && Math.abs(dx) < 4 && Math.abs(event.offsetY - before[1]) < 4) return;
    dragged = true;
    const moved = dx / (width() - GUTTER - 8) * (view.to - view.from);
    setView(view.from - moved, view.to - moved);
    if (event.pointerType === "mouse") box.scrollTop -= event.offsetY - before[1];
  }
  pointers.set(event.pointerId, [event.offsetX, event.offsetY]);
});
const release = (event) => {
  pointers.delete(event.pointerId);
  if (pointers.size < 2) pinch = 0;
};
canvas.addEventListener("pointercancel", release);
canvas.addEventListener("pointerup", (event) => {
  release(event);
  if (dragged) return;
  const row = rowAt(event.offsetY);
  if (event.offsetX < GUTTER && row && event.offsetY > AXIS) return toggle(row.rank);
  select(stepAt(event.offsetX, event.offsetY), true);
});
canvas.addEventListener("pointerleave", () => { hovered = hoveredRank = -1; describe(selected); draw(); });
canvas.addEventListener("dblclick", (event) => zoom(0.5, back(event.offsetX)));
canvas.addEventListener("wheel", (event) => {
  if (event.ctrlKey || event.metaKey) {
    event.preventDefault();
    zoom(1.0015 ** event.deltaY, back(event.offsetX));
  } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
    event.preventDefault();
    const by = (event.deltaX || event.deltaY) / (width() - GUTTER) * (view.to - view.from);
    setView(view.from + by, view.to + by);
  }
}, { passive: false });
box.addEventListener("scroll", draw);
function toggle(rank) {
  if (expanded.has(rank)) expanded.delete(rank); else expanded.add(rank);
  layOut();
}
function move(down) {
  const busy = (lane) => line.first[lane] < line.first[lane + 1];
  const visible = rows.flatMap((row) => row.lanes).filter(busy);
  if (!visible.length) return;
  if (selected < 0) return select(line.first[visible[0]]);
  const at = visible.indexOf(ops[line.opOf[selected]].lane) + down;
  const lane = visible[Math.min(Math.max(at, 0), visible.length - 1)];
  select(Math.min(firstAfter(lane, line.ready[selected]), line.first[lane + 1] - 1));
}
function along(by) {
  if (selected < 0) return move(0);
  const lane = ops[line.opOf[selected]].lane, next = selected + by;
  if (next >= line.first[lane] && next < line.first[lane + 1] && line.state[next] !== 2) select(next);
}
function follow(by) {
  if (!line.hops.length) return;
  const at = line.hopOf.get(selected);
  const next = at === undefined ? (by > 0 ? 0 : line.hops.length - 1) : at + by;
  if (line.hops[next]) select(line.hops[next].step);
}
canvas.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const span = view.to - view.from;
  const keys = {
    ArrowRight: () => event.shiftKey ? setView(view.from + span / 5, view.to + span / 5) : along(1),
    ArrowLeft: () => event.shiftKey ? setView(view.from - span / 5, view.to - span / 5) : along(-1),
    ArrowDown: () => move(1), ArrowUp: () => move(-1),
    "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), 0: fit,
    n: () => follow(1), p: () => follow(-1), Escape: () => select(-1),
    Enter: () => selected >= 0 && toggle(lanes[ops[line.opOf[selected]].lane].rank),
  };
  if (!keys[event.key]) return;
  event.preventDefault();
  keys[event.key]();
});

// --- the rest of the page ---

function heading() {
  document.title = data.name + " · crossweft plan";
  $("name").textContent = data.name;
  const blocks = lanesOf.map((own) => own.length), most = Math.max(...blocks), least = Math.min(...blocks);
  const all = data.channels.flat(), ports = all.filter(([, port]) => port).length;
  const facts = [
    data.collective, many(data.ranks, "rank"),
    (least === most ? most : least + " to " + most) + (most === 1 ? " thread block" : " thread blocks") + " a rank",
    many(all.length, "channel end") + (ports ? " (" + ports + " of ports)" : ""),
    many(ops.length, "operation"), many(data.chunks, "chunk"), ...data.facts,
  ];
  $("facts").textContent = facts.join(" · ");
  const ok = data.faults.length === 0;
  $("verdict").className = ok ? "good" : "bad";
  $("verdict").textContent = ok ? "✓ accepted by the checker" : "✗ refused by the checker: " + many(data.faults.length, "fault");
  if (!ok) {
    $("faults").hidden = false;
    for (const fault of data.faults) {
      const where = [["rank", fault.rank], ["thread block", fault.block], ["op", fault.op]];
      const text = fault.code + where.filter(([, n]) => n !== null).map(([name, n]) => ", " + name + " " + n).join("") + ": " + fault.message;
      const button = make("button", { type: "button" }, "✗ " + text);
      button.addEventListener("click", () => goTo(fault, true));
      $("faults").append(button);
    }
  }
  for (const [look, name] of LEGEND) {
    const swatch = make("svg", { width: 18, height: 12, "aria-hidden": "true" });
    const colour = "var(--" + (look === "hatch" ? "wait" : look) + ")";
    if (look === "ink") swatch.append(make("rect", { x: 1.5, y: 1.5, width: 15, height: 9, fill: "none", stroke: colour, "stroke-width": 2.2 }));
    else if (look === "hatch") for (const at of [0, 6, 12]) swatch.append(make("line", { x1: at, y1: 12, x2: at + 6, y2: 0, stroke: colour, "stroke-width": 1.3 }));
    else swatch.append(make("rect", { width: 18, height: 12, fill: colour }));
    $("legend").append(make("span", {}, swatch, name));
  }
  $("topology").textContent = data.topology;
}
function goTo(fault, focus) {
  for (let step = 0; step < line.opOf.length; step += 1) {
    const op = ops[line.opOf[step]], lane = lanes[op.lane];
    if (lane.rank === fault.rank && (fault.block === null || lane.block === fault.block) && (fault.op === null || op.o === fault.op)) {
      if (line.state[step] !== 2) { expanded.add(lane.rank); layOut(); select(step); if (focus) canvas.focus(); }
      return;
    }
  }
}
function chart() {
  const W = 400, H = 165, L = 44, B = 22, points = data.sweep.filter(([, ns]) => ns !== null && ns > 0);
  const body = $("sweep").tBodies[0];
  for (const [bytes, ns] of data.sweep) {
    body.append(make("tr", {}, make("td", {}, size(bytes)), make("td", {}, ns === null ? "never ends" : time(ns)), make("td", {}, ns === null ? "" : rate(bytes, ns))));
  }
  if (!points.length) { $("chart").textContent = "It never ends."; return; }
  const logs = points.map(([bytes, ns]) => [Math.log2(bytes), Math.log10(ns / 1000)]);
  const [x0, x1] = [logs[0][0], Math.max(logs[logs.length - 1][0], logs[0][0] + 1)];
  const y0 = Math.floor(Math.min(...logs.map((p) => p[1]))), y1 = Math.max(Math.ceil(Math.max(...logs.map((p) => p[1]))), y0 + 1);
  const px = (v) => L + (v - x0) / (x1 - x0) * (W - L - 14), py = (v) => H - B - (v - y0) / (y1 - y0) * (H - B - 10);
  const svg = make("svg", { viewBox: "0 0 " + W + " " + H, role: "img", "aria-label": "Predicted time by message size; both axes are logarithmic. The table below has the values." });
  for (let power = y0; power <= y1; power += 1) {
    svg.append(make("line", { x1: L, x2: W - 14, y1: py(power), y2: py(power), stroke: "var(--line)" }));
    const label = make("text", { x: L - 5, y: py(power) + 3.5, "text-anchor": "end" }, power >= 3 ? 10 ** (power - 3) + " ms" : trim(10 ** power, 3) + " µs");
    svg.append(label);
  }
  const marks = logs.length > 6 ? [0, 1, 2, 3].map((i) => Math.round(i * (logs.length - 1) / 3)) : logs.map((_, i) => i);
  for (const mark of marks) svg.append(make("text", { x: px(logs[mark][0]), y: H - 6, "text-anchor": mark === logs.length - 1 ? "end" : "middle" }, size(points[mark][0])));
  svg.append(make("polyline", { points: logs.map(([a, b]) => px(a) + "," + py(b)).join(" "), fill: "none", stroke: "var(--accent)", "stroke-width": 2 }));
  logs.forEach(([a, b], i) => {
    const dot = make("circle", { cx: px(a), cy: py(b), r: 3, fill: "var(--accent)" });
    const hint = document.createElementNS("http://www.w3.org/2000/svg", "title");
    hint.textContent = size(points[i][0]) + ": " + time(points[i][1]);
    dot.append(hint);
    svg.append(dot);
  });
  svg.append(make("circle", { id: "here", r: 6, fill: "none", stroke: "var(--ink)", "stroke-width": 2 }));
  $("chart").append(svg);
  chart.place = (bytes, ns) => {
    const here = $("here"), shown = ns !== null && ns > 0;
    here.setAttribute("visibility", shown ? "visible" : "hidden");
    if (shown) { here.setAttribute("cx", px(Math.log2(bytes))); here.setAttribute("cy", py(Math.log10(ns / 1000))); }
  };
}
/** The critical path's time by what it was spent on. */
function shares() {
  const sums = new Map(), add = (name, look, ns) => {
    if (ns <= 0) return;
    const [, before] = sums.get(name) || [look, 0];
    sums.set(name, [look, before + ns]);
  };
  for (const hop of line.hops) {
    const op = ops[line.opOf[hop.step]], name = called(op);
    const start = Math.min(Math.max(line.start[hop.step], hop.from), hop.to);
    if (hop.reason === "launch") add("launch", "soft", start - hop.from);
    // What was under way from the step before: it may have left after this one began to wait.
    const ready = Math.min(Math.max(line.ready[hop.step], start), hop.to);
    const crossing = ["signal", "packets", "put", "semaphore"].includes(hop.reason) ? Math.max(ready - hop.from, 0) : 0;
    const rest = hop.to - hop.from - crossing - (hop.reason === "launch" ? start - hop.from : 0);
    if (crossing > 0) add("on its way (" + hop.reason + ")", "wait", crossing);
    add(name + (line.bound.has(hop.step) ? ", link-bound" : ""), LOOKS[op.n] || "meet", rest);
  }
  $("sofar").textContent = line.total === null ? "up to where it stops" : "along the critical path";
  const all = [...sums.values()].map(([, ns]) => ns), target = $("shares");
  const total = all.reduce((sum, ns) => sum + ns, 0), most = Math.max(...all);
  target.replaceChildren();
  for (const [name, [look, ns]] of [...sums].sort((a, b) => b[1][1] - a[1][1]).filter((share) => share[1][1] >= total / 200)) {
    const bar = make("i", { style: "background: var(--" + look + "); width: " + (100 * ns / most).toFixed(1) + "%" });
    target.append(make("div", { class: "share" }, make("span", {}, name), make("span", {}, bar), make("span", {}, time(ns) + ", " + Math.round(100 * ns / total) + " %")));
  }
  if (!sums.size) target.textContent = "No operation is ever over.";
}
function hopList() {
  const list = $("hops").querySelector("ol");
  list.replaceChildren();
  const shown = line.hops.length > 300 ? [...line.hops.slice(0, 150), null, ...line.hops.slice(-150)] : line.hops;
  for (const hop of shown) {
    if (!hop) { list.append(make("li", { value: line.hops.length - 150 }, "… " + (line.hops.length - 300) + " more")); continue; }
    const op = ops[line.opOf[hop.step]];
    const button = make("button", { type: "button" }, called(op) + ", " + title(op) + ": " + time(hop.to - hop.from) + ", " + why(hop));
    button.addEventListener("click", () => select(hop.step));
    list.append(make("li", {}, button));
  }
}
function choose(index) {
  const part = [view.from / line.span, view.to / line.span], op = selected >= 0 ? line.opOf[selected] : -1;
  current = index;
  line = decode(index);
  [...$("sizes").children].forEach((button, i) => {
    button.setAttribute("aria-checked", i === index);
    button.tabIndex = i === index ? 0 : -1;
  });
  $("total").textContent = line.total === null ? "never ends" : time(line.total);
  $("rate").textContent = line.total === null ? "" : "for " + size(line.bytes) + ", " + rate(line.bytes, line.total);
  chart.place?.(line.bytes, line.total);
  hovered = -1;
  selected = op < 0 ? -1 : line.opOf.indexOf(op);
  setView(part[0] * line.span, part[1] * line.span);
  shares();
  hopList();
  describe(selected);
}
function sizes() {
  data.timelines.forEach((timeline, index) => {
    const button = make("button", { type: "button", role: "radio" }, size(timeline.bytes));
    button.addEventListener("click", () => choose(index));
    $("sizes").append(button);
  });
  $("sizes").addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const next = $("sizes").children[current + by];
    if (!next) return;
    event.preventDefault();
    next.focus();
    choose(current + by);
  });
  $("machine").textContent = "on topology “" + data.machine + "”; a message is one block of input or output" + (data.dropped ? "; " + many(data.dropped, "size") + " left out to keep this page small" : "");
}
function ranksWanted(text) {
  const wanted = new Set();
  for (const part of text.split(",").map((part) => part.trim()).filter(Boolean)) {
    const found = /^(\d+)(?:\s*-\s*(\d+))?$/.exec(part);
    if (!found) return undefined;
    const [from, to] = [Number(found[1]), Number(found[2] ?? found[1])];
    if (from > to || to >= data.ranks) return undefined;
    for (let rank = from; rank <= to; rank += 1) wanted.add(rank);
  }
  return wanted.size ? wanted : null;
}
$("ranks").addEventListener("input", () => {
  const wanted = ranksWanted($("ranks").value);
  $("ranks").setAttribute("aria-invalid", wanted === undefined);
  if (wanted === undefined) return;
  filter = wanted;
  box.scrollTop = 0;
  layOut();
});
$("fit").addEventListener("click", fit);
$("in").addEventListener("click", () => zoom(0.6));
$("out").addEventListener("click", () => zoom(1 / 0.6));
$("open").addEventListener("click", () => { for (let rank = 0; rank < data.ranks; rank += 1) expanded.add(rank); layOut(); });
$("close").addEventListener("click", () => { expanded.clear(); box.scrollTop = 0; layOut(); });
$("path").addEventListener("change", draw);
$("arrows").addEventListener("change", draw);
window.addEventListener("resize", () => { measure(); draw(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readColours(); draw(); });

readColours();
measure();
heading();
chart();
sizes();
layOut();
choose(0);
fit();
if (data.faults.length) goTo(data.faults[0]);
})();
