/** What part of the data the chart shows. */

const LEAST_STEPS = 10;
const SAMPLED = 2000;
const QUANTILE = 0.98;

/** Distances between the marks of the step axis: whole numbers only, there is no half step. */
export const STEP_TICKS = [0, 1, 2, 3, 4, 5, 6].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));

/** From the first step to the newest, and wide enough that the first few don't fill the chart. */
export function stepRange({ columns, skips }) {
  const first = Math.min(columns.step[0] ?? Infinity, skips[0] ?? Infinity);
  const newest = Math.max(columns.step.at(-1) ?? 0, skips.at(-1) ?? 0);
  const start = Number.isFinite(first) ? first : 1;
  return [start, Math.max(newest, start + LEAST_STEPS)];
}

/** Around the losses in sight. The highest two percent may be cut off, or a few outliers, which thinning keeps, would flatten the rest. */
export function lossRange({ columns: { step, loss, smoothed }, validations }, [min, max]) {
  const inSight = (values) => values.filter((value, index) => value !== null && step[index] >= min && step[index] <= max);
  const averages = inSight(smoothed);
  if (!averages.length) return [0, 1];
  const losses = inSight(loss);
  const stride = Math.ceil(losses.length / SAMPLED);
  const sorted = losses.filter((_, index) => index % stride === 0).sort((a, b) => a - b);
  const usual = sorted.length ? [sorted[0], sorted[Math.ceil(QUANTILE * (sorted.length - 1))]] : [];
  let low = Infinity;
  let high = -Infinity;
  const validated = validations.filter((each) => each.step >= min && each.step <= max).map((each) => each.loss);
  for (const value of averages.concat(usual, validated)) {
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  const margin = (high - low) * 0.08 || Math.abs(high) * 0.1 || 0.1;
  // A loss is not negative; neither should the axis be because of the margin.
  return [low >= 0 ? Math.max(0, low - margin) : low - margin, high + margin];
}
