// Saved rollouts: found by task, step, reward, status and words; read token by token, exactly as recorded.
import { ask, go } from "./app.js";
import { bars } from "./charts.js";
import { el, number, pickable, show, table } from "./dom.js";

const FIELDS = ["text", "kind", "step", "task", "status", "min_reward", "max_reward"];
const COLOURS = [["mask", "mask"], ["logprobs", "logprob"], ["difference", "difference to the trainer"], ["model_steps", "weight version"], ["advantage", "advantage"]];
let colour = "logprobs";

export async function open(place, asked) {
  const id = asked.get("id");
  if (id) {
    draw(place, await ask("rollout", { id, kind: asked.get("kind"), step: asked.get("step") }));
    return null;
  }
  const filter = Object.fromEntries(FIELDS.map((name) => [name, asked.get(name) || ""]));
  const rows = el("tbody"), more = el("p");
  const load = async (after) => {
    const page = await ask("rollouts", { ...filter, after });
    if (!after) show(rows);
    rows.append(...page.rollouts.map(row));
    show(more, page.next ? el("button", { type: "button", onclick: () => load(page.next) }, "More") : rows.children.length ? "That is all." : "None.");
  };
  const histogram = await ask("histogram", filter).catch(() => null);
  show(place, form(filter), histogram ? el("section", {}, el("h2", {}, `Rewards (of ${histogram.of}); a bar is a filter`),
    bars("histogram of rewards", histogram, (low, high) => go("rollouts", { ...clean(filter), min_reward: low, max_reward: high }))) : null,
  el("section", {}, list(rows), more));
  await load();
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
      ? el("select", { "aria-label": "kind" }, ["", "train", "eval"].map((kind) => el("option", { value: kind, selected: kind === filter.kind }, kind || "all")))
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
  const reward = rollout.reward;
  show(place,
    el("div", { class: "bar" }, el("button", { type: "button", onclick: () => history.back() }, "← back"), el("h2", {}, rollout.rollout_id),
      el("span", { class: "soft" }, `${rollout.kind} step ${rollout.step}, ${rollout.task}, ${rollout.status}, ${rollout.finish_reason || "not finished"}`)),
    el("section", {}, el("h2", {}, "Siblings"), el("div", { class: "siblings" }, rollout.siblings.map((one) =>
      el("button", { type: "button", "aria-pressed": String(one.rollout_id === rollout.rollout_id), onclick: () => go("rollouts", { id: one.rollout_id, kind: rollout.kind, step: rollout.step }) },
        `${one.rollout_id.split(":").at(-1)}: ${number(one.reward)} (${number(one.num_tokens)})`))),
    el("p", {}, `reward ${reward ? number(reward.score) : "none"}${reward && Object.keys(reward.parts || {}).length ? ` = ${Object.entries(reward.parts).map(([name, value]) => `${name} ${number(value)}`).join(", ")}` : ""} · advantage ${number(rollout.advantage)} · staleness ${rollout.staleness} · tries ${rollout.num_tries}`),
    el("p", {}, el("button", { type: "button", onclick: () => go("untrained", { group: rollout.group_id }) }, "The group's story"))),
    el("section", {}, el("h2", {}, "Turns"), rollout.prompt.map((message) => el("div", { class: "turn" }, el("div", { class: "soft" }, message.role || ""), typeof message.content === "string" ? message.content : JSON.stringify(message.content))),
      rollout.turns.map((turn) => el("div", { class: `turn ${turn.kind}` }, el("div", { class: "soft" }, `${turn.kind === "tool" ? `tool ${turn.name}` : "model"}, ${turn.num_tokens} tokens${turn.finish_reason ? `, ${turn.finish_reason}` : ""}`), turn.text)),
      rollout.ground_truth !== null && rollout.ground_truth !== undefined ? el("p", { class: "soft" }, `expected: ${typeof rollout.ground_truth === "string" ? rollout.ground_truth : JSON.stringify(rollout.ground_truth)}`) : null),
    el("section", {}, el("div", { class: "bar" }, el("h2", {}, "Tokens, as recorded"), el("label", {}, "coloured by ", choices)),
      el("div", { class: "tokens" }, el("span", { class: "prompt" }, rollout.prompt_tokens.join(""))), segments));
}

function drawSegment(rollout, segment, index) {
  const head = rollout.segments.length > 1 ? el("p", { class: "soft" }, `segment ${index}: after ${segment.parent < 0 ? "the prompt" : `token ${segment.start} of segment ${segment.parent}`}`) : null;
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
  if (colour === "model_steps") return mix(`s${versions.indexOf(segment.model_steps[i]) % 6}`, 0.6);
  const advantage = rollout.advantage || 0;
  return segment.mask[i] ? mix(advantage >= 0 ? "good" : "bad", Math.abs(advantage) / 2) : "transparent";
}
