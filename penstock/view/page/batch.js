// One lane per rollout of a train step: queue, generation, tools, judging, the wait in the buffer, training.
import { ask, go } from "./app.js";
import { gantt } from "./charts.js";
import { el, number, pickable, seconds, show, table } from "./dom.js";

const WORDS = {
  queue: "waits for its turn", generate: "generated", tool: "at a tool", judge: "judged", more: "generated and at tools", play: "played, and dropped or not told apart", siblings: "waits for its siblings",
  buffer: "waits in the buffer", train: "being trained", interrupted: "interrupted, waits", stale: "too stale, waits", tail: "waits for a tail batch",
};
const STATES = { running: "play", completed: "buffer", leased: "train", aborted: "interrupted", expired: "stale", max_tries: "tail" };
const order = Object.keys(WORDS);
const style = (what, version, versions) => (version === null ? `w-${what}` : `v${versions.indexOf(version) % 6}`);

export async function open(place, asked) {
  const step = asked.get("step"), by = asked.get("by") || "rollouts";
  const refresh = async () => draw(place, await ask("batch", { step }), by);
  await refresh();
  return step ? null : refresh;
}

function draw(place, batch, by) {
  const { step, groups, lanes } = batch;
  const jump = (to) => go("batch", { step: Math.max(1, to), by });
  const told = lanes.length > 0 && by === "rollouts";
  const choice = (name) => el("button", { type: "button", "aria-pressed": String(name === "rollouts" ? told : !told), onclick: () => go("batch", { step, by: name }) }, `by ${name.slice(0, -1)}`);
  const bar = el("div", { class: "bar" }, el("button", { type: "button", onclick: () => jump(step - 1) }, "← earlier"), el("h2", {}, `Train step ${step}`),
    el("button", { type: "button", onclick: () => jump(step + 1) }, "later →"), el("span", { class: "grow" }), lanes.length ? el("span", { class: "choice" }, choice("rollouts"), choice("groups")) : null,
    el("button", { type: "button", onclick: () => go("rollouts", { step, kind: "train" }) }, "Read its rollouts"));
  if (!groups.length) return show(place, bar, el("section", { class: "empty" }, "There is no group of this step in the ledger."));
  const rows = told ? lanes.map((lane) => ofRollout(lane, step)) : groups.map(ofGroup);
  const all = rows.flatMap((row) => row.spans);
  const versions = [...new Set(all.map((span) => span.version).filter((version) => version !== null))].sort((a, b) => a - b);
  for (const span of all) span.style = style(span.what, span.version, versions);
  const begin = Math.min(...all.map((span) => span.begin)), end = Math.max(...all.map((span) => span.end));
  const seen = order.filter((what) => all.some((span) => span.what === what && span.version === null));
  show(place, bar,
    el("section", {}, legend(seen, versions), gantt(`the ${told ? "rollouts" : "groups"} of train step ${step}`, rows, begin, end, { unit: "from", height: told ? 13 : 22, gap: told ? "group" : null }),
      batch.left_out ? el("p", { class: "soft" }, `and ${number(batch.left_out)} rollouts more`) : null,
      told ? null : el("p", { class: "soft" }, lanes.length ? "" : "This run kept no times of its rollouts: there is one lane per group.")),
    told ? sums(lanes, all) : null, groupTable(groups));
}

const ofRollout = (lane, step) => ({
  name: lane.rollout_id, group: lane.group_id, pick: () => go("rollouts", { id: lane.rollout_id, kind: "train", step }),
  spans: lane.spans.map(([what, begin, end, version]) => ({ what, begin, end, version, label: `${lane.rollout_id}: ${WORDS[what] || what}${version === null ? "" : ` by weights ${version}`}` })),
});

const ofGroup = (group) => ({
  name: group.group_id, group: group.group_id, pick: () => go("untrained", { group: group.group_id }),
  spans: group.moves.slice(0, -1).map(([state, time], index) => {
    const what = STATES[state] || "play", version = what === "play" && group.model_steps ? Math.min(...group.model_steps) : null;
    return { what, begin: time, end: group.moves[index + 1][1], version, label: `${group.group_id}: ${what === "play" ? "played" : WORDS[what]}` };
  }),
});

function legend(seen, versions) {
  const key = (name, word) => el("span", {}, el("span", { class: `key ${name}` }), word);
  return el("div", { class: "legend top" }, versions.map((version, index) => key(`v${index % 6}`, `by weights ${version}`)), seen.map((what) => key(`w-${what}`, WORDS[what])));
}

function sums(lanes, all) {
  const whole = all.reduce((sum, span) => sum + span.end - span.begin, 0);
  const rows = order.map((what) => [what, all.filter((span) => span.what === what).reduce((sum, span) => sum + span.end - span.begin, 0)]).filter(([, sum]) => sum > 0).sort((a, b) => b[1] - a[1]);
  const fill = (what, share) => {
    const bar = el("i", { class: what === "generate" ? "v0" : `w-${what}` });
    bar.style.width = `${Math.max(0.5, 100 * share)}%`;
    return el("div", { class: "meter" }, bar);
  };
  return el("section", {}, el("h2", {}, `Where the time of these ${lanes.length} rollouts went`),
    el("div", { class: "shares figures" }, rows.map(([what, sum]) => [el("span", {}, WORDS[what]), fill(what, sum / whole), el("span", { class: "num" }, `${Math.round((100 * sum) / whole)} %`), el("span", { class: "num soft" }, `${seconds(sum / lanes.length)} each`)])));
}

function groupTable(groups) {
  return el("section", {}, el("h2", {}, "Its groups"), table(["group", "task", "#tokens", "#weights"], groups.map((group) => pickable(el("tr", {},
    el("td", {}, group.group_id), el("td", {}, group.task), el("td", { class: "n" }, number(group.tokens)),
    el("td", { class: "n" }, group.model_steps ? [...new Set(group.model_steps)].join(" to ") : "–")), () => go("untrained", { group: group.group_id })))));
}
