// The script of a report: sortable and searchable tables, charts drawn by uPlot. User text is only set as text.
"use strict";
(() => {
  const root = document.documentElement;
  root.classList.add("js");
  const specs = JSON.parse(document.getElementById("charts").textContent);
  const byId = (id) => document.getElementById(id);
  const createElement = (name, style, text) => {
    const element = document.createElement(name);
    if (style) element.className = style;
    if (text !== undefined) element.textContent = text;
    return element;
  };
  const cssColor = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim() || name;
  const withOpacity = (color, opacity) => color + Math.round(255 * opacity).toString(16).padStart(2, "0"); // of #rrggbb
  const formatValue = (value) => {
    if (value === null || value === undefined) return "–";
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 1e5 || size < 1e-3) return value.toExponential(Math.abs(Math.log10(size) % 1) < 1e-9 ? 0 : 1);
    return String(Number(value.toPrecision(4)));
  };
  const fractionDigits = (step) => (String(Number(step.toPrecision(2))).split(".")[1] || "").length; // 0.0025 -> 4
  const formatCount = (value) => Number(value).toLocaleString("en");

  // ---- charts -------------------------------------------------------------------------------------------------
  const MAX_TOOLTIP_LINES = 12;

  // Powers of ten between two numbers, at most five of them.
  function powersOfTen(low, high) {
    const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
    const step = Math.max(1, Math.ceil((last - first) / 4)), powers = [];
    for (let exponent = last; exponent >= first; exponent -= step) powers.unshift(10 ** exponent);
    return powers;
  }

  const isRound = (value) => ["1", "2", "5"].includes(value.toExponential(6).replace(/\.?0*e.*/, ""));

  function makeAxes(spec) {
    const axis = (options) => ({
      stroke: cssColor("muted"),
      grid: { stroke: cssColor("grid"), width: 1 },
      ticks: { show: false },
      font: "11px system-ui, sans-serif",
      labelFont: "11px system-ui, sans-serif",
      labelSize: 16,
      labelGap: 0,
      ...options,
    });
    const y = { size: 52, gap: 4 };
    if (spec.log) {
      y.values = (_, splits) => splits.map((value) => (value === null ? "" : value.toExponential(0).replace("+", "")));
      y.splits = (_, __, low, high) => powersOfTen(low, high);
      y.filter = (_, splits) => splits;
    } else {
      y.values = (_, splits, __, ___, step) => splits.map((value) => (value === null ? "" : value.toFixed(fractionDigits(step)).replace("-", "−")));
    }
    const integerSteps = [1, 2, 5].flatMap((digit) => Array.from({ length: 9 }, (_, exponent) => digit * 10 ** exponent)).sort((a, b) => a - b);
    return [
      axis({
        size: 26,
        gap: 4,
        label: spec.xLabel,
        incrs: spec.logX || spec.fractions ? undefined : integerSteps,
        filter: spec.logX ? (_, splits) => splits : undefined,
        values: (_, splits) => splits.map((value) => (value === null || (spec.logX && !isRound(value)) ? "" : formatCount(value))),
      }),
      axis(y),
    ];
  }

  function createTooltip(element) {
    const tip = createElement("div", "tip");
    element.append(tip);
    return {
      hide: () => { tip.style.visibility = "hidden"; },
      show: (plot, left, top, text) => {
        tip.textContent = text;
        tip.style.visibility = "visible";
        const x = left + plot.over.offsetLeft, y = top + plot.over.offsetTop;
        const flip = x + tip.offsetWidth + 16 > element.clientWidth;
        tip.style.left = Math.max(0, flip ? x - tip.offsetWidth - 12 : x + 12) + "px";
        tip.style.top = Math.max(0, y - tip.offsetHeight - 8) + "px";
      },
    };
  }

  // Draw on the canvas of a plot, in its pixels; `at` converts values to them.
  function onCanvas(plot, draw) {
    const at = (x, y) => [plot.valToPos(x, "x", true), plot.valToPos(y, "y", true)];
    plot.ctx.save();
    plot.ctx.beginPath();
    plot.ctx.rect(plot.bbox.left, 0, plot.bbox.width + 40 * devicePixelRatio, plot.bbox.top + plot.bbox.height);
    plot.ctx.clip();
    plot.ctx.font = `${12 * devicePixelRatio}px system-ui, sans-serif`;
    draw(plot.ctx, at, devicePixelRatio);
    plot.ctx.restore();
  }

  function drawDot(ctx, [x, y], radius, color) {
    ctx.beginPath();
    ctx.arc(x, y, radius, 0, 2 * Math.PI);
    ctx.fillStyle = color;
    ctx.fill();
  }

  // Text with a border in the color of the card, readable on lines.
  function drawText(ctx, text, x, y, color, scale) {
    ctx.lineWidth = 3 * scale;
    ctx.strokeStyle = cssColor("card");
    ctx.strokeText(text, x, y);
    ctx.fillStyle = color;
    ctx.fillText(text, x, y);
  }

  function drawVertical(plot, ctx, x, color, dash) {
    ctx.beginPath();
    ctx.setLineDash(dash);
    ctx.moveTo(x, plot.bbox.top);
    ctx.lineTo(x, plot.bbox.top + plot.bbox.height);
    ctx.strokeStyle = color;
    ctx.stroke();
    ctx.setLineDash([]);
  }

  // Named numbers of fields as vertical lines, and the one that the slider shows as a dot.
  function drawMarks(plot, element, spec) {
    onCanvas(plot, (ctx, at, scale) => {
      const labels = [];
      ctx.lineWidth = 1.5 * scale;
      ctx.textAlign = "left";
      spec.marks.forEach(({ x: count, label }, row) => {
        const [left] = at(count, 0), end = plot.bbox.left + plot.bbox.width - ctx.measureText(label).width;
        drawVertical(plot, ctx, left, cssColor("ink"), [2 * scale, 3 * scale]);
        labels.push([label, Math.min(left + 5 * scale, end), plot.bbox.top + (13 + 16 * row) * scale]);
      });
      labels.forEach(([text, x, y]) => drawText(ctx, text, x, y, cssColor("ink"), scale));
      const index = element.selected;
      if (index !== undefined) drawDot(ctx, at(spec.x[index], spec.series[0].y[index]), 5 * scale, cssColor("accent"));
    });
  }

  // One point per series, side by side where they share an x, with its range.
  function drawPoints(plot, spec) {
    onCanvas(plot, (ctx, at, scale) => {
      const shown = spec.series.filter((line) => !line.dashed);
      shown.forEach((line, number) => {
        const shift = spec.logX ? 0 : (number - (shown.length - 1) / 2) * Math.min(12, 120 / shown.length) * scale;
        spec.x.forEach((x, index) => {
          if (line.y[index] === null) return;
          const [left, top] = at(x, line.y[index]), color = cssColor(line.color);
          if (line.low && line.low[index] !== null) {
            ctx.beginPath();
            ctx.moveTo(left + shift, at(x, line.low[index])[1]);
            ctx.lineTo(left + shift, at(x, line.high[index])[1]);
            ctx.strokeStyle = color;
            ctx.lineWidth = 1.5 * scale;
            ctx.stroke();
          }
          drawDot(ctx, [left + shift, top], 4.5 * scale, color);
        });
      });
    });
  }

  function drawLines(element, spec, size) {
    const series = [{}], data = [spec.x], bands = [], labels = [];
    for (const line of spec.series) {
      const color = cssColor(line.color), asPoints = spec.points && !line.dashed;
      if (line.low) {
        const first = series.length;
        data.push(line.high, line.low);
        for (let side = 0; side < 2; side++) series.push({ stroke: "transparent", width: 0, points: { show: false }, spanGaps: true });
        if (!asPoints) bands.push({ series: [first, first + 1], fill: withOpacity(color, 0.16) });
      }
      labels.push({ column: series.length, label: line.label });
      data.push(line.y);
      series.push({
        label: line.label,
        stroke: color,
        width: 1.75,
        dash: line.dashed ? [5, 4] : undefined,
        spanGaps: true,
        paths: asPoints ? () => null : spec.stepped ? uPlot.paths.stepped({ align: 1 }) : undefined,
        points: { show: !spec.points && spec.x.length <= 24 && !line.dashed, size: 6, fill: color },
      });
    }
    const tooltip = createTooltip(element);
    const few = spec.points && !spec.logX; // a few numbers of fields: a tick at each, and room at both sides
    const scales = { x: { time: false, distr: spec.logX ? 3 : 1 }, y: spec.range ? { range: element.whole ? undefined : spec.range } : { distr: spec.log ? 3 : 1 } };
    const first = spec.x[0], last = spec.x[spec.x.length - 1], room = Math.max(1, 0.15 * (last - first));
    if (spec.points) scales.x.range = few ? [first - room, last + room] : [first / 1.5, last * 1.5];
    const axes = makeAxes(spec);
    if (few) axes[0].splits = () => spec.x;
    const plot = new uPlot({
      ...size,
      series,
      bands,
      axes,
      legend: { show: false },
      scales,
      cursor: { y: false, points: { show: !spec.points, size: 7 }, drag: { x: !spec.points && !spec.marks, y: false } },
      hooks: {
        draw: [(self) => { if (spec.marks) drawMarks(self, element, spec); if (spec.points) drawPoints(self, spec); }],
        setCursor: [(self) => {
          const index = self.cursor.idx;
          if (index === null || index === undefined || self.cursor.left < 0) return tooltip.hide();
          const present = labels.filter(({ column }) => data[column][index] !== null && data[column][index] !== undefined);
          if (!present.length) return tooltip.hide();
          const lines = present.slice(0, MAX_TOOLTIP_LINES).map(({ column, label }) => `${label}: ${formatValue(data[column][index])}`);
          if (spec.texts) lines[0] = `${present[0].label}: ${spec.texts[index][1]}`;
          if (present.length > MAX_TOOLTIP_LINES) lines.push(`and ${present.length - MAX_TOOLTIP_LINES} more`);
          tooltip.show(self, self.valToPos(spec.x[index], "x"), self.cursor.top, [`${spec.xLabel} ${formatCount(spec.x[index])}`, ...lines].join("\n"));
        }],
      },
    }, data, element);
    if (spec.series.length > 1) {
      const legend = createElement("div", "legend");
      const gray = spec.series.filter((line) => line.color === "off");
      for (const line of spec.series) if (gray.length < 2 || line.color !== "off") legend.append(createElement("span", "tone-" + line.color, line.label));
      if (gray.length > 1) legend.append(createElement("span", "tone-off", `${gray.length} others`));
      element.append(legend);
    }
    return plot;
  }

  const emphasis = { hovered: -1, matched: new Set() }; // lines of the trajectories

  function drawTrajectories(element, spec, size) {
    const gates = spec.gates.map((values) => values.map((value) => value / spec.scale));
    const kept = cssColor("accent"), dropped = cssColor("off"), strong = cssColor("second");
    const dimKept = withOpacity(kept, 0.13), dimDropped = withOpacity(dropped, 0.22);
    const isEmphasized = (line) => line === emphasis.hovered || emphasis.matched.has(line);
    const stroke = (_, column) => {
      const line = column - 1;
      if (isEmphasized(line)) return spec.kept[line] ? kept : strong;
      const dim = emphasis.hovered >= 0 || emphasis.matched.size > 0;
      return spec.kept[line] ? (dim ? dimKept : kept) : dim ? dimDropped : dropped;
    };
    const fieldName = (line) => specs.names[spec.fields[line]];
    const tooltip = createTooltip(element);
    const width = gates.length > 200 ? 0.75 : 1.25;
    const redraw = (self) => {
      gates.forEach((_, line) => { self.series[line + 1].width = isEmphasized(line) ? 2.5 : width; });
      self.redraw(false);
    };
    const plot = new uPlot({
      ...size,
      series: [{}, ...gates.map(() => ({ stroke, width, points: { show: false } }))],
      axes: makeAxes({ xLabel: "step" }),
      legend: { show: false },
      scales: { x: { time: false } },
      cursor: { y: false, points: { show: false }, drag: { x: true, y: false } },
      hooks: {
        draw: [(self) => onCanvas(self, (ctx, at, scale) => { // names of the last kept and the first dropped field
          ctx.textAlign = "right";
          let previous = Infinity;
          for (const line of spec.labeled) {
            const last = spec.x.length - 1, index = spec.kept[line] ? last : Math.min(last, gates[line].findLastIndex((gate) => gate !== 0) + 1);
            const [x, y] = at(spec.x[index], gates[line][index]), text = truncateMiddle(fieldName(line), 28);
            const left = Math.max(x, self.bbox.left + ctx.measureText(text).width + 4 * scale);
            const top = Math.abs(y - previous) < 16 * scale ? previous - 16 * scale : y - 7 * scale;
            previous = top;
            drawDot(ctx, [x, y], 3.5 * scale, spec.kept[line] ? kept : strong);
            drawText(ctx, text, left, top, spec.kept[line] ? kept : strong, scale);
          }
        })],
        setCursor: [(self) => {
          const index = self.cursor.idx;
          let nearest = -1, minDistance = 18;
          if (index !== null && index !== undefined && self.cursor.left >= 0) {
            gates.forEach((values, line) => {
              const distance = Math.abs(self.valToPos(values[index], "y") - self.cursor.top);
              if (distance < minDistance || (distance === minDistance && nearest < 0)) { minDistance = distance; nearest = line; }
            });
          }
          if (nearest !== emphasis.hovered) { emphasis.hovered = nearest; redraw(self); }
          if (nearest < 0) return tooltip.hide();
          const gate = gates[nearest][index];
          const text = `${truncateMiddle(fieldName(nearest))}\ngate ${formatValue(gate)} at step ${formatCount(spec.x[index])}\n${spec.kept[nearest] ? "kept" : "dropped"}`;
          tooltip.show(self, self.cursor.left, self.valToPos(gate, "y"), text);
        }],
      },
    }, [spec.x, ...gates], element);
    element.highlight = (text) => {
      const query = text.trim().toLowerCase();
      emphasis.matched = new Set(query ? spec.fields.flatMap((_, line) => (fieldName(line).toLowerCase().includes(query) ? [line] : [])) : []);
      redraw(plot);
    };
    element.focusOn = (field) => {
      const line = spec.fields.indexOf(field);
      if (line !== emphasis.hovered) { emphasis.hovered = line; redraw(plot); }
    };
    return plot;
  }

  const truncateMiddle = (name, length = 120) => {
    const tail = Math.floor((length - 1) / 3);
    return name.length > length ? name.slice(0, length - 1 - tail) + "…" + name.slice(-tail) : name;
  };

  // Counts of the values in each bin: values that are exactly zero, and all others.
  function countBins(values, low, high, bins) {
    const zero = new Array(bins).fill(null), alive = new Array(bins).fill(null);
    const binOf = (value) => Math.min(bins - 1, Math.max(0, Math.floor(((value - low) / (high - low)) * bins)));
    for (const value of values) {
      const counts = value === 0 ? zero : alive, bin = binOf(value);
      counts[bin] = (counts[bin] || 0) + 1;
    }
    return [zero, alive];
  }

  function drawHistogram(element, spec, size) {
    const source = spec.of ? specs[spec.of] : { gates: spec.gates.map((gate) => [gate]), scale: 1000, x: [0] };
    const gates = source.gates.map((values) => values.map((value) => value / source.scale));
    let low = 0, high = 1;
    for (const values of gates) for (const value of values) { low = Math.min(low, value); high = Math.max(high, value); }
    const bins = 25, width = (high - low) / bins || 1;
    const x = Array.from({ length: bins }, (_, bin) => low + (bin + 0.5) * width);
    const dataAt = (record) => [x, ...countBins(gates.map((values) => values[record]), low, high, bins)];
    const last = source.x.length - 1;
    const paths = uPlot.paths.bars({ size: [0.88, 64], radius: 0.15 });
    const tooltip = createTooltip(element);
    const colors = [cssColor("off"), cssColor("accent")];
    let data = dataAt(last);
    const plot = new uPlot({
      ...size,
      series: [{}, ...["exactly 0", "alive"].map((label, number) => ({ label, fill: colors[number], stroke: colors[number], width: 0, paths, points: { show: false } }))],
      axes: makeAxes({ xLabel: "gate", fractions: true }).map((axis, number) => (number ? axis : { ...axis, values: (_, splits) => splits.map(formatValue) })),
      legend: { show: false },
      scales: { x: { time: false, range: () => [low - width / 2, high + width / 2] }, y: { range: (_, min, max) => [0, Math.max(1, max * 1.08)] } },
      cursor: { y: false, x: false, points: { show: false }, drag: { x: false, y: false } },
      hooks: {
        setCursor: [(self) => {
          const bin = self.cursor.idx;
          if (bin === null || bin === undefined || self.cursor.left < 0) return tooltip.hide();
          const lines = [];
          if (data[1][bin]) lines.push(`${data[1][bin]} at exactly 0`);
          if (data[2][bin]) lines.push(`${data[2][bin]} between ${formatValue(x[bin] - width / 2)} and ${formatValue(x[bin] + width / 2)}`);
          if (!lines.length) return tooltip.hide();
          tooltip.show(self, self.valToPos(x[bin], "x"), self.valToPos(Math.max(data[1][bin] || 0, data[2][bin] || 0), "y"), lines.join("\n"));
        }],
      },
    }, data, element);
    const slider = byId("histogram-step"), output = byId("histogram-at");
    if (slider && spec.of) {
      slider.max = last;
      if (!slider.dataset.ready) { slider.value = last; slider.dataset.ready = "1"; }
      const showRecord = () => {
        data = dataAt(Number(slider.value));
        plot.setData(data);
        const zero = data[1].reduce((sum, value) => sum + (value || 0), 0);
        output.textContent = `${formatCount(source.x[Number(slider.value)])}: ${zero} at 0`;
      };
      slider.oninput = showRecord;
      showRecord();
    }
    return plot;
  }

  const DRAW = { lines: drawLines, trajectories: drawTrajectories, histogram: drawHistogram };

  function drawChart(element) {
    const spec = specs[element.dataset.chart];
    if (!spec) return;
    const printWidth = element.closest(".half, figure") ? 290 : 640;
    const size = { width: root.classList.contains("printing") ? printWidth : element.clientWidth, height: Number(element.dataset.height) };
    element.drawnAt = size.width;
    if (size.width < 40) return; // hidden: the old chart stays until the element has a width again
    if (element.plot) element.plot.destroy();
    element.replaceChildren();
    element.plot = DRAW[spec.type](element, spec, size);
  }

  const chartElements = [...document.querySelectorAll("[data-chart]")];
  const drawAll = () => chartElements.forEach(drawChart);
  for (const grid of document.querySelectorAll(".grid")) { // a half card without a neighbor takes the whole row
    let unpaired = null;
    for (const card of [...grid.children, null]) {
      if (card && card.classList.contains("half")) unpaired = unpaired ? null : card;
      else if (unpaired) { unpaired.classList.add("alone"); unpaired = null; }
    }
  }
  drawAll();
  const observer = new ResizeObserver((entries) => {
    for (const { target } of entries) if (target.clientWidth !== target.drawnAt && !root.classList.contains("printing")) drawChart(target);
  });
  chartElements.forEach((element) => observer.observe(element));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  let opened = []; // sections opened for printing
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details[data-print]:not([open])")];
    opened.forEach((details) => { details.open = true; });
    root.classList.add("printing");
    drawAll();
  });
  addEventListener("afterprint", () => {
    opened.forEach((details) => { details.open = false; });
    root.classList.remove("printing");
    drawAll();
  });

  // ---- the slider of the curve --------------------------------------------------------------------------------------
  const MAX_CHIPS = 60, keepSlider = byId("curve-keep");
  function showChips(place, title, fields, style) {
    place.replaceChildren();
    if (!fields.length) return;
    place.append(createElement("span", "quiet", title));
    for (const field of fields.slice(0, MAX_CHIPS)) place.append(createElement("bdi", "chip " + style, truncateMiddle(specs.names[field], 40)));
    if (fields.length > MAX_CHIPS) place.append(createElement("span", "quiet", `and ${formatCount(fields.length - MAX_CHIPS)} more`));
  }
  if (keepSlider) {
    const spec = specs.curve, element = document.querySelector('[data-chart="curve"]'), button = byId("curve-range");
    const countText = (count) => `${formatCount(count)} field${count === 1 ? "" : "s"}`;
    const show = () => {
      const index = Number(keepSlider.value), count = spec.x[index], [auc, loss, logloss] = spec.texts[index];
      const parts = [`AUC ${auc}`, `AUC lost ${loss}`, ...(logloss === "–" ? [] : [`logloss ${logloss}`])];
      const upper = spec.upper && spec.upper[index];
      if (count === spec.run && spec.run_holds) parts.push("the model of this run was checked: within the allowed loss");
      else if (upper !== null && upper !== undefined) parts.push(upper <= spec.allowed ? "within the allowed loss" : "not shown to be within the allowed loss");
      byId("curve-text").replaceChildren(createElement("b", "", countText(count)), ": " + parts.join(" · "));
      if (spec.removed) {
        const out = spec.removed.length - count, run = spec.removed.length - spec.run;
        const [title, style, fields] = out > run ? ["Gone, compared with this run:", "gone", spec.removed.slice(run, out)]
          : out < run ? ["Added, compared with this run:", "added", spec.removed.slice(out, run)] : ["", "", []];
        showChips(byId("curve-change"), title, fields, style);
        showChips(byId("curve-fields"), count === spec.run ? "The fields of this run:" : `The ${countText(count)}:`, spec.removed.slice(out).reverse(), "");
      }
      element.selected = index;
      if (element.plot) element.plot.redraw(false);
    };
    keepSlider.max = spec.x.length - 1;
    keepSlider.value = Math.max(0, spec.x.indexOf(spec.run));
    keepSlider.addEventListener("input", show);
    element.addEventListener("click", () => {
      const index = element.plot && element.plot.cursor.idx;
      if (index !== null && index !== undefined) { keepSlider.value = index; show(); }
    });
    button.addEventListener("click", () => {
      element.whole = !element.whole;
      button.setAttribute("aria-pressed", String(element.whole));
      drawChart(element);
    });
    show();
  }

  const highlight = byId("highlight");
  if (highlight) highlight.addEventListener("input", () => document.querySelector('[data-chart="trajectories"]').highlight(highlight.value));

  // ---- tables -------------------------------------------------------------------------------------------------
  const FIRST_ROWS = 60; // fields that are shown before the user asks for all

  function sortValue(row, column) {
    const cell = row.cells[column], value = cell.dataset.v;
    return value === undefined ? cell.textContent : Number(value);
  }

  function makeSortable(table) {
    const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const button = createElement("button", "", head.textContent);
      button.type = "button";
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const numeric = head.classList.contains("number") || body.rows[0]?.cells[column].dataset.v !== undefined;
        const previous = head.getAttribute("aria-sort");
        const descending = previous ? previous === "ascending" : numeric;
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", descending ? "descending" : "ascending");
        const entries = [...body.rows].map((row) => [row, sortValue(row, column)]);
        entries.sort(([, a], [, b]) => {
          const isMissing = (value) => typeof value === "string" && numeric; // sorted last
          if (isMissing(a) || isMissing(b)) return Number(isMissing(a)) - Number(isMissing(b));
          const order = typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true });
          return descending ? -order : order;
        });
        body.append(...entries.map(([row]) => row));
        table.dispatchEvent(new Event("sorted"));
      });
    });
  }
  document.querySelectorAll("table[id]").forEach(makeSortable);

  const fields = byId("fields");
  if (fields) {
    const rows = [...fields.tBodies[0].rows], search = byId("search"), counter = byId("count");
    const position = new Map(rows.map((row, number) => [row, number]));
    const fullName = (row) => specs.names[position.get(row)];
    const choices = [...document.querySelectorAll("[data-show]")];
    const more = createElement("button", "more");
    more.type = "button";
    let showAll = rows.length <= FIRST_ROWS + 20;
    fields.parentElement.after(more);
    const filter = () => {
      const query = search.value.trim().toLowerCase();
      const state = choices.find((button) => button.getAttribute("aria-pressed") === "true").dataset.show;
      let matches = 0;
      for (const row of fields.tBodies[0].rows) {
        row.hidden = !(state === "all" || row.classList.contains(state)) || !(fullName(row) + " " + row.textContent).toLowerCase().includes(query);
        if (!row.hidden) matches++;
        row.classList.toggle("cut", !row.hidden && !showAll && matches > FIRST_ROWS);
      }
      counter.textContent = matches === rows.length ? `${formatCount(matches)} fields` : `${formatCount(matches)} of ${formatCount(rows.length)}`;
      more.hidden = showAll || matches <= FIRST_ROWS;
      more.textContent = `Show all ${formatCount(matches)}`;
    };
    more.addEventListener("click", () => { showAll = true; filter(); });
    search.addEventListener("input", filter);
    fields.addEventListener("sorted", filter);
    for (const button of choices) button.addEventListener("click", () => {
      choices.forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
      filter();
    });
    filter();
    const trajectories = document.querySelector('[data-chart="trajectories"]');
    if (trajectories) {
      fields.addEventListener("pointerover", (event) => { const row = event.target.closest("tbody tr"); if (row && trajectories.focusOn) trajectories.focusOn(position.get(row)); });
      fields.addEventListener("pointerleave", () => trajectories.focusOn && trajectories.focusOn(-1));
    }
    byId("csv").addEventListener("click", () => download("fields.csv", tableAsCsv(fields, fullName)));
    window.lpfsCsv = () => tableAsCsv(fields, fullName);
    byId("copy-kept").addEventListener("click", (event) => copy(rows.filter((row) => row.classList.contains("kept")).map(fullName).join("\n"), event.currentTarget));
  }

  // A cell that a spreadsheet would read as a formula starts with an apostrophe, also after blanks.
  function csvCell(text) {
    const safe = /^[\t\r\n]|^[\p{C}\p{Z}]*[=+\-@＝＋－＠]/u.test(text) ? "'" + text : text;
    return /[",\r\n]/.test(safe) ? '"' + safe.replaceAll('"', '""') + '"' : safe;
  }
  function tableAsCsv(table, fullName) {
    const lines = [[...table.tHead.rows[0].cells].map((cell) => csvCell(cell.textContent))];
    for (const row of table.tBodies[0].rows) {
      lines.push([...row.cells].map((cell, column) => {
        if (column === 0) return csvCell(fullName(row));
        if (column === 1) return cell.textContent;
        return cell.dataset.v !== undefined ? cell.dataset.v : csvCell(cell.textContent === "–" ? "" : cell.textContent);
      }));
    }
    return lines.map((cells) => cells.join(",")).join("\r\n") + "\r\n";
  }
  function download(name, text) {
    const link = createElement("a");
    link.href = URL.createObjectURL(new Blob(["\ufeff" + text], { type: "text/csv;charset=utf-8" }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }
  function copy(text, button) {
    const label = button.textContent;
    const confirm = (message) => { button.textContent = message; setTimeout(() => { button.textContent = label; }, 1200); };
    const copyFromTextarea = () => { // where the browser gives a file no clipboard
      const area = createElement("textarea");
      area.value = text;
      document.body.append(area);
      area.select();
      const copied = document.execCommand("copy");
      area.remove();
      confirm(copied ? "Copied" : "Copying is not allowed");
    };
    if (navigator.clipboard) navigator.clipboard.writeText(text).then(() => confirm("Copied"), copyFromTextarea);
    else copyFromTextarea();
  }
  for (const button of document.querySelectorAll("[data-copy]")) button.addEventListener("click", () => copy(byId(button.dataset.copy).textContent, button));

  // ---- tables that are wider than the page ---------------------------------------------------------------------
  const cues = new ResizeObserver((entries) => {
    for (const { target } of entries) target.classList.toggle("wide", target.scrollWidth > target.clientWidth + 4);
  });
  for (const scroll of document.querySelectorAll(".scroll")) {
    scroll.before(createElement("div", "cue", "More columns: scroll sideways →"));
    scroll.addEventListener("scroll", () => scroll.classList.toggle("end", scroll.scrollLeft + scroll.clientWidth > scroll.scrollWidth - 4), { passive: true });
    cues.observe(scroll);
  }

  // ---- the heat map of a comparison ------------------------------------------------------------------------------
  const keepSelect = byId("heat-keep"), heatmap = byId("heat");
  if (keepSelect && heatmap) {
    [...heatmap.tBodies[0].rows].forEach((row, number) => { row.dataset.at = number; });
    keepSelect.addEventListener("change", () => {
      const shares = specs["heat-data"][keepSelect.value];
      for (const row of heatmap.tBodies[0].rows) {
        [...row.cells].slice(1).forEach((cell, method) => {
          const share = shares[row.dataset.at][method];
          cell.textContent = share === null ? "–" : share + " %";
          if (share === null) { delete cell.dataset.h; delete cell.dataset.v; }
          else { cell.dataset.h = Math.round(share / 12.5); cell.dataset.v = share; }
        });
      }
    });
  }
})();
