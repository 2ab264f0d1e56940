{ before: page => {
  page.context.FileReader = class { readAsDataURL(file) { this.result = file.url; Promise.resolve().then(() => this.onload()); } };
}, play: async page => {
  const offered = !page.byId("imageRow").hidden;
  const limit = page.byId("imageLimit").textContent, taken = [];
  for (const [name, type] of [["paste", "text/plain"], ["paste", "image/png"], ["drop", "image/png"]]) {
    const files = [{ name: `${name}.png`, type, url: "data:image/png;base64," }, { name: "cat.png", type, url: "data:image/png;base64," }];
    let kept = false;
    await page.byId("form").dispatch(name, { preventDefault: () => { kept = true; }, [name === "paste" ? "clipboardData" : "dataTransfer"]: { files } });
    taken.push([kept, (page.byId("image").files || []).length]);
  }
  page.byId("prompt").value = "What is it?";
  await page.byId("form").dispatch("submit");
  await page.until(() => page.calls.some(([, path]) => path === "/v1/chat/completions"));
  await page.settle();
  const [, , , sent] = page.calls.find(([, path]) => path === "/v1/chat/completions");
  return { offered, limit, taken, messages: JSON.parse(sent).messages, turns: page.byId("turns").children.map(each => each.textContent) };
} }
