{ play: async page => {
  const table = page.byId("requestTable"), cells = () => table.tBodies[0].rows.map(row => row.cells.map(cell => cell.textContent));
  const before = cells(), rows = table.tBodies[0].rows;
  await page.tick(1000);
  const same = rows.every((row, i) => table.tBodies[0].rows[i] === row);
  await rows.find(row => row.cells[0].textContent === "one").lastChild.lastChild.click();
  await page.settle();
  await page.tick(1000);
  return { before, same, after: cells(), state: page.byId("state").textContent, count: page.byId("requestsText").textContent,
    posted: page.calls.filter(([method]) => method === "POST").map(([, path, , body]) => [path, body]) };
} }
