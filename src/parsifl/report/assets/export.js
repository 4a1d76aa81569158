/* Export: figures as SVG and PNG, tables as CSV and LaTeX. */

const INLINE = ["fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-opacity", "fill-opacity", "opacity", "stroke-linejoin", "stroke-linecap", "font-family", "font-size", "font-weight", "text-anchor", "paint-order"];

/* Redraw a figure on white paper, with every style written into the elements. */
function figureImage(draw) {
  const paper = document.getElementById("paper");
  const { svg } = draw(920, true);
  paper.replaceChildren(svg);
  const nodes = [svg, ...svg.querySelectorAll("*")];
  for (const node of nodes) {
    const style = getComputedStyle(node);
    for (const name of INLINE) {
      const value = style.getPropertyValue(name);
      if (value && value !== "none") node.setAttribute(name, value);
      else if (name === "fill" && value === "none") node.setAttribute(name, "none");
    }
  }
  for (const node of nodes) node.removeAttribute("class"); // only now: children inherit from it
  svg.insertBefore(shape("rect", { width: "100%", height: "100%", fill: "#ffffff" }), svg.firstChild);
  svg.setAttribute("xmlns", SVG);
  paper.replaceChildren();
  return svg;
}

function savePicture(draw, name, kind) {
  const svg = figureImage(draw);
  const source = new XMLSerializer().serializeToString(svg);
  if (kind === "svg") return Promise.resolve(save(`${name}.svg`, "image/svg+xml", source));
  const [width, height] = ["width", "height"].map((side) => Number(svg.getAttribute(side)));
  return new Promise((resolve, reject) => {
    const image = new Image();
    image.onload = () => {
      const canvas = element("canvas", { width: 2 * width, height: 2 * height });
      const context = canvas.getContext("2d");
      context.scale(2, 2);
      context.drawImage(image, 0, 0, width, height);
      canvas.toBlob((blob) => resolve(saveBlob(`${name}.png`, blob)), "image/png");
    };
    image.onerror = () => reject(new Error("the image could not be drawn"));
    image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(source)}`;
  });
}

function save(name, type, content) {
  return saveBlob(name, new Blob([content], { type: `${type};charset=utf-8` }));
}

function saveBlob(name, blob) {
  const link = element("a", { href: URL.createObjectURL(blob), download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  return blob.size;
}

async function copyText(content) {
  if (navigator.clipboard && window.isSecureContext) {
    try {
      await navigator.clipboard.writeText(content);
      return;
    } catch (_) { /* not allowed here: use the fallback below */ }
  }
  const area = element("textarea", { class: "sr" });
  area.value = content;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

function wireTables(tables) {
  for (const block of document.querySelectorAll("[data-table]")) {
    const name = block.dataset.table;
    block.addEventListener("click", async (event) => {
      const button = event.target.closest("[data-export]");
      if (!button) return;
      const [kind, act] = button.dataset.export.split("-");
      const content = tables[name][kind];
      if (act === "save") save(`${name}.${kind === "csv" ? "csv" : "tex"}`, kind === "csv" ? "text/csv" : "text/plain", content);
      else await copyText(content);
      confirmOn(button, act === "save" ? "Saved" : "Copied");
    });
    makeSortable(block.querySelector("table"));
  }
}

function confirmOn(button, word) {
  const before = button.dataset.text || button.textContent;
  button.dataset.text = before;
  button.textContent = word;
  say(`${word}: ${before}`);
  setTimeout(() => { button.textContent = before; }, 1500);
}

function makeSortable(table) {
  const heads = [...table.querySelectorAll("thead th")];
  heads.forEach((head, column) => {
    if (!head.classList.contains("num")) return;
    const button = element("button", { type: "button", class: "sort", title: "Sort by this column" }, head.textContent);
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") !== "descending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const value = (row) => (row.cells[column].dataset.value === undefined ? null : Number(row.cells[column].dataset.value));
      const rows = [...table.tBodies[0].rows].sort((a, b) => {
        const [left, right] = [value(a), value(b)];
        if (left === null || right === null) return (left === null) - (right === null);
        return down ? right - left : left - right;
      });
      table.tBodies[0].append(...rows);
    });
  });
}

function say(words) {
  document.getElementById("live").textContent = words;
}
