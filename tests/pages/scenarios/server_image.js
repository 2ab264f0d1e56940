{ before: page => {
  page.context.FileReader = class { readAsDataURL(file) { this.result = file.url; Promise.resolve().then(() => this.onload()); } };
}, play: async page => {
  const offered = !page.byId("imageRow").hidden;
  page.byId("image").files = [{ name: "cat.png", url: "data:image/png;base64," }];
  page.byId("prompt").value = "What is it?";
  await page.byId("form").dispatch("submit");
  await page.until(() => page.calls.some(([, path]) => path === "/v1/chat/completions"));
  await page.settle();
  const [, , , sent] = page.calls.find(([, path]) => path === "/v1/chat/completions");
  return { offered, messages: JSON.parse(sent).messages, turns: page.byId("turns").children.map(each => each.textContent) };
} }
