// Brokers, the Raft group, ledgers, and the metadata store.

import { html, useState } from "./vendor/htm-preact.js";
import { get, lines, post } from "./api.js";
import { Action, Badge, Failure, Figure, Table, ago, bytes, number, state, useBrokerNames, usePoll } from "./parts.js";

export function Brokers() {
  const brokers = usePoll("/v1/brokers", 5);
  const cluster = usePoll("/v1/cluster", 5);
  const balance = usePoll("/v1/brokers/balance", 15);
  const ledgers = usePoll("/v1/ledgers", 10);
  const names = useBrokerNames();
  const [progress, setProgress] = useState("");
  const drain = (row) => lines(`/v1/brokers/${row.broker_id}/drain`, {}, (step) => setProgress(`Draining ${row.client_addr}: ${step.succeeded} of ${step.total} moved${step.failed ? `, ${step.failed} failed` : ""}.`));
  const about = cluster.data;
  return html`<div class="head"><h1>Brokers</h1><span class="gap"></span><${Action} ask="The leader moves topics from loaded brokers to others, in one round." run=${() => post("/v1/brokers/rebalance")} done=${brokers.reload}>Rebalance<//></div>
    <${Failure} error=${brokers.error ?? cluster.error} />${progress && html`<div class="done" role="status">${progress}</div>`}
    <div class="panel"><${Table} caption="Brokers" rows=${brokers.data?.brokers} columns=${[
      ["Broker", (row) => html`<span title=${row.broker_id}>${row.client_addr || row.broker_id}</span> ${row.is_leader && html`<${Badge}>leader<//>`}`], ["Status", (row) => html`<${Badge} kind=${state(row.status)}>${row.status}<//>`],
      ["Partitions", (row) => number(row.topics), "num"], ["Admin", (row) => row.admin_addr], ["Version", (row) => row.version], ["Up for", (row) => ago(row.started_ms)],
      ["", (row) => (row.status === "active" ? html`<${Action} ask=${`All topics of ${row.client_addr} move to other brokers.`} run=${() => drain(row)} done=${brokers.reload}>Drain<//>` : html`<${Action} run=${() => post(`/v1/brokers/${row.broker_id}/activate`)} done=${brokers.reload}>Activate<//>`)]]} /></div>
    ${about && html`<div class="panel"><h2>Raft</h2><dl><dt>Leader</dt><dd>${names(about.leader_id)}</dd><dt>Term</dt><dd>${number(about.current_term)}</dd><dt>Applied, committed</dt><dd>${number(about.last_applied)}, ${number(about.commit)}</dd>
      <dt>Log</dt><dd>entries ${number(about.first_index)} to ${number(about.last_index)}, snapshot at ${number(about.snapshot_index)}</dd><dt>State</dt><dd>${number(about.keys)} keys, ${bytes(Number(about.total_bytes))}</dd></dl>
      <${Table} caption="Members" rows=${about.members} columns=${[["Node", (row) => names(row.node_id)], ["Address", (row) => row.raft_addr], ["Role", (row) => html`<${Badge}>${row.role}<//>`], ["Match", (row) => number(row.match), "num"]]} /></div>`}
    <div class="panel"><h2>Ledgers</h2><${Failure} error=${ledgers.error} /><${Table} caption="Ledgers" rows=${ledgers.data?.ledgers} columns=${[
      ["Ledger", (row) => html`${names(row.broker_id)}, incarnation ${row.incarnation}`], ["State", (row) => html`<${Badge} kind=${row.degraded ? "bad" : state(row.state)}>${row.degraded ? "degraded" : row.state}<//>`], ["Status", (row) => row.status], ["Copies", (row) => row.members.length, "num"], ["Acks need", (row) => `${row.ack_quorum} of ${row.write_quorum}`], ["Error", (row) => row.error]]} empty="Ledgers are mirrored from two brokers on." /></div>
    ${balance.data && html`<div class="grid"><${Figure} label="Imbalance" value=${balance.data.coefficient_of_variation.toFixed(2)} note=${`moves begin above ${balance.data.threshold}`} /><${Figure} label="Moves in the last hour" value=${number(balance.data.moves_last_hour)} note=${balance.data.strategy} /></div>`}`;
}

export function Metadata() {
  const [prefix, setPrefix] = useState("/topics/");
  const [found, setFound] = useState(null);
  const [error, setError] = useState(null);
  const read = async (event) => {
    event?.preventDefault();
    setError(null);
    try { setFound(await get(`/v1/meta?${new URLSearchParams({ prefix, limit: 200 })}`)); } catch (failed) { setError(failed); }
  };
  return html`<div class="head"><h1>Metadata</h1></div><form class="row" onSubmit=${read}><label>Keys that begin with<input size="40" value=${prefix} onInput=${(event) => setPrefix(event.target.value)} /></label><button class="primary">Read</button></form>
    <${Failure} error=${error} /><div class="panel"><${Table} caption="Keys" rows=${found?.kvs} empty=${found ? "No key begins so." : "Read-only: 200 keys at a time."} columns=${[
      ["Key", (row) => html`<code>${row.key}</code>`], ["Value", (row) => html`<pre class="payload">${row.value}</pre>`], ["Revision", (row) => number(row.mod_revision), "num"]]} /></div>`;
}
