/** What happened, newest first. */

import * as format from "./format.js";
import { redrawOn } from "./redraw.js";

const LONGEST = 200;

const plural = (number, one, many) => `${format.count(number)} ${number === 1 ? one : many}`;

/** How long it took to get here, and in which phases it did. */
function readyAfter(phases) {
  if (!phases.length) return "";
  const total = phases.reduce((sum, [, seconds]) => sum + seconds, 0);
  const long = phases.filter(([, seconds]) => seconds >= 0.1);
  const each = long.map(([name, seconds]) => `${name.replace("loading_", "")} ${format.seconds(seconds)}`);
  return `. Ready after ${format.seconds(total)}: ${each.join(", ")}`;
}

/** What a run computes again: a switch in the events of older runs. */
function recomputed(choice) {
  if (choice === false || choice === "off") return "";
  return `, gradient checkpointing${choice === true || choice === "full" ? "" : ` of ${choice}`}`;
}

const words = {
  phase: (event) => event.message,
  started: (event) =>
    `Started on ${event.device} with ${event.precision}: ${plural(event.samples, "sample", "samples")}, ` +
    (event.validation_samples ? `${event.validation_samples} held out, ` : "") +
    `${format.count(event.trainable_parameters)} trainable parameters in ${format.count(event.adapted_modules)} modules` +
    (event.base_dtype === "fp32" ? "" : `, base in ${event.base_dtype}`) +
    recomputed(event.gradient_checkpointing) +
    (event.estimated_bytes ? `; about ${format.bytes(event.estimated_bytes)} of memory at the peak` : "") +
    readyAfter(Object.entries(event.phase_seconds ?? {})),
  skipped: (event) =>
    `Step ${format.count(event.step)} skipped: ${event.reason}` +
    (event.nonfinite_tensors ? ` in ${event.nonfinite_tensors} of ${event.total_tensors} tensors (${event.names.join(", ")}…)` : ""),
  epoch: (event) =>
    `Epoch ${format.count(event.epoch)}: loss ${format.loss(event.loss)}, ${plural(event.updates, "step", "steps")}` +
    `${event.skipped ? `, ${event.skipped} skipped` : ""} in ${event.seconds < 60 ? format.seconds(event.seconds) : format.duration(event.seconds)}`,
  validation: (event) => `Validation loss ${format.loss(event.loss)} after epoch ${format.count(event.epoch)}`,
  checkpoint: (event) => `Checkpoint of step ${format.count(event.step)} saved, ${format.bytes(event.bytes)}`,
  warning: (event) => `Warning: ${event.message}`,
  finished: (event) => {
    const reason = format.capitalized(event.reason);
    return event.message.startsWith(reason) ? event.message : `${reason}: ${event.message}`;
  },
};

export function showFeed(store, page) {
  const list = page.querySelector("[data-feed]");
  const template = page.querySelector("[data-feed-template]");
  let shown = 0;

  redrawOn(store, Object.keys(words), () => {
    const entries = store.feed.filter((event) => event.seq > shown).map((event) => makeEntry(template, event));
    shown = store.feed.at(-1)?.seq ?? 0;
    list.prepend(...entries.reverse());
    while (list.children.length > LONGEST) list.lastElementChild.remove();
  });
}

function makeEntry(template, event) {
  const entry = template.content.firstElementChild.cloneNode(true);
  const [time, text] = entry.children;
  entry.dataset.kind = event.type;
  time.dateTime = new Date(event.time * 1000).toISOString();
  time.textContent = format.clock(event.time);
  text.textContent = words[event.type](event);
  return entry;
}
