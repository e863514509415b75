// Drawings, as SVG: curves, a histogram, a Gantt.
import { el, number, seconds } from "./dom.js";

const W = 420, H = 190, LEFT = 52, RIGHT = 10, TOP = 10, BOTTOM = 24;

function ticks(low, high, count) {
  const span = high - low || 1;
  const raw = span / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= raw) * power;
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + 1e-9 * span; value += step) found.push(value);
  return found;
}

export function smooth(points, weight) {
  if (!weight) return points;
  let last = null;
  return points.map(([x, y]) => {
    last = last === null ? y : weight * last + (1 - weight) * y;
    return [x, last];
  });
}

// series: [{name, points: [[x, y]]}]; onzoom(from, to) is told which part was dragged over.
export function lines(title, series, { weight = 0, range = null, onzoom = null } = {}) {
  const inside = ([x, y]) => Number.isFinite(y) && (!range || (x >= range[0] && x <= range[1]));
  const shown = series.map((one) => ({ ...one, points: one.points.filter(inside) }));
  const all = shown.flatMap((one) => one.points);
  if (!all.length) return el("p", { class: "soft" }, "nothing yet");
  let [x0, x1] = [Math.min(...all.map((p) => p[0])), Math.max(...all.map((p) => p[0]))];
  let [y0, y1] = [Math.min(...all.map((p) => p[1])), Math.max(...all.map((p) => p[1]))];
  if (x0 === x1) { x0 -= 0.5; x1 += 0.5; }
  if (y0 === y1) { y0 -= Math.abs(y0) * 0.1 || 0.5; y1 += Math.abs(y1) * 0.1 || 0.5; }
  const X = (x) => LEFT + ((x - x0) / (x1 - x0)) * (W - LEFT - RIGHT);
  const Y = (y) => H - BOTTOM - ((y - y0) / (y1 - y0)) * (H - TOP - BOTTOM);
  const path = (points) => points.map(([x, y], i) => `${i ? "L" : "M"}${X(x).toFixed(1)} ${Y(y).toFixed(1)}`).join("");
  const svg = el("svg:svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `${title} by train step` });
  for (const y of ticks(y0, y1, 4)) {
    svg.append(el("svg:line", { class: "axis", x1: LEFT, x2: W - RIGHT, y1: Y(y), y2: Y(y) }),
      el("svg:text", { x: LEFT - 6, y: Y(y) + 4, "text-anchor": "end" }, number(y)));
  }
  for (const x of ticks(x0, x1, 6)) svg.append(el("svg:text", { x: X(x), y: H - 6, "text-anchor": "middle" }, number(x)));
  shown.forEach((one, index) => {
    if (weight && one.points.length > 2) svg.append(el("svg:path", { class: `curve faint l${index % 6}`, d: path(one.points) }));
    const curve = smooth(one.points, weight);
    if (curve.length === 1) svg.append(el("svg:circle", { class: `s${index % 6}`, cx: X(curve[0][0]), cy: Y(curve[0][1]), r: 3 }));
    svg.append(el("svg:path", { class: `curve l${index % 6}`, d: path(curve) }));
  });
  const note = el("svg:text", { x: W - RIGHT, y: TOP + 8, "text-anchor": "end" });
  svg.append(note);
  const at = (event) => {
    const box = svg.getBoundingClientRect();
    return x0 + (((event.clientX - box.left) / box.width) * W - LEFT) / (W - LEFT - RIGHT) * (x1 - x0);
  };
  let from = null;
  svg.addEventListener("pointermove", (event) => {
    const x = at(event);
    const said = shown.map((one) => {
      const near = one.points.reduce((best, p) => (!best || Math.abs(p[0] - x) < Math.abs(best[0] - x) ? p : best), null);
      return near ? `${shown.length > 1 ? `${one.name} ` : ""}${near[0]}: ${number(near[1], 4)}` : "";
    });
    note.textContent = said.filter(Boolean).join("   ");
  });
  if (onzoom) {
    svg.addEventListener("pointerdown", (event) => { from = at(event); });
    svg.addEventListener("pointerup", (event) => {
      const to = at(event);
      if (from !== null && Math.abs(to - from) > (x1 - x0) / 50) onzoom([Math.min(from, to), Math.max(from, to)]);
      from = null;
    });
    svg.addEventListener("dblclick", () => onzoom(null));
  }
  return svg;
}

export function bars(title, { counts, edges }, pick) {
  const height = 90, top = Math.max(...counts, 1), width = (W - 2) / counts.length;
  const svg = el("svg:svg", { class: "bars", viewBox: `0 0 ${W} ${height + 18}`, role: "img", "aria-label": title });
  counts.forEach((count, index) => {
    const h = count ? Math.max(2, (count / top) * height) : 0;
    const said = `${number(edges[index])} to ${number(edges[index + 1])}: ${count}`;
    svg.append(el("svg:rect", { class: "bin", x: 1 + index * width, y: height - h, width: width - 2, height: h, onclick: () => pick(edges[index], edges[index + 1]) },
      el("svg:title", {}, said)));
  });
  svg.append(el("svg:text", { x: 2, y: height + 14 }, number(edges[0])),
    el("svg:text", { x: W - 2, y: height + 14, "text-anchor": "end" }, number(edges.at(-1))));
  return svg;
}

// rows: [{name, spans: [{begin, end, label, style}]}]
export function gantt(title, rows, begin, end, { unit = "s" } = {}) {
  const height = 20, label = 130, width = 1000;
  const X = (x) => label + ((x - begin) / (end - begin || 1)) * (width - label - 8);
  const svg = el("svg:svg", { viewBox: `0 0 ${width} ${rows.length * height + 24}`, role: "img", "aria-label": title });
  rows.forEach((row, index) => {
    const y = index * height;
    svg.append(el("svg:text", { x: 0, y: y + 14 }, row.name.length > 19 ? `${row.name.slice(0, 18)}…` : row.name));
    for (const span of row.spans) {
      const a = X(Math.max(begin, span.begin)), b = X(Math.min(end, span.end));
      svg.append(el("svg:rect", { class: span.style, x: a, y: y + 3, width: Math.max(1, b - a), height: height - 6, rx: 2 },
        el("svg:title", {}, `${span.label}, ${seconds(span.end - span.begin)}`)));
    }
  });
  const zero = unit === "from" ? begin : 0;
  for (const x of ticks(begin - zero, end - zero, 8)) svg.append(el("svg:text", { x: X(x + zero), y: rows.length * height + 16, "text-anchor": "middle" }, `${number(x)} s`));
  return svg;
}

// Any SVG of the page as a PNG: its styles are those of the page, so they are written into a copy first.
export async function asPng(svg) {
  const copy = svg.cloneNode(true);
  const from = [svg, ...svg.querySelectorAll("*")], to = [copy, ...copy.querySelectorAll("*")];
  from.forEach((element, index) => {
    const style = getComputedStyle(element);
    for (const name of ["fill", "stroke", "stroke-width", "opacity", "font-size", "font-family"]) to[index].style.setProperty(name, style.getPropertyValue(name));
  });
  const [, , w, h] = svg.getAttribute("viewBox").split(" ").map(Number);
  copy.setAttribute("width", 2 * w);
  copy.setAttribute("height", 2 * h);
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(new XMLSerializer().serializeToString(copy))}`;
  await image.decode();
  const canvas = el("canvas", { width: 2 * w, height: 2 * h });
  const context = canvas.getContext("2d");
  context.fillStyle = getComputedStyle(document.body).backgroundColor;
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(image, 0, 0);
  return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
}
