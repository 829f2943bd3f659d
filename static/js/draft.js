/**
 * What was typed into the form but not yet made into a run, kept for this tab.
 *
 * A draft that was sent is dropped only when a run's page opens: until then the server may have refused it, or never
 * have received it.
 */

const DRAFT = "descant.draft";
const SENT = "descant.draft.sent";

export function saveDraft(form) {
  const { form_token, ...typed } = Object.fromEntries(new FormData(form));
  sessionStorage.setItem(DRAFT, JSON.stringify(typed));
}

/** Put the draft into the form. Says whether that changed anything. */
export function restoreDraft(form) {
  const draft = JSON.parse(sessionStorage.getItem(DRAFT) ?? "{}");
  let isChanged = false;
  for (const control of form.elements) {
    if (!Object.hasOwn(draft, control.name) || control.value === draft[control.name]) continue;
    const before = control.value;
    control.value = draft[control.name];
    // A choice that is no longer offered leaves a select empty.
    if (control.value === "" && draft[control.name] !== "") control.value = before;
    else isChanged = true;
  }
  return isChanged;
}

export function clearDraft() {
  sessionStorage.removeItem(DRAFT);
  sessionStorage.removeItem(SENT);
}

export const markDraftSent = () => sessionStorage.setItem(SENT, "yes");
export const markDraftUnsent = () => sessionStorage.removeItem(SENT);

export function settleDraft() {
  if (sessionStorage.getItem(SENT)) clearDraft();
}
