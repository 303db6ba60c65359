"use strict";
// The daemon draws the page; this fetches it again and puts its main part in place of the old one.
const EVERY_MS = 2000;
const lost = document.getElementById("lost");

async function refresh() {
  // A page that nobody looks at asks nothing, and a selection stays.
  if (!document.hidden && getSelection().type !== "Range") {
    try {
      const reply = await fetch("/", { cache: "no-store", signal: AbortSignal.timeout(5000) });
      if (!reply.ok) throw new Error(reply.statusText);
      const page = new DOMParser().parseFromString(await reply.text(), "text/html");
      show(page.querySelector("main"));
      lost.hidden = true;
    } catch {
      if (lost.hidden) {
        document.getElementById("since").textContent = new Date().toLocaleTimeString();
        lost.hidden = false;
      }
    }
  }
  setTimeout(refresh, EVERY_MS);
}

function show(fresh) {
  const old = document.querySelector("main");
  const places = [...old.querySelectorAll(".scroll")].map((part) => part.scrollLeft);
  const focused = [...old.querySelectorAll(".scroll")].indexOf(document.activeElement);
  old.replaceWith(fresh);
  const parts = [...fresh.querySelectorAll(".scroll")];
  parts.forEach((part, index) => { part.scrollLeft = places[index] ?? 0; });
  parts[focused]?.focus({ preventScroll: true });
}

setTimeout(refresh, EVERY_MS);
