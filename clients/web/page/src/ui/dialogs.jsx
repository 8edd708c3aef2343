/** Dialogs: settings, the format of answers, the server's token. */

import { useEffect, useRef, useState } from "preact/hooks";
import { current, login, panels, server } from "../model/app.js";
import { initial } from "../model/form.js";
import { FIELDS, schemaOf, set, settings, settingsOf, toolsOf } from "../model/settings.js";
import { Field } from "./form.jsx";

const EXAMPLE = JSON.stringify({
  type: "object",
  properties: { title: { type: "string", maxLength: 60 }, stars: { type: "integer", minimum: 1, maximum: 5 } },
  required: ["title", "stars"],
  additionalProperties: false,
}, null, 2);

/** A modal dialog that a signal opens. */
function Dialog({ open, close, title, children }) {
  const dialog = useRef(null);
  useEffect(() => {
    const element = dialog.current;
    if (open && !element.open) element.showModal();
    if (!open && element.open) element.close();
  }, [open]);
  return (
    <dialog ref={dialog} aria-label={title} onClose={close} onClick={(event) => { if (event.target === event.currentTarget) close(); }}>
      {open && <div class="dialog"><h2>{title}</h2>{children}</div>}
    </dialog>
  );
}

export function SettingsDialog() {
  const all = settings.value;
  const tools = toolsOf(all.tools);
  const close = () => { panels.settings.value = false; };
  return (
    <Dialog open={panels.settings.value} close={close} title="Settings">
      <label>System prompt <small>for chats that start from now on</small>
        <textarea rows={3} dir="auto" value={all.system} placeholder="None" onInput={(event) => set({ system: event.target.value })} /></label>
      <fieldset>
        <legend>Sampling <small>left empty, the model's own defaults hold</small></legend>
        <div class="fields">
          {FIELDS.map(({ name, label, hint, ...range }) => (
            <label key={name}>{label}
              <input type="number" {...range} value={all[name] ?? ""} title={hint}
                onInput={({ target }) => { if (target.validity.valid) set({ [name]: target.value }); }} />
              <small>{hint}</small></label>
          ))}
        </div>
      </fieldset>
      <label>Stop sequences <small>one per line; an answer ends before any of them</small>
        <textarea rows={2} value={all.stop} onInput={(event) => set({ stop: event.target.value })} /></label>
      <label>Tools <small>a JSON list, as in OpenAI's API; for chats that start from now on. You answer the calls.</small>
        <textarea rows={3} class="mono" spellcheck={false} value={all.tools} placeholder='[{"name": "weather", "description": "...", "parameters": {...}}]' aria-invalid={Boolean(tools.error)} onInput={(event) => set({ tools: event.target.value })} /></label>
      {tools.error && <p class="failed" role="alert">{tools.error}</p>}
      <label class="inline"><input type="checkbox" checked={all.ahead} onChange={(event) => set({ ahead: event.target.checked })} />
        Compute messages while they are typed <small>what you type goes to the server before you send it</small></label>
      <fieldset class="row"><legend>Colours</legend>
        {["system", "light", "dark"].map((each) => (
          <label key={each} class="inline"><input type="radio" name="theme" checked={all.theme === each} onChange={() => set({ theme: each })} />{{ system: "As the system", light: "Light", dark: "Dark" }[each]}</label>
        ))}
      </fieldset>
      <div class="buttons"><button type="button" class="primary" onClick={close}>Done</button></div>
    </Dialog>
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
    <Dialog open={panels.format.value} close={close} title="Answer format">
      <p class="soft">With a JSON schema, answers in this chat are JSON that is valid under it: the server lets the model write nothing else.</p>
      <label>JSON schema
        <textarea rows={12} class="mono" spellcheck={false} value={format} placeholder={EXAMPLE} aria-invalid={Boolean(error)} onInput={(event) => set({ format: event.target.value })} /></label>
      {error && <p class="failed" role="alert">{error}</p>}
      {notes && <div class="soft"><p>Not all of this schema is enforced while the model writes:</p><ul>{notes.map((note) => <li key={note}>{note}</li>)}</ul></div>}
      {schema && (
        <details class="preview">
          <summary>The form that answers will fill in</summary>
          <fieldset class="data" disabled><Field key={format} schema={schema} root={schema} label="Answer" value={initial(schema, schema)} change={() => {}} /></fieldset>
        </details>
      )}
      <div class="buttons">
        {format.trim() ? <button type="button" onClick={() => set({ format: "" })}>Free text</button> : <button type="button" onClick={() => set({ format: EXAMPLE })}>Use the example</button>}
        <button type="button" class="primary" onClick={close}>Done</button>
      </div>
    </Dialog>
  );
}

const sameSchema = (one, other) => JSON.stringify(one) === JSON.stringify(other);

export function TokenDialog() {
  const asked = panels.token.value;
  const [text, setText] = useState("");
  return (
    <Dialog open={Boolean(asked)} close={() => { panels.token.value = null; }} title="This server needs a token">
      <form method="dialog" onSubmit={(event) => { event.preventDefault(); if (text.trim()) login(text.trim()); setText(""); }}>
        <label>Token <small>one that the server was started with</small>
          <input type="password" autocomplete="current-password" required value={text} onInput={(event) => setText(event.target.value)} /></label>
        {asked?.error && <p class="failed" role="alert">{asked.error}</p>}
        <div class="buttons"><button type="submit" class="primary">Connect</button></div>
      </form>
    </Dialog>
  );
}
