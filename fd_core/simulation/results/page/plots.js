// Drawings in SVG. Their colours are those of the theme, so they follow it without being drawn again.

const NAMESPACE = byId("pen").namespaceURI;
const LEFT = 52, RIGHT = 12, TOP = 12, BOTTOM = 20, HIGH = 190;

function svg(tag, attributes = {}, text) {
  const made = dressed(document.createElementNS(NAMESPACE, tag), attributes);
  if (text !== undefined) made.textContent = text;
  return made;
}

/** A scale from [low, high] to [0, 1], linear or logarithmic, and the values that are written beside it. */
function scaleOf(low, high, kind) {
  if (kind === "tail") {
    const by = share => -Math.log10(1 - Math.min(share, 0.99995)) / 4.3;
    return { to: by, ticks: [0.5, 0.9, 0.99, 0.999, 0.9999] };
  }
  if (kind === "log") {
    const from = Math.log10(low), wide = Math.max(Math.log10(high) - from, 1e-9), ticks = [];
    for (let power = Math.floor(from); power <= Math.log10(high); power++) for (const step of wide > 3 ? [1] : wide > 1.2 ? [1, 3] : [1, 2, 5])
      if (step * 10 ** power >= low * 0.999 && step * 10 ** power <= high * 1.001) ticks.push(step * 10 ** power);
    return { to: value => (Math.log10(Math.max(value, low)) - from) / wide, ticks };
  }
  const wide = high - low || 1, step = niceTop(wide / 5), ticks = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-6; value += step) ticks.push(value);
  return { to: value => (value - low) / wide, ticks };
}

const wideSpan = values => Math.max(...values) / Math.max(Math.min(...values), 1e-9) > 30 ? "log" : "linear";

/**
 * Draw lines into a new panel of `place`. Every line has a point [x, y, low, high] or null for each of `steps`, which are
 * what the keys and the pointer go through: {title, steps: [text], lines: [{label, colour, dash, points}], x, y: {format,
 * kind, low, high}, read: "x" or "y", marks: [{x, label, colour}], limits: [{at, label, of: "x" or "y"}]}.
 */
function plot(place, spec) {
  const panel = place.appendChild(element("div", null, { class: "plot" }));
  const head = panel.appendChild(element("h3", spec.title));
  const asked = head.appendChild(element("span"));
  const shown = spec.lines.map(line => {
    const key = head.appendChild(element("span"));
    key.appendChild(element("i", null, { class: "key", style: `background: var(--${line.colour})` }));
    key.append(line.label, " ");
    return key.appendChild(element("b"));
  });
  const drawing = panel.appendChild(svg("svg", { role: "img", tabindex: "0", height: HIGH, "aria-label": `${spec.title}; arrow keys read its values` }));
  const spoken = panel.appendChild(element("span", "", { class: "spoken", "aria-live": "polite" }));
  spoken.style.cssText = "position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%)";
  const points = spec.lines.flatMap(line => line.points).filter(Boolean);
  const all = axis => points.flatMap(point => axis ? point.slice(1) : [point[0]]).filter(known);
  const kinds = [spec.x, spec.y].map((axis, index) => axis.kind ?? (axis.wide ? wideSpan(all(index)) : "linear"));
  const scales = [spec.x, spec.y].map((axis, index) => {
    const values = [...all(index), ...(spec.limits ?? []).filter(limit => limit.of === "xy"[index]).map(limit => limit.at)], high = axis.high ?? Math.max(...values);
    const low = axis.low ?? (kinds[index] === "log" ? Math.min(...values.filter(value => value > 0)) : index ? 0 : Math.min(...values));
    return scaleOf(low, index && axis.high === undefined && kinds[index] === "linear" ? high * 1.06 || 1 : high, kinds[index]);
  });
  let at = null;

  function draw() {
    const wide = Math.max(panel.clientWidth, 200);
    drawing.setAttribute("viewBox", `0 0 ${wide} ${HIGH}`);
    const x = value => LEFT + (wide - LEFT - RIGHT) * scales[0].to(value), y = value => HIGH - BOTTOM - (HIGH - TOP - BOTTOM) * scales[1].to(value);
    drawing.replaceChildren();
    for (const value of scales[1].ticks) {
      drawing.append(svg("line", { class: "grid", x1: LEFT, x2: wide - RIGHT, y1: y(value), y2: y(value) }));
      drawing.append(svg("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, spec.y.format(value)));
    }
    let last = -99;
    for (const value of scales[0].ticks) {
      if (x(value) - last < (x(value) > wide - 40 ? 66 : 50) || x(value) > wide - RIGHT + 1) continue;
      last = x(value);
      drawing.append(svg("text", { x: last, y: HIGH - 5, "text-anchor": last > wide - 40 ? "end" : "middle" }, spec.x.format(value)));
    }
    for (const limit of spec.limits ?? []) {
      const along = limit.of === "y" ? { x1: LEFT, x2: wide - RIGHT, y1: y(limit.at), y2: y(limit.at) } : { x1: x(limit.at), x2: x(limit.at), y1: TOP, y2: HIGH - BOTTOM };
      drawing.append(svg("line", { class: "limit", ...along }));
      const left = limit.of === "x" && x(limit.at) > wide - 110;
      drawing.append(svg("text", limit.of === "y" ? { x: wide - RIGHT, y: y(limit.at) - 4, "text-anchor": "end" } : { x: x(limit.at) + (left ? -4 : 4), y: HIGH - BOTTOM - 6, "text-anchor": left ? "end" : "start" }, limit.label));
    }
    (spec.marks ?? []).forEach((mark, index) => {
      drawing.append(svg("line", { class: "knee", x1: x(mark.x), x2: x(mark.x), y1: TOP, y2: HIGH - BOTTOM, style: `stroke: var(--${mark.colour})` }));
      const left = x(mark.x) > LEFT + (wide - LEFT) / 2 && x(mark.x) + 6 * mark.label.length > wide;
      drawing.append(svg("text", { class: "label", x: x(mark.x) + (left ? -4 : 4), y: TOP + 8 + 13 * index, "text-anchor": left ? "end" : "start" }, mark.label));
    });
    spec.lines.forEach(line => {
      const style = `stroke: var(--${line.colour})`;
      let path = "", pen = "M";
      for (const point of line.points) {
        if (!point) { pen = "M"; continue; }
        path += `${pen}${x(point[0]).toFixed(1)} ${y(point[1]).toFixed(1)}`;
        pen = "L";
        if (known(point[2])) drawing.append(svg("path", { d: `M${x(point[0])} ${y(Math.max(point[2], 0))}V${y(point[3])}`, style: `${style}; stroke-width: 4; opacity: .3` }));
        if (line.dots) drawing.append(svg("circle", { cx: x(point[0]), cy: y(point[1]), r: 3, style: `fill: var(--${line.colour})` }));
      }
      drawing.append(svg("path", { d: path, style, ...(line.dash ? { "stroke-dasharray": "6 3" } : {}) }));
    });
    if (at !== null) spec.lines.forEach(line => {
      const point = line.points[at];
      if (point) drawing.append(svg("circle", { cx: x(point[0]), cy: y(point[1]), r: 4.5, style: `fill: var(--${line.colour}); stroke: var(--back); stroke-width: 1.5` }));
    });
    return { x, y };
  }

  function read(step, speaks) {
    at = step;
    draw();
    const index = spec.read === "x" ? 0 : 1, format = (index ? spec.y : spec.x).format;
    asked.textContent = at === null ? "" : spec.steps[at];
    spec.lines.forEach((line, i) => {
      const point = at === null ? null : line.points[at];
      shown[i].textContent = point ? format(point[index]) : "";
    });
    if (speaks) spoken.textContent = `${asked.textContent}: ${spec.lines.map((line, i) => `${line.label} ${shown[i].textContent || "nothing"}`).join(", ")}`;
  }

  drawing.addEventListener("pointermove", event => {
    const axis = spec.read === "x" ? 1 : 0, { x, y } = draw(), where = axis ? event.offsetY : event.offsetX;
    let best = null, nearest = Infinity;
    for (const line of spec.lines) line.points.forEach((point, step) => {
      const far = point ? Math.abs((axis ? y(point[1]) : x(point[0])) - where) : Infinity;
      if (far < nearest) [nearest, best] = [far, step];
    });
    read(best, false);
  });
  drawing.addEventListener("pointerleave", () => read(null, false));
  drawing.addEventListener("blur", () => read(null, false));
  drawing.addEventListener("keydown", event => {
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
    if (!step) return;
    event.preventDefault();
    const end = spec.steps.length - 1;
    read(at === null ? (step > 0 ? 0 : end) : Math.min(Math.max(at + step, 0), end), true);
  });
  new ResizeObserver(() => read(at, false)).observe(panel);
}
