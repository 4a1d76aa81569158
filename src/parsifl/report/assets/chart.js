"use strict";
/* Scales, ticks, number formats and axes, shared by all figures. */

const SVG = "http://www.w3.org/2000/svg";
const DASHES = ["", "7 3", "2 3", "9 3 2 3"];
const SHAPES = ["circle", "square", "triangle", "diamond", "down", "cross"];
const MISSING = "–";

function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  return furnish(node, attributes, children);
}

function shape(name, attributes = {}, ...children) {
  return furnish(document.createElementNS(SVG, name), attributes, children);
}

function furnish(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

function significant(value, digits = 3) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-4 || size >= 1e6) return value.toExponential(digits - 1).replace("e+", "e");
  const decimals = Math.max(0, digits - 1 - Math.floor(Math.log10(size)));
  return value.toFixed(Math.min(decimals, 12));
}

function scaled(value, units) {
  let at = 0;
  while (Math.abs(value) >= 999.5 && at + 1 < units.length) {
    value /= 1000;
    at += 1;
  }
  return `${Number(significant(value))} ${units[at]}`.trim();
}

const FORMATS = {
  number: (value) => String(Number(significant(value, 4))),
  percent: (value) => `${Number((100 * value).toFixed(1))} %`,
  points: (value) => `${value > 0 ? "+" : value < 0 ? "\u2212" : ""}${Number(Math.abs(100 * value).toFixed(1))}`,
  gain: (value) => `${value > 0 ? "+" : ""}${Number(significant(value, 4))}`,
  bytes: (value) => scaled(value, ["B", "kB", "MB", "GB", "TB", "PB"]),
  flops: (value) => scaled(value, ["", "k", "M", "G", "T", "P", "E"]),
  seconds: (value) => (value !== 0 && value < 1 ? `${Number(significant(1000 * value))} ms` : `${Number(significant(value))} s`),
};

/* Ticks at 1, 2 or 5 times a power of ten. */
function linearTicks(low, high, wanted) {
  const rough = (high - low) / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999) || 10 * power;
  const ticks = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high * (1 + 1e-12) + step * 1e-9; at += 1) ticks.push(at * step);
  return ticks;
}

function logTicks(low, high, wanted) {
  const from = Math.floor(Math.log10(low));
  const to = Math.ceil(Math.log10(high));
  const every = Math.max(1, Math.ceil((to - from) / Math.max(1, wanted)));
  const multiples = to - from <= 2 ? [1, 2, 5] : [1];
  const ticks = [];
  for (let power = from; power <= to; power += every) {
    for (const multiple of multiples) {
      const tick = multiple * 10 ** power;
      if (tick >= low * 0.999 && tick <= high * 1.001) ticks.push(tick);
    }
  }
  return ticks.length > 1 ? ticks : [low, high];
}

/* A scale turns values into pixels; `values` sets its domain unless low and high are given. */
function makeScale(values, from, to, { log = false, pad = 0.04, low = null, high = null, wanted = 6 } = {}) {
  const usable = values.filter((v) => v !== null && Number.isFinite(v) && (!log || v > 0));
  let least = low ?? (usable.length ? usable.reduce((a, b) => Math.min(a, b)) : log ? 1 : 0);
  let most = high ?? (usable.length ? usable.reduce((a, b) => Math.max(a, b)) : log ? 10 : 1);
  if (least === most) {
    const room = log ? 0 : Math.abs(least) * 0.1 || 1;
    [least, most] = log ? [least / 2, most * 2] : [least - room, most + room];
  } else if (log) {
    const room = (most / least) ** pad;
    least = low ?? least / room;
    most = high ?? most * room;
  } else {
    const room = (most - least) * pad;
    least = low ?? least - room;
    most = high ?? most + room;
  }
  const map = log ? Math.log10 : (v) => v;
  const [a, b] = [map(least), map(most)];
  const position = (value) => from + ((map(value) - a) / (b - a)) * (to - from);
  const ticks = (log ? logTicks : linearTicks)(least, most, wanted);
  return { position, ticks, low: least, high: most, log, from, to };
}

function drawAxes(svg, x, y, box, { xLabel, yLabel, xFormat, yFormat }) {
  const grid = shape("g", { class: "grid" });
  const axis = shape("g", { class: "axis" });
  for (const tick of y ? y.ticks : []) {
    const at = y.position(tick);
    grid.append(shape("line", { x1: box.left, x2: box.right, y1: at, y2: at }));
    axis.append(text(box.left - 8, at, yFormat(tick), "end", "middle"));
  }
  for (const tick of x.ticks) {
    const at = x.position(tick);
    if (!y) grid.append(shape("line", { x1: at, x2: at, y1: box.top, y2: box.bottom }));
    axis.append(shape("line", { x1: at, x2: at, y1: box.bottom, y2: box.bottom + 4 }));
    axis.append(text(at, box.bottom + 18, xFormat(tick), "middle"));
  }
  axis.append(shape("line", { x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }));
  axis.append(text((box.left + box.right) / 2, box.bottom + 40, xLabel, "middle", "auto", "label"));
  if (yLabel) axis.append(text(box.left - 8, box.top - 14, yLabel, box.left > 120 ? "end" : "start", "auto", "label", box.left > 120 ? null : 4));
  svg.append(grid, axis);
}

function text(x, y, content, anchor = "start", baseline = "auto", kind = null, left = null) {
  const node = shape("text", { x: left ?? x, y, "text-anchor": anchor, class: kind });
  if (baseline === "middle") node.setAttribute("dy", "0.35em");
  node.textContent = content;
  return node;
}

function marker(kind, x, y, size) {
  const s = size;
  const path = {
    square: `M${x - s} ${y - s}h${2 * s}v${2 * s}h${-2 * s}z`,
    triangle: `M${x} ${y - 1.2 * s}l${1.2 * s} ${2.1 * s}h${-2.4 * s}z`,
    diamond: `M${x} ${y - 1.4 * s}l${1.4 * s} ${1.4 * s}l${-1.4 * s} ${1.4 * s}l${-1.4 * s} ${-1.4 * s}z`,
    down: `M${x} ${y + 1.2 * s}l${1.2 * s} ${-2.1 * s}h${-2.4 * s}z`,
    cross: `M${x - s} ${y - s}l${2 * s} ${2 * s}M${x + s} ${y - s}l${-2 * s} ${2 * s}`,
  }[kind];
  if (!path) return shape("circle", { cx: x, cy: y, r: s, class: "mark" });
  return shape("path", { d: path, class: kind === "cross" ? "mark open" : "mark" });
}

function styleOf(index) {
  return { kind: `k${index % 8}`, dash: DASHES[Math.floor(index / 8) % DASHES.length], mark: SHAPES[index % SHAPES.length] };
}

function newSvg(width, height, alt, title) {
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": alt });
  if (title) svg.append(text(16, 24, title, "start", "auto", "heading"));
  return svg;
}

function textWidth(label) {
  return 6.6 * label.length;
}

function shorten(label, most) {
  return label.length > most ? `${label.slice(0, most - 1)}…` : label;
}

/* The name of an algorithm; the tooltip shows what does not fit. */
function nameText(x, y, label, most, anchor, baseline) {
  const node = text(x, y, shorten(label, most), anchor, baseline, "name");
  if (label.length > most) node.append(shape("title", {}, label));
  return node;
}
