{ before: page => {
  page.answers["/history.json"] = { now: 7300, columns: ["at", "running", "ttft50"], rows: [[100, 1, null], [3700, 8, 0.5], [7300, 2, 0.25]] };
}, play: async page => {
  const [short, long] = page.root.querySelectorAll("button[data-period]"), canvas = page.byId("curves").querySelector("canvas");
  const words = () => canvas.drawn.filter(([name]) => name === "fillText").map(([, text]) => text).filter(text => text.startsWith("−"));
  const before = words();
  await long.click();
  const after = words(), value = page.byId("curves").querySelectorAll("b").map(each => each.textContent);
  await short.click();
  return { before, after, value, pressed: [short, long].map(each => each.getAttribute("aria-pressed")), again: words() };
} }
