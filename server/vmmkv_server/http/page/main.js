// The page: one stream of events from the server, and what each panel shows of it.

import { Sparkline } from "./charts.js";
import { Chat } from "./chat.js";
import { bytes, count, element, plural, seconds } from "./format.js";
import { AddressMap } from "./map.js";
import { events, request, useKey } from "./stream.js";

const find = (id) => document.getElementById(id);
const known = (number) => (number === null ? "–" : count(number));
const milliseconds = (value) => (value < 0.01 ? (value * 1000).toFixed(1) : count(value * 1000));

const map = new AddressMap(find("map"), { text: find("map-text"), slot: find("slot"), table: find("slots") });
const chat = new Chat(find, { onRefused: (error) => { if (error.status === 401 || error.status === 403) askForKey(); } });
const charts = {
  generated: new Sparkline(find("charts"), "Generated", "tokens/s", count),
  prompt: new Sparkline(find("charts"), "Prompts computed", "tokens/s", count),
  first: new Sparkline(find("charts"), "To the first token", "ms", milliseconds),
  token: new Sparkline(find("charts"), "Between tokens", "ms", milliseconds),
};
let slotOf = new Map();
let wait = null;

function showState(state) {
  const { health, memory, rates } = state;
  chat.model = state.model;
  find("model").textContent = state.device ? `${state.model} on ${state.device}` : state.model;
  const words = { ok: "serving", loading: "loading", draining: "draining", asleep: "asleep", dead: "stopped" };
  setStatus(health.status, words[health.status] ?? health.status, health.reason);
  charts.generated.add(rates ? rates.generated_per_s : null);
  charts.prompt.add(rates ? rates.prompt_per_s : null);
  charts.first.add(state.first_token_s);
  charts.token.add(state.token_s);
  if (memory) showMemory(memory);
  showRequests(state);
}

function setStatus(kind, text, reason) {
  const status = find("status"), whole = reason && kind !== "ok" ? `${text}: ${reason}` : text;
  status.dataset.state = kind;
  if (status.textContent !== whole) status.textContent = whole;
}

function filled(className, size, whole) {
  const part = element("span", { className });
  part.style.width = `${(100 * size) / Math.max(1, whole)}%`;
  return part;
}

function showMemory(memory) {
  const saved = Math.max(0, memory.mapped_bytes - memory.used_bytes);
  const parts = [
    ["own", "in use", memory.used_bytes],
    ["parked", "kept for others", memory.cached_bytes],
    ["pending", "pending reclaim", memory.pending_reclaim_bytes],
  ];
  find("budget").replaceChildren(...parts.map(([name, , size]) => filled(name, size, memory.budget_bytes)));
  const left = memory.budget_bytes - memory.used_bytes - memory.cached_bytes - memory.pending_reclaim_bytes;
  const items = [...parts, ["free", "free", Math.max(0, left)]];
  find("legend").replaceChildren(...items.map(([name, text, size]) => {
    return element("li", {}, element("span", { className: `swatch ${name}` }), text, element("b", { text: bytes(size) }));
  }));
  find("saved").textContent = `${bytes(saved)} saved`;
  find("memory-text").textContent = `${plural(memory.tokens, "token")}, ${bytes(memory.budget_bytes)} budget`;
  find("tiers").replaceChildren(...Object.entries(memory.tiers).map(([name, tier]) => {
    const held = `${bytes(tier.held)}${tier.budget ? ` of ${bytes(tier.budget)}` : ""}`;
    const bar = element("span", { className: "bar" }, filled("parked", tier.held, tier.budget || tier.held));
    return element("li", {}, bar, name, element("b", { text: held }), `${bytes(tier.loaded)} loaded, ${plural(tier.hit_tokens, "token")} hit`);
  }));
}

function showRequests({ memory, requests, num_requests: total }) {
  const waiting = memory ? memory.waiting : 0;
  find("requests-text").textContent = memory ? `${count(memory.running)} running, ${count(waiting)} waiting` : "";
  const rows = requests.map((each) => {
    const numbers = [each.prompt_tokens, each.cached_tokens, each.generated_tokens].map(known).concat(seconds(each.age_s));
    const slots = slotOf.get(each.id) ?? [];
    const place = slots.length ? slots.slice(0, 4).join(", ") + (slots.length > 4 ? ", …" : "") : each.has_begun ? "–" : "waits";
    return element("tr", {},
      element("td", { className: "id", text: each.id.slice(0, 17), title: each.id }),
      element("td", { text: place }),
      ...numbers.map((text) => element("td", { className: "number", text })));
  });
  if (total > requests.length) rows.push(element("tr", {}, element("td", { className: "empty", colspan: 6, text: `and ${count(total - requests.length)} more` })));
  if (!rows.length) rows.push(element("tr", {}, element("td", { className: "empty", colspan: 6, text: "Nothing is being answered." })));
  find("flights").replaceChildren(...rows);
}

function showMap(found) {
  slotOf = new Map();
  for (const { slot, request } of found.slots) {
    if (!request) continue;
    const id = request.slice(0, request.lastIndexOf("-"));
    slotOf.set(id, [...(slotOf.get(id) ?? []), slot]);
  }
  map.show(found);
}

function askForKey() {
  setStatus("dead", "this server wants an API key");
  find("key-box").open = true;
  find("key").focus();
}

// A key among several may ask, and not see what the others do.
async function chatAlone() {
  try {
    chat.model = (await (await request("/v1/models")).json()).data[0].id;
    find("model").textContent = chat.model;
    setStatus("ok", "chat alone: what all are doing is for the administrator's key");
  } catch {
    setStatus("dead", "no connection");
  }
}

async function watch() {
  let delay = 1000;
  while (true) {
    wait = new AbortController();
    try {
      for await (const { event, data } of events("/events", { signal: wait.signal })) {
        delay = 1000;
        if (event === "state") showState(JSON.parse(data));
        else if (event === "map") showMap(JSON.parse(data));
      }
      setStatus("dead", "the server has stopped");
    } catch (error) {
      if (error.status === 403) await chatAlone();
      else if (error.status === 401) askForKey();
      else if (error.name !== "AbortError") setStatus("dead", "no connection");
    }
    await new Promise((resolve) => {
      setTimeout(resolve, delay);
      find("key").addEventListener("change", resolve, { once: true });
    });
    delay = Math.min(delay * 2, 15000);
  }
}

find("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  find("key").blur();
});
find("key").addEventListener("change", () => {
  useKey(find("key").value);
  wait?.abort();
});
watch();
