// One lane per group of a train step: played, waiting in the buffer, trained.
import { ask, go } from "./app.js";
import { gantt } from "./charts.js";
import { el, number, show, table, pickable } from "./dom.js";

const STYLES = { running: "s0", completed: "s5", leased: "s2", aborted: "s3", expired: "s4", max_tries: "s1" };
const WORDS = { running: "played", completed: "waits in the buffer", leased: "being trained", aborted: "interrupted, waits", expired: "too stale, waits", max_tries: "waits for a tail batch" };

export async function open(place, asked) {
  const step = asked.get("step");
  const refresh = async () => draw(place, await ask("batch", { step }));
  await refresh();
  return step ? null : refresh;
}

function draw(place, { step, lanes }) {
  const jump = (to) => go("batch", { step: Math.max(1, to) });
  const bar = el("div", { class: "bar" }, el("button", { type: "button", onclick: () => jump(step - 1) }, "← earlier"), el("h2", {}, `Train step ${step}`),
    el("button", { type: "button", onclick: () => jump(step + 1) }, "later →"), el("button", { type: "button", onclick: () => go("rollouts", { step }) }, "Its rollouts"));
  if (!lanes.length) return show(place, bar, el("p", { class: "soft" }, "There is no group of this step in the ledger."));
  const begin = Math.min(...lanes.map((lane) => lane.moves[0][1])), end = Math.max(...lanes.map((lane) => lane.moves.at(-1)[1]));
  const rows = lanes.map((lane) => ({
    name: lane.group_id,
    spans: lane.moves.slice(0, -1).map(([state, time], index) => ({ begin: time, end: lane.moves[index + 1][1], label: `${lane.group_id}: ${WORDS[state] || state}`, style: STYLES[state] || "s1" })),
  }));
  show(place, bar,
    el("section", {}, gantt(`the groups of train step ${step}`, rows, begin, end, { unit: "from" }),
      el("div", { class: "legend" }, Object.entries(WORDS).filter(([state]) => lanes.some((lane) => lane.moves.some(([seen]) => seen === state))).map(([state, word]) => el("span", {}, el("span", { class: `key ${STYLES[state]}` }), word)))),
    el("section", {}, table(["group", "task", "#tokens", "#weights"], lanes.map((lane) => pickable(el("tr", {},
      el("td", {}, lane.group_id), el("td", {}, lane.task), el("td", { class: "n" }, number(lane.tokens)),
      el("td", { class: "n" }, lane.model_steps ? [...new Set(lane.model_steps)].join(" to ") : "–")), () => go("untrained", { group: lane.group_id }))))));
}
