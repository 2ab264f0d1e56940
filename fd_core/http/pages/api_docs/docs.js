// The page: every route of the document, its parts made when it is opened.

let api = null;

/** An element with text whose `marked` parts are code. */
function prose(tag, text, attributes) {
  const made = element(tag, null, attributes);
  text.split("`").forEach((part, i) => part && made.append(i % 2 ? element("code", part) : part));
  return made;
}

/** A list of the fields of an object: name, type, limits, description, and the schemas that it refers to on demand. */
function fieldsOf(schema, depth = 0) {
  const list = element("ul", null, { class: "fields" }), whole = resolved(schema, api), needed = new Set(whole.required || []);
  for (const [name, field] of Object.entries(whole.properties || {})) list.append(fieldItem(name, field, needed.has(name), depth));
  return list;
}

function fieldItem(name, field, needed, depth) {
  const item = element("li"), limits = limitsText(field);
  item.append(element("code", name), typeText(field));
  if (needed) item.append(element("span", "required", { class: "needed" }));
  if (limits) item.append(element("i", limits));
  if (field.description) item.append(prose("p", field.description));
  for (const reference of referencesIn(field)) item.append(" ", schemaDetails(reference, depth + 1));
  return item;
}

/** A schema that opens on demand: schemas may refer to themselves. */
function schemaDetails(reference, depth) {
  const details = element("details");
  details.append(element("summary", nameOf(reference)));
  details.addEventListener("toggle", () => { if (details.open && details.childElementCount === 1) details.append(...schemaBody(reference, depth)); });
  return details;
}

function schemaBody(schema, depth = 0) {
  const whole = resolved(schema, api), parts = whole.description ? [prose("p", whole.description)] : [];
  if (whole.properties) return [...parts, fieldsOf(whole, depth)];
  if (whole !== schema) parts.push(element("p", typeText(whole)));
  return [...parts, ...referencesIn(whole).map(each => schemaDetails(each, depth + 1))];
}

function heading(text, aside) {
  const made = element("h3", `${text} `);
  made.append(element("small", aside));
  return made;
}

function routeBody(method, path, operation) {
  const inside = element("div", null, { class: "inside" });
  if (operation.description) inside.append(prose("p", operation.description));
  inside.append(heading("Example", ""), element("pre", curlOf(method, path, operation, api, location.origin)));
  if (operation.parameters?.length) {
    const list = element("ul", null, { class: "fields" });
    for (const each of operation.parameters) list.append(fieldItem(each.name, { ...each.schema, description: each.description }, each.required, 0));
    inside.append(heading("Parameters", "in the path or the query"), list);
  }
  for (const [kind, { schema }] of Object.entries(operation.requestBody?.content || {})) {
    inside.append(heading("Body", `${kind} · ${typeText(schema)}`), ...schemaBody(schema));
  }
  inside.append(heading("Responses", ""));
  const list = inside.appendChild(element("ul", null, { class: "fields" }));
  for (const [status, response] of Object.entries(operation.responses || {})) {
    const item = list.appendChild(element("li"));
    item.append(element("code", status), ...prose("span", response.description || "").childNodes);
    for (const [kind, { schema }] of Object.entries(response.content || {})) {
      if (schema.$ref) item.append(" ", schemaDetails(schema, 1));
      item.append(element("i", kind));
    }
  }
  return inside;
}

function routeDetails(method, path, operation) {
  const details = element("details", null, { class: "route", id: `${method}${path}` }), summary = details.appendChild(element("summary"));
  summary.append(element("span", method, { class: `method ${method}` }), element("b", path), element("span", operation.summary || ""));
  details.addEventListener("toggle", () => { if (details.open && details.childElementCount === 1) details.append(routeBody(method, path, operation)); });
  const content = jsonBody(operation), fields = content ? Object.keys(resolved(content.schema, api).properties || {}) : [];
  details.found = [method, path, operation.summary, operation.description, ...fields].join(" ").toLowerCase();
  return details;
}

/** Routes under their first folder, such as /v1; those without one come last. */
function sections(paths) {
  const found = new Map();
  for (const path of Object.keys(paths)) {
    const parts = path.split("/"), name = parts.length > 2 ? `/${parts[1]}` : "/";
    found.set(name, [...(found.get(name) || []), path]);
  }
  return [...found].sort(([one], [other]) => (one === "/") - (other === "/"));
}

function showRoutes() {
  const place = byId("routes"), all = sections(api.paths);
  for (const [name, paths] of all) {
    place.append(element("h2", name === "/" && all.length > 1 ? "Others" : name));
    for (const path of paths) for (const [method, operation] of Object.entries(api.paths[path])) place.append(routeDetails(method, path, operation));
  }
}

function find() {
  const words = byId("find").value.toLowerCase().split(" ").filter(Boolean);
  let heading = null;
  for (const each of byId("routes").children) {
    if (each.tagName === "H2") { heading = each; heading.hidden = words.length > 0; continue; }
    each.hidden = !words.every(word => each.found.includes(word));
    if (!each.hidden) heading.hidden = false;
  }
}

/** Open the route that the address names, such as /docs#post/v1/completions. */
function openNamed() {
  const named = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (named?.classList.contains("route")) { named.open = true; named.scrollIntoView(); }
}

async function start() {
  const response = await fetch("/openapi.json");
  if (!response.ok) throw new Error(`the server answered ${response.status}`);
  api = await response.json();
  byId("title").textContent = document.title = `${api.info.title} API`;
  byId("version").textContent = api.info.version;
  byId("state").textContent = api.security ? "Requests need an API key: Authorization: Bearer KEY." : "";
  showRoutes();
  openNamed();
}

followTheme(byId("theme"));
byId("find").addEventListener("input", find);
addEventListener("hashchange", openNamed);
start().catch(error => { byId("state").textContent = `The API description cannot be read: ${error.message}.`; byId("state").className = "bad"; });
