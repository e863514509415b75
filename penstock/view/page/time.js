// Where the time goes: the stages of the last steps, and where the trainer waited.
import { ask, go } from "./app.js";
import { gantt } from "./charts.js";
import { el, seconds, show, table, percent } from "./dom.js";

const STYLES = { produce: "wait", prepare: "s5", train: "s2", commit: "s1", checkpoint: "s3", sync: "s4", eval: "s0" };

export async function open(place, asked) {
  const last = asked.get("last");
  const refresh = async () => draw(place, await ask("timeline", { last }));
  await refresh();
  return last ? null : refresh;
}

function draw(place, line) {
  if (!line.spans.length) return show(place, el("p", { class: "soft" }, "No step has begun."));
  const spans = line.spans.map(([lane, stage, step, begin, end]) => ({ lane, stage, step, begin, end: end === null ? line.end : end }));
  const names = [...new Set(spans.filter((span) => span.stage !== "step").map((span) => (span.lane === "trainer" ? span.stage : span.lane)))];
  const rows = [{ name: "step", spans: spans.filter((span) => span.stage === "step").map((span) => ({ ...span, label: `step ${span.step}`, style: `s${span.step % 2 ? 0 : 5}` })) },
    ...names.map((name) => ({ name, spans: spans.filter((span) => span.stage !== "step" && (span.lane === "trainer" ? span.stage : span.lane) === name).map((span) => ({ ...span, label: `${span.stage}${span.step === null ? "" : ` of step ${span.step}`}`, style: STYLES[span.stage] || "s1" })) }))];
  const whole = line.end - line.begin;
  const sums = names.map((name) => [name, rows.find((row) => row.name === name).spans.reduce((sum, span) => sum + Math.min(span.end, line.end) - Math.max(span.begin, line.begin), 0)]).sort((a, b) => b[1] - a[1]);
  const first = line.steps[0], final = line.steps.at(-1);
  show(place, el("div", { class: "bar" },
    first > line.first_step ? el("button", { type: "button", onclick: () => go("time", { last: first - 1 }) }, "← earlier") : null,
    el("h2", {}, `Steps ${first} to ${final}`), el("button", { type: "button", onclick: () => go("time", { last: final + line.steps.length }) }, "later →"), el("button", { type: "button", onclick: () => go("time") }, "newest")),
  el("section", {}, gantt(`stages of steps ${first} to ${final}`, rows, line.begin, line.end),
    el("p", { class: "soft" }, "produce, in red: the trainer waited for rollouts.")),
  el("section", {}, el("h2", {}, "Seconds by stage"), table(["stage", "#seconds", "#share"], sums.map(([name, sum]) => el("tr", {}, el("td", {}, name), el("td", { class: "n" }, seconds(sum)), el("td", { class: "n" }, percent(sum / whole)))))));
}
