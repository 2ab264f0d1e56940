// The trace as arrays, and questions to it. A step is named by its position in the page, 0 to count - 1.

const facts = JSON.parse(document.getElementById("facts").textContent);
const count = facts.numSteps, numSlots = facts.numSlots;
let data = {};

async function unpack() {
  const bytes = Uint8Array.from(atob(document.getElementById("data").textContent), letter => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const buffer = await new Response(stream).arrayBuffer();
  const types = { Float64Array, Int32Array, Uint8Array };
  for (const [name, [type, offset, length]] of Object.entries(facts.sections)) {
    data[name] = new types[type](buffer, offset, length);
  }
  // Neighbouring residencies of a slot are told apart by shade: one more kind for the decodes of every other gen.
  const decode = facts.kinds.indexOf("decode");
  facts.kinds.push("decode2");
  for (let residency = 0; residency < data.residencySlot.length; residency++) {
    if (data.residencyGen[residency] % 2) continue;
    const row = data.residencySlot[residency] * count;
    for (let cell = row + data.residencyStart[residency]; cell <= row + data.residencyEnd[residency]; cell++) {
      if (data.cells[cell] === decode) data.cells[cell] = facts.kinds.length - 1;
    }
  }
  // Tokens that a grammar forces are verified like drafts, and recorded among them.
  data.acceptedDrafts = data.accepted.map((accepted, step) => accepted - data.forced[step]);
  data.rejected = data.drafted.map((drafted, step) => drafted - data.accepted[step]);
  data.time = Float64Array.from(data.ended, (end, step) => end - data.began[step]);
  data.used = Float64Array.from(data.prefillTokens, (tokens, step) => tokens + data.decodeTokens[step] + data.drafted[step]);
  data.free = Float64Array.from(data.blocks, (all, step) => all - data.owned[step] - data.fenced[step] - data.cached[step]);
  // From here on: how many tokens were loaded, and how many computed again.
  const grow = values => { let total = 0; return values.map(value => total += value); };
  data.loadedSoFar = grow(data.loadedTokens);
  data.recomputedSoFar = grow(data.recomputedTokens);
  data.restored = data.loadedTokens.map((tokens, step) => tokens + data.recomputedTokens[step]);
  data.chunks = new Map();
  for (let chunk = 0; chunk < data.chunkStep.length; chunk++) {
    data.chunks.set(data.chunkSlot[chunk] * count + data.chunkStep[chunk], data.chunkTokens[chunk]);
  }
  data.firstResidency = new Int32Array(numSlots + 1);  // residencies are sorted by slot
  for (const slot of data.residencySlot) data.firstResidency[slot + 1]++;
  for (let slot = 0; slot < numSlots; slot++) data.firstResidency[slot + 1] += data.firstResidency[slot];
  const busy = new Set([...data.residencySlot, ...data.loadSlot]);
  data.busySlots = Array.from({ length: numSlots }, (_, slot) => slot).filter(slot => busy.has(slot));
  showSlots(false);
  data.tails = distinctTails(facts.requests);
}

/** Fill the lanes with the slots that a request held, or with all of them. */
function showSlots(all) {
  data.laneSlots = all || !data.busySlots.length ? Array.from({ length: numSlots }, (_, slot) => slot) : data.busySlots;
  data.slotLanes = new Int32Array(numSlots).fill(-1);
  data.laneSlots.forEach((slot, lane) => { data.slotLanes[slot] = lane; });
}

/** For each id [begin, end] of its shortest part that no other id has at that place: ids that a server makes begin and end alike. */
function distinctTails(ids) {
  const common = (one, other) => { let length = 0; while (length < one.length && one[length] === other[length]) length++; return length; };
  const backwards = ids.map((id, index) => [[...id].reverse().join(""), index]).sort(([one], [other]) => one < other ? -1 : 1);
  const last = backwards.length - 1, ending = last > 0 ? common(backwards[0][0], backwards[last][0]) : 0, tails = [];
  backwards.forEach(([text, index], at) => {
    const shared = Math.max(ending, ...[backwards[at - 1], backwards[at + 1]].filter(Boolean).map(([other]) => common(text, other)));
    tails[index] = [Math.max(text.length - shared - 1, 0), text.length > ending ? text.length - ending : text.length];
  });
  return tails;
}

const sum = values => values.reduce((total, value) => total + value, 0);

/** The smallest position in [low, high) for which `holds`, or `high`; `holds` stays true once it is. */
function firstWhere(low, high, holds) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (holds(middle)) high = middle; else low = middle + 1;
  }
  return low;
}

/** The residency in `slot` at `step`, or -1. */
function residencyAt(slot, step) {
  const begin = data.firstResidency[slot], end = data.firstResidency[slot + 1];
  const residency = firstWhere(begin, end, index => data.residencyStart[index] > step) - 1;
  return residency >= begin && data.residencyEnd[residency] >= step ? residency : -1;
}

/** The load that a slot waits for at `step`, or whose KV the residency that begins there uses; -1 if there is none. */
function loadAt(slot, step, residency) {
  for (let load = data.loadStep.length - 1; load >= 0; load--) {
    if (data.loadSlot[load] !== slot) continue;
    if (residency < 0 && data.loadBegan[load] <= data.ended[step] && data.loadStep[load] >= step) return load;
    const gap = residency < 0 ? Infinity : data.residencyStart[residency] - data.loadStep[load];
    if (residency >= 0 && data.loadRequest[load] === data.residencyRequest[residency] && Math.abs(gap) <= 4) return load;
  }
  return -1;
}

/** Figures of the whole trace, as [name, text] pairs. */
function figures() {
  const busy = sum(data.time), span = count ? data.ended[count - 1] - data.began[0] : 0;
  const sorted = Float64Array.from(data.time).sort();
  const share = (part, whole) => whole ? `${(100 * part / whole).toFixed(1)} %` : "–";
  const forced = sum(data.forced), drafted = sum(data.drafted) - forced;
  const rows = [
    ["steps", count.toLocaleString("en")],
    ["span", duration(span)],
    ["in steps", share(busy, span)],
    ["step time, median", count ? duration(sorted[count >> 1]) : "–"],
    ["99 %", count ? duration(sorted[Math.floor(count * 0.99)]) : "–"],
    ["tokens delivered", sum(data.delivered).toLocaleString("en")],
    ["budget used", share(sum(data.used), sum(data.limit))],
    ["requests finished", sum(data.finished).toLocaleString("en")],
    ["preemptions", (sum(data.preempted) + sum(data.late)).toLocaleString("en")],
    ["returns", sum(data.returned).toLocaleString("en")],
    ["aborted", sum(data.aborted).toLocaleString("en")],
  ];
  if (data.loadStep.length) rows.push(["tokens loaded", sum(data.loadedTokens).toLocaleString("en")]);
  if (sum(data.recomputedTokens)) rows.push(["tokens recomputed", sum(data.recomputedTokens).toLocaleString("en")]);
  if (drafted) rows.push(["drafts accepted", `${share(sum(data.acceptedDrafts), drafted)} of ${drafted.toLocaleString("en")}`]);
  if (forced) rows.push(["tokens forced by grammars", forced.toLocaleString("en")]);
  return rows;
}

function duration(ms) {
  if (ms >= 60000) return `${(ms / 60000).toFixed(1)} min`;
  if (ms >= 1000) return `${(ms / 1000).toFixed(ms >= 10000 ? 1 : 2)} s`;
  if (ms >= 1) return `${ms.toFixed(ms >= 100 ? 0 : ms >= 10 ? 1 : 2)} ms`;
  return ms ? `${(ms * 1000).toFixed(0)} µs` : "0";
}

function compact(value) {
  if (value >= 1e6) return `${+(value / 1e6).toFixed(1)}M`;
  if (value >= 1e4) return `${+(value / 1e3).toFixed(1)}k`;
  return `${+value.toFixed(value < 10 ? 1 : 0)}`;
}
