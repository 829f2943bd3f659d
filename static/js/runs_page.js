/** The list of runs, brought up to date in place every two seconds while somebody can see it. */

import * as format from "./format.js";

const INTERVAL = 2000;

const list = document.querySelector("[data-runs]");
const queueList = document.querySelector("[data-queue]");
const template = document.querySelector("[data-run-template]");
const unreachable = document.querySelector("[data-unreachable]");

async function poll() {
  if (!document.hidden) {
    try {
      const answer = await fetch("/api/runs");
      if (answer.status === 401) return location.reload(); // signed out in another tab: on to the sign-in page
      if (!answer.ok) throw new Error(answer.statusText);
      const { runs, queue } = await answer.json();
      const waiting = queue.map((id) => runs.find((run) => run.id === id)).filter(Boolean);
      show(queueList, waiting);
      waiting.forEach((run, index) => offerPlaces(queueList.children[index], run.id, index + 1, waiting.length));
      show(list, runs.filter((run) => !waiting.includes(run)));
      document.querySelector("[data-queue-section]").hidden = waiting.length === 0;
      document.querySelector("[data-empty]").hidden = runs.length > 0;
      document.querySelector("[data-new-run]").hidden = runs.length === 0;
      unreachable.textContent = "";
    } catch {
      unreachable.textContent = "Can't reach Descant; trying again…";
    }
  }
  setTimeout(poll, INTERVAL);
}

function show(list, runs) {
  const rows = new Map([...list.children].map((row) => [row.dataset.runRow, row]));
  const ids = new Set(runs.map((run) => run.id));
  for (const [id, row] of rows) if (!ids.has(id)) row.remove();
  runs.forEach((run, index) => {
    const row = rows.get(run.id) ?? template.content.firstElementChild.cloneNode(true);
    fill(row, run);
    // Only rows that are out of place are moved, so that the focus stays on a link.
    if (list.children[index] !== row) list.insertBefore(row, list.children[index] ?? null);
  });
}

/** What can be done with a run that waits at `position`, from 1, of `length`. */
function offerPlaces(row, id, position, length) {
  const address = `/runs/${encodeURIComponent(id)}`;
  const form = (name) => row.querySelector(`[data-cell="${name}"]`);
  for (const [name, place] of [["earlier", position - 1], ["later", position + 1]]) {
    form(name).action = `${address}/queue`;
    form(name).elements.position.value = place;
    form(name).querySelector("button").disabled = place < 1 || place > length;
  }
  form("cancel").action = `${address}/stop`;
  form("queue").hidden = false;
}

function fill(row, run) {
  const cell = (name) => row.querySelector(`[data-cell="${name}"]`);
  const setText = (name, text) => {
    if (cell(name).textContent !== text) cell(name).textContent = text;
  };
  row.dataset.runRow = run.id;
  setText("name", run.name);
  cell("name").href = `/runs/${encodeURIComponent(run.id)}`;
  setText("status", run.status);
  cell("status").dataset.state = run.status;
  cell("bar").max = run.total_steps || 1;
  cell("bar").value = run.step;
  setText("progress", format.progress(run));
  setText("loss", format.loss(run.loss));
  setText("when", format.when(run.created));
  cell("when").dateTime = new Date(run.created * 1000).toISOString();
}

poll();
