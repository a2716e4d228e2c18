// The script of a report: tables that sort and search, charts by uPlot. Text of users is only ever set as text.
"use strict";
(() => {
  const root = document.documentElement;
  root.classList.add("js");
  const specs = JSON.parse(document.getElementById("charts").textContent);
  const byId = (id) => document.getElementById(id);
  const make = (name, style, text) => {
    const found = document.createElement(name);
    if (style) found.className = style;
    if (text !== undefined) found.textContent = text;
    return found;
  };
  const tone = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim() || name;
  const faint = (colour, part) => colour + Math.round(255 * part).toString(16).padStart(2, "0"); // of #rrggbb
  const short = (value) => {
    if (value === null || value === undefined) return "–";
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 1e5 || size < 1e-3) return value.toExponential(Math.abs(Math.log10(size) % 1) < 1e-9 ? 0 : 1);
    return String(Number(value.toPrecision(4)));
  };
  const count = (value) => Number(value).toLocaleString("en");

  // ---- charts -------------------------------------------------------------------------------------------------
  const MANY = 12; // lines of a tooltip

  // powers of ten between two numbers, at most five of them
  function powers(low, high) {
    const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
    const step = Math.max(1, Math.ceil((last - first) / 4)), found = [];
    for (let at = last; at >= first; at -= step) found.unshift(10 ** at);
    return found;
  }

  function axes(spec, size) {
    const axis = (more) => ({
      stroke: tone("muted"),
      grid: { stroke: tone("grid"), width: 1 },
      ticks: { show: false },
      font: "11px system-ui, sans-serif",
      labelFont: "11px system-ui, sans-serif",
      labelSize: 16,
      labelGap: 0,
      ...more,
    });
    const y = { size: size || 46, gap: 4 };
    if (spec.log) {
      y.values = (_, splits) => splits.map((each) => (each === null ? "" : each.toExponential(0).replace("+", "")));
      y.splits = (_, __, low, high) => powers(low, high);
      y.filter = (_, splits) => splits;
    }
    const whole = [1, 2, 5].flatMap((each) => Array.from({ length: 9 }, (_, at) => each * 10 ** at)).sort((one, two) => one - two);
    return [
      axis({
        size: 26,
        gap: 4,
        label: spec.xLabel,
        incrs: spec.logX || spec.parts ? undefined : whole,
        values: (_, splits) => splits.map((each) => (each === null ? "" : count(each))),
      }),
      axis(y),
    ];
  }

  function tipOf(place) {
    const tip = make("div", "tip");
    place.append(tip);
    return {
      hide: () => { tip.style.visibility = "hidden"; },
      show: (plot, left, top, text) => {
        tip.textContent = text;
        tip.style.visibility = "visible";
        const x = left + plot.over.offsetLeft, y = top + plot.over.offsetTop;
        const flip = x + tip.offsetWidth + 16 > place.clientWidth;
        tip.style.left = Math.max(0, flip ? x - tip.offsetWidth - 12 : x + 12) + "px";
        tip.style.top = Math.max(0, y - tip.offsetHeight - 8) + "px";
      },
    };
  }

  function drawLines(place, spec, size) {
    const series = [{}], data = [spec.x], bands = [], shown = [];
    for (const each of spec.series) {
      const colour = tone(each.colour);
      if (each.low) {
        const at = series.length;
        data.push(each.high, each.low);
        for (let side = 0; side < 2; side++) series.push({ stroke: "transparent", width: 0, points: { show: false }, spanGaps: true });
        bands.push({ series: [at, at + 1], fill: faint(colour, 0.16) });
      }
      shown.push({ at: series.length, label: each.label });
      data.push(each.y);
      series.push({
        label: each.label,
        stroke: colour,
        width: 1.75,
        dash: each.dashed ? [5, 4] : undefined,
        spanGaps: true,
        paths: spec.points ? () => null : spec.stepped ? uPlot.paths.stepped({ align: 1 }) : undefined,
        points: { show: Boolean(spec.points) || spec.x.length <= 24 && !each.dashed, size: spec.points ? 10 : 6, fill: colour },
      });
    }
    const tip = tipOf(place);
    const plot = new uPlot({
      ...size,
      series,
      bands,
      axes: axes(spec),
      legend: { show: false },
      scales: { x: { time: false, distr: spec.logX ? 3 : 1 }, y: spec.range ? { range: spec.range } : { distr: spec.log ? 3 : 1 } },
      cursor: { y: false, points: { size: 7 }, drag: { x: true, y: false } },
      hooks: {
        setCursor: [(self) => {
          const at = self.cursor.idx;
          if (at === null || at === undefined || self.cursor.left < 0) return tip.hide();
          const told = shown.filter((each) => data[each.at][at] !== null && data[each.at][at] !== undefined);
          if (!told.length) return tip.hide();
          const lines = told.slice(0, MANY).map((each) => `${each.label}: ${short(data[each.at][at])}`);
          if (told.length > MANY) lines.push(`and ${told.length - MANY} more`);
          tip.show(self, self.valToPos(spec.x[at], "x"), self.cursor.top, [`${spec.xLabel} ${count(spec.x[at])}`, ...lines].join("\n"));
        }],
      },
    }, data, place);
    if (spec.series.length > 1) {
      const legend = make("div", "legend");
      const grey = spec.series.filter((each) => each.colour === "off");
      for (const each of spec.series) if (grey.length < 2 || each.colour !== "off") legend.append(make("span", "tone-" + each.colour, each.label));
      if (grey.length > 1) legend.append(make("span", "tone-off", `${grey.length} others`));
      place.append(legend);
    }
    return plot;
  }

  const chosen = { hover: -1, matched: new Set() }; // of the trajectories

  function drawTrajectories(place, spec, size) {
    const gates = spec.gates.map((each) => each.map((value) => value / spec.scale));
    const kept = tone("accent"), dropped = tone("off"), loud = tone("second");
    const dimKept = faint(kept, 0.13), dimDropped = faint(dropped, 0.22);
    const stroke = (_, at) => {
      const own = at - 1;
      if (own === chosen.hover || chosen.matched.has(own)) return own === chosen.hover && !spec.kept[own] ? loud : spec.kept[own] ? kept : loud;
      const dim = chosen.hover >= 0 || chosen.matched.size > 0;
      return spec.kept[own] ? (dim ? dimKept : kept) : dim ? dimDropped : dropped;
    };
    const nameOf = (own) => specs.names[spec.fields[own]];
    const tip = tipOf(place);
    const width = gates.length > 200 ? 0.75 : 1.25;
    const again = (self) => {
      gates.forEach((_, own) => { self.series[own + 1].width = own === chosen.hover || chosen.matched.has(own) ? 2.5 : width; });
      self.redraw(false);
    };
    const plot = new uPlot({
      ...size,
      series: [{}, ...gates.map(() => ({ stroke, width, points: { show: false } }))],
      axes: axes({ xLabel: "step" }),
      legend: { show: false },
      scales: { x: { time: false } },
      cursor: { y: false, points: { show: false }, drag: { x: true, y: false } },
      hooks: {
        setCursor: [(self) => {
          const at = self.cursor.idx;
          let best = -1, near = 18;
          if (at !== null && at !== undefined && self.cursor.left >= 0) {
            gates.forEach((each, own) => {
              const apart = Math.abs(self.valToPos(each[at], "y") - self.cursor.top);
              if (apart < near || (apart === near && best < 0)) { near = apart; best = own; }
            });
          }
          if (best !== chosen.hover) { chosen.hover = best; again(self); }
          if (best < 0) return tip.hide();
          const text = `${clipped(nameOf(best))}\ngate ${short(gates[best][at])} at step ${count(spec.x[at])}\n${spec.kept[best] ? "kept" : "dropped"}`;
          tip.show(self, self.cursor.left, self.valToPos(gates[best][at], "y"), text);
        }],
      },
    }, [spec.x, ...gates], place);
    place.highlight = (text) => {
      const word = text.trim().toLowerCase();
      chosen.matched = new Set(word ? spec.fields.flatMap((_, own) => (nameOf(own).toLowerCase().includes(word) ? [own] : [])) : []);
      again(plot);
    };
    place.focusOn = (field) => {
      const own = spec.fields.indexOf(field);
      if (own !== chosen.hover) { chosen.hover = own; again(plot); }
    };
    return plot;
  }

  const clipped = (name) => (name.length > 120 ? name.slice(0, 80) + "…" + name.slice(-39) : name);

  function binsOf(values, low, high, bins) {
    const zero = new Array(bins).fill(null), alive = new Array(bins).fill(null);
    const place = (value) => Math.min(bins - 1, Math.max(0, Math.floor(((value - low) / (high - low)) * bins)));
    for (const value of values) {
      const target = value === 0 ? zero : alive, at = place(value);
      target[at] = (target[at] || 0) + 1;
    }
    return [zero, alive];
  }

  function drawHistogram(place, spec, size) {
    const from = spec.of ? specs[spec.of] : { gates: spec.gates.map((each) => [each]), scale: 1000, x: [0] };
    const all = from.gates.map((each) => each.map((value) => value / from.scale));
    let low = 0, high = 1;
    for (const each of all) for (const value of each) { low = Math.min(low, value); high = Math.max(high, value); }
    const bins = 25, width = (high - low) / bins || 1;
    const x = Array.from({ length: bins }, (_, at) => low + (at + 0.5) * width);
    const at = (record) => {
      const [zero, alive] = binsOf(all.map((each) => each[record]), low, high, bins);
      return [x, zero, alive];
    };
    const last = from.x.length - 1;
    const paths = uPlot.paths.bars({ size: [0.88, 64], radius: 0.15 });
    const tip = tipOf(place);
    const colours = [tone("off"), tone("accent")];
    let data = at(last);
    const plot = new uPlot({
      ...size,
      series: [{}, ...["exactly 0", "alive"].map((label, own) => ({ label, fill: colours[own], stroke: colours[own], width: 0, paths, points: { show: false } }))],
      axes: axes({ xLabel: "gate", parts: true }).map((each, own) => (own ? each : { ...each, values: (_, splits) => splits.map(short) })),
      legend: { show: false },
      scales: { x: { time: false, range: () => [low - width / 2, high + width / 2] }, y: { range: (_, min, max) => [0, Math.max(1, max * 1.08)] } },
      cursor: { y: false, x: false, points: { show: false }, drag: { x: false, y: false } },
      hooks: {
        setCursor: [(self) => {
          const bin = self.cursor.idx;
          if (bin === null || bin === undefined || self.cursor.left < 0) return tip.hide();
          const told = [];
          if (data[1][bin]) told.push(`${data[1][bin]} at exactly 0`);
          if (data[2][bin]) told.push(`${data[2][bin]} between ${short(x[bin] - width / 2)} and ${short(x[bin] + width / 2)}`);
          if (!told.length) return tip.hide();
          tip.show(self, self.valToPos(x[bin], "x"), self.valToPos(Math.max(data[1][bin] || 0, data[2][bin] || 0), "y"), told.join("\n"));
        }],
      },
    }, data, place);
    const slider = byId("histogram-step"), told = byId("histogram-at");
    if (slider && spec.of) {
      slider.max = last;
      if (!slider.dataset.ready) { slider.value = last; slider.dataset.ready = "1"; }
      const move = () => {
        data = at(Number(slider.value));
        plot.setData(data);
        const zero = data[1].reduce((sum, each) => sum + (each || 0), 0);
        told.textContent = `${count(from.x[Number(slider.value)])}: ${zero} at 0`;
      };
      slider.oninput = move;
      move();
    }
    return plot;
  }

  const KINDS = { lines: drawLines, trajectories: drawTrajectories, histogram: drawHistogram };

  function draw(place) {
    const spec = specs[place.dataset.chart];
    if (!spec) return;
    const size = { width: root.classList.contains("printing") ? place.closest(".half, figure") ? 290 : 640 : place.clientWidth, height: Number(place.dataset.height) };
    place.drawnAt = size.width;
    if (size.width < 40) return; // not to be seen now: what is there stays until there is room again
    if (place.plot) place.plot.destroy();
    place.replaceChildren();
    place.plot = KINDS[spec.type](place, spec, size);
  }

  const places = [...document.querySelectorAll("[data-chart]")];
  const drawAll = () => places.forEach(draw);
  for (const grid of document.querySelectorAll(".grid")) { // a half with nobody beside it takes the row
    let left = null;
    for (const each of [...grid.children, null]) {
      if (each && each.classList.contains("half")) left = left ? null : each;
      else if (left) { left.classList.add("alone"); left = null; }
    }
  }
  drawAll();
  const watcher = new ResizeObserver((seen) => {
    for (const { target } of seen) if (target.clientWidth !== target.drawnAt && !root.classList.contains("printing")) draw(target);
  });
  places.forEach((each) => watcher.observe(each));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  let opened = []; // for the paper: tables, not sources
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details:not([open])")].filter((each) => !each.querySelector("pre"));
    opened.forEach((each) => { each.open = true; });
    root.classList.add("printing");
    drawAll();
  });
  addEventListener("afterprint", () => {
    opened.forEach((each) => { each.open = false; });
    root.classList.remove("printing");
    drawAll();
  });

  const highlight = byId("highlight");
  if (highlight) highlight.addEventListener("input", () => document.querySelector('[data-chart="trajectories"]').highlight(highlight.value));

  // ---- tables -------------------------------------------------------------------------------------------------
  const FEW = 60; // fields shown before one asks for all

  function valueOf(row, column) {
    const cell = row.cells[column], told = cell.dataset.v;
    return told === undefined ? cell.textContent : Number(told);
  }

  function sortable(table) {
    const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const button = make("button", "", head.textContent);
      button.type = "button";
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const numeric = head.classList.contains("number") || body.rows[0]?.cells[column].dataset.v !== undefined;
        const was = head.getAttribute("aria-sort");
        const down = was ? was === "ascending" : numeric;
        heads.forEach((each) => each.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const keyed = [...body.rows].map((row) => [row, valueOf(row, column)]);
        keyed.sort(([, one], [, two]) => {
          const lost = (value) => typeof value === "string" && numeric; // a field that does not say comes last
          if (lost(one) || lost(two)) return Number(lost(one)) - Number(lost(two));
          const apart = typeof one === "number" ? one - two : one.localeCompare(two, "en", { numeric: true });
          return down ? -apart : apart;
        });
        body.append(...keyed.map(([row]) => row));
        table.dispatchEvent(new Event("sorted"));
      });
    });
  }
  document.querySelectorAll("table[id]").forEach(sortable);

  const fields = byId("fields");
  if (fields) {
    const rows = [...fields.tBodies[0].rows], search = byId("search"), told = byId("count");
    const number = new Map(rows.map((row, at) => [row, at]));
    const full = (row) => specs.names[number.get(row)];
    const buttons = [...document.querySelectorAll("[data-show]")];
    const more = make("button", "more");
    more.type = "button";
    let every = rows.length <= FEW + 20;
    fields.parentElement.after(more);
    const filter = () => {
      const word = search.value.trim().toLowerCase();
      const which = buttons.find((each) => each.getAttribute("aria-pressed") === "true").dataset.show;
      let seen = 0;
      for (const row of fields.tBodies[0].rows) {
        row.hidden = !(which === "all" || row.classList.contains(which)) || !(full(row) + " " + row.textContent).toLowerCase().includes(word);
        if (!row.hidden) seen++;
        row.classList.toggle("cut", !row.hidden && !every && seen > FEW);
      }
      told.textContent = seen === rows.length ? `${count(seen)} fields` : `${count(seen)} of ${count(rows.length)}`;
      more.hidden = every || seen <= FEW;
      more.textContent = `Show all ${count(seen)}`;
    };
    more.addEventListener("click", () => { every = true; filter(); });
    search.addEventListener("input", filter);
    fields.addEventListener("sorted", filter);
    for (const each of buttons) each.addEventListener("click", () => {
      buttons.forEach((other) => other.setAttribute("aria-pressed", String(other === each)));
      filter();
    });
    filter();
    const lines = document.querySelector('[data-chart="trajectories"]');
    if (lines) {
      fields.addEventListener("pointerover", (event) => { const row = event.target.closest("tbody tr"); if (row && lines.focusOn) lines.focusOn(number.get(row)); });
      fields.addEventListener("pointerleave", () => lines.focusOn && lines.focusOn(-1));
    }
    byId("csv").addEventListener("click", () => download("fields.csv", csvOf(fields, full)));
    window.lpfsCsv = () => csvOf(fields, full);
    byId("copy-kept").addEventListener("click", (event) => copy(rows.filter((row) => row.classList.contains("kept")).map(full).join("\n"), event.currentTarget));
  }

  // A cell that a spreadsheet would take for a formula begins with an apostrophe; numbers are numbers.
  function cell(text) {
    let safe = /^[=+\-@\t\r\n＝＋－＠]/.test(text) ? "'" + text : text;
    return /[",\r\n]/.test(safe) ? '"' + safe.replaceAll('"', '""') + '"' : safe;
  }
  function csvOf(table, full) {
    const lines = [[...table.tHead.rows[0].cells].map((each) => cell(each.textContent))];
    for (const row of table.tBodies[0].rows) {
      lines.push([...row.cells].map((each, column) => {
        if (column === 0) return cell(full(row));
        if (column === 1) return each.textContent;
        return each.dataset.v !== undefined ? each.dataset.v : cell(each.textContent === "–" ? "" : each.textContent);
      }));
    }
    return lines.map((each) => each.join(",")).join("\r\n") + "\r\n";
  }
  function download(name, text) {
    const link = make("a");
    link.href = URL.createObjectURL(new Blob(["\ufeff" + text], { type: "text/csv;charset=utf-8" }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }
  function copy(text, button) {
    const said = button.textContent;
    const done = (word) => { button.textContent = word; setTimeout(() => { button.textContent = said; }, 1200); };
    const byHand = () => {
      const area = make("textarea");
      area.value = text;
      document.body.append(area);
      area.select();
      const fine = document.execCommand("copy");
      area.remove();
      done(fine ? "Copied" : "Not allowed here");
    };
    if (navigator.clipboard) navigator.clipboard.writeText(text).then(() => done("Copied"), byHand);
    else byHand();
  }
  for (const each of document.querySelectorAll("[data-copy]")) each.addEventListener("click", () => copy(byId(each.dataset.copy).textContent, each));

  // ---- the heat map of a comparison ------------------------------------------------------------------------------
  const pick = byId("heat-keep"), heat = byId("heat");
  if (pick && heat) {
    const shares = specs["heat-data"];
    [...heat.tBodies[0].rows].forEach((row, at) => { row.dataset.at = at; });
    pick.addEventListener("change", () => {
      const of = shares[pick.value];
      for (const row of heat.tBodies[0].rows) {
        [...row.cells].slice(1).forEach((each, method) => {
          const share = of[row.dataset.at][method];
          each.textContent = share === null ? "–" : share + " %";
          if (share === null) { delete each.dataset.h; delete each.dataset.v; }
          else { each.dataset.h = Math.round(share / 12.5); each.dataset.v = share; }
        });
      }
    });
  }
})();
