"use strict";
(() => {
  const tables = JSON.parse(document.getElementById("data").textContent);
  const tip = document.getElementById("tip");
  const byTime = document.getElementById("axis-time");
  const areas = [...document.querySelectorAll(".area")];
  const units = {
    bytes: (v) => scaled(v, ["B", "kB", "MB", "GB", "TB", "PB"]),
    per_second: (v) => scaled(v, ["", "k", "M", "B", "T"]) + "/s",
    hertz: (v) => Math.round(v / 1e6) + " MHz",
    celsius: (v) => Math.round(v) + " °C",
    share: (v) => (100 * v).toPrecision(3) + " %",
    seconds: (v) => (v < 1 ? (1000 * v).toPrecision(3) + " ms" : v < 100 ? v.toPrecision(3) + " s" : duration(v)),
  };
  function scaled(value, names) {
    let at = 0;
    for (; Math.abs(value) >= 1000 && at < names.length - 1; at++) value /= 1000;
    return Number(value.toPrecision(3)) + " " + names[at];
  }
  function duration(seconds) {
    const parts = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
    const first = parts.findIndex(([size]) => seconds >= size);
    if (first < 0) return "0 s";
    const [size, name] = parts[first];
    const next = parts[first + 1];
    const rest = next ? Math.floor((seconds % size) / next[0]) : 0;
    return Math.floor(seconds / size) + " " + name + (rest ? " " + rest + " " + next[1] : "");
  }
  function nearest(values, wanted) {
    let best = -1, least = Infinity;
    for (let at = 0; at < values.length; at++) {
      const far = values[at] === null ? Infinity : Math.abs(values[at] - wanted);
      if (far < least) { least = far; best = at; }
    }
    return best;
  }
  function hide() {
    tip.style.display = "none";
    for (const area of areas) area.querySelector(".cursor").style.display = "none";
  }
  function row(color, name, text) {
    const line = document.createElement("div");
    const dot = document.createElement("i");
    dot.className = color;
    line.append(dot, name + " " + text);
    return line;
  }
  function show(area, share) {
    const axis = byTime && byTime.checked ? "t" : "s";
    const first = Number(area.dataset[axis + "0"]), last = Number(area.dataset[axis + "1"]);
    const wanted = first + share * (last - first);
    const unit = units[area.dataset.unit] || ((v) => String(Number(v.toPrecision(5))));
    const rows = [];
    let head = null;
    for (const series of area.dataset.series.split(";").filter(Boolean)) {
      const [number, color, ...rest] = series.split(":");
      const table = tables[Number(number)];
      const column = table.columns[rest.join(":")];
      const places = axis === "t" ? table.time : table.step;
      const at = column ? nearest(places, wanted) : -1;
      if (at < 0 || column.mean[at] === null || column.mean[at] === undefined) continue;
      if (head === null) {
        const since = table.time[at] === null ? "" : ", " + duration(table.time[at] - Number(area.dataset.t0));
        head = "step " + table.step[at].toLocaleString("en-US") + since;
      }
      const band = column.low && column.low[at] !== column.high[at]
        ? " (" + unit(column.low[at]) + " to " + unit(column.high[at]) + ")" : "";
      const where = table.few ? " at step " + table.step[at].toLocaleString("en-US") : "";
      rows.push(row(color, column.name, unit(column.mean[at]) + band + where));
    }
    if (head === null) return hide();
    const title = document.createElement("b");
    title.textContent = head;
    tip.replaceChildren(title, ...rows.slice(0, 12));
    tip.style.display = "block";
    const box = area.getBoundingClientRect();
    const left = box.left + share * box.width;
    const width = tip.offsetWidth;
    const wished = left + 14 + width > document.documentElement.clientWidth ? left - 14 - width : left + 14;
    tip.style.left = Math.max(4, wished) + window.scrollX + "px";
    tip.style.top = box.top + window.scrollY + 8 + "px";
    for (const other of areas) {
      const cursor = other.querySelector(".cursor");
      cursor.style.display = "block";
      cursor.style.left = 100 * share + "%";
    }
  }
  for (const area of areas) {
    let share = 0;
    const move = (event) => {
      const box = area.getBoundingClientRect();
      share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
      show(area, share);
    };
    area.addEventListener("pointermove", move);
    area.addEventListener("pointerdown", move);
    area.addEventListener("pointerleave", hide);
    area.addEventListener("blur", hide);
    area.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -0.01, ArrowRight: 0.01, Home: -1, End: 1 }[event.key];
      if (by === undefined) return;
      event.preventDefault();
      share = Math.min(1, Math.max(0, share + by));
      show(area, share);
    });
  }
  for (const input of document.querySelectorAll(".switch input")) input.addEventListener("change", hide);
})();
