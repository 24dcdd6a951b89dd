// The script of every page: it colours the figures, draws them, and handles the controls. Nothing here fetches anything.
"use strict";
(() => {
  const root = document.documentElement;
  const all = (query, from = document) => [...from.querySelectorAll(query)];
  const read = (id) => document.getElementById(id).textContent;
  const choices = (name) => all(`[data-choice="${name}"]`);
  const chosen = (name) => choices(name)[0].value;
  let data;

  root.classList.add("scripted");

  // ── colours ─────────────────────────────────────────────────────────────────────────────────────────────────────
  // Colours in the figures are names like "@c2" or "@c2/0.2": properties of the style sheet, with an opacity.
  const COLOUR = /^@([a-z]+\d?)(?:\/([\d.]+))?$/;
  const probe = document.createElement("i");
  probe.hidden = true;
  function colourOf(name) {
    const [, property, opacity] = COLOUR.exec(name);
    probe.style.color = `var(--${property})`;
    const parts = getComputedStyle(probe).color.match(/[\d.]+/g);
    return `rgba(${parts.slice(0, 3)},${opacity ?? parts[3] ?? 1})`;
  }
  const coloured = (value) => JSON.parse(JSON.stringify(value), (key, item) => (COLOUR.test(item) ? colourOf(item) : item));

  // ── drawing ─────────────────────────────────────────────────────────────────────────────────────────────────────
  const plain = (label) => label.replaceAll("&lt;", "<").replaceAll("&gt;", ">").replaceAll("&amp;", "&");
  // A long label goes without the path above a layer's number, then without its middle; an escaped letter counts as one.
  function clipped(label, most) {
    const short = label.length > most ? label.replace(/^(\w+:)?[a-z_.]*\.(?=\d+\.)/, "$1") : label;
    const letters = short.match(/&#?\w+;|./gs) ?? [];
    return letters.length <= most ? short : [...letters.slice(0, most / 3), "…", ...letters.slice((-2 * most) / 3)].join("");
  }

  // Plotly would label every digit, one over the other, and the 2 and the 5 of 20 and 50 in small print.
  function logTicks(traces, letter) {
    const values = traces.flatMap((trace) => (trace.yaxis ? [] : trace[letter])).filter((value) => value > 0);
    const decades = Math.log10(Math.max(...values) / Math.min(...values));
    return decades > 3 ? { dtick: Math.ceil(decades / 8) } : { tickformat: "~g", dtick: decades > 1 ? "D2" : undefined };
  }

  function layoutOf(spec, width) {
    const axis = {
      automargin: true, gridcolor: "@grid", showgrid: true, minor: { showgrid: false }, linecolor: "@line", showline: true,
      tickcolor: "@line", ticks: "outside", title: { standoff: 10, font: { size: 12 } }, zeroline: false, zerolinecolor: "@muted",
    };
    const layout = {
      template: { layout: { xaxis: { ...axis, nticks: 8 }, yaxis: axis } },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 56, r: 18, t: 12, b: 44, pad: 2 }, showlegend: false,
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: "@muted" },
      hovermode: "closest",
      hoverlabel: { bgcolor: "@card", bordercolor: "@line", font: { color: "@ink", size: 12 }, namelength: -1, align: "left" },
      dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom", // A finger scrolls the page.
      uirevision: true, // What the reader zoomed to stays in another theme.
      ...spec.layout,
    };
    for (const name of Object.keys(layout).filter((name) => /^[xy]axis\d*$/.test(name))) {
      const { type, ticktext } = layout[name];
      if (ticktext) layout[name] = { ...layout[name], ticktext: ticktext.map((label) => clipped(label, Math.min(46, 12 + width / 30))) };
      else if (type === "log") layout[name] = { ...layout[name], ...logTicks(spec.data, name[0]) };
    }
    return layout;
  }

  const isHidden = (group) => document.querySelector(`[data-group="${group}"][aria-pressed="false"]`) !== null;

  async function draw(place) {
    const name = place.dataset.plot;
    const spec = (name === "heat" ? heat() : null) ?? structuredClone(data.figures[name]);
    const isLog = document.querySelector(`[data-log="${name}"]`)?.checked;
    if (isLog) Object.assign(spec.layout.xaxis, { type: "log", uirevision: "log" });
    place.style.minHeight = `${spec.layout.height}px`;
    const traces = spec.data.map((trace) => ({ ...trace, visible: !isHidden(trace.meta?.group) }));
    const isFirst = !place.data;
    await Plotly.react(place, coloured(traces), coloured(layoutOf(spec, place.clientWidth)), { responsive: true, displayModeBar: false });
    scalable(place);
    if (isFirst) place.on("plotly_afterplot", () => scalable(place));
    showValues(place);
  }
  // On paper a figure shrinks and is not cut off.
  function scalable(place) {
    for (const svg of all(".main-svg", place)) {
      svg.setAttribute("viewBox", `0 0 ${svg.getAttribute("width")} ${svg.getAttribute("height")}`);
      svg.setAttribute("preserveAspectRatio", "xMinYMin");
    }
  }
  const valuesOf = (place) => place.closest("figure").querySelector("details");
  // The values that a figure draws, for those who cannot point at them.
  function showValues(place) {
    if (!valuesOf(place).open) return;
    const rows = document.createElement("tbody");
    for (const trace of place.data) {
      if (!trace.visible || trace.hoverinfo === "skip") continue;
      (trace.z ?? [trace.y]).forEach((line, tensor) => line.forEach((value, at) => {
        if (value === null) return;
        const [label, digits] = trace.customdata?.[tensor][at] ?? [trace.name ?? "mark", value];
        const row = rows.insertRow();
        for (const text of [plain(label), trace.x[at], digits]) row.insertCell().textContent = text;
      }));
    }
    valuesOf(place).querySelector("tbody").replaceWith(rows);
  }
  const drawAll = (places = all("[data-plot]")) => Promise.all(places.map(draw)).catch(complain);

  // ── inside one run ──────────────────────────────────────────────────────────────────────────────────────────────
  // Shown instead of a figure that a run has no data for: another run's figure must not stay.
  function nothing(why) {
    const message = { text: why, xref: "paper", yref: "paper", x: 0.5, y: 0.5, showarrow: false };
    return { data: [], layout: { height: 160, xaxis: { visible: false }, yaxis: { visible: false }, annotations: [message] } };
  }

  function heat() {
    const maps = data.gauges[chosen("run")].heat;
    const [select] = choices("metric");
    for (const option of select.options) option.disabled = !(option.value in maps);
    if (!(select.value in maps)) select.value = Object.keys(maps)[0] ?? "";
    const map = maps[select.value];
    const why = "The gauges of this run have no metrics per tensor.";
    document.getElementById("heat-how").textContent = map?.how ?? why;
    if (!map) return nothing(why);
    const [trace] = map.data;
    const { names, log } = trace.meta;
    const digits = (z) => (z === null ? "" : log ? Number((10 ** z).toPrecision(2)).toString() : z.toString());
    const customdata = trace.z.map((row, place) => row.map((z) => [names[place], digits(z)]));
    const ticks = log ? { tickprefix: "10<sup>", ticksuffix: "</sup>", dtick: 1 } : {};
    const colorbar = { thickness: 10, outlinewidth: 0, x: 1.01, ...ticks };
    const hovertemplate = "%{customdata[0]}<br>%{customdata[1]} at step %{x}<extra></extra>";
    return { data: [{ ...trace, customdata, colorbar, hovertemplate }], layout: map.layout };
  }

  // ── controls ────────────────────────────────────────────────────────────────────────────────────────────────────
  function listen() {
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawAll());
    document.addEventListener("click", ({ target }) => {
      const group = target.closest("[data-group]");
      if (group) {
        group.setAttribute("aria-pressed", group.getAttribute("aria-pressed") !== "true");
        drawAll();
      }
      const name = target.dataset.save;
      if (name) Plotly.downloadImage(document.querySelector(`[data-plot="${name}"]`), { format: "svg", filename: name }).catch(complain);
    });
    for (const place of all("[data-plot]")) valuesOf(place).addEventListener("toggle", () => showValues(place));
    document.addEventListener("input", ({ target }) => {
      drawAll([target.closest("figure").querySelector(".plot")]);
    });
  }
  function makeSortable(table) {
    const heads = all("thead th", table);
    heads.forEach((head, place) => {
      const button = Object.assign(document.createElement("button"), { type: "button", textContent: head.textContent });
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
        for (const other of heads) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", sign < 0 ? "descending" : "ascending");
        // Numbers by their value, with what follows them left out; what has none comes last, in both directions.
        const text = (row) => row.cells[place].textContent;
        const number = (row) => parseFloat(text(row).replaceAll(",", "").replace("−", "-"));
        const byNumber = (a, b) => Number.isNaN(number(a)) - Number.isNaN(number(b)) || sign * (number(a) - number(b));
        const byText = (a, b) => sign * text(a).localeCompare(text(b));
        table.tBodies[0].append(...[...table.tBodies[0].rows].sort(head.className === "number" ? byNumber : byText));
      });
    });
  }

  // ── start ───────────────────────────────────────────────────────────────────────────────────────────────────────
  function complain(error) {
    const trouble = document.getElementById("trouble");
    trouble.hidden = false;
    trouble.textContent = `The figures cannot be drawn here: ${error.message || error}`;
    console.error(error);
  }
  function inflated(letters) {
    if (!window.DecompressionStream) throw new Error("this browser is too old (Chrome 80, Firefox 113 or Safari 16.4 can).");
    const bytes = Uint8Array.from(atob(letters), (letter) => letter.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  }
  async function begin() {
    document.body.append(probe);
    all("table.sortable").forEach(makeSortable);
    data = JSON.parse(await inflated(read("data")));
    const script = document.createElement("script");
    script.textContent = await inflated(read("plotly"));
    document.head.append(script);
    listen();
    const drawn = await drawAll();
    if (drawn) root.dataset.drawn = drawn.length;
  }
  begin().catch(complain);
})();
