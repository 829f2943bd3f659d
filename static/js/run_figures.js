/** The progress line and the row of figures. */

import * as format from "./format.js";
import { redrawOn } from "./redraw.js";

export function showFigures(store, page) {
  const cells = Object.fromEntries([...page.querySelectorAll("[data-figure]")].map((cell) => [cell.dataset.figure, cell]));
  const bar = page.querySelector("[data-progress]");
  const phase = page.querySelector("[data-phase]");

  redrawOn(store, ["run", "phase", "started", "step", "finished"], () => {
    const { columns, started, run } = store;
    const newest = (name) => columns[name].at(-1);
    const words = {
      epoch: format.count(newest("epoch") ?? (run?.epoch || null)),
      total_epochs: format.count(started?.total_epochs ?? run?.total_epochs),
      step: format.count(store.stepsDone || null),
      total_steps: format.count(store.totalSteps),
      time_left: timeWords(store),
      loss: format.loss(newest("loss")),
      smoothed_loss: format.loss(newest("smoothed")),
      learning_rate: format.threeDigits(newest("learning_rate")),
      grad_norm: format.threeDigits(newest("grad_norm")),
      seconds: store.pace === null ? format.UNKNOWN : `${format.seconds(store.pace)} a step`,
      memory_bytes: format.bytes(newest("memory_bytes") || null),
    };
    for (const [name, text] of Object.entries(words)) if (cells[name].textContent !== text) cells[name].textContent = text;
    bar.max = store.totalSteps || 1;
    bar.value = store.stepsDone;
    // While it trains the figures say so; other phases are what one waits for.
    phase.textContent = store.isActive ? (store.run.message ?? phaseWords(store)) : "";
  });
}

function phaseWords({ phase }) {
  return phase && phase.name !== "training" ? `${phase.message}…` : "";
}

function timeWords(store) {
  if (store.isFinal) return store.firstTime === null ? format.UNKNOWN : `took ${format.duration(store.lastTime - store.firstTime)}`;
  return store.timeLeft === null ? format.UNKNOWN : `${format.duration(store.timeLeft)} left`;
}
