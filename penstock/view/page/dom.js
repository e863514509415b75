// Elements and numbers. Text only ever becomes text: nothing here, or anywhere on the page, parses HTML.

export function el(name, attributes = {}, ...children) {
  const element = name.startsWith("svg:")
    ? document.createElementNS("http://www.w3.org/2000/svg", name.slice(4))
    : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) if (child !== null && child !== undefined) element.append(child);
  return element;
}

export function show(parent, ...children) {
  parent.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
}

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(1)}k`;
  if (Number.isInteger(value)) return String(value);
  return size >= 100 ? value.toFixed(0) : Number(value.toPrecision(digits)).toString();
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value > 0 && value < 0.095) return `${Math.max(1, Math.round(1000 * value))} ms`;
  if (value < 120) return `${value < 10 ? value.toFixed(1) : Math.round(value)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  return `${(value / 3600).toFixed(1)} h`;
}

export const percent = (value) => (value === null || value === undefined ? "–" : `${Math.round(value * 100)} %`);

export function pickable(row, pick) {
  row.classList.add("pick");
  row.tabIndex = 0;
  row.addEventListener("click", pick);
  row.addEventListener("keydown", (event) => { if (event.key === "Enter") pick(); });
  return row;
}

export function table(heads, rows) {
  const numeric = (head) => (head.startsWith("#") ? { class: "n", scope: "col" } : { scope: "col" });
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": heads.map((head) => head.replace("#", "")).join(", ") },
    el("table", {},
      el("thead", {}, el("tr", {}, heads.map((head) => el("th", numeric(head), head.replace("#", ""))))),
      el("tbody", {}, rows)));
}

export function download(name, content, type) {
  const url = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type }));
  const link = el("a", { href: url, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
