/** Calls of tools in an answer, and where their results come from: an MCP server that a person allows, or the person. */

import { useEffect, useState } from "preact/hooks";
import { allowed, made, toolOf } from "../model/calls.js";
import { options } from "../model/settings.js";
import { t } from "../strings.js";

/** `asks`: the results are wanted here and now. */
export function Calls({ chat, message, asks }) {
  return (
    <>
      {message.calls.map((call, i) => <Call key={i} call={call} />)}
      {asks && <ResultForm chat={chat} message={message} />}
    </>
  );
}

function Call({ call: { name, arguments: args } }) {
  return (
    <section class="card call" aria-label={t.callOf(name)}>
      <h2>{t.callsTool} <code>{name}</code></h2>
      <pre tabIndex={0}>{pretty(args)}</pre>
    </section>
  );
}

/** Results come from servers that are allowed to be asked, or a person writes them. */
function ResultForm({ chat, message }) {
  const { calls } = message;
  const [results, setResults] = useState(() => calls.map(() => ({ text: "" })));
  const put = (i, result) => setResults((all) => all.map((each, k) => (k === i ? result : each)));
  const send = () => {
    chat.open();
    chat.tell(calls.map(({ id, name }, i) => ({ ...(id && { id }), name, text: results[i].text })), message, { options: options(chat) });
  };
  const ask = async (i) => {
    chat.asked(message);
    put(i, { text: "", running: true });
    put(i, { ...await made(chat, calls[i]), asked: true });
  };
  useEffect(() => { if (allowed(chat, message)) calls.forEach((_, i) => ask(i)); }, []);
  const complete = results.every(({ asked, failed }) => asked && !failed);
  useEffect(() => { if (complete) send(); }, [complete]);
  return (
    <form class="card results" onSubmit={(event) => { event.preventDefault(); send(); }}>
      {calls.map((call, i) => <Result key={i} chat={chat} call={call} result={results[i]} ask={() => ask(i)} write={(text) => put(i, { text })} />)}
      <div class="buttons"><button type="submit" class={calls.some((call) => toolOf(chat, call)) ? "" : "primary"} disabled={results.some(({ running }) => running)}>{t.sendResults}</button></div>
    </form>
  );
}

function Result({ chat, call, result: { text, running, failed }, ask, write }) {
  const tool = toolOf(chat, call);
  const always = () => { chat.allow(call.name); ask(); };
  return (
    <>
      {tool && (
        <div class="buttons allow">
          <span class="soft" role="status">{running ? t.asksServer(tool.server) : t.toolOfServer(tool.server)}</span>
          <button type="button" disabled={running} onClick={always}>{t.allowInChat}</button>
          <button type="button" class="primary" disabled={running} onClick={ask}>{t.allowOnce}</button>
        </div>
      )}
      {failed && <p class="failed" role="alert">{t.noAnswer(failed)}</p>}
      <label>{t.resultOf} <code>{call.name}</code><textarea rows={2} value={text} disabled={running} onInput={(event) => write(event.target.value)} /></label>
    </>
  );
}

export function ToolMessage({ message }) {
  return (
    <article class="message" aria-label={t.toolResults}>
      {message.results.map(({ name, text }, i) => (
        <section class="card result" key={i} aria-label={t.resultIs(name)}><h2>{t.resultOf} <code>{name}</code></h2><pre tabIndex={0}>{pretty(text)}</pre></section>
      ))}
    </article>
  );
}

function pretty(text) {
  try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; }
}
