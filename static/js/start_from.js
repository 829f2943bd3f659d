/** The field of the adapter to start from: takes an upload, and says what is in the adapter that it names. */

const field = document.querySelector('[data-field="start_from"]');
const input = field.querySelector('[name="start_from"]');
const upload = field.querySelector("[data-adapter-upload]");
const found = field.querySelector("[data-adapter-found]");
let asked = 0;

/** Ask the server what is in an adapter; only the answer to the last question is shown. */
async function ask(request) {
  const mine = ++asked;
  try {
    const response = await fetch("/api/adapters", { method: "POST", ...request });
    const answer = await response.json();
    if (mine !== asked) return null;
    show(response.ok ? `${answer.description}. Kind, rank, alpha and targets are taken from it.` : answer.error, !response.ok);
    return response.ok ? answer : null;
  } catch {
    if (mine === asked) show("The server can't be reached, or the upload broke off. Try again.", true);
    return null;
  }
}

function show(text, isError) {
  found.textContent = text;
  found.toggleAttribute("data-wrong", isError);
}

function describe() {
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
  show("Uploading…", false);
  const answer = await ask({ body });
  if (!answer) return;
  input.value = answer.path;
  input.dispatchEvent(new Event("input", { bubbles: true }));
});

if (input.value.trim() && !field.querySelector("[data-error]")) describe();
