"use strict";
// Reads values off charts, hides curves, sorts tables, changes the theme.  The page works without.

const SVG_WIDTH = 480, LEFT = 54, RIGHT = 12; // as in charts.py

function readable(value) {
  if (value === null) return "–";
  return Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(4)));
}

// The place of the value that is nearest to `x` on a curve sorted by x; -1 where there is none.
function nearest(points, x) {
  let best = -1;
  for (let i = 0; i < points.length; i++) {
    if (points[i][1] === null) continue;
    if (best < 0 || Math.abs(points[i][0] - x) < Math.abs(points[best][0] - x)) best = i;
  }
  return best;
}

function readOff(plot) {
  const data = JSON.parse(plot.querySelector("script").textContent);
  const svg = plot.querySelector("svg"), cross = plot.querySelector(".cross");
  const box = plot.querySelector(".values"), lines = [...plot.querySelectorAll(".line")];
  const [low, high] = data.limits;

  function show(event) {
    const frame = svg.getBoundingClientRect();
    const pixel = (event.clientX - frame.left) / frame.width * SVG_WIDTH;
    const wanted = low + (pixel - LEFT) / (SVG_WIDTH - LEFT - RIGHT) * (high - low);
    let at = null;
    const found = [];
    data.series.forEach((points, i) => {
      if (lines[i].classList.contains("off")) return;
      const place = nearest(points, wanted);
      if (place < 0) return;
      const [x, y] = points[place];
      if (at === null || Math.abs(x - wanted) < Math.abs(at - wanted)) at = x;
      found.push([i, x, y]);
    });
    if (at === null) return hide();
    const px = LEFT + (at - low) / (high - low) * (SVG_WIDTH - LEFT - RIGHT);
    cross.setAttribute("x1", px);
    cross.setAttribute("x2", px);
    cross.style.visibility = "visible";
    box.replaceChildren();
    const head = document.createElement("div");
    head.textContent = `${data.x} ${readable(at)}`;
    box.append(head);
    for (const [i, x, y] of found) {
      if (Math.abs(x - at) > 0.05 * (high - low)) continue; // it ended elsewhere
      const row = document.createElement("div"), dot = document.createElement("span");
      const value = document.createElement("b");
      dot.className = `dot ${[...lines[i].classList].find((name) => /^c\d$/.test(name))}`;
      value.textContent = readable(y);
      row.append(dot, `${data.names[i]} `, value);
      box.append(row);
    }
    box.hidden = false;
    const left = px / SVG_WIDTH * frame.width;
    box.style.left = px < SVG_WIDTH / 2 ? `${left + 10}px` : "auto";
    box.style.right = px < SVG_WIDTH / 2 ? "auto" : `${frame.width - left + 10}px`;
  }

  function hide() {
    cross.style.visibility = "hidden";
    box.hidden = true;
  }

  plot.addEventListener("pointermove", show);
  plot.addEventListener("pointerdown", show);
  plot.addEventListener("pointerleave", hide);
}

function hideCurves(figure) {
  for (const key of figure.querySelectorAll(".key")) {
    key.addEventListener("click", () => {
      const off = key.getAttribute("aria-pressed") === "true";
      key.setAttribute("aria-pressed", String(!off));
      for (const line of figure.querySelectorAll(".line")) {
        if (line.dataset.group === key.dataset.group) line.classList.toggle("off", off);
      }
    });
  }
}

const SECONDS = { d: 86400, h: 3600, m: 60, s: 1 };

// Of `0.561 ± 0.004` or `1,234` the number, of `2h 46m` the seconds.
function valueOf(text) {
  if (!/^(\d+[dhms] ?)+$/.test(text)) return parseFloat(text.replaceAll(",", ""));
  return [...text.matchAll(/(\d+)(.)/g)].reduce((sum, [, count, unit]) => sum + count * SECONDS[unit], 0);
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

document.querySelectorAll(".plot").forEach(readOff);
document.querySelectorAll(".chart").forEach(hideCurves);
document.querySelectorAll("table.sortable").forEach(sortable);
document.querySelectorAll(".gallery img").forEach(enlarge);
changeTheme(document.getElementById("theme"));
