"use strict";
// A conversation with the server that this page is from. What a model writes is shown as text and nothing else: it is
// put into the page by textContent alone, and the page's policy allows no script but this file.

const part = (id) => document.getElementById(id);
let messages = [];
let running = null; // the AbortController of the answer that is coming

function headers() {
  const key = part("key").value.trim();
  return key ? { Authorization: `Bearer ${key}` } : {};
}

function show(role, text) {
  const turn = document.createElement("div");
  turn.className = `turn ${role}`;
  turn.textContent = text;
  part("log").append(turn);
  return turn;
}

function note(text) {
  const line = document.createElement("div");
  line.className = "note";
  line.textContent = text;
  part("log").append(line);
}

function follow(change) {
  const log = part("log");
  const below = log.scrollHeight - log.scrollTop - log.clientHeight;
  change();
  if (below < 60) log.scrollTop = log.scrollHeight; // whoever has scrolled up is reading
}

async function failure(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered ${response.status}.`;
  }
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

async function answer() {
  const began = performance.now();
  const conversation = messages; // another one may begin while the answer comes
  const turn = show("assistant", "");
  let text = "";
  let usage = null;
  running = new AbortController();
  part("send").textContent = "Stop";
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json", ...headers() },
      signal: running.signal,
      body: JSON.stringify({
        model: part("name").value,
        messages,
        temperature: Number(part("temperature").value),
        max_completion_tokens: Number(part("tokens").value),
        stream: true,
        stream_options: { include_usage: true },
      }),
    });
    if (!response.ok) throw new Error(await failure(response));
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      const fresh = event.choices[0]?.delta?.content;
      if (fresh) follow(() => { text += fresh; turn.textContent = text; });
    }
    const seconds = (performance.now() - began) / 1000;
    if (usage) follow(() => note(`${usage.completion_tokens} tokens in ${seconds.toFixed(1)} s`));
  } catch (error) {
    if (error.name === "AbortError") {
      if (conversation === messages) follow(() => note("stopped"));
    } else {
      follow(() => show("error", error.message));
      if (!text) turn.remove();
    }
  }
  if (text) conversation.push({ role: "assistant", content: text });
  else conversation.pop();
  running = null;
  part("send").textContent = "Send";
  part("text").focus();
}

async function models() {
  const response = await fetch("v1/models", { headers: headers() });
  if (!response.ok) {
    follow(() => show("error", response.status === 401 ? "This server wants an API key: see Settings." : ""));
    if (response.status === 401) document.querySelector("details").open = true;
    return;
  }
  const names = (await response.json()).data.map((model) => model.id);
  part("name").replaceChildren(...names.map((name) => new Option(name, name)));
  part("model").textContent = names[0];
  document.title = names[0];
}

part("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) return running.abort();
  const text = part("text").value.trim();
  if (!text) return;
  part("text").value = "";
  part("text").style.height = "";
  messages.push({ role: "user", content: text });
  show("user", text).scrollIntoView();
  answer();
});

part("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!running) part("form").requestSubmit();
  }
});

part("text").addEventListener("input", () => {
  part("text").style.height = "";
  part("text").style.height = `${part("text").scrollHeight}px`;
});

part("clear").addEventListener("click", () => {
  running?.abort();
  messages = [];
  part("log").replaceChildren();
});

part("name").addEventListener("change", () => { part("model").textContent = part("name").value; });
part("key").addEventListener("change", () => {
  sessionStorage.setItem("key", part("key").value);
  models();
});
part("key").value = sessionStorage.getItem("key") ?? "";
models();
