// The shell of the console: login, navigation, and which page an address shows.

import { html, render, useEffect, useState } from "./vendor/htm-preact.js";
import { ApiError, get, session } from "./api.js";
import { Badge, Failure } from "./parts.js";
import { Overview } from "./overview.js";
import { Topics } from "./topics.js";
import { Topic } from "./topic.js";
import { Brokers, Metadata } from "./cluster.js";
import { Pipelines, Replication, Schemas } from "./flow.js";
import { Security } from "./security.js";

const PAGES = [
  ["", "Overview", Overview],
  ["topics", "Topics", Topics],
  ["schemas", "Schemas", Schemas],
  ["replication", "Replication", Replication],
  ["pipelines", "Pipelines", Pipelines],
  ["brokers", "Brokers", Brokers],
  ["metadata", "Metadata", Metadata],
  ["security", "Security", Security],
];

function theme(next) {
  const wanted = next ?? localStorage.getItem("sava.theme") ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  document.documentElement.dataset.theme = wanted;
  if (next) localStorage.setItem("sava.theme", next);
  return wanted;
}

function useAddress() {
  const read = () => decodeURIComponent(location.hash.replace(/^#\/?/, "")).split("/");
  const [address, set] = useState(read);
  useEffect(() => {
    const changed = () => { set(read()); window.scrollTo(0, 0); };
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return address;
}

function Login({ reason, done }) {
  const [error, setError] = useState(reason);
  const submit = async (event) => {
    event.preventDefault();
    session.token = new FormData(event.target).get("token").trim();
    try { await get("/v1/auth/whoami"); done(); } catch (failed) { session.token = ""; setError(failed); }
  };
  return html`<main class="login"><div class="panel"><h1>Log in to Sava</h1>
    <p class="note">Paste a token, for example from <code>sava auth token create</code>. It stays in this tab.</p>
    <${Failure} error=${error} />
    <form onSubmit=${submit}><label>Token<textarea name="token" required autocomplete="off" spellcheck=${false}></textarea></label>
    <p><button class="primary">Log in</button></p></form></div></main>`;
}

function App() {
  const address = useAddress();
  const [look, setLook] = useState(theme);
  const [who, setWho] = useState(null);
  const [refused, setRefused] = useState(null);
  const [cluster, setCluster] = useState(null);
  session.onRefused = (error) => setRefused(error);
  const enter = () => {
    setRefused(null);
    get("/v1/auth/whoami").then((caller) => {
      setWho(caller);
      // A caller without a name and without rights: there is nothing to show without a token.
      if (caller.is_enforced && caller.credential === "none" && !caller.bindings.length) setRefused(new ApiError(401, { message: "" }));
      else get("/v1/cluster").then(setCluster).catch(() => {});
    }).catch(() => {});
  };
  useEffect(enter, []);
  if (refused) return html`<${Login} reason=${refused.message ? refused : null} done=${enter} />`;
  const [section, ...rest] = address;
  const page = PAGES.find(([id]) => id === section) ?? PAGES[0];
  const Shown = section === "topics" && rest.length >= 2 ? Topic : page[2];
  const title = `${rest.length >= 2 ? `/${rest[0]}/${rest[1]}` : page[1]} · Sava`;
  useEffect(() => { document.title = title; }, [title]);
  return html`<div class="shell">
    <header class="side"><a class="brand" href="#/"><img src="/console/icon.svg" alt="" /><span>Sava</span></a>
      <nav aria-label="Pages">${PAGES.map(([id, name]) => html`<a href=${`#/${id}`} aria-current=${id === page[0] ? "page" : null}>${name}</a>`)}</nav>
      <div class="foot"><div>${cluster?.cluster_name} ${cluster && html`<${Badge}>${cluster.version}<//>`}</div>
        ${who?.is_enforced && html`<div>${who.principal}</div>`}
        <div class="row"><button onClick=${() => setLook(theme(look === "dark" ? "light" : "dark"))}>${look === "dark" ? "Light" : "Dark"}</button>
        ${session.token && html`<button onClick=${() => { session.token = ""; location.reload(); }}>Log out</button>`}</div></div></header>
    <main id="main"><${Shown} parts=${rest} who=${who} key=${location.hash.split("/").slice(0, 4).join("/")} /></main></div>`;
}

theme();
render(html`<${App} />`, document.getElementById("app"));
