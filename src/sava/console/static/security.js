// The caller, roles, bindings and revocations.

import { html, useState } from "./vendor/htm-preact.js";
import { post, remove } from "./api.js";
import { Action, Badge, Failure, Table, Time, usePoll } from "./parts.js";

export function Security({ who }) {
  const roles = usePoll("/v1/auth/roles", 15);
  const bindings = usePoll("/v1/auth/bindings", 10);
  const revoked = usePoll("/v1/auth/revocations", 15);
  return html`<div class="head"><h1>Security</h1></div>
    ${who && html`<div class="panel"><h2>You</h2>${who.is_enforced ? html`<dl><dt>Principal</dt><dd>${who.principal} ${who.is_super_admin && html`<${Badge} kind="good">super administrator<//>`}</dd><dt>By</dt><dd>${who.credential}</dd><dt>Until</dt><dd><${Time} ms=${Number(who.expires_ms)} /></dd></dl>` : html`<p>This cluster lets every caller do everything. See docs/security.md.</p>`}</div>`}
    <div class="panel"><h2>Bindings</h2><${Failure} error=${bindings.error} /><${Table} caption="Bindings" rows=${bindings.data?.bindings} empty="No binding." columns=${[["Principal", (row) => row.principal], ["Role", (row) => row.role], ["Scope", (row) => row.scope], ["Resource", (row) => row.resource || "–"], ["By", (row) => row.created_by],
      ["", (row) => html`<${Action} kind="danger" ask=${`${row.principal} is no ${row.role} there any more, within a second.`} run=${() => remove(`/v1/auth/bindings/${encodeURIComponent(row.id)}`)} done=${bindings.reload}>Delete<//>`]]} /><${Bind} roles=${roles.data?.roles} done=${bindings.reload} /></div>
    <div class="panel"><h2>Roles</h2><${Failure} error=${roles.error} /><${Table} caption="Roles" rows=${roles.data?.roles} columns=${[["Role", (row) => html`${row.name} ${row.built_in && html`<${Badge}>built in<//>`}`], ["Permissions", (row) => row.permissions.join(", ")]]} /></div>
    <div class="panel"><h2>Revoked</h2><${Failure} error=${revoked.error} /><${Table} caption="Revocations" rows=${revoked.data?.revocations} empty="Nothing is revoked." columns=${[["Kind", (row) => row.kind], ["Id", (row) => html`<code>${row.id}</code>`], ["Reason", (row) => row.reason], ["By", (row) => row.created_by]]} /></div>`;
}

function Bind({ roles, done }) {
  const [error, setError] = useState(null);
  const submit = async (event) => {
    event.preventDefault();
    try { await post("/v1/auth/bindings", Object.fromEntries(new FormData(event.target))); setError(null); event.target.reset(); done(); } catch (failed) { setError(failed); }
  };
  return html`<form class="row" onSubmit=${submit}><label>Principal<input name="principal" required placeholder="user:alice" /></label><label>Role<select name="role">${(roles ?? []).map((role) => html`<option>${role.name}</option>`)}</select></label>
    <label>Scope<select name="scope"><option>topic</option><option>namespace</option><option>cluster</option></select></label><label>Resource<input name="resource" placeholder="/default/orders-*" /></label><button class="primary">Bind</button></form><${Failure} error=${error} />`;
}
