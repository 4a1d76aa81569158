/* Lines with bands, marks and labels at their ends. */

function drawLines(spec, width, paper) {
  const shown = spec.series.filter((line) => line.points.length);
  const labelled = paper || width >= 640;
  const longest = Math.min(width >= 900 ? 210 : 150, Math.max(0, ...shown.map((line) => textWidth(line.label))));
  const top = paper ? 68 : 34;
  const box = { left: 62, right: width - (labelled ? longest + 26 : 14), top, bottom: top + (width < 500 ? 250 : 320) };
  const xs = shown.filter((line) => !line.flat).flatMap((line) => line.points.map((p) => p.x));
  const ys = shown.flatMap((line) => line.points.flatMap((p) => [p.y, p.low ?? p.y, p.high ?? p.y]));
  const x = makeScale(xs, box.left, box.right, { log: spec.xLog, pad: 0.01, wanted: width < 500 ? 4 : 7, low: spec.xLog ? null : 0 });
  const y = makeScale(ys, box.bottom, box.top, { log: spec.yLog, ...limits(ys, spec) });
  const svg = newSvg(width, box.bottom + 52, spec.alt, paper ? spec.title : "");
  drawAxes(svg, x, y, box, spec);
  if (!shown.length) svg.append(text((box.left + box.right) / 2, (box.top + box.bottom) / 2, "Nothing to show here", "middle", "middle", "label"));
  const placed = shown.map((line) => place(line, x, y, box));
  for (const line of placed) svg.append(drawBand(line));
  for (const line of placed) svg.append(drawLine(line));
  if (labelled) drawEndLabels(svg, placed, box, Math.floor(longest / 6.6));
  return { svg, box, lines: placed, keys: sortedKeys(placed) };
}

function limits(values, spec) {
  const finite = values.filter((v) => v !== null && Number.isFinite(v));
  if (!spec.fraction || spec.yLog || !finite.length) return {};
  const low = Math.min(...finite);
  const high = Math.max(...finite);
  const room = Math.max(high - low, 0.02) * 0.05;
  return { low: Math.max(0, low - room), high: Math.min(Math.max(1, high), high + room) };
}

/* Pixels of a line. One that spends nothing is a level that the others are measured against. */
function place(line, x, y, box) {
  const floor = (value) => y.position(y.log ? Math.max(value, y.low) : Math.min(Math.max(value, y.low), y.high));
  const usable = line.points.filter((p) => p.y !== null && (line.flat || !x.log || p.x > 0));
  const dots = usable.map((p) => ({ ...p, px: line.flat ? box.left : x.position(p.x), py: floor(p.y), plow: floor(p.low ?? p.y), phigh: floor(p.high ?? p.y) }));
  if (!line.flat || !dots.length) return { ...line, dots };
  const last = dots[dots.length - 1];
  return { ...line, dots: [last, { ...last, px: box.right }] };
}

function drawBand(line) {
  const group = shape("g", { class: `series ${line.style.kind}` });
  if (line.flat || !line.dots.some((d) => d.plow !== d.phigh)) return group;
  const up = line.dots.map((d) => `${d.px.toFixed(1)} ${d.phigh.toFixed(1)}`);
  const down = line.dots.map((d) => `${d.px.toFixed(1)} ${d.plow.toFixed(1)}`).reverse();
  group.append(shape("path", { class: "band", d: `M${[...up, ...down].join("L")}z` }));
  return group;
}

function drawLine(line) {
  const group = shape("g", { class: `series ${line.style.kind}` });
  if (!line.dots.length) return group;
  const path = line.dots.map((d) => `${d.px.toFixed(1)} ${d.py.toFixed(1)}`).join("L");
  group.append(shape("path", { class: "line", d: `M${path}`, "stroke-dasharray": line.flat ? "4 4" : line.style.dash || null }));
  const every = Math.max(1, Math.round(line.dots.length / 7));
  const offset = line.index % every;
  line.dots.forEach((d, at) => {
    if (!line.flat && (at % every === offset || at === line.dots.length - 1)) group.append(marker(line.style.mark, d.px, d.py, 3.2));
  });
  return group;
}

function drawEndLabels(svg, lines, box, most) {
  const labels = lines.filter((line) => line.dots.length).map((line) => {
    const end = line.dots[line.dots.length - 1];
    return { line, x: end.px, from: end.py, y: end.py };
  }).sort((a, b) => a.y - b.y);
  for (let at = 1; at < labels.length; at += 1) labels[at].y = Math.max(labels[at].y, labels[at - 1].y + 15);
  let floor = box.bottom + 4;
  for (let at = labels.length - 1; at >= 0; at -= 1) {
    labels[at].y = Math.min(labels[at].y, floor);
    floor = labels[at].y - 15;
  }
  for (const { line, x, from, y } of labels) {
    const group = shape("g", { class: `series ${line.style.kind}` });
    group.append(shape("path", { class: "leader", d: `M${x + 5} ${from}L${box.right + 12} ${y}` }));
    group.append(nameText(box.right + 16, y, line.label, Math.max(most, 6), "start", "middle"));
    svg.append(group);
  }
}

function sortedKeys(lines) {
  const all = new Set(lines.filter((line) => !line.flat).flatMap((line) => line.dots.map((d) => Math.round(d.px))));
  return [...all].sort((a, b) => a - b);
}

/* The values under a vertical line: the nearest point of every series, best first as drawn. */
function readAt(drawn, px) {
  const found = [];
  for (const line of drawn.lines) {
    if (!line.dots.length) continue;
    const near = line.flat ? line.dots[0] : line.dots.reduce((a, b) => (Math.abs(b.px - px) < Math.abs(a.px - px) ? b : a));
    if (line.flat || Math.abs(near.px - px) <= Math.max(14, 0.04 * (drawn.box.right - drawn.box.left))) found.push({ line, point: near });
  }
  return found.sort((a, b) => a.point.py - b.point.py);
}

const AXES = {
  round: ["rounds", "number"],
  up: ["bytes up, all clients together", "bytes"],
  down: ["bytes down, all clients together", "bytes"],
  total: ["bytes up and down, all clients together", "bytes"],
  seconds: ["wall time in seconds, including evaluation", "seconds"],
  simulated: ["simulated seconds on the configured network", "seconds"],
  flops: ["floating-point operations of the clients", "flops"],
};

function curveSpec(section, state, visible) {
  const percent = section.percent && state.metric === section.score;
  const error = percent && section.maximize && state.ylog;
  const turn = (value) => (value === null ? null : error ? 1 - value : value);
  const key = `${state.model}|${state.split}|${state.metric}`;
  const statistic = state.statistic;
  const series = visible.map((group) => {
    const column = group.curves.y[key];
    const x = state.x === "round" ? group.curves.round : group.curves.x[state.x];
    const points = column ? x.map((value, at) => {
      const middle = column[statistic][at];
      const spread = statistic === "mean" && state.band !== "none" ? column[state.band][at] : null;
      const pair = middle === null || spread === null ? [null, null] : [turn(middle - spread), turn(middle + spread)];
      return { x: value, y: turn(middle), low: pair[0], high: pair[1], round: group.curves.round[at] };
    }).filter((p) => p.y !== null) : [];
    const flat = state.x !== "round" && points.length > 0 && points.every((p) => !p.x);
    return { label: flat ? `${group.label} (none)` : group.label, name: group.label, index: group.index, style: styleOf(group.index), points, flat };
  });
  const what = error ? `error (1 − ${state.metric})` : state.metric;
  const over = statistic === "mean" ? "mean over clients" : "mean of the worst tenth of clients";
  const [xLabel, xFormat] = AXES[state.x];
  const seeds = Math.max(...section.groups.map((group) => group.seeds.length));
  const bands = { none: "", seeds: "; band: ± one standard deviation over seeds", clients: "; band: ± one standard deviation over clients" };
  const title = `${capital(state.model)} ${what} against ${xLabel}`;
  const caption = `${capital(state.model)} ${what} on ${state.split} rows, ${over}${seeds > 1 ? ", mean over seeds" : ""}${statistic === "mean" ? bands[state.band] : ""}.`
    + (series.some((line) => line.flat) ? " A dashed level belongs to an algorithm that spends nothing on this axis: its last score." : "");
  const yFormat = FORMATS[percent ? "percent" : "number"];
  const ends = series.filter((line) => line.points.length).map((line) => `${line.name} ${yFormat(line.points[line.points.length - 1].y)}`);
  return {
    series, title, caption, xLabel, yLabel: what, xFormat: FORMATS[xFormat], yFormat, xLog: state.xlog, yLog: state.ylog, fraction: percent,
    alt: `Line chart. ${caption} Horizontal axis: ${xLabel}. At the end: ${ends.join(", ")}.`,
  };
}

function ledgerSpec(section, state, visible) {
  const series = visible.map((group) => {
    const column = group.ledger.y[state.series] || [];
    const points = group.ledger.round.map((round, at) => ({ x: round, y: column[at] ?? null, round })).filter((p) => p.y !== null);
    return { label: group.label, name: group.label, index: group.index, style: styleOf(group.index), points, flat: false };
  });
  const share = state.series.includes("share");
  const kind = share ? "percent" : state.series.startsWith("bytes") ? "bytes" : state.series.startsWith("seconds") ? "seconds" : "number";
  const caption = `${capital(state.series)}, round by round${state.series.startsWith("reported") ? " (mean over the cohort, as the algorithm reports it)" : ""}.`;
  return {
    series, caption, title: `${capital(state.series)}, round by round`, xLabel: "rounds", yLabel: state.series, xFormat: FORMATS.number, yFormat: FORMATS[kind],
    xLog: false, yLog: state.ylog, fraction: false, alt: `Line chart. ${caption}`,
  };
}

function capital(words) {
  return words.charAt(0).toUpperCase() + words.slice(1);
}
