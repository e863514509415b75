// Every group that was not trained: why, what it cost, and its story.
import { ask, go } from "./app.js";
import { gantt } from "./charts.js";
import { el, number, pickable, seconds, show, table } from "./dom.js";

const words = (text) => (text || "").replaceAll("_", " ").replace("re rolled", "rolled again");
const WAITING = ["running", "completed", "aborted", "expired", "max_tries", "leased"];

export async function open(place, asked) {
  const group = asked.get("group");
  if (group) {
    story(place, await ask("group", { id: group }));
    return null;
  }
  const state = asked.get("state") || "discarded", reason = asked.get("reason") || "";
  const refresh = async () => {
    const [costs, page] = await Promise.all([ask("untrained"), ask("groups", { state, reason })]);
    draw(place, costs, page, state, reason);
  };
  await refresh();
  return refresh;
}

function draw(place, costs, page, state, reason) {
  const discarded = Object.entries(costs.discarded).sort((a, b) => b[1].tokens - a[1].tokens);
  const usual = costs.trained ? costs.trained.tokens_per_group : null, most = Math.max(1, ...discarded.map(([, cost]) => cost.tokens));
  const rows = discarded.map(([name, cost]) => pickable(el("tr", {}, el("td", {}, words(name)), el("td", { class: "n" }, number(cost.groups)), el("td", { class: "n" }, number(cost.tokens)), el("td", { class: "wide" }, meter(cost.tokens / most)),
    el("td", { class: "n" }, number(cost.tokens_per_group)), el("td", {}, bias(cost.tokens_per_group, usual))), () => go("untrained", { state: "discarded", reason: name })));
  const wasted = Object.entries(costs.wasted).map(([name, tokens]) => el("tr", {}, el("td", {}, words(name)), el("td", { class: "n" }, number(tokens))));
  show(place,
    el("section", {}, el("h2", {}, "Discarded groups, by what they cost"), rows.length ? table(["reason", "#groups", "#tokens", "", "#tokens a group", "length bias"], rows) : el("p", { class: "soft" }, "None: every group that was finished was trained, or waits."),
      usual ? el("p", { class: "soft" }, `A trained group has ${number(usual)} tokens.`) : null),
    wasted.length ? el("section", {}, el("h2", {}, "Tokens that living groups lost"), table(["why", "#tokens"], wasted)) : null,
    el("section", {}, el("div", { class: "bar" }, el("span", { class: "choice" }, ["discarded", ...WAITING].map((name) => el("button", { type: "button", "aria-pressed": String(name === state), onclick: () => go("untrained", { state: name }) }, words(name)))),
      reason ? el("button", { type: "button", onclick: () => go("untrained", { state }) }, `only ${words(reason)} ×`) : null), groups(page, state, reason)));
}

function meter(share) {
  const fill = el("i", { class: "w-bad" });
  fill.style.width = `${Math.max(1, 100 * share)}%`;
  return el("div", { class: "meter" }, fill);
}

function bias(mine, usual) {
  if (!usual || !mine) return "";
  const ratio = mine / usual;
  if (ratio > 1.25) return el("span", { class: "warn" }, `${number(ratio, 2)} times as long as what was trained: long answers are lost`);
  if (ratio < 0.8) return el("span", { class: "warn" }, `${number(ratio, 2)} times as long as what was trained: short or unfinished answers are lost`);
  return "none to speak of";
}

function groups(page, state, reason) {
  const body = el("tbody"), more = el("p"), drawn = table(["group", "task", "#step", "reason", "#tokens"], []);
  drawn.querySelector("tbody").replaceWith(body);
  const add = (found) => {
    body.append(...found.groups.map((group) => pickable(el("tr", {}, el("td", {}, group.group_id), el("td", {}, group.task), el("td", { class: "n" }, group.train_step), el("td", {}, words(group.reason)), el("td", { class: "n" }, number(group.tokens))),
      () => go("untrained", { group: group.group_id }))));
    show(more, found.groups.length === 50 ? el("button", { type: "button", onclick: async () => add(await ask("groups", { state, reason, after: found.next })) }, "More") : body.children.length ? null : "None.");
  };
  add(page);
  return [drawn, more];
}

const LOOKS = { running: "v0", completed: "w-buffer", leased: "w-train", aborted: "w-interrupted", expired: "w-stale", max_tries: "w-tail" };

function story(place, told) {
  const moves = told.transitions, end = Math.max(moves.at(-1).time, ...told.restarts.map((restart) => restart.time));
  const after = (time) => el("td", { class: "name soft", title: new Date(1000 * time).toLocaleString() }, `+${seconds(time - moves[0].time)}`);
  const rows = moves.map((move) => [move.event, el("tr", {}, after(move.time), el("td", {}, words(move.state)), el("td", { class: "n" }, move.train_step), el("td", { class: "n" }, number(move.tokens)),
    el("td", { class: "n" }, move.model_steps ? [...new Set(move.model_steps)].join(" to ") : ""),
    el("td", {}, [words(move.reason), move.detail, ...Object.entries(move.wasted_tokens).map(([why, n]) => `${n} tokens dropped (${words(why)})`)].filter(Boolean).join("; ")))]);
  // Between the moves before and after it.
  for (const { after_event, time, checkpoint_step } of told.restarts) rows.push([after_event + 0.5, el("tr", { class: "restart" }, after(time), el("td", { colspan: 5 }, `the driver was restarted, from checkpoint ${checkpoint_step}`))]);
  rows.sort((a, b) => a[0] - b[0]);
  const spans = moves.slice(0, -1).map((move, index) => ({ begin: move.time, end: moves[index + 1].time, style: LOOKS[move.state] || "v1", label: words(move.state) }));
  const lanes = [{ name: told.group_id, spans }];
  if (told.restarts.length) lanes.push({ name: "restarts", spans: told.restarts.map(({ time, checkpoint_step }) => ({ begin: time, end: time, style: "w-bad", label: `the driver was restarted, from checkpoint ${checkpoint_step}` })) });
  const seen = Object.keys(LOOKS).filter((state) => moves.slice(0, -1).some((move) => move.state === state));
  const played = moves.filter((move) => move.state === "running").length;
  show(place, el("div", { class: "bar" }, el("button", { type: "button", onclick: () => history.back() }, "← back"), el("h2", {}, `Group ${told.group_id}`), el("span", { class: "soft" }, `${told.task}, draw ${told.draw}, ${words(told.state)}, ${told.tokens} tokens, ${told.rollouts.length} rollouts; drawn ${new Date(1000 * moves[0].time).toLocaleString()}, played ${played === 1 ? "once" : `${played} times`}${told.restarts.length ? `, over ${told.restarts.length} restart${told.restarts.length === 1 ? "" : "s"} of the driver` : ""}`),
    el("span", { class: "grow" }), told.state === "trained" ? el("button", { type: "button", onclick: () => go("rollouts", { group: told.group_id, kind: "train", step: told.train_step }) }, "Read its rollouts") : null),
  el("section", {}, told.why_not_trained ? el("p", { class: "finding" }, `Not trained: ${told.why_not_trained}.`) : el("p", {}, `Trained in step ${told.train_step}.`),
    spans.length && end > moves[0].time ? [el("div", { class: "legend top" }, seen.map((state) => el("span", {}, el("span", { class: `key ${LOOKS[state]}` }), words(state)))), gantt(`the story of ${told.group_id}`, lanes, moves[0].time, end, { unit: "from", height: 22 })] : null,
    table(["after", "state", "#step", "#tokens", "#weights", ""], rows.map(([, row]) => row))));
}
