// The script of every page: it colours the figures, draws them, and handles the controls. Nothing here fetches anything.
"use strict";
(() => {
  const root = document.documentElement;
  const all = (query, from = document) => [...from.querySelectorAll(query)];
  const read = (id) => document.getElementById(id).textContent;
  const NARROW = 520; // pixels below which a figure shows less text
  const figures = {}; // what is drawn, by name
  const hidden = new Set(); // indices of recipes that the reader switched off
  let data;

  root.classList.add("scripted");
  root.dataset.drawn = "0";

  // ── light and dark ──────────────────────────────────────────────────────────────────────────────────────────────
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const themeOfLink = () => ["#dark", "#light"].includes(location.hash) && location.hash.slice(1);
  const savedTheme = () => { try { return localStorage.getItem("narrowgauge-theme"); } catch { return null; } };
  const saveTheme = (theme) => { try { localStorage.setItem("narrowgauge-theme", theme); } catch { /* a file may have no local storage */ } };
  const isDark = () => (root.dataset.theme || (prefersDark.matches ? "dark" : "light")) === "dark";

  function applyTheme(theme) {
    if (theme === "dark" || theme === "light") root.dataset.theme = theme;
    document.getElementById("theme").setAttribute("aria-label", isDark() ? "Switch to light" : "Switch to dark");
    drawAll();
  }

  // Colours in the figures are names like "@c2" or "@c2/0.2": properties of the style sheet, with an opacity.
  const probe = document.createElement("i");
  probe.hidden = true;
  let palette = {};
  function colourOf(name) {
    if (!(name in palette)) {
      const [property, opacity] = name.slice(1).split("/");
      probe.style.color = `var(--${property})`;
      const parts = getComputedStyle(probe).color.match(/[\d.]+/g).map(Number);
      palette[name] = `rgba(${parts.slice(0, 3).join(",")},${opacity ?? parts[3] ?? 1})`;
    }
    return palette[name];
  }
  const COLOUR_KEYS = new Set(["color", "fillcolor", "bgcolor", "bordercolor", "activebgcolor", "tickcolor"]);
  function coloured(value, key) {
    if (typeof value === "string") return COLOUR_KEYS.has(key) && value[0] === "@" ? colourOf(value) : value;
    if (key === "colorscale") return value.map(([at, name]) => [at, colourOf(name)]);
    if (!value || typeof value !== "object" || ["x", "y", "z", "text", "customdata", "ticktext", "meta"].includes(key)) return value;
    if (Array.isArray(value)) return value.map((item) => coloured(item, key));
    return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, coloured(item, name)]));
  }

  // ── drawing ─────────────────────────────────────────────────────────────────────────────────────────────────────
  // Plotly's own button saves a figure as it is shown.
  const configOf = (name) => ({ responsive: true, displaylogo: false, modeBarButtons: [["toImage"]], toImageButtonOptions: { format: "svg", filename: name } });
  const plain = (label) => label.replaceAll("&lt;", "<").replaceAll("&gt;", ">").replaceAll("&amp;", "&");
  const clipped = (label, most) => {
    const letters = plain(label);
    if (letters.length <= most) return label;
    const short = letters.slice(0, Math.ceil(most / 3)) + "…" + letters.slice(-Math.floor((2 * most) / 3));
    return short.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
  };

  // By default Plotly labels the 2 and the 5 of 20 and 50 in small print: use whole numbers where they are short, else powers of ten alone.
  function logTicks(spec, name, narrow) {
    const values = spec.data.flatMap((trace) => (trace[`${name[0]}axis`] ?? name[0]) === name.replace("axis", "") ? trace[name[0]] : []).filter((value) => value > 0);
    const [least, most] = values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, 0]);
    const decades = Math.log10(most / least);
    if (narrow && name.startsWith("x") && decades > 2) return { dtick: Math.ceil(decades / 5) };
    // From one decade on Plotly may label every digit, one over the other.
    if (least >= 1e-3 && most < 1e6) return { tickformat: "~g", ...(decades > 1 && decades < 3 ? { dtick: "D2" } : {}) };
    return { dtick: Math.max(1, Math.ceil(decades / 8)) };
  }

  function layoutOf(spec, width) {
    const narrow = width < NARROW;
    const layout = coloured(structuredClone(spec.layout));
    const axis = { exponentformat: "power", gridcolor: "@grid", linecolor: "@line", zerolinecolor: "@muted", zeroline: false, automargin: true, tickcolor: "@line" };
    for (const name of Object.keys(layout).filter((name) => /^[xy]axis\d*$/.test(name))) {
      const own = layout[name];
      layout[name] = { ...colouredAxis(axis), ...own };
      if (layout[name].type === "log") layout[name] = { dtick: undefined, minor: { showgrid: false }, ...logTicks(spec, name, narrow), ...layout[name] };
      if (own.title) layout[name].title = { ...own.title, ...(narrow && name.startsWith("x") ? { text: short(own.title.text) } : {}), standoff: 10, font: { size: 12, color: colourOf("@muted") } };
      if (own.ticktext) layout[name].ticktext = own.ticktext.map((label) => (narrow ? clipped(label.replace(/^(\w+:)?[a-z_.]*\.(?=\d+\.)/, "$1"), 20) : clipped(label, 46)));
      if (narrow && name.startsWith("x")) layout[name].nticks = 6;
      if (narrow && layout[name].dtick === 8) layout[name].dtick = 16;
    }
    return {
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: narrow ? 11 : 12, color: colourOf("@muted") },
      margin: { l: narrow ? 44 : 56, r: narrow ? 10 : 18, t: layout.updatemenus ? 34 : 12, b: 44, pad: 2 },
      hovermode: "closest",
      hoverlabel: { bgcolor: colourOf("@card"), bordercolor: colourOf("@line"), font: { color: colourOf("@ink"), size: 12 }, namelength: -1, align: "left" },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colourOf("@muted"), activecolor: colourOf("@accent"), orientation: "v" },
      showlegend: false,
      dragmode: narrow ? false : "zoom",
      uirevision: true, // What the reader zoomed to stays in another theme.
      ...layout,
    };
  }
  // The title of an axis is centred below it and cut where the figure ends: a long one goes without its unit, which the caption has.
  const short = (title) => (title.length > 30 ? title.replace(/ \([^()]*\)$/, "") : title);
  const colouredAxis = (axis) => Object.fromEntries(Object.entries(axis).map(([key, value]) => [key, typeof value === "string" ? colourOf(value) : value]));

  const tracesOf = (spec) => spec.data.map((trace) => Object.assign(coloured(trace), { visible: !hidden.has(trace.meta?.group) }));

  function draw(name) {
    const spec = figures[name];
    const place = document.querySelector(`[data-plot="${name}"]`);
    if (!place || !spec) return undefined;
    const layout = layoutOf(spec, place.clientWidth);
    place.style.minHeight = `${layout.height}px`;
    return Plotly.react(place, tracesOf(spec), layout, configOf(name)).then(() => {
      scalable(place);
      reachable(name, place);
      showValues(name);
      if (name === "ranges-figure" && !place.dataset.ready) place.on("plotly_sliderchange", ({ slider }) => { sample = slider.active; showRanges(); redraw(name); });
      place.dataset.ready = "yes";
    });
  }
  // On paper, and wherever the width changes without a new drawing, a figure shrinks and is not cut off.
  function scalable(place) {
    for (const svg of all(".main-svg", place)) {
      svg.setAttribute("viewBox", `0 0 ${svg.getAttribute("width")} ${svg.getAttribute("height")}`);
      svg.setAttribute("preserveAspectRatio", "xMinYMin");
    }
  }
  // Plotly's buttons and sliders are shapes that only a pointer reaches.
  function reachable(name, place) {
    const last = (data.gauges[chosen("run")]?.histogram?.frames.length ?? 1) - 1;
    const at = Math.min(sample ?? last, last);
    const moves = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1 };
    for (const shape of all(".updatemenu-button, .slider-container", place)) {
      const isSlider = shape.matches(".slider-container");
      const values = isSlider ? { "aria-valuemin": 0, "aria-valuemax": last, "aria-valuenow": at } : {};
      const attributes = { tabindex: 0, role: isSlider ? "slider" : "button", "aria-label": isSlider ? "Sample" : shape.textContent, ...values };
      for (const [key, value] of Object.entries(attributes)) shape.setAttribute(key, value);
      shape.onkeydown = (event) => {
        if (isSlider ? !(event.key in moves) : !["Enter", " "].includes(event.key)) return;
        event.preventDefault();
        if (!isSlider) { shape.dispatchEvent(new MouseEvent("click")); return; }
        sample = Math.max(0, Math.min(last, at + moves[event.key]));
        showRanges(); redraw(name);
      };
    }
  }
  // The values that a figure draws, for those who cannot point at them.
  function showValues(name) {
    const place = document.querySelector(`[data-values="${name}"]`);
    if (!place.open) return;
    const drawn = figures[name].data.filter((trace) => !hidden.has(trace.meta?.group) && trace.hoverinfo !== "skip" && !trace.meta?.format);
    const rows = drawn.flatMap((trace) => (trace.z ?? [trace.y]).flatMap((line, tensor) => line.map((value, at) => {
      const [label, digits] = trace.customdata?.[tensor][at] ?? [trace.name ?? trace.meta?.title ?? "mark", value];
      return value === null ? null : [plain(label), trace.x[at], digits];
    }))).filter((row) => row);
    const cells = [["", "x", "y"], ...rows].map((row, line) => {
      const tr = document.createElement("tr");
      tr.append(...row.map((text) => Object.assign(document.createElement(line ? "td" : "th"), { textContent: text })));
      return tr;
    });
    place.querySelector("table").replaceChildren(...cells);
  }
  function drawAll() {
    if (!window.Plotly || !data) return;
    palette = {};
    Promise.all(Object.keys(figures).map(draw)).then(() => { root.dataset.drawn = String(all("[data-ready]").length); }, complain);
  }
  function show(name, spec) {
    figures[name] = spec;
  }

  // ── inside one run ──────────────────────────────────────────────────────────────────────────────────────────────
  const choices = (name) => all(`[data-choice="${name}"]`);
  const chosen = (name) => choices(name)[0]?.value;

  const isNarrow = (name) => document.querySelector(`[data-plot="${name}"]`).clientWidth < NARROW;

  // Shown instead of a figure that a run has no data for: another run's figure must not stay.
  const NO_METRICS = "The gauges of this run have no metrics per tensor.";
  const NO_HISTOGRAMS = "This run has no histograms.";
  function nothing(why) {
    const message = { text: why, xref: "paper", yref: "paper", x: 0.5, y: 0.5, showarrow: false, font: { color: "@muted", size: 12 } };
    return { data: [], layout: { height: 160, xaxis: { visible: false }, yaxis: { visible: false }, annotations: [message] } };
  }

  function showHeat() {
    const select = choices("metric")[0];
    if (!select) return;
    const maps = data.gauges[chosen("run")].heat;
    for (const option of select.options) option.disabled = !(option.value in maps);
    if (!(select.value in maps)) select.value = Object.keys(maps)[0] ?? "";
    const map = maps[select.value];
    const caption = document.getElementById("heat-how");
    if (!map) { caption.textContent = NO_METRICS; show("heat", nothing(NO_METRICS)); return; }
    caption.textContent = map.how;
    const [trace] = map.data;
    const { names, log } = trace.meta;
    const digits = (z) => (z === null ? "" : log ? Number((10 ** z).toPrecision(2)).toString() : z.toString());
    const customdata = trace.z.map((row, place) => row.map((z) => [names[place], digits(z)]));
    const ticks = log ? { tickprefix: "10<sup>", ticksuffix: "</sup>", dtick: 1 } : {};
    const colorbar = { thickness: 10, outlinewidth: 0, ...ticks, ...(isNarrow("heat") ? { orientation: "h", y: 1, yanchor: "bottom", len: 1, lenmode: "fraction" } : { x: 1.01 }) };
    const hovertemplate = "%{customdata[0]}<br>%{customdata[1]} at step %{x}<extra></extra>";
    const layout = isNarrow("heat") ? withTitleBelow(map.layout) : map.layout;
    show("heat", { data: [{ ...trace, customdata, colorbar, hovertemplate }], layout });
  }

  // With a colour bar on top, Plotly puts the title of the x axis between its ticks; here it gets a line of its own.
  function withTitleBelow(layout) {
    const { title, ...xaxis } = layout.xaxis;
    const label = { text: title.text, xref: "paper", x: 0.5, showarrow: false, yref: "paper", y: 0, yanchor: "top", yshift: -20, font: { color: "@muted", size: 12 } };
    return { ...layout, xaxis, annotations: [label] };
  }

  let sample; // the sample whose histograms are shown; the last one until the reader moves the slider
  function showRanges() {
    if (!choices("format").length) return;
    const spec = data.gauges[chosen("run")].histogram;
    if (!spec) { show("ranges-figure", nothing(NO_HISTOGRAMS)); return; }
    const at = Math.min(sample ?? Infinity, spec.frames.length - 1);
    const sliders = [{ ...spec.layout.sliders[0], active: at }];
    const format = data.formats.find((row) => row.name === chosen("format"));
    const annotations = [];
    const traces = spec.data.map((trace, panel) => {
      if (trace.type !== "bar") {
        const mine = trace.meta.format === format.name;
        return { ...trace, line: { ...trace.line, color: mine ? "@accent" : "@muted" }, opacity: mine ? 1 : 0.55 };
      }
      const y = spec.frames[at][panel];
      annotations.push(panelTitle(trace, y, format, panel));
      return { ...trace, y: y || [] };
    });
    const edge = (x, dash) => ({ type: "line", xref: "x", yref: "paper", x0: x, x1: x, y0: 0, y1: 1, line: { color: "@accent", width: 1, dash } });
    const shapes = [
      { type: "rect", xref: "x", yref: "paper", x0: format.normal, x1: format.max, y0: 0, y1: 1, fillcolor: "@band", line: { width: 0 }, layer: "below" },
      edge(format.subnormal, "dot"), edge(format.normal, "solid"), edge(format.max, "solid"),
    ];
    show("ranges-figure", { data: traces, layout: withLabels({ ...spec.layout, shapes, annotations, sliders }) });
  }

  // On a narrow page the labels of lines are above them, not beside them.
  function withLabels(layout) {
    if (!isNarrow("ranges-figure")) return layout;
    const names = layout.yaxis.ticktext.map((text, line) => ({
      text: clipped(text, 46), xref: "paper", x: 0, xanchor: "left", xshift: 8, showarrow: false, yref: "y", y: line, yanchor: "bottom", yshift: 3,
      font: { color: "@muted", size: 11 },
    }));
    return { ...layout, yaxis: { ...layout.yaxis, showticklabels: false }, annotations: [...layout.annotations, ...names] };
  }

  function panelTitle(trace, y, format, panel) {
    const outside = (test) => (y || []).reduce((sum, value, place) => sum + (test(trace.x[place]) ? value || 0 : 0), 0);
    const [tooSmall, tooLarge] = [(x) => x < format.zero_below, (x) => x > format.last];
    const narrow = isNarrow("ranges-figure");
    const percent = (value) => Number((100 * value).toPrecision(3)).toString();
    const both = narrow ? `${percent(outside(tooSmall) + outside(tooLarge))} % outside` : `${percent(outside(tooSmall))} % to zero, ${percent(outside(tooLarge))} % over`;
    const shares = y ? both : "not sampled at this step";
    return {
      text: `<b>${trace.meta.title}</b>  ${shares}`, xref: "paper", x: 0, xanchor: "left", showarrow: false,
      yref: `y${panel + 2} domain`, y: 1, yanchor: "bottom", font: { color: "@ink", size: narrow ? 11 : 12 },
    };
  }

  // ── controls ─────────── ────────────────────────────────────────────────────────────────────────────────────────
  let resized;
  // Labels of lines, ticks and the position of a colour bar depend on the width.
  function refit() {
    showHeat(); showRanges(); drawAll();
  }
  const redraw = (name) => Promise.resolve(draw(name)).catch(complain);
  function listen() {
    document.getElementById("theme").addEventListener("click", () => { saveTheme(isDark() ? "light" : "dark"); applyTheme(savedTheme() || (isDark() ? "light" : "dark")); });
    prefersDark.addEventListener("change", () => applyTheme());
    let width = root.clientWidth; // A phone's toolbars change only the height.
    // Observed, since the width also changes without an event of the window; the first change at once, those that follow together.
    new ResizeObserver(() => {
      if (root.clientWidth === width) return;
      width = root.clientWidth;
      if (resized === undefined) refit();
      clearTimeout(resized);
      resized = setTimeout(() => { resized = undefined; refit(); }, 150);
    }).observe(root);
    addEventListener("hashchange", () => themeOfLink() && applyTheme(themeOfLink()));
    document.addEventListener("click", (event) => {
      const button = event.target.closest("[data-group]");
      if (button) switchGroup(button);
    });
    document.addEventListener("toggle", ({ target }) => target.dataset?.values && showValues(target.dataset.values), true);
    document.addEventListener("change", ({ target }) => {
      if (target.dataset?.choice === "run") {
        for (const other of choices("run")) other.value = target.value;
        showHeat(); showRanges(); redraw("heat"); redraw("ranges-figure");
      }
      if (target.dataset?.choice === "metric") { showHeat(); redraw("heat"); }
      if (target.dataset?.choice === "format") { showRanges(); redraw("ranges-figure"); }
    }, true);
  }
  function switchGroup(button) {
    const place = Number(button.dataset.group);
    const shown = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", shown);
    if (shown) hidden.delete(place); else hidden.add(place);
    Object.keys(figures).forEach(redraw);
  }
  function makeSortable(table) {
    const heads = all("thead th", table);
    heads.forEach((head, place) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = head.textContent;
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const descending = head.getAttribute("aria-sort") === "ascending";
        for (const other of heads) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", descending ? "descending" : "ascending");
        const sign = descending ? -1 : 1;
        // Numbers by their value, with what follows them left out; what has none comes last, in both directions.
        const number = (row) => parseFloat(row.cells[place].textContent.replaceAll(",", "").replace("−", "-"));
        const order = head.className === "number" ? (a, b) => Number.isNaN(a) - Number.isNaN(b) || sign * (a - b) : (a, b) => sign * a.localeCompare(b);
        const key = (row) => (head.className === "number" ? number(row) : row.cells[place].textContent);
        table.tBodies[0].append(...[...table.tBodies[0].rows].sort((a, b) => order(key(a), key(b))));
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
  async function inflated(letters) {
    if (!window.DecompressionStream) throw new Error("this browser is too old (Chrome 80, Firefox 113 or Safari 16.4 can).");
    const bytes = Uint8Array.from(atob(letters), (letter) => letter.charCodeAt(0));
    const unpacking = new DecompressionStream("gzip");
    const writer = unpacking.writable.getWriter();
    writer.write(bytes).then(() => writer.close()).catch(() => { /* the reader below fails too */ });
    return new Response(unpacking.readable).text();
  }
  async function begin() {
    document.body.append(probe);
    all("table.sortable").forEach(makeSortable);
    if (themeOfLink() || savedTheme()) root.dataset.theme = themeOfLink() || savedTheme();
    data = JSON.parse(await inflated(read("data")));
    const script = document.createElement("script");
    script.textContent = await inflated(read("plotly"));
    document.head.append(script);
    Object.assign(figures, data.figures);
    showHeat();
    showRanges();
    listen();
    applyTheme();
  }
  begin().catch(complain);
})();
