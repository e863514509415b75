// Which run, which panel; asks again every two seconds while the page is seen and something happens in the run.
import { el, show } from "./dom.js";
import * as now from "./now.js";
import * as curves from "./curves.js";
import * as batch from "./batch.js";
import * as rollouts from "./rollouts.js";
import * as untrained from "./untrained.js";
import * as time from "./time.js";

const PANELS = [["now", "Now", now], ["curves", "Curves", curves], ["batch", "Batch", batch], ["rollouts", "Rollouts", rollouts], ["untrained", "Why not trained", untrained], ["time", "Time", time]];
const EVERY_MS = 2000;

const page = { run: "", panel: "now", state: "", last: "", runs: [], arguments: new URLSearchParams() };
let refresh = null, turn = 0;

export async function ask(what, parameters = {}, run = page.run) {
  const query = new URLSearchParams(Object.entries(parameters).flatMap(([key, value]) =>
    (Array.isArray(value) ? value : [value]).filter((one) => one !== null && one !== undefined && one !== "").map((one) => [key, one])));
  const response = await fetch(`/api/${encodeURIComponent(run)}/${what}?${query}`);
  const body = await response.json().catch(() => ({ error: response.statusText }));
  if (!response.ok) throw new Error(body.error || response.statusText);
  return body;
}

export const allRuns = () => page.runs.map((run) => run.name);

// The address says what is shown, so that it can be kept and sent.
export function go(panel, parameters = {}) {
  const query = new URLSearchParams({ run: page.run, panel, ...parameters });
  location.hash = query.toString();
}

async function listRuns() {
  const response = await fetch("/api/runs");
  if (!response.ok) throw new Error(await response.text());
  page.runs = (await response.json()).runs;
  const select = document.getElementById("run");
  const names = page.runs.map((run) => run.name).join("\n");
  if (select.dataset.names !== names) {
    select.dataset.names = names;
    show(select, page.runs.map((run) => el("option", { value: run.name }, run.name)));
  }
  if (!page.run && page.runs.length) page.run = page.runs[0].name;
  select.value = page.run;
  const mine = page.runs.find((run) => run.name === page.run);
  page.state = mine ? mine.state : "";
  page.last = mine ? `${mine.state} ${mine.last_time}` : "";
  const label = document.getElementById("state");
  label.textContent = mine ? `${mine.state}, step ${mine.step} of ${mine.total_steps}` : "";
  label.className = `state ${page.state}`;
}

async function open() {
  page.arguments = new URLSearchParams(location.hash.slice(1));
  page.run = page.arguments.get("run") || page.run;
  page.panel = page.arguments.get("panel") || "now";
  const mine = ++turn;
  const main = document.getElementById("panel");
  try {
    await listRuns();
    for (const button of document.querySelectorAll("nav button")) {
      if (button.dataset.panel === page.panel) {
        button.setAttribute("aria-current", "page");
        button.scrollIntoView({ block: "nearest", inline: "center" });
      } else button.removeAttribute("aria-current");
    }
    const [, title, module] = PANELS.find(([name]) => name === page.panel) || PANELS[0];
    document.title = `${page.run}: ${title} · Penstock`;
    const place = el("div", { class: "place" });
    refresh = await module.open(place, page.arguments);
    if (mine === turn) show(main, place);
  } catch (error) {
    if (mine === turn) show(main, el("p", { role: "alert" }, `That did not work: ${error.message}`));
    refresh = null;
  }
}

async function tick() {
  if (!document.hidden) {
    try {
      const before = page.last;
      await listRuns();
      if (refresh && (page.state === "running" || page.last !== before)) await refresh();
    } catch {
      document.getElementById("state").textContent = "the server does not answer";
    }
  }
  setTimeout(tick, EVERY_MS);
}

function theme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  localStorage.setItem("penstock-theme", dark ? "dark" : "light");
}

const stored = localStorage.getItem("penstock-theme");
theme(stored ? stored === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
const toggle = () => theme(document.documentElement.dataset.theme !== "dark");
document.getElementById("theme").addEventListener("click", toggle);
document.getElementById("run").addEventListener("change", (event) => { page.run = event.target.value; go(page.panel); });
show(document.getElementById("tabs"), PANELS.map(([name, title], index) =>
  el("button", { type: "button", "data-panel": name, title: `${title} (${index + 1})`, onclick: () => go(name) }, title)));
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || ["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName)) return;
  if (event.key === "d") toggle();
  else if (PANELS[Number(event.key) - 1]) go(PANELS[Number(event.key) - 1][0]);
});
addEventListener("hashchange", open);
open().then(() => setTimeout(tick, EVERY_MS));
