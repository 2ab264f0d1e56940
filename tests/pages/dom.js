// A small document for the scripts of pages: elements, attributes, events and canvases that only accept calls.
// Usage: node dom.js PAGE SCENARIO. SCENARIO is a script with an async function `play(page)`; its result is printed as JSON.
"use strict";
const fs = require("node:fs"), vm = require("node:vm");

class Text {
  constructor(text) { this.data = String(text); this.childNodes = []; }
  get textContent() { return this.data; }
  remove() { this.parentNode?.removeChild(this); }
}

class Element {
  constructor(tag) {
    this.tagName = tag.toUpperCase();
    this.childNodes = []; this.attributes = {}; this.listeners = {}; this.dataset = {}; this.style = {};
    this.parentNode = null; this.value = ""; this.clientWidth = 400; this.clientHeight = 80; this.drawn = [];
    const names = () => new Set((this.attributes.class || "").split(" ").filter(Boolean));
    this.classList = { contains: name => names().has(name) };
  }
  get children() { return this.childNodes.filter(each => each instanceof Element); }
  get childElementCount() { return this.children.length; }
  get lastChild() { return this.childNodes[this.childNodes.length - 1] || null; }
  get isConnected() { return this.parentNode === null ? this.tagName === "HTML" : this.parentNode.isConnected; }
  get textContent() { return this.childNodes.map(each => each.textContent).join(""); }
  set textContent(text) { this.replaceChildren(...(text === "" ? [] : [new Text(text)])); }
  get className() { return this.attributes.class || ""; }
  set className(names) { this.attributes.class = names; }
  get id() { return this.attributes.id || ""; }
  get hidden() { return "hidden" in this.attributes; }
  set hidden(hidden) { if (hidden) this.attributes.hidden = ""; else delete this.attributes.hidden; }
  get disabled() { return "disabled" in this.attributes; }
  set disabled(disabled) { if (disabled) this.attributes.disabled = ""; else delete this.attributes.disabled; }
  get open() { return "open" in this.attributes; }
  set open(open) { this.attributes.open = ""; this.dispatch("toggle"); }
  get cells() { return this.children; }
  get rows() { return this.all(each => each.tagName === "TR"); }
  get tHead() { return this.children.find(each => each.tagName === "THEAD"); }
  get tBodies() { return this.children.filter(each => each.tagName === "TBODY"); }
  setAttribute(name, value) {
    this.attributes[name] = String(value);
    if (name.startsWith("data-")) this.dataset[name.slice(5)] = String(value);
    if (name === "value") this.value = String(value);
  }
  getAttribute(name) { return this.attributes[name] ?? null; }
  removeChild(child) { this.childNodes = this.childNodes.filter(each => each !== child); child.parentNode = null; return child; }
  remove() { this.parentNode?.removeChild(this); }
  append(...parts) {
    for (const part of parts) {
      const node = part instanceof Element || part instanceof Text ? part : new Text(part);
      node.parentNode?.removeChild(node);
      node.parentNode = this;
      this.childNodes.push(node);
    }
  }
  appendChild(child) { this.append(child); return child; }
  replaceChildren(...parts) { for (const each of [...this.childNodes]) this.removeChild(each); this.append(...parts); }
  addEventListener(name, listener) { (this.listeners[name] ||= []).push(listener); }
  dispatch(name, event = {}) {
    const all = [...(this.listeners[name] || []), ...(this[`on${name}`] ? [this[`on${name}`]] : [])];
    return Promise.all(all.map(each => each({ target: this, preventDefault() {}, ...event })));
  }
  click() { return this.dispatch("click"); }
  focus() {} scrollIntoView() {} setPointerCapture() {}
  getBoundingClientRect() { return { left: 0, top: 0, width: 400, height: 80 }; }
  insertRow() { const row = new Element("tr"); this.append(row); return row; }
  insertCell() { const cell = new Element("td"); this.append(cell); return cell; }
  all(wanted) { return this.children.flatMap(each => [...(wanted(each) ? [each] : []), ...each.all(wanted)]); }
  querySelectorAll(selector) {
    const [, tag, name, value] = /^([a-z0-9]*)(?:\[([\w-]+)(?:="(.*)")?\])?$/.exec(selector);
    return this.all(each => (!tag || each.tagName === tag.toUpperCase()) && (!name || (name in each.attributes && (value === undefined || each.attributes[name] === value))));
  }
  querySelector(selector) { return this.querySelectorAll(selector)[0] || null; }
  set width(_) { this.drawn = []; }  // as a canvas does, which is cleared
  getContext() {
    return new Proxy({}, {
      get: (own, name) => name in own ? own[name]
        : name === "measureText" ? text => ({ width: 6 * text.length })
        : name === "createImageData" ? (wide, high) => ({ data: { buffer: new ArrayBuffer(4 * wide * high) } })
        : (...given) => { this.drawn.push([name, ...given]); },
      set: (own, name, value) => { own[name] = value; return true; },
    });
  }
}

const VOID = new Set(["meta", "input", "br", "link"]);

/** Parse the pages' own HTML: well formed, quoted attributes; returns [root, scripts]. */
function parsed(html) {
  const root = new Element("html"), scripts = [];
  let place = root, rest = html;
  while (rest) {
    const raw = /^<(script|style)([^>]*)>([^]*?)<\/\1>/.exec(rest), tag = /^<(\/?)([a-z0-9]+)((?:\s+[\w-]+(?:="[^"]*")?)*)\s*>/i.exec(rest);
    if (raw) {
      const made = place.appendChild(new Element(raw[1]));
      for (const [, name, value] of raw[2].matchAll(/([\w-]+)="([^"]*)"/g)) made.setAttribute(name, value);
      made.textContent = raw[3];
      if (raw[1] === "script" && !raw[2]) scripts.push(raw[3]);
      rest = rest.slice(raw[0].length);
    } else if (tag) {
      const [whole, closing, name, attributes] = tag;
      if (closing) { while (place.tagName !== name.toUpperCase()) place = place.parentNode; place = place.parentNode || root; }
      else if (name !== "html") {
        const made = place.appendChild(new Element(name));
        for (const [, key, value] of attributes.matchAll(/([\w-]+)(?:="([^"]*)")?/g)) made.setAttribute(key, value ?? "");
        if (!VOID.has(name)) place = made;
      }
      rest = rest.slice(whole.length);
    } else {
      const next = rest.indexOf("<", 1), text = next < 0 ? rest : rest.slice(0, next);
      if (!text.startsWith("<!")) place.append(text);
      rest = rest.slice(text.length);
    }
  }
  return [root, scripts];
}

const [, , pagePath, scenarioPath, origin] = process.argv;
const [root, scripts] = parsed(fs.readFileSync(pagePath, "utf8"));
let pending = 0;
const calls = [], stored = {}, timers = [], windowListeners = {};
const page = { root, calls, timers, stored, origin, now: 1000, answers: {}, windowListeners,
  byId: id => root.all(each => each.id === id)[0],
  until: async holds => { while (!holds()) await new Promise(resolve => setTimeout(resolve, 1)); },
  /** Run the timers of a pause in milliseconds, and wait for their answers. */
  tick: async pause => { for (const [work, each] of timers) if (each === pause) work(); await page.settle(); },
  /** Wait until no answer is pending and everything that follows one is done. */
  settle: async () => { for (let quiet = 0; quiet < 10; quiet = pending ? 0 : quiet + 1) await new Promise(resolve => setTimeout(resolve, 1)); },
  frame: () => { const due = frames.splice(0); for (const each of due) each(); },
};
const frames = [];
const document = { documentElement: root, hidden: false, title: "", createElement: tag => new Element(tag), getElementById: page.byId,
  createTextNode: text => new Text(text), querySelectorAll: selector => root.querySelectorAll(selector), querySelector: selector => root.querySelector(selector) };
const context = vm.createContext({
  document, console, TextDecoderStream, DecompressionStream, Blob, Response, AbortController, URLSearchParams, URL, atob,
  Option: class extends Element { constructor(text) { super("option"); this.textContent = text; } },
  setInterval: (work, pause) => timers.push([work, pause]), setTimeout, requestAnimationFrame: work => frames.push(work),
  addEventListener: (name, listener) => (windowListeners[name] ||= []).push(listener),
  getComputedStyle: () => ({ getPropertyValue: () => "#123456" }), matchMedia: () => ({ matches: false }), devicePixelRatio: 1, innerWidth: 1300, innerHeight: 800,
  location: { origin: "http://here", hash: "" }, performance: { now: () => page.now },
  sessionStorage: { getItem: name => stored[name] ?? null, setItem: (name, value) => { stored[name] = value; } },
  // `answers` of the scenario come first; the rest is asked of the server, if there is one.
  fetch: async (path, options = {}) => {
    calls.push([options.method || "GET", path, options.headers || {}, options.body ?? null]);
    const given = page.answers[path];
    if (given !== undefined) return new Response(JSON.stringify(given));
    pending++;
    try {
      const answer = await fetch(origin + path, options);
      return new Response(await answer.text(), { status: answer.status });
    } finally { pending--; }
  },
});
context.window = context;
page.context = context;
const scenario = vm.runInContext(`(${fs.readFileSync(scenarioPath, "utf8")})`, vm.createContext({ Promise, JSON, Object, Array, Math }));
(async () => {
  scenario.before?.(page);
  for (const script of scripts) vm.runInContext(script, context);
  await page.settle();
  console.log(JSON.stringify(await scenario.play(page)));
  process.exit(0);
})().catch(error => { console.error(error); process.exit(1); });
