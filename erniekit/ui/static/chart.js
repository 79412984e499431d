// Curves over steps as SVG: several series, a readout under the pointer or the arrow keys, a table for screen readers.

import { fill, h, svg, table } from "./dom.js";
import { number } from "./format.js";

const WIDTH = 520, HEIGHT = 230, LEFT = 52, RIGHT = 12, TOP = 12, BOTTOM = 26;
const SMOOTHED_FROM = 60; // points from which on a mean is drawn in front of them
const MOST_POINTS = 1500; // that are drawn of one series
const MOST_ROWS = 200; // of the table

/**
 * Return a figure. `series`: [{name, colour: 1..8, points: [[step, value]], dots: bool}], of which empty ones are left out.
 * Where all values are above zero and differ tenfold, the axis is logarithmic, unless that is not wanted.
 */
export function chart(title, series, logarithmic = true) {
  const filled = series.map((each) => ({ ...each, points: each.points.filter(([, value]) => Number.isFinite(value)) })).filter(({ points }) => points.length);
  if (!filled.length) return null;
  const all = filled.flatMap(({ points }) => points);
  const [first, last] = bounds(all.map(([step]) => step));
  const [low, high] = bounds(all.map(([, value]) => value));
  const log = logarithmic && low > 0 && high / low >= 10;
  const scale = log ? Math.log10 : (value) => value;
  const [from, to] = padded(scale(low), scale(high));
  const x = (step) => LEFT + ((step - first) / (last - first || 1)) * (WIDTH - LEFT - RIGHT);
  const y = (value) => HEIGHT - BOTTOM - ((scale(value) - from) / (to - from || 1)) * (HEIGHT - TOP - BOTTOM);

  const grid = ticks(from, to, log).map((tick) => {
    const place = HEIGHT - BOTTOM - ((tick.at - from) / (to - from || 1)) * (HEIGHT - TOP - BOTTOM);
    return [svg("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: place, y2: place }), svg("text", { x: LEFT - 6, y: place + 4, "text-anchor": "end" }, tick.text)];
  }).flat();
  const steps = [first, (first + last) / 2, last].filter((step, index, list) => list.indexOf(step) === index);
  const below = steps.map((step, index) => svg("text", { x: x(step), y: HEIGHT - 8, "text-anchor": index === 0 ? "start" : index === steps.length - 1 ? "end" : "middle" }, number(Math.round(step))));
  const lines = filled.flatMap((each) => drawn(each, x, y));
  const cursor = svg("line", { class: "cursor", x1: 0, x2: 0, y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  const said = filled.map(({ name, points }) => `${name} ${number(points.at(-1)[1])} at step ${points.at(-1)[0]}`).join("; ");
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", tabindex: "0", "aria-label": `${title}: ${said}` }, grid, below, lines, cursor);

  const readout = h("output", {}, filled.length === 1 ? said : "");
  const stops = [...new Set(all.map(([step]) => step))].sort((a, b) => a - b);
  let stop = stops.length - 1;
  function read(index) {
    stop = Math.max(0, Math.min(stops.length - 1, index));
    const step = stops[stop];
    cursor.setAttribute("visibility", "visible");
    cursor.setAttribute("x1", x(step));
    cursor.setAttribute("x2", x(step));
    const values = filled.map(({ name, points }) => [name, points.find((point) => point[0] === step)?.[1]]).filter(([, value]) => value !== undefined);
    fill(readout, `step ${number(step)}: ${values.map(([name, value]) => `${name} ${number(value)}`).join(", ")}`);
  }
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    const at = first + (((event.clientX - box.left) / box.width) * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT) * (last - first);
    read(nearest(stops, at));
  });
  picture.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -Infinity, End: Infinity };
    if (!(event.key in moves)) return;
    event.preventDefault();
    read(stop + moves[event.key]);
  });

  const legend = filled.length > 1 ? h("ul", { class: "legend" }, filled.map(({ name, colour, points }) => h("li", {}, h("i", { class: `fill c${colour}` }), `${name} `, h("span", { class: "soft" }, number(points.at(-1)[1]))))) : null;
  const numbers = details(filled, stops);
  return h("figure", { class: "chart" }, h("figcaption", {}, title + (log ? " (logarithmic)" : ""), readout), picture, legend, numbers);
}

function details(filled, stops) {
  const element = h("details", { class: "small" }, h("summary", {}, "Numbers"));
  element.addEventListener("toggle", () => {
    if (!element.open || element.childElementCount > 1) return;
    const values = filled.map(({ points }) => new Map(points));
    const rows = stops.slice(-MOST_ROWS).map((step) => [String(step), ...values.map((each) => (each.has(step) ? number(each.get(step)) : ""))]);
    element.append(table(["step", ...filled.map(({ name }) => name)], rows, filled.map((_, index) => index + 1)));
  });
  return element;
}

function drawn({ points, colour, dots }, x, y) {
  const path = (list) => list.map(([step, value], index) => `${index ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`).join("");
  const line = (list, kind) => svg("path", { class: `line c${colour} ${kind}`, d: path(thinned(list)) });
  const marks = dots || points.length === 1 ? points.map(([step, value]) => svg("circle", { class: `dot c${colour}`, cx: x(step), cy: y(value), r: 3 })) : [];
  if (points.length < SMOOTHED_FROM) return [line(points, dots ? "dashed" : ""), ...marks];
  return [line(points, "faint"), line(smoothed(points), ""), ...marks];
}

/** Each point's mean with its neighbours, a fiftieth of the curve in all, as in loss.png. */
export function smoothed(points) {
  const reach = Math.max(1, Math.floor(points.length / 100));
  const sums = [0];
  for (const [, value] of points) sums.push(sums.at(-1) + value);
  return points.map(([step], index) => {
    const from = Math.max(0, index - reach), to = Math.min(points.length, index + reach + 1);
    return [step, (sums[to] - sums[from]) / (to - from)];
  });
}

function thinned(points) {
  const every = Math.ceil(points.length / MOST_POINTS);
  return every === 1 ? points : points.filter((_, index) => index % every === 0 || index === points.length - 1);
}

function bounds(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}

const padded = (from, to) => {
  const room = (to - from || Math.abs(to) || 1) * 0.06;
  return [from - room, to + room];
};

function ticks(from, to, log) {
  if (log) return decades(from, to);
  const rough = (to - from) / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
  const found = [];
  for (let at = Math.ceil(from / step) * step; at <= to; at += step) found.push({ at, text: number(Math.abs(at) < step / 1e6 ? 0 : at) });
  return found;
}

/** The ticks of a logarithmic axis: 1, 2 and 5 of each power of ten, or the powers alone where those are many. */
function decades(from, to) {
  const found = [];
  for (let power = Math.floor(from); power <= to; power += 1) {
    for (const digit of to - from > 2 ? [1] : [1, 2, 5]) {
      const at = Math.log10(digit) + power;
      if (at >= from && at <= to) found.push({ at, text: number(digit * 10 ** power) });
    }
  }
  return found;
}

function nearest(stops, wanted) {
  let low = 0, high = stops.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (stops[middle] < wanted) low = middle;
    else high = middle;
  }
  return wanted - stops[low] < stops[high] - wanted ? low : high;
}
