/** The checkpoints on disk, newest first. */

import * as format from "./format.js";
import { redrawOn } from "./redraw.js";

export function showCheckpoints(store, page) {
  const list = page.querySelector("[data-checkpoints]");
  const empty = page.querySelector("[data-checkpoints-empty]");
  const template = page.querySelector("[data-checkpoint-template]");

  const downloads = page.querySelector("[data-download-as]");
  const choices = [...downloads.querySelectorAll("[data-download]")];
  const offerDownloads = () => {
    const query = new URLSearchParams(choices.map((choice) => [choice.dataset.download, choice.value]));
    for (const link of list.querySelectorAll('[data-cell="download"]')) link.search = query;
    downloads.querySelector("[data-download-help]").textContent = choices[0].selectedOptions[0].dataset.help;
  };
  downloads.addEventListener("change", offerDownloads);

  redrawOn(store, ["run", "finished"], () => {
    if (!store.run) return;
    const { id, checkpoints } = store.run;
    const names = checkpoints.map((checkpoint) => checkpoint.name).reverse();
    const shown = [...list.children];
    // Rows that stay are left in place: a rebuilt one would lose the keyboard focus on its button.
    for (const row of shown) if (!names.includes(row.dataset.checkpoint)) row.remove();
    const known = shown.map((row) => row.dataset.checkpoint);
    for (const checkpoint of checkpoints) {
      if (!known.includes(checkpoint.name)) list.prepend(makeRow(template, id, checkpoint, store.started?.validation_samples > 0));
    }
    for (const row of list.children) {
      const { best, resumable } = checkpoints.find((checkpoint) => checkpoint.name === row.dataset.checkpoint);
      row.querySelector('[data-cell="best"]').hidden = !best;
      row.querySelector('[data-cell="resume"]').hidden = !resumable || store.isActive;
    }
    offerDownloads();
    downloads.hidden = checkpoints.length === 0;
    empty.hidden = checkpoints.length > 0;
    empty.textContent = store.isFinal ? "None was written." : "None yet. One is written every few epochs and when you stop.";
  });
}

function makeRow(template, runId, checkpoint, isValidated) {
  const row = template.content.firstElementChild.cloneNode(true);
  const cell = (name) => row.querySelector(`[data-cell="${name}"]`);
  const title = `Step ${format.count(checkpoint.step)} · epoch ${format.count(checkpoint.epoch)}`;
  row.dataset.checkpoint = checkpoint.name;
  cell("name").textContent = title;
  const details = [format.bytes(checkpoint.bytes)];
  if (checkpoint.validation_loss !== null) details.push(`validation ${format.loss(checkpoint.validation_loss)}`);
  else if (isValidated) details.push("not validated");
  cell("details").textContent = details.join(" · ");
  cell("resume").href = `/runs/new?resume=${encodeURIComponent(runId)}&checkpoint=${encodeURIComponent(checkpoint.name)}`;
  cell("resume").setAttribute("aria-label", `Continue from ${title}`);
  cell("download").href = `/runs/${encodeURIComponent(runId)}/checkpoints/${encodeURIComponent(checkpoint.name)}/download`;
  cell("download").setAttribute("aria-label", `Download ${title}`);
  return row;
}
