// Metrics against train steps, of one run or of several over each other.
import { allRuns, ask } from "./app.js";
import { asPng, lines } from "./charts.js";
import { download, el, show } from "./dom.js";

const USUAL = [
  ["Reward", "reward/mean"], ["Evaluation", "eval/accuracy"], ["Length", "length/mean"], ["Entropy", "train/entropy"],
  ["Loss", "train/loss"], ["Gradient norm", "train/grad_norm"], ["Mismatch KL", "train/mismatch/k3_kl"], ["Staleness", "staleness/mean"],
  ["Wasted tokens", "tokens/wasted"], ["Seconds a step", "time/step_s"], ["Truncated answers", "length/truncated_share"], ["Trainer waits", "share/trainer_wait"],
];
const chosen = { runs: new Set(), weight: 0, range: null, extra: [] };

export async function open(place, asked) {
  const run = asked.get("run");
  const compare = () => [...new Set([run || allRuns()[0], ...chosen.runs])].filter((name) => allRuns().includes(name));
  const grid = el("div", { class: "grid" });
  const refresh = async () => {
    const names = [...USUAL.map(([, name]) => name), ...chosen.extra];
    const found = await Promise.all(compare().map(async (name) => [name, (await ask("curves", { name: names }, name)).curves]));
    const shown = [...USUAL, ...chosen.extra.map((name) => [name, name])];
    show(grid, shown.map(([title, name]) => chart(title, name, found, refresh)));
  };
  show(place, bar(run, refresh), await names(refresh), grid, el("p", { class: "soft" }, "Drag over a part to zoom, double-click to see all."));
  await refresh();
  return refresh;
}

function chart(title, name, found, refresh) {
  const series = found.map(([run, curves]) => ({ name: run, points: curves[name] || [] }));
  if (series.every((one) => !one.points.length)) return null;
  const drawing = lines(title, series, { weight: chosen.weight, range: chosen.range, onzoom: (range) => { chosen.range = range; refresh(); } });
  const csv = () => {
    const rows = series.flatMap((one) => one.points.map(([step, value]) => `${JSON.stringify(one.name)},${step},${value}`));
    download(`${name.replaceAll("/", "_")}.csv`, ["run,step,value", ...rows].join("\n") + "\n", "text/csv");
  };
  const png = async () => download(`${name.replaceAll("/", "_")}.png`, await asPng(drawing), "image/png");
  return el("section", {}, el("div", { class: "bar" }, el("h2", {}, title), el("span", { class: "soft" }, name), el("span", { class: "grow" }),
    el("button", { type: "button", "aria-label": `${title} as PNG`, onclick: png }, "PNG"), el("button", { type: "button", "aria-label": `${title} as CSV`, onclick: csv }, "CSV")), drawing,
  series.length > 1 ? el("div", { class: "legend" }, series.map((one, index) => el("span", {}, el("span", { class: `key s${index % 6}` }), one.name))) : null);
}

function bar(run, refresh) {
  const others = allRuns().filter((name) => name !== run).slice(0, 12);
  const smoothing = el("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: chosen.weight, "aria-label": "smoothing" });
  smoothing.addEventListener("input", () => { chosen.weight = Number(smoothing.value); refresh(); });
  return el("div", { class: "bar" }, el("label", {}, "Smoothing ", smoothing),
    others.map((name) => {
      const box = el("input", { type: "checkbox", checked: chosen.runs.has(name) });
      box.addEventListener("change", () => { if (box.checked) chosen.runs.add(name); else chosen.runs.delete(name); refresh(); });
      return el("label", {}, box, ` ${name}`);
    }));
}

async function names(refresh) {
  const { names: known } = await ask("curves");
  const input = el("input", { list: "metrics", placeholder: "another metric", "aria-label": "another metric" });
  input.addEventListener("change", () => {
    if (known.includes(input.value) && !chosen.extra.includes(input.value)) chosen.extra.unshift(input.value);
    input.value = "";
    refresh();
  });
  return el("div", { class: "bar" }, input, el("datalist", { id: "metrics" }, known.map((name) => el("option", { value: name }))));
}
