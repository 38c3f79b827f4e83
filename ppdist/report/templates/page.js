"use strict";
// Sorts tables, enlarges pictures, changes the theme.  The page works without.

// Of `1,234` the number.
function valueOf(text) {
  return parseFloat(text.replaceAll(",", ""));
}

function sortable(table) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  heads.forEach((head, column) => {
    head.addEventListener("click", () => {
      const first = column === 0 ? "ascending" : "descending";
      const other = column === 0 ? "descending" : "ascending";
      const order = head.getAttribute("aria-sort") === first ? other : first;
      heads.forEach((each) => each.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", order);
      const sign = order === "ascending" ? 1 : -1;
      const keyed = [...body.rows].map((row) => {
        const text = row.cells[column].textContent;
        return [valueOf(text), text, row];
      });
      keyed.sort((a, b) => {
        if (column > 0 && (isNaN(a[0]) || isNaN(b[0]))) return isNaN(a[0]) - isNaN(b[0]);
        return sign * (column > 0 ? a[0] - b[0] : a[1].localeCompare(b[1]));
      });
      body.append(...keyed.map(([, , row]) => row));
    });
  });
}

function enlarge(picture) {
  picture.addEventListener("click", () => picture.closest("figure").classList.toggle("large"));
}

function changeTheme(button) {
  const root = document.documentElement;
  button.hidden = false;
  button.addEventListener("click", () => {
    const now = root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
  });
}

document.querySelectorAll("table.sortable").forEach(sortable);
document.querySelectorAll(".gallery img").forEach(enlarge);
changeTheme(document.getElementById("theme"));
