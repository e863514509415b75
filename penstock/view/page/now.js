// Where the groups are, who waits for whom, and what is wrong.
import { ask, go } from "./app.js";
import { lines } from "./charts.js";
import { el, number, percent, seconds, show, table } from "./dom.js";

const FLOW = [["running", "being played"], ["completed", "in the buffer"], ["leased", "in a batch"], ["trained", "trained"]];
const ASIDE = [["aborted", "interrupted"], ["expired", "too stale"], ["max_tries", "tries used up"], ["discarded", "discarded"]];

export async function open(place) {
  const refresh = async () => draw(place, await ask("now"));
  await refresh();
  return refresh;
}

function draw(place, now) {
  const alarm = (text) => el("div", { class: "finding alarm" }, el("b", {}, "alarm"), text);
  const findings = now.findings.map((one) => (one.level === "alarm" ? alarm(one.text) : el("div", { class: "finding" }, el("b", {}, "tip"), one.text)));
  if (now.error) findings.unshift(alarm(`The run ended with an error: ${now.error}`));
  if (now.state === "killed") findings.unshift(alarm("Its driver is gone. Nothing is lost: resume it with --resume."));
  show(place,
    findings.length ? el("section", { "aria-label": "Alarms and tips", class: "findings" }, findings) : null,
    progress(now),
    pipes(now),
    el("div", { class: "grid two" }, el("div", { class: "stack" }, waits(now), engines(now)), rewards(now)),
    told(now));
}

function progress(now) {
  const share = now.total_steps ? now.step / now.total_steps : 0;
  const left = now.state === "running" && now.step ? seconds((now.seconds / now.step) * (now.total_steps - now.step)) : null;
  const doing = now.doing.filter((one) => one.stage !== "step").map((one) => `${one.stage} (${seconds(one.seconds)})`).join(", ");
  const tile = (word, value, beside) => el("div", { class: "tile" }, el("span", { class: "soft" }, word), el("b", {}, value), el("span", { class: "soft" }, beside || " "));
  const accuracy = now.evaluated ? now.evaluated.metrics["eval/accuracy"] : undefined;
  return el("section", {},
    el("div", { class: "bar" }, el("h2", {}, now.name), el("span", { class: "soft" }, now.model), el("span", { class: "grow" }), doing ? el("span", { class: "soft" }, `now: ${doing}`) : null),
    now.arithmetic ? el("p", { class: "soft line" }, now.arithmetic) : null,
    el("div", { class: "meter big", role: "progressbar", "aria-label": "train steps", "aria-valuenow": Math.round(100 * share), "aria-valuemin": 0, "aria-valuemax": 100 }, fill(share)),
    el("div", { class: "tiles" },
      tile("train step", `${number(now.step)} of ${number(now.total_steps)}`, left ? `about ${left} left` : `${seconds(now.seconds)} in all${now.restarts ? `, resumed ${now.restarts} times` : ""}`),
      tile("reward", number(now.reward_last), `first ${number(now.reward_first)}`),
      accuracy === undefined ? null : tile("evaluation", percent(accuracy), `accuracy after step ${now.evaluated.step}`),
      tile("generated", number(now.tokens.generated), now.seconds ? `tokens, ${number(now.tokens.generated / now.seconds)} a second` : "tokens"),
      tile("wasted", now.tokens.generated ? percent(now.tokens.wasted / now.tokens.generated) : "–", `${number(now.tokens.wasted)} tokens`),
      tile("a step", seconds(now.flow["time/step_s"]), `staleness ${number(now.flow["staleness/mean"])}`)));
}

function fill(share, kind) {
  const bar = el("i", kind ? { class: kind } : {});
  bar.style.width = `${Math.round(100 * Math.min(1, Math.max(0, share || 0)))}%`;
  return bar;
}

// One for each task. What flows is known of all together: with several tasks that is a pipe of its own, the first.
function pipes(now) {
  const tasks = Object.entries(now.tasks);
  if (tasks.length === 1) return pipe(...tasks[0], now, now.rates);
  const all = {};
  for (const [, states] of tasks) for (const [state, count] of Object.entries(states)) all[state] = (all[state] || 0) + count;
  return [tasks.length ? pipe("all tasks", all, now, now.rates) : null, tasks.map(([task, states]) => pipe(task, states, now, {}))];
}

// The pipe: tanks with what they hold, and between them what flows, a second of the last step.
function pipe(task, states, now, rates) {
  const drawn = Object.values(states).reduce((a, b) => a + b, 0);
  const rate = (part) => (rates[part] === undefined ? "" : `${number(rates[part])} ${part === "running" ? "rollouts" : "tokens"}/s`);
  const tank = ([state, word], count, cls = "") => {
    const level = el("i", { class: "level" });
    level.style.height = `${Math.round(100 * Math.sqrt(drawn ? count / drawn : 0))}%`;
    return el("div", { class: `tank ${cls} t-${state}` }, level, el("b", {}, number(count)), el("span", {}, word));
  };
  const row = [tank(["drawn", "drawn"], drawn)];
  for (const one of FLOW) row.push(el("div", { class: `tube${now.state === "running" ? " moving" : ""}` }, el("span", {}, rate(one[0]))), tank(one, states[one[0]]));
  const lost = rate("lost");
  return el("section", {}, el("div", { class: "bar" }, el("h2", {}, `Groups of ${task}`), el("span", { class: "grow" }), el("button", { type: "button", onclick: () => go("untrained") }, "Why not trained?")),
    el("div", { class: "pipe" }, row),
    el("div", { class: "leaks" }, el("span", { class: "drip" }, lost ? `beside the pipe, ${lost} lost:` : "beside the pipe:"), ASIDE.map((one) => el("button", { type: "button", class: `leak${states[one[0]] ? "" : " none"}`, onclick: () => go("untrained", { state: one[0] }) }, el("b", {}, number(states[one[0]])), one[1]))));
}

function waits(now) {
  const f = now.flow;
  const row = (word, share, rest) => [el("span", {}, word), el("div", { class: "meter" }, fill(share, share > 0.3 ? "w-warn" : "")), el("span", { class: "num" }, percent(share)), el("span", { class: "soft" }, rest)];
  const known = f["share/trainer_wait"] !== undefined || f["share/engine_idle"] !== undefined;
  const trained = f["tokens/trained_per_s"];
  return el("section", {}, el("h2", {}, "Who waits for whom, in the last step"),
    known ? el("div", { class: "shares" }, row("trainer", f["share/trainer_wait"], "waits for rollouts"), row("engines", f["share/engine_idle"], "have nothing to do")) : el("p", { class: "soft" }, "Engines and trainer take turns here."),
    el("p", { class: "soft" }, trained === undefined ? "" : `While it trains, the trainer takes ${number(trained)} tokens/s; ${number(now.tokens.trained)} so far.`));
}

function engines(now) {
  const ok = (state) => (state === "active" ? "good" : state === "closed" ? "off" : "bad");
  const rows = Object.entries(now.engines).map(([name, seen]) => {
    const load = seen.load, n = (value) => el("td", { class: "n" }, value);
    return el("tr", {}, el("td", { class: "name" }, name), el("td", {}, el("span", { class: `dot ${ok(seen.state)}` }), seen.state), n(load ? number(load.model_step) : number(now.published)),
      n(load ? percent(load.busy) : "–"), n(load ? `${load.running}${load.waiting ? ` + ${load.waiting}` : ""}` : "–"), n(load ? number(load.tokens_per_s) : "–"), n(number(seen.times_fenced)),
      el("td", { class: "soft" }, seen.reason === "closed" ? "" : seen.reason));
  });
  return el("section", {}, el("h2", {}, "Engines"),
    rows.length ? table(["engine", "state", "#weights", "#busy", "#requests", "#tokens/s", "#fenced", "last word"], rows) : el("p", { class: "soft" }, "none has said anything yet"));
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
