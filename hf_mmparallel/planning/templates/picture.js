// Draws one step of a plan: rows of ranks, the share of ranks that are busy, and memory, on one time axis.

const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const whole = Math.max(1, data.end);
const allRows = data.rows.map((row, index) => decodeRow(data, row, index));
const hidden = new Set();
let rows = allRows; // those with a module that is not hidden
let view = { start: 0, end: whole };
let chosen = null;
let colors = {};
const canvases = { gantt: $("gantt"), busy: $("busy"), memory: $("memory") };
const AXIS = 22;
const BUSY_HEIGHT = 46;
const MEMORY_HEIGHT = 150;
const hasLanes = allRows.some((row) => row.lanes.length);
const layout = { left: 0, width: 0, full: 0, row: 0, lane: 0, height: 0 };

const timeAt = (x) => view.start + ((x - layout.left) / layout.width) * (view.end - view.start);
const xOf = (time) => layout.left + ((time - view.start) / (view.end - view.start)) * layout.width;
const isNarrow = () => layout.full < 640;
const clampX = (x) => Math.max(layout.left, Math.min(layout.left + layout.width, x));

/** Colours of the scheme that is on: of each module the full one, and one for each kind of task. */
function readColors() {
  const style = getComputedStyle(document.documentElement);
  const css = (name) => style.getPropertyValue(`--${name}`).trim();
  colors = Object.fromEntries(["paper", "panel", "line", "ink", "quiet", "warn", "mark"].map((name) => [name, css(name)]));
  const isDark = style.colorScheme === "dark";
  colors.modules = data.modules.map(({ color }) => {
    const shade = (tint) => {
      const parts = shadeOf(color, tint, isDark);
      return { fill: `rgb(${parts})`, text: textOn(parts) };
    };
    return { full: shade(1), kinds: data.kinds.map((kind) => shade(kind.tint)) };
  });
}

/** Sizes that follow from the width of the window and the number of rows. */
function measure() {
  layout.full = $("chart").clientWidth;
  layout.lane = hasLanes ? (rows.length > 24 ? 7 : 10) : 0;
  layout.row = (rows.length > 24 ? 17 : 24) + layout.lane;
  layout.height = Math.min(AXIS + rows.length * layout.row, Math.max(220, Math.round(0.6 * window.innerHeight)));
  $("scroll").style.height = `${layout.height}px`;
  $("spacer").style.height = `${AXIS + rows.length * layout.row - layout.height}px`;
  const inner = $("scroll").clientWidth; // without the scroll bar
  const pen = canvases.gantt.getContext("2d");
  pen.font = "600 11px system-ui, sans-serif";
  const widest = Math.max(100, ...allRows.map((row) => pen.measureText(labelOf(row)).width + 22));
  layout.left = isNarrow() ? 100 : Math.min(widest, Math.round(0.4 * layout.full));
  layout.width = inner - layout.left - 8;
}

/** A canvas cleared, in CSS pixels. */
function prepare(canvas, height) {
  const scale = window.devicePixelRatio || 1;
  const width = canvas === canvases.gantt ? $("scroll").clientWidth : layout.full;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const pen = canvas.getContext("2d");
  pen.scale(canvas.width / width, scale);
  pen.fillStyle = colors.paper;
  pen.fillRect(0, 0, width, height);
  pen.textBaseline = "middle";
  pen.font = "11px system-ui, sans-serif";
  return pen;
}

/** Vertical lines at round times; their labels where `labels` says so. */
function grid(pen, top, bottom, labels) {
  const { times, digits } = ticks(view, layout.width / 110);
  pen.textAlign = "center";
  for (const time of times) {
    const x = Math.round(xOf(time)) + 0.5;
    pen.fillStyle = colors.line;
    pen.fillRect(x - 0.5, top, 1, bottom - top);
    if (!labels) continue;
    pen.fillStyle = colors.quiet;
    const text = `${ms(time, digits)} ms`;
    const half = pen.measureText(text).width / 2;
    pen.fillText(text, Math.max(layout.left + half, Math.min(layout.left + layout.width - half, x)), AXIS / 2);
  }
}

/** A text in the gutter, cut to what fits. */
function gutter(pen, text, y, width = layout.left - 14) {
  pen.textAlign = "left";
  let shown = text;
  while (shown && pen.measureText(shown).width > width) shown = shown.slice(0, -1);
  pen.fillText(shown === text ? text : `${shown.slice(0, -1)}…`, 8, y);
}

function drawGantt() {
  const pen = prepare(canvases.gantt, layout.height);
  const scroll = $("scroll").scrollTop;
  const first = Math.floor(scroll / layout.row);
  const last = Math.min(rows.length, Math.ceil((scroll + layout.height - AXIS) / layout.row) + 1);
  for (let r = first; r < last; r++) {
    const y = AXIS + r * layout.row - scroll;
    pen.fillStyle = colors.panel;
    pen.fillRect(layout.left, y + 1, layout.width, layout.row - 2);
  }
  grid(pen, AXIS, layout.height, false);
  for (let r = first; r < last; r++) drawRow(pen, rows[r], AXIS + r * layout.row - scroll);
  pen.fillStyle = colors.paper; // over the row that is scrolled half out
  pen.fillRect(0, 0, layout.full, AXIS);
  grid(pen, AXIS - 4, AXIS, true);
}

/** The ranks of a row and, where there is room, their modules and stages: `ranks 0-7  vision 0, language_model 0 4`. */
function labelOf(row) {
  if (isNarrow()) return row.label;
  const stages = new Map();
  for (const index of row.stages) {
    const [module, , stage] = data.stages[index];
    stages.set(module, `${stages.get(module) ?? data.modules[module].name} ${stage}`);
  }
  return `${row.label}  ${[...stages.values()].join(", ") || "idle"}`;
}

function drawRow(pen, row, y) {
  const bars = layout.row - layout.lane;
  const [top, height, middle] = [y + 2, bars - 4, y + bars / 2 + 0.5];
  if (row === chosen) {
    pen.fillStyle = colors.mark;
    pen.fillRect(0, y, 4, layout.row);
  }
  pen.fillStyle = colors.ink;
  pen.font = `${row === chosen ? "600 " : ""}11px system-ui, sans-serif`;
  gutter(pen, labelOf(row), middle);
  pen.font = "11px system-ui, sans-serif";
  pen.textAlign = "center";
  pen.fillStyle = colors.quiet;
  for (let i = countUpTo(row.sums.end, view.start); i < row.sums.start.length && row.sums.start[i] < view.end; i++) {
    const [from, to] = [clampX(xOf(row.sums.start[i])), clampX(xOf(row.sums.end[i]))];
    pen.fillRect(from, top + height / 4, Math.max(0.75, to - from), height / 2);
  }
  drawLanes(pen, row, y + bars - 1);
  let drawn = -1; // the pixel that bars thinner than one have filled
  for (let i = countUpTo(row.end, view.start); i < row.start.length && row.start[i] < view.end; i++) {
    const module = data.stages[row.stageOf(i)][0];
    if (hidden.has(module)) continue;
    const [from, to] = [clampX(xOf(row.start[i])), clampX(xOf(row.end[i]))];
    if (to - from < 1 && Math.floor(to) === drawn) continue;
    drawn = Math.floor(to);
    const shade = colors.modules[module].kinds[row.code[i] % data.kinds.length];
    pen.fillStyle = shade.fill;
    pen.fillRect(from, top, Math.max(0.75, to - from - (to - from > 3 ? 1 : 0)), height);
    if (to - from < 14) continue;
    const number = String(Math.floor(row.code[i] / (data.kinds.length * data.chunks)));
    const long = to - from > 110 ? taskOf(data, row, i).text : number;
    const text = pen.measureText(long).width + 6 < to - from ? long : number;
    if (pen.measureText(text).width + 4 > to - from) continue;
    pen.fillStyle = shade.text;
    pen.fillText(text, (from + to) / 2, middle);
  }
}

/** Below the tasks of a row, the share of each column in which its ranks communicate, by kind. */
function drawLanes(pen, row, top) {
  const columns = Math.max(1, Math.round(layout.width));
  const [height, width] = [layout.lane - 2, layout.width / columns];
  const filled = new Float64Array(columns);
  row.lanes.forEach((lane, kind) => {
    if (!lane.start.length) return;
    pen.fillStyle = data.lanes[kind].color;
    busyShare([lane], view, columns).forEach((share, column) => {
      if (share <= 0) return;
      const from = Math.min(1, filled[column]);
      filled[column] += share;
      pen.fillRect(layout.left + column * width, top + from * height, width + 0.25, Math.min(share, 1 - from) * height);
    });
  });
}

/** A line through the values of all columns. */
function steps(pen, values, yOf) {
  const width = layout.width / values.length;
  values.forEach((value, column) => {
    pen.lineTo(layout.left + column * width, yOf(value));
    pen.lineTo(layout.left + (column + 1) * width, yOf(value));
  });
}

function drawBusy() {
  const pen = prepare(canvases.busy, BUSY_HEIGHT);
  const columns = Math.max(1, Math.round(layout.width));
  const shares = busyShare(rows, view, columns);
  const [top, height] = [6, BUSY_HEIGHT - 12];
  pen.fillStyle = colors.panel;
  pen.fillRect(layout.left, top, layout.width, height);
  pen.fillStyle = colors.quiet;
  pen.beginPath();
  pen.moveTo(layout.left, top + height);
  steps(pen, shares, (share) => top + height * (1 - share));
  pen.lineTo(layout.left + layout.width, top + height);
  pen.fill();
  pen.fillStyle = colors.ink;
  const mean = shares.reduce((sum, share) => sum + share, 0) / columns;
  gutter(pen, `busy ${(100 * mean).toFixed(1)}%`, BUSY_HEIGHT / 2);
}

/** Rows with the same modules, whose fullest rank at each moment is one line. */
function memoryGroups() {
  const groups = new Map();
  for (const row of rows) {
    const name = row.modules.map((module) => data.modules[module].name).join(" + ") || "idle";
    const color = row.modules.length === 1 ? colors.modules[row.modules[0]].full.fill : colors.quiet;
    if (!groups.has(name)) groups.set(name, { name, color, rows: [] });
    groups.get(name).rows.push(row);
  }
  return [...groups.values()];
}

function drawMemory() {
  if (!data.memory) return;
  const pen = prepare(canvases.memory, MEMORY_HEIGHT);
  const columns = Math.max(1, Math.round(layout.width));
  const { unit, capacity } = data.memory;
  const [top, bottom] = [10, MEMORY_HEIGHT - 10];
  const peak = unit * Math.max(1, ...allRows.map((row) => row.memory.peak));
  const near = capacity && peak > capacity / 3; // a limit far above would press the lines to the ground
  const highest = 1.08 * (near ? Math.max(capacity, peak) : peak);
  const yOf = (value) => bottom - ((bottom - top) * value) / highest;
  pen.fillStyle = colors.panel;
  pen.fillRect(layout.left, top, layout.width, bottom - top);
  grid(pen, top, bottom, false);
  const { size, name } = byteUnit(highest);
  pen.textAlign = isNarrow() ? "left" : "right";
  for (const level of ticks({ start: 0, end: highest / size }, 4).times.slice(1)) {
    const y = Math.round(yOf(level * size));
    pen.fillStyle = colors.line;
    pen.fillRect(layout.left, y, layout.width, 1);
    pen.fillStyle = colors.quiet;
    pen.fillText(`${Number(level.toPrecision(3))} ${name}`, layout.left + (isNarrow() ? 4 : -6), y + (isNarrow() ? 8 : 0));
  }
  const line = (columnValues, color, width) => {
    pen.beginPath();
    steps(pen, columnValues, (value) => yOf(unit * value));
    pen.strokeStyle = color;
    pen.lineWidth = width;
    pen.stroke();
  };
  if (chosen) {
    pen.fillStyle = colors.line;
    pen.fillRect(layout.left, yOf(unit * chosen.memory.static), layout.width, bottom - yOf(unit * chosen.memory.static));
  }
  for (const group of memoryGroups()) {
    const out = new Float64Array(columns);
    for (const row of group.rows) columnMax(row.memory, view, out);
    line(out, group.color, 1.5);
  }
  if (chosen) line(columnMax(chosen.memory, view, new Float64Array(columns)), colors.ink, 2);
  if (near) {
    pen.fillStyle = colors.warn;
    pen.fillRect(layout.left, yOf(capacity), layout.width, 1.5);
  }
  const notes = [["memory", colors.ink], [`peak ${bytes(peak)}`, colors.quiet]];
  if (capacity) notes.push([`of ${bytes(capacity)}`, near ? colors.warn : colors.quiet]);
  if (chosen) {
    const { peak, static: always } = chosen.memory;
    notes.push(["", colors.ink], [chosen.label, colors.ink]);
    notes.push([`peak ${bytes(unit * peak)}`, colors.quiet], [`static ${bytes(unit * always)}`, colors.quiet]);
  }
  notes.forEach(([text, color], i) => {
    pen.fillStyle = color;
    gutter(pen, text, top + 8 + 17 * i);
  });
}
