// Write numbers for people.

const UNITS = ["B", "kB", "MB", "GB", "TB"];

/** 1234567 -> "1.23 MB" */
export function bytes(size) {
  let unit = 0;
  while (size >= 1000 && unit < UNITS.length - 1) {
    size /= 1000;
    unit += 1;
  }
  return `${Number(size.toPrecision(3))} ${UNITS[unit]}`;
}

/** Short, with the digits that matter: 0.0123, 1,234, 3e-5. */
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e");
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(4)));
}

/** 0.1234 -> "12.3 %" */
export const percent = (value) => `${Number((100 * value).toPrecision(3))} %`;

/** Seconds since 1970 -> "14:03" today, or "3 Nov, 14:03". */
export function time(seconds) {
  const date = new Date(1000 * seconds);
  const clock = date.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
  if (date.toDateString() === new Date().toDateString()) return clock;
  return `${date.toLocaleDateString("en-GB", { day: "numeric", month: "short" })}, ${clock}`;
}
