// What changes the picture: the mouse, fingers, keys, buttons, the legend, the window.

let waiting = 0;
function redraw() {
  waiting ||= requestAnimationFrame(drawAll);
}
function drawAll() {
  waiting = 0;
  drawGantt();
  drawBusy();
  drawMemory();
  const { digits } = ticks(view, 10);
  $("range").textContent = `${ms(view.start, digits)} to ${ms(view.end, digits)} of ${ms(whole, digits)} ms`;
}
function refresh() {
  readColors();
  measure();
  drawAll();
}
function show(next) {
  view = next;
  redraw();
}
function zoomAt(factor, at = (view.start + view.end) / 2) {
  show(zoomed(view, factor, at, whole));
}
const pan = (pixels) => show(moved(view, (pixels / layout.width) * (view.end - view.start), whole));
const reset = () => show({ start: 0, end: whole });

function choose(row) {
  chosen = row;
  if (row) {
    $("row").value = String(row.index);
    fillTasks();
    const y = rows.indexOf(row) * layout.row;
    const scroll = $("scroll");
    if (y < scroll.scrollTop) scroll.scrollTop = y;
    if (y + layout.row > scroll.scrollTop + layout.height - AXIS) scroll.scrollTop = y + layout.row - layout.height + AXIS;
    $("said").textContent = `${row.label}, ${row.code.length} tasks`;
  }
  redraw();
}

/** The table of the chosen row, once it is open. */
function fillTasks() {
  if (!$("tasks").open) return;
  const row = allRows[Number($("row").value)];
  const lines = Array.from(row.code, (_, i) => {
    const task = taskOf(data, row, i);
    const line = document.createElement("tr");
    const cells = [task.kind, task.name, task.replica, task.stage, task.microbatch, task.chunk];
    for (const cell of [...cells, ms(task.start), ms(task.end - task.start)]) {
      const place = line.insertCell();
      place.textContent = cell;
      if (line.cells.length > 2) place.className = "number";
    }
    return line;
  });
  $("task-rows").replaceChildren(...lines);
}

/** What lies at a point of the picture, in words; the first line is the heading. */
function wordsAt(canvas, x, y) {
  const time = timeAt(x);
  if (canvas === canvases.memory) {
    const value = (row) => data.memory.unit * (row.memory.static + (row.memory.value[countUpTo(row.memory.time, time) - 1] || 0));
    const lines = memoryGroups().map((group) => `${group.name}: ${bytes(Math.max(...group.rows.map(value)))}`);
    return [`${ms(time)} ms`, ...lines, ...(chosen ? [`${chosen.label}: ${bytes(value(chosen))}`] : [])];
  }
  if (canvas === canvases.busy) {
    const count = rows.reduce((sum, row) => sum + (countUpTo(row.start, time) > countUpTo(row.end, time) ? row.ranks : 0), 0);
    return [`${ms(time)} ms`, `${count} of ${rows.reduce((sum, row) => sum + row.ranks, 0)} ranks busy`];
  }
  const row = rows[Math.floor((y - AXIS + $("scroll").scrollTop) / layout.row)];
  if (!row || y < AXIS) return null;
  const inLanes = (y - AXIS + $("scroll").scrollTop) % layout.row > layout.row - layout.lane;
  const kind = inLanes ? row.lanes.findIndex(({ start, end }) => countUpTo(start, time) > countUpTo(end, time)) : -1;
  if (kind >= 0) {
    const lane = row.lanes[kind];
    const l = countUpTo(lane.end, time);
    return [
      `${row.label}: ${data.lanes[kind].name}`,
      `starts at ${ms(lane.start[l])} ms, takes ${ms(lane.end[l] - lane.start[l])} ms`,
    ];
  }
  const i = countUpTo(row.end, time);
  if (i < row.start.length && row.start[i] <= time) {
    const task = taskOf(data, row, i);
    return [
      task.text,
      `${task.kind} of microbatch ${task.microbatch}, chunk ${task.chunk}`,
      `${task.name}, replica ${task.replica}, stage ${task.stage}, ${row.label}`,
      `starts at ${ms(task.start)} ms, takes ${ms(task.end - task.start)} ms`,
    ];
  }
  const s = countUpTo(row.sums.end, time);
  if (s < row.sums.start.length && row.sums.start[s] <= time) {
    const [from, to] = [row.sums.start[s], row.sums.end[s]];
    return [`${row.label}: gradient sums`, `starts at ${ms(from)} ms, takes ${ms(to - from)} ms`];
  }
  const before = Math.max(i ? row.end[i - 1] : 0, s ? row.sums.end[s - 1] : 0);
  const after = Math.min(i < row.start.length ? row.start[i] : whole, s < row.sums.start.length ? row.sums.start[s] : whole);
  const [from, to] = [before, after];
  return [`${row.label}: idle`, `${ms(to - from)} ms, from ${ms(from)} to ${ms(to)} ms`];
}

function hover(event) {
  const box = event.currentTarget.getBoundingClientRect();
  const [x, y] = [event.clientX - box.left, event.clientY - box.top];
  const inside = x >= layout.left && x <= layout.left + layout.width;
  const words = inside && wordsAt(event.currentTarget, x, y);
  const chart = $("chart").getBoundingClientRect();
  const tip = $("tip");
  $("cross").hidden = !inside;
  $("cross").style.left = `${event.clientX - chart.left - 1}px`;
  tip.hidden = !words;
  if (!words) return;
  tip.textContent = words.join("\n");
  const left = Math.min(event.clientX - chart.left + 14, chart.width - tip.offsetWidth - 6);
  const below = event.clientY - chart.top + 16;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${below + tip.offsetHeight > chart.height ? Math.max(4, below - tip.offsetHeight - 32) : below}px`;
}

function leave() {
  $("tip").hidden = $("cross").hidden = true;
}

// Fingers or the mouse button that are down: one pans, two zoom.
const down = new Map();
let travelled = 0;
function press(event) {
  down.set(event.pointerId, event);
  event.currentTarget.setPointerCapture(event.pointerId);
  travelled = 0;
}
function move(event) {
  const before = down.get(event.pointerId);
  if (!before) return hover(event);
  const others = [...down.values()].filter((other) => other !== before);
  if (others.length) {
    const span = (a, b) => Math.max(8, Math.abs(a.clientX - b.clientX));
    const middle = (event.clientX + others[0].clientX) / 2 - event.currentTarget.getBoundingClientRect().left;
    zoomAt(span(before, others[0]) / span(event, others[0]), timeAt(middle));
  } else {
    pan(before.clientX - event.clientX);
    if (event.pointerType === "mouse") $("scroll").scrollTop += before.clientY - event.clientY;
  }
  travelled += Math.abs(event.clientX - before.clientX) + Math.abs(event.clientY - before.clientY);
  down.set(event.pointerId, event);
  leave();
}
function release(event) {
  const y = event.clientY - canvases.gantt.getBoundingClientRect().top - AXIS;
  const row = rows[Math.floor((y + $("scroll").scrollTop) / layout.row)];
  if (!down.delete(event.pointerId) || travelled >= 4) return;
  hover(event); // what a finger can't do otherwise
  if (event.currentTarget === canvases.gantt && y >= 0 && row) choose(row);
}

// A page that is being scrolled goes on scrolling when the picture comes under the pointer.
let pageScrolled = -Infinity;
document.addEventListener("wheel", (event) => {
  if (!$("chart").contains(event.target)) pageScrolled = event.timeStamp;
}, { passive: true });
function wheel(event) {
  const atRest = view.end - view.start >= whole;
  if (event.timeStamp - pageScrolled < 300 || (atRest && event.deltaY > 0 && !event.shiftKey)) {
    pageScrolled = event.timeStamp;
    return;
  }
  event.preventDefault();
  if (event.shiftKey) $("scroll").scrollTop += event.deltaY || event.deltaX;
  else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(event.deltaX);
  else zoomAt(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) * 0.004), timeAt(clampX(event.offsetX)));
}

const step = (by) => choose(rows[Math.max(0, Math.min(rows.length - 1, chosen ? rows.indexOf(chosen) + by : 0))]);
const KEYS = {
  "+": () => zoomAt(0.7),
  "=": () => zoomAt(0.7),
  "-": () => zoomAt(1 / 0.7),
  ArrowLeft: () => pan(-0.15 * layout.width),
  ArrowRight: () => pan(0.15 * layout.width),
  ArrowUp: () => step(-1),
  ArrowDown: () => step(1),
  0: reset,
  Escape: () => choose(null),
};

/** A button for each module that hides it, and the rows that have nothing else. */
function makeLegend() {
  data.modules.forEach((item, module) => {
    const button = document.createElement("button");
    const swatch = document.createElement("i");
    swatch.className = "swatch";
    swatch.style.background = item.color;
    button.type = "button";
    button.append(swatch, item.name);
    button.setAttribute("aria-pressed", "true");
    button.addEventListener("click", () => {
      if (!hidden.delete(module)) hidden.add(module);
      button.setAttribute("aria-pressed", String(!hidden.has(module)));
      rows = allRows.filter((row) => !hidden.size || row.modules.some((m) => !hidden.has(m)));
      if (!rows.includes(chosen)) chosen = null;
      refresh();
    });
    $("legend").append(button);
  });
}

function copy(event) {
  const button = event.currentTarget;
  const source = $(button.dataset.copy);
  const done = (text) => {
    button.textContent = text;
    setTimeout(() => (button.textContent = "Copy"), 2000);
  };
  const selectInstead = () => {
    getSelection().selectAllChildren(source);
    done(document.execCommand("copy") ? "Copied" : "Selected");
  };
  if (navigator.clipboard) navigator.clipboard.writeText(source.textContent).then(() => done("Copied"), selectInstead);
  else selectInstead();
}

$("figure").hidden = $("tasks").hidden = false;
canvases.memory.hidden = !data.memory;
makeLegend();
for (const row of allRows) $("row").append(new Option(row.label, row.index));
for (const canvas of Object.values(canvases)) {
  canvas.addEventListener("pointerdown", press);
  canvas.addEventListener("pointermove", move);
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", (event) => down.delete(event.pointerId));
  canvas.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && leave());
  canvas.addEventListener("wheel", wheel, { passive: false });
  canvas.addEventListener("dblclick", reset);
}
$("chart").addEventListener("keydown", (event) => {
  const act = !event.ctrlKey && !event.metaKey && !event.altKey && KEYS[event.key];
  if (!act) return;
  event.preventDefault();
  act();
});
$("scroll").addEventListener("scroll", redraw);
$("zoom-in").addEventListener("click", KEYS["+"]);
$("zoom-out").addEventListener("click", KEYS["-"]);
$("reset").addEventListener("click", reset);
$("row").addEventListener("change", () => choose(allRows[Number($("row").value)]));
$("tasks").addEventListener("toggle", fillTasks);
for (const button of document.querySelectorAll("[data-copy]")) button.addEventListener("click", copy);
new ResizeObserver(refresh).observe($("chart"));
for (const query of ["print", "(prefers-color-scheme: dark)"]) matchMedia(query).addEventListener("change", refresh);
refresh();
