{ play: async page => {
  const cards = page.root.all(each => (each.className || "").startsWith("worker") && each.tagName === "ARTICLE");
  return { problems: page.byId("problems").children.map(each => each.textContent), state: page.byId("state").textContent,
    cards: cards.map(each => [each.className, each.all(inner => inner.tagName === "P").map(inner => inner.hidden ? "" : inner.textContent)]) };
} }
