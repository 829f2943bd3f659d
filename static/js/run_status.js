/** The state of the run: badge, connection, actions, outcome panel and the page's title. */

import * as format from "./format.js";
import { redrawOn } from "./redraw.js";

export function showStatus(store, page) {
  const find = (hook) => page.querySelector(`[data-${hook}]`);
  const badge = find("status");
  const connection = find("connection");
  const stopForm = find("stop-form");
  const stopButton = find("stop");
  const afterEnd = find("after-end");
  const killForm = find("kill-form");
  const resumeForm = find("resume-form");
  const trainLonger = find("train-longer");
  const outcome = find("outcome");
  const log = find("log");

  redrawOn(store, ["run", "finished", "connection"], () => {
    setText(connection, connectionWords(store));
    connection.dataset.connection = store.connection;
    if (!store.run) return;
    const { status, log_tail: logTail } = store.run;
    setText(badge, status);
    badge.dataset.state = status;
    stopForm.hidden = store.isFinal;
    afterEnd.hidden = !store.isFinal;
    killForm.hidden = !store.run.may_kill;
    const newest = store.run.checkpoints.findLast((checkpoint) => checkpoint.resumable);
    const isResumable = store.run.resume_from !== null || newest !== undefined;
    setText(resumeForm.querySelector("[data-resume]"), `Continue ${newest ? `from step ${format.count(newest.step)}` : "training"}`);
    resumeForm.hidden = !isResumable || status === "completed";
    trainLonger.hidden = !isResumable || status !== "completed";
    if (status === "stopping") disable(stopButton);
    else if (!stopButton.disabled) setText(stopButton, status === "queued" ? "Take out of the queue" : "Stop and save");

    if (outcome.hidden && status === "crashed") log.open = true;
    outcome.hidden = !store.isFinal;
    outcome.dataset.state = status;
    setText(find("outcome-title"), format.capitalized(status));
    setText(find("outcome-message"), store.run.message ?? "");
    log.hidden = !["crashed", "failed"].includes(status);
    setText(find("log-tail"), logTail.join("\n") || "The trainer printed nothing.");
  });

  // At once rather than in a frame: a tab in the background gets no frames, and the title is all one sees of it.
  for (const kind of ["run", "step", "finished"]) store.addEventListener(kind, () => (document.title = titleWords(store)));

  stopForm.addEventListener("submit", async (submit) => {
    submit.preventDefault();
    disable(stopButton);
    try {
      // The answer leads back to this page, which is up to date already.
      const answer = await fetch(stopForm.action, { method: "POST", redirect: "manual" });
      if (!answer.ok && answer.type !== "opaqueredirect") throw new Error(answer.statusText);
    } catch {
      stopButton.disabled = false;
      stopButton.textContent = "Try to stop again";
    }
  });
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function disable(stopButton) {
  stopButton.disabled = true;
  setText(stopButton, "Stopping…");
}

function connectionWords(store) {
  if (store.connection === "reconnecting") return "Reconnecting…";
  if (store.connection === "deleted") return "This run was deleted.";
  return store.connection === "connected" && store.isActive ? "Live" : "";
}

function titleWords(store) {
  const name = store.run?.name ?? "Descant";
  const status = store.run?.status;
  if (status !== "running" || !store.totalSteps) return status ? `${format.capitalized(status)} · ${name}` : name;
  return `${Math.floor((100 * store.stepsDone) / store.totalSteps)} % · ${name}`;
}
