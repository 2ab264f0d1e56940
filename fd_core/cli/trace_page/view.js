// The panels, the range of steps that they share, and how people move in it.

const panels = [
  { title: "Slots", draw: drawSlots, keys: [["prefill", "prefill"], ["decode", "decode (two shades: neighbouring requests)"],
    ["unscheduled", "not scheduled"], ["draining", "revoked"], ["overrun", "computed after the end"],
    ["loading", "KV is being loaded"]] },
  { title: "", draw: drawAxis },
  { title: "Events", draw: drawEvents, lanes: [
    { from: ["admitted"], colour: "prefill", label: "admitted" }, { from: ["finished"], colour: "decode", label: "finished" },
    { from: ["preempted", "late"], colour: "draining", label: "preempted" }, { from: ["returned"], colour: "unscheduled", label: "returned" },
    { from: ["aborted"], colour: "overrun", label: "aborted" },
    { from: ["loadsEnded"], colour: "loading", label: "loaded", needs: "loadsEnded" },
    { from: ["savedBlocks"], colour: "cached", label: "saved", needs: "savedBlocks" }] },
  { title: "Budget, tokens per step", draw: drawStack, height: 96, peak: "used", limit: "limit",
    series: [{ from: "decodeTokens", colour: "decode" }, { from: "drafted", colour: "drafts" }, { from: "prefillTokens", colour: "prefill" }],
    keys: [["decode", "decode"], ["drafts", "drafts and forced tokens"], ["prefill", "prefill"], ["max", "largest"], ["limit", "limit"]] },
  { title: "KV blocks", draw: drawStack, height: 96, limit: "blocks", exactTop: true,
    series: [{ from: "owned", colour: "decode" }, { from: "fenced", colour: "draining" }, { from: "cached", colour: "cached" }, { from: "free", colour: "soft" }],
    keys: [["decode", "owned"], ["draining", "fenced"], ["cached", "free, holds a prefix"], ["soft", "free"]] },
  { title: "Prefixes loaded or recomputed so far, tokens", draw: drawStack, height: 72, needs: "restored",
    series: [{ from: "loadedSoFar", colour: "loading" }, { from: "recomputedSoFar", colour: "prefill" }],
    keys: [["loading", "loaded from host or store"], ["prefill", "recomputed after a preemption"]] },
  { title: "Speculation and grammars, tokens verified per step", draw: drawStack, height: 72, peak: "drafted", needs: "drafted",
    series: [{ from: "acceptedDrafts", colour: "decode" }, { from: "forced", colour: "cached" }, { from: "rejected", colour: "drafts" }],
    keys: [["decode", "accepted drafts"], ["cached", "tokens forced by grammars"], ["drafts", "rejected drafts"], ["max", "most verified"]] },
  { title: "Queue, requests waiting", draw: drawStack, height: 56, peak: "waiting",
    series: [{ from: "waiting", colour: "unscheduled" }], keys: [["unscheduled", "mean"], ["max", "largest"]] },
  { title: "Step time", draw: drawTime, height: 72, keys: [["prefill", "mean"], ["cached", "largest"], ["draining", "above the scale"]] },
];
const view = { axis: "steps", from: 0, to: 1, tall: false };
const byId = id => document.getElementById(id);
let followed = -1, pinned = -1, cursor = null, frame = 0;

const extent = axis => axis === "steps" ? [0, Math.max(count, 1)] : [data.began[0] || 0, data.ended[count - 1] || 1];
const redraw = () => { if (!frame) frame = requestAnimationFrame(draw); };
const width = () => Math.max(50, panels[0].canvas.clientWidth - GUTTER - 4);

function draw() {
  frame = 0;
  const columns = bins(view, Math.floor(width()));
  for (const panel of panels) {
    panel.draw(panel, columns, view, followed);
    if (cursor && panel.title) {
      const context = panel.canvas.getContext("2d");
      context.fillStyle = colours.faint;
      context.fillRect(cursor.x, 0, 1, panel.canvas.clientHeight);
      if (cursor.drag !== undefined) {
        context.globalAlpha = 0.25;
        context.fillRect(Math.min(cursor.drag, cursor.x), 0, Math.abs(cursor.x - cursor.drag), panel.canvas.clientHeight);
        context.globalAlpha = 1;
      }
    }
  }
  drawOverview();
  const first = columns.from[0], last = Math.max(first, columns.to[columns.width - 1] - 1);
  byId("range").textContent = count ? `steps ${name(first)} to ${name(last)} · ${duration(data.ended[last] - data.began[first])}` : "no steps";
}

const name = step => (facts.headers.length > 1 ? `${facts.headers[data.epoch[step]].epoch}/` : "") + data.step[step].toLocaleString("en");

function drawOverview() {
  const canvas = byId("overview"), context = surface(canvas, 30), wide = canvas.clientWidth;
  const [low, high] = extent(view.axis), columns = bins({ axis: view.axis, from: low, to: high }, wide);
  const { mean } = reduce(data.scheduled, columns), lost = reduce(data.preempted, columns).most;
  mean.forEach((value, x) => {
    context.fillStyle = colours.decode;
    context.fillRect(x, 26 - 20 * value / numSlots, 1, 20 * value / numSlots);
    if (lost[x] > 0) { context.fillStyle = colours.draining; context.fillRect(x, 0, 1, 4); }
  });
  const left = (view.from - low) / (high - low) * wide, right = (view.to - low) / (high - low) * wide;
  context.fillStyle = colours.back;
  context.globalAlpha = 0.65;
  context.fillRect(0, 0, left, 27);
  context.fillRect(right, 0, wide, 27);
  context.globalAlpha = 1;
  context.strokeStyle = colours.text;
  context.strokeRect(left + 0.5, 0.5, Math.max(right - left - 1, 3), 26);
}

function show(from, to) {
  const [low, high] = extent(view.axis), least = view.axis === "steps" ? 8 : Math.max((high - low) * 1e-6, 1e-3);
  const span = Math.min(Math.max(to - from, Math.min(least, high - low)), high - low);
  view.from = Math.min(Math.max((from + to - span) / 2, low), high - span);
  view.to = view.from + span;
  byId("tip").hidden = true;
  redraw();
}

function zoom(factor, share = 0.5) {
  const span = view.to - view.from, at = view.from + share * span;
  show(at - share * span * factor, at + (1 - share) * span * factor);
}

const move = share => show(view.from + share * (view.to - view.from), view.to + share * (view.to - view.from));

/** Change the axis and keep the steps in view. */
function setAxis(axis) {
  const columns = bins(view, Math.floor(width()));
  const first = columns.from[0], last = Math.max(first, columns.to[columns.width - 1] - 1);
  view.axis = axis;
  for (const button of document.querySelectorAll("[data-axis]")) button.setAttribute("aria-pressed", button.dataset.axis === axis);
  if (axis === "steps") show(first, last + 1); else show(data.began[first], data.ended[last]);
}

function jump(direction) {
  const middle = stepAt(GUTTER + width() / 2);
  for (let step = middle + direction; step >= 0 && step < count; step += direction) {
    if (!data.preempted[step] && !data.late[step]) continue;
    const span = Math.min(view.to - view.from, view.axis === "steps" ? 120 : 120 * (extent("time")[1] - extent("time")[0]) / count);
    const at = view.axis === "steps" ? step + 0.5 : (data.began[step] + data.ended[step]) / 2;
    return show(at - span / 2, at + span / 2);
  }
}

/** Follow a request (an index, -1 for none) and bring it into view if `go`. */
function follow(request, go) {
  followed = pinned = request;
  const residencies = [...data.residencyRequest.keys()].filter(residency => data.residencyRequest[residency] === request);
  const back = residencies.filter(residency => facts.exits[data.residencyExit[residency]] === "preempted").length;
  byId("found").textContent = request < 0 ? "" : `${facts.requests[request]}: in a slot ${plural(residencies.length, "time")}, ${plural(back, "preemption")}`;
  if (go && residencies.length) {
    const first = Math.min(...residencies.map(residency => data.residencyStart[residency])), last = Math.max(...residencies.map(residency => data.residencyEnd[residency]));
    const [from, to] = view.axis === "steps" ? [first, last + 1] : [data.began[first], data.ended[last]];
    show(from - 0.1 * (to - from), to + 0.1 * (to - from));
  }
  redraw();
}

const plural = (number, word) => `${number} ${word}${number === 1 ? "" : "s"}`;

function stepAt(x) {
  const at = view.from + (x - GUTTER) / width() * (view.to - view.from);
  if (view.axis === "steps") return Math.min(Math.max(Math.floor(at), 0), count - 1);
  return Math.min(firstWhere(0, count, step => data.ended[step] > at), count - 1);
}

// Details under the cursor ------------------------------------------------------------------------------------

function slotText(slot, step) {
  const residency = residencyAt(slot, step), cell = slot * count + step;
  const words = { decode2: "decode", unscheduled: "not scheduled: waits for budget or blocks", overrun: "computed, but its request had ended", loading: "KV is being loaded", draining: "revoked" };
  const kind = facts.kinds[data.cells[cell]];
  let text = `slot ${slot}: ${words[kind] || kind}`;
  if (data.chunks.has(cell)) text += `, ${plural(data.chunks.get(cell), "token")}`;
  const forced = data.forcedCells?.[cell] || 0, drafted = (data.draftedCells?.[cell] || 0) - forced;
  if (drafted) text += `, ${data.acceptedCells[cell] - forced} of ${plural(drafted, "draft")} accepted`;
  if (forced) text += `, ${plural(forced, "token")} forced by its grammar`;
  const load = loadAt(slot, step, residency);
  if (load >= 0) text += `\n${loadText(load)}`;
  if (residency < 0) return text;
  const exit = facts.exits[data.residencyExit[residency]], end = data.residencyEnd[residency];
  text += `\nrequest ${facts.requests[data.residencyRequest[residency]]}, gen ${data.residencyGen[residency]}${data.residencyReturned[residency] ? ", returned after a preemption" : ""}`;
  text += `\nin the slot from step ${name(data.residencyStart[residency])} to ${name(end)}${exit === "open" ? ", still running" : `: ${exit}`}`;
  if (data.residencyTokens[residency]) text += `\n${data.residencyTokens[residency].toLocaleString("en")} tokens at the start, ${data.residencyComputed[residency].toLocaleString("en")} of them with KV`;
  return text;
}

function loadText(load) {
  const at = values => values[load], host = at(data.loadFromHost), stored = at(data.loadLoaded) - host;
  return `${at(data.loadLoaded)} of ${plural(at(data.loadBlocks), "block")} loaded for ${facts.requests[at(data.loadRequest)]} in `
    + `${duration(at(data.loadEnded) - at(data.loadBegan))}: ${host} from the host, ${stored} from the store`;
}

/** The decisions between loading and recomputing, with their estimates and results. */
function listDecisions() {
  const total = data.decisionStep.length, shown = Math.min(total, 1000), loads = sum(data.decisionLoad);
  if (!total) return;
  const place = byId("decisions"), body = place.querySelector("tbody"), estimate = ms => ms === ms ? duration(ms) : "not measured yet";
  place.hidden = false;
  place.querySelector("summary").textContent = `Load or recompute: ${plural(total, "decision")}, ${loads} to load`
    + (shown < total ? `; the last ${shown}` : "");
  const taken = new Set();
  for (let decision = total - shown; decision < total; decision++) {
    const request = data.decisionRequest[decision], step = data.decisionStep[decision], load = !data.decisionLoad[decision] ? -1
      : data.loadRequest.findIndex((who, index) => who === request && data.loadStep[index] >= step && !taken.has(index));
    if (load >= 0) taken.add(load);
    const row = body.insertRow();
    for (const text of [name(step), facts.requests[request], data.decisionLoad[decision] ? "load" : "recompute", data.decisionHost[decision],
      data.decisionStore[decision], data.decisionTokens[decision].toLocaleString("en"), estimate(data.decisionLoadTime[decision]), estimate(data.decisionTime[decision]),
      load < 0 ? "–" : plural(data.loadLoaded[load], "block"), load < 0 ? "–" : duration(data.loadEnded[load] - data.loadBegan[load])]) {
      row.insertCell().textContent = text;
    }
    row.onclick = () => follow(request, true);
  }
}

function details(step, slot) {
  const tip = byId("tip"), at = values => values[step].toLocaleString("en");
  const rows = [
    ["step time", duration(data.time[step])],
    ["since the step before", step ? duration(Math.max(data.began[step] - data.ended[step - 1], 0)) : "–"],
    ["budget", `${at(data.used)} of ${at(data.limit)}`],
    ["prefill, decode, drafts", `${at(data.prefillTokens)}, ${at(data.decodeTokens)}, ${at(data.drafted)}`],
    ["delivered", plural(data.delivered[step], "token")],
    ["KV owned, fenced", `${at(data.owned)}, ${at(data.fenced)}`],
    ["KV cached, free", `${at(data.cached)}, ${at(data.free)}`],
    ["waiting", at(data.waiting)],
  ];
  if (data.loadsEnded[step]) rows.push(["loads ended, tokens", `${at(data.loadsEnded)}, ${at(data.loadedTokens)}`]);
  if (data.declined[step]) rows.push(["recomputed, not loaded", plural(data.declined[step], "request")]);
  if (data.recomputedTokens[step]) rows.push(["to recompute", plural(data.recomputedTokens[step], "token")]);
  if (data.savedBlocks[step]) rows.push(["saved", plural(data.savedBlocks[step], "KV block")]);
  const drafted = data.drafted[step] - data.forced[step];
  if (drafted) rows.push(["drafts accepted", `${at(data.acceptedDrafts)} of ${drafted.toLocaleString("en")}`]);
  if (data.forced[step]) rows.push(["forced by grammars", plural(data.forced[step], "token")]);
  for (const event of ["admitted", "returned", "preempted", "aborted", "late", "finished"]) {
    if (data[event][step]) rows.push([event === "late" ? "revoked after the end" : event, at(data[event])]);
  }
  if (data.missing[step]) rows.push(["steps missing before", at(data.missing)]);
  const table = document.createElement("table");
  for (const cells of rows) for (const [index, text] of cells.entries()) {
    (index ? table.rows[table.rows.length - 1] : table.insertRow()).insertCell().textContent = text;
  }
  const head = document.createElement("b");
  head.textContent = `step ${name(step)} at ${(data.ended[step] / 1000).toFixed(3)} s`;
  tip.replaceChildren();
  if (slot >= 0) tip.appendChild(document.createElement("p")).textContent = slotText(slot, step);
  tip.append(head, table);
  tip.hidden = false;
}

function hover(event, panel) {
  const box = panel.canvas.getBoundingClientRect(), x = event.clientX - box.left;
  const outside = x < GUTTER || x > GUTTER + width() || !count;
  cursor = outside ? null : { ...cursor, x };
  const tip = byId("tip");
  tip.hidden = true;
  const inSlots = panel.draw === drawSlots && !outside;
  const lane = Math.min(Math.floor((event.clientY - box.top) / laneHeight()), data.laneSlots.length - 1);
  const slot = inSlots ? data.laneSlots[Math.max(lane, 0)] : -1;
  const residency = slot >= 0 ? residencyAt(slot, stepAt(x)) : -1;
  if (pinned < 0) followed = residency >= 0 ? data.residencyRequest[residency] : -1;
  if (!outside) {
    details(stepAt(x), slot);
    const left = event.clientX + 16 + tip.offsetWidth > innerWidth ? event.clientX - 16 - tip.offsetWidth : event.clientX + 16;
    tip.style.left = `${Math.max(left, 4)}px`;
    tip.style.top = `${Math.max(Math.min(event.clientY + 12, innerHeight - tip.offsetHeight - 6), 4)}px`;
  }
  redraw();
  return residency;
}

// Hands -------------------------------------------------------------------------------------------------------

function listen(panel) {
  const { canvas } = panel, pointers = new Map();
  let start = null, pinch = 0;
  canvas.addEventListener("pointerdown", event => {
    canvas.setPointerCapture(event.pointerId);
    pointers.set(event.pointerId, event.offsetX);
    start = { x: event.offsetX, from: view.from, to: view.to, range: event.shiftKey, moved: false };
    pinch = 0;
    if (event.shiftKey) cursor = { x: event.offsetX, drag: event.offsetX };
  });
  canvas.addEventListener("pointermove", event => {
    if (pointers.has(event.pointerId)) pointers.set(event.pointerId, event.offsetX);
    if (pointers.size === 2) {
      const [one, two] = pointers.values(), apart = Math.max(Math.abs(one - two), 8);
      if (pinch) zoom(pinch / apart, ((one + two) / 2 - GUTTER) / width());
      pinch = apart;
      return;
    }
    if (start && pointers.size) {
      start.moved ||= Math.abs(event.offsetX - start.x) > 3;
      if (start.moved && !start.range) {
        const shift = (start.x - event.offsetX) / width() * (start.to - start.from);
        show(start.from + shift, start.to + shift);
      }
    }
    hover(event, panel);
  });
  const lift = event => {
    pointers.delete(event.pointerId);
    if (start?.range && start.moved) {
      const unit = (start.to - start.from) / width(), ends = [start.x, event.offsetX].sort((one, two) => one - two);
      cursor = null;
      show(start.from + (ends[0] - GUTTER) * unit, start.from + (ends[1] - GUTTER) * unit);
    } else if (start && !start.moved && event.type === "pointerup") {
      const residency = hover(event, panel);
      follow(residency >= 0 ? data.residencyRequest[residency] : -1, false);
    }
    start = null;
    if (cursor) delete cursor.drag;
  };
  canvas.addEventListener("pointerup", lift);
  canvas.addEventListener("pointercancel", lift);
  canvas.addEventListener("pointerleave", () => { cursor = null; byId("tip").hidden = true; if (pinned < 0) followed = -1; redraw(); });
  canvas.addEventListener("wheel", event => {
    if (event.ctrlKey || event.metaKey) zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) * 0.008), (event.offsetX - GUTTER) / width());
    else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) move((event.deltaX || event.deltaY) / width());
    else return;
    event.preventDefault();
  }, { passive: false });
}

function listenToPage() {
  const keys = { ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2), "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6),
    0: () => show(...extent(view.axis)), n: () => jump(1), p: () => jump(-1), Escape: () => follow(-1, false) };
  addEventListener("keydown", event => {
    if (event.target.tagName === "INPUT" || event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });
  const zooms = { in: keys["+"], out: keys["-"], all: keys[0] };
  for (const button of document.querySelectorAll("[data-zoom]")) button.onclick = zooms[button.dataset.zoom];
  for (const button of document.querySelectorAll("[data-axis]")) button.onclick = () => setAxis(button.dataset.axis);
  for (const button of document.querySelectorAll("[data-jump]")) button.onclick = () => jump(+button.dataset.jump);
  byId("tall").hidden = laneHeight() >= 14;
  byId("tall").onclick = event => {
    view.tall = !view.tall;
    event.target.setAttribute("aria-pressed", view.tall);
    redraw();
  };
  const empty = numSlots - data.busySlots.length;
  byId("empty").hidden = !empty || !data.busySlots.length;
  byId("empty").textContent = plural(empty, "empty slot");
  byId("empty").onclick = event => {
    const all = data.laneSlots.length < numSlots;
    event.target.setAttribute("aria-pressed", all);
    showSlots(all);
    byId("tall").hidden = !view.tall && laneHeight() >= 14;
    redraw();
  };
  byId("theme").onclick = () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  byId("find").oninput = event => {
    const wanted = event.target.value.trim(), found = facts.requests.indexOf(wanted);
    byId("ids").replaceChildren(...facts.requests.filter(id => wanted && id.includes(wanted)).slice(0, 30).map(id => new Option(id)));
    follow(found, found >= 0);
    if (wanted && found < 0) byId("found").textContent = "no such request";
  };
  const overview = byId("overview"), centre = event => {
    const [low, high] = extent(view.axis), at = low + event.offsetX / overview.clientWidth * (high - low), span = view.to - view.from;
    show(at - span / 2, at + span / 2);
  };
  overview.onpointerdown = event => { overview.setPointerCapture(event.pointerId); centre(event); };
  overview.onpointermove = event => { if (event.buttons) centre(event); };
  addEventListener("resize", redraw);
}

function theme(which) {
  document.documentElement.dataset.theme = which;
  readColours();
  redraw();
}

function build() {
  for (const panel of panels) {
    const section = document.createElement("section"), head = document.createElement("h2");
    head.textContent = panel.title;
    for (const [colour, label] of panel.keys || []) {
      const key = head.appendChild(document.createElement("span")), swatch = key.appendChild(document.createElement("i"));
      swatch.style.background = `var(--${colour})`;
      key.append(label);
    }
    panel.canvas = document.createElement("canvas");
    panel.canvas.setAttribute("role", "img");
    panel.canvas.setAttribute("aria-label", `${panel.title || "axis"} over the steps`);
    section.append(...(panel.title ? [head] : []), panel.canvas);
    byId("panels").append(section);
    listen(panel);
  }
}

function introduce() {
  const head = facts.headers[0], limits = head.limits;
  document.title = `${facts.title} – fd_core trace`;
  byId("model").textContent = head.model;
  const when = new Date(head.started * 1000).toISOString().slice(0, 19).replace("T", " ");
  byId("about").textContent = [`${head.backend} (${head.device})`, `${limits.max_num_seqs} slots`, `budget ${limits.max_num_batched_tokens.toLocaleString("en")}`,
    `${limits.num_kv_blocks.toLocaleString("en")} KV blocks of ${limits.block_size}`, plural(limits.pipeline_depth, "step") + " in flight",
    ...(head.speculation ? [`${head.speculation}, up to ${plural(limits.max_drafts, "draft")}`] : []),
    ...(facts.headers.length > 1 ? [plural(facts.headers.length, "epoch")] : []), `started ${when} UTC`].join(" · ");
  for (const problem of facts.problems) byId("problems").appendChild(document.createElement("li")).textContent = problem;
  for (const [label, text] of figures()) {
    const pair = byId("figures").appendChild(document.createElement("div"));
    pair.appendChild(document.createElement("dt")).textContent = label;
    pair.appendChild(document.createElement("dd")).textContent = text;
  }
}

async function start() {
  await unpack();
  for (let index = panels.length - 1; index >= 0; index--) {
    if (panels[index].needs && !sum(data[panels[index].needs])) panels.splice(index, 1);
  }
  for (const panel of panels) panel.lanes = panel.lanes?.filter(lane => !lane.needs || sum(data[lane.needs]));
  // A link may name what to show: #from=10&to=200&axis=time&theme=dark&request=ID
  const wish = new URLSearchParams(location.hash.slice(1));
  document.documentElement.dataset.theme = wish.get("theme") || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  introduce();
  build();
  listDecisions();
  listenToPage();
  readColours();
  show(...(wish.has("to") ? [+wish.get("from"), +wish.get("to")] : extent("steps")));
  if (wish.get("axis") === "time") setAxis("time");
  if (wish.has("request")) follow(facts.requests.indexOf(wish.get("request")), !wish.has("to"));
}

start().catch(error => { byId("about").textContent = `The page cannot be shown: ${error.message}`; });
