/** A JSON value as a form: a field for each part of it that its schema describes. */

import { useId, useLayoutEffect, useRef, useState } from "preact/hooks";
import { below, fieldOf, fits, hintOf, initial, itemOf, nameOf, resolved } from "../model/form.js";
import { t } from "../strings.js";
import { IconButton } from "./icons.jsx";

const DATE = /^\d{4}-\d\d-\d\d$/; // a field for dates shows nothing else

/**
 * @param {{schema: object, root: object, value: any, change: (value: any) => void, label: string, pointer?: string,
 *   errors?: {at: string, text: string}[], required?: boolean, remove?: () => void}} props
 */
export function Field(props) {
  const { schema, root, value, label, pointer = "", errors = [], required = true, remove } = props;
  const id = useId();
  const wrong = errors.filter(({ at }) => at === pointer).map(({ text }) => text);
  const hint = hintOf(schema, root);
  const described = [hint && `${id}hint`, wrong.length && `${id}wrong`].filter(Boolean).join(" ") || undefined;
  const kind = fieldOf(schema, root);
  const known = kind.kind === "either" ? kind : fits(schema, root, value) || partly(kind, value) ? kind : { kind: "json" };
  const title = resolved(schema, root).title ?? label;
  const group = ["object", "list", "either"].includes(known.kind);
  const parts = { ...props, id, field: known, described, invalid: wrong.length > 0, pointer, errors, required };
  const about = (
    <>
      {hint && <small id={`${id}hint`}>{hint}</small>}
      {wrong.length > 0 && <span class="failed" id={`${id}wrong`}>{wrong.join(" ")}</span>}
    </>
  );
  const drop = remove && <IconButton name="close" label={t.remove(title)} onClick={remove} />;
  if (group) {
    return (
      <fieldset class="part" aria-describedby={described}>
        <legend dir="auto">{title}{!required && <small> {t.optional}</small>}{drop}</legend>
        {about}
        {{ object: Members, list: Items, either: Alternatives }[known.kind](parts)}
      </fieldset>
    );
  }
  return (
    <div class={`part${known.kind === "flag" ? " flag" : ""}`}>
      <label for={id} dir="auto">{title}{!required && <small> {t.optional}</small>}</label>
      <span class="filled"><Input key={known.kind} {...parts} />{drop}</span>
      {about}
    </div>
  );
}

/** A value that is not right yet, but of the field's kind: it can be mended in the field. */
function partly({ kind }, value) {
  if (kind === "choice" || kind === "constant") return value === null || typeof value !== "object";
  if (kind === "object") return value !== null && typeof value === "object" && !Array.isArray(value);
  if (kind === "list") return Array.isArray(value);
  return (kind === "number" && typeof value === "number") || (kind === "number" && value === undefined);
}

function Input({ id, field, value, change, described, invalid }) {
  const same = { id, "aria-describedby": described, "aria-invalid": invalid || undefined };
  switch (field.kind) {
    case "text": return field.long || value.includes("\n")
      ? <textarea {...same} dir="auto" rows={Math.min(10, value.split("\n").length + Math.floor(value.length / 70))} value={value} onInput={({ target }) => change(target.value)} />
      : <input {...same} type={field.input === "date" && value && !DATE.test(value) ? "text" : field.input} dir="auto" value={value} onInput={({ target }) => change(target.value)} />;
    case "number": return <input {...same} type="number" step={field.integer ? 1 : "any"} min={field.min} max={field.max} value={value} onInput={({ target }) => change(target.value === "" ? undefined : target.valueAsNumber)} />;
    case "flag": return <input {...same} type="checkbox" checked={value} onChange={({ target }) => change(target.checked)} />;
    case "choice": return <Choice {...same} values={field.values} value={value} change={change} />;
    case "constant": return <output {...same}>{said(field.value)}</output>;
    case "nothing": return <output {...same}>{t.nothing}</output>;
    default: return <Text {...same} value={value} change={change} />;
  }
}

const said = (value) => (typeof value === "string" ? value : JSON.stringify(value));

function Choice({ values, value, change, ...rest }) {
  const at = values.findIndex((each) => JSON.stringify(each) === JSON.stringify(value));
  return (
    <select {...rest} value={at} onChange={({ target }) => change(values[Number(target.value)])}>
      {at < 0 && <option value={-1}>{said(value)}</option>}
      {values.map((each, i) => <option key={i} value={i}>{said(each)}</option>)}
    </select>
  );
}

/** A part without a field of its own: its JSON. What is no JSON yet is not taken over. */
function Text({ value, change, ...rest }) {
  const [text, setText] = useState(() => JSON.stringify(value, null, 1) ?? "");
  const [error, setError] = useState("");
  const typed = ({ target }) => {
    setText(target.value);
    try { change(JSON.parse(target.value)); setError(""); } catch (wrong) { setError(t.noJson(wrong.message)); }
  };
  return (
    <>
      <textarea {...rest} class="mono" spellcheck={false} rows={Math.min(10, text.split("\n").length)} value={text} aria-invalid={Boolean(error) || rest["aria-invalid"]} onInput={typed} />
      {error && <span class="failed" role="alert">{error}</span>}
    </>
  );
}

function Members({ field: { members, more }, root, value, change, pointer, errors }) {
  const own = Object.keys(value).filter((name) => !members.some((each) => each.name === name)).map((name) => ({ name, schema: more ?? {}, required: false }));
  const shown = [...members.filter(({ name }) => Object.hasOwn(value, name)), ...own];
  const absent = members.filter(({ name }) => !Object.hasOwn(value, name));
  const group = useAdded();
  const put = (name, each) => change(ordered({ ...value, [name]: each }, members));
  const add = (each) => { group.added(); put(each.name, initial(each.schema, root)); };
  const remove = (name) => { const { [name]: _, ...rest } = value; group.removed(); change(rest); };
  return (
    <div ref={group.element}>
      {shown.map(({ name, schema, required }) => (
        <Field key={name} schema={schema} root={root} label={name} value={value[name]} required={required} pointer={below(pointer, name)} errors={errors}
          change={(each) => put(name, each)} remove={required ? undefined : () => remove(name)} />
      ))}
      <div class="adding">
        {absent.map((each) => <button type="button" class="small" key={each.name} onClick={() => add(each)}>{t.addNamed(resolved(each.schema, root).title ?? each.name)}</button>)}
        {more && members.length === 0 && <NewMember taken={value} add={(name) => add({ name, schema: more })} />}
      </div>
    </div>
  );
}

/** The order in which the server lets models write members. */
function ordered(value, members) {
  const first = members.filter(({ name }) => Object.hasOwn(value, name)).map(({ name }) => [name, value[name]]);
  return { ...Object.fromEntries(first), ...Object.fromEntries(Object.entries(value).filter(([name]) => !members.some((each) => each.name === name))) };
}

function NewMember({ taken, add }) {
  const [name, setName] = useState("");
  const good = name !== "" && !Object.hasOwn(taken, name);
  const go = () => { if (good) { add(name); setName(""); } };
  return (
    <span class="filled">
      <input aria-label={t.newMember} placeholder={t.name} value={name} onInput={({ target }) => setName(target.value)}
        onKeyDown={(event) => { if (event.key === "Enter") { event.preventDefault(); go(); } }} />
      <button type="button" class="small" disabled={!good} onClick={go}>{t.add}</button>
    </span>
  );
}

function Items({ field, root, value, change, pointer, errors }) {
  const group = useAdded();
  const item = itemOf(field, value.length);
  const name = (i) => `${i + 1}`;
  const add = () => { group.added(); change([...value, initial(item, root)]); };
  const remove = (at) => { group.removed(); change(value.filter((_, i) => i !== at)); };
  return (
    <div ref={group.element}>
      {value.map((each, i) => (
        <Field key={i} schema={itemOf(field, i)} root={root} label={name(i)} value={each} pointer={below(pointer, i)} errors={errors}
          change={(changed) => change(value.map((old, at) => (at === i ? changed : old)))} remove={value.length > field.least ? () => remove(i) : undefined} />
      ))}
      <div class="adding">
        {value.length === 0 && <span class="soft">{t.nothingYet}</span>}
        {value.length < field.most && <button type="button" class="small" onClick={add}>{t.addOne}</button>}
      </div>
    </div>
  );
}

function Alternatives({ field: { options }, id, schema, root, label, value, change, pointer, errors }) {
  const chosen = useRef(-1);
  const fitting = options.findIndex((each) => fits(each, root, value));
  if (fitting >= 0 && !(chosen.current >= 0 && fits(options[chosen.current] ?? false, root, value))) chosen.current = fitting;
  const at = chosen.current;
  const turn = ({ target }) => { chosen.current = Number(target.value); change(initial(options[chosen.current], root)); };
  const option = options[at];
  const inner = option && fieldOf(option, root).kind !== "nothing";
  return (
    <>
      <select aria-label={t.whichForm(resolved(schema, root).title ?? label)} id={id} value={at} onChange={turn}>
        {at < 0 && <option value={-1}>{t.another}</option>}
        {options.map((each, i) => <option key={i} value={i}>{nameOf(each, root, i)}</option>)}
      </select>
      {at < 0 ? <Text value={value} change={change} aria-label={t.value} /> : inner && (
        <Field key={at} schema={option} root={root} value={value} change={change} label={nameOf(option, root, at)} pointer={pointer} errors={errors} />
      )}
    </>
  );
}

/** Where the keyboard goes when a part was added or removed: into what is new, or to the buttons that add. */
function useAdded() {
  const element = useRef(null);
  const what = useRef("");
  useLayoutEffect(() => { // before the next key can be typed
    const was = what.current;
    what.current = "";
    if (!was) return;
    const parts = [...element.current.children].filter((each) => each.classList.contains("part"));
    const place = was === "added" ? parts.find((each) => each.contains(document.activeElement)) ?? parts.at(-1) : element.current.lastElementChild;
    (place?.querySelector("input, textarea, select, button") ?? element.current.querySelector("button"))?.focus();
  });
  return { element, added: () => { what.current = "added"; }, removed: () => { what.current = "removed"; } };
}
