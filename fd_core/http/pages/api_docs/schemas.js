// What the document says, as text: pure functions of its parts.

const NO_SCHEMA = {};

/** The schema that a reference names; other schemas are returned as they are. */
function resolved(schema, document) {
  const found = schema && schema.$ref ? schema.$ref.split("/").slice(1).reduce((place, part) => place?.[part], document) : schema;
  return found || NO_SCHEMA;
}

const nameOf = schema => schema.$ref ? schema.$ref.split("/").pop() : "";

/** The alternatives of a schema; one, itself, if it has none. */
const alternatives = schema => schema.anyOf || schema.oneOf || schema.allOf || [schema];

/** A type in a few words, such as `array of string or null`. */
function typeText(schema) {
  if (schema.$ref) return nameOf(schema);
  if (schema.enum) return schema.enum.map(value => JSON.stringify(value)).join(" | ");
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.anyOf || schema.oneOf || schema.allOf) return alternatives(schema).map(typeText).join(" or ");
  if (schema.type === "array") return `array of ${schema.items ? typeText(schema.items) : schema.prefixItems ? schema.prefixItems.map(typeText).join(", ") : "any"}`;
  if (schema.type === "object" && schema.additionalProperties?.type) return `object of ${typeText(schema.additionalProperties)}`;
  return [].concat(schema.type || "any").join(" or ");
}

/** Bounds and default in a few words, such as `0 to 2, default null`. */
function limitsText(schema) {
  const words = [];
  for (const each of alternatives(schema)) {
    const low = each.minimum ?? each.exclusiveMinimum, high = each.maximum ?? each.exclusiveMaximum;
    if (low !== undefined && high !== undefined) words.push(`${low} to ${high}`);
    else if (low !== undefined) words.push(`at least ${low}`);
    else if (high !== undefined) words.push(`at most ${high}`);
    for (const [least, most, what] of [["minLength", "maxLength", "characters"], ["minItems", "maxItems", "items"]]) {
      if (each[least] !== undefined) words.push(`at least ${each[least]} ${what}`);
      if (each[most] !== undefined) words.push(`at most ${each[most]} ${what}`);
    }
    if (each.pattern) words.push(`matches ${each.pattern}`);
  }
  if ("default" in schema && schema.default !== null) words.push(`default ${JSON.stringify(schema.default)}`);
  if (schema.examples) words.push(`for example ${schema.examples.map(value => JSON.stringify(value)).join(", ")}`);
  return words.join(", ");
}

/** The references within a schema, each once, in their order. */
function referencesIn(schema) {
  const found = new Map(), walk = each => {
    if (!each || typeof each !== "object") return;
    if (each.$ref) found.set(each.$ref, each);
    else for (const part of [...alternatives(each).filter(other => other !== each), each.items, each.additionalProperties, ...(each.prefixItems || [])]) walk(part);
  };
  walk(schema);
  return [...found.values()];
}

const jsonBody = operation => operation.requestBody?.content?.["application/json"];
const quoted = text => `'${text.replaceAll("'", `'\\''`)}'`;

/** A command that calls a route with the example of its body; parameters in braces are the reader's. */
function curlOf(method, path, operation, document, origin) {
  const words = [`curl ${method === "get" ? "" : `-X ${method.toUpperCase()} `}${quoted(origin + path)}`], content = jsonBody(operation);
  if (operation.security || document.security) words.push(`-H "Authorization: Bearer $API_KEY"`);
  if (content) words.push("-H 'Content-Type: application/json'", `-d ${quoted(JSON.stringify(content.example))}`);
  return words.join(" \\\n  ");
}
