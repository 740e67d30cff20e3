// One topic: where its messages are, who reads them, and the messages themselves.

import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { download, follow, get, lines, patch, post, remove } from "./api.js";
import { Action, Badge, Clock, Failure, Figure, Table, Tabs, Time, bytes, number, state, useBrokerNames, usePoll } from "./parts.js";
import { History } from "./overview.js";

const TABS = [["overview", "Overview"], ["messages", "Messages"], ["subscriptions", "Subscriptions"], ["settings", "Settings"]];

export function Topic({ parts }) {
  const [namespace, name, tab = "overview"] = parts;
  const path = `/v1/topics/${encodeURIComponent(namespace)}/${encodeURIComponent(name)}`;
  const { data, error, reload } = usePoll(path, 3);
  const Shown = { overview: About, messages: Messages, subscriptions: Subscriptions, settings: Settings }[tab] ?? About;
  return html`<div class="head"><h1>/${namespace}/${name}</h1>${data && html`<${Badge} kind=${state(data.state)}>${data.state}<//><${Badge}>${data.delivery}<//>`}<span class="gap"></span>
      <${Unload} path=${path} done=${reload} /></div>
    <${Failure} error=${error} />
    <${Tabs} base=${`#/topics/${namespace}/${name}`} tabs=${TABS} chosen=${tab} />
    ${data && html`<${Shown} path=${path} topic=${data} reload=${reload} />`}`;
}

function Unload({ path, done }) {
  const [moves, setMoves] = useState([]);
  const run = async () => { setMoves([]); await lines(`${path}/unload`, {}, (move) => setMoves((all) => [...all, move])); };
  return html`${moves.map((move) => html`<${Badge} kind=${move.error ? "bad" : "good"}>${move.error || `moved within ${move.downtime_ms} ms`}<//>`)}
    <${Action} run=${run} done=${done} ask="The topic moves to the broker that suits best. Producers and consumers go with it.">Unload<//>`;
}

// -- overview ------------------------------------------------------------------

function About({ path, topic }) {
  const names = useBrokerNames();
  const history = usePoll(`/v1/history?topic=${encodeURIComponent(topic.name)}`, 5);
  if (topic.partitions.length) return html`<${History} data=${history.data} what="of all partitions" /><${Parts} topic=${topic} names=${names} />`;
  const count = topic.next_offset === null ? null : topic.next_offset - topic.start_offset;
  return html`<div class="grid"><${Figure} label="Messages" value=${number(count)} note=${count !== null && `offsets ${number(topic.start_offset)} to ${number(topic.next_offset)}`} />
      <${Figure} label="Subscriptions" value=${number(topic.subscriptions.length)} /><${Figure} label="Producers" value=${number(topic.producers.length)} />
      <${Figure} label="Epoch" value=${number(topic.epoch)} note=${html`owner ${names(topic.broker_id)}`} /></div>
    ${topic.reason && html`<div class="error">${topic.reason}</div>`}
    <${History} data=${history.data} what="" />
    ${topic.next_offset !== null && html`<${Tiers} path=${path} topic=${topic} />`}
    <div class="panel"><h2>Producers</h2><${Table} caption="Producers" columns=${[["Name", (row) => row]]} rows=${topic.producers} empty="No producer is open." /></div>`;
}

// A strip of offsets: what is in segments, and what is in the journal alone.
function Tiers({ path, topic }) {
  const { data } = usePoll(`${path}/segments`, 10);
  const total = Math.max(1, topic.next_offset - topic.start_offset);
  const journal = topic.next_offset - topic.stored_offset;
  return html`<div class="panel"><h2>Where the messages are</h2>
    <div class="strip" role="img" aria-label=${`${number(total - journal)} messages in segments, ${number(journal)} in the journal alone`}>
      ${data?.segments.map((segment) => html`<div class="segments" style=${{ flexGrow: segment.end_offset - segment.start_offset }} title=${`${number(segment.start_offset)} to ${number(segment.end_offset)}, ${bytes(Number(segment.size))}`}></div>`)}
      ${journal > 0 && html`<div class="journal" style=${{ flexGrow: journal }} title=${`journal: ${number(topic.stored_offset)} to ${number(topic.next_offset)}`}></div>`}</div>
    <div class="legend"><span><i class="segments"></i>${number(data?.segments.length)} segments at ${data?.store_url}</span><span><i class="journal"></i>journal and its mirrors, ${number(journal)} messages</span></div></div>`;
}

function Parts({ topic, names }) {
  const [found, set] = useState({});
  useEffect(() => {
    let gone = false;
    Promise.allSettled(topic.partitions.slice(0, 100).map((name) => get(`/v1/topics${name}`))).then((all) => {
      if (!gone) set(Object.fromEntries(all.filter((each) => each.value).map((each) => [each.value.name, each.value])));
    });
    return () => { gone = true; };
  }, [topic]);
  const of = (name, field) => number(found[name]?.[field]);
  return html`<div class="panel"><h2>Partitions</h2><${Table} caption="Partitions" rows=${topic.partitions} columns=${[
    ["Partition", (name) => html`<a href=${`#/topics${name}`}>${name}</a>`], ["State", (name) => html`<${Badge} kind=${state(found[name]?.state)}>${found[name]?.state ?? "–"}<//>`],
    ["Messages", (name) => number(found[name] ? found[name].next_offset - found[name].start_offset : null), "num"], ["Next offset", (name) => of(name, "next_offset"), "num"],
    ["Owner", (name) => names(found[name]?.broker_id)], ["Epoch", (name) => of(name, "epoch"), "num"]]} /></div>`;
}

// -- messages ------------------------------------------------------------------

function Messages({ path, topic }) {
  const [query, setQuery] = useState({ start: "latest", limit: "50" });
  const [page, setPage] = useState(null);
  const [error, setError] = useState(null);
  const [live, setLive] = useState(false);
  const parameters = (more = {}) => new URLSearchParams(Object.entries({ ...query, ...more }).filter(([, value]) => value !== "" && value !== undefined));
  const load = async (more = {}) => {
    setError(null);
    try { setPage(await get(`${path}/messages?${parameters({ max_payload: 16384, ...more })}`)); } catch (failed) { setError(failed); }
  };
  useEffect(() => { load(); }, []);
  useEffect(() => {
    if (!live) return undefined;
    const control = new AbortController();
    setPage({ messages: [] });
    follow(`${path}/messages/follow?${parameters({ start: "latest", limit: "", max_payload: 16384 })}`, (message) => setPage((now) => ({ messages: [message, ...now.messages].slice(0, 500) })), control.signal)
      .catch((failed) => { if (failed.name !== "AbortError") { setError(failed); setLive(false); } });
    return () => control.abort();
  }, [live]);
  const field = (name, label, rest = {}) => html`<label>${label}<input name=${name} value=${query[name] ?? ""} onInput=${(event) => setQuery({ ...query, [name]: event.target.value })} ...${rest} /></label>`;
  const next = page?.next && Object.values(page.next);
  const more = next?.length === 1 && Object.values(page.end)[0] > next[0];
  return html`<form class="row" onSubmit=${(event) => { event.preventDefault(); setLive(false); load(); }}>
      ${field("start", "From (offset, time, -5m, earliest, latest)", { size: 22 })}${field("limit", "How many", { type: "number", min: 1, max: 10000 })}
      ${field("key", "Key")}${field("attribute", "Attribute (name=value)")}${field("contains", "Contains")}
      <button class="primary">Read</button><button type="button" aria-pressed=${live} onClick=${() => setLive(!live)}>${live ? "Stop" : "Live"}</button></form>
    <div class="row"><button onClick=${() => download(`${path}/messages?${parameters({ max_payload: 64 << 20 })}`, "application/x-ndjson", "messages.jsonl").catch(setError)}>JSON lines</button>
      <button onClick=${() => download(`${path}/messages?${parameters()}`, "application/vnd.apache.parquet", "messages.parquet").catch(setError)}>Parquet</button>
      ${more && html`<button onClick=${() => load({ start: next[0] })}>Next page</button>`}
      <span class="note">${page?.scanned !== undefined && `${number(page.messages.length)} of ${number(page.scanned)} looked at`}</span></div>
    <${Failure} error=${error} />
    <div class="panel">${page?.messages.length ? page.messages.map((message) => html`<${Shown} message=${message} key=${`${message.topic}${message.offset}`} />`) : html`<div class="empty">${live ? "Waiting for messages…" : page ? "No message matches." : "Loading…"}</div>`}</div>
    <${Publish} path=${path} done=${() => !live && load()} schema=${topic.schema_subject} />`;
}

function Shown({ message }) {
  const [how, setHow] = useState(message.value !== undefined ? "value" : "payload");
  const text = message.payload ?? message.payload_base64;
  const bodies = { value: () => JSON.stringify(message.value, null, 2), payload: () => pretty(text), hex: () => hex(message) };
  return html`<details class="message"><summary><span class="mono">${message.offset}</span><span class="wide"><${Clock} iso=${message.publish_time} /></span><span class="mono cut wide">${message.key ?? ""}</span><span class="mono cut">${text}</span></summary>
    <div class="inside"><div class="row">${[...(message.value !== undefined ? ["value"] : []), "payload", "hex"].map((each) => html`<button aria-pressed=${how === each} class=${how === each ? "primary" : ""} onClick=${() => setHow(each)}>${each}</button>`)}
      <span class="note">${bytes(message.size)}${message.is_cut ? ", cut" : ""} · ${message.topic} · ${message.publish_time}</span></div>
      ${message.value_error && html`<div class="error">${message.value_error}</div>`}<pre class="payload">${bodies[how]()}</pre>
      <dl><dt>Key</dt><dd class="mono">${message.key ?? "–"}</dd><dt>Producer</dt><dd>${message.producer ?? "–"}</dd><dt>Schema</dt><dd>${message.schema_id === null ? "–" : `${message.schema_id}, version ${message.schema_version}`}</dd>
        <dt>Origin</dt><dd>${message.origin ? `${message.origin.cluster}, offset ${message.origin.offset}` : "this cluster"}</dd>
        ${Object.entries(message.attributes).map(([name, value]) => html`<dt class="mono">${name}</dt><dd class="mono">${value}</dd>`)}</dl></div></details>`;
}

function pretty(text) {
  try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; }
}

function hex(message) {
  const data = message.payload === undefined ? Uint8Array.from(atob(message.payload_base64), (each) => each.charCodeAt(0)) : new TextEncoder().encode(message.payload);
  const rows = [];
  for (let at = 0; at < Math.min(data.length, 4096); at += 16) {
    const row = [...data.slice(at, at + 16)];
    rows.push(`${at.toString(16).padStart(8, "0")}  ${row.map((each) => each.toString(16).padStart(2, "0")).join(" ").padEnd(47)}  ${row.map((each) => (each > 31 && each < 127 ? String.fromCharCode(each) : ".")).join("")}`);
  }
  return rows.join("\n");
}

function Publish({ path, done, schema }) {
  const [result, setResult] = useState(null);
  const submit = async (event) => {
    event.preventDefault();
    const form = new FormData(event.target);
    const attributes = Object.fromEntries((form.get("attributes") || "").split(",").map((each) => each.trim().split("=")).filter(([name, value]) => name && value !== undefined));
    try {
      const { stored } = await post(`${path}/messages`, { payload: form.get("payload"), key: form.get("key") || null, attributes });
      setResult({ done: `Stored at offset ${stored[0].offset} of ${stored[0].topic}.` });
      done();
    } catch (failed) { setResult({ error: failed }); }
  };
  return html`<details class="panel"><summary>Publish a message</summary><form onSubmit=${submit}><p><label>Payload<textarea name="payload" required></textarea></label></p>
    <div class="row"><label>Key<input name="key" /></label><label>Attributes (name=value, …)<input name="attributes" /></label><button class="primary">Publish</button></div></form>
    ${schema && html`<p class="note">Messages of this topic follow the schema ${schema}.</p>`}
    ${result?.done && html`<div class="done" role="status">${result.done}</div>`}<${Failure} error=${result?.error} /></details>`;
}

// -- subscriptions ----------------------------------------------------------------

function Subscriptions({ path, topic, reload }) {
  const [chosen, choose] = useState(null);
  const columns = [
    ["Subscription", (row) => html`<button onClick=${() => choose(row.subscription)}>${row.subscription}</button>`], ["Type", (row) => row.type],
    ["Lag", (row) => number(row.backlog), "num"], ["In flight", (row) => number(row.in_flight), "num"], ["Redelivered", (row) => number(row.redelivered), "num"],
    ["Dead letters", (row) => number(row.dead_lettered), "num"], ["Consumers", (row) => number(row.consumers.length), "num"],
    ["", (row) => row.blocked && html`<${Badge} kind="bad">blocked<//>`],
  ];
  const shown = topic.subscriptions.find((each) => each.subscription === chosen);
  return html`<div class="panel"><${Table} caption="Subscriptions" columns=${columns} rows=${topic.subscriptions} empty="No subscription yet." /></div>
    ${shown && html`<${Subscription} path=${path} row=${shown} reload=${reload} key=${chosen} />`}`;
}

function slow(row) {
  if (row.blocked) return `A message failed too often, and the dead-letter policy is to wait: ${row.error}`;
  if (!row.backlog) return "It has acknowledged everything.";
  if (!row.consumers.length) return "No consumer is connected.";
  if (row.unacked >= row.max_unacked_messages) return "Its consumers hold as many unacked messages as it may have: they process slower than messages come, or do not ack.";
  if (row.redelivered > row.acked / 10) return "More than one message in ten is delivered again: look at nacks and ack timeouts.";
  return "Nothing stops it: its consumers are behind.";
}

function Subscription({ path, row, reload }) {
  const base = `${path}/subscriptions/${encodeURIComponent(row.subscription)}`;
  const [to, setTo] = useState("");
  const [error, setError] = useState(null);
  const target = () => (to === "earliest" || to === "latest" ? { [to]: true } : /^\d+$/.test(to) ? { offset: Number(to) } : { publish_time: new Date(to).getTime() * 1000 });
  const replay = row.cursor !== null && /^\d+$/.test(to) ? row.cursor - Number(to) : null;
  return html`<div class="panel"><h2>${row.subscription}</h2><p>${slow(row)}</p><${Failure} error=${error} />
    <dl><dt>Cursor</dt><dd>${number(row.cursor)}</dd><dt>Lag</dt><dd>${number(row.backlog)} messages</dd><dt>Unacked</dt><dd>${number(row.unacked)} of at most ${number(row.max_unacked_messages)}</dd>
      <dt>Delivered, acked</dt><dd>${number(row.delivered)}, ${number(row.acked)}</dd><dt>Nacked, timed out</dt><dd>${number(row.nacked)}, ${number(row.timed_out)}</dd>
      <dt>Dead letters</dt><dd>${number(row.dead_lettered)} ${row.failure_policy?.dead_letter_topic && html`in <a href=${`#/topics${row.failure_policy.dead_letter_topic}`}>${row.failure_policy.dead_letter_topic}</a>`}</dd>
      <dt>Consumers</dt><dd>${row.consumers.join(", ") || "none"}</dd></dl>
    <div class="row"><label>Seek to (offset, time, earliest, latest)<input value=${to} onInput=${(event) => setTo(event.target.value)} /></label>
      <${Action} ask=${replay > 0 ? `${number(replay)} messages are delivered again.` : replay < 0 ? `${number(-replay)} messages are skipped.` : "The subscription continues from there."} run=${() => post(`${base}/seek`, { position: target() })} done=${reload}>Seek<//>
      <${Action} kind="danger" ask="Its position is lost. Consumers of it end." run=${() => remove(base)} done=${reload}>Delete<//></div></div>`;
}

// -- settings ------------------------------------------------------------------------

function Settings({ path, topic, reload }) {
  const form = useRef(null);
  const [error, setError] = useState(null);
  const own = topic.policy ?? {};
  const effective = topic.effective_policy ?? {};
  const save = async (event) => {
    event.preventDefault();
    const policy = {}, clear = [];
    for (const [name, value] of new FormData(form.current)) {
      if (value === "" && own[name] !== null) clear.push(name);
      else if (value !== "" && Number(value) !== own[name]) policy[name] = Number(value);
    }
    try { await patch(`${path}/policy`, { policy, clear }); setError(null); reload(); } catch (failed) { setError(failed); }
  };
  return html`<form class="panel" ref=${form} onSubmit=${save}><h2>Limits and retention</h2><p class="note">Empty: as the namespace says. 0: no limit.</p><${Failure} error=${error} />
      <div class="grid">${Object.keys(effective).map((name) => html`<label>${name.replaceAll("_", " ")}<input name=${name} type="number" min="0" value=${own[name] ?? ""} placeholder=${effective[name] ?? 0} /></label>`)}</div><button class="primary">Save</button></form>
    <div class="panel"><h2>More</h2><dl><dt>Created</dt><dd><${Time} ms=${topic.created_ms} /></dd><dt>Topic id</dt><dd>${topic.topic_id}</dd><dt>Schema</dt><dd>${topic.schema_subject || "none"}, ${topic.validation_policy}</dd></dl>
      <div class="row"><${Action} ask="More partitions; never fewer. Keys move to other partitions." run=${() => post(`${path}/partitions`, { partitions: (topic.partitions.length || 0) + 1 })} done=${reload}>Add a partition<//>
      <${Action} kind="danger" ask=${`All messages of ${topic.name} and its subscriptions are deleted. This cannot be taken back.`} run=${() => remove(path)} done=${() => { location.hash = "#/topics"; }}>Delete the topic<//></div></div>`;
}
