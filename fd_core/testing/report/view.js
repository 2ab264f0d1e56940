/* Filters of the table of tests, by outcome and by name; a section stays while one of its tests does. */
const rows = [...document.querySelectorAll("tbody tr")];
const buttons = [...document.querySelectorAll("#filters button")];
const search = document.getElementById("search");
let kind = "";

function filter() {
  const words = search.value.trim().toLowerCase();
  let section = null, shown = 0;
  for (const row of rows) {
    if (row.className === "section") {
      section = row;
      section.hidden = true;
      continue;
    }
    const name = `${section.firstElementChild.textContent} ${row.firstElementChild.textContent}`.toLowerCase();
    const fits = (!kind || row.dataset.kinds.split(" ").includes(kind)) && name.includes(words);
    row.hidden = !fits;
    if (fits) {
      section.hidden = false;
      shown += 1;
    }
  }
  document.getElementById("shown").textContent = `${shown} of ${rows.filter(row => row.className === "test").length} tests`;
}

for (const button of buttons) {
  button.addEventListener("click", () => {
    kind = button.dataset.kind;
    for (const each of buttons) each.setAttribute("aria-pressed", String(each === button));
    filter();
  });
}
search.addEventListener("input", filter);
followTheme(document.getElementById("theme"));
filter();
