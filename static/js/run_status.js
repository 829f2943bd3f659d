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
    stopForm.hidden = !store.isActive;
    afterEnd.hidden = store.isActive;
    const isResumable = store.run.resume_from !== null || store.run.checkpoints.some((checkpoint) => checkpoint.resumable);
    resumeForm.hidden = !isResumable || status === "completed";
    trainLonger.hidden = !isResumable || status !== "completed";
    if (status === "stopping") disable(stopButton);

    if (outcome.hidden && status === "crashed") log.open = true;
    outcome.hidden = !store.isFinal;
    outcome.dataset.state = status;
    setText(find("outcome-title"), format.capitalized(status));
    setText(find("outcome-message"), outcomeWords(store.run));
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

function outcomeWords({ status, message, exit_status: code, checkpoints }) {
  if (status !== "crashed") return message ?? "";
  const sentences = [`The trainer ended unexpectedly: ${format.exitStatus(code)}.`];
  if (code === -9) sentences.push("Often this is the system running out of memory.");
  if (checkpoints.length) sentences.push("The checkpoints below are complete.");
  return sentences.join(" ");
}

function titleWords(store) {
  const name = store.run?.name ?? "Descant";
  const status = store.run?.status;
  if (status !== "running" || !store.totalSteps) return status ? `${format.capitalized(status)} · ${name}` : name;
  return `${Math.floor((100 * store.stepsDone) / store.totalSteps)} % · ${name}`;
}
