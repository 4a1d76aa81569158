/* The ledger: what was sent, inside the outline of what dense messages would have been. */

function barSpec(section, state, visible) {
  const rows = visible.map((group) => ({ label: group.label, style: styleOf(group.index), totals: group.totals }));
  const caption = "Bytes of a whole run, all clients together, mean over seeds. Filled: sent. Outline: the same messages sent dense.";
  const spoken = rows.map((row) => `${row.label}: up ${FORMATS.bytes(row.totals.up)}, down ${FORMATS.bytes(row.totals.down)}`);
  return { rows, caption, title: "Bytes sent, against dense messages", alt: `Bar chart. ${caption} ${spoken.join("; ")}.` };
}

function drawBars(spec, width, paper) {
  const wide = paper || width >= 560;
  const longest = Math.min(190, Math.max(40, ...spec.rows.map((row) => textWidth(row.label))));
  const height = wide ? 56 : 104;
  const top = paper ? 44 : 6;
  const box = { left: wide ? longest + 64 : 14, right: width - (wide ? 190 : 24), top, bottom: top + Math.max(1, spec.rows.length) * height };
  const sizes = spec.rows.flatMap((row) => Object.values(row.totals));
  const x = makeScale(sizes, box.left, box.right, { low: 0, pad: 0.02, wanted: width < 500 ? 3 : 6 });
  const svg = newSvg(width, box.bottom + 52, spec.alt, paper ? spec.title : "");
  drawAxes(svg, x, null, box, { xLabel: "bytes in a whole run", xFormat: FORMATS.bytes });
  spec.rows.forEach((row, at) => {
    const start = box.top + height * at;
    svg.append(wide ? nameText(box.left - 58, start + height / 2, row.label, 28, "end", "middle") : nameText(12, start + 16, row.label, 44, "start", "auto"));
    ["up", "down"].forEach((way, which) => {
      const y = start + (wide ? 8 + which * 21 : 42 + which * 39);
      if (wide) svg.append(text(box.left - 8, y + 8, way, "end", "middle", "label"));
      svg.append(drawBar(row, way, x, y, wide));
    });
  });
  return { svg, box };
}

function drawBar(row, way, x, y, wide) {
  const group = shape("g", { class: `series ${row.style.kind}` });
  const sent = row.totals[way];
  const dense = row.totals[`dense_${way}`];
  group.append(shape("rect", { class: "dense", x: x.from, y, width: x.position(dense) - x.from, height: 16, rx: 2 }));
  group.append(shape("rect", { class: "sent", x: x.from, y: y + 3, width: x.position(sent) - x.from, height: 10, rx: 1 }));
  const words = dense ? `${FORMATS.bytes(sent)} · ${FORMATS.percent(sent / dense)} of dense` : sent ? FORMATS.bytes(sent) : "nothing sent";
  if (wide) group.append(text(x.position(Math.max(sent, dense)) + 8, y + 8, words, "start", "middle", "value"));
  else group.append(text(x.from, y - 5, `${way}: ${words}`, "start", "auto", "value"));
  return group;
}
