// The list of topics, searched and paged by the broker.

import { html, useState } from "./vendor/htm-preact.js";
import { post } from "./api.js";
import { Badge, Failure, Table, number, state, usePoll } from "./parts.js";

const PAGE = 50;

export function Topics() {
  const [search, setSearch] = useState("");
  const [first, setFirst] = useState(0);
  const [creating, setCreating] = useState(false);
  const query = new URLSearchParams({ search, offset: first, limit: PAGE });
  const { data, error, reload } = usePoll(`/v1/topics?${query}`, 5);
  const columns = [
    ["Topic", (row) => html`<a href=${`#/topics${row.name}`}>${row.name}</a>`],
    ["State", (row) => html`<${Badge} kind=${state(row.state)}>${row.state}<//>`],
    ["Delivery", (row) => row.delivery],
    ["Partitions", (row) => row.partitions || "–", "num"],
    ["Owner", (row) => row.broker || "–"],
  ];
  return html`<div class="head"><h1>Topics</h1><span class="note">${data && number(data.total)}</span><span class="gap"></span>
      <input type="search" placeholder="Search" aria-label="Search topics" value=${search} onInput=${(event) => { setSearch(event.target.value); setFirst(0); }} />
      <button class="primary" onClick=${() => setCreating(!creating)}>New topic</button></div>
    <${Failure} error=${error} />
    ${creating && html`<${Create} done=${() => { setCreating(false); reload(); }} />`}
    <div class="panel"><${Table} caption="Topics" columns=${columns} rows=${data?.topics} empty=${data ? "No topic matches." : "Loading…"} /></div>
    ${data && data.total > PAGE && html`<div class="row"><button disabled=${!first} onClick=${() => setFirst(Math.max(0, first - PAGE))}>Before</button>
      <span class="note">${first + 1} to ${Math.min(first + PAGE, data.total)} of ${number(data.total)}</span>
      <button disabled=${first + PAGE >= data.total} onClick=${() => setFirst(first + PAGE)}>Next</button></div>`}`;
}

function Create({ done }) {
  const [error, setError] = useState(null);
  const submit = async (event) => {
    event.preventDefault();
    const form = new FormData(event.target);
    try {
      await post("/v1/topics", { name: form.get("name"), partitions: Number(form.get("partitions")), reliable: form.get("delivery") === "reliable" });
      done();
    } catch (failed) { setError(failed); }
  };
  return html`<form class="panel" onSubmit=${submit}><h2>New topic</h2><${Failure} error=${error} />
    <div class="row"><label>Name<input name="name" required placeholder="/default/orders" pattern="/[^/]+/[^/]+" /></label>
    <label>Partitions (0: none)<input name="partitions" type="number" min="0" max="1000" value="0" /></label>
    <label>Delivery<select name="delivery"><option value="reliable">reliable</option><option value="plain">non-reliable</option></select></label>
    <button class="primary">Create</button></div></form>`;
}
