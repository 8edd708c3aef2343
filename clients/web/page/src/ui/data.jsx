/** An answer that a JSON schema asked for: as a form or as JSON, checked, and open to corrections. */

import { useEffect, useMemo, useState } from "preact/hooks";
import { check } from "../model/checker.js";
import { size, spelled } from "../model/form.js";
import { set, settings } from "../model/settings.js";
import { t } from "../strings.js";
import { Field } from "./form.jsx";
import { Markdown } from "./markdown.jsx";

const MOST_FIELDS = 500; // more values than that are shown as JSON only
const CHECK_MS = 150; // after the last change

/** @param {{text: string, schema?: object, correct?: (text: string) => void}} props  `correct`: keep a corrected value */
export function Data({ text, schema, correct }) {
  const parsed = useMemo(() => parse(text), [text]);
  const [changed, setChanged] = useState(null);
  const value = changed ? changed.value : parsed?.value;
  const verdict = useVerdict(schema, parsed && { value });
  if (!parsed) {
    return (
      <>
        <Markdown text={`\`\`\`json\n${text}\n\`\`\``} final />
        <p class="failed">{t.cutJson}</p>
      </>
    );
  }
  const possible = Boolean(schema) && size(value, MOST_FIELDS) <= MOST_FIELDS;
  const form = possible && settings.value.form;
  const keep = (event) => {
    event.preventDefault();
    if (!changed || !correct) return;
    correct(spelled(changed.value));
    setChanged(null);
  };
  return (
    <form class="data" onSubmit={keep} noValidate>
      {possible && (
        <div class="views" role="group" aria-label={t.showAs}>
          <button type="button" class="small" aria-pressed={!form} onClick={() => set({ form: false })}>{t.json}</button>
          <button type="button" class="small" aria-pressed={form} onClick={() => set({ form: true })}>{t.form}</button>
        </div>
      )}
      {form
        ? <fieldset class="whole" disabled={!correct}><Field schema={schema} root={schema} label={t.answer} value={value} change={(each) => setChanged({ value: each })} errors={verdict?.errors} /></fieldset>
        : <Markdown text={`\`\`\`json\n${JSON.stringify(value, null, 2)}\n\`\`\``} final />}
      <Verdict verdict={verdict} known={Boolean(schema)} changed={Boolean(changed)} />
      {changed && (
        <div class="buttons"><span class="soft">{t.originalStays}</span>
          <button type="button" onClick={() => setChanged(null)}>{t.discard}</button>
          <button type="submit" class="primary">{t.keepCorrection}</button></div>
      )}
    </form>
  );
}

function parse(text) {
  try { return { value: JSON.parse(text) }; } catch { return null; }
}

/** What the checker says of a value; null while it is not known. */
function useVerdict(schema, parsed) {
  const [found, setFound] = useState(null);
  const key = schema && parsed ? JSON.stringify(parsed.value) ?? "" : null;
  useEffect(() => {
    if (key === null) return undefined;
    let wanted = true;
    const timer = setTimeout(async () => {
      const verdict = await check(schema, JSON.parse(key || "null"));
      if (wanted) setFound(verdict);
    }, found ? CHECK_MS : 0);
    return () => { wanted = false; clearTimeout(timer); };
  }, [schema, key]);
  return found;
}

function Verdict({ verdict, known, changed }) {
  if (!known) return <p class="soft">{t.schemaNotKept}</p>;
  if (!verdict) return <p class="soft" role="status">{t.checking}</p>;
  if (verdict.unknown) return <p class="soft" role="status">{verdict.unknown}</p>;
  const { errors } = verdict;
  if (!errors.length) return <p class="soft" role="status">{changed ? t.validCorrection : t.validChecked}</p>;
  return (
    <div class="failed" role="status">{t.notValid}
      <ul>{errors.slice(0, 10).map(({ at, text }) => <li key={at + text}>{at && <code>{at.slice(1).replaceAll("/", " › ")}</code>} {text}</li>)}</ul>
    </div>
  );
}
