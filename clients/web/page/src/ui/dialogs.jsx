/** Dialogs: settings, the format of answers, the server's token. */

import { useEffect, useRef, useState } from "preact/hooks";
import { current, login, panels, server } from "../model/app.js";
import { initial } from "../model/form.js";
import { known } from "../model/mcp.js";
import { FIELDS, schemaOf, set, settings, settingsOf, toolsOf, usual } from "../model/settings.js";
import { LANGUAGES, t } from "../strings.js";
import { Field } from "./form.jsx";

const EXAMPLE = JSON.stringify({
  type: "object",
  properties: { title: { type: "string", maxLength: 60 }, stars: { type: "integer", minimum: 1, maximum: 5 } },
  required: ["title", "stars"],
  additionalProperties: false,
}, null, 2);

const SAMPLING = [...FIELDS.map(({ name }) => name), "stop"];

/** A modal dialog that a signal opens. `reading`: it is to be read, from its title on, not filled in. */
export function Dialog({ open, close, title, reading = false, children }) {
  const dialog = useRef(null);
  useEffect(() => {
    const element = dialog.current;
    if (open && !element.open) element.showModal();
    if (!open && element.open) element.close();
  }, [open]);
  return (
    <dialog ref={dialog} aria-label={title} onClose={close} onClick={(event) => { if (event.target === event.currentTarget) close(); }}>
      {open && <div class="dialog"><h2 tabIndex={reading ? -1 : undefined} autofocus={reading}>{title}</h2>{children}</div>}
    </dialog>
  );
}

export function SettingsDialog() {
  const all = settings.value;
  const tools = toolsOf(all.tools);
  const close = () => { panels.settings.value = false; };
  return (
    <Dialog open={panels.settings.value} close={close} title={t.settings}>
      <label>{t.systemPrompt} <small>{t.systemNote}</small>
        <textarea rows={3} dir="auto" value={all.system} placeholder={t.none} onInput={(event) => set({ system: event.target.value })} /></label>
      <Sampling chat={current.value} />
      <label>{t.tools} <small>{t.toolsNote}</small>
        <textarea rows={3} class="mono" spellcheck={false} value={all.tools} placeholder='[{"name": "weather", "description": "...", "parameters": {...}}]' aria-invalid={Boolean(tools.error)} onInput={(event) => set({ tools: event.target.value })} /></label>
      {tools.error && <p class="failed" role="alert">{tools.error}</p>}
      <McpServers />
      <label class="inline"><input type="checkbox" checked={all.ahead} onChange={(event) => set({ ahead: event.target.checked })} />
        <span>{t.ahead} <small>{t.aheadNote}</small></span></label>
      <fieldset class="row"><legend>{t.colours}</legend>
        {["system", "light", "dark"].map((each) => (
          <label key={each} class="inline"><input type="radio" name="theme" checked={all.theme === each} onChange={() => set({ theme: each })} />{{ system: t.asSystem, light: t.light, dark: t.dark }[each]}</label>
        ))}
      </fieldset>
      <fieldset class="row"><legend>{t.language}</legend>
        {["system", ...Object.keys(LANGUAGES)].map((each) => (
          <label key={each} class="inline"><input type="radio" name="language" checked={all.language === each} onChange={() => set({ language: each })} />
            {LANGUAGES[each] ? <span lang={each}>{LANGUAGES[each]}</span> : t.asBrowser}</label>
        ))}
      </fieldset>
      <div class="buttons"><button type="button" class="primary" onClick={close}>{t.done}</button></div>
    </Dialog>
  );
}

/** How words are chosen, in all chats or in one. */
function Sampling({ chat }) {
  chat?.version.value; // read, to be told of changes
  const kept = chat?.watching ? undefined : chat?.record.own;
  const [own, setOwn] = useState(SAMPLING.some((name) => kept?.[name] !== undefined));
  const all = own ? kept ?? {} : settings.value;
  const put = (name, value) => (own ? chat.set({ [name]: value === "" ? undefined : value }) : set({ [name]: value }));
  const held = (name) => (own && settings.value[name]) || (name === "seed" ? t.random : usual(name) ?? 0);
  return (
    <>
      <fieldset>
        <legend>{t.sampling} <small>{t.samplingNote}</small></legend>
        {chat && !chat.watching && (
          <div role="radiogroup" aria-label={t.appliesTo}>
            {[false, true].map((each) => (
              <label key={each} class="inline"><input type="radio" name="own" checked={own === each} onChange={() => setOwn(each)} />{each ? t.thisChat : t.allChats}</label>
            ))}
          </div>
        )}
        <div class="fields">
          {FIELDS.map(({ name, label, hint, ...range }) => (
            <label key={name}>{t[label]}
              <input type="number" {...range} value={all[name] ?? ""} placeholder={held(name)} title={t[hint]}
                onInput={({ target }) => { if (target.validity.valid) put(name, target.value); }} />
              <small>{t[hint]}</small></label>
          ))}
        </div>
      </fieldset>
      <label>{t.stopSequences} <small>{t.stopNote}</small>
        <textarea rows={2} value={all.stop ?? ""} placeholder={own ? settings.value.stop : ""} onInput={(event) => put("stop", event.target.value)} /></label>
    </>
  );
}

/** Which of the server's MCP servers are used. */
function McpServers() {
  const names = server.value?.mcp ?? [];
  const { mcp } = settings.value;
  if (!names.length) return null;
  const about = ({ tools, error } = {}) => (error ? t.noAnswer(error) : tools ? t.countOfTools(tools.length) : t.isAsked);
  return (
    <fieldset><legend>{t.mcpServers} <small>{t.mcpNote}</small></legend>
      {names.map((name) => (
        <label key={name} class="inline"><input type="checkbox" checked={mcp.includes(name)} onChange={({ target }) => set({ mcp: [...mcp.filter((each) => each !== name), ...(target.checked ? [name] : [])] })} />
          {name} {mcp.includes(name) && <small role="status">{about(known.value[name])}</small>}</label>
      ))}
    </fieldset>
  );
}

export function FormatDialog() {
  const chat = current.value;
  if (!chat || chat.watching) return null;
  chat.version.value; // read, to be told of changes
  const { format } = settingsOf(chat);
  const { error, schema } = schemaOf(format);
  const set = (changes) => chat.set(changes);
  const notes = chat.tree.path().findLast((each) => each.notes && sameSchema(each.schema, schema))?.notes;
  const close = () => { panels.format.value = false; };
  return (
    <Dialog open={panels.format.value} close={close} title={t.answerFormat}>
      <p class="soft">{t.formatAbout}</p>
      <label>{t.jsonSchema}
        <textarea rows={12} class="mono" spellcheck={false} value={format} placeholder={EXAMPLE} aria-invalid={Boolean(error)} onInput={(event) => set({ format: event.target.value })} /></label>
      {error && <p class="failed" role="alert">{error}</p>}
      {notes && <div class="soft"><p>{t.notEnforced}</p><ul>{notes.map((note) => <li key={note}>{note}</li>)}</ul></div>}
      {schema && (
        <details class="preview">
          <summary>{t.formPreview}</summary>
          <fieldset class="data" disabled><Field key={format} schema={schema} root={schema} label={t.answer} value={initial(schema, schema)} change={() => {}} /></fieldset>
        </details>
      )}
      <div class="buttons">
        {format.trim() ? <button type="button" onClick={() => set({ format: "" })}>{t.freeText}</button> : <button type="button" onClick={() => set({ format: EXAMPLE })}>{t.useExample}</button>}
        <button type="button" class="primary" onClick={close}>{t.done}</button>
      </div>
    </Dialog>
  );
}

const sameSchema = (one, other) => JSON.stringify(one) === JSON.stringify(other);

export function TokenDialog() {
  const asked = panels.token.value;
  const [text, setText] = useState("");
  return (
    <Dialog open={Boolean(asked)} close={() => { panels.token.value = null; }} title={t.wantsToken}>
      <form method="dialog" onSubmit={(event) => { event.preventDefault(); if (text.trim()) login(text.trim()); setText(""); }}>
        <label>{t.token} <small>{t.tokenNote}</small>
          <input type="password" autocomplete="current-password" required value={text} onInput={(event) => setText(event.target.value)} /></label>
        {asked?.error && <p class="failed" role="alert">{asked.error}</p>}
        <div class="buttons"><button type="submit" class="primary">{t.connect}</button></div>
      </form>
    </Dialog>
  );
}
