// The chat: one conversation on /v1/responses, whose turns run on a session of the engine. It also keeps the keys, which
// the picture needs too. Whatever a model or a user said goes into the page as text, never as markup.

import { startPicture } from "./picture.js";

const at = (id) => document.getElementById(id);
const keys = { api: "", admin: "" };

/** A fetch with a key, which is not sent anywhere but here. */
function ask(path, key, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.authorization = `Bearer ${key}`;
  return fetch(path, { ...options, headers, credentials: "omit", referrerPolicy: "no-referrer" });
}

/** What the server said that is wrong. */
async function complaint(answer) {
  const body = await answer.json().catch(() => null);
  return body?.error?.message ?? `the server answered ${answer.status}`;
}

// Keys.

function askForKeys() {
  at("api-key").value = keys.api;
  at("admin-key").value = keys.admin;
  at("key-dialog").showModal();
}

at("keys").addEventListener("click", askForKeys);
at("key-cancel").addEventListener("click", () => at("key-dialog").close());
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  keys.api = at("api-key").value.trim();
  keys.admin = at("admin-key").value.trim();
  at("key-dialog").close();
  picture.wake();
});

// The conversation. `tip`: the answer that the next turn continues; `mine`: the request that made it.

const chat = { tip: null, mine: null, running: null, points: [] };
const picture = startPicture({
  fetchPicture: () => {
    const mine = chat.running?.rid ?? chat.mine;
    return ask(`kv_picture${mine ? `?mine=${encodeURIComponent(mine)}` : ""}`, keys.admin);
  },
  complaint,
  askForKeys,
  isBusy: () => chat.running !== null,
});

function element(name, className, text = "") {
  const made = document.createElement(name);
  made.className = className;
  made.textContent = text;
  return made;
}

function addMessage(who, text) {
  const message = element("article", `message ${who}`);
  message.append(element("h3", "who", who === "user" ? "You" : "Model"));
  const said = element("div", "said", text);
  message.append(said);
  at("empty").hidden = true;
  at("log").append(message);
  return { message, said };
}

function follow() {
  const log = at("log");
  if (log.scrollHeight - log.scrollTop - log.clientHeight < 120) log.scrollTop = log.scrollHeight;
}

/** Each event of a stream of server-sent events, as its data. */
async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    for (let end = rest.indexOf("\n\n"); end >= 0; end = rest.indexOf("\n\n")) {
      const data = rest.slice(0, end).split("\n").filter((line) => line.startsWith("data: "));
      rest = rest.slice(end + 2);
      if (data.length) yield JSON.parse(data.map((line) => line.slice(6)).join("\n"));
    }
  }
}

async function turn(text) {
  const user = addMessage("user", text);
  const model = addMessage("model", "");
  const log = at("log");
  log.scrollTop = log.scrollHeight;
  const run = { rid: `page-${crypto.getRandomValues(new Uint32Array(3)).join("-")}`, stopper: new AbortController() };
  chat.running = run;
  show();
  picture.wake();
  let thoughts = null;
  let problem = null;
  let whole = null;
  try {
    const answer = await ask("v1/responses", keys.api, {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify({
        input: text,
        stream: true,
        rid: run.rid,
        previous_response_id: chat.tip,
        temperature: Number(at("temperature").value),
        max_output_tokens: Number(at("most").value),
      }),
      signal: run.stopper.signal,
    });
    if (!answer.ok) {
      if (answer.status === 401) askForKeys();
      throw new Error(await complaint(answer));
    }
    for await (const event of events(answer)) {
      if (event.type === "response.output_text.delta") {
        model.said.append(event.delta);
      } else if (event.type === "response.reasoning_text.delta") {
        if (!thoughts) model.said.before((thoughts = element("div", "thoughts")));
        thoughts.append(event.delta);
      } else if (event.type === "error") {
        problem = event.message;
      } else if (event.response && event.response.status !== "in_progress") {
        whole = event.response;
        problem = whole.error?.message ?? problem;
      }
      follow();
    }
    if (!whole && !problem) problem = "the stream ended before the answer did";
  } catch (error) {
    problem = run.stopper.signal.aborted ? "" : error.message;
  }
  finish(run, user, model, whole, problem);
}

function finish(run, user, model, whole, problem) {
  chat.running = null;
  if (whole && !problem) {
    chat.tip = whole.id;
    chat.mine = run.rid;
    const usage = whole.usage;
    const reused = usage.input_tokens_details.cached_tokens;
    const note = element("p", "note usage", `reused ${reused} · computed ${usage.input_tokens - reused} · generated ${usage.output_tokens} tokens`);
    if (whole.status === "incomplete") note.append(" · cut at the most tokens");
    const back = element("button", "quiet back", "Continue from here");
    back.type = "button";
    const point = { tip: whole.id, mine: run.rid, message: model.message };
    back.addEventListener("click", () => goBack(point));
    note.append(back);
    model.message.append(note);
    chat.points.push(point);
  } else {
    // Nothing of such a turn is in the session, and the next turn goes on from before it.
    const text = problem ? `Not answered: ${problem}` : "Stopped: this turn is not in the session.";
    const note = element("p", problem ? "note wrong" : "note", text);
    if (problem) note.setAttribute("role", "alert");
    model.message.append(note);
    for (const one of [user, model]) one.message.classList.add("dropped");
  }
  follow();
  show();
  picture.wake();
  at("say").focus();
}

/** The next turn continues an older answer: on the server that is a fork, which shares the pages up to there. */
function goBack(point) {
  if (chat.running) return;
  chat.points.length = chat.points.indexOf(point) + 1;
  while (point.message.nextElementSibling) point.message.nextElementSibling.remove();
  chat.tip = point.tip;
  chat.mine = point.mine;
  show();
  picture.wake();
  at("say").focus();
}

function forget() {
  chat.running?.stopper.abort();
  Object.assign(chat, { tip: null, mine: null });
  chat.points.length = 0;
  for (const message of [...at("log").querySelectorAll(".message")]) message.remove();
  at("empty").hidden = false;
  show();
  picture.wake();
  at("say").focus();
}

function show() {
  const turns = chat.points.length;
  at("where").textContent = chat.tip ? `${turns} ${turns === 1 ? "turn" : "turns"}` : "opens with the first message";
  at("send").hidden = chat.running !== null;
  at("stop").hidden = chat.running === null;
  at("new").disabled = chat.running !== null;
  at("log").setAttribute("aria-busy", String(chat.running !== null));
}

at("stop").addEventListener("click", () => chat.running?.stopper.abort());
at("new").addEventListener("click", forget);
at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = at("say").value.trim();
  if (!text || chat.running) return;
  at("say").value = "";
  turn(text);
});
at("say").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("composer").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !at("key-dialog").open) chat.running?.stopper.abort();
});
show();
