// The script of the live page: server-sent events become text, chips, rows and one chart. Names are only set as text.
"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const count = new Intl.NumberFormat("en-US");
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const LONG_NAME = 60;
  let live = null, state = null, plot = null;

  // Control characters, and characters that change the direction of text, are shown as their code point.
  function visible(text) {
    return String(text).replace(/[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu, (character) => {
      return "\\u" + character.codePointAt(0).toString(16).padStart(4, "0");
    });
  }

  function shorten(name) {
    const text = visible(name), half = LONG_NAME / 2;
    return text.length <= LONG_NAME ? text : `${text.slice(0, half)}…${text.slice(-half)}`;
  }

  function element(tag, text, className) {
    const node = document.createElement(tag);
    if (text !== undefined) node.textContent = text;
    if (className) node.className = className;
    return node;
  }

  function named(tag, name, className) {
    const node = element(tag, shorten(name), className);
    if (node.textContent !== name) node.title = visible(name);
    return node;
  }

  function compact(value) {
    if (value === null || value === undefined) return "–";
    const [size, unit] = [[1e9, "B"], [1e6, "M"], [1e4, "k"]].find(([limit]) => Math.abs(value) >= limit) ?? [1, ""];
    return unit ? `${(value / (size === 1e4 ? 1e3 : size)).toFixed(size === 1e4 ? 0 : 2)}${unit}` : count.format(value);
  }

  function duration(seconds) {
    if (seconds === null || seconds === undefined) return "–";
    if (seconds < 1) return `${(1000 * seconds).toFixed(seconds < 0.01 ? 2 : 1)} ms`;
    if (seconds < 90) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
    return seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
  }

  const age = (seconds) => duration(Math.max(1, Math.round(seconds)));
  const title = (key) => visible(key).replaceAll("_", " ").replace(/^./, (first) => first.toUpperCase());

  function tile(id, big, small, style) {
    const place = $(`tile-${id}`);
    place.querySelector(".big").textContent = big;
    place.querySelector(".small").textContent = small;
    place.className = `tile ${style ?? ""}`;
  }

  function fact(name, value) {
    const entry = element("div"), cell = element("dd"), isolated = element("bdi", typeof value === "number" ? count.format(value) : visible(value));
    cell.append(isolated);
    entry.append(element("dt", name), cell);
    return entry;
  }

  const gained = (row) => row.gain === null || row.gain === undefined ? "–" : Number(row.gain).toPrecision(3);

  function showModel() {
    const { model, serving, now } = live, kept = state?.summary?.kept ?? [];
    const refused = model.refused;
    $("headline").textContent = model.version ? `Bundle ${visible(model.version)}: ${model.fields.length} fields` : "No model is served yet";
    const published = state?.summary?.version;
    const behind = published && published !== model.version ? `; the trainer has published ${visible(published)}` : "";
    $("lead").textContent = model.version
      ? `answers for ${age(now - model.since)}; loaded and checked in ${duration(model.load_seconds)}${behind}`
      : "The server waits for a bundle.";
    tile("rate", `${serving.rate.toFixed(serving.rate < 10 ? 1 : 0)}/s`, `${compact(serving.requests)} in all, ${serving.failed ? count.format(serving.failed) : "none"} failed`, serving.failed ? "bad" : "");
    tile("latency", duration(serving.p99), `median ${duration(serving.p50)}, last 10 s`);
    tile("swaps", count.format(Math.max(0, model.swaps - 1)), refused ? "the current bundle is refused" : "since the server started", refused ? "bad" : "");
    $("warnings").hidden = !refused;
    if (refused) {
      $("refused-note").textContent = `Bundle ${visible(refused.version)} was refused ${age(now - refused.time)} ago; ${model.version ? `${visible(model.version)} answers` : "nothing is served"}.`;
      $("refused").textContent = visible(refused.reason);
    }
    const waiting = kept.filter((name) => !model.fields.includes(name));
    $("fields-note").textContent = model.version
      ? `A request needs these ${model.fields.length}; others are ignored.${model.reopened?.length ? " Framed ones are new: requests may lack them for five minutes." : ""}${waiting.length ? ` ${waiting.length} more come with the next bundle.` : ""}`
      : "";
    $("fields").replaceChildren(...model.fields.map((name) => named("span", name, model.reopened.includes(name) ? "chip new" : "chip")));
    const certificate = Object.entries(model.certificate ?? {}).filter(([, value]) => typeof value !== "object");
    const metadata = Object.entries(model.metadata ?? {}).filter(([, value]) => typeof value !== "object");
    $("facts").replaceChildren(
      ...(model.version ? [fact("Published", model.created), fact("Label", model.label)] : []),
      ...certificate.map(([name, value]) => fact(`Certificate: ${visible(name).replaceAll("_", " ")}`, String(value))),
      ...metadata.map(([name, value]) => fact(title(name), value)),
    );
  }

  function showRows(id, records, cells, note) {
    $(`${id}-note`).textContent = note;
    const rows = [...records].reverse().map((record) => {
      const row = element("tr");
      row.append(...cells(record));
      return row;
    });
    $(id).replaceChildren(...rows);
    $(id).closest(".scroll").hidden = rows.length === 0;
  }

  function fieldCell(name) {
    const cell = element("td");
    cell.append(name === null || name === undefined ? element("span", "the model", "quiet") : named("span", name, "name"));
    return cell;
  }

  function showState() {
    const usable = state !== null && !state.error;
    document.querySelectorAll("[data-state]").forEach((place) => { place.hidden = !usable; });
    $("state-error").hidden = !state?.error;
    if (state?.error) $("state-error-text").textContent = visible(state.error);
    if (!usable) return;
    const { summary, metrics, changes, alarms } = state, last = metrics.at(-1);
    const band = last && last.low !== null ? `${last.low.toFixed(4)} to ${last.high.toFixed(4)}` : "";
    tile("auc", last && last.auc !== null ? last.auc.toFixed(4) : "–", band);
    tile("events", compact(summary.rows), summary.rate === null || summary.rate === undefined ? "" : `${compact(Math.round(summary.rate))} rows/s`);
    tile("lag", summary.lag === null || summary.lag === undefined ? "–" : compact(summary.lag), summary.lag === 0 ? "nothing is waiting" : "waiting in the source");
    showRows("changes", changes, (change) => {
      const action = element("td"), gain = element("td", gained(change), "number");
      action.append(element("span", visible(change.action), `pill ${change.action === "closed" ? "no" : "yes"}`));
      if (change.low !== null && change.high !== null) gain.title = `interval ${Number(change.low).toPrecision(3)} to ${Number(change.high).toPrecision(3)}`;
      return [fieldCell(change.field), action, element("td", count.format(change.rows), "number"), gain];
    }, changes.length ? "Newest first; the last 100." : "No field was closed or reopened yet.");
    showRows("alarms", alarms, (alarm) => {
      const kind = element("td", visible(alarm.kind));
      kind.title = visible(alarm.message ?? "");
      return [fieldCell(alarm.field), kind, element("td", Number(alarm.size).toPrecision(3), "number"), element("td", count.format(alarm.since), "number")];
    }, alarms.length ? "Newest first; the last 100." : "No drift was found.");
    drawAuc(metrics);
  }

  function drawAuc(metrics) {
    const place = $("auc-chart"), known = metrics.filter((record) => record.auc !== null);
    const data = ["rows", "auc", "low", "high"].map((key) => known.map((record) => record[key] ?? null));
    const size = { width: place.clientWidth, height: 240 };
    if (!known.length || !size.width) return;
    if (plot) { plot.setData(data); return; }
    const axis = { stroke: () => style("--muted"), grid: { stroke: () => style("--grid"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    const band = () => `color-mix(in srgb, ${style("--accent")} 16%, transparent)`;
    const edge = { stroke: "transparent", width: 0, points: { show: false } };
    plot = new uPlot({
      ...size,
      legend: { show: false },
      scales: { x: { time: false } },
      cursor: { drag: { x: false, y: false }, points: { show: false } },
      series: [{}, { stroke: () => style("--accent"), width: 2, points: { show: false } }, edge, edge],
      bands: [{ series: [3, 2], fill: band }],
      axes: [
        { ...axis, size: 30, values: (_, ticks) => ticks.map(compact) },
        { ...axis, size: 60, values: (_, ticks) => ticks.map((tick) => tick.toFixed(3)) },
      ],
    }, data, place);
  }

  function redraw() {
    if (plot) { plot.destroy(); plot = null; }
    if (state && !state.error) drawAuc(state.metrics);
  }

  function show(status, className) {
    $("link").textContent = status;
    $("link").className = `pill ${className}`;
  }

  const events = new EventSource("/events");
  events.addEventListener("live", (event) => { live = JSON.parse(event.data); show("live", "yes"); showModel(); });
  events.addEventListener("state", (event) => { state = JSON.parse(event.data); showState(); if (live) showModel(); });
  events.addEventListener("error", () => show("no connection, trying again", "bad"));
  window.addEventListener("resize", redraw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  document.documentElement.classList.add("js");
})();
