// What is drawn: one canvas for each panel, all over the same horizontal range, decimated to one value per pixel.

const GUTTER = 66;  // pixels at the left for numbers
const TOP = 8, BOTTOM = 6;  // pixels above and below a scale, half a number high
const SLOT_CELLS = 6e6;  // cells looked at in one frame; beyond that every n-th step of a pixel is
let colours = {};

function readColours() {
  const style = getComputedStyle(document.documentElement);
  const names = ["back", "soft", "line", "text", "faint", "mark", "limit", "drafts", "cached", "max", ...facts.kinds];
  colours = Object.fromEntries(names.map(name => [name, style.getPropertyValue(`--${name}`).trim()]));
  colours.rgb = facts.kinds.map(kind => {
    const hex = colours[kind].length === 4 ? colours[kind].replace(/\w/g, "$&$&") : colours[kind];
    return [1, 3, 5].map(at => parseInt(hex.slice(at, at + 2), 16));
  });
}

/** Resize a canvas to its place and return its context in CSS pixels. */
function surface(canvas, height) {
  const scale = window.devicePixelRatio || 1, width = canvas.clientWidth;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  context.font = "11px system-ui, sans-serif";
  return context;
}

/** For each pixel column of the view, the steps [from[x], to[x]) that it shows. */
function bins(view, width) {
  const from = new Int32Array(width), to = new Int32Array(width);
  const perPixel = (view.to - view.from) / width;
  for (let x = 0; x < width; x++) {
    const left = view.from + x * perPixel, right = left + perPixel;
    if (view.axis === "steps") {
      from[x] = Math.max(0, Math.floor(left));
      to[x] = Math.min(count, Math.max(from[x] + 1, Math.floor(right)));
    } else {
      const low = x ? from[x - 1] : 0;
      from[x] = firstWhere(low, count, step => data.ended[step] > left);
      to[x] = firstWhere(from[x], count, step => data.began[step] >= right);
    }
  }
  return { from, to, width };
}

/** Mean (NaN where there is no step) and largest value of each pixel column. */
function reduce(values, columns) {
  const mean = new Float64Array(columns.width).fill(NaN), most = new Float64Array(columns.width).fill(NaN);
  for (let x = 0; x < columns.width; x++) {
    const begin = columns.from[x], end = columns.to[x];
    if (end <= begin) continue;
    let total = 0, top = -Infinity;
    for (let step = begin; step < end; step++) {
      total += values[step];
      if (values[step] > top) top = values[step];
    }
    mean[x] = total / (end - begin);
    most[x] = top;
  }
  return { mean, most };
}

function niceCeiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10].find(step => step * power >= value * 0.9999) * power;
}

/** Where a share of a panel's scale lies, in pixels from its top. */
const yIn = (height, share) => TOP + (1 - share) * (height - TOP - BOTTOM);

function scaleLines(context, width, height, top, show) {
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const share of [0, 0.5, 1]) {
    const y = Math.round(yIn(height, share));
    context.fillStyle = colours.line;
    context.fillRect(GUTTER, y, width, 1);
    context.fillStyle = colours.faint;
    context.fillText(show(top * share), GUTTER - 6, y);
  }
}

/** Areas on top of each other as means per pixel, the largest total behind them, and a limit. */
function drawStack(panel, columns) {
  const height = panel.height, context = surface(panel.canvas, height), width = columns.width;
  const layers = panel.series.map(series => reduce(data[series.from], columns).mean);
  const peak = panel.peak ? reduce(data[panel.peak], columns).most : null;
  const limit = panel.limit ? reduce(data[panel.limit], columns).most : null;
  let top = 0;
  for (let x = 0; x < width; x++) {
    top = Math.max(top, layers.reduce((all, layer) => all + (layer[x] || 0), 0), peak?.[x] || 0);
  }
  // A limit far above what was used would flatten everything: it is named instead of drawn.
  const allowed = limit ? Math.max(1, ...limit.filter(value => value === value)) : 0, far = allowed > 4 * top;
  top = panel.exactTop ? allowed : niceCeiling(far ? top : Math.max(top, allowed));
  scaleLines(context, width, height, top, compact);
  const yOf = value => yIn(height, value / top);
  for (let x = 0; x < width; x++) {
    let base = 0;
    if (peak && peak[x] > 0) {
      context.fillStyle = colours.max;
      context.fillRect(GUTTER + x, yOf(peak[x]), 1, yOf(0) - yOf(peak[x]));
    }
    layers.forEach((layer, index) => {
      if (!(layer[x] > 0)) return;
      context.fillStyle = colours[panel.series[index].colour];
      const y = yOf(base + layer[x]);
      context.fillRect(GUTTER + x, y, 1, yOf(base) - y);
      base += layer[x];
    });
  }
  if (!limit || panel.exactTop) return;
  if (!far) return drawLine(context, limit, yOf, colours.limit, [5, 4]);
  context.fillStyle = colours.limit;
  context.textAlign = "right";
  context.fillText(`↑ limit ${allowed.toLocaleString("en")}`, GUTTER + width - 4, TOP + 8);
}

function drawLine(context, values, yOf, colour, dash = []) {
  context.strokeStyle = colour;
  context.setLineDash(dash);
  context.beginPath();
  let pen = false;
  values.forEach((value, x) => {
    if (value === value) context[pen ? "lineTo" : "moveTo"](GUTTER + x + 0.5, yOf(value));
    pen = value === value;
  });
  context.stroke();
  context.setLineDash([]);
}

/** Largest and mean step time; a few very long steps do not flatten all others, they are cut and marked. */
function drawTime(panel, columns) {
  const height = panel.height, context = surface(panel.canvas, height), width = columns.width;
  const { mean, most } = reduce(data.time, columns);
  const seen = Float64Array.from(most.filter(value => value === value)).sort();
  const usual = seen[Math.floor(seen.length * 0.98)] || 1, largest = seen[seen.length - 1] || 1;
  const top = niceCeiling(largest > 3 * usual ? 1.5 * usual : largest);
  scaleLines(context, width, height, top, duration);
  const yOf = value => yIn(height, Math.min(value, top) / top);
  for (let x = 0; x < width; x++) {
    if (mean[x] !== mean[x]) continue;
    context.fillStyle = colours.cached;
    context.fillRect(GUTTER + x, yOf(most[x]), 1, yOf(0) - yOf(most[x]));
    context.fillStyle = colours.prefill;
    context.fillRect(GUTTER + x, yOf(mean[x]), 1, yOf(0) - yOf(mean[x]));
    if (most[x] > top) {
      context.fillStyle = colours.draining;
      context.fillRect(GUTTER + x - 1, 0, 3, 4);
    }
  }
}

/** One lane for each kind of event; a bar is as high as its pixel has events, against the fullest of its lane. */
function drawEvents(panel, columns) {
  const lane = 16, context = surface(panel.canvas, panel.lanes.length * lane + 2);
  context.textBaseline = "middle";
  panel.lanes.forEach(({ from, colour, label }, index) => {
    const totals = new Float64Array(columns.width), base = (index + 1) * lane;
    let most = 1;
    for (let x = 0; x < columns.width; x++) {
      // A step that is wider than a pixel is drawn once, at its beginning.
      const begin = x && columns.from[x] === columns.from[x - 1] ? columns.from[x] + 1 : columns.from[x];
      for (const name of from) for (let step = begin; step < columns.to[x]; step++) totals[x] += data[name][step];
      most = Math.max(most, totals[x]);
    }
    context.fillStyle = colours.line;
    context.fillRect(GUTTER, base, columns.width, 1);
    context.fillStyle = colours.faint;
    context.textAlign = "right";
    context.fillText(label, GUTTER - 6, base - lane / 2 + 1);
    context.fillStyle = colours[colour];
    totals.forEach((total, x) => {
      const height = total ? 4 + (lane - 6) * total / most : 0;
      if (total) context.fillRect(GUTTER + x, base - height, columns.from[x] + 1 === columns.to[x] ? 2 : 1, height);
    });
  });
}

/** Slots over time: colours mixed by how often a pixel's steps did what; then marks, names and the followed request. */
function drawSlots(panel, columns, view, followed) {
  const lane = laneHeight(), slots = data.laneSlots, height = Math.ceil(slots.length * lane);
  const context = surface(panel.canvas, height), scale = window.devicePixelRatio || 1;
  const wide = Math.round(columns.width * scale), high = panel.canvas.height;
  const image = context.createImageData(wide, high), pixels = new Uint32Array(image.data.buffer);
  const looked = columns.to[columns.width - 1] - columns.from[0];
  const stride = Math.max(1, Math.ceil(looked * slots.length / SLOT_CELLS));
  const line = new Uint32Array(wide), gap = lane * scale >= 5 ? Math.round(scale) : 0;
  for (let index = 0; index < slots.length; index++) {
    const top = Math.round(index * lane * scale), bottom = Math.round((index + 1) * lane * scale) - gap;
    if (bottom <= top) continue;
    slotLine(line, slots[index], columns, wide, stride);
    for (let y = top; y < bottom; y++) pixels.set(line, y * wide);
  }
  context.putImageData(image, Math.round(GUTTER * scale), 0);
  slotNumbers(context, lane);
  const xOf = place(view, columns.width);
  for (let residency = 0; residency < data.residencySlot.length; residency++) {
    const left = xOf(data.residencyStart[residency], 0), right = xOf(data.residencyEnd[residency], 1);
    if (right < GUTTER || left > GUTTER + columns.width) continue;
    drawResidency(context, residency, Math.max(left, GUTTER), Math.min(right, GUTTER + columns.width), lane, followed);
  }
  drawLoads(context, columns, view, lane, xOf);
}

/** A bar at the top of the slot for each load: also where no step shows it, because nothing else was to be computed. */
function drawLoads(context, columns, view, lane, xOf) {
  const end = GUTTER + columns.width, perUnit = columns.width / (view.to - view.from);
  context.fillStyle = colours.loading;
  for (let load = 0; load < data.loadStep.length; load++) {
    let left = GUTTER + (data.loadBegan[load] - view.from) * perUnit, right = GUTTER + (data.loadEnded[load] - view.from) * perUnit;
    if (view.axis === "steps") {
      left = xOf(Math.min(firstWhere(0, count, step => data.ended[step] > data.loadBegan[load]), data.loadStep[load]), 0);
      right = xOf(data.loadStep[load], 0);
    }
    if (right < GUTTER || left > end) continue;
    left = Math.max(left, GUTTER);
    context.fillRect(left, data.slotLanes[data.loadSlot[load]] * lane, Math.max(Math.min(right, end) - left, 2), Math.min(3, lane));
  }
}

function slotLine(line, slot, columns, wide, stride) {
  const row = slot * count, tally = new Uint32Array(facts.kinds.length), rgb = colours.rgb;
  const pack = (red, green, blue) => ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
  for (let pixel = 0; pixel < wide; pixel++) {
    const x = Math.floor(pixel * columns.width / wide), begin = columns.from[x], end = columns.to[x];
    if (end <= begin) { line[pixel] = 0; continue; }
    if (end === begin + 1) { line[pixel] = pack(...rgb[data.cells[row + begin]]); continue; }
    tally.fill(0);
    let total = 0, red = 0, green = 0, blue = 0;
    for (let step = begin; step < end; step += stride) { tally[data.cells[row + step]]++; total++; }
    for (let kind = 0; kind < tally.length; kind++) {
      const share = tally[kind] / total;
      red += share * rgb[kind][0]; green += share * rgb[kind][1]; blue += share * rgb[kind][2];
    }
    line[pixel] = pack(red, green, blue);
  }
}

function drawResidency(context, residency, left, right, lane, followed) {
  const top = data.slotLanes[data.residencySlot[residency]] * lane, tall = lane >= 5 ? lane - 1 : lane;
  const exit = facts.exits[data.residencyExit[residency]], mine = data.residencyRequest[residency] === followed;
  if (exit === "preempted") {
    context.fillStyle = colours.draining;
    context.fillRect(Math.max(left, right - 2), top, 2, Math.max(tall, 1.5));
  }
  if (right - left >= 5 && lane >= 5) {
    context.fillStyle = colours.back;
    context.fillRect(right - 0.5, top, 1, tall);
  }
  if (lane >= 11 && right - left >= 36) {
    const sign = data.residencyReturned[residency] ? "↩ " : "", room = right - left - 8;
    const text = sign + labelOf(data.residencyRequest[residency], label => context.measureText(sign + label).width <= room);
    context.save();
    context.beginPath();
    context.rect(left, top, right - left, tall);
    context.clip();
    context.fillStyle = "#fff";
    context.shadowColor = "#000c";
    context.shadowBlur = 3;
    context.textAlign = "left";
    context.textBaseline = "middle";
    context.fillText(text, left + 4, top + tall / 2 + 0.5);
    context.restore();
  }
  if (mine) {
    context.strokeStyle = colours.mark;
    context.lineWidth = 2;
    context.strokeRect(left, top, Math.max(right - left, 2), Math.max(tall, 2));
    context.lineWidth = 1;
  }
}

/** The longest part of a request's id that fits and that no other request has; empty if none fits. */
function labelOf(request, fits) {
  const name = facts.requests[request], [begin, end] = data.tails[request];
  if (fits(name)) return name;
  const from = firstWhere(0, begin + 1, at => fits(`…${name.slice(at, end)}`));
  return from <= begin ? `…${name.slice(from, end)}` : "";
}

function laneHeight() {
  // A canvas may not be higher than some 16,000 pixels.
  return Math.max(0.5, Math.min(view.tall ? 16 : 20, (view.tall ? 7000 : 480) / data.laneSlots.length));
}

function slotNumbers(context, lane) {
  const every = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384].find(step => step * lane >= 14);
  context.fillStyle = colours.faint;
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (let index = 0; index < data.laneSlots.length; index += every) context.fillText(`slot ${data.laneSlots[index]}`, GUTTER - 6, index * lane + Math.max(lane / 2, 6));
}

/** Where a step's beginning (`edge` 0) or end (1) lies, in pixels of a panel. */
function place(view, width) {
  const perUnit = width / (view.to - view.from);
  if (view.axis === "steps") return (step, edge) => GUTTER + (step + edge - view.from) * perUnit;
  return (step, edge) => GUTTER + ((edge ? data.ended : data.began)[step] - view.from) * perUnit;
}

function drawAxis(panel, columns, view) {
  const context = surface(panel.canvas, 18), span = view.to - view.from;
  const wanted = span / Math.max(2, columns.width / 110), power = 10 ** Math.floor(Math.log10(wanted));
  let every = [1, 2, 5, 10].find(step => step * power >= wanted) * power;
  if (view.axis === "steps") every = Math.max(1, every);
  context.textBaseline = "top";
  for (let at = Math.ceil(view.from / every) * every; at <= view.to; at += every) {
    const x = GUTTER + (at - view.from) / span * columns.width;
    context.fillStyle = colours.line;
    context.fillRect(x, 0, 1, 4);
    context.fillStyle = colours.faint;
    context.textAlign = x > GUTTER + columns.width - 25 ? "right" : "center";
    const step = Math.min(Math.round(at), count - 1);
    const digits = Math.max(0, -Math.floor(Math.log10(every / 1000) + 1e-9));
    context.fillText(view.axis === "steps" ? data.step[step].toLocaleString("en") : `${(at / 1000).toFixed(digits)} s`, x, 5);
  }
}
