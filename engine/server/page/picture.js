// The picture of the KV: asks the server how it looks and draws the answer. Elements are kept and moved, so that a reader's
// place, focus and selection stay where they are.

const at = (id) => document.getElementById(id);
const BUSY_MS = 150;
const IDLE_MS = 1000;
const LOST_MS = 3000;
const PARTS = ["protected", "committed", "scheduled", "allocated"];
const OWNERS = [
  ["requests", "requests"],
  ["sessions", "idle sessions"],
  ["tree_protected", "tree, in use"],
  ["tree_evictable", "tree, may go"],
  ["pending", "pending"],
  ["free", "free"],
];

const count = (n) => n.toLocaleString("en");
const some = (n, one) => `${count(n)} ${one}${n === 1 ? "" : "s"}`;
const short = (id) => (id.length > 14 ? `${id.slice(0, 4)}…${id.slice(-6)}` : id);
const nameOf = (id) => short(id.replace(/#\d+$/, "").replace(/^responses:/, ""));

function element(name, className = "", text = "") {
  const made = document.createElement(name);
  made.className = className;
  made.textContent = text;
  return made;
}

function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** One child for each item, in order; `make` builds a child, `draw` brings it up to date. */
function each(parent, items, keyOf, make, draw) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  items.forEach((item, place) => {
    const key = String(keyOf(item, place));
    let child = old.get(key);
    old.delete(key);
    if (!child) {
      child = make(item);
      child.dataset.key = key;
    }
    if (parent.children[place] !== child) parent.insertBefore(child, parent.children[place] ?? null);
    draw(child, item, place);
  });
  for (const child of old.values()) child.remove();
}

// Rows: each on the same scale, so that lengths compare.

function roundUp(tokens) {
  let scale = 128;
  while (scale < tokens) scale *= 2;
  return scale;
}

function makeRow() {
  const row = element("li", "row");
  const head = element("div", "row-head");
  head.append(element("strong", "row-name"), element("span", "badge"), element("span", "note row-numbers"));
  const ladder = element("div", "ladder");
  ladder.setAttribute("role", "img");
  for (const part of [...PARTS, "gone"]) ladder.append(element("span", `part ${part}`));
  row.append(head, ladder);
  return row;
}

function drawRow(node, row, scale) {
  const [name, badge, numbers] = node.firstChild.children;
  const ladder = node.lastChild;
  write(name, `${row.row}  ${row.owner} ${nameOf(row.owner_id)}`);
  name.title = row.owner_id;
  write(badge, [row.is_mine ? "this chat" : "", row.request ? "running" : ""].filter(Boolean).join(" · "));
  badge.hidden = !badge.textContent;
  const said = PARTS.map((part) => `${part} ${count(row[part])}`).join(" · ");
  const window = row.window ? ` · window let go ${count(row.window[0])} to ${count(row.window[1])}` : "";
  write(numbers, said + window);
  ladder.setAttribute("aria-label", `${name.textContent}: ${said}${window}`);
  let from = 0;
  PARTS.forEach((part, place) => {
    const span = ladder.children[place];
    span.dataset.tokens = row[part] - from;
    span.style.left = `${(100 * from) / scale}%`;
    span.style.width = `${(100 * (row[part] - from)) / scale}%`;
    from = row[part];
  });
  const gone = ladder.lastChild;
  const [lo, hi] = row.window ?? [0, 0];
  gone.style.left = `${(100 * lo) / scale}%`;
  gone.style.width = `${(100 * (hi - lo)) / scale}%`;
  node.classList.toggle("mine", row.is_mine);
}

function drawRows(view) {
  const { shown, num_left_out: leftOut, num_free: free, num_rows: rows } = view.rows;
  const scale = roundUp(Math.max(0, ...shown.map((row) => row.allocated)));
  each(at("rows"), shown, (row) => row.row, makeRow, (node, row) => drawRow(node, row, scale));
  const more = leftOut ? ` · ${some(leftOut, "row")} not shown` : "";
  const waiting = view.num_waiting ? ` · ${count(view.num_waiting)} waiting` : "";
  write(at("rows-note"), `${count(rows - free)} of ${count(rows)} held · ${count(view.num_running)} running${waiting}${more}`);
  each(at("scale"), [0, 1, 2, 3, 4], (n) => n, () => element("span"), (node, n) => write(node, count((scale * n) / 4)));
  at("scale").hidden = !shown.length;
}

// Pools: one bar for each family, with its numbers beside it.

function makePool() {
  const pool = element("div", "pool");
  pool.append(element("h4", "", ""), element("div", "bar-of-pool"), element("ul", "owners"));
  pool.children[1].setAttribute("role", "img");
  return pool;
}

function drawPool(node, pool, pageSize) {
  const [title, bar, list] = node.children;
  const window = pool.window ? `, window of ${count(pool.window)}` : "";
  if (!pool.pages) {
    write(title, `${pool.family}: shares the pages of ${pool.derived_from}`);
    bar.hidden = list.hidden = true;
    return;
  }
  write(title, `${pool.family}: ${some(pool.num_pages, "page")} of ${some(pool.tokens_per_page, "token")}${window}`);
  const items = OWNERS.map(([key, label]) => ({ key, label, pages: pool.pages[key] }));
  const share = (item) => (100 * item.pages) / pool.num_pages;
  each(bar, items, (item) => item.key, (item) => element("span", `part ${item.key}`), (span, item) => {
    span.style.width = `${share(item)}%`;
  });
  each(list, items, (item) => item.key, (item) => {
    const line = element("li");
    line.append(element("i", `swatch ${item.key}`), element("span", "", item.label), element("b"), element("small"));
    return line;
  }, (line, item) => {
    write(line.children[2], count(item.pages * pageSize));
    write(line.children[3], `${share(item) > 0 && share(item) < 1 ? "<1" : Math.round(share(item))}%`);
  });
  bar.setAttribute("aria-label", items.map((item) => `${item.label} ${some(item.pages, "page")}`).join(", "));
}

// The tree: nodes are indented below their parents.

function ordered(nodes) {
  const below = nodes.map(() => []);
  const roots = [];
  nodes.forEach((node, place) => (node.parent === null ? roots : below[node.parent]).push(place));
  const found = [];
  const walk = (place, depth, path) => {
    const node = { ...nodes[place], depth, key: `${path}/${place}` };
    found.push(node);
    below[place].forEach((child) => walk(child, depth + 1, node.key));
  };
  roots.forEach((place) => walk(place, 0, ""));
  return found;
}

function makeNode() {
  const node = element("li", "node");
  const bar = element("span", "edge");
  bar.append(element("span", "part"));
  node.append(element("b"), bar, element("span", "note"));
  return node;
}

function drawTree({ tree }) {
  const nodes = ordered(tree.shown);
  const most = Math.max(1, ...nodes.map((node) => node.tokens));
  each(at("tree"), nodes, (node, place) => place, makeNode, (line, node) => {
    const [tokens, bar, note] = line.children;
    line.style.setProperty("--depth", Math.min(node.depth, 12));
    line.classList.toggle("child", node.depth > 0);
    write(tokens, some(node.tokens, "token"));
    bar.firstChild.className = `part ${node.locks ? "tree_protected" : "tree_evictable"}`;
    bar.firstChild.style.width = `${Math.max(2, (100 * node.tokens) / most)}%`;
    write(note, `${node.locks ? some(node.locks, "lock") : "may go"} · ${some(node.hits, "hit")}`);
  });
  const more = tree.tokens_left_out ? ` · ${some(tree.tokens_left_out, "token")} of further nodes not shown` : "";
  write(at("tree-note"), `${some(nodes.length, "node")} · ${some(tree.tokens, "token")}${more}`);
}

// Sessions.

function drawSessions({ sessions }) {
  const { shown, num_left_out: leftOut, num_branching: branching } = sessions;
  each(at("sessions"), shown, (one) => one.owner_id, () => {
    const line = element("tr");
    line.append(element("th"), ...Array.from({ length: 7 }, () => element("td")));
    line.firstChild.scope = "row";
    return line;
  }, (line, one) => {
    const all = one.reused + one.computed;
    const share = all ? ` (${Math.round((100 * one.reused) / all)}%)` : "";
    const cells = [
      `${nameOf(one.id)}${one.is_mine ? " · this chat" : ""}`,
      one.state,
      count(one.turns),
      count(one.history),
      count(one.held),
      `${count(one.reused)}${share}`,
      count(one.computed),
      count(one.lost_to_alignment),
    ];
    cells.forEach((text, place) => write(line.children[place], text));
    line.classList.toggle("mine", one.is_mine);
    line.firstChild.title = `${one.id}: ${some(one.forks, "fork")}, ${some(one.demotions, "demotion")}, ${some(one.retractions, "retraction")}`;
  });
  const more = leftOut ? ` · ${count(leftOut)} not shown` : "";
  const others = branching ? ` · ${count(branching)} branching` : "";
  write(at("sessions-note"), `${count(shown.length + leftOut)} open${more}${others}`);
}

function draw(view) {
  write(at("about"), `${view.model} · ${view.device}`);
  drawRows(view);
  each(at("pools"), view.pools, (pool) => pool.family, makePool, (node, pool) => drawPool(node, pool, view.page_size));
  write(at("pool-note"), "in tokens");
  drawTree(view);
  drawSessions(view);
}

/** Draws again and again; `wake` draws at once. It rests while the page is not seen or the reader pauses it. */
export function startPicture({ fetchPicture, complaint, askForKeys, isBusy }) {
  let timer = 0;
  let isAsking = false;
  let isPaused = false;

  function trouble(text, canGiveKey = false) {
    const box = at("trouble");
    if (box.dataset.text === text) return;
    box.dataset.text = text;
    box.replaceChildren(text);
    box.hidden = !text;
    at("panels").classList.toggle("stale", Boolean(text));
    if (!canGiveKey) return;
    const button = element("button", "quiet", "Give a key");
    button.type = "button";
    button.addEventListener("click", askForKeys);
    box.append(" ", button);
  }

  async function look() {
    clearTimeout(timer);
    if (isAsking || isPaused || document.hidden) return;
    isAsking = true;
    let wait = IDLE_MS;
    try {
      const answer = await fetchPicture();
      if (answer.ok) {
        const view = await answer.json();
        draw(view);
        trouble("");
        write(at("pulse"), "");
        if (isBusy() || view.num_running) wait = BUSY_MS;
      } else {
        const isKey = answer.status === 401;
        trouble(isKey ? "The picture is for admins." : `No picture: ${await complaint(answer)}`, isKey);
        wait = isKey || answer.status === 403 ? null : LOST_MS;
      }
    } catch {
      trouble("The server does not answer; the picture is old.");
      wait = LOST_MS;
    } finally {
      isAsking = false;
    }
    if (wait !== null) timer = setTimeout(look, wait);
  }

  at("pause").addEventListener("click", () => {
    isPaused = !isPaused;
    at("pause").setAttribute("aria-pressed", String(isPaused));
    write(at("pause"), isPaused ? "Go on" : "Pause");
    write(at("pulse"), isPaused ? "paused" : "");
    look();
  });
  document.addEventListener("visibilitychange", look);
  look();
  return { wake: look };
}
