/* Structure of the models: density, rank, masks and overlap. */

const INSIDES = {
  density: ["density", "Fraction of non-zero entries"],
  rank: ["rank", "Numerical rank over full rank (singular values above a thousandth of the largest)"],
  masks: ["masks", "Which blocks each device trains: filled are trained, pale are frozen"],
  overlap: ["overlap", "Jaccard index of the supports of each pair of clients: shared entries over entries of either"],
};

function mean(values) {
  return values.reduce((a, b) => a + b, 0) / values.length;
}

function insideControls(section) {
  const groups = section.groups.filter((group) => group.anatomy);
  const has = (name) => groups.some((group) => group.anatomy[name].some((row) => row.some((value) => value !== null)));
  const density = (group) => mean(group.anatomy.density.flat().filter((value) => value !== null));
  const sparsest = groups.reduce((a, b) => (a && density(a) <= density(b) ? a : b), null);
  return [
    choice("method", "Algorithm", groups.map((group) => group.label), sparsest?.label),
    choice("show", "Show", Object.keys(INSIDES).filter(has), "density", { density: "density by layer", rank: "rank by layer", masks: "masks: device by block", overlap: "overlap of supports" }),
  ];
}

function insideSpec(section, state) {
  const group = section.groups.find((each) => each.label === state.method);
  const inside = group.anatomy;
  const clients = inside.rows.filter((row) => row !== "server").map((row) => `client ${row}`);
  const states = state.show === "density" || state.show === "rank";
  const masks = inside.masks || [];
  const rows = { masks: masks.map((_, at) => `device ${at}`), overlap: clients }[state.show] || inside.rows.map((row) => (row === "server" ? row : `client ${row}`));
  const columns = { masks: (masks[0] || []).map((_, at) => `block ${at}`), overlap: clients }[state.show] || inside.columns;
  const caption = `${group.label}, seed ${group.seeds[0]}, state after round ${inside.round}. ${INSIDES[state.show][1]}.`
    + (states ? " A row is the server or a client that keeps a state; a column is a part of the state. Blank: missing or undefined." : "");
  const cells = inside[state.show];
  const known = cells.flat().filter((value) => value !== null);
  const spoken = known.length ? `The mean of all cells is ${FORMATS.percent(mean(known))}.` : "Nothing to show for this algorithm.";
  return { rows, columns, cells, caption, title: `${group.label}: ${INSIDES[state.show][0]}`, alt: `Heat map. ${caption} ${spoken}`, style: styleOf(0) };
}

function drawInside(spec, width, paper) {
  const top = paper ? 44 : 8;
  const left = 78;
  const longest = Math.max(0, ...spec.columns.map((name) => Math.min(18, name.length)));
  const below = 16 + longest * 5.2;
  const right = width - (paper || width > 600 ? 90 : 16);
  const side = Math.min((right - left) / Math.max(1, spec.columns.length), 90);
  const tall = Math.max(7, Math.min(22, 520 / Math.max(1, spec.rows.length)));
  const bottom = top + tall * spec.rows.length;
  const svg = newSvg(width, bottom + below + 40, spec.alt, paper ? spec.title : "");
  const cells = [];
  if (!spec.cells.length) svg.append(text(left, top + 12, "Nothing to show for this algorithm", "start", "auto", "label"));
  spec.cells.forEach((row, at) => row.forEach((value, column) => {
    if (value === null) return;
    const x = left + side * column;
    const y = top + tall * at;
    const cell = shape("rect", { class: `cell ${spec.style.kind}`, x: x + 0.5, y: y + 0.5, width: Math.max(1, side - 1), height: Math.max(1, tall - 1), "fill-opacity": (0.04 + 0.96 * value).toFixed(3) });
    svg.append(cell);
    cells.push({ x, y, side, tall, value, row: spec.rows[at], column: spec.columns[column] });
  }));
  const everyRow = Math.ceil(13 / tall);
  spec.rows.forEach((name, at) => { if (at % everyRow === 0) svg.append(text(left - 8, top + tall * (at + 0.5), name, "end", "middle")); });
  const everyColumn = Math.ceil(13 / side);
  spec.columns.forEach((name, at) => {
    if (at % everyColumn) return;
    const x = left + side * (at + 0.5);
    const label = text(x, bottom + 14, shorten(name, 18), "end");
    label.setAttribute("transform", `rotate(-40 ${x} ${bottom + 14})`);
    svg.append(label);
  });
  drawScale(svg, left, bottom + below + 20, spec.style.kind);
  return { svg, cells, box: { left, right, top, bottom } };
}

/* The next cell in the direction of an arrow key; null if the key means nothing. */
function cellBy(key, cells, now) {
  const ends = { Home: cells[0], End: cells[cells.length - 1] };
  const turn = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] }[key];
  if (!turn || !now) return turn ? cells[0] : ends[key] || null;
  const next = cells.filter((c) => Math.sign(c.x - now.x) === turn[0] && Math.sign(c.y - now.y) === turn[1]);
  const far = (c) => Math.abs(c.x - now.x) + Math.abs(c.y - now.y);
  return next.length ? next.reduce((a, b) => (far(b) < far(a) ? b : a)) : now;
}

function drawScale(svg, x, y, kind) {
  for (let at = 0; at <= 10; at += 1) svg.append(shape("rect", { class: `cell ${kind}`, x: x + 14 * at, y, width: 14, height: 9, "fill-opacity": (0.04 + 0.096 * at).toFixed(3) }));
  svg.append(text(x - 6, y + 5, "0 %", "end", "middle"), text(x + 160, y + 5, "100 %", "start", "middle"));
}
