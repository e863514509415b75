// Metrics against train steps, of one run or of several over each other.
import { allRuns, ask } from "./app.js";
import { asPng, lines } from "./charts.js";
import { download, el, show } from "./dom.js";

// Title, metric, and what is more than one curve of one run: a metric for each name.
const STAGES = ["produce", "prepare", "train", "commit", "sync", "checkpoint", "eval"];
const USUAL = [
  ["Reward", "reward/mean"], ["Evaluation", "eval/accuracy"], ["Length", "length/mean"], ["Entropy", "train/entropy"],
  ["KL to the reference", "train/reference_kl"], ["Mismatch KL", "train/mismatch/k3_kl"], ["Staleness", "staleness/mean"], ["Wasted tokens", "tokens/wasted"],
  ["Seconds by stage", "time/<stage>_s", Object.fromEntries(STAGES.map((stage) => [stage, `time/${stage}_s`]))],
  ["Seconds a step", "time/step_s"], ["Trainer waits", "share/trainer_wait"], ["Truncated answers", "length/truncated_share"],
  ["Loss", "train/loss"], ["Gradient norm", "train/grad_norm"],
];
const chosen = { runs: new Set(), weight: 0, range: null, extra: [] };

export async function open(place, asked) {
  const run = asked.get("run") || allRuns()[0];
  const compare = () => [...new Set([run, ...chosen.runs])].filter((name) => allRuns().includes(name));
  const grid = el("div", { class: "grid" });
  const refresh = async () => {
    const names = [...USUAL.flatMap(([, name, many]) => (many ? Object.values(many) : [name])), ...chosen.extra];
    const found = await Promise.all(compare().map(async (name) => [name, (await ask("curves", { name: names }, name)).curves]));
    const shown = [...chosen.extra.map((name) => [name, name]), ...USUAL];
    show(grid, shown.map(([title, name, many]) => chart(title, name, many, found, refresh)));
    whole.hidden = !chosen.range;
  };
  const whole = el("button", { type: "button", onclick: () => { chosen.range = null; refresh(); } }, "see all steps");
  show(place, el("div", { class: "bar" }, smoothing(refresh), await names(refresh), others(run, refresh), whole, el("span", { class: "grow" }), el("span", { class: "soft" }, "drag over a part to zoom, double-click to see all")), grid);
  await refresh();
  return refresh;
}

function chart(title, name, many, found, refresh) {
  const called = (run, word) => (found.length > 1 ? `${run} ${word}` : word);
  const series = many
    ? found.flatMap(([run, curves]) => Object.entries(many).map(([word, one]) => ({ name: called(run, word), points: curves[one] || [] }))).filter((one) => one.points.length)
    : found.map(([run, curves]) => ({ name: run, points: curves[name] || [] }));
  if (series.every((one) => !one.points.length)) return null;
  const drawing = lines(title, series, { weight: chosen.weight, range: chosen.range, onzoom: (range) => { chosen.range = range; refresh(); } });
  const csv = () => {
    const rows = series.flatMap((one) => one.points.map(([step, value]) => `${JSON.stringify(one.name)},${step},${value}`));
    download(`${name.replace(/[^\w]+/g, "_")}.csv`, ["run,step,value", ...rows].join("\n") + "\n", "text/csv");
  };
  const png = async () => download(`${name.replace(/[^\w]+/g, "_")}.png`, await asPng(drawing), "image/png");
  return el("section", {}, el("div", { class: "bar" }, el("h2", {}, title), el("span", { class: "soft", title: name }, name), el("span", { class: "grow" }),
    el("button", { type: "button", "aria-label": `${title} as PNG`, onclick: png }, "PNG"), el("button", { type: "button", "aria-label": `${title} as CSV`, onclick: csv }, "CSV")), drawing,
  series.length > 1 ? el("div", { class: "legend" }, series.map((one, index) => el("span", {}, el("span", { class: `key s${index % 6}` }), one.name))) : null);
}

function smoothing(refresh) {
  const range = el("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: chosen.weight, "aria-label": "smoothing" });
  range.addEventListener("input", () => { chosen.weight = Number(range.value); refresh(); });
  return el("label", {}, "Smoothing ", range);
}

function others(run, refresh) {
  return allRuns().filter((name) => name !== run).slice(0, 12).map((name) => {
    const box = el("input", { type: "checkbox", checked: chosen.runs.has(name) });
    box.addEventListener("change", () => { if (box.checked) chosen.runs.add(name); else chosen.runs.delete(name); refresh(); });
    return el("label", {}, box, ` ${name}`);
  });
}

async function names(refresh) {
  const { names: known } = await ask("curves");
  const input = el("input", { list: "metrics", placeholder: "another metric", "aria-label": "another metric" });
  input.addEventListener("change", () => {
    if (known.includes(input.value) && !chosen.extra.includes(input.value)) chosen.extra.unshift(input.value);
    input.value = "";
    refresh();
  });
  return el("span", {}, input, el("datalist", { id: "metrics" }, known.map((name) => el("option", { value: name }))));
}
