/** Numbers in words. What is not known yet is a dash. */

export const UNKNOWN = "–";

const grouped = new Intl.NumberFormat("en-US");
const clockTime = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const shortTime = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });
const dayAndMonth = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short" });
const fullDate = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", year: "numeric" });

const orUnknown = (words) => (value) => (Number.isFinite(value) ? words(value) : UNKNOWN);

export const count = orUnknown((value) => grouped.format(value));

export const loss = orUnknown((value) => (Math.abs(value) < 100 ? value.toFixed(4) : value.toPrecision(4)));

export const threeDigits = orUnknown((value) => {
  if (value === 0) return "0";
  const isPlain = Math.abs(value) >= 1e-3 && Math.abs(value) < 1000;
  return isPlain ? value.toPrecision(3) : value.toExponential(2);
});

export const seconds = orUnknown((value) => `${value.toFixed(value < 10 ? 2 : 1)} s`);

export const bytes = orUnknown((value) => {
  const units = ["bytes", "kB", "MB", "GB", "TB"];
  let power = 0;
  while (value >= 999.5 && power < units.length - 1) {
    value /= 1000;
    power += 1;
  }
  return `${power === 0 || value >= 99.95 ? Math.round(value) : value.toFixed(1)} ${units[power]}`;
});

/** "40 s", "4 min 10 s", "1 h 12 min", "2 d 3 h": never more than two units. */
export const duration = orUnknown((value) => {
  const total = Math.round(value);
  const sizes = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const first = sizes.findIndex(([, size]) => total >= size);
  if (first === -1) return "0 s";
  const [unit, size] = sizes[first];
  const [nextUnit, nextSize] = sizes[first + 1] ?? [null, size];
  const rest = Math.floor((total % size) / nextSize);
  return `${Math.floor(total / size)} ${unit}${rest ? ` ${rest} ${nextUnit}` : ""}`;
});

export const clock = (time) => clockTime.format(time * 1000);

/** "Today, 14:05", "12 Mar, 09:30", "12 Mar 2024". */
export function when(time) {
  const date = new Date(time * 1000);
  const now = new Date();
  if (date.toDateString() === now.toDateString()) return `Today, ${shortTime.format(date)}`;
  if (date.getFullYear() === now.getFullYear()) return `${dayAndMonth.format(date)}, ${shortTime.format(date)}`;
  return fullDate.format(date);
}

export const capitalized = (word) => word.charAt(0).toUpperCase() + word.slice(1);

/** How far a run is, for a list. */
export function progress(run) {
  if (run.status === "queued") return "Waits for its turn";
  if (!run.active && !run.step) return "Ended before the first step";
  if (!run.total_steps) return "Getting ready";
  return `Epoch ${count(run.epoch)} of ${count(run.total_epochs)} · step ${count(run.step)} of ${count(run.total_steps)}`;
}
