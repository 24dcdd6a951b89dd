// The script of a live page: it gets what is new, by server-sent events from where the page came, and puts it into the page.
"use strict";
(() => {
  const root = document.documentElement;
  const all = (query, from = document) => [...from.querySelectorAll(query)];
  const byId = (id) => document.getElementById(id);
  const windows = {}; // the steps that the reader zoomed to, by figure
  const known = {}; // the figures over all steps, by name
  const title = document.title;
  let page; // what page.js offers
  let ahead = 0; // seconds by which this machine's clock is ahead of the server's
  let heard = false;

  // ── what the runs are doing ─────────────────────────────────────────────────────────────────────────────────────
  function shown(seconds) {
    const whole = Math.max(0, Math.round(seconds));
    for (const [size, unit, below, smaller] of [[86400, "d", 3600, "h"], [3600, "h", 60, "min"], [60, "min", 1, "s"]]) {
      if (whole >= 30 * 86400) return `${Math.floor(whole / 86400)} d ago`;
      if (whole >= size) return `${Math.floor(whole / size)} ${unit} ${Math.floor((whole % size) / below)} ${smaller} ago`;
    }
    return `${whole} s ago`;
  }
  function tick() {
    for (const time of all("time[data-at]")) time.textContent = shown(Date.now() / 1000 - ahead - Number(time.dataset.at));
  }
  function badge() {
    const findings = Number(byId("findings")?.dataset.findings ?? 0);
    document.title = findings ? `(${findings}) ${title}` : title;
  }
  function say(text) {
    const place = byId("connection");
    if (place) place.textContent = text;
  }

  // ── sections ────────────────────────────────────────────────────────────────────────────────────────────────────
  // A figure keeps its element, and with it zoom, buttons and choices; all else of a section is replaced.
  function putSection(id, html) {
    const holder = document.createElement("template");
    holder.innerHTML = html;
    const next = holder.content.firstElementChild;
    const old = id === "nav" ? document.querySelector("header nav") : byId(id);
    if (!next) return;
    if (!old) { byId("main")?.append(next); prepare(next); return; }
    const focused = old.contains(document.activeElement) ? document.activeElement : null;
    for (const figure of all("figure[id]", next)) {
      const mine = byId(figure.id);
      if (!mine || !mine.querySelector(".plot")) continue;
      for (const part of ["h3", "figcaption"]) {
        const [from, to] = [figure.querySelector(part), mine.querySelector(part)];
        if (from && to && from.textContent !== to.textContent && figure.id !== "heat") to.textContent = from.textContent;
      }
      figure.replaceWith(mine);
    }
    const opened = all("details[open] > summary", old).map((summary) => summary.textContent);
    for (const details of all("details", next)) if (opened.includes(details.querySelector("summary")?.textContent)) details.open = true;
    const scrolled = all(".scroll", old).map((box) => [box.getAttribute("aria-label"), box.scrollLeft, box.scrollTop]);
    const place = focused && placeOf(focused, old);
    old.replaceWith(next);
    prepare(next);
    for (const [label, left, top] of scrolled) {
      const box = all(".scroll", next).find((other) => other.getAttribute("aria-label") === label);
      if (box) Object.assign(box, { scrollLeft: left, scrollTop: top });
    }
    if (focused) (next.contains(focused) ? focused : atPlace(place, next))?.focus({ preventScroll: true });
  }
  const FOCUSABLE = "a, button, select, input, summary, [tabindex]";
  const placeOf = (element, section) => all(FOCUSABLE, section).indexOf(element);
  const atPlace = (place, section) => all(FOCUSABLE, section)[place];
  function prepare(section) {
    all("table.sortable", section).forEach(page.makeSortable);
  }
  // Sections that the record now has, in the report's order; those that it has no longer go.
  function putOrder(order) {
    const main = byId("main");
    const mine = new Set(order);
    for (const section of all("section[id]", main)) if (!mine.has(section.id)) section.remove();
    for (const section of order.map(byId).filter((found) => found?.tagName === "SECTION")) {
      const focused = section.contains(document.activeElement) ? document.activeElement : null;
      const before = order.slice(0, order.indexOf(section.id)).map(byId).filter((found) => found?.tagName === "SECTION").pop();
      if (!before || before.nextElementSibling === section) continue;
      before.after(section);
      focused?.focus({ preventScroll: true });
    }
  }

  // ── figures ─────────────────────────────────────────────────────────────────────────────────────────────────────
  const plotOf = (name) => document.querySelector(`[data-plot="${name}"]`);
  function putFigure(name, spec) {
    page.data.figures[name] = known[name] = spec;
    const view = page.figures[name] ? undefined : spec.view;
    const caption = byId(`${name}-how`);
    if (windows[name]) { zoom(name, windows[name]); return; }
    page.show(name, spec, view);
    if (caption && spec.how && caption.textContent !== spec.how) caption.textContent = spec.how;
  }
  async function draw(names) {
    for (const name of names.filter(plotOf)) {
      await page.redraw(name);
      listenTo(name);
    }
  }
  // A reader who zooms in gets all rows of these steps from the server, thinned only as far as the screen needs.
  function listenTo(name) {
    const plot = plotOf(name);
    if (!plot?.on || plot.dataset.zooms || !(name in known)) return;
    plot.dataset.zooms = "yes";
    plot.on("plotly_relayout", (change) => {
      const [from, to] = change["xaxis.range"] ?? [change["xaxis.range[0]"], change["xaxis.range[1]"]];
      const isLog = plot.layout.xaxis.type === "log";
      if (from !== undefined) zoom(name, isLog ? [10 ** from, 10 ** to] : [Number(from), Number(to)]);
      else if (change["xaxis.autorange"] && windows[name]) { delete windows[name]; page.show(name, known[name]); page.redraw(name); }
    });
  }
  async function zoom(name, [from, to]) {
    windows[name] = [from, to];
    const answer = await fetch(`window?from=${from}&to=${to}`);
    if (!answer.ok) return;
    const spec = (await answer.json())[name];
    if (!spec || windows[name]?.[0] !== from || windows[name]?.[1] !== to) return;
    page.show(name, spec);
    await page.redraw(name);
    root.dataset.zoomed = name;
  }

  // ── news ────────────────────────────────────────────────────────────────────────────────────────────────────────
  async function take({ clock, generation, parts }) {
    if (String(generation) !== (root.dataset.generation ?? "")) { location.reload(); return; }
    ahead = Date.now() / 1000 - clock;
    const drawn = new Set();
    for (const [name, value] of Object.entries(parts)) if (name.startsWith("section:")) {
      putSection(name.slice(8), value);
    }
    if (parts.order) putOrder(parts.order);
    for (const [key, value] of Object.entries(parts)) {
      const [kind, name] = key.split(":");
      if (kind === "figure") putFigure(name, value);
      if (kind === "whole") page.show(name, (page.data.figures[name] = value), page.figures[name] ? undefined : value.view);
      if (kind === "figure" || kind === "whole") drawn.add(name);
    }
    if (parts.strip) page.data.strip = parts.strip;
    if (parts.gauges) page.data.gauges = parts.gauges;
    if (parts.strip || parts["section:events"]) { page.showStrip(); drawn.add("strip"); }
    if (parts.gauges && plotOf("heat")) { page.showHeat(); drawn.add("heat"); }
    if (parts.gauges && plotOf("ranges-figure")) { page.showRanges(); drawn.add("ranges-figure"); }
    // A section of the whole record brings figures that were not there before.
    for (const plot of all("[data-plot]:not([data-ready])")) drawn.add(plot.dataset.plot);
    tick();
    badge();
    say("");
    await draw([...drawn]);
    root.dataset.updates = String(Number(root.dataset.updates ?? 0) + 1);
  }
  function begin() {
    page = window.narrowgauge;
    let queue = Promise.resolve();
    const source = new EventSource("events");
    source.addEventListener("message", (message) => {
      heard = true;
      queue = queue.then(() => take(JSON.parse(message.data))).catch((error) => { console.error(error); });
    });
    source.addEventListener("end", () => { source.close(); say("The watch has ended; the page stays as it is. narrowgauge watch begins another."); });
    source.addEventListener("error", () => { if (source.readyState !== EventSource.CLOSED || heard) say("No answer from narrowgauge watch. The page stays as it is, and tries again."); });
    setInterval(tick, 1000);
    tick();
    badge();
  }
  if (window.narrowgauge) begin(); else root.addEventListener("narrowgauge", begin, { once: true });
})();
