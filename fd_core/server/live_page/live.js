// Current state of the server: figures, bars and curves, from /status.json once a second.

const CURVES = [
  { title: "Tokens a second", format: compact, lines: [
    { key: "generated", label: "generated", colour: "decode" }, { key: "prompt", label: "prompt", colour: "prefill" }] },
  { title: "Requests", format: compact, top: 1, lines: [
    { key: "running", label: "running", colour: "decode" }, { key: "waiting", label: "waiting", colour: "unscheduled" }] },
  { title: "Time to first token", format: duration, lines: [
    { key: "ttft50", label: "median", colour: "prefill" }, { key: "ttft95", label: "p95", colour: "draining" }] },
  { title: "Time per output token", format: duration, lines: [
    { key: "tpot50", label: "median", colour: "prefill" }, { key: "tpot95", label: "p95", colour: "draining" }] },
  { title: "KV cache in use", format: percent, top: 1, lines: [{ key: "kv", label: "of all blocks", colour: "decode" }] },
  { title: "Preemptions a second", format: compact, top: 1, lines: [{ key: "preempted", label: "preempted", colour: "draining" }] },
];

const scheduler = raw => raw.stats.scheduler;
const sum = list => list.reduce((all, each) => all + each, 0);

/** Add to the newest sample what follows from it and from those before. */
function derive(sample) {
  const { slots, blocks } = scheduler(sample.raw);
  sample.running = slots.running + slots.loading + slots.draining;
  sample.waiting = slots.waiting;
  sample.kv = blocks.total ? (blocks.used + blocks.fenced) / blocks.total : 0;
  sample.generated = rate(raw => scheduler(raw).outputs.generated_tokens);
  sample.prompt = rate(raw => scheduler(raw).counters.prompt_tokens);
  sample.preempted = rate(raw => scheduler(raw).counters.preemptions);
  for (const [name, histogram] of [["ttft", "time_to_first_token"], ["tpot", "inter_token"]]) {
    sample[`${name}50`] = quantile(raw => raw.seconds[histogram], 0.5);
    sample[`${name}95`] = quantile(raw => raw.seconds[histogram], 0.95);
  }
}

function showNow(sample) {
  const { raw } = sample, { slots, blocks, counters, drafts } = scheduler(raw), engine = raw.engine;
  const maybe = (value, format) => known(value) ? format(value) : "–";
  byId("model").textContent = raw.models[0];
  byId("imageRow").hidden = !raw.images;
  byId("imageLimit").textContent = `chosen, pasted or dropped; at most ${raw.images} in a conversation`;
  document.title = `${raw.models[0]} · fd_core`;
  byId("about").textContent = `${engine.architecture} · ${engine.backend} · ${engine.device} · ${engine.dtype} · fd_core ${raw.version}`;
  byId("state").textContent = raw.not_ready ? `Not ready: ${raw.not_ready}.` : raw.missing ? `Ready, but ${raw.missing}.` : "Ready.";
  byId("state").className = raw.not_ready || raw.missing ? "bad" : "";
  // Tokens that a grammar forces are verified like drafts, and counted among them.
  const proposed = sum(drafts.proposed_per_position), forced = raw.stats.masks || { forced_drafted: 0, forced_accepted: 0 };
  showFigures(byId("figures"), [
    ["running", `${whole(sample.running)} of ${whole(engine.max_num_seqs)}`], ["waiting", whole(slots.waiting)],
    ["tokens/s", maybe(sample.generated, compact)], ["prompt tokens/s", maybe(sample.prompt, compact)],
    ["first token, median", maybe(sample.ttft50, duration)], ["per output token, median", maybe(sample.tpot50, duration)],
    ["KV in use", percent(sample.kv)], ["preemptions", whole(counters.preemptions)],
    ["prompt tokens from the prefix cache", counters.prefix_queries ? percent(counters.prefix_hits / counters.prefix_queries) : "–"],
    ...(proposed > forced.forced_drafted ? [["drafts accepted", percent((sum(drafts.accepted_per_position) - forced.forced_accepted) / (proposed - forced.forced_drafted))]] : []),
    ...(forced.forced_accepted ? [["tokens forced by grammars", whole(forced.forced_accepted)]] : []),
    ["engine starts", whole(engine.epoch), engine.epoch > 1],
  ]);
  byId("slotsText").textContent = `${whole(slots.running)} running, ${whole(slots.loading)} loading, ${whole(slots.draining)} draining, of ${whole(engine.max_num_seqs)}`;
  drawBar(byId("slots"), [["running", slots.running, "decode"], ["loading", slots.loading, "loading"], ["draining", slots.draining, "draining"]], engine.max_num_seqs);
  byId("blocksText").textContent = `${whole(blocks.used)} owned, ${whole(blocks.fenced)} fenced, ${whole(blocks.cached)} free with a prefix, of ${whole(blocks.total)}`;
  drawBar(byId("blocks"), [["owned", blocks.used, "decode"], ["fenced", blocks.fenced, "draining"], ["free, holds a prefix", blocks.cached, "cached"]], blocks.total);
}

// Samples of the server's own history, in the page's clock.
const hours = { samples: [], span: 900 };

async function loadHistory() {
  const { now, columns, rows } = await (await fetch("/history.json")).json(), offset = performance.now() / 1000 - now;
  hours.samples = rows.map(row => Object.fromEntries(row.map((value, i) => [columns[i], i ? value : value + offset])));
  const age = rows.length ? rows[rows.length - 1][0] - rows[0][0] : 0;
  hours.span = [900, 1800, 3600, 7200, 10800].find(span => age <= span) || 21600;
}

async function choosePeriod(chosen) {
  for (const button of document.querySelectorAll("[data-period]")) button.setAttribute("aria-pressed", button.dataset.period === chosen);
  if (chosen === "hours") await loadHistory().catch(() => null);
  period = chosen === "hours" ? hours : recent;
  drawCurves(CURVES);
}

function keyed(headers = {}) {
  if (byId("key").value) headers.authorization = `Bearer ${byId("key").value}`;
  return headers;
}

const WAITS = JSON.parse(byId("waits").textContent), ROWS = 200;
const rows = new Map();
let listing = false, locked = false;  // locked: the server rejected the key

function showRequestsError(message) {
  byId("requestsError").textContent = message;
  byId("requestsError").hidden = !message;
}

async function abortRequest(id, button) {
  button.disabled = true;
  const headers = keyed({ "content-type": "application/json" });
  try {
    const response = await fetch("/v1/abort_requests", { method: "POST", headers, body: JSON.stringify({ req_ids: [id] }) });
    showRequestsError(response.ok ? "" : (await response.json()).error.message);
  } catch (error) { showRequestsError(error.message); }
  button.disabled = false;
}

/** The table's row of a generation, made when it is first seen: a new one each second could not be clicked. */
function rowOf(key, id) {
  let made = rows.get(key);
  if (made) return made;
  made = element("tr");
  made.append(element("td", id, { title: id }), ...Array.from({ length: 5 }, () => element("td")), element("td"));
  const button = made.lastChild.appendChild(element("button", "abort", { "aria-label": `Abort ${id}` }));
  button.addEventListener("click", () => abortRequest(id, button));
  rows.set(key, made);
  return made;
}

function showRequests(list) {
  const seen = new Map();
  for (const each of list.slice(0, ROWS)) {
    // The texts of one request share its id.
    const count = [...seen.values()].filter(other => other.id === each.id).length;
    seen.set(`${count} ${each.id}`, each);
  }
  for (const [key, row] of rows) if (!seen.has(key)) { row.remove(); rows.delete(key); }
  for (const [key, each] of seen) {
    const row = rowOf(key, each.id), age = each.seconds >= 3600 ? `${(each.seconds / 3600).toFixed(1)} h` : duration(each.seconds);
    [each.state || "–", WAITS[each.wait_reason] || each.wait_reason || "–", whole(each.prompt_tokens), whole(each.generated_tokens), age]
      .forEach((text, i) => { row.cells[i + 1].textContent = text; });
    if (!row.isConnected) byId("requestTable").tBodies[0].append(row);  // new ones are the youngest
  }
  byId("requestTable").hidden = !list.length;
  byId("requestsText").textContent = list.length > ROWS ? `the oldest ${ROWS} of ${whole(list.length)}` : list.length ? whole(list.length) : "none";
}

async function refreshRequests() {
  if (listing || locked) return;
  listing = true;
  try {
    const response = await fetch("/v1/requests", { headers: keyed() });
    locked = response.status === 401;
    if (response.ok) showRequests((await response.json()).data);
    else if (locked) {
      showRequests([]);
      byId("requestsText").textContent = "";
      byId("keyRow").hidden = false;
      showRequestsError(byId("key").value ? "The server rejects this API key." : "");
    }
  } catch { /* `refresh` shows that the server does not respond */ }
  listing = false;
}

async function refresh() {
  if (document.hidden) return;
  refreshRequests();
  try {
    const raw = await (await fetch("/status.json")).json();
    const sample = { at: performance.now() / 1000, raw };
    remember(sample);
    derive(sample);
    showNow(sample);
  } catch {
    if (samples.length) remember({ at: performance.now() / 1000, raw: samples[samples.length - 1].raw });
    byId("state").textContent = "The server does not respond.";
    byId("state").className = "bad";
  }
  drawCurves(CURVES);
}

byId("key").value = sessionStorage.getItem("key") || "";
byId("key").addEventListener("change", () => {
  sessionStorage.setItem("key", byId("key").value);
  locked = false;
  showRequestsError("");
  refreshRequests();
});
for (const button of document.querySelectorAll("[data-period]")) button.addEventListener("click", () => choosePeriod(button.dataset.period));
setInterval(() => period === hours && !document.hidden && choosePeriod("hours"), 15000);
followTheme(byId("theme"));
makeCurves(byId("curves"), CURVES);
refresh();
setInterval(refresh, 1000);
