// Draws the charts with what is chosen above them, and shows the tables of the chosen trace set.
"use strict";
(() => {
  const page = JSON.parse(document.getElementById("chart-data").textContent);
  const ROW = 17; // pixels of an arm in a list
  const choice = name => document.getElementById("choose-" + name);
  const narrow = () => window.matchMedia("(max-width: 40rem)").matches;

  function fill(select, items, keep) {
    select.replaceChildren(...items.map(item => new Option(item.name, item.key)));
    if (items.some(item => item.key === keep)) select.value = keep;
  }
  const distinct = names => [...new Set(names)].map(name => ({ key: name, name }));
  // Arms whose heads can be shown differ from model to model.
  const fillArms = () => {
    if (!page.specs.heads) return;
    const mine = page.rows.layers.filter(row => row.model === choice("model").value && row.set === choice("set").value);
    fill(choice("heads"), distinct(mine.map(row => row.arm)), choice("heads").value);
  };
  const fillSets = () => {
    const mine = page.sets.filter(one => one.model === choice("model").value);
    fill(choice("set"), distinct(mine.map(one => one.set)), choice("set").value);
  };

  // Long titles in lines that fit: SVG text does not wrap.
  function lines(text, columns) {
    const found = [""];
    for (const word of text.split(" ")) {
      const last = found.length - 1;
      if (found[last] && found[last].length + word.length + 1 > columns) found.push(word);
      else found[last] += (found[last] ? " " : "") + word;
    }
    return found;
  }
  function titled(part, titles) {
    if (Array.isArray(part)) return part.map(one => titled(one, titles));
    if (part && typeof part === "object")
      return Object.fromEntries(Object.entries(part).map(([key, value]) => [key, titled(value, titles)]));
    return typeof part === "string" && part in titles ? titles[part] : part;
  }

  function draw(name) {
    const front = page.axes.filter(axis => axis.front === name);
    const axis = front.find(one => one.key === choice(name).value);
    const metric = page.metrics.find(one => one.key === choice("metric").value);
    const x = axis ? axis.title : page.titles[name] || "";
    const here = document.getElementById("chart-" + name);
    const { placeholders: p } = page, small = narrow();
    const beside = axis ? 60 : small ? 185 : 280, wide = Math.max(20, Math.floor((here.clientWidth - beside) / 7.5));
    const spec = titled(page.specs[name], {
      [p.x]: lines(x, wide), [p.xTip]: x, [p.y]: lines(metric.title, 50), [p.yTip]: metric.title,
    });
    const values = { model: choice("model").value, set: choice("set").value, metric: metric.key, axis: axis && axis.key,
      arm: name === "heads" ? choice(name).value : undefined };
    for (const param of spec.params) if (values[param.name] !== undefined) param.value = values[param.name];
    const rows = page.rows[axis ? "points" : page.sources[name]].filter(row => row.model === values.model && row.set === values.set);
    spec.datasets = { [axis ? "points" : "rows"]: rows };
    if (!axis) spec.height = ROW * (name === "heads" ? Math.max(0, ...rows.map(row => row.heads.length))
      : new Set(rows.map(row => row.arm)).size);
    spec.autosize = { type: "fit-x", contains: "padding" };
    const config = structuredClone(page.config);
    config.legend.columns = small ? 2 : 5;
    config.axis.labelLimit = small ? 165 : 260;
    config.legend.labelLimit = small ? 130 : 220;
    const options = { renderer: "svg", mode: "vega-lite", config, logLevel: 1,
      actions: { export: true, source: false, compiled: false, editor: false } };
    return vegaEmbed(here, spec, options);
  }

  function showTables() {
    const all = choice("all").checked;
    for (const part of document.querySelectorAll("[data-model]")) {
      const mine = part.dataset.model === choice("model").value && part.dataset.set === choice("set").value;
      part.hidden = !all && !mine;
    }
  }
  async function show() {
    showTables();
    fillArms();
    document.body.dataset.state = "drawing";
    await Promise.all(Object.keys(page.specs).map(draw));
    document.body.dataset.state = "drawn";
  }

  fill(choice("model"), distinct(page.sets.map(one => one.model)));
  fillSets();
  fill(choice("metric"), page.metrics);
  for (const front of new Set(page.axes.map(axis => axis.front)))
    fill(choice(front), page.axes.filter(axis => axis.front === front));
  document.querySelector(".filters").hidden = false;
  choice("model").addEventListener("change", fillSets);
  for (const select of document.querySelectorAll("select")) select.addEventListener("change", show);
  choice("all").addEventListener("change", showTables);
  window.matchMedia("(max-width: 40rem)").addEventListener("change", show);
  show();
})();
