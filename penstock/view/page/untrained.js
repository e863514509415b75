// Every group that was not trained: why, what it cost, and its story.
import { ask, go } from "./app.js";
import { el, number, pickable, show, table } from "./dom.js";

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
  const usual = costs.trained ? costs.trained.tokens_per_group : null;
  const rows = discarded.map(([name, cost]) => pickable(el("tr", {}, el("td", {}, name.replaceAll("_", " ")), el("td", { class: "n" }, number(cost.groups)), el("td", { class: "n" }, number(cost.tokens)),
    el("td", { class: "n" }, number(cost.tokens_per_group)), el("td", {}, bias(cost.tokens_per_group, usual))), () => go("untrained", { state: "discarded", reason: name })));
  const wasted = Object.entries(costs.wasted).map(([name, tokens]) => el("tr", {}, el("td", {}, name.replaceAll("_", " ")), el("td", { class: "n" }, number(tokens))));
  show(place,
    el("div", { class: "grid" },
      el("section", {}, el("h2", {}, "Discarded groups, by what they cost"), rows.length ? table(["reason", "#groups", "#tokens", "#tokens a group", "length bias"], rows) : el("p", { class: "soft" }, "none"),
        usual ? el("p", { class: "soft" }, `a trained group has ${number(usual)} tokens`) : null),
      el("section", {}, el("h2", {}, "Tokens that living groups lost"), wasted.length ? table(["why", "#tokens"], wasted) : el("p", { class: "soft" }, "none"))),
    el("p"),
    el("section", {}, el("div", { class: "bar" }, ["discarded", ...WAITING].map((name) => el("button", { type: "button", "aria-pressed": String(name === state), onclick: () => go("untrained", { state: name }) }, name.replaceAll("_", " ")))),
      el("h2", {}, `${state.replaceAll("_", " ")}${reason ? `, ${reason.replaceAll("_", " ")}` : ""}`), groups(page, state, reason)));
}

function bias(mine, usual) {
  if (!usual || !mine) return "";
  const ratio = mine / usual;
  if (ratio > 1.25) return `${number(ratio, 2)} times as long as what was trained: long answers are lost`;
  return ratio < 0.8 ? `${number(ratio, 2)} times as long as what was trained` : "none to speak of";
}

function groups(page, state, reason) {
  const body = el("tbody"), more = el("p"), drawn = table(["group", "task", "#step", "reason", "#tokens"], []);
  drawn.querySelector("tbody").replaceWith(body);
  const add = (found) => {
    body.append(...found.groups.map((group) => pickable(el("tr", {}, el("td", {}, group.group_id), el("td", {}, group.task), el("td", { class: "n" }, group.train_step), el("td", {}, (group.reason || "").replaceAll("_", " ")), el("td", { class: "n" }, number(group.tokens))),
      () => go("untrained", { group: group.group_id }))));
    show(more, found.groups.length === 50 ? el("button", { type: "button", onclick: async () => add(await ask("groups", { state, reason, after: found.next })) }, "More") : body.children.length ? null : "None.");
  };
  add(page);
  return [drawn, more];
}

function story(place, told) {
  const rows = told.transitions.map((move) => el("tr", {}, el("td", { class: "soft" }, new Date(1000 * move.time).toLocaleString()), el("td", {}, move.state.replaceAll("_", " ")), el("td", { class: "n" }, move.train_step), el("td", { class: "n" }, number(move.tokens)),
    el("td", { class: "n" }, move.model_steps ? [...new Set(move.model_steps)].join(" to ") : ""),
    el("td", {}, [move.reason, move.detail, ...Object.entries(move.wasted_tokens).map(([why, n]) => `${n} tokens dropped (${why})`)].filter(Boolean).join("; "))));
  show(place, el("div", { class: "bar" }, el("button", { type: "button", onclick: () => history.back() }, "← back"), el("h2", {}, `Group ${told.group_id}`)),
    el("section", {}, el("p", {}, `${told.task}, draw ${told.draw}, ${told.state.replaceAll("_", " ")}, ${told.tokens} tokens; rollouts: ${told.rollouts.join(", ")}`),
      told.why_not_trained ? el("p", {}, `Not trained: ${told.why_not_trained}.`) : el("p", {}, `Trained in step ${told.train_step}.`),
      told.state === "trained" ? el("p", {}, el("button", { type: "button", onclick: () => go("rollouts", { id: `${told.group_id}:0`, kind: "train", step: told.train_step }) }, "Read its rollouts")) : null,
      table(["time", "state", "#step", "#tokens", "#weights", ""], rows)));
}
