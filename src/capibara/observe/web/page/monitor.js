"use strict";

// Every text is put in as text: names of runs and errors of sensors are anybody's.
const POINTS = 240;
const share = (v) => `${(100 * v).toFixed(v < 0.1 ? 1 : 0)} %`;
const short = (v, digits = 3) => v === 0 ? "0" : Math.abs(v) >= 1e5 || Math.abs(v) < 1e-3 ? v.toExponential(digits - 1)
  : Math.abs(v) >= 1000 ? Math.round(v).toLocaleString("en") : String(Number(v.toPrecision(digits)));
const bytes = (v) => {
  for (const [unit, size] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20]]) {
    if (v >= size) return `${short(v / size)} ${unit}`;
  }
  return `${Math.round(v)} B`;
};
const seconds = (v) => v < 1 ? `${short(1000 * v)} ms` : `${short(v)} s`;
const dollars = (v) => `${short(1e6 * v)} $/M`;

const TILES = {
  utilization: ["Utilisation", share],
  memory_usage: ["Memory", share],
  temperature: ["Temperature", (v) => `${v.toFixed(0)} °C`],
  power: ["Power", (v) => `${short(v)} W`],
  step: ["Step", (v) => v.toLocaleString("en")],
  loss: ["Loss", (v) => short(v, 4)],
  step_time: ["Step time", seconds],
  tokens_per_second: ["Tokens/s", short],
  mfu: ["MFU", share],
  goodput: ["Goodput", share],
  joules_per_token: ["Joules a token", short],
  dollars_per_token: ["Dollars a token", dollars],
  requests_running: ["Requests running", short],
  requests_waiting: ["Requests waiting", short],
  kv_cache_usage: ["KV cache", share],
};
const ALWAYS = ["utilization", "memory_usage", "temperature", "step_time", "loss", "tokens_per_second", "goodput",
  "joules_per_token", "dollars_per_token"];

const curves = {};
let last = 0; // when the last sample was taken
const tiles = {};
const $ = (id) => document.getElementById(id);

function element(tag, text, kind) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

function tile(name) {
  if (!tiles[name]) {
    const box = element("div", undefined, "tile");
    box.dataset.name = name;
    const value = element("p", "–");
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    svg.setAttribute("viewBox", `0 0 ${POINTS} 100`);
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("aria-hidden", "true");
    const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
    svg.append(line);
    box.append(element("h3", TILES[name][0]), value, svg);
    tiles[name] = { box, value, line };
    // In the order of the table, whenever they come.
    const order = Object.keys(TILES);
    const next = order.slice(order.indexOf(name) + 1).find((other) => tiles[other]);
    $("tiles").insertBefore(box, next ? tiles[next].box : null);
  }
  return tiles[name];
}

function draw(name) {
  const points = curves[name] || [];
  if (points.length < 2) return;
  const low = Math.min(...points);
  const high = Math.max(...points);
  const height = (v) => high === low ? 50 : 95 - 90 * (v - low) / (high - low);
  tile(name).line.setAttribute("points",
    points.map((v, i) => `${(POINTS * i / (points.length - 1)).toFixed(1)},${height(v).toFixed(1)}`).join(" "));
}

function add(name, value) {
  const curve = curves[name] ||= [];
  curve.push(value);
  if (curve.length > POINTS) curve.shift();
}

function showHistory(history) {
  for (const name of Object.keys(TILES)) {
    const points = (history.all || {})[name];
    if (!points || !points.length) continue;
    curves[name] = points.map(([, value]) => value);
    last = Math.max(last, points.at(-1)[0]); // it comes again as the first sample
  }
}

function show(now) {
  const fresh = now.time !== last;
  last = now.time;
  const alerted = new Set(now.alerts.map((alert) => alert.name));
  for (const name of Object.keys(TILES)) {
    const value = now[name];
    if (value === null && !ALWAYS.includes(name) && !tiles[name]) continue;
    const { box, value: text } = tile(name);
    text.textContent = value === null ? "–" : TILES[name][1](value);
    box.classList.toggle("alert", alerted.has(name));
    if (value !== null && fresh) add(name, value);
    draw(name);
  }
  $("alerts").replaceChildren(...now.alerts.map((alert) => element("li", alert.text)));
  const figure = (v, form) => element("td", v === undefined || v === null ? "–" : form(v));
  $("sources").tBodies[0].replaceChildren(...Object.entries(now.sources).map(([source, told]) => {
    const row = element("tr");
    const name = element("td", told.chip && told.kind !== "train" ? `${source} · ${told.chip}` : source);
    name.title = source;
    row.append(name, figure(told.utilization, share), figure(told.memory_used, bytes),
      figure(told.temperature, (v) => v.toFixed(0)), figure(told.power, short));
    return row;
  }));
  $("sensors").replaceChildren(...Object.entries(now.sensors).map(([name, sensor]) =>
    element("li", `${name}: ${sensor.state}${sensor.text ? ` (${sensor.text})` : ""}`,
      sensor.state === "ok" ? "" : "wrong")));
  $("state").textContent = new Date(1000 * now.time).toLocaleTimeString();
  $("state").className = "";
}

const events = new EventSource("events");
events.addEventListener("history", (event) => showHistory(JSON.parse(event.data)));
events.addEventListener("sample", (event) => show(JSON.parse(event.data)));
events.addEventListener("error", () => {
  // The browser connects again by itself.
  $("state").textContent = "not connected";
  $("state").className = "wrong";
});
