// The page's own script: tables that sort and filter, hints where one points, the numbers as a file.
"use strict";

function make(tag, text, attributes = {}) {
  const element = Object.assign(document.createElement(tag), { textContent: text });
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

function key(row, at) {
  const text = row.cells[at].dataset.v ?? row.cells[at].textContent;
  return text === "–" || text === "" ? null : Number.isNaN(Number(text)) ? text : Number(text);
}

function compare(a, b, way) {
  if (a === null || b === null) return (a === null) - (b === null); // what is not known stands last
  return way * (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));
}

for (const table of document.querySelectorAll("table")) {
  const [body, rows] = [table.tBodies[0], [...table.tBodies[0].rows]];
  for (const [at, heading] of [...table.tHead.rows[0].cells].entries()) {
    const button = make("button", heading.textContent, { type: "button" });
    heading.replaceChildren(button);
    heading.classList.toggle("n", rows.some((row) => row.cells[at].className === "n"));
    button.addEventListener("click", () => {
      const way = heading.ariaSort === "descending" ? 1 : -1;
      for (const other of heading.parentElement.cells) other.removeAttribute("aria-sort");
      heading.setAttribute("aria-sort", way < 0 ? "descending" : "ascending");
      body.append(...rows.sort((a, b) => compare(key(a, at), key(b, at), way)));
    });
  }
  const filter = make("input", null, { type: "search", placeholder: "only rows with …", "aria-label": "Show only rows with this text" });
  filter.addEventListener("input", () => {
    for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(filter.value.toLowerCase());
  });
  if (rows.length > 8) table.parentElement.before(filter);
}

const tip = document.getElementById("tip");
const hint = (e) => {
  const mark = e.target.closest?.('[role="graphics-symbol"][aria-label]:not([aria-roledescription="axis"], [aria-roledescription="legend"])');
  tip.hidden = !mark;
  if (!mark) return;
  tip.textContent = mark.getAttribute("aria-label");
  const [box, own] = [mark.getBoundingClientRect(), tip.getBoundingClientRect()];
  tip.style.left = `${Math.max(4, Math.min(box.x, innerWidth - own.width - 8))}px`;
  tip.style.top = `${box.top > own.height + 8 ? box.top - own.height - 6 : box.bottom + 6}px`;
};
for (const event of ["pointerover", "pointerdown"]) document.addEventListener(event, hint);
document.addEventListener("scroll", () => (tip.hidden = true), { passive: true });

document.getElementById("save").addEventListener("click", () => {
  const blob = new Blob([document.getElementById("numbers").textContent], { type: "application/json" });
  make("a", null, { href: URL.createObjectURL(blob), download: "ckptz-report.json" }).click();
});
