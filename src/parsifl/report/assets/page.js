/* The page: which algorithms are shown, the controls of each figure, reading by mouse and keyboard. */

const DATA = JSON.parse(document.getElementById("data").textContent);
const VERSION = document.querySelector("meta[name=parsifl-version]").content;
const REMEMBERED = VERSION ? recall() : {};
const REDRAW = [];

for (const section of Object.values(DATA.sections)) section.groups.forEach((group, index) => { group.index = index; });

function recall() {
  try { return JSON.parse(sessionStorage.getItem("parsifl")) || {}; } catch (_) { return {}; }
}

/* Choices are kept across reloads while a run is watched. */
function remember(key, value) {
  if (!VERSION) return;
  REMEMBERED[key] = value;
  try { sessionStorage.setItem("parsifl", JSON.stringify(REMEMBERED)); } catch (_) { /* a private window */ }
}

const FIGURES = {
  curves: { controls: curveControls, draw: (section, state, visible) => [curveSpec(section, state, visible), drawLines] },
  clients: { controls: clientControls, draw: (section, state, visible) => [clientSpec(section, state, visible), drawClients] },
  bars: { controls: () => [], draw: (section, state, visible) => [barSpec(section, state, visible), drawBars] },
  inside: { controls: insideControls, draw: (section, state) => [insideSpec(section, state), drawInside] },
  ledger: { controls: ledgerControls, draw: (section, state, visible) => [ledgerSpec(section, state, visible), drawLines] },
};

function curveControls(section) {
  const keys = [...new Set(section.groups.flatMap((group) => Object.keys(group.curves.y)))].map((key) => key.split("|"));
  const distinct = (at) => [...new Set(keys.map((key) => key[at]))];
  const spent = (name) => section.groups.some((group) => group.curves.x[name].some((v) => v > 0));
  const axes = { round: "rounds", up: "bytes up", down: "bytes down", total: "bytes, both ways", seconds: "seconds", simulated: "simulated seconds", flops: "FLOPs" };
  const several = section.groups.some((group) => group.seeds.length > 1);
  return [
    choice("model", "Model", distinct(0), "personal"),
    choice("split", "Rows", distinct(1), "test"),
    choice("metric", "Score", distinct(2), section.score),
    choice("x", "Against", Object.keys(axes).filter((name) => name === "round" || spent(name)), "round", axes),
    choice("statistic", "Clients", ["mean", "worst"], "mean", { mean: "mean", worst: "worst decile" }),
    choice("band", "Band", ["none", "clients", ...(several ? ["seeds"] : [])], several ? "seeds" : "none", { none: "none", clients: "over clients", seeds: "over seeds" }),
    { key: "xlog", label: "log across", value: false },
    { key: "ylog", label: section.percent && section.maximize ? "log error" : "log up", value: false },
  ];
}

function clientControls(section) {
  const models = ["personal", "global"].filter((model) => section.groups.some((group) => group.clients[model].length));
  const names = Object.fromEntries(section.groups.map((group) => [group.label, `gain over ${group.label}`]));
  const order = [...section.baselines, ...section.groups.map((group) => group.label)];
  const bases = section.groups.length > 1 ? [...new Set(order)] : [];
  return [
    choice("model", "Model", models, "personal"),
    choice("base", "Show", ["none", ...bases], "none", { none: "scores", ...names }),
    choice("shape", "As", ["box", "violin"], "box"),
  ];
}

function ledgerControls(section) {
  const names = [...new Set(section.groups.flatMap((group) => Object.entries(group.ledger.y).filter(([, ys]) => ys.some((y) => y !== null)).map(([name]) => name)))];
  return [choice("series", "Show", names, names[0]), { key: "ylog", label: "log up", value: false }];
}

function choice(key, label, options, preferred, names = {}) {
  return { key, label, options, names, value: options.includes(preferred) ? preferred : options[0] };
}

function setUpFigure(node) {
  const id = node.dataset.section;
  const kind = node.dataset.figure;
  const section = DATA.sections[id];
  const controls = FIGURES[kind].controls(section);
  if (controls.some((control) => control.options && !control.options.length)) {
    node.append(element("p", { class: "empty" }, "Nothing to draw yet."));
    return;
  }
  const state = Object.fromEntries(controls.map((c) => [c.key, restored(`${id}/${kind}/${c.key}`, c)]));
  const canvas = element("div", { class: "canvas", tabindex: 0 });
  const caption = element("figcaption");
  const draw = (width, paper) => {
    const [spec, painter] = FIGURES[kind].draw(section, state, section.groups.filter((g) => !isHidden(id, g)));
    return { ...painter(spec, width, paper), spec };
  };
  const redraw = () => {
    const width = Math.floor(canvas.clientWidth);
    if (!width) return;
    const drawn = draw(width, false);
    canvas.replaceChildren(drawn.svg);
    canvas.setAttribute("aria-label", drawn.spec.title + (drawn.lines ? ". Left and right arrow keys read the values." : drawn.cells ? ". Arrow keys read the cells." : drawn.dots ? ". Arrow keys read the clients." : ""));
    caption.textContent = drawn.spec.caption;
    canvas.drawn = { ...drawn, width };
    hideTip();
  };
  const bar = element("div", { class: "controls" }, ...controls.filter((c) => !c.options || c.options.length > 1).map((c) => controlNode(c, state, (value) => {
    state[c.key] = value;
    remember(`${id}/${kind}/${c.key}`, value);
    redraw();
  })));
  node.append(bar, canvas, element("div", { class: "under" }, caption, pictureButtons(draw, `${id}-${kind}`)));
  reading(canvas);
  REDRAW.push(redraw);
  new ResizeObserver(() => requestAnimationFrame(() => {
    if (canvas.drawn?.width !== Math.floor(canvas.clientWidth)) redraw();
  })).observe(canvas);
  redraw();
}

function restored(key, control) {
  const found = REMEMBERED[key];
  if (found === undefined || (control.options && !control.options.includes(found))) return control.value;
  return found;
}

function controlNode(control, state, change) {
  if (!control.options) {
    const box = element("input", { type: "checkbox" });
    box.checked = state[control.key];
    box.addEventListener("change", () => change(box.checked));
    return element("label", { class: "check" }, box, control.label);
  }
  const select = element("select", {}, ...control.options.map((option) => {
    const node = element("option", { value: option }, control.names[option] || option);
    node.selected = option === state[control.key];
    return node;
  }));
  select.addEventListener("change", () => change(select.value));
  return element("label", {}, element("span", {}, control.label), select);
}

function pictureButtons(draw, name) {
  const box = element("div", { class: "buttons", role: "group", "aria-label": "Export this figure" });
  for (const kind of ["svg", "png"]) {
    const button = element("button", { type: "button", "data-image": kind }, `Save ${kind.toUpperCase()}`);
    button.addEventListener("click", async () => {
      await savePicture(draw, name, kind);
      confirmOn(button, "Saved");
    });
    box.append(button);
  }
  return box;
}

/* ---- reading values ---- */

function reading(canvas) {
  let at = null;
  const local = (event) => {
    const frame = canvas.getBoundingClientRect();
    return [event.clientX - frame.left, event.clientY - frame.top];
  };
  canvas.addEventListener("pointermove", (event) => { at = null; readCanvas(canvas, ...local(event)); });
  canvas.addEventListener("pointerdown", (event) => readCanvas(canvas, ...local(event)));
  for (const leave of ["pointerleave", "blur"]) canvas.addEventListener(leave, () => { at = null; hideTip(); });
  canvas.addEventListener("keydown", (event) => {
    const keys = canvas.drawn && canvas.drawn.keys;
    if (event.key === "Escape") return hideTip();
    if (canvas.drawn && (canvas.drawn.cells || canvas.drawn.dots)) return readByKey(canvas, event);
    const step = { ArrowRight: 1, ArrowLeft: -1, PageUp: 10, PageDown: -10, Home: -Infinity, End: Infinity }[event.key];
    if (!keys || !keys.length || step === undefined) return undefined;
    event.preventDefault();
    at = Math.min(keys.length - 1, Math.max(0, at === null ? (step > 0 ? (step === Infinity ? Infinity : 0) : keys.length - 1) : at + step));
    return readCanvas(canvas, keys[at], canvas.drawn.box.top, true);
  });
}

function readCanvas(canvas, x, y, aloud = false) {
  const drawn = canvas.drawn;
  if (!drawn) return;
  if (drawn.lines) readLines(canvas, drawn, x, y, aloud);
  else if (drawn.dots) readDots(canvas, drawn, x, y);
  else if (drawn.cells) readCells(canvas, drawn, x, y);
}

/* Cells of a heat map and clients are visited one by one; a screen reader hears each. */
function readByKey(canvas, event) {
  const { drawn } = canvas;
  const places = drawn.cells || dotPlaces(drawn.dots);
  const next = places.length ? cellBy(event.key, places, drawn.at) : null;
  if (!next) return;
  event.preventDefault();
  drawn.at = next;
  if (next.dot) readDots(canvas, drawn, next.dot.px, next.dot.py, true);
  else readCells(canvas, drawn, next.x + next.side / 2, next.y + next.tall / 2, true);
}

function readLines(canvas, drawn, x, y, aloud) {
  const { box, spec, svg } = drawn;
  const found = x < box.left - 6 || x > box.right + 6 ? [] : readAt(drawn, x);
  svg.querySelectorAll(".cursor").forEach((node) => node.remove());
  if (!found.length) return hideTip();
  const moving = found.find((each) => !each.line.flat);
  const px = moving ? moving.point.px : x;
  const cursor = shape("g", { class: "cursor" }, shape("line", { x1: px, x2: px, y1: box.top, y2: box.bottom }));
  for (const { line, point } of found) {
    if (!line.flat) cursor.append(shape("circle", { class: `halo ${line.style.kind}`, cx: point.px, cy: point.py, r: 5 }));
  }
  svg.append(cursor);
  const rows = found.map(({ line, point }) => {
    const spread = point.low !== null && point.low !== undefined ? ` ± ${spec.yFormat(Math.abs(point.high - point.low) / 2)}` : "";
    const where = spec.xLabel === "rounds" || line.flat ? "" : ` at ${spec.xFormat(point.x)}`;
    return { kind: line.style.kind, name: line.name, value: `${spec.yFormat(point.y)}${spread}${where}` };
  });
  const title = spec.xLabel === "rounds" && moving ? `round ${moving.point.x}` : "";
  showTip(canvas, px, y, title, rows);
  if (aloud) say(`${title} ${rows.map((row) => `${row.name} ${row.value}`).join(", ")}`);
  return undefined;
}

function readDots(canvas, drawn, x, y, aloud = false) {
  const far = (dot) => Math.hypot(dot.px - x, dot.py - y);
  const near = drawn.dots.length ? drawn.dots.reduce((a, b) => (far(b) < far(a) ? b : a)) : null;
  drawn.svg.querySelectorAll(".cursor").forEach((node) => node.remove());
  if (!near || far(near) > 18) return hideTip();
  drawn.svg.append(shape("g", { class: "cursor" }, shape("circle", { class: `halo ${near.row.style.kind}`, cx: near.px, cy: near.py, r: 6 })));
  const { item } = near;
  if (aloud) say(`${near.row.label}, client ${item.id}, seed ${item.seed}: ${drawn.spec.format(item.value)}, ${item.rows} test rows`);
  return showTip(canvas, near.px, near.py, `client ${item.id}, seed ${item.seed}`, [
    { kind: near.row.style.kind, name: near.row.label, value: drawn.spec.format(item.value) },
    { kind: "", name: "test rows", value: String(item.rows) },
  ]);
}

function readCells(canvas, drawn, x, y, aloud = false) {
  const cell = drawn.cells.find((c) => x >= c.x && x < c.x + c.side && y >= c.y && y < c.y + c.tall);
  drawn.svg.querySelectorAll(".cursor").forEach((node) => node.remove());
  if (!cell) return hideTip();
  drawn.svg.append(shape("g", { class: "cursor" }, shape("rect", { class: "frame", x: cell.x, y: cell.y, width: cell.side, height: cell.tall })));
  if (aloud) say(`${cell.row}, ${cell.column}: ${FORMATS.percent(cell.value)}`);
  return showTip(canvas, cell.x + cell.side, cell.y, cell.row, [{ kind: drawn.spec.style.kind, name: cell.column, value: FORMATS.percent(cell.value) }]);
}

function showTip(canvas, x, y, title, rows) {
  const tip = document.getElementById("tip");
  tip.replaceChildren();
  if (title) tip.append(element("strong", {}, title));
  for (const row of rows.slice(0, 14)) tip.append(element("div", { class: row.kind }, element("i", { class: row.kind ? "swatch" : null }), element("span", {}, row.name), element("b", {}, row.value)));
  tip.hidden = false;
  const frame = canvas.getBoundingClientRect();
  const left = frame.left + window.scrollX + x;
  const room = document.documentElement.clientWidth - tip.offsetWidth - 8;
  const place = left + 16 > room ? left - tip.offsetWidth - 16 : left + 16;
  tip.style.left = `${Math.max(8, Math.min(room, place))}px`;
  tip.style.top = `${frame.top + window.scrollY + Math.max(0, y - 12)}px`;
}

function hideTip() {
  document.getElementById("tip").hidden = true;
  document.querySelectorAll(".cursor").forEach((node) => node.remove());
}

/* ---- algorithms on and off ---- */

const HIDDEN = new Set(REMEMBERED.hidden || []);

function isHidden(id, group) {
  return HIDDEN.has(`${id}/${group.label}`);
}

function setUpLegend(node) {
  const id = node.dataset.legend;
  const { groups } = DATA.sections[id];
  const chips = groups.map((group) => {
    const chip = element("button", { type: "button", class: `chip k${group.index % 8}` }, legendMark(group.index), element("span", {}, group.label));
    chip.addEventListener("click", () => toggle(id, group));
    chip.addEventListener("dblclick", () => only(id, group));
    return chip;
  });
  const all = element("button", { type: "button", class: "plain", title: "Show every algorithm" }, "Show all");
  all.addEventListener("click", () => { groups.forEach((g) => HIDDEN.delete(`${id}/${g.label}`)); changed(); });
  const refresh = () => {
    groups.forEach((group, at) => chips[at].setAttribute("aria-pressed", String(!isHidden(id, group))));
    all.hidden = groups.every((group) => !isHidden(id, group));
    for (const row of document.querySelectorAll(`#${id} [data-table$="-results"] [data-row]`)) row.classList.toggle("dim", isHidden(id, groups[row.dataset.row]));
  };
  node.append(...chips, all);
  node.hidden = groups.length < 2;
  for (const row of document.querySelectorAll(`#${id} [data-table$="-results"] [data-row]`)) {
    row.cells[0].classList.add(`k${row.dataset.row % 8}`);
    row.cells[0].prepend(legendMark(Number(row.dataset.row)));
  }
  REDRAW.unshift(refresh);
  refresh();
}

function toggle(id, group) {
  const key = `${id}/${group.label}`;
  if (!HIDDEN.delete(key)) HIDDEN.add(key);
  changed();
}

function only(id, group) {
  for (const other of DATA.sections[id].groups) HIDDEN.add(`${id}/${other.label}`);
  HIDDEN.delete(`${id}/${group.label}`);
  changed();
}

function changed() {
  remember("hidden", [...HIDDEN]);
  REDRAW.forEach((redraw) => redraw());
}

function legendMark(index) {
  const style = styleOf(index);
  const svg = shape("svg", { width: 22, height: 12, viewBox: "0 0 22 12", "aria-hidden": "true", class: `series ${style.kind}` });
  svg.append(shape("path", { class: "line", d: "M1 6H21", "stroke-dasharray": style.dash || null }), marker(style.mark, 11, 6, 3.2));
  return svg;
}

/* ---- theme, watching ---- */

function setUpTheme() {
  const button = document.getElementById("theme");
  const names = ["auto", "light", "dark"];
  let at = Math.max(0, names.indexOf(REMEMBERED.theme));
  const apply = () => {
    if (at) document.documentElement.dataset.theme = names[at];
    else delete document.documentElement.dataset.theme;
    button.textContent = `Theme: ${names[at]}`;
    button.setAttribute("aria-label", `Colours: ${names[at] === "auto" ? "system default" : names[at]}`);
  };
  button.addEventListener("click", () => { at = (at + 1) % names.length; remember("theme", names[at]); apply(); });
  apply();
}

function watch() {
  if (!VERSION) return;
  window.addEventListener("beforeunload", () => remember("scroll", window.scrollY));
  window.scrollTo(0, REMEMBERED.scroll || 0);
  setInterval(async () => {
    try {
      const answer = await fetch("version", { cache: "no-store" });
      if (answer.ok && (await answer.text()) !== VERSION) window.location.reload();
    } catch (_) { /* the server has stopped: keep the page */ }
  }, 2000);
}

document.documentElement.classList.add("scripted");
setUpTheme();
document.querySelectorAll("[data-legend]").forEach(setUpLegend);
document.querySelectorAll("[data-figure]").forEach(setUpFigure);
wireTables(DATA.tables);
window.addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });
watch();
document.documentElement.classList.add("ready");
