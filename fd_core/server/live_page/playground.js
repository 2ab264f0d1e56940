// The playground: sends requests like any client, and shows the stream as it arrives.

const WEATHER = [{ type: "function", function: { name: "get_weather", description: "Current weather of a city",
  parameters: { type: "object", properties: { city: { type: "string" }, unit: { enum: ["celsius", "fahrenheit"] } }, required: ["city"] } } }];
const PERSON = { type: "object", properties: { name: { type: "string" }, age: { type: "integer", minimum: 0, maximum: 120 },
  languages: { type: "array", items: { type: "string" }, maxItems: 3 } }, required: ["name", "age", "languages"], additionalProperties: false };

let tab = "chat", messages = [], asking = null;

byId("tools").value = JSON.stringify(WEATHER, null, 1);
byId("schema").value = JSON.stringify(PERSON, null, 1);
byId("example").textContent = `from openai import OpenAI

client = OpenAI(base_url="${location.origin}/v1", api_key="…")
model = client.models.list().data[0].id
answer = client.chat.completions.create(model=model, messages=[{"role": "user", "content": "What is the capital of France?"}])
print(answer.choices[0].message.content)`;

function showTurn(role, text) {
  const turn = byId("turns").appendChild(element("li", text, { "data-role": role }));
  turn.scrollIntoView({ block: "nearest" });
  return turn;
}

function choose(name) {
  tab = name;
  for (const button of document.querySelectorAll("[data-tab]")) button.setAttribute("aria-selected", button.dataset.tab === name);
  for (const part of document.querySelectorAll("[data-only]")) part.hidden = part.dataset.only !== name;
  byId("prompt").placeholder = { chat: "Ask something. Ctrl+Enter sends.", tool: "What is the weather in Paris?",
    schema: "Describe a person. The answer fills the schema." }[name];
  begin();
}

function begin() {
  if (asking) asking.abort();
  messages = [];
  byId("turns").replaceChildren();
  byId("timing").textContent = "";
}

/** Return a request's body, or throw an error that says which field is no JSON. */
function body() {
  const parsed = id => {
    try { return JSON.parse(byId(id).value); } catch (error) { throw new Error(`The field for ${id} is not valid JSON: ${error.message}`); }
  };
  const asked = { messages, stream: true, stream_options: { include_usage: true },
    temperature: Number(byId("temperature").value), max_tokens: Number(byId("maxTokens").value) };
  if (tab === "tool") {
    asked.tools = parsed("tools");
    // After a tool's result the model must answer instead of calling again.
    asked.tool_choice = messages[messages.length - 1].role === "tool" ? "auto" : byId("toolChoice").value;
  }
  if (tab === "schema") asked.response_format = { type: "json_schema", json_schema: { name: "answer", strict: true, schema: parsed("schema") } };
  return asked;
}

/** Yield the JSON of each event of an answer. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const line = block.split("\n").find(each => each.startsWith("data: "));
      if (line && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

async function ask() {
  let asked;
  try { asked = body(); } catch (error) { showTurn("error", error.message); return; }
  asking = new AbortController();
  byId("send").disabled = true;
  byId("stop").disabled = false;
  const began = performance.now(), answer = { role: "assistant", content: "" }, calls = [];
  let first = null, usage = null, finish = null, text = null, thoughts = null;
  const append = (turn, role, piece) => { turn = turn || showTurn(role, ""); turn.textContent += piece; return turn; };
  try {
    const headers = keyed({ "content-type": "application/json" });
    const response = await fetch("/v1/chat/completions", { method: "POST", headers, body: JSON.stringify(asked), signal: asking.signal });
    if (!response.ok) {
      if (response.status === 401) {
        byId("keyRow").hidden = false;
        byId("key").focus();
      }
      throw new Error((await response.json()).error.message);
    }
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      if (event.usage) usage = event.usage;
      const choice = event.choices && event.choices[0];
      if (!choice) continue;
      const { content, reasoning_content: reasoning, tool_calls: deltas } = choice.delta;
      if (first === null && (content || reasoning || deltas)) first = performance.now();
      if (reasoning) thoughts = append(thoughts, "reasoning", reasoning);
      if (content) { text = append(text, tab === "schema" ? "json" : "assistant", content); answer.content += content; }
      for (const delta of deltas || []) {
        const call = calls[delta.index] = calls[delta.index] || { id: delta.id, type: "function", function: { name: "", arguments: "" } };
        call.function.name += delta.function.name || "";
        call.function.arguments += delta.function.arguments || "";
        call.turn = call.turn || showTurn("call", "");
        call.turn.textContent = `${call.function.name}(${call.function.arguments})`;
      }
      if (choice.finish_reason) finish = choice.stop_reason === "abort" ? "aborted" : choice.finish_reason;
    }
    if (calls.length) answer.tool_calls = calls.map(({ turn, ...call }) => call);
    messages.push(answer);
    if (finish === "length") showTurn("error", "The answer was truncated at max_tokens.");
    else if (finish === "aborted") showTurn("error", "The answer was aborted.");
    else if (tab === "schema") checkJson(text, answer.content);
    if (calls.length) askForResults(calls);
  } catch (error) {
    showTurn("error", error.name === "AbortError" ? "Stopped." : error.message);
  } finally {
    const ended = performance.now(), tokens = usage ? usage.completion_tokens : null;
    byId("timing").textContent = first === null ? "" : `first token ${duration((first - began) / 1000)}` +
      (tokens > 1 ? ` · ${whole(tokens)} tokens, ${compact((tokens - 1) / ((ended - first) / 1000))} a second` : "") + (finish ? ` · ${finish}` : "");
    asking = null;
    byId("send").disabled = false;
    byId("stop").disabled = true;
  }
}

function checkJson(turn, content) {
  try {
    if (turn) turn.textContent = JSON.stringify(JSON.parse(content), null, 1);
  } catch (error) { showTurn("error", `The answer is not valid JSON: ${error.message}`); }
}

/** Let the reader say what each tool found, and send that back. */
function askForResults(calls) {
  const form = element("form", null, { class: "row" });
  for (const call of calls) {
    const label = form.appendChild(element("label", `${call.function.name} found `));
    label.appendChild(element("input", null, { name: call.id, value: '{"result": "sunny, 21 degrees"}', style: "width: 18rem" }));
  }
  form.appendChild(element("button", "Send the result", { type: "submit" }));
  showTurn("result", "").appendChild(form);
  form.addEventListener("submit", event => {
    event.preventDefault();
    if (asking) return;
    for (const call of calls) messages.push({ role: "tool", tool_call_id: call.id, content: form.elements[call.id].value });
    form.querySelector("button").disabled = true;
    ask();
  });
}

/** Return a file as a data URL. */
function dataUrl(file) {
  return new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => failed(reader.error);
    reader.readAsDataURL(file);
  });
}

byId("form").addEventListener("submit", async event => {
  event.preventDefault();
  const text = byId("prompt").value.trim() || (tab === "tool" ? byId("prompt").placeholder : "");
  if (!text || asking) return;
  const images = [...(byId("image").files || [])];
  let content = text;
  try {
    const urls = await Promise.all(images.map(dataUrl));
    if (urls.length) content = [...urls.map(url => ({ type: "image_url", image_url: { url } })), { type: "text", text }];
  } catch (error) { showTurn("error", `The image cannot be read: ${error.message}`); return; }
  if (tab === "schema") begin();
  showTurn("user", [...images.map(image => image.name), text].join("\n"));
  messages.push({ role: "user", content });
  byId("prompt").value = byId("image").value = "";
  ask();
});
/** Take the images that are pasted or dropped; anything else keeps its usual meaning. */
function takeImages(event) {
  const files = (event.clipboardData || event.dataTransfer).files;
  if (byId("imageRow").hidden || ![...files].some(file => file.type.startsWith("image/"))) return;
  event.preventDefault();
  byId("image").files = files;
}
byId("form").addEventListener("paste", takeImages);
byId("form").addEventListener("dragover", event => event.preventDefault());
byId("form").addEventListener("drop", takeImages);

byId("prompt").addEventListener("keydown", event => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("form").requestSubmit();
});
byId("stop").addEventListener("click", () => asking && asking.abort());
byId("clear").addEventListener("click", begin);
for (const button of document.querySelectorAll("[data-tab]")) button.addEventListener("click", () => choose(button.dataset.tab));
