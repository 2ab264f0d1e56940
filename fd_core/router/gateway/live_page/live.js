// The router's workers as they are now, from /status.json once a second. The main figures are first; the rest opens on demand.

const CURVES = [
  { title: "Requests a second", format: compact, top: 1, lines: [{ key: "selected", label: "begun", colour: "decode" }, { key: "failed", label: "failed", colour: "limit" }] },
  { title: "On workers", format: compact, top: 1, lines: [
    { key: "running", label: "running", colour: "decode" }, { key: "waiting", label: "waiting for a first byte", colour: "unscheduled" }] },
];
const share = (part, all) => all ? percent(part / all) : "–";
const sum = (list, value) => list.reduce((total, each) => total + value(each), 0);
const attempts = tally => tally.served + tally.failed + tally.declined + tally.left;
const workerOf = (raw, url) => raw.workers.find(each => each.worker.url === url);
const cards = new Map();

/** What the card of a worker tells on demand. */
const MORE = [
  ["Circuit", w => w.circuit, w => w.circuit !== "closed"], ["Prompt tokens to compute", w => whole(w.load.prefill_tokens)],
  ["Served", w => whole(w.tally.served)], ["Failed", w => whole(w.tally.failed), w => w.tally.failed > 0],
  ["Declined", w => whole(w.tally.declined)], ["Not needed", w => whole(w.tally.unused)], ["Client disconnects", w => whole(w.tally.left)],
  ["Cache hits, blocks", w => `${whole(w.tally.hit_blocks)} of ${whole(w.tally.prompt_blocks)}`],
  ["Blocks held", w => whole(w.held_blocks ?? w.index_blocks)], ["KV port", w => w.kv_port === null ? "–" : String(w.kv_port)],
];
const ROLES = [
  ["Role", r => r.role], ["Policy", r => r.policy],
  ["Workers", r => whole(r.workers.length)], ["Usable", r => whole(r.usable), r => r.usable < r.workers.length],
  ["Running", r => whole(sum(r.workers, w => w.load.requests))], ["Waiting", r => whole(sum(r.workers, w => w.load.waiting))],
  ["Served", r => whole(r.tally.served)], ["Failed", r => whole(r.tally.failed), r => r.tally.failed > 0],
  ["Declined", r => whole(r.tally.declined)], ["Not needed", r => whole(r.tally.unused)], ["Left", r => whole(r.tally.left)],
  ["Cache hits", r => share(r.tally.hit_blocks, r.tally.prompt_blocks)],
];

function roles(s) {
  return Object.entries(s.roles).map(([role, tally]) => {
    const workers = s.workers.filter(w => w.worker.role === role);
    const usable = workers.filter(w => w.state === "healthy" && !w.unfit).length;
    return { role, tally, workers, usable, policy: s.policies[role] };
  }).filter(r => r.workers.length || r.tally.selected);
}

function row(cells, tag = "td") {
  const made = element("tr");
  for (const [text, bad] of cells) made.appendChild(element(tag, text, bad ? { class: "bad" } : {}));
  return made;
}

/** The card of a worker, made when the worker is first seen. */
function cardOf(url) {
  let card = cards.get(url);
  if (card) return card;
  const place = byId("workers").appendChild(element("article", null, { class: "worker" })), head = place.appendChild(element("header"));
  head.appendChild(element("b", url));
  card = { place, state: head.appendChild(element("span")), problem: place.appendChild(element("p", null, { class: "bad" })), figures: place.appendChild(element("dl", null, { class: "figures" })) };
  card.curves = [{ title: "Requests", format: compact, top: 1, lines: [
    { key: `running ${url}`, label: "running", colour: "decode" }, { key: `waiting ${url}`, label: "waiting", colour: "unscheduled" }] }];
  makeCurves(place, card.curves);
  const more = place.appendChild(element("details"));
  more.appendChild(element("summary", "More"));
  card.more = more.appendChild(element("table")).appendChild(element("tbody"));
  cards.set(url, card);
  return card;
}

const isOut = w => w.unfit || w.state !== "healthy" || w.circuit !== "closed";

/** Why a worker gets no requests, in a sentence; empty if it gets some. */
function problemOf(w, now) {
  if (!isOut(w)) return "";
  const since = now - w.since, span = since < 120 ? `${whole(since)} s` : since < 7200 ? `${whole(since / 60)} min` : `${whole(since / 3600)} h`;
  if (w.state === "unhealthy") return `unhealthy for ${span}: ${w.failure || "its health checks fail"}`;
  if (w.unfit) return `not used: ${w.unfit}`;
  if (w.state === "unknown") return w.failure ? `not healthy yet: ${w.failure}` : `not checked often enough yet, for ${span}`;
  if (w.state === "draining") return `draining for ${span}: it was deregistered, and finishes its requests`;
  return w.circuit === "open" ? "paused: requests to it failed" : "on trial: a request shows whether it works again";
}

function showWorker(w, sample) {
  const card = cardOf(w.worker.url), out = isOut(w);
  card.place.className = out ? "worker out" : "worker";
  card.state.textContent = `${w.worker.role} · ${w.unfit ? "not used" : w.state}${w.circuit === "closed" ? "" : ` · circuit ${w.circuit}`}`;
  card.state.className = out ? "bad" : "";
  card.problem.textContent = problemOf(w, sample.raw.now);
  card.problem.hidden = !out;
  showFigures(card.figures, [
    ["running", whole(w.load.requests)], ["waiting", whole(w.load.waiting)],
    ["requests/s", known(sample[`rate ${w.worker.url}`]) ? compact(sample[`rate ${w.worker.url}`]) : "–"],
    ["cache hits", share(w.tally.hit_blocks, w.tally.prompt_blocks)], ["failed", whole(w.tally.failed), w.tally.failed > 0],
  ]);
  card.more.replaceChildren(...MORE.map(([name, text, bad]) => row([[name], [text(w), bad && bad(w)]])));
}

function derive(sample) {
  const { raw } = sample;
  sample.running = raw.total.requests;
  sample.waiting = raw.total.waiting;
  sample.selected = rate(each => sum(each.workers, w => attempts(w.tally) + w.load.requests));
  sample.failed = rate(each => sum(each.workers, w => w.tally.failed));
  for (const w of raw.workers) {
    const { url } = w.worker;
    sample[`running ${url}`] = w.load.requests;
    sample[`waiting ${url}`] = w.load.waiting;
    sample[`rate ${url}`] = workerOf(before(5).raw, url) ? rate(each => attempts((workerOf(each, url) || w).tally)) : null;
  }
}

function showNow(sample) {
  const s = sample.raw, usable = s.workers.filter(w => w.state === "healthy" && !w.unfit).length;
  byId("state").textContent = s.not_ready ? `Not ready: ${s.not_ready}.` : "Ready.";
  byId("state").className = s.not_ready ? "bad" : "";
  byId("how").textContent = s.prompts;
  byId("none").hidden = s.workers.length > 0;
  const problems = s.workers.filter(isOut);
  byId("problems").replaceChildren(...problems.slice(0, 8).map(w => element("li", `${w.worker.url}: ${problemOf(w, s.now)}.`)),
    ...(problems.length > 8 ? [element("li", `and ${problems.length - 8} more workers.`)] : []));
  showFigures(byId("figures"), [
    ["workers in use", `${whole(usable)} of ${whole(s.workers.length)}`, usable < s.workers.length],
    ["requests/s", known(sample.selected) ? compact(sample.selected) : "–"],
    ["on workers", whole(s.total.requests)], ["waiting for a first byte", whole(s.total.waiting)],
    ["prefix cache hits", share(s.tally.hit_blocks, s.tally.prompt_blocks)],
    ["retries", whole(s.retries)], ["incomplete answers", whole(s.streams_broken), s.streams_broken > 0],
  ]);
  for (const w of s.workers) showWorker(w, sample);
  for (const [url, card] of cards) if (!workerOf(s, url)) { card.place.remove(); cards.delete(url); }
  const table = byId("roles").querySelector("table");
  table.tHead.replaceChildren(row(ROLES.map(([name]) => [name]), "th"));
  table.tBodies[0].replaceChildren(...roles(s).map(each => row(ROLES.map(([, text, bad]) => [text(each), bad && bad(each)]))));
  const transfers = Object.entries(s.transfers).map(([how, count]) => [`KV of pairs: ${how.replace("_", " ")}`, count]);
  const refused = Object.entries(s.refused).map(([why, count]) => [`Rejected: ${why}`, count]);
  byId("totals").querySelector("tbody").replaceChildren(...[
    ["Counted on workers (a pair counts twice until its first byte)", s.total.requests],
    ["of them on lost workers", sum(s.departed, ([, load]) => load.requests)],
    ["Attempts on a mixed worker", s.modes.mixed], ["Attempts on a pair", s.modes.pd], ...transfers,
    ["Client disconnects", s.disconnects], ["Faults in the accounting", s.faults, s.faults > 0], ...refused,
  ].map(([name, value, bad]) => row([[name], [whole(value), bad]])));
}

async function refresh() {
  if (document.hidden) return;
  try {
    const raw = await (await fetch("/status.json")).json(), sample = { at: performance.now() / 1000, raw };
    remember(sample);
    derive(sample);
    showNow(sample);
  } catch {
    byId("state").textContent = "The router does not respond.";
    byId("state").className = "bad";
  }
  drawCurves(CURVES);
  for (const card of cards.values()) drawCurves(card.curves);
}

followTheme(byId("theme"));
makeCurves(byId("curves"), CURVES);
refresh();
setInterval(refresh, 1000);
