{ play: async page => {
  const asked = () => page.calls.filter(([, path]) => path === "/v1/requests").length;
  const locked = [page.byId("keyRow").hidden, page.byId("requestTable").hidden, asked()];
  await page.tick(1000);
  const repeated = asked();
  page.byId("key").value = "topsecretkey";
  await page.byId("key").dispatch("change");
  await page.settle();
  return { locked, repeated, rows: page.byId("requestTable").tBodies[0].rows.length, stored: page.stored.key, error: page.byId("requestsError").hidden };
} }
