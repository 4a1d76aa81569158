/* Scores of clients: one row per algorithm with a box or a violin, and one point per client. */

const MOST_DOTS = 600;

/* Values by client; over a baseline the difference on the same client, seed and rows. */
function clientValues(section, group, state, base) {
  const found = [];
  for (const run of group.clients[state.model] || []) {
    const other = base ? (base.clients[state.model] || []).find((r) => r.pair === run.pair) : null;
    if (base && !other) continue;
    const known = other ? new Map(other.ids.map((id, at) => [id, other.values[at]])) : null;
    run.ids.forEach((id, at) => {
      let value = run.values[at];
      if (known) {
        if (!known.has(id) || value === null || known.get(id) === null) return;
        value = (section.maximize ? 1 : -1) * (value - known.get(id));
      }
      if (value !== null) found.push({ value, id, seed: run.seed, rows: run.rows[at], round: run.round });
    });
  }
  return found;
}

function quantile(sorted, q) {
  const at = (sorted.length - 1) * q;
  const low = Math.floor(at);
  return sorted[low] + (at - low) * ((sorted[low + 1] ?? sorted[low]) - sorted[low]);
}

function boxOf(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const [q1, median, q3] = [0.25, 0.5, 0.75].map((q) => quantile(sorted, q));
  const reach = 1.5 * (q3 - q1);
  const low = sorted.find((v) => v >= q1 - reach);
  const high = [...sorted].reverse().find((v) => v <= q3 + reach);
  return { q1, median, q3, low, high, mean: sorted.reduce((a, b) => a + b, 0) / sorted.length, sorted };
}

function clientSpec(section, state, visible) {
  const base = state.base === "none" ? null : section.groups.find((group) => group.label === state.base);
  const rows = visible.filter((group) => group !== base).map((group) => {
    const items = clientValues(section, group, state, base);
    return { label: group.label, index: group.index, style: styleOf(group.index), items, box: items.length ? boxOf(items.map((item) => item.value)) : null };
  });
  const percent = section.percent;
  const format = FORMATS[base ? (percent ? "points" : "gain") : percent ? "percent" : "number"];
  const what = base ? `gain in ${state.model} ${section.score} over ${base.label}${percent ? ", percentage points" : ""}` : `${state.model} ${section.score}`;
  const seeds = Math.max(...section.groups.map((group) => group.seeds.length));
  const rounds = [...new Set(rows.flatMap((row) => row.items.map((item) => item.round)))].sort((a, b) => a - b);
  const who = seeds > 1 ? "Each point is one client in one seed" : "Each point is one client";
  const paired = base ? " Pairs: the same client, seed and rows; right of zero is better." : "";
  const drawnAs = state.shape === "box" ? "Box: quartiles and median; whiskers: 1.5 times the interquartile range; diamond: unweighted mean." : "Violin: density of the clients; bar: median; diamond: unweighted mean.";
  const caption = `${capital(what)} on test rows, last evaluated round${rounds.length ? ` (${rounds.join(", ")})` : ""}. ${who}. ${drawnAs}${paired}`;
  const spoken = rows.filter((row) => row.box).map((row) => `${row.label}: median ${format(row.box.median)}, quartiles ${format(row.box.q1)} and ${format(row.box.q3)}`);
  return { rows, base, format, percent, caption, xLabel: what, title: capital(what), alt: `Distribution over clients. ${caption} ${spoken.join("; ")}.`, shape: state.shape };
}

function drawClients(spec, width, paper) {
  const wide = paper || width >= 560;
  const longest = Math.min(190, Math.max(40, ...spec.rows.map((row) => textWidth(row.label))));
  const height = wide ? 54 : 70;
  const top = paper ? 44 : 10;
  const box = { left: wide ? longest + 26 : 16, right: width - (spec.base && wide ? 100 : 30), top, bottom: top + Math.max(1, spec.rows.length) * height };
  const values = spec.rows.flatMap((row) => row.items.map((item) => item.value));
  const ends = spec.percent && !spec.base ? limits(values, { fraction: true }) : {};
  const x = makeScale(spec.base ? [...values, 0] : values, box.left, box.right, { wanted: width < 500 ? 4 : 7, ...ends });
  const svg = newSvg(width, box.bottom + 52, spec.alt, paper ? spec.title : "");
  drawAxes(svg, x, null, box, { xLabel: shorten(spec.xLabel, Math.floor(width / 7)), xFormat: spec.format });
  if (spec.base) svg.append(shape("line", { class: "zero", x1: x.position(0), x2: x.position(0), y1: box.top, y2: box.bottom }));
  const dots = [];
  spec.rows.forEach((row, at) => {
    const middle = box.top + height * (at + (wide ? 0.5 : 0.62));
    svg.append(wide ? nameText(box.left - 12, middle, row.label, 28, "end", "middle") : nameText(box.left, box.top + height * at + 16, row.label, 38, "start", "auto"));
    if (!row.box) {
      svg.append(text(box.left + 8, middle, spec.base ? "no pairs with the baseline" : "no scores", "start", "middle", "label"));
      return;
    }
    svg.append(drawRow(row, x, middle, spec, dots));
    if (spec.base) svg.append(betterShare(row, spec, wide ? box.right + 10 : box.right, wide ? middle : box.top + height * at + 16, wide));
  });
  return { svg, dots, box };
}

/* Keyboard navigation of clients: left and right by score, up and down by algorithm. */
function dotPlaces(dots) {
  const rows = [...new Set(dots.map((dot) => dot.row))];
  const ordered = (row) => dots.filter((dot) => dot.row === row).sort((a, b) => a.item.value - b.item.value);
  return rows.flatMap((row, y) => ordered(row).map((dot, x) => ({ x, y, dot })));
}

function betterShare(row, spec, x, y, wide) {
  const better = row.items.filter((item) => item.value > 0).length / row.items.length;
  return text(x, y, `${Math.round(100 * better)} % better`, wide ? "start" : "end", wide ? "middle" : "auto", "label");
}

function drawRow(row, x, middle, spec, dots) {
  const group = shape("g", { class: `series ${row.style.kind}` });
  const { q1, q3, low, high, median, mean, sorted } = row.box;
  const at = (value) => x.position(value);
  const every = Math.max(1, Math.ceil(row.items.length / MOST_DOTS));
  row.items.forEach((item, index) => {
    if (index % every) return;
    const spread = ((index * 0.618034) % 1) - 0.5; // evenly spaced, the same every time
    const dot = { item, row, px: at(item.value), py: middle + spread * 26 };
    dots.push(dot);
    group.append(shape("circle", { class: "dot", cx: dot.px.toFixed(1), cy: dot.py.toFixed(1), r: row.items.length > 150 ? 2 : 3 }));
  });
  if (spec.shape === "violin") group.append(violin(sorted, x, middle));
  else {
    group.append(shape("path", { class: "whisker", d: `M${at(low)} ${middle}H${at(q1)}M${at(q3)} ${middle}H${at(high)}M${at(low)} ${middle - 6}v12M${at(high)} ${middle - 6}v12` }));
    group.append(shape("rect", { class: "box", x: at(q1), y: middle - 11, width: Math.max(1, at(q3) - at(q1)), height: 22, rx: 2 }));
  }
  group.append(shape("line", { class: "median", x1: at(median), x2: at(median), y1: middle - 13, y2: middle + 13 }));
  const diamond = marker("diamond", at(mean), middle, 3.6);
  diamond.setAttribute("class", "average");
  group.append(diamond);
  return group;
}

/* A Gaussian kernel estimate, mirrored; cut at the extremes, because no client lies beyond. */
function violin(sorted, x, middle) {
  const count = sorted.length;
  const mean = sorted.reduce((a, b) => a + b, 0) / count;
  const deviation = Math.sqrt(sorted.reduce((a, b) => a + (b - mean) ** 2, 0) / count);
  const width = Math.max(1.06 * deviation * count ** -0.2, (x.high - x.low) * 0.008);
  const [low, high] = [sorted[0], sorted[count - 1]];
  const grid = Array.from({ length: 81 }, (_, at) => low + ((high - low) * at) / 80);
  const density = grid.map((g) => sorted.reduce((sum, v) => sum + Math.exp(-0.5 * ((g - v) / width) ** 2), 0));
  const top = Math.max(...density);
  const edge = grid.map((g, at) => [x.position(g).toFixed(1), (17 * density[at]) / top]);
  const upper = edge.map(([px, h]) => `${px} ${(middle - h).toFixed(1)}`);
  const lower = edge.map(([px, h]) => `${px} ${(middle + h).toFixed(1)}`).reverse();
  return shape("path", { class: "box", d: `M${[...upper, ...lower].join("L")}z` });
}
