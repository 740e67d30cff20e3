// Whether all is well: brokers, the Raft group, throughput.

import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { Badge, Failure, Figure, Plot, Table, ago, number, short, state, usePoll } from "./parts.js";

const KEPT = 720;

// Rates from counters that are polled: the last hour of what this tab has seen.
export function useRates(sample) {
  const history = useRef({ times: [], rows: [], last: null });
  const [shown, set] = useState({ times: [], columns: [] });
  useEffect(() => {
    if (!sample) return;
    const kept = history.current;
    const now = Date.now() / 1000;
    if (kept.last && now - kept.last.now >= 1) {
      kept.times.push(now);
      kept.rows.push(sample.map((value, index) => Math.max(0, (value - kept.last.sample[index]) / (now - kept.last.now))));
      if (kept.times.length > KEPT) { kept.times.shift(); kept.rows.shift(); }
      set({ times: [...kept.times], columns: sample.map((_, index) => kept.rows.map((row) => row[index])) });
    }
    kept.last = { now, sample };
  }, [sample]);
  return shown;
}

function alerts(cluster, brokers) {
  const found = [];
  if (cluster && !Number(cluster.leader_id)) found.push(["bad", "No broker leads the cluster.", "A majority of the voters must be up: see sava cluster status."]);
  if (cluster?.unconfirmed) found.push(["bad", cluster.unconfirmed, "What is shown may be old."]);
  if (cluster?.membership_state === "joint") found.push(["warn", "The voters are changing.", "This ends by itself within seconds."]);
  for (const broker of brokers ?? []) {
    if (broker.status === "active") continue;
    const remedy = { unreachable: "Start it again, or remove it with sava cluster remove-node.", drained: "sava brokers activate gives it topics again.", draining: "Its topics are on their way to other brokers.", gone: "It is no member any more and still has topics: sava topics list names them." }[broker.status];
    found.push([state(broker.status), `Broker ${broker.client_addr || broker.broker_id} is ${broker.status}.`, remedy ?? broker.mode_reason]);
  }
  return found;
}

export function Overview() {
  const cluster = usePoll("/v1/cluster?confirm=true", 5);
  const brokers = usePoll("/v1/brokers", 5);
  const history = usePoll("/v1/history", 5);
  const topics = usePoll("/v1/topics?limit=1", 15);
  const list = brokers.data?.brokers;
  const found = alerts(cluster.data, list);
  const served = list?.reduce((sum, broker) => sum + broker.topics, 0);
  const leader = list?.find((broker) => broker.is_leader);
  return html`<div class="head"><h1>Overview</h1>${cluster.data && html`<${Badge} kind=${found.some(([kind]) => kind === "bad") ? "bad" : found.length ? "warn" : "good"}>${found.length ? `${found.length} to look at` : "All is well"}<//>`}</div>
    <${Failure} error=${cluster.error ?? brokers.error} />
    ${found.length > 0 && html`<div class="panel"><h2>To look at</h2><${Table} caption="Findings" columns=${[["", (row) => html`<${Badge} kind=${row[0]}>${row[0] === "bad" ? "act" : "watch"}<//>`], ["What", (row) => row[1]], ["What to do", (row) => row[2]]]} rows=${found} /></div>`}
    <div class="grid"><${Figure} label="Brokers" value=${list && `${list.filter((broker) => broker.status === "active").length} of ${list.length}`} note="active" />
      <${Figure} label="Topics" value=${number(topics.data?.total)} note=${`${number(served)} partitions served`} />
      <${Figure} label="Leader" value=${leader ? leader.client_addr : "–"} note=${cluster.data && `term ${cluster.data.current_term}`} />
      <${Figure} label="Metadata" value=${number(cluster.data?.keys)} note=${cluster.data && `keys at revision ${number(cluster.data.revision)}`} /></div>
    <${History} data=${history.data} what="of all brokers" />
    <div class="panel"><h2>Brokers</h2><${Table} caption="Brokers" columns=${[
      ["Broker", (row) => html`<a href="#/brokers">${row.client_addr || row.broker_id}</a> ${row.is_leader && html`<${Badge}>leader<//>`}`],
      ["Status", (row) => html`<${Badge} kind=${state(row.status)}>${row.status}<//>`],
      ["Partitions", (row) => number(row.topics), "num"], ["Version", (row) => row.version], ["Up for", (row) => ago(row.started_ms)]]} rows=${list} /></div>`;
}

// What brokers have kept of the last hour.
export function History({ data, what }) {
  if (!data?.times?.length) return null;
  return html`<div class="grid two"><${Plot} title=${`Messages a second ${what}`} times=${data.times} series=${[["published", data.messages_in], ["delivered", data.messages_out]]} format=${short} />
    <${Plot} title=${`Messages not acked ${what}`} times=${data.times} series=${[["backlog", data.backlog]]} format=${short} /></div>`;
}
