/** The line of the form that says how much memory a run with these settings takes. */

import * as format from "./format.js";

const PAUSE_MS = 300;

const form = document.querySelector("[data-config-form]");
const line = form.querySelector("[data-estimate]");
let waiting;
let asked = 0;

/** The form as the API takes settings; fields out of the way mean nothing. */
function settings() {
  const given = {};
  for (const control of form.elements) {
    if (!control.name || control.name === "form_token" || control.closest("[hidden]")) continue;
    const [inner, section] = control.name.split(".").reverse();
    (section ? (given[section] ??= {}) : given)[inner] = control.value;
  }
  return given;
}

function words({ totals, free }) {
  const choices = Object.entries(totals).sort(([, one], [, other]) => other - one);
  const sizes = choices.map(([choice, total]) => `${format.bytes(total)} ${/\d/.test(choice) ? `with one block in ${choice}` : choice}`);
  return `Takes about this much memory, by gradient checkpointing: ${sizes.join(", ")}.${free === null ? "" : ` ${format.bytes(free)} of main memory are free.`}`;
}

async function ask() {
  const mine = ++asked;
  try {
    const response = await fetch("/api/estimate", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(settings()),
    });
    const answer = await response.json();
    if (mine === asked) line.textContent = response.ok ? words(answer) : answer.error;
  } catch {
    if (mine === asked) line.textContent = ""; // whoever starts the run is told that the server is gone
  }
}

form.addEventListener("input", () => {
  clearTimeout(waiting);
  waiting = setTimeout(ask, PAUSE_MS);
});
ask();
