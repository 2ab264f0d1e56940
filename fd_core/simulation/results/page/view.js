// What the page shows: one place on the axes at a time, chosen at its top; a map and load curves go over several.

const facts = JSON.parse(byId("facts").textContent);
const COLOURS = ["prefill", "draining", "decode", "loading", "overrun", "unscheduled", "cached", "limit"];
const figures = new Map(facts.figures.map(([name, title, unit, better]) => [name, { name, title, unit, better }]));
// Cases and comparisons name figures and axes by their places.
const named = values => Object.fromEntries(facts.names.map((name, index) => [name, values[index]]));
for (const one of facts.cases) Object.assign(one, { at: named(one.at), figures: Object.fromEntries(one.figures.map((span, index) => [facts.figures[index][0], span ?? undefined])) });
for (const found of facts.comparisons) Object.assign(found, { at: named(found.at), differences: found.differences.map(([figure, index, span, verdict]) => [facts.figures[figure][0], index, span, facts.verdicts[verdict]]) });
const axes = Object.entries(facts.axes);
const at = Object.fromEntries(axes.map(([name, values]) => [name, values[Math.floor((values.length - 1) / 2)]]));
let setting = 0, mapped = figures.has("goodput") ? "goodput" : "ttft_p99", mapX = null, mapY = null, striped = "kv_use", tail = false, every = false, slowest = false;

// What all names of settings begin with, up to a "=" in it, says nothing about one of them.
const [someName = ""] = facts.settings, alike = [...someName].findIndex((letter, i) => facts.settings.some(name => name[i] !== letter));
const shared = facts.settings.length > 1 ? someName.slice(0, someName.slice(0, alike < 0 ? someName.length : alike).lastIndexOf("=") + 1) : "";
facts.settings = facts.settings.map(name => name.slice(shared.length));

const colourOf = index => COLOURS[index % COLOURS.length];
const digits = value => value >= 1000 ? whole(value) : `${+value.toPrecision(3)}`;
const seconds = value => value >= 1 || value === 0 ? `${digits(value)} s` : value >= 1e-3 ? `${digits(1e3 * value)} ms` : `${digits(1e6 * value)} µs`;
const plain = value => Math.abs(value) >= 1000 ? whole(value) : `${+value.toPrecision(4)}`;
const size = (figure, value) => figure.unit === "s" ? seconds(value) : figure.unit === "share" ? percent(value) : `${plain(value)}${figure.unit}`;
const textOf = (figure, value) => (value < 0 ? "−" : "") + size(figure, Math.abs(value));
const axisText = value => typeof value === "number" ? plain(value) : value;
const placeText = (values, without = []) => axes.filter(([name]) => !without.includes(name)).map(([name]) => `${name} ${axisText(values[name])}`).join(", ");
const isAt = (values, without = []) => axes.every(([name]) => without.includes(name) || values[name] === at[name]);
const here = (without = []) => facts.cases.filter(one => isAt(one.at, without));
const nameOf = one => [facts.settings[one.setting], placeText(one.at)].filter(Boolean).join(", ");

function cell(figure, span) {
  const made = element("td", span ? textOf(figure, span[0]) : "–");
  if (span?.length === 3) made.append(element("small", `±${textOf(figure, (span[2] - span[1]) / 2)}`));
  return made;
}

function chooser(place, label, values, chosen, choose) {
  const around = place.appendChild(element("label", `${label} `)), select = around.appendChild(element("select"));
  values.forEach(([value, text]) => { const option = select.appendChild(element("option", text)); option.value = value; option.selected = value === chosen; });
  select.addEventListener("change", () => choose(values[select.selectedIndex][0]));
}

function tableOf(head, rows) {
  const table = element("table"), top = table.appendChild(element("thead")).appendChild(element("tr"));
  head.forEach(text => top.append(element("th", text, { scope: "col" })));
  const body = table.appendChild(element("tbody"));
  for (const row of rows) {
    const line = body.appendChild(element("tr"));
    row.forEach((each, index) => line.append(each instanceof Node ? each : element(index ? "td" : "th", each, index ? {} : { scope: "row" })));
  }
  return table;
}

function keyed(index, text) {
  const made = element("th", null, { scope: "row" });
  made.append(element("i", null, { class: "key", style: `background: var(--${colourOf(index)})` }), text);
  return made;
}

function showHead() {
  document.title = `${facts.title} · fd_core simulation`;
  byId("title").textContent = facts.title;
  byId("about").textContent = "simulated by fd_core";
  if (facts.calculated.length) {
    byId("calculated").hidden = false;
    byId("calculated").append(element("b", "CALCULATED, NEVER MEASURED"), `No device was timed for this: the times of steps rest on ${facts.calculated.join("; ")}. Trust the order of settings more than the seconds.`);
  }
  showFigures(byId("figures"), [
    ["SLO", facts.slo ?? "none given"], [shared.slice(0, -1) || "settings", facts.settings.length === 1 ? facts.settings[0] : `${facts.settings.length} values`], ...axes.map(([name, values]) => [name, `${values.length} values`]),
    [facts.seeds.length > 1 ? "seeds" : "seed", facts.seeds.length > 6 ? `${facts.seeds.length}: ${facts.seeds[0]} to ${facts.seeds.at(-1)}` : facts.seeds.join(", ")],
    ["costs of steps", facts.profiles.join("; ")],
  ]);
  const nav = byId("places");
  nav.hidden = !axes.length;
  for (const [name, values] of axes) chooser(nav, name, values.map(value => [value, axisText(value)]), at[name], value => { at[name] = value; showPlace(); });
  byId("settings").append(tableOf(["setting", "value"], facts.about.map(([name, value]) => [name, element("td", value, { class: "left" })])));
  if (!facts.about.length) byId("settings").replaceChildren(element("p", "No settings were noted.", { class: "faint" }));
  if (facts.command) byId("command").append("Made by ", element("code", facts.command));
  const traces = Object.entries(facts.traces);
  byId("traces").append(traces.length ? "Slots, step by step: " : "Slots, step by step, are in a production trace: have the simulation write one (--trace), and `fdcore trace FILE` makes its page.");
  traces.forEach(([name, path], index) => byId("traces").append(index ? ", " : "", element("a", name, { href: path })));
}

function showTable() {
  const cases = facts.cases, columns = [...figures.values()].filter(figure => cases.some(one => one.figures[figure.name]));
  const place = byId("summary");
  byId("tableAbout").textContent = facts.seeds.length > 1 ? `means of ${facts.seeds.length} seeds, ± half of the interval` : "";
  if (cases.length === 1) {
    const list = element("dl", null, { class: "figures many" });
    showFigures(list, columns.map(figure => [figure.title, cell(figure, cases[0].figures[figure.name]).textContent.replace("±", " ± ")]));
    place.replaceChildren(list);
    return;
  }
  if (cases.length <= 4) {
    const rows = columns.map(figure => [figure.title, ...cases.map(one => cell(figure, one.figures[figure.name]))]);
    if (facts.slo) rows.unshift(["SLO", ...cases.map(one => element("td", one.held ? "holds" : "broken", { class: one.held ? "good" : "bad" }))]);
    place.replaceChildren(tableOf(["", ...cases.map(nameOf)], rows));
    return;
  }
  const table = tableOf(["", ...(facts.slo ? ["SLO"] : []), ...columns.map(figure => figure.title)], cases.map(one => [
    keyed(one.setting, nameOf(one)), ...(facts.slo ? [element("td", one.held ? "holds" : "broken", { class: one.held ? "good" : "bad" })] : []),
    ...columns.map(figure => cell(figure, one.figures[figure.name]))]));
  table.querySelectorAll("tbody tr").forEach((row, index) => row.classList.toggle("here", isAt(cases[index].at)));
  place.replaceChildren(table);
  place.style.maxHeight = "28rem";
}

function showWinner() {
  const found = facts.comparisons.find(each => isAt(each.at));
  byId("winner").hidden = !found;
  if (!found) return;
  byId("words").textContent = found.words;
  byId("words").className = found.wins ? "good" : "";
  byId("every").setAttribute("aria-pressed", every);
  const of = new Map(here().map(one => [one.setting, one.figures])), base = of.get(found.base);
  const place = [...figures.keys()], kept = found.differences.filter(([name]) => base[name] && of.size && (every || facts.usual.includes(name)));
  kept.sort((one, other) => place.indexOf(one[0]) - place.indexOf(other[0]) || one[1] - other[1]);
  const parts = kept.flatMap(([name, , span]) => span.map(value => Math.abs(value / base[name][0]))).filter(Number.isFinite);
  const most = Math.min(Math.max(...parts, 0.01), 1);
  byId("forest").replaceChildren(tableOf(["", facts.settings[found.base], "", "", `−${percent(most)} to +${percent(most)}`, "", "difference, 95 % interval"], kept.map(([name, index, span, verdict], i) => {
    const figure = figures.get(name), kind = { better: "good", worse: "bad" }[verdict] ?? "noise", ink = { better: "decode", worse: "limit" }[verdict] ?? "faint";
    const drawing = svg("svg", { viewBox: "0 0 200 16", width: 200, height: 16, "aria-hidden": "true" }), x = value => 100 + 96 * Math.max(-1, Math.min(1, value / base[name][0] / most || 0));
    drawing.append(svg("line", { x1: 100, x2: 100, y1: 0, y2: 16, style: "stroke: var(--line)" }));
    if (span.length === 3) drawing.append(svg("line", { x1: x(span[1]), x2: x(span[2]), y1: 8, y2: 8, style: `stroke: var(--${ink}); stroke-width: 3; opacity: .5` }));
    drawing.append(svg("circle", { cx: x(span[0]), cy: 8, r: 4, style: `fill: var(--${ink})` }));
    const around = element("td"), equal = span.every(value => value === 0), first = i === 0 || kept[i - 1][0] !== name;
    around.append(drawing);
    const words = `${span[0] >= 0 ? "+" : ""}${textOf(figure, span[0])}`, within = span.length === 3 ? ` [${textOf(figure, span[1])}, ${textOf(figure, span[2])}]` : "";
    return [first ? figure.title : "", first ? cell(figure, base[name].slice(0, 1)) : "", keyed(index, facts.settings[index]), cell(figure, of.get(index)?.[name]?.slice(0, 1)), around, element("td", equal ? "equal" : verdict, { class: `left ${equal ? "noise" : kind}` }), element("td", equal ? "" : words + within, { class: "left" })];
  })));
}

function showLoad() {
  const load = facts.load, curves = facts.loadCurves.filter(([, values]) => isAt(values, [load]));
  byId("load").hidden = !curves.length;
  if (!curves.length) return;
  const rates = facts.axes[load], place = byId("loadPlots"), others = here([load]);
  const lineOf = (index, name) => ({ label: facts.settings[index], colour: colourOf(index), dots: true,
    points: rates.map(rate => { const span = others.find(one => one.setting === index && one.at[load] === rate)?.figures[name]; return span ? [rate, ...span] : null; }) });
  const marks = [...new Set(curves.map(([, , knee]) => knee).filter(known))].map(knee => {
    const own = curves.filter(each => each[2] === knee), names = own.length > 1 && own.length === curves.length ? "all" : own.map(([index]) => facts.settings[index]).join(", ");
    return { x: knee, label: `${names.length > 30 ? "knee" : `knee of ${names}`}: ${plain(knee)}/s`, colour: own.length > 1 ? "text" : colourOf(own[0][0]) };
  });
  place.replaceChildren();
  for (const name of ["ttft_p99", "goodput", "requests_per_s", "tpot_p99"]) {
    const figure = figures.get(name), limit = facts.limits[name];
    if (!figure || (name === "requests_per_s" && figures.has("goodput"))) continue;
    plot(place, { title: figure.title, steps: rates.map(rate => `at ${plain(rate)}/s`), lines: curves.map(([index]) => lineOf(index, name)), marks,
      x: { format: value => `${plain(value)}/s` }, y: { format: value => textOf(figure, value), wide: figure.unit === "s" }, read: "y",
      limits: limit ? [{ of: "y", at: limit, label: `limit ${seconds(limit)}` }] : [] });
  }
  byId("knees").replaceChildren(...curves.map(([index, , knee, words]) => element("li", `${facts.settings[index]}: ${knee === null ? words : `knee at ${plain(knee)}/s, ${words}`}`)));
}

function showMap() {
  byId("heat").hidden = axes.length < 2;
  if (axes.length < 2) return;
  const names = axes.map(([name]) => name);
  mapX ??= names[0];
  mapY ??= names[1];
  const row = byId("heatRow"), figure = figures.get(mapped), again = () => showMap();
  const focused = [...row.querySelectorAll("select")].indexOf(document.activeElement);
  row.replaceChildren();
  chooser(row, "colour", [...figures.values()].map(each => [each.name, each.title]), mapped, value => { mapped = value; again(); });
  if (facts.settings.length > 1) chooser(row, "setting", facts.settings.map((name, index) => [index, name]), setting, value => { setting = value; showPlace(); });
  if (names.length > 2) {
    chooser(row, "across", names.map(name => [name, name]), mapX, value => { if (value === mapY) mapY = mapX; mapX = value; again(); });
    chooser(row, "down", names.map(name => [name, name]), mapY, value => { if (value === mapX) mapX = mapY; mapY = value; again(); });
  }
  if (focused >= 0) row.querySelectorAll("select")[focused]?.focus();
  const cases = here([mapX, mapY]).filter(one => one.setting === setting), values = cases.map(one => one.figures[mapped]?.[0]).filter(known);
  const low = Math.min(...values), high = Math.max(...values), bend = low > 0 && high / low > 20 ? Math.log : value => value;
  const strength = value => { const part = high === low ? 0 : (bend(value) - bend(low)) / (bend(high) - bend(low)); return figure.better === false ? 1 - part : part; };
  const best = figure.better === null ? null : figure.better ? high : low;
  const table = tableOf([`${mapY} ↓ ${mapX} →`, ...facts.axes[mapX].map(axisText)], facts.axes[mapY].map(down => [axisText(down), ...facts.axes[mapX].map(across => {
    const one = cases.find(each => each.at[mapX] === across && each.at[mapY] === down), value = one?.figures[mapped]?.[0];
    if (!known(value)) return element("td", "–");
    const made = element("td", `${one.held ? "✓ " : ""}${textOf(figure, value)}`, { style: `background: color-mix(in srgb, var(--decode) ${(8 + 52 * strength(value)).toFixed(0)}%, var(--back))`, title: `${nameOf(one)}: ${textOf(figure, value)}` });
    if (value === best) made.className = "best";
    return made;
  })]));
  byId("map").replaceChildren(table);
  const fixed = placeText(at, [mapX, mapY]);
  byId("heatAbout").textContent = `${figure.title}${fixed ? ` at ${fixed}` : ""}; stronger colour is ${figure.better === null ? "more" : "better"}${best === null ? "" : ", the frame is the best"}.${facts.slo ? " ✓ holds the SLO." : ""}`;
}

function showCurves() {
  const cases = here().filter(one => one.curves).slice(0, COLOURS.length), place = byId("curvePlots");
  byId("curves").hidden = !cases.length;
  place.replaceChildren();
  byId("tail").setAttribute("aria-pressed", tail);
  for (const [name, title] of Object.entries(facts.measures)) {
    const lines = cases.filter(one => one.curves[name]).map(one => ({ label: facts.settings[one.setting], colour: colourOf(one.setting), points: one.curves[name].map((value, i) => [value, facts.shares[i] / 100]) }));
    const limits = Object.entries(facts.limits).filter(([limit]) => limit.split("_")[0] === name).map(([limit, value]) => ({ of: "x", at: value, label: `${limit} ${seconds(value)}` }));
    if (lines.length) plot(place, { title, steps: facts.shares.map(share => `${share} %`), lines, limits,
      x: { format: seconds, wide: true }, y: { format: share => `${+(100 * share).toPrecision(4)} %`, low: 0, high: 1, kind: tail ? "tail" : "linear" }, read: "x" });
  }
}

const WAIT_COLOURS = {
  computing: "decode", slot: "prefill", blocks: "draining", budget: "unscheduled", preempted: "limit", store: "loading", transfer: "overrun", prefix: "cached",
  step: "drafts", front: "max", network: "faint", retry: "mark", restart: "text", scheduler: "decode2", grammar: "decode2", engine: "max",
};

function showWaits() {
  const cases = here().filter(one => one.waits?.length), bars = byId("waitBars"), reasons = [...new Set(cases.flatMap(one => one.waits.map(([reason]) => reason)))];
  byId("waits").hidden = !cases.length;
  byId("slowest").setAttribute("aria-pressed", slowest);
  byId("waitAbout").textContent = `means of ${slowest ? "the slowest 1 % of " : ""}completed requests${facts.seeds.length > 1 ? `, seed ${facts.seeds[0]}` : ""}`;
  const wordsOf = reason => reason === "computing" ? "computing" : `waiting for ${facts.waits[reason]}`;
  byId("waitKeys").replaceChildren(...reasons.map(reason => {
    const key = element("span");
    key.append(element("i", null, { class: "key", style: `background: var(--${WAIT_COLOURS[reason]})` }), wordsOf(reason));
    return key;
  }));
  bars.replaceChildren();
  for (const [title, part] of [["To the first token", 1], ["Between tokens", 3]]) {
    const column = part + slowest, total = one => one.waits.reduce((sum, wait) => sum + wait[column], 0), most = Math.max(...cases.map(total), 1e-9);
    bars.append(element("h3", title));
    for (const one of cases) {
      const line = bars.appendChild(element("div", null, { class: "strip" })), parts = one.waits.filter(wait => wait[column] > 0).sort((a, b) => reasons.indexOf(a[0]) - reasons.indexOf(b[0]));
      const bar = element("div", null, { class: "bar", role: "img", "aria-label": parts.map(wait => `${wordsOf(wait[0])} ${seconds(wait[column])}`).join(", ") || "nothing" });
      for (const wait of parts) bar.append(element("i", null, { style: `width: ${100 * wait[column] / most}%; background: var(--${WAIT_COLOURS[wait[0]]})`, title: `${wordsOf(wait[0])}: ${seconds(wait[column])}` }));
      line.append(element("span", facts.settings[one.setting], { title: nameOf(one) }), bar, element("b", seconds(total(one))));
    }
  }
}

function showTime() {
  const cases = here(), row = byId("timeRow"), one = cases.find(each => each.setting === setting), focused = row.contains(document.activeElement);
  byId("time").hidden = !facts.cases.some(each => each.bins);
  row.replaceChildren();
  if (facts.settings.length > 1) chooser(row, "setting", facts.settings.map((name, index) => [index, name]), setting, value => { setting = value; showPlace(); });
  if (focused) row.querySelector("select")?.focus();
  const plots = byId("timePlots"), strips = byId("strips");
  plots.replaceChildren();
  strips.replaceChildren();
  byId("stripHead").replaceChildren();
  showDetails(one);
  if (!one?.bins) {
    byId("timeAbout").textContent = "there was no room for this one on the page, or nothing was sampled; a report of fewer cases has it";
    return;
  }
  const { bins } = one, count = bins.waiting.length, wide = (bins.end - bins.start) / count, middle = i => bins.start + (i + 0.5) * wide;
  byId("timeAbout").textContent = `${nameOf(one)}, seed ${bins.seed}; each point is a mean of ${seconds(wide)}`;
  const panel = (title, format, lines, y = {}) => plot(plots, { title, steps: bins.waiting.map((_, i) => `at ${plain(middle(i))} s`), read: "y", x: { format: value => `${plain(value)} s`, low: bins.start, high: bins.end }, y: { format, ...y },
    lines: lines.map(([label, colour, values]) => ({ label, colour, points: values.map((value, i) => [middle(i), value]) })) });
  // Bins in which few arrive are joined: a mean of one or two requests says nothing.
  const joined = Math.min(Math.max(Math.ceil(8 / Math.max(wide * bins.arrivals.reduce((sum, value) => sum + value, 0) / count, 1e-9)), 1), Math.ceil(count / 8));
  const smooth = values => values.map((_, i) => { const first = Math.floor(i / joined) * joined, part = values.slice(first, first + joined); return part.reduce((sum, value) => sum + value, 0) / part.length; });
  panel("Requests a second", value => `${plain(value)}`, [["arrive", "prefill", smooth(bins.arrivals)], ["completed", "decode", smooth(bins.completions)]]);
  panel("Requests in workers", value => `${plain(value)}`, [["running", "decode", bins.running], ["waiting", "draining", bins.waiting]]);
  panel("KV blocks in use", percent, [["mean of workers", "loading", bins.kv_use]], { low: 0, high: 1 });
  const head = byId("stripHead");
  head.append("Workers");
  for (const [name, label] of [["kv_use", "KV use"], ["running", "running"], ["waiting", "waiting"]]) {
    const button = head.appendChild(element("button", label, { "aria-pressed": name === striped }));
    button.addEventListener("click", () => { striped = name; showTime(); [...byId("stripHead").querySelectorAll("button")].find(each => each.textContent === label).focus(); });
  }
  const table = bins.strips[striped], top = striped === "kv_use" ? 1 : Math.max(...table.flat(), 1e-9), format = striped === "kv_use" ? percent : value => plain(+value.toPrecision(3));
  head.append(element("span", `from nothing to ${format(top)}, mean and most`));
  if (bins.absent.some(row => row.length)) {
    const key = head.appendChild(element("span"));
    key.append(element("i", null, { class: "key", style: "background: var(--limit)" }), "away, or loading an engine");
  }
  bins.rows.forEach((name, i) => {
    const line = strips.appendChild(element("div", null, { class: "strip" })), values = table[i], most = Math.max(...values), mean = values.reduce((sum, value) => sum + value, 0) / count;
    const drawing = svg("svg", { viewBox: `0 0 ${count} 1`, preserveAspectRatio: "none", role: "img", "aria-label": `${name}: mean ${format(mean)}, most ${format(most)}` });
    for (let from = 0, to; from < count; from = to) {
      to = from + 1;
      while (to < count && Math.abs(values[to] - values[from]) < top / 128) to++;
      if (values[from] > 0) drawing.append(svg("rect", { x: from, y: 0, width: to - from, height: 1, "fill-opacity": (0.08 + 0.92 * values[from] / top).toFixed(2) }));
    }
    const absent = bins.absent[i];
    for (let from = 0, to; from < absent.length; from = to) {
      for (to = from + 1; to < count && absent[to] === absent[from]; to++);
      if (absent[from] > 0) drawing.append(svg("rect", { class: "absent", x: from, y: 0, width: to - from, height: 1, "fill-opacity": absent[from] }));
    }
    if (absent.length) drawing.setAttribute("aria-label", `${drawing.getAttribute("aria-label")}; away for ${percent(absent.reduce((sum, share) => sum + share, 0) / count)} of the time`);
    line.append(element("span", name, { title: name }), drawing, element("b", `${format(mean)}, ${format(most)}`));
  });
}

function showDetails(one) {
  const place = byId("details"), parts = [], share = value => known(value) ? percent(value) : "–";
  const fold = (title, table, open) => { const made = element("details"); made.append(element("summary", title), element("div", null, { class: "wide" })); made.open = open; made.lastChild.append(table); parts.push(made); };
  place.hidden = !one?.workers;
  if (place.hidden) return;
  const checks = one.checks.map(([name, limit, value, held]) => [name, name === "attainment" ? share(value) : known(value) ? seconds(value) : "never", name === "attainment" ? percent(limit) : seconds(limit), element("td", held ? "holds" : "broken", { class: held ? "good" : "bad" })]);
  if (checks.length) fold("SLO", tableOf(["", "is", "limit", ""], checks), true);
  const lost = [...Object.entries(one.lost), ...Object.entries(one.reasons)];
  if (lost.length) fold("Requests that were not completed, and why", tableOf(["", "requests"], lost.map(([name, count]) => [name, whole(count)])), true);
  const spent = value => value >= 5e-7 ? seconds(value) : "–";
  if (one.waits.length) fold("Where the time of a request goes", tableOf(["", "to the first token", "slowest 1 %", "between tokens", "slowest 1 %", "not completed"], one.waits.map(([reason, ...values]) => [facts.waits[reason], ...values.map(spent)])), true);
  if (one.tenants.length) fold("Tenants", tableOf(["", "requests", "completed", "output tokens", "TTFT p99", "good"], one.tenants.map(([name, requests, completed, tokens, ttft, good]) => [name || "(no name)", whole(requests), whole(completed), whole(tokens), known(ttft) ? seconds(ttft) : "–", share(good)])), false);
  fold(`Workers${one.moreWorkers ? `, the first ${one.workers.length}` : ""}`, tableOf(["", "requests", "output tokens", "running", "waiting", "KV use", "most", "away", "restarting"], one.workers.map(([name, requests, tokens, running, waiting, use, peak, away, restarting]) => [name, whole(requests), whole(tokens), plain(+running.toPrecision(3)), plain(+waiting.toPrecision(3)), share(use), share(peak), spent(away), spent(restarting)])), false);
  place.replaceChildren(element("h2", "Details"), element("p", `${nameOf(one)}, first seed`, { class: "faint" }), ...parts);
}

function showPlace() {
  for (const show of [showTable, showWinner, showLoad, showMap, showCurves, showWaits, showTime]) show();
}

followTheme(byId("theme"));
byId("every").addEventListener("click", () => { every = !every; showWinner(); });
byId("slowest").addEventListener("click", () => { slowest = !slowest; showWaits(); });
byId("tail").addEventListener("click", () => { tail = !tail; showCurves(); });
showHead();
showPlace();
