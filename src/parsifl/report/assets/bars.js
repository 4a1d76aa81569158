/* Bytes sent, inside the outline of dense messages, with a line at the bound. */

function barSpec(section, state, visible) {
  const rows = visible.map((group) => ({ label: group.label, style: styleOf(group.index), totals: group.totals }));
  const caption = "Bytes of a whole run, all clients together, mean over seeds. Filled: sent. Outline: the same messages sent dense. Line: the entropy bound, below which no lossless code of the same values can go.";
  const spoken = rows.map((row) => `${row.label}: up ${sentWords(row.totals, "up")}, down ${sentWords(row.totals, "down")}`);
  return { rows, caption, title: "Bytes sent, against dense messages and the entropy bound", alt: `Bar chart. ${caption} ${spoken.join("; ")}.` };
}

function drawBars(spec, width, paper) {
  const wide = paper || width >= 560;
  const longest = Math.min(190, Math.max(40, ...spec.rows.map((row) => textWidth(row.label))));
  const height = wide ? 56 : 104;
  const top = paper ? 44 : 6;
  const box = { left: wide ? longest + 76 : 14, right: width - (wide ? 315 : 24), top, bottom: top + Math.max(1, spec.rows.length) * height };
  const sizes = spec.rows.flatMap((row) => Object.values(row.totals).filter((size) => size !== null));
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

function sentWords(totals, way) {
  const [sent, dense, bound] = [totals[way], totals[`dense_${way}`], totals[`entropy_${way}`]];
  if (!sent) return "nothing sent";
  const parts = [FORMATS.bytes(sent), ...(dense ? [`${FORMATS.percent(sent / dense)} of dense`] : []), ...(bound ? [`${FORMATS.percent(sent / bound)} of the bound`] : [])];
  return parts.join(" · ");
}

function drawBar(row, way, x, y, wide) {
  const group = shape("g", { class: `series ${row.style.kind}` });
  const sent = row.totals[way];
  const dense = row.totals[`dense_${way}`];
  group.append(shape("rect", { class: "dense", x: x.from, y, width: x.position(dense) - x.from, height: 16, rx: 2 }));
  group.append(shape("rect", { class: "sent", x: x.from, y: y + 3, width: x.position(sent) - x.from, height: 10, rx: 1 }));
  const bound = row.totals[`entropy_${way}`];
  if (bound) group.append(shape("line", { class: "bound", x1: x.position(bound), x2: x.position(bound), y1: y - 1, y2: y + 17 }));
  const words = sentWords(row.totals, way);
  if (wide) group.append(text(x.position(Math.max(sent, dense)) + 8, y + 8, words, "start", "middle", "value"));
  else group.append(text(x.from, y - 5, `${way}: ${words}`, "start", "auto", "value"));
  return group;
}
