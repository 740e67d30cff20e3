// What pages have in common: data that is fetched again and again, tables, figures, plots, times.

import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { get } from "./api.js";

// The answer of a path, fetched again every `seconds` while the tab is visible.
export function usePoll(path, seconds = 5) {
  const [state, set] = useState({ data: null, error: null });
  const [turn, again] = useState(0);
  useEffect(() => {
    if (!path) return undefined;
    const control = new AbortController();
    let timer = 0;
    const load = async () => {
      if (!document.hidden) {
        try {
          const data = await get(path, control.signal);
          if (!control.signal.aborted) set({ data, error: null });
        } catch (error) {
          if (control.signal.aborted) return;
          set((last) => ({ data: last.data, error }));
        }
      }
      if (!control.signal.aborted) timer = setTimeout(load, seconds * 1000);
    };
    load();
    return () => { control.abort(); clearTimeout(timer); };
  }, [path, seconds, turn]);
  return { ...state, reload: () => again((n) => n + 1) };
}

export const Failure = ({ error }) => error && html`<div class="error" role="alert">${error.message}${error.outcome === "unknown" && " It may have happened all the same."}</div>`;

export const Badge = ({ kind = "", children }) => html`<span class="badge ${kind}">${children}</span>`;

export const Figure = ({ label, value, note }) =>
  html`<div class="panel figure"><div class="label">${label}</div><div class="value">${value ?? "–"}</div>${note && html`<div class="note">${note}</div>`}</div>`;

const NUMBER = new Intl.NumberFormat("en");
const SHORT = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
export const number = (value) => (value === null || value === undefined ? "–" : NUMBER.format(value));
export const short = (value) => (value === null || value === undefined ? "–" : SHORT.format(value));
export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${unit ? value.toFixed(1) : value} ${units[unit]}`;
}

const LOCAL = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });
// In the viewer's zone, with UTC beside it as the title.
export function Time({ ms, iso }) {
  const moment = iso ? new Date(iso) : new Date(Number(ms));
  if (!ms && !iso) return "–";
  return html`<time datetime=${moment.toISOString()} title=${moment.toISOString()}>${LOCAL.format(moment)}</time>`;
}
const CLOCK = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", fractionalSecondDigits: 3, hour12: false });
export const Clock = ({ iso }) => html`<time datetime=${iso} title=${`${LOCAL.format(new Date(iso))}, ${iso}`}>${CLOCK.format(new Date(iso))}</time>`;
export function ago(ms) {
  if (!ms) return "–";
  const seconds = Math.max(0, (Date.now() - Number(ms)) / 1000);
  for (const [name, size] of [["d", 86400], ["h", 3600], ["min", 60]]) if (seconds >= size) return `${Math.floor(seconds / size)} ${name}`;
  return `${Math.floor(seconds)} s`;
}

// The address of a broker, by its id.
export function useBrokerNames() {
  const { data } = usePoll("/v1/brokers?local=true", 30);
  const names = Object.fromEntries((data?.brokers ?? []).map((broker) => [broker.broker_id, broker.client_addr]));
  return (id) => (id && id !== "0" ? html`<span title=${`broker ${id}`}>${names[id] ?? id}</span>` : "none");
}

export function Table({ columns, rows, empty = "Nothing here.", caption }) {
  if (!rows?.length) return html`<div class="empty">${empty}</div>`;
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${caption}><table><caption class="hide">${caption}</caption>
    <thead><tr>${columns.map(([title, , kind]) => html`<th scope="col" class=${kind ?? ""}>${title}</th>`)}</tr></thead>
    <tbody>${rows.map((row) => html`<tr>${columns.map(([, show, kind]) => html`<td class=${kind ?? ""}>${show(row)}</td>`)}</tr>`)}</tbody></table></div>`;
}

// A plot over time: `series` is [[label, values], ...] beside `times` in seconds.
export function Plot({ title, times, series, format = short }) {
  const box = useRef(null);
  const plot = useRef(null);
  const names = series.map(([label]) => label).join();
  useEffect(() => {
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(name).trim();
    const axis = { stroke: color("--soft"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    const colors = [color("--accent"), color("--warn"), color("--good"), color("--bad")];
    plot.current = new uPlot({
      width: box.current.clientWidth || 400, height: 160, legend: { live: true }, cursor: { y: false },
      axes: [axis, { ...axis, size: 56, values: (_, ticks) => ticks.map(format) }],
      scales: { y: { range: (_, low, high) => [0, Math.max(high * 1.1, 1)] } },
      series: [{}, ...series.map(([label], index) => ({ label, stroke: colors[index % 4], width: 2, points: { show: false }, value: (_, value) => (value === null ? "–" : format(value)) }))],
    }, [times, ...series.map(([, values]) => values)], box.current);
    const sized = new ResizeObserver(() => plot.current?.setSize({ width: box.current.clientWidth, height: 160 }));
    sized.observe(box.current);
    return () => { sized.disconnect(); plot.current.destroy(); };
  }, [names, document.documentElement.dataset.theme]);
  useEffect(() => { plot.current?.setData([times, ...series.map(([, values]) => values)]); }, [times]);
  return html`<div class="panel"><h2>${title}</h2><div class="plot" ref=${box} role="img" aria-label=${title}></div></div>`;
}

// A button that asks before it does something that cannot be taken back.
export function Action({ children, ask, run, kind = "", done }) {
  const dialog = useRef(null);
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState(null);
  const act = async () => {
    setBusy(true);
    setError(null);
    try { await run(); dialog.current?.close(); done?.(); } catch (failed) { setError(failed); } finally { setBusy(false); }
  };
  if (!ask) return html`<button class=${kind} disabled=${busy} onClick=${act}>${children}</button>${error && html`<${Failure} error=${error} />`}`;
  return html`<button class=${kind} onClick=${() => dialog.current.showModal()}>${children}</button>
    <dialog ref=${dialog}><h2>${children}</h2><p>${ask}</p><${Failure} error=${error} />
      <div class="row"><button class="primary" disabled=${busy} onClick=${act}>${busy ? "Working…" : "Yes"}</button><button onClick=${() => dialog.current.close()}>Cancel</button></div></dialog>`;
}

export const Tabs = ({ base, tabs, chosen }) =>
  html`<nav class="tabs" aria-label="Parts of this page">${tabs.map(([id, title]) => html`<a href=${`${base}/${id}`} aria-current=${chosen === id ? "page" : null}>${title}</a>`)}</nav>`;

export const state = (text) => ({ active: "good", open: "good", assigned: "good", running: "good", ready: "good", moving: "warn", draining: "warn", sealing: "warn", leaving: "warn", paused: "warn", unknown: "warn" }[text] ?? (text ? "bad" : ""));
