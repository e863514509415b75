// Where the time goes: the stages of the last steps, and where the trainer waited.
import { ask, go } from "./app.js";
import { gantt } from "./charts.js";
import { el, seconds, show, percent } from "./dom.js";

const STYLES = { produce: "w-wait", prepare: "s5", train: "w-train", commit: "s1", checkpoint: "s3", sync: "s4", pause: "w-tail", eval: "s0" };
// A pause stands in the stage that waits for it, and is drawn below it.
const ORDER = ["step", "produce", "prepare", "ledger flush", "train", "commit", "checkpoint", "write checkpoint", "sync", "pause"];
const row = (span) => (span.lane === "evaluation" ? span.lane : span.stage);
const rank = (name) => (ORDER.includes(name) ? ORDER.indexOf(name) : ORDER.length);
const DOING = { queue: "rollouts queue", generate: "engines", tool: "tools", judge: "judges" };
const VERBS = { queue: "wait for an engine", generate: "are generated", tool: "are at a tool", judge: "are judged" };

export async function open(place, asked) {
  const last = asked.get("last");
  const refresh = async () => draw(place, await ask("timeline", { last }));
  await refresh();
  return last ? null : refresh;
}

function draw(place, line) {
  if (!line.spans.length) return show(place, el("p", { class: "soft" }, "No step has begun."));
  const spans = line.spans.map(([lane, stage, step, begin, end]) => ({ lane, stage, step, begin, end: end === null ? line.end : end }));
  const names = [...new Set(spans.filter((span) => span.stage !== "step").map(row))].sort((a, b) => rank(a) - rank(b));
  const rows = [{ name: "step", spans: spans.filter((span) => span.stage === "step").map((span) => ({ ...span, label: `step ${span.step}`, style: span.step % 2 ? "s0" : "s0 soft" })) },
    ...names.map((name) => ({ name, spans: spans.filter((span) => span.stage !== "step" && row(span) === name).map((span) => ({ ...span, label: `${span.stage}${span.step === null ? "" : ` of step ${span.step}`}`, style: STYLES[span.stage] || "s1" })) }))];
  const whole = line.end - line.begin;
  rows.push(...strips(line), ...away(line));
  const sums = names.map((name) => [name, rows.find((one) => one.name === name).spans]).map(([name, mine]) => [name, mine[0].style, mine.reduce((sum, span) => sum + Math.min(span.end, line.end) - Math.max(span.begin, line.begin), 0)]).sort((a, b) => b[2] - a[2]);
  const first = line.steps[0], final = line.steps.at(-1);
  show(place, el("div", { class: "bar" },
    first > line.first_step ? el("button", { type: "button", onclick: () => go("time", { last: first - 1 }) }, "← earlier") : null,
    el("h2", {}, `Steps ${first} to ${final}`), el("button", { type: "button", onclick: () => go("time", { last: final + line.steps.length }) }, "later →"), el("button", { type: "button", onclick: () => go("time") }, "newest")),
  el("section", {}, gantt(`stages of steps ${first} to ${final}`, rows, line.begin, line.end),
    el("p", { class: "soft" }, "Produce: the trainer waited for rollouts. Pause: engines stop and what is in flight is put away, before weights change or the trainer takes its turn. Engines, tools and judges: the stronger the colour, the more rollouts of these steps at once.")),
  el("section", {}, el("h2", {}, "Seconds by stage"), el("div", { class: "shares figures" }, sums.map(([name, style, sum]) => [el("span", {}, name), meter(sum / whole, style), el("span", { class: "num" }, seconds(sum)), el("span", { class: "num soft" }, percent(sum / whole))]))));
}

function meter(share, style) {
  const fill = el("i", { class: style });
  fill.style.width = `${Math.min(100, Math.max(0.5, 100 * share))}%`;
  return el("div", { class: "meter" }, fill);
}

// How many rollouts did what, as a strip of so many parts of the time.
function strips(line) {
  return Object.entries(line.activity || {}).map(([what, counts]) => {
    const most = Math.max(...counts, 1), width = (line.end - line.begin) / counts.length;
    const spans = counts.map((count, index) => ({ begin: line.begin + index * width, end: line.begin + (index + 1) * width, style: `w-${what}`, share: count / most, label: `${count.toFixed(1)} rollouts ${VERBS[what]}` }));
    return { name: DOING[what], spans: spans.filter((span) => span.share > 0) };
  });
}

function away(line) {
  const names = [...new Set((line.away || []).map(([engine]) => engine))];
  return names.map((name) => ({ name, spans: line.away.filter(([engine]) => engine === name).map(([, state, , begin, end]) => ({ begin, end: end === null ? line.end : end, style: "w-bad", label: `${name} is ${state}` })) }));
}
