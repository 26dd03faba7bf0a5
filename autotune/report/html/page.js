"use strict";
// Sorting: a click on a header sorts its table by that column, another one turns the order round.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  const body = table.tBodies[0];
  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const key = (row) => {
        const cell = row.cells[column];
        return cell.dataset.v === undefined ? cell.textContent.trim() : cell.dataset.v;
      };
      const sign = down ? -1 : 1;
      const rows = [...body.rows].map((row) => ({ row, text: key(row) }));
      rows.sort((one, other) => {
        // What is not known stays at the end, whichever way round.
        if (one.text === "" || other.text === "") return (one.text === "") - (other.text === "");
        const [a, b] = [Number(one.text), Number(other.text)];
        if (!Number.isNaN(a) && !Number.isNaN(b)) return sign * (a - b);
        return sign * one.text.localeCompare(other.text, "en", { numeric: true });
      });
      body.append(...rows.map((item) => item.row));
      document.getElementById("said").textContent =
        `sorted by ${head.textContent}, ${down ? "falling" : "rising"}`;
    });
  });
}
// A link to a log opens it.
const open = () => {
  const target = location.hash ? document.getElementById(location.hash.slice(1)) : null;
  if (target instanceof HTMLDetailsElement) target.open = true;
};
addEventListener("hashchange", open);
open();
