"use strict";
// Names and reasons come from strangers: text reaches the page as text nodes only.

const $ = (id) => document.getElementById(id);
const LOOKS = {
  protected: "protected job", used: "other job", idle: "idle", drained: "drained", down: "down", silent: "silent",
};
let tag = "", timer = 0, shift = 0, last = null, answered = 0;
let nodes = new Map();  // name -> its cell
let wanted = "";        // the job whose nodes are shown alone
let chosen = "";        // the node that is told of below the map
const opened = new Map();  // job -> its panel

function make(kind, text = "", style = "") {
  const made = document.createElement(kind);
  if (text !== "") made.textContent = text;
  if (style) made.className = style;
  return made;
}

function fill(parent, ...children) {
  parent.replaceChildren(...children);
  return parent;
}

const now = () => Date.now() / 1000 + shift;

function span(seconds) {
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor(seconds % 3600 / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor(seconds % 86400 / 3600)} h`;
}

function clock(at) {
  const date = new Date(at * 1000), two = (value) => String(value).padStart(2, "0");
  const time = `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${time}`;
}

const counted = (count, what) => `${count} ${what}${count === 1 ? "" : "s"}`;
const percent = (share) => share === null ? "-" : `${(100 * share).toFixed(1)} %`;

// ---------------------------------------------------------------- asking
// Half of the session, which only this origin has: the other half, a cookie, goes to every port of the host.
function kept(name, value) {
  try {
    if (value !== undefined) localStorage.setItem(name, value);
    return localStorage.getItem(name) || "";
  } catch (error) {
    return "";
  }
}

async function ask(path, known = "") {
  const given = { cache: "no-store", credentials: "same-origin", redirect: "error", headers: { "Unicron-Session": kept("half") } };
  if (known) given.headers["If-None-Match"] = known;
  given.signal = AbortSignal.timeout(12000);
  return fetch(path, given);
}

function live(words, style) {
  $("live").textContent = words;
  $("live").className = style;
}

function refused(reason) {
  $("refused").textContent = reason;
  $("refused").hidden = !reason;
}

async function poll() {
  clearTimeout(timer);
  let every = 3;
  try {
    const answer = await ask("/view", tag);
    every = Number(answer.headers.get("Unicron-Every")) || every;
    if (answer.status === 200) {
      tag = answer.headers.get("ETag") || "";
      show(await answer.json());
    }
    if (answer.status === 200 || answer.status === 304) {
      refused("");
      answered = Date.now();
      live(last.problem || `live, every ${every} s`, last.problem ? "bad" : "good");
      for (const panel of opened.values()) if (panel.due <= Date.now()) panel.load();
    } else {
      const told = await answer.json();
      refused(told.error);
      live("not live", "bad");
      if (answer.status === 401 || answer.status === 403) {
        tag = "";
        $("main").hidden = true;
        every = 30;
      }
    }
  } catch (error) {
    const since = answered ? `, last answer ${span((Date.now() - answered) / 1000)} ago` : "";
    live(`the page's server does not answer${since}`, "bad");
  }
  if (!document.hidden) timer = setTimeout(poll, 1000 * every * (1 + 0.1 * Math.random()));
}

async function begin() {
  const credential = location.hash.slice(1);
  if (credential) {
    history.replaceState(null, "", "/");
    const answer = await fetch("/session", { method: "POST", body: credential, credentials: "same-origin" });
    if (!answer.ok) {
      refused((await answer.json()).error);
      return live("not live", "bad");
    }
    const session = await answer.json();
    kept("half", session.half);
    kept("user", session.user);
  }
  return poll();
}

// ---------------------------------------------------------------- showing
function show(view) {
  last = view;
  shift = view.time - Date.now() / 1000;
  $("main").hidden = false;
  $("leave").hidden = !view.session;
  $("leave").textContent = `End session of ${kept("user")}`;
  fill($("alarms"), ...view.alarms.map((text) => make("p", text)));
  fill($("notes"), ...view.notes.map((text) => make("li", text)));
  totals(view);
  map(view);
  jobs(view);
  fill($("failures"), view.failures.length ? failures(view.failures) : make("p", "none", "soft"));
  performance.mark("shown");
}

function totals(view) {
  const living = view.jobs.filter((job) => !job.ended);
  const unfit = view.nodes.filter((node) => node[1] === "down" || node[1] === "drained").length;
  const modes = [...new Set(Object.values(view.modes))].join(", ");
  const rows = [
    ["nodes in service", `${view.nodes.length - unfit} of ${view.nodes.length}`],
    [view.admin ? "jobs" : "jobs, yours in full", String(living.length)],
    ["goodput", percent(view.goodput.share)],
    ["time lost by failures", span(view.goodput.lost)],
    ["weighted FLOP/s", view.waf],
    ["mode", modes],
  ];
  fill($("totals"), ...rows.map(([name, value]) => {
    const row = make("div");
    row.append(make("dt", name), make("dd", value));
    return row;
  }));
}

function map(view) {
  const counts = {}, found = new Map(), order = [];
  let suspects = 0;
  for (const node of view.nodes) {
    const [name, look, states, users, suspect, remark] = node;
    counts[look] = (counts[look] || 0) + 1;
    suspects += suspect;
    const cell = nodes.get(name) || make("i");
    const words = [name, states || LOOKS[look], users.length ? `job ${users.join(", ")}` : "", remark].filter(Boolean).join(": ");
    if (cell.title !== words) cell.title = words;
    cell.node = node;
    paint(cell);
    found.set(name, cell);
    order.push(cell);
  }
  const same = nodes.size === found.size && [...found.keys()].every((name) => nodes.has(name));
  nodes = found;
  if (!same) fill($("map"), ...order);
  $("map").classList.toggle("few", view.nodes.length <= 400);
  $("map").setAttribute("aria-label", counted(view.nodes.length, "node"));
  const legend = Object.entries(LOOKS).filter(([look]) => counts[look]).map(([look, words]) => key(look, `${counts[look]} ${words}`));
  if (suspects) legend.push(key("idle suspect", `${suspects} suspect`));
  fill($("legend"), ...legend);
  const telling = view.nodes.filter((node) => node[5]);
  $("remarks").hidden = !telling.length;
  $("remarks").firstElementChild.textContent = `${counted(telling.length, "node")} with a remark`;
  fill($("remarks").lastElementChild, ...telling.slice(0, 500).map((node) => make("li", `${node[0]}: ${node[5]}`)));
}

function key(style, words) {
  const item = make("li");
  item.append(make("i", "", style), words);
  return item;
}

function paint(cell) {
  const [name, look, states, users, suspect, remark] = cell.node;
  const text = $("find").value.trim().toLowerCase();
  const hidden = (wanted && !users.includes(wanted))
    || (text && ![name, states, look, remark, ...users].some((word) => word.toLowerCase().includes(text)));
  const style = `${look}${suspect ? " suspect" : ""}${hidden ? " dim" : ""}${name === chosen ? " chosen" : ""}`;
  if (cell.className !== style) cell.className = style;
}

function repaint() {
  for (const cell of nodes.values()) paint(cell);
}

// ---------------------------------------------------------------- jobs
function jobs(view) {
  const there = view.jobs.filter((job) => !job.ended), over = view.jobs.filter((job) => job.ended);
  cards($("jobs"), there, "no job: submit one with sbatch --unicron");
  $("over").hidden = !over.length;
  $("over").firstElementChild.textContent = `${over.length} that ended`;
  cards($("over").lastElementChild, over, "");
  const known = new Set(view.jobs.map((job) => job.job));
  for (const job of opened.keys()) if (!known.has(job)) opened.delete(job);
}

function cards(parent, listed, none) {
  const kept = new Map([...parent.children].filter((card) => card.job).map((card) => [card.job, card]));
  const made = listed.map((job) => {
    const card = kept.get(job.job) || newCard(job.job);
    head(card, job);
    return card;
  });
  if (!made.length && none) made.push(make("p", none, "soft"));
  if (made.length !== parent.children.length || made.some((card, place) => parent.children[place] !== card)) fill(parent, ...made);
}

function newCard(job) {
  const card = make("details", "", "job");
  card.job = job;
  card.append(make("summary"), make("div", "", "body"));
  card.addEventListener("toggle", () => {
    wanted = card.open ? job : wanted === job ? "" : wanted;
    repaint();
    if (card.open) {
      const panel = { due: 0, load: () => explain(job, card.lastElementChild, panel) };
      opened.set(job, panel);
      panel.load();
    } else {
      opened.delete(job);
    }
  });
  return card;
}

function head(card, job) {
  const name = make("span"), iterations = job.iterations ? `${job.iteration}/${job.iterations}` : String(Math.max(job.iteration, 0));
  name.append(make("b", `${job.job} ${job.name}`), make("small", job.user));
  const nodes = `${job.nodes}/${job.most}${job.planned === null ? "" : `, plan ${job.planned}`}`;
  const cells = [
    ["state", job.state, `state-${job.state.replace(/\W.*/, "")}`],
    ["nodes", nodes],
    ["iteration", iterations + (job.seconds ? `, ${job.seconds.toFixed(2)} s` : "")],
    ["goodput", percent(job.goodput) + (job.lost ? `, ${span(job.lost)} lost` : "")],
    ["failures", String(job.failures)],
  ].map(([title, value, style]) => {
    const cell = make("span", value, style || "");
    cell.prepend(make("small", title));
    return cell;
  });
  fill(card.firstElementChild, name, ...cells);
  const notes = [...job.notes, ...(job.plan ? [`plan: ${job.plan}`] : [])];
  if (notes.length) {
    const below = make("span");
    below.style.gridColumn = "1 / -1";
    below.append(...notes.map((text) => make("p", text, "note")));
    card.firstElementChild.append(below);
  }
}

async function explain(job, body, panel) {
  panel.due = Date.now() + 5000;
  let answer, told;
  try {
    answer = await ask(`/job?id=${encodeURIComponent(job)}`, panel.tag);
    panel.due = Date.now() + 1000 * (Number(answer.headers.get("Unicron-Every")) || 5);
    if (answer.status === 304) return;
    told = await answer.json();
  } catch (error) {
    return;
  }
  if (answer.status !== 200) {
    if (answer.status !== 503 || !panel.tag) fill(body, make("p", told.error, "soft"));
    return;
  }
  panel.tag = answer.headers.get("ETag") || "";
  const parts = [];
  if (told.problem) parts.push(make("p", told.problem, "alarm"));
  parts.push(...timeline(job, told));
  parts.push(make("h3", "Why"), list([...told.lines, ...(told.plan ? [told.plan] : [])]));
  if (told.second.length) {
    const names = new Map(last.jobs.map((one) => [one.job, one.name]));
    parts.push(make("h3", "Second-best plan"), list(told.second.map(([id, count]) => `${id} ${names.get(id) || ""}: ${counted(count, "node")}`)));
  }
  if (told.failures.length) parts.push(make("h3", "Failures"), failures(told.failures));
  if (told.decisions.length) {
    parts.push(make("h3", "Decisions"));
    parts.push(table(["when", "what", "why"], told.decisions.map((one) => [clock(one.at), one.kind, one.reason])));
  }
  fill(body, ...parts);
}

function timeline(job, told) {
  const known = last.jobs.find((one) => one.job === job);
  const began = Math.min(known ? known.since : now(), ...told.failures.map((failure) => failure.at));
  const whole = Math.max(now() - began, 1), line = make("div", "", "line"), ends = make("div", "", "ends");
  for (const failure of told.failures) {
    const mark = make("i", "", failure.severity > 2 ? "mild" : "");
    mark.style.left = `${100 * (failure.at - began) / whole}%`;
    if (failure.again !== null) mark.style.width = `${100 * failure.again / whole}%`;
    mark.title = `${clock(failure.at)} ${failure.cause}: ${cost(failure)}`;
    line.append(mark);
  }
  ends.append(make("span", clock(began)), make("span", `${told.failures.length} failure${told.failures.length === 1 ? "" : "s"}`), make("span", "now"));
  return [line, ends];
}

function cost(failure) {
  const again = failure.again === null ? "does not train again yet" : `${span(failure.again)} until it trained again`;
  return failure.twice ? `${again}, ${failure.twice} micro-batches twice` : again;
}

function failures(listed) {
  return table(
    ["when", "job", "where", "what", "cost", "done"],
    listed.map((failure) => [
      clock(failure.at), failure.job, failure.where, `SEV${failure.severity} ${failure.cause}: ${failure.reason}`, cost(failure), failure.done,
    ]),
  );
}

function list(lines) {
  return fill(make("ul"), ...lines.map((text) => make("li", text)));
}

function table(heads, rows) {
  const whole = make("table"), top = make("thead"), row = make("tr"), body = make("tbody");
  row.append(...heads.map((text) => make("th", text)));
  top.append(row);
  body.append(...rows.map((cells) => fill(make("tr"), ...cells.map((text, place) => {
    const cell = make("td", text);
    cell.dataset.head = heads[place];
    return cell;
  }))));
  whole.append(top, body);
  return whole;
}

// ---------------------------------------------------------------- plan, and what people do
async function plan() {
  const body = $("plan").lastElementChild;
  let told;
  try {
    told = await (await ask("/plan")).json();
  } catch (error) {
    return;
  }
  if (told.error || told.why) {
    fill(body, make("p", told.error || told.why, "soft"));
    return;
  }
  const rows = told.jobs.map((job) => [`${job.job} ${job.name}`, `${job.nodes} -> ${job.planned}`, job.reason]);
  const sum = `${counted(told.nodes, "node")}, ${told.spares} spare; ${told.waf} weighted. A job's own entry has its second-best plan.`;
  fill(body, rows.length ? table(["job", "nodes", "why"], rows) : make("p", "no job is planned for", "soft"), make("p", sum, "soft"));
}

$("plan").addEventListener("toggle", () => $("plan").open && plan());
setInterval(() => $("plan").open && !document.hidden && plan(), 15000);
$("find").addEventListener("input", repaint);
$("map").addEventListener("click", (event) => {
  if (!event.target.node) return;
  chosen = event.target.node[0];
  $("chosen").textContent = event.target.title;
  repaint();
});
$("leave").addEventListener("click", async () => {
  const headers = { "Unicron-Session": kept("half") };
  await fetch("/leave", { method: "POST", body: "", credentials: "same-origin", headers });
  kept("half", "");
  kept("user", "");
  location.reload();
});
document.addEventListener("visibilitychange", () => document.hidden ? clearTimeout(timer) : poll());
begin();
