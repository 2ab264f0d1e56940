// Curves over the last minutes, or over another period. A page collects one sample a second; every curve draws some of
// their values.

const byId = id => document.getElementById(id);
const SPAN = 300;  // seconds of the samples that a page collects
const GUTTER = 46;  // pixels for the numbers at the left
const samples = [];
const recent = { samples, span: SPAN };
let period = recent;  // what curves show: samples in order, of the last `span` seconds
let pointed = null;  // seconds before now at which the pointer is

const whole = value => Math.round(value).toLocaleString("en");
const compact = value => value >= 1e6 ? `${+(value / 1e6).toFixed(1)}M` : value >= 1e4 ? `${+(value / 1e3).toFixed(1)}k` : value < 10 ? `${+value.toFixed(1)}` : whole(value);
const percent = value => `${+(100 * value).toFixed(1)} %`;
const duration = seconds => seconds === 0 ? "0" : seconds >= 10 ? `${seconds.toFixed(0)} s` : seconds >= 1 ? `${seconds.toFixed(1)} s` : seconds >= 0.01 ? `${(1000 * seconds).toFixed(0)} ms` : `${(1000 * seconds).toFixed(1)} ms`;
const known = value => value !== null && value !== undefined && value === value;
const colour = name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function element(tag, text, attributes = {}) {
  const made = document.createElement(tag);
  if (text !== undefined && text !== null) made.textContent = text;
  return dressed(made, attributes);
}

/** Set attributes of an element; the page's policy allows no style attributes, but styles that a script sets. */
function dressed(made, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") made.style.cssText = value;
    else made.setAttribute(name, value);
  }
  return made;
}

/** Remember a sample: an object with the second `at` (of the page's clock) and numbers by name. */
function remember(sample) {
  samples.push(sample);
  while (samples.length && samples[0].at < sample.at - SPAN - 30) samples.shift();
}

/** The newest sample that is at least so many seconds older than the last one; the oldest if none is. */
function before(seconds) {
  const last = samples[samples.length - 1];
  for (let i = samples.length - 2; i >= 0; i--) if (samples[i].at <= last.at - seconds) return samples[i];
  return samples[0];
}

/** Growth a second of a counter over the last seconds; null before there are two samples and where a counter began anew. */
function rate(read, seconds = 5) {
  const now = samples[samples.length - 1], then = before(seconds);
  if (!now || now === then) return null;
  const grown = read(now.raw) - read(then.raw);
  return grown < 0 ? null : grown / (now.at - then.at);
}

/** Quantile of what a histogram counted in the last seconds: {bounds, counts}. Null if it counted nothing. */
function quantile(read, share, seconds = 15) {
  const now = read(samples[samples.length - 1].raw), then = read(before(seconds).raw);
  const counts = now.counts.map((count, i) => count - then.counts[i]);
  const total = counts.reduce((sum, count) => sum + count, 0);
  if (total <= 0 || counts.some(count => count < 0)) return null;
  let below = 0;
  for (let i = 0; i < counts.length; i++) {
    if (below + counts[i] >= share * total && counts[i]) {
      const from = i ? now.bounds[i - 1] : 0, to = i < now.bounds.length ? now.bounds[i] : from;
      return from + (to - from) * (share * total - below) / counts[i];
    }
    below += counts[i];
  }
  return null;
}

/** Make the panels of curves in `place`: [{title, lines: [{key, label, colour}], format, top}]. */
function makeCurves(place, curves) {
  for (const curve of curves) {
    const section = place.appendChild(element("section", null, { class: "curve" }));
    const head = section.appendChild(element("h2", curve.title));
    curve.shown = {};
    for (const line of curve.lines) {
      const key = head.appendChild(element("span"));
      key.appendChild(element("i", null, { class: "key", style: `background: var(--${line.colour})` }));
      key.append(line.label, " ");
      curve.shown[line.key] = key.appendChild(element("b", "–"));
    }
    curve.canvas = section.appendChild(element("canvas", null, { role: "img", "aria-label": `${curve.title} over time` }));
    curve.canvas.addEventListener("pointermove", event => {
      const wide = curve.canvas.clientWidth - GUTTER;
      pointed = Math.max(0, period.span * (1 - (event.offsetX - GUTTER) / wide));
      drawCurves(curves);
    });
    curve.canvas.addEventListener("pointerleave", () => { pointed = null; drawCurves(curves); });
  }
}

function drawCurves(curves) {
  for (const curve of curves) drawCurve(curve);
}

function drawCurve({ canvas, lines, format, top: least = 0, shown }) {
  const wide = canvas.clientWidth, high = 84, scale = window.devicePixelRatio || 1;
  canvas.style.height = `${high}px`;
  canvas.width = Math.round(wide * scale);
  canvas.height = Math.round(high * scale);
  const { samples, span } = period, context = canvas.getContext("2d"), now = samples.length ? samples[samples.length - 1].at : 0;
  context.scale(scale, scale);
  context.font = "11px system-ui, sans-serif";
  let top = least;
  for (const sample of samples) for (const { key } of lines) if (known(sample[key]) && sample.at >= now - span) top = Math.max(top, sample[key]);
  top = niceTop(top);
  const x = at => GUTTER + (wide - GUTTER) * (1 - (now - at) / span), y = value => high - 14 - (high - 22) * value / top;
  context.fillStyle = colour("faint");
  context.strokeStyle = colour("line");
  context.textAlign = "right";
  for (const value of [0, top / 2, top]) {
    context.fillText(format(value), GUTTER - 5, y(value) + 4);
    context.beginPath(); context.moveTo(GUTTER, y(value)); context.lineTo(wide, y(value)); context.stroke();
  }
  context.textAlign = "center";
  const every = [60, 300, 600, 1800, 3600, 14400].find(step => span <= 6 * step) || 86400;
  for (let ago = every; ago < span; ago += every) context.fillText(ago % 3600 ? `−${ago / 60} min` : `−${ago / 3600} h`, x(now - ago), high - 2);
  context.save();
  context.beginPath(); context.rect(GUTTER, 0, wide - GUTTER, high); context.clip();
  context.lineWidth = 1.6;
  for (const line of lines) {
    context.strokeStyle = colour(line.colour);
    context.beginPath();
    let drawing = false;
    for (const sample of samples) {
      const value = sample[line.key];
      if (!known(value)) { drawing = false; continue; }
      if (drawing) context.lineTo(x(sample.at), y(value)); else context.moveTo(x(sample.at), y(value));
      drawing = true;
    }
    context.stroke();
  }
  context.restore();
  const asked = pointed === null ? samples[samples.length - 1] : nearest(samples, now - pointed);
  if (pointed !== null && asked) {
    context.fillStyle = colour("faint");
    context.fillRect(x(asked.at), 4, 1, high - 18);
  }
  for (const { key } of lines) shown[key].textContent = asked && known(asked[key]) ? format(asked[key]) : "–";
}

function nearest(samples, at) {
  let best = null;
  for (const sample of samples) if (!best || Math.abs(sample.at - at) < Math.abs(best.at - at)) best = sample;
  return best;
}

function niceTop(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 5, 10].find(step => step * power >= value * 0.999);
}

/** A bar of shares: [[label, value, colour]], with what they are shares of; what is left over is free. */
function drawBar(place, parts, total) {
  const used = parts.reduce((sum, [, value]) => sum + value, 0), all = Math.max(total, used, 1);
  place.replaceChildren(...parts.filter(([, value]) => value).map(([label, value, name]) =>
    element("i", null, { style: `width: ${100 * value / all}%; background: var(--${name})`, title: `${label}: ${whole(value)}` })));
  place.setAttribute("aria-label", parts.map(([label, value]) => `${label} ${whole(value)}`).join(", ") + ` of ${whole(total)}`);
}

function showFigures(place, figures) {
  place.replaceChildren(...figures.map(([label, text, bad]) => {
    const pair = element("div");
    pair.append(element("dt", label), element("dd", text, bad ? { class: "bad" } : {}));
    return pair;
  }));
}

function followTheme(button) {
  const set = dark => { document.documentElement.dataset.theme = dark ? "dark" : "light"; };
  set(matchMedia("(prefers-color-scheme: dark)").matches);
  button.addEventListener("click", () => set(document.documentElement.dataset.theme !== "dark"));
}
