// The page's own script: tables that sort and filter, histograms, hints where one points, the numbers as a file.
"use strict";
const ROWS = 100; // of a table at a time
const UNITS = ["B", "kB", "MB", "GB", "TB", "PB"];
const hostile = /[^\P{C}]|[\u2028\u2029]/gu; // what does not print, as names from files may have it

const printable = (text) => String(text).replace(hostile, (c) => `\\u{${c.codePointAt(0).toString(16)}}`);
const cut = (text, n = 100) => (text.length > n ? `${printable(text.slice(0, n))}… (${text.length} characters)` : printable(text));
const digits = (x) => (x === null || x === undefined ? "–" : String(Number(x.toPrecision(3))));
const percent = (x) => (x === null || x === undefined ? "–" : `${digits(100 * x)} %`);
const times = (x) => (x === null ? "–" : `${digits(x)}×`);
const shape = (dims) => (dims && dims.length ? dims.join(" × ") : dims ? "scalar" : "–");
const size = (n) => {
  let i = 0;
  for (; n >= 999.5 && i < UNITS.length - 1; i++) n /= 1000;
  return `${i ? digits(n) : Math.round(n)} ${UNITS[i]}`;
};

function make(tag, text, attributes = {}) {
  const element = document.createElement(tag);
  if (text !== undefined && text !== null) element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) if (value !== null) element.setAttribute(name, value);
  return element;
}

// --- the numbers ---

async function numbers() {
  const element = document.getElementById("numbers");
  if (!element.dataset.packed) return element.textContent;
  const bytes = Uint8Array.from(atob(element.textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).text();
}

function save(text) {
  const link = make("a", null, { href: URL.createObjectURL(new Blob([text], { type: "application/json" })), download: "ckptz-report.json" });
  link.click();
  URL.revokeObjectURL(link.href);
}

// --- tables ---

function compare(a, b) {
  const [none, other] = [a === null || a === undefined, b === null || b === undefined];
  if (none || other) return none - other;
  return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
}

function sortable(heading, sort) {
  const button = make("button", heading.textContent, { type: "button" });
  heading.replaceChildren(button);
  button.addEventListener("click", () => {
    const isNumber = heading.classList.contains("n");
    const first = isNumber ? "descending" : "ascending";
    const order = heading.ariaSort === first ? (isNumber ? "ascending" : "descending") : first;
    for (const other of heading.parentElement.children) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", order);
    sort(order === "ascending" ? 1 : -1);
  });
}

function key(row, at) {
  const cell = row.cells[at];
  const text = cell.dataset.v ?? cell.textContent;
  return text === "" || text === "None" || text === "–" ? null : Number.isNaN(Number(text)) ? text : Number(text);
}

function sortRows(table) {
  const body = table.tBodies[0];
  [...table.tHead.rows[0].cells].forEach((heading, at) =>
    sortable(heading, (way) => body.append(...[...body.rows].sort((a, b) => sorted(key(a, at), key(b, at), way)))),
  );
}

function sorted(a, b, way) {
  const isKnown = (x) => x !== null && x !== undefined;
  return isKnown(a) && isKnown(b) ? way * compare(a, b) : compare(a, b);
}

// A table of many rows: columns are [heading, value of a row, text of a value]; without a text it is not a number.
function bigTable(place, caption, rows, columns, start, open) {
  const table = make("table");
  const [head, body] = [make("tr"), make("tbody")];
  const thead = make("thead");
  thead.append(head);
  table.append(make("caption", caption), thead, body);
  table.setAttribute("aria-label", caption);
  const filter = make("input", null, { type: "search", placeholder: "only names with …", "aria-label": "Show only names with this text" });
  const [back, next] = [make("button", "Back", { type: "button" }), make("button", "More", { type: "button" })];
  const said = make("span", "", { role: "status" });
  const bar = make("div", null, { class: "bar" });
  bar.append(filter, said, back, next);
  const wide = make("div", null, { class: "wide", tabindex: "0" });
  wide.append(table);
  let [shown, from] = [rows, 0];

  const draw = () => {
    body.replaceChildren(
      ...shown.slice(from, from + ROWS).map((row) => {
        const line = make("tr");
        columns.forEach(([, value, text], at) => {
          const v = value(row);
          const cell = make("td", null, { class: text ? "n" : null, "data-v": v === null || v === undefined ? "" : v });
          if (at === 0) cell.append(open && open.has(row.name) ? opener(row, open) : make("code", cut(row.name)));
          else cell.textContent = text ? text(v) : cut(String(v ?? "–"), 80);
          line.append(cell);
        });
        return line;
      }),
    );
    const end = Math.min(from + ROWS, shown.length);
    said.textContent = shown.length ? `${from + 1}–${end} of ${shown.length}` : "no name has this text";
    back.disabled = from === 0;
    next.disabled = end === shown.length;
  };
  const opener = (row, found) => {
    const button = make("button", null, { type: "button", title: "show how its values are spread" });
    button.append(make("code", cut(row.name)));
    button.addEventListener("click", () => spread(wide, found.get(row.name)));
    return button;
  };
  columns.forEach(([title, value, text]) => {
    const heading = make("th", title, { scope: "col", class: text ? "n" : null });
    head.append(heading);
    sortable(heading, (way) => {
      rows.sort((a, b) => sorted(value(a), value(b), way));
      search();
    });
  });
  const search = () => {
    const wanted = filter.value.toLowerCase();
    [shown, from] = [rows.filter((row) => row.name.toLowerCase().includes(wanted)), 0];
    draw();
  };
  filter.addEventListener("input", search);
  back.addEventListener("click", () => ((from -= ROWS), draw()));
  next.addEventListener("click", () => ((from += ROWS), draw()));
  place.className = "big";
  place.replaceChildren(bar, wide);
  head.children[start].firstChild.click();
}

const ROLES = { weight: "weights", exp_avg: "first moments", exp_avg_sq: "second moments", other: "the rest" };
const coders = (row) => Object.entries(row.coders).map(([name, share]) => `${name} ${Math.round(100 * share)} %`).join(", ");
const error = (row) => (row.lossy && row.lossy.rms ? row.lossy.rms_error / row.lossy.rms : row.lossy ? row.lossy.rms_error : 0);
const errorText = (x) => (x === 0 ? "exact" : percent(x));
const cost = (row) => (row.n_frames === null ? null : row.n_chunks * row.n_frames);
const spelled = { zero: "by itself", base: "as changes", outer: "as changes from a product" };

const TENSORS = [
  ["tensor", (r) => r.name],
  ["what", (r) => ROLES[r.role] ?? r.role],
  ["layer type", (r) => r.layer_type],
  ["type", (r) => r.dtype],
  ["shape", (r) => shape(r.shape)],
  ["raw", (r) => r.tensor_bytes, size],
  ["stored", (r) => r.stored_bytes, size],
  ["smaller", (r) => r.ratio, times],
  ["bits per parameter", (r) => r.bits_per_element, digits],
  ["error", error, errorText],
  ["chunks to decode", cost, digits],
  ["stored how", (r) => `${spelled[r.predictor] ?? r.predictor}, ${r.lossy ? r.lossy.method : r.mode}`],
  ["coders", coders],
];
const CHANGES = [
  ["tensor", (r) => r.name],
  ["what", (r) => r.kind],
  ["type", (r) => [...new Set([r.dtype_a, r.dtype_b].filter(Boolean))].join(" → ")],
  ["shape", (r) => shape(r.shape_b ?? r.shape_a)],
  ["values changed", (r) => r.changed_share, percent],
  ["typical change", (r) => r.relative_change, percent],
  ["absolute", (r) => r.rms_change, digits],
  ["largest", (r) => r.max_change, digits],
];

// --- how values are spread ---

function spread(before, found) {
  document.getElementById("spread")?.remove();
  const box = make("figure", null, { class: "shown", id: "spread", tabindex: "-1" });
  for (const h of found) {
    const total = h.counts.reduce((a, b) => a + b, 0);
    const most = Math.max(...h.counts);
    const words = `${total} values from ${digits(h.low)} to ${digits(h.high)}${h.n_not_finite ? `, and ${h.n_not_finite} not finite` : ""}`;
    const bars = make("div", null, { class: "spread", role: "img", "aria-label": words });
    for (const n of h.counts) bars.append(make("i", null, { style: `height:${most ? (100 * n) / most : 0}%`, "data-n": n }));
    const ends = make("p", null, { class: "ends" });
    ends.append(make("span", digits(h.low)), make("span", digits(h.high)));
    const title = make("figcaption");
    title.append(make("b", `${h.what === "changes" ? "Changes from A to B" : "Values"}: ${cut(h.tensor)}`), make("span", words));
    box.append(title, bars, ends);
  }
  before.before(box);
  box.focus();
}

function histograms(found, file) {
  const byName = new Map();
  for (const h of found) if (h.file === file) byName.set(h.tensor, [...(byName.get(h.tensor) ?? []), h]);
  return byName;
}

// --- hints: what a mark of a chart or a cell of a heat map says ---

function hintOf(target) {
  const mark = target.closest?.('[role="graphics-symbol"][aria-label]');
  if (mark && mark.getAttribute("aria-roledescription") !== "axis" && mark.getAttribute("aria-roledescription") !== "legend") return mark.getAttribute("aria-label");
  const cell = target.closest?.(".heat td[style]");
  if (!cell) return null;
  const column = cell.colSpan > 1 ? null : cell.closest("table").tHead.rows[0].cells[cell.cellIndex].textContent;
  return `${cell.parentElement.cells[0].textContent}${column === null ? "" : `, layer ${column}`}: ${cell.textContent}`;
}

function place(tip, x, y) {
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - box.width - 8))}px`;
  tip.style.top = `${y + 18 + box.height > innerHeight ? y - box.height - 10 : y + 18}px`;
}

function hints() {
  const tip = document.getElementById("tip");
  const show = (target, x, y) => {
    const text = hintOf(target);
    tip.textContent = text ?? "";
    if (text) place(tip, x, y);
    else tip.hidden = true;
  };
  document.addEventListener("pointermove", (e) => show(e.target, e.clientX, e.clientY));
  document.addEventListener("pointerdown", (e) => show(e.target, e.clientX, e.clientY));
  document.addEventListener("scroll", () => (tip.hidden = true), { passive: true });
  document.addEventListener("keydown", (e) => {
    if (e.key === "Escape") tip.hidden = true;
    const chart = document.activeElement?.closest?.(".charts svg");
    if (!chart || !["ArrowRight", "ArrowLeft"].includes(e.key)) return;
    e.preventDefault();
    const marks = [...chart.querySelectorAll('[role="graphics-symbol"][aria-label]')].filter((m) => hintOf(m));
    const at = marks.indexOf(document.activeElement) + (e.key === "ArrowRight" ? 1 : -1);
    const mark = marks[Math.max(0, Math.min(at, marks.length - 1))];
    if (!mark) return;
    mark.setAttribute("tabindex", "-1");
    mark.focus({ preventScroll: true });
    const box = mark.getBoundingClientRect();
    show(mark, box.x, box.y);
  });
}

// --- all together ---

document.getElementById("theme").addEventListener("click", () => {
  const isDark = getComputedStyle(document.body).colorScheme === "dark" ||
    (getComputedStyle(document.body).colorScheme !== "light" && matchMedia("(prefers-color-scheme: dark)").matches);
  document.body.style.colorScheme = isDark ? "light" : "dark";
});
hints();
document.querySelectorAll("table.sortable").forEach(sortRows);
numbers().then((text) => {
  const all = JSON.parse(text);
  document.getElementById("save").addEventListener("click", () => save(text));
  document.querySelectorAll("[data-table]").forEach((place) => {
    if (place.dataset.table === "diff") {
      const found = histograms(all.histograms, all.diff.second);
      bigTable(place, "Tensors by how much they changed", [...all.diff.tensors], CHANGES, 5, found);
    } else {
      const file = all.files[Number(place.dataset.file)];
      bigTable(place, "Tensors by stored bytes", [...file.tensors], TENSORS, 6, histograms(all.histograms, file.file));
    }
  });
  document.body.dataset.ready = "yes";
});
