/** Forms with `data-confirm` ask that question before they are sent. */
export function askBeforeSubmit(root) {
  for (const form of root.querySelectorAll("form[data-confirm]")) {
    form.addEventListener("submit", (submit) => {
      if (!confirm(form.dataset.confirm)) submit.preventDefault();
    });
  }
}
