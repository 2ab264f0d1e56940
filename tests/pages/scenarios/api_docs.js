{ play: async page => {
  const routes = page.root.all(each => each.className === "route");
  const found = routes.map(each => each.id);
  const chat = page.byId("post/v1/chat/completions");
  chat.open = true;
  const names = chat.all(each => each.tagName === "CODE").map(each => each.textContent);
  const opened = chat.all(each => each.tagName === "DETAILS");
  const deep = [];
  for (const each of opened.slice(0, 3)) { each.open = true; deep.push(each.childElementCount); }
  page.byId("find").value = "abort_requests";
  await page.byId("find").dispatch("input");
  const kept = routes.filter(each => !each.hidden).map(each => each.id);
  for (const each of routes) each.open = true;
  return { found, names, deep, kept, curl: chat.querySelector("pre").textContent, state: page.byId("state").textContent, title: page.byId("title").textContent };
} }
