// Saved rollouts: found by task, step, reward, status and words; read token by token, exactly as recorded.
import { ask, go } from "./app.js";
import { bars } from "./charts.js";
import { el, number, pickable, show, table } from "./dom.js";

const FIELDS = ["text", "kind", "step", "task", "status", "min_reward", "max_reward"];
const COLOURS = [["mask", "mask"], ["logprobs", "logprob"], ["difference", "difference to the trainer"], ["model_steps", "weight version"], ["advantage", "advantage"]];
let colour = "logprobs";

export async function open(place, asked) {
  const id = asked.get("id"), group = asked.get("group");
  if (group) {
    await sideBySide(place, group, asked.get("kind"), asked.get("step"));
    return null;
  }
  if (id) {
    draw(place, await ask("rollout", { id, kind: asked.get("kind"), step: asked.get("step") }));
    return null;
  }
  const filter = Object.fromEntries(FIELDS.map((name) => [name, asked.get(name) || ""]));
  const rows = el("tbody"), more = el("p");
  const add = (page) => {
    rows.append(...page.rollouts.map(row));
    show(more, page.next ? el("button", { type: "button", onclick: async () => add(await ask("rollouts", { ...filter, after: page.next })) }, "More") : rows.children.length ? "That is all." : "None.");
  };
  const [histogram, first] = await Promise.all([ask("histogram", filter).catch(() => null), ask("rollouts", filter)]);
  add(first);
  const chosen = filter.min_reward !== "" || filter.max_reward !== "" ? [filter.min_reward === "" ? -Infinity : Number(filter.min_reward), filter.max_reward === "" ? Infinity : Number(filter.max_reward)] : null;
  const every = chosen ? el("button", { type: "button", onclick: () => go("rollouts", clean({ ...filter, min_reward: "", max_reward: "" })) }, "every reward") : null;
  show(place, form(filter), histogram ? el("section", {}, el("div", { class: "bar" }, el("h2", {}, "Rewards"), el("span", { class: "soft" }, `of ${number(histogram.of)} rollouts; a bar is a filter`), el("span", { class: "grow" }), every),
    bars("histogram of rewards", histogram, (low, high) => go("rollouts", { ...clean(filter), min_reward: low, max_reward: high }), chosen)) : null,
  el("section", {}, list(rows), more));
  return null;
}

const clean = (filter) => Object.fromEntries(Object.entries(filter).filter(([, value]) => value !== ""));

function list(rows) {
  const drawn = table(["rollout", "kind", "#step", "task", "#reward", "#tokens", "status", "#weights"], []);
  drawn.querySelector("tbody").replaceWith(rows);
  return drawn;
}

function row(found) {
  return pickable(el("tr", {}, el("td", {}, found.rollout_id), el("td", {}, found.kind), el("td", { class: "n" }, found.step), el("td", {}, found.task),
    el("td", { class: "n" }, number(found.reward)), el("td", { class: "n" }, number(found.num_tokens)), el("td", {}, found.status || ""),
    el("td", { class: "n" }, found.oldest === found.newest ? number(found.oldest) : `${found.oldest} to ${found.newest}`)),
  () => go("rollouts", { id: found.rollout_id, kind: found.kind, step: found.step }));
}

function form(filter) {
  const inputs = FIELDS.map((name) => {
    const input = name === "kind"
      ? el("select", { "aria-label": "kind" }, [["", "all"], ["train", "only trained"], ["eval", "only evaluations"]].map(([kind, word]) => el("option", { value: kind, selected: kind === filter.kind }, word)))
      : el("input", { placeholder: name.replace("_", " "), "aria-label": name.replace("_", " "), value: filter[name], size: name === "text" ? 24 : 9, type: name === "text" ? "search" : "text" });
    return [name, input];
  });
  const find = (event) => { event.preventDefault(); go("rollouts", clean(Object.fromEntries(inputs.map(([name, input]) => [name, input.value.trim()])))); };
  return el("form", { class: "bar", onsubmit: find, role: "search" }, inputs.map(([, input]) => input), el("button", { type: "submit" }, "Find"));
}

function draw(place, rollout) {
  const segments = el("div");
  const paint = () => show(segments, rollout.segments.map((segment, index) => drawSegment(rollout, segment, index)));
  const choices = el("select", { "aria-label": "colour tokens by" }, COLOURS.map(([value, word]) => el("option", { value, selected: value === colour }, word)));
  choices.addEventListener("change", () => { colour = choices.value; paint(); });
  paint();
  const to = (one) => go("rollouts", { id: one.rollout_id, kind: rollout.kind, step: rollout.step });
  show(place,
    el("div", { class: "bar" }, el("button", { type: "button", onclick: () => history.back() }, "← back"), el("h2", {}, rollout.rollout_id),
      el("span", { class: "soft" }, `${rollout.kind === "eval" ? "evaluation of model step" : "train step"} ${rollout.step}, ${rollout.task}, ${rollout.status}, ${rollout.finish_reason || "not finished"}`),
      el("span", { class: "grow" }), rollout.kind === "eval" ? null : el("button", { type: "button", onclick: () => go("untrained", { group: rollout.group_id }) }, "The group's story")),
    el("section", {}, el("div", { class: "tiles" }, tiles(rollout)),
      el("div", { class: "bar" }, el("h2", {}, "Siblings"), el("div", { class: "siblings" }, rollout.siblings.map((one) =>
        el("button", { type: "button", title: `${one.rollout_id}: reward ${number(one.reward)}, ${number(one.num_tokens)} tokens`, "aria-pressed": String(one.rollout_id === rollout.rollout_id), onclick: () => to(one) },
          `${one.rollout_id.split(":").at(-1)}: reward ${number(one.reward)}`))),
      rollout.siblings.length > 1 ? el("button", { type: "button", onclick: () => go("rollouts", { group: rollout.group_id, kind: rollout.kind, step: rollout.step }) }, "Side by side") : null)),
    el("section", {}, el("h2", {}, "Turns"), asPrompt(rollout), asTurns(rollout),
      rollout.ground_truth !== null && rollout.ground_truth !== undefined ? el("p", { class: "soft" }, `expected: ${typeof rollout.ground_truth === "string" ? rollout.ground_truth : JSON.stringify(rollout.ground_truth)}`) : null),
    el("section", {}, el("div", { class: "bar" }, el("h2", {}, "Tokens, as recorded"), el("label", {}, "coloured by ", choices)),
      el("div", { class: "tokens" }, el("span", { class: "prompt" }, rollout.prompt_tokens.join(""))), segments));
}

function tiles(rollout) {
  const tile = (word, value, beside) => el("div", { class: "tile" }, el("span", { class: "soft" }, word), el("b", {}, value), el("span", { class: "soft" }, beside || " "));
  const reward = rollout.reward;
  const parts = Object.entries((reward && reward.parts) || {}).map(([name, value]) => tile(`reward: ${name}`, number(value)));
  return [tile("reward", reward ? number(reward.score) : "none", reward && reward.text ? reward.text : null), parts, tile("advantage", number(rollout.advantage)),
    tile("tokens", number(rollout.tokens)), tile("staleness", number(rollout.staleness)), tile("tries", number(rollout.num_tries))];
}

const asPrompt = (rollout) => rollout.prompt.map((message) => el("div", { class: "turn" }, el("div", { class: "soft" }, message.role || ""), typeof message.content === "string" ? message.content : JSON.stringify(message.content)));

const asTurns = (rollout) => rollout.turns.map((turn) => el("div", { class: `turn ${turn.kind}` },
  el("div", { class: "soft" }, `${turn.kind === "tool" ? `tool ${turn.name}` : turn.kind === "message" ? turn.name || "message" : "model"}, ${turn.num_tokens} tokens${turn.finish_reason ? `, ${turn.finish_reason}` : ""}${rollout.segments.length > 1 ? `, segment ${turn.segment}` : ""}`), turn.text));

// The answers of a group beside each other, the best first.
async function sideBySide(place, group, kind, step) {
  const found = await ask("rollouts", { group_id: group, kind, step });
  const read = await Promise.all(found.rollouts.slice(0, 16).map((one) => ask("rollout", { id: one.rollout_id, kind, step })));
  const score = (one) => (one.reward ? one.reward.score : -Infinity);
  read.sort((a, b) => score(b) - score(a));
  show(place, el("div", { class: "bar" }, el("button", { type: "button", onclick: () => history.back() }, "← back"), el("h2", {}, `Answers of ${group}`), el("span", { class: "soft" }, "side by side, the best first")),
    read.length ? el("section", {}, asPrompt(read[0])) : el("section", { class: "empty" }, "None of them was saved."),
    el("div", { class: "beside", tabindex: "0", role: "region", "aria-label": "answers" }, read.map((one) => el("section", {},
      el("div", { class: "bar" }, el("button", { type: "button", onclick: () => go("rollouts", { id: one.rollout_id, kind, step }) }, one.rollout_id), el("b", {}, `reward ${one.reward ? number(one.reward.score) : "none"}`), el("span", { class: "soft" }, `advantage ${number(one.advantage)}, ${number(one.tokens)} tokens`)),
      asTurns(one)))));
}

function drawSegment(rollout, segment, index) {
  const context = segment.parent < 0 ? "the prompt" : `segment ${segment.parent}`;
  const head = rollout.segments.length > 1 ? el("p", { class: "soft" }, `segment ${index}, after ${segment.start < 0 ? context : `${number(segment.start)} tokens of ${context}`}`) : null;
  const versions = [...new Set(segment.model_steps)];
  const tokens = segment.texts.map((text, i) => {
    const span = el("span", { class: segment.mask[i] ? "" : "untrained" }, text);
    const trainer = segment.trainer_logprobs ? segment.trainer_logprobs[i] : null;
    span.title = `${JSON.stringify(text)} id ${segment.ids[i]}, weights ${segment.model_steps[i]}, logprob ${number(segment.logprobs[i])}, trainer ${number(trainer)}${segment.mask[i] ? "" : ", not trained"}`;
    span.style.backgroundColor = shade(rollout, segment, i, trainer, versions);
    return span;
  });
  return el("div", {}, head, el("div", { class: "tokens" }, tokens), segment.left_out ? el("p", { class: "soft" }, `and ${segment.left_out} tokens more`) : null);
}

function shade(rollout, segment, i, trainer, versions) {
  const mix = (name, share) => `color-mix(in srgb, var(--${name}) ${Math.round(70 * Math.max(0, Math.min(1, share)))}%, transparent)`;
  if (colour === "mask") return segment.mask[i] ? mix("s2", 0.6) : mix("s3", 0.6);
  if (colour === "logprobs") return segment.mask[i] ? mix("bad", -segment.logprobs[i] / 5) : "transparent";
  if (colour === "difference") return trainer === null ? "transparent" : mix("s1", Math.abs(trainer - segment.logprobs[i]) * 5);
  if (colour === "model_steps") return mix(`v${versions.indexOf(segment.model_steps[i]) % 6}`, 0.6);
  const advantage = rollout.advantage || 0;
  return segment.mask[i] ? mix(advantage >= 0 ? "good" : "bad", Math.abs(advantage) / 2) : "transparent";
}
