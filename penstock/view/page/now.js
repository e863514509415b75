// Where the groups are, who waits for whom, and what is wrong.
import { ask, go } from "./app.js";
import { lines } from "./charts.js";
import { el, number, percent, seconds, show, table } from "./dom.js";

const FLOW = [["running", "running"], ["completed", "completed"], ["leased", "in a batch"], ["trained", "trained"]];
const ASIDE = [["aborted", "interrupted"], ["expired", "too stale"], ["max_tries", "tries used up"], ["discarded", "discarded"]];

export async function open(place) {
  const refresh = async () => draw(place, await ask("now"));
  await refresh();
  return refresh;
}

function draw(place, now) {
  const findings = now.findings.map((one) => el("div", { class: `finding ${one.level}` }, one.text));
  if (now.error) findings.unshift(el("div", { class: "finding alarm" }, `The run ended with an error: ${now.error}`));
  if (now.state === "killed") findings.unshift(el("div", { class: "finding alarm" }, "Its driver is gone. Nothing is lost: resume it with --resume."));
  show(place,
    findings.length ? el("section", { "aria-label": "Alarms and tips" }, el("h2", {}, "What to look at"), findings) : null,
    el("section", {}, el("h2", {}, `${now.name}: ${now.model}`), progress(now)),
    Object.entries(now.tasks).map(([task, states]) => pipe(task, states)),
    el("div", { class: "grid" }, flow(now), engines(now), rewards(now)),
    el("p"),
    told(now));
}

function progress(now) {
  const share = now.total_steps ? now.step / now.total_steps : 0;
  const left = now.state === "running" && now.step ? ` · about ${seconds((now.seconds / now.step) * (now.total_steps - now.step))} left` : "";
  const doing = now.doing.filter((one) => one.stage !== "step").map((one) => `${one.stage} (${seconds(one.seconds)})`).join(", ");
  return [
    el("div", { class: "meter", role: "progressbar", "aria-label": "train steps", "aria-valuenow": Math.round(100 * share), "aria-valuemin": 0, "aria-valuemax": 100 },
      meterFill(share)),
    el("p", { class: "num" }, `step ${now.step} of ${now.total_steps} · ${seconds(now.seconds)}${left}${now.restarts ? ` · resumed ${now.restarts} times` : ""}`),
    doing ? el("p", { class: "soft" }, `now: ${doing}`) : null,
  ];
}

function meterFill(share) {
  const fill = el("i");
  fill.style.width = `${Math.round(100 * Math.min(1, share))}%`;
  return fill;
}

function pipe(task, states) {
  const stage = ([state, word], leak) => el("div", { class: `stage${leak ? " leak" : ""}` }, el("b", {}, number(states[state])), word);
  const drawn = Object.values(states).reduce((a, b) => a + b, 0);
  const row = [el("div", { class: "stage" }, el("b", {}, number(drawn)), "drawn")];
  for (const one of FLOW) row.push(el("span", { class: "arrow", "aria-hidden": "true" }, "→"), stage(one));
  return el("section", {}, el("h2", {}, `Groups of ${task}`), el("div", { class: "pipe" }, row),
    el("p", { class: "soft" }, "beside the pipe:"),
    el("div", { class: "pipe" }, ASIDE.map((one) => stage(one, true))),
    el("p", {}, el("button", { type: "button", onclick: () => go("untrained") }, "Why not trained?")));
}

function flow(now) {
  const f = now.flow, t = now.tokens;
  const rows = [
    ["generated", `${number(f["tokens/generated_per_s"])} tokens/s`, number(t.generated)],
    ["trained", `${number(f["tokens/trained_per_s"])} tokens/s`, number(t.trained)],
    ["wasted", "", number(t.wasted)],
  ].map(([name, rate, sum]) => el("tr", {}, el("td", {}, name), el("td", { class: "n" }, rate), el("td", { class: "n" }, sum)));
  return el("section", {}, el("h2", {}, "Flow of the last step"), table(["tokens", "#rate", "#in all"], rows),
    el("p", {}, `trainer waits ${percent(f["share/trainer_wait"])} · engines idle ${percent(f["share/engine_idle"])} · staleness ${number(f["staleness/mean"])} · ${seconds(f["time/step_s"])} a step`));
}

function engines(now) {
  const rows = Object.entries(now.engines).map(([name, seen]) =>
    el("tr", {}, el("td", {}, name), el("td", {}, seen.state), el("td", { class: "n" }, number(seen.times_fenced)), el("td", {}, seen.reason)));
  return el("section", {}, el("h2", {}, `Engines · weights of step ${now.published}`),
    rows.length ? table(["engine", "state", "#times fenced", "last word"], rows) : el("p", { class: "soft" }, "none has said anything yet"));
}

function rewards(now) {
  const points = now.recent.filter((one) => one.reward !== null && one.reward !== undefined).map((one) => [one.step, one.reward]);
  return el("section", {}, el("h2", {}, "Reward"), lines("reward", [{ name: now.name, points }]));
}

function told(now) {
  if (!now.told.length) return null;
  const rows = now.told.slice().reverse().map((one) => el("tr", {}, el("td", { class: "soft" }, new Date(1000 * one.time).toLocaleTimeString()), el("td", {}, one.kind === "note" ? "" : one.kind === "alarm" ? "alarm" : "warning"), el("td", {}, one.text)));
  return el("section", {}, el("h2", {}, "What was said"), table(["time", "", "text"], rows));
}
