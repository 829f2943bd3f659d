/** The loss by step: each step faint, the smoothed loss strong; validation, and marks for checkpoints and skipped steps. */

import { lossRange, stepRange, STEP_TICKS } from "./chart_ranges.js";
import * as format from "./format.js";
import { redrawOn } from "./redraw.js";

const COLOURS = ["accent", "text", "muted", "hairline", "chart-raw", "chart-validation", "chart-checkpoint", "state-bad"];
/** Closer than this, full-height lines would hide the curve. */
const CHECKPOINT_GAP = 32;
const CHECKPOINT_TICK = 12;
const FONT = "12px system-ui, sans-serif";

export function showLossChart(store, page) {
  const container = page.querySelector("[data-chart]");
  const empty = page.querySelector("[data-chart-empty]");
  const readout = page.querySelector("[data-readout]");
  const skippedKey = page.querySelector("[data-key-skipped]");
  const validationKey = page.querySelector("[data-key-validation]");
  const hasMouse = matchMedia("(hover: hover)").matches;
  let colours = readColours();
  let zoom = null;

  const axis = { stroke: () => colours.muted, font: FONT, grid: { stroke: () => colours.hairline, width: 1 }, ticks: { show: false } };
  const chart = new uPlot(
    {
      ...sizeOf(container),
      legend: { show: false },
      padding: [8, 32, 0, 0],
      cursor: { y: false, drag: { x: true, y: false, setScale: false }, points: { size: 6 }, bind: { dblclick: () => () => setZoom(null) } },
      scales: {
        x: { time: false, range: stepsInSight },
        y: { range: () => lossRange(store, stepsInSight()) },
      },
      axes: [
        { ...axis, size: 24, space: 64, incrs: STEP_TICKS, values: (_, steps) => (hasSteps() ? steps.map(format.count) : []) },
        { ...axis, size: 48, space: 48, values: (_, losses) => (hasSteps() ? losses.map(String) : []) },
      ],
      series: [
        {},
        { stroke: () => colours["chart-raw"], width: 1, points: { show: false } },
        { stroke: () => colours.accent, width: 2, points: { show: false } },
      ],
      hooks: {
        drawAxes: [() => drawCheckpoints(chart, store, colours)],
        draw: [
          () => drawValidations(chart, store, colours),
          () => drawSkips(chart, store, colours),
          () => drawNewest(chart, store, colours),
        ],
        setCursor: [showReadout],
        setSelect: [zoomToSelection],
      },
    },
    columnsOf(store),
    container,
  );

  function hasSteps() {
    return store.columns.step.length > 0 || store.skips.length > 0;
  }

  function stepsInSight() {
    return zoom ?? stepRange(store);
  }

  function draw() {
    empty.hidden = hasSteps() || store.run === null;
    if (store.isFinal) empty.textContent = "No step was made.";
    else if (store.run?.status === "queued") empty.textContent = "This run waits in the queue. It begins by itself when its device is free.";
    else empty.textContent = "The curve begins with the first step.";
    skippedKey.classList.toggle("is-absent", store.skips.length === 0);
    validationKey.hidden = !store.started?.validation_samples && store.validations.length === 0;
    chart.setData(columnsOf(store));
    showReadout();
  }

  function showReadout() {
    const { columns } = store;
    const index = chart?.cursor?.idx;
    const canZoom = hasMouse && hasSteps();
    const idle = zoom ? "Double-click to show all steps" : canZoom ? "Drag to zoom" : "";
    readout.textContent =
      index == null || columns.step[index] === undefined
        ? idle
        : `Step ${format.count(columns.step[index])}: ${format.loss(columns.loss[index])}, smoothed ${format.loss(columns.smoothed[index])}`;
  }

  function setZoom(range) {
    zoom = range;
    draw();
  }

  function zoomToSelection() {
    const { left, width } = chart.select;
    if (width < 4) return;
    const range = [chart.posToVal(left, "x"), chart.posToVal(left + width, "x")];
    chart.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    setZoom(range);
  }

  redrawOn(store, ["run", "started", "step", "skipped", "validation", "checkpoint", "finished"], draw);
  new ResizeObserver(() => chart.setSize(sizeOf(container))).observe(container);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    colours = readColours();
    chart.redraw(false);
  });
}

function columnsOf({ columns }) {
  return [columns.step, columns.loss, columns.smoothed];
}

function sizeOf(container) {
  return { width: container.clientWidth, height: container.clientHeight };
}

function readColours() {
  const style = getComputedStyle(document.documentElement);
  return Object.fromEntries(COLOURS.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

/** Where a step lies on the canvas, or null where it is out of sight. */
function canvasX(chart, step) {
  const { min, max } = chart.scales.x;
  return step >= min && step <= max ? Math.round(chart.valToPos(step, "x", true)) : null;
}

function drawCheckpoints(chart, store, colours) {
  const { ctx, bbox } = chart;
  ctx.save();
  ctx.strokeStyle = colours["chart-checkpoint"];
  ctx.lineWidth = devicePixelRatio;
  ctx.setLineDash([2 * devicePixelRatio, 4 * devicePixelRatio]);
  ctx.beginPath();
  const places = store.savedSteps.map((step) => canvasX(chart, step)).filter((x) => x !== null);
  const isCrowded = places.length * CHECKPOINT_GAP * devicePixelRatio > bbox.width;
  const height = isCrowded ? CHECKPOINT_TICK * devicePixelRatio : bbox.height;
  for (const x of places) {
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + height);
  }
  ctx.stroke();
  ctx.restore();
}

function drawSkips(chart, store, colours) {
  const { ctx, bbox } = chart;
  const size = 8 * devicePixelRatio;
  ctx.save();
  ctx.fillStyle = colours["state-bad"];
  for (const step of store.skips) {
    const x = canvasX(chart, step);
    if (x !== null) ctx.fillRect(x - devicePixelRatio, bbox.top + bbox.height - size, 2 * devicePixelRatio, size);
  }
  ctx.restore();
}

/** The held-out samples' losses: a line of its own with a dot for each measurement, as there are few. */
function drawValidations(chart, store, colours) {
  const { ctx, bbox } = chart;
  const radius = 3 * devicePixelRatio;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  ctx.strokeStyle = ctx.fillStyle = colours["chart-validation"];
  ctx.lineWidth = 1.5 * devicePixelRatio;
  const places = store.validations.map(({ step, loss }) => [chart.valToPos(step, "x", true), chart.valToPos(loss, "y", true)]);
  ctx.beginPath();
  for (const [x, y] of places) ctx.lineTo(x, y);
  ctx.stroke();
  for (const [x, y] of places) {
    ctx.beginPath();
    ctx.arc(x, y, radius, 0, 2 * Math.PI);
    ctx.fill();
  }
  ctx.restore();
}

/** A dot at the end of the smoothed line: where the run is, and all there is to see after its first step. */
function drawNewest(chart, store, colours) {
  const { ctx } = chart;
  const smoothed = store.columns.smoothed.at(-1) ?? null;
  const x = canvasX(chart, store.columns.step.at(-1));
  if (smoothed === null || x === null) return;
  ctx.save();
  ctx.fillStyle = colours.accent;
  ctx.beginPath();
  ctx.arc(x, chart.valToPos(smoothed, "y", true), 4 * devicePixelRatio, 0, 2 * Math.PI);
  ctx.fill();
  ctx.restore();
}
