/** The form of a new run: keeps what is typed across a reload and sends it once. The values come from the server. */

import { clearDraft, markDraftSent, markDraftUnsent, restoreDraft, saveDraft } from "./draft.js";

const form = document.querySelector("[data-config-form]");
const submitButtons = form.querySelectorAll("[type=submit]");
const note = form.querySelector("[data-draft-note]");

markDraftUnsent();
if ("draft" in form.dataset && restoreDraft(form)) note.textContent = "What you typed before is filled in.";

/** Fields that mean something only beside other choices are out of the way until these are made. */
function showFitting() {
  for (const field of form.querySelectorAll("[data-only]")) {
    const fits = Object.entries(JSON.parse(field.dataset.only)).every(([name, values]) => values.includes(form.elements[name].value));
    field.hidden = !fits && !field.querySelector("[data-error]");
  }
}

showFitting();
form.addEventListener("input", () => {
  showFitting();
  saveDraft(form);
});

form.addEventListener("submit", () => {
  saveDraft(form);
  markDraftSent();
  // Not at once: the pressed one says where the form goes.
  setTimeout(() => enable(false));
});

// Coming back with the browser's Back button can show the page as it was left: its form, with the buttons disabled, has
// been sent, and what is sent from here is another.
addEventListener("pageshow", (shown) => {
  enable(true);
  if (shown.persisted) form.elements.form_token.value = crypto.getRandomValues(new Uint32Array(4)).join("-");
});

function enable(isEnabled) {
  for (const button of submitButtons) button.disabled = !isEnabled;
}

form.querySelector("[data-reset]").addEventListener("click", () => {
  clearDraft();
  location.assign("/runs/new");
});
