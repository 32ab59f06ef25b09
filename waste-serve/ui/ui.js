"use strict";

const $ = (id) => document.getElementById(id);
const messages = [];
let running = null;

function headers() {
  const key = $("key").value || sessionStorage.getItem("key") || "";
  return key ? { Authorization: `Bearer ${key}` } : {};
}

function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  while (bytes >= 1024 && i < units.length - 1) { bytes /= 1024; i++; }
  return `${bytes.toFixed(i && bytes < 100 ? 1 : 0)} ${units[i]}`;
}

/** What the server says of its model. */
async function facts() {
  const response = await fetch("v1/models", { headers: headers() });
  if (response.status === 401) {
    $("facts").textContent = "an API key is needed: see Settings";
    return;
  }
  const model = (await response.json()).data[0];
  $("model").textContent = document.title = model.id;
  const said = [`context ${model.max_model_len.toLocaleString()} tokens`];
  if (model.budget_bytes) said.unshift(`${size(model.budget_bytes)} of RAM`);
  $("facts").textContent = said.join(" · ");
  $("effort").disabled = !model.thinks;
  $("attach").hidden = !model.vision;
}

/** The sums of the server's counters that the line about speed needs. */
async function counters() {
  const response = await fetch("metrics", { headers: headers() });
  const text = response.ok ? await response.text() : "";
  const value = (name) => Number(new RegExp(`^${name} (\\S+)`, "m").exec(text)?.[1] ?? NaN);
  return {
    hits: value("waste_expert_hits_total"),
    misses: value("waste_expert_misses_total"),
    bytes: value("waste_bytes_read_total"),
  };
}

function live(answer, now) {
  const seconds = (performance.now() - answer.first) / 1000;
  const said = [];
  if (!answer.tokens) {
    said.push(answer.progress || "waiting");
  } else {
    said.push(`${answer.tokens} tokens`);
    if (seconds > 0 && answer.tokens > 1) said.push(`${((answer.tokens - 1) / seconds).toFixed(2)} tok/s`);
  }
  if (now && answer.before) {
    const hits = now.hits - answer.before.hits, demands = hits + now.misses - answer.before.misses;
    if (demands > 0) said.push(`${(100 * hits / demands).toFixed(1)} % of experts in memory`);
    if (answer.tokens) said.push(`${size((now.bytes - answer.before.bytes) / answer.tokens)} read a token`);
  }
  $("live").textContent = said.join(" · ");
}

function show(kind, text = "") {
  const article = document.createElement("article");
  article.className = kind;
  const body = document.createElement("div");
  body.textContent = text;
  article.append(body);
  $("talk").append(article);
  article.scrollIntoView({ block: "end" });
  return { article, body };
}

/** A file as a data: URL, which is how the server takes images. */
function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

/** What the person says: text, with images before it. */
function say(text, urls) {
  const images = urls.map((url) => ({ type: "image_url", image_url: { url } }));
  messages.push({ role: "user", content: images.length ? [...images, { type: "text", text }] : text });
  const { body } = show("user", text);
  body.before(...urls.map((url) => Object.assign(document.createElement("img"), { src: url, alt: "" })));
}

/** Where thinking goes: folded away, above the answer. */
function thinking(place) {
  if (!place.thought) {
    const details = document.createElement("details");
    const summary = document.createElement("summary");
    summary.textContent = "Thinking";
    place.thought = document.createElement("div");
    details.append(summary, place.thought);
    place.article.prepend(details);
  }
  return place.thought;
}

/** The events of a stream, and its comments as `{comment}`. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    const frames = text.split("\n\n");
    text = frames.pop();
    for (const frame of frames) {
      if (frame.startsWith(":")) yield { comment: frame.slice(1).trim() };
      else if (frame.startsWith("data: ") && frame !== "data: [DONE]") yield JSON.parse(frame.slice(6));
    }
  }
}

function request() {
  const system = $("system").value.trim();
  const body = {
    model: $("model").textContent,
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    stream: true,
  };
  if ($("effort").value && !$("effort").disabled) body.reasoning_effort = $("effort").value;
  if ($("temperature").value) body.temperature = Number($("temperature").value);
  if ($("tokens").value) body.max_tokens = Number($("tokens").value);
  return body;
}

async function answer(place, signal) {
  const state = { tokens: 0, first: performance.now(), progress: "", before: await counters().catch(() => null) };
  const message = { role: "assistant", content: "" };
  let reasoning = "", end = null;
  const ticking = setInterval(async () => live(state, await counters().catch(() => null)), 1000);
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json", ...headers() },
      body: JSON.stringify(request()),
      signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      if (event.comment !== undefined) {
        state.progress = event.comment;
        live(state);
        continue;
      }
      const choice = event.choices[0];
      if (!choice) continue;
      if (choice.finish_reason) end = { reason: choice.finish_reason, waste: event.waste };
      const { content, reasoning_content } = choice.delta;
      if (!content && !reasoning_content) continue;
      if (!state.tokens++) state.first = performance.now();
      if (reasoning_content) thinking(place).textContent = reasoning += reasoning_content;
      if (content) place.body.textContent = message.content += content;
      live(state);
      $("talk").scrollTop = $("talk").scrollHeight;
    }
  } finally {
    clearInterval(ticking);
    if (reasoning) message.reasoning_content = reasoning;
    if (message.content || reasoning) messages.push(message);
  }
  finish(place, end);
}

/** What an answer came to. */
function finish(place, end) {
  const said = [];
  const waste = end?.waste;
  if (waste) {
    said.push(`${waste.tokens_per_s.toFixed(2)} tok/s`);
    if (waste.expert_hits + waste.expert_misses) said.push(`${(100 * waste.expert_hit_rate).toFixed(1)} % of experts in memory`);
    said.push(`${size(waste.bytes_read)} read`);
  }
  if (end?.reason === "length") said.push("cut at the limit of tokens");
  const foot = document.createElement("footer");
  foot.textContent = said.join(" · ");
  place.article.append(foot);
}

$("ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  const text = $("text").value.trim();
  if (!text || running) return;
  $("text").value = "";
  running = new AbortController();
  let keep = false;
  $("send").hidden = true;
  $("stop").hidden = false;
  try {
    say(text, await Promise.all([...$("images").files].map(dataUrl)));
    await answer(show("assistant"), running.signal);
  } catch (error) {
    if (error.name !== "AbortError") show("wrong", error.message);
    // What was not answered can be asked again, with its images.
    if (messages.at(-1)?.role === "user") {
      messages.pop();
      $("text").value ||= text;
      keep = true;
    }
  } finally {
    if (!keep) $("images").value = "";
    running = null;
    $("live").textContent = "";
    $("send").hidden = false;
    $("stop").hidden = true;
    $("text").focus();
  }
});

$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
});

$("stop").addEventListener("click", () => running?.abort());

$("new").addEventListener("click", () => {
  running?.abort();
  messages.length = 0;
  $("talk").replaceChildren();
  $("text").focus();
});

$("key").addEventListener("change", () => {
  sessionStorage.setItem("key", $("key").value);
  facts();
});

facts();
