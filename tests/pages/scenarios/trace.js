{ play: async page => {
  await page.until(() => page.byId("panels").querySelector("canvas"));
  await page.settle();
  page.frame();
  const slots = page.byId("panels").querySelector("canvas"), button = page.byId("empty");
  const words = canvas => canvas.drawn.filter(([name]) => name === "fillText").map(([, text]) => String(text));
  const folded = words(slots), pressed = [button.hidden, button.textContent, button.getAttribute("aria-pressed")];
  await button.click();
  page.frame();
  const all = words(slots);
  await button.click();
  page.frame();
  await slots.dispatch("pointermove", { clientX: 200, clientY: 30, offsetX: 200, pointerId: 1 });
  page.frame();
  return { folded, pressed, all, again: words(slots), tip: page.byId("tip").textContent, about: page.byId("about").textContent,
    heads: page.byId("panels").querySelectorAll("h2").map(each => each.textContent),
    figures: page.byId("figures").children.map(each => each.children.map(part => part.textContent)) };
} }
