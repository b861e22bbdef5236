"use strict";
// Tables sort by their heads; what has no value stays last.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, at) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const numbers = head.dataset.kind === "number";
      const before = head.getAttribute("aria-sort");
      const down = before === null ? numbers : before === "ascending";
      for (const each of heads) each.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const value = (row) => row.cells[at].dataset.value ?? row.cells[at].textContent.trim();
      const order = (a, b) => {
        if (value(a) === "" || value(b) === "") return (value(a) === "") - (value(b) === "");
        const apart = numbers ? value(a) - value(b) : value(a).localeCompare(value(b));
        return down ? -apart : apart;
      };
      table.tBodies[0].append(...[...table.tBodies[0].rows].sort(order));
    });
  });
}
// An answer as it came: each token is shown from its own time on, on both sides by one clock.
for (const replay of document.querySelectorAll(".replay")) {
  const [button, slow, place] = replay.querySelectorAll("button, select, input");
  const sides = [...replay.querySelectorAll("article")].map((side) => ({
    tokens: [...side.querySelectorAll("[data-at]")],
    count: side.querySelector(".count"),
  }));
  const status = replay.querySelector("[role=status]");
  const end = Number(place.max);
  let now = end, last = null;
  const show = () => {
    for (const side of sides) {
      const there = side.tokens.filter((token) => Number(token.dataset.at) <= now);
      for (const token of side.tokens) token.classList.toggle("later", Number(token.dataset.at) > now);
      const calls = there.length ? there[there.length - 1].dataset.call : 0;
      side.count.textContent = `${there.length} tokens, ${calls} target calls`;
    }
    place.value = now;
    place.setAttribute("aria-valuetext", `${(now / 1000).toFixed(2)} of ${(end / 1000).toFixed(2)} seconds`);
  };
  const stop = (said) => {
    last = null;
    button.textContent = "Play";
    status.textContent = said;
  };
  const step = (time) => {
    if (last === null) return;
    now = Math.min(end, now + (time - last) / Number(slow.value));
    last = time;
    show();
    if (now < end) requestAnimationFrame(step);
    else stop("Both are done.");
  };
  button.addEventListener("click", () => {
    if (last !== null) return stop(`Paused at ${(now / 1000).toFixed(2)} seconds.`);
    if (now >= end) now = 0;
    button.textContent = "Pause";
    status.textContent = "Playing.";
    last = performance.now();
    requestAnimationFrame(step);
  });
  place.addEventListener("input", () => {
    now = Number(place.value);
    if (last !== null) stop("Paused.");
    show();
  });
  replay.querySelector(".controls").hidden = false;
  show();
}
