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
  document.title = `${raw.models[0]} · fd_core`;
  byId("about").textContent = `${engine.architecture} · ${engine.backend} · ${engine.device} · ${engine.dtype} · fd_core ${raw.version}`;
  byId("state").textContent = raw.not_ready ? `Not ready: ${raw.not_ready}.` : raw.missing ? `Ready, but ${raw.missing}.` : "Ready.";
  byId("state").className = raw.not_ready || raw.missing ? "bad" : "";
  const proposed = sum(drafts.proposed_per_position);
  showFigures(byId("figures"), [
    ["running", `${whole(sample.running)} of ${whole(engine.max_num_seqs)}`], ["waiting", whole(slots.waiting)],
    ["tokens/s", maybe(sample.generated, compact)], ["prompt tokens/s", maybe(sample.prompt, compact)],
    ["first token, median", maybe(sample.ttft50, duration)], ["per output token, median", maybe(sample.tpot50, duration)],
    ["KV in use", percent(sample.kv)], ["preemptions", whole(counters.preemptions)],
    ["prompt tokens from the prefix cache", counters.prefix_queries ? percent(counters.prefix_hits / counters.prefix_queries) : "–"],
    ...(proposed ? [["drafts accepted", percent(sum(drafts.accepted_per_position) / proposed)]] : []),
    ["engine starts", whole(engine.epoch), engine.epoch > 1],
  ]);
  byId("slotsText").textContent = `${whole(slots.running)} running, ${whole(slots.loading)} loading, ${whole(slots.draining)} draining, of ${whole(engine.max_num_seqs)}`;
  drawBar(byId("slots"), [["running", slots.running, "decode"], ["loading", slots.loading, "loading"], ["draining", slots.draining, "draining"]], engine.max_num_seqs);
  byId("blocksText").textContent = `${whole(blocks.used)} owned, ${whole(blocks.fenced)} fenced, ${whole(blocks.cached)} free with a prefix, of ${whole(blocks.total)}`;
  drawBar(byId("blocks"), [["owned", blocks.used, "decode"], ["fenced", blocks.fenced, "draining"], ["free, holds a prefix", blocks.cached, "cached"]], blocks.total);
}

async function refresh() {
  if (document.hidden) return;
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

followTheme(byId("theme"));
makeCurves(byId("curves"), CURVES);
refresh();
setInterval(refresh, 1000);
