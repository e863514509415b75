// Drawings, as SVG: curves, a histogram, a Gantt.
import { el, number, seconds } from "./dom.js";

const W = 420, H = 190, LEFT = 52, RIGHT = 10, TOP = 10, BOTTOM = 24;

function ticks(low, high, count, whole = false) {
  const span = high - low || 1;
  const raw = whole ? Math.max(1, span / count) : span / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = (whole ? [1, 2, 5, 10] : [1, 2, 2.5, 5, 10]).find((factor) => factor * power >= raw) * power;
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
  for (const x of ticks(x0, x1, 6, true)) svg.append(el("svg:text", { x: X(x), y: H - 6, "text-anchor": "middle" }, number(x)));
  if (shown.length === 1 && all.length > 1) {
    const curve = smooth(shown[0].points, weight);
    svg.append(el("svg:path", { class: "area", d: `${path(curve)}L${X(curve.at(-1)[0]).toFixed(1)} ${H - BOTTOM}L${X(curve[0][0]).toFixed(1)} ${H - BOTTOM}Z` }));
  }
  shown.forEach((one, index) => {
    if (!one.points.length) return;
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

// What there is room for, so that letters stay as large as they are elsewhere on the page.
const room = () => Math.max(280, Math.min(1380, document.getElementById("panel").clientWidth) - 66);

// chosen: [low, high] of the bars that are the filter now.
export function bars(title, { counts, edges }, pick, chosen = null) {
  const full = room(), height = 84, top = Math.max(...counts, 1), width = full / counts.length;
  const svg = el("svg:svg", { class: "bars", viewBox: `0 0 ${full} ${height + 20}`, role: "group", "aria-label": title });
  counts.forEach((count, index) => {
    const h = count ? Math.max(2, (count / top) * height) : 0;
    const said = `reward ${number(edges[index])} to ${number(edges[index + 1])}: ${count} rollouts`;
    const within = !chosen || (edges[index + 1] > chosen[0] && edges[index] < chosen[1]) || (edges[index] === chosen[0] && edges[index + 1] === chosen[1]);
    const choose = () => pick(edges[index], edges[index + 1]);
    svg.append(el("svg:rect", { class: `bin${within ? "" : " out"}`, x: index * width + 1, y: height - h, width: Math.max(1, width - 2), height: h, rx: 2, ...(count ? { tabindex: 0, role: "button", "aria-label": said, onclick: choose, onkeydown: (event) => { if (event.key === "Enter") choose(); } } : {}) },
      el("svg:title", {}, said)));
  });
  svg.append(el("svg:line", { class: "axis", x1: 0, x2: full, y1: height + 0.5, y2: height + 0.5 }));
  const every = Math.ceil(counts.length / Math.floor(full / 70));
  for (let index = 0; index <= counts.length; index += every) svg.append(el("svg:text", { x: Math.min(full - 1, Math.max(1, index * width)), y: height + 15, "text-anchor": index === 0 ? "start" : index === counts.length ? "end" : "middle" }, number(edges[index], 2)));
  return svg;
}

// rows: [{name, group, pick, spans: [{begin, end, label, style, share}]}]; with gap, rows of another group stand apart.
export function gantt(title, rows, begin, end, { unit = "s", height = 20, gap = null } = {}) {
  const width = room(), letters = width < 600 ? 16 : 20;
  const label = 14 + 6.3 * Math.max(...rows.map((row) => short(height < 16 ? row.group : row.name, letters).length));
  const X = (x) => label + ((x - begin) / (end - begin || 1)) * (width - label - 2);
  let y = 0, before = null;
  const places = rows.map((row) => {
    if (gap && before !== null && row.group !== before) y += 5;
    before = row.group;
    return (y += height) - height;
  });
  const bottom = y, svg = el("svg:svg", { viewBox: `0 0 ${width} ${bottom + 24}`, role: "img", "aria-label": title });
  const zero = unit === "from" ? begin : 0;
  for (const x of ticks(begin - zero, end - zero, width < 600 ? 3 : 8)) {
    svg.append(el("svg:line", { class: "axis", x1: X(x + zero), x2: X(x + zero), y1: 0, y2: bottom + 4 }),
      el("svg:text", { x: X(x + zero), y: bottom + 18, "text-anchor": X(x + zero) > width - 20 ? "end" : "middle" }, `${number(x)} s`));
  }
  rows.forEach((row, index) => {
    const top = places[index], thin = height < 16;
    const first = !gap || index === 0 || rows[index - 1].group !== row.group;
    if (!thin || first) svg.append(el("svg:text", { x: 0, y: top + (thin ? 10 : 14) }, short(thin ? row.group : row.name, letters)));
    const drawn = el("svg:g", row.pick ? { class: "pick", onclick: row.pick } : {});
    for (const span of row.spans) {
      const a = X(Math.max(begin, span.begin)), b = X(Math.min(end, span.end));
      const rect = el("svg:rect", { class: span.style, x: a.toFixed(1), y: top + (thin ? 1 : 3), width: Math.max(1, b - a).toFixed(1), height: height - (thin ? 2 : 6), rx: thin ? 1.5 : 3 },
        el("svg:title", {}, span.share === undefined ? `${span.label}, ${seconds(span.end - span.begin)}` : span.label));
      if (span.share !== undefined) rect.setAttribute("opacity", (0.12 + 0.88 * span.share).toFixed(2));
      drawn.append(rect);
    }
    svg.append(drawn);
  });
  return svg;
}

const short = (text, letters) => (text.length > letters ? `${text.slice(0, letters - 1)}…` : text);

// Any SVG of the page as a PNG: its styles are those of the page, so they are written into a copy first.
export async function asPng(svg) {
  const copy = svg.cloneNode(true);
  const from = [svg, ...svg.querySelectorAll("*")], to = [copy, ...copy.querySelectorAll("*")];
  from.forEach((element, index) => {
    const style = getComputedStyle(element);
    for (const name of ["fill", "stroke", "stroke-width", "opacity", "fill-opacity", "font-size", "font-family"]) to[index].style.setProperty(name, style.getPropertyValue(name));
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
