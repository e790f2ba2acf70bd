// Times, places and sums of the picture of a step, in microseconds: functions of numbers only.

/** Running sums. */
function sums(numbers) {
  let total = 0;
  return Float64Array.from(numbers, (number) => (total += number));
}

/** The steps of a row's memory with absolute times and values, beside what is always there. */
function decodeMemory(memory) {
  const value = sums(memory.change);
  const peak = memory.static + value.reduce((high, next) => Math.max(high, next), 0);
  return { static: memory.static, time: sums(memory.gap), value, peak };
}

/** Absolute times from the gaps before them and their durations. */
function decodeTimes({ gap, duration }) {
  const start = new Float64Array(gap.length);
  const end = new Float64Array(gap.length);
  for (let i = 0, now = 0; i < gap.length; i++) {
    start[i] = now + gap[i];
    end[i] = now = start[i] + duration[i];
  }
  return { start, end };
}

/** A row of the data with absolute times: `start`, `end`, `stageOf(i)`, its gradient sums, its lanes, and its memory. */
function decodeRow(data, row, index) {
  const { start, end } = decodeTimes(row);
  const sums = decodeTimes(row.sums || { gap: [], duration: [] });
  const lanes = (row.lanes || []).map((lane) => ({ ranks: 1, ...decodeTimes(lane) }));
  const stageOf = Array.isArray(row.stage) ? (i) => row.stage[i] : () => row.stage;
  const stages = Array.isArray(row.stage) ? [...new Set(row.stage)] : [row.stage];
  const modules = [...new Set(stages.map((stage) => data.stages[stage][0]))];
  const memory = row.memory && decodeMemory(row.memory);
  return { index, label: row.label, ranks: row.ranks, code: row.task, start, end, sums, lanes, stageOf, stages, modules, memory };
}

/** What task `i` of a decoded row is. */
function taskOf(data, row, i) {
  const code = row.code[i];
  const [module, replica, stage] = data.stages[row.stageOf(i)];
  const number = Math.floor(code / data.kinds.length);
  const name = data.modules[module].name;
  const [microbatch, chunk] = [Math.floor(number / data.chunks), number % data.chunks];
  const kind = data.kinds[code % data.kinds.length];
  const text = `${kind.word} ${name}.r${replica}.s${stage} mb${microbatch}.c${chunk}`;
  return { module, name, replica, stage, microbatch, chunk, kind: kind.label, text, start: row.start[i], end: row.end[i] };
}

/** How many of the ascending `values` are at most `limit`. */
function countUpTo(values, limit) {
  let low = 0;
  let high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= limit) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** The view made `factor` times as long around `at`, within the step. */
function zoomed(view, factor, at, whole) {
  const length = Math.min(whole, Math.max(Math.min(whole, 20), (view.end - view.start) * factor));
  const share = (at - view.start) / (view.end - view.start);
  return moved({ start: at - share * length, end: at + (1 - share) * length }, 0, whole);
}

/** The view moved by a time, within the step. */
function moved(view, by, whole) {
  const length = view.end - view.start;
  const start = Math.min(Math.max(0, view.start + by), whole - length);
  return { start, end: start + length };
}

/** Round times in a view, about `wanted` of them, and the digits after the point that they need in ms. */
function ticks(view, wanted) {
  const rough = Math.max((view.end - view.start) / Math.max(1, wanted), 1e-9);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const times = [];
  for (let i = Math.ceil(view.start / step); i * step <= view.end; i++) times.push(i * step);
  return { times, digits: Math.max(0, -Math.floor(Math.log10(step / 1000) + 1e-9)) };
}

/** Raises each column of `out` to the highest value of a step function in its part of the view. */
function columnMax(memory, view, out) {
  const columns = out.length;
  const perTime = columns / (view.end - view.start);
  let i = countUpTo(memory.time, view.start);
  let value = memory.static + (i ? memory.value[i - 1] : 0);
  for (let column = 0; ; i++) {
    const time = i < memory.time.length ? memory.time[i] : Infinity;
    const last = Math.min(columns - 1, Math.floor((time - view.start) * perTime));
    for (; column < last; column++) if (out[column] < value) out[column] = value;
    if (out[last] < value) out[last] = value;
    if (time >= view.end) return out;
    value = memory.static + memory.value[i];
  }
}

/** The share of the rows' ranks that are in a task, for each of some columns of the view. */
function busyShare(rows, view, columns) {
  const perTime = columns / (view.end - view.start);
  const out = new Float64Array(columns + 1);
  const steps = new Float64Array(columns + 2); // where whole columns begin and stop to be busy
  let ranks = 0;
  for (const row of rows) {
    ranks += row.ranks;
    for (let i = countUpTo(row.end, view.start); i < row.start.length && row.start[i] < view.end; i++) {
      const from = Math.max(0, (row.start[i] - view.start) * perTime);
      const to = Math.min(columns, (row.end[i] - view.start) * perTime);
      const [first, last] = [Math.floor(from), Math.floor(to)];
      if (first === last) {
        out[first] += row.ranks * (to - from);
        continue;
      }
      out[first] += row.ranks * (first + 1 - from);
      out[last] += row.ranks * (to - last);
      steps[first + 1] += row.ranks;
      steps[last] -= row.ranks;
    }
  }
  let whole = 0;
  return out.subarray(0, columns).map((part, column) => (part + (whole += steps[column])) / (ranks || 1));
}

/** Red, green and blue of a module's colour in tasks of a kind with a tint from 0 to 1. */
function shadeOf(color, tint, isDark) {
  if (!isDark) return mixed(color, [255, 255, 255], tint);
  return tint < 1 ? mixed(color, [20, 23, 28], 0.27 + 0.73 * tint) : mixed(color, [255, 255, 255], 0.85);
}

/** Red, green and blue of `#rrggbb`, `share` of it mixed with `other`. */
function mixed(color, other, share) {
  return [1, 3, 5].map((i, part) => Math.round(share * parseInt(color.slice(i, i + 2), 16) + (1 - share) * other[part]));
}

/** Of a dark and a light text colour the one that reads better on a colour. */
function textOn(color) {
  const linear = color.map((part) => (part / 255 <= 0.04045 ? part / 3294.6 : ((part / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] > 0.19 ? "#161616" : "#ffffff";
}

/** A time in ms with some digits after the point. */
function ms(time, digits = 3) {
  return (time / 1000).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** The unit that suits an amount of memory. */
function byteUnit(scale) {
  const power = scale >= 2 ** 29 ? 3 : scale >= 2 ** 19 ? 2 : 1;
  return { size: 1024 ** power, name: ["", "KiB", "MiB", "GiB"][power] };
}

/** An amount of memory in words. */
function bytes(value) {
  const { size, name } = byteUnit(value);
  return `${Number((value / size).toPrecision(3))} ${name}`;
}
