/** The field of the adapter to start from: takes an upload, and says what is in the adapter that it names. */

const field = document.querySelector('[data-field="start_from"]');
const form = field.closest("form");
const input = field.querySelector('[name="start_from"]');
const upload = field.querySelector("[data-adapter-upload]");
const found = field.querySelector("[data-adapter-found]");
let asked = 0;
/** Whether an upload is under way or was refused: starting now would train without the adapter that was meant. */
let isUnsettled = false;

/** Ask the server what is in an adapter; only the answer to the last question is shown. */
async function ask(request) {
  const mine = ++asked;
  let answer;
  let isError = true;
  try {
    const response = await fetch("/api/adapters", { method: "POST", ...request });
    answer = await response.json();
    isError = !response.ok;
  } catch {
    answer = { error: "The server can't be reached, or the upload broke off. Try again." };
  }
  if (mine !== asked) return null;
  show(isError ? answer.error : `${answer.description}.`, isError);
  return isError ? null : answer;
}

function show(text, isError) {
  found.textContent = text;
  found.toggleAttribute("data-wrong", isError);
}

function describe() {
  isUnsettled = false;
  const path = input.value.trim();
  if (path) return ask({ headers: { "Content-Type": "application/json" }, body: JSON.stringify({ path }) });
  asked += 1;
  show("", false);
}

input.addEventListener("change", describe);
upload.addEventListener("change", async () => {
  if (!upload.files.length) return;
  const body = new FormData();
  for (const file of upload.files) body.append("files", file);
  upload.value = ""; // so that the same file can be chosen again
  isUnsettled = true;
  show("Uploading…", false);
  const answer = await ask({ body });
  if (!answer) return;
  isUnsettled = false;
  input.value = answer.path;
  input.scrollLeft = input.scrollWidth; // the end of a path is what tells it from others
  input.dispatchEvent(new Event("input", { bubbles: true }));
});

form.addEventListener(
  "submit",
  (event) => {
    if (!isUnsettled) return;
    event.preventDefault();
    event.stopImmediatePropagation(); // the form's own handler would count it as sent
    if (found.hasAttribute("data-wrong")) {
      found.textContent += " Not started: upload another, or press Start training again to go on without it.";
      isUnsettled = false;
    } else show("The upload isn't finished. Press Start training again when it is.", false);
    found.scrollIntoView({ block: "center" });
  },
  { capture: true },
);

if (input.value.trim() && !field.querySelector("[data-error]")) describe();
