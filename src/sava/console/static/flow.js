// Schemas, replication between clusters, and pipelines.

import { html, useState } from "./vendor/htm-preact.js";
import { get, post } from "./api.js";
import { Action, Badge, Failure, Table, Time, number, state, usePoll } from "./parts.js";

export function Schemas() {
  const { data, error } = usePoll("/v1/schemas", 15);
  const [shown, setShown] = useState(null);
  const [failed, setFailed] = useState(null);
  const show = (subject) => get(`/v1/schemas/${encodeURIComponent(subject)}`).then((schema) => setShown({ subject, schema })).catch(setFailed);
  const subjects = (data?.subjects ?? []).map((each) => (typeof each === "string" ? { subject: each } : each));
  return html`<div class="head"><h1>Schemas</h1></div><${Failure} error=${error ?? failed} />
    <div class="panel"><${Table} caption="Subjects" rows=${subjects} empty="No schema is registered." columns=${[["Subject", (row) => html`<button onClick=${() => show(row.subject)}>${row.subject}</button>`]]} /></div>
    ${shown && html`<div class="panel"><h2>${shown.subject}, version ${shown.schema.version}</h2><p><${Badge}>${shown.schema.schema_type}<//> ${shown.schema.compatibility_mode}</p><pre class="payload">${layout(shown.schema.schema_definition)}</pre></div>`}`;
}

function layout(text) {
  try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; }
}

// A sentence for each state of a link that needs one.
const WHY = {
  paused: "The policy is paused; sava replication resume continues.", waiting_runner: "No runner is connected that could copy; sava pipelines run starts one.",
  waiting_remote_topic: "The topic does not exist at the remote, and replication may not create it.", partition_mismatch: "The remote topic has other partitions.",
  remote_deleted: "The remote topic was deleted; sava replication recreate makes it again.", denied: "The remote refuses the token.", unreachable: "The remote cannot be reached.",
  data_loss: "Messages were deleted here before they were copied.",
};

export function Replication() {
  const remotes = usePoll("/v1/remotes", 10);
  const status = usePoll("/v1/replication", 5);
  const links = (status.data?.topics ?? []).flatMap((topic) => topic.partitions.map((part) => ({ ...part, topic: topic.topic, remote: topic.remote, of: topic.partition_count })));
  return html`<div class="head"><h1>Replication</h1></div><${Failure} error=${remotes.error} />
    <div class="panel"><h2>Remote clusters</h2><${Table} caption="Remote clusters" rows=${remotes.data?.remotes} empty="No remote cluster is known; sava remotes add names one." columns=${[["Name", (row) => row.name], ["Addresses", (row) => row.service]]} /></div>
    <div class="panel"><h2>Links</h2><${Table} caption="Links" rows=${links} empty="No topic is replicated." columns=${[["Topic", (row) => (row.of ? `${row.topic}-part-${row.partition}` : row.topic)], ["Remote", (row) => row.remote], ["State", (row) => html`<${Badge} kind=${state(row.state)}>${row.state}<//>`], ["Lag", (row) => number(row.end - row.position), "num"], ["Why", (row) => WHY[row.state] ?? row.reason]]} /></div>`;
}

export function Pipelines() {
  const { data, error, reload } = usePoll("/v1/pipelines", 5);
  const runners = usePoll("/v1/pipelines/runners", 10);
  return html`<div class="head"><h1>Pipelines</h1></div><${Failure} error=${error} />
    <div class="panel"><${Table} caption="Pipelines" rows=${data?.pipelines} empty="No pipeline yet; sava pipelines create makes one." columns=${[["Name", (row) => row.spec.name], ["Kind", (row) => row.spec.kind], ["State", (row) => html`<${Badge} kind=${state(row.status?.state)}>${row.status?.state}<//>`], ["Lag", (row) => (row.status && row.status.lag_messages >= 0 ? number(row.status.lag_messages) : "–"), "num"], ["Rows/s", (row) => number(Math.round(row.status?.rate ?? 0)), "num"], ["Runner", (row) => row.holder || "none"], ["Last error", (row) => row.status?.last_error],
      ["", (row) => html`<${Action} run=${() => post(`/v1/pipelines/${encodeURIComponent(row.spec.name)}/${row.is_paused ? "resume" : "pause"}`)} done=${reload}>${row.is_paused ? "Resume" : "Pause"}<//>`]]} /></div>
    <div class="panel"><h2>Runners</h2><${Table} caption="Runners" rows=${runners.data?.runners} empty="No runner is connected; sava pipelines run starts one." columns=${[["Runner", (row) => row.runner], ["Kinds", (row) => row.kinds.join(", ")], ["Pipelines", (row) => number(row.claims), "num"], ["Since", (row) => html`<${Time} ms=${row.since_ms} />`]]} /></div>`;
}
