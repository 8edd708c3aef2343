/**
 * A JSON schema as fields that a person can read and fill in. Pure: no DOM.
 *
 * A part of a schema that has no field of its own (any value at all, `not`, `if`, several shapes at once) is of the
 * kind "json": it is shown and changed as text, so that no value is lost. Whether a value is valid says `checker.js`.
 *
 * @typedef {{kind: "constant", value: any} | {kind: "choice", values: any[]} | {kind: "either", options: object[]} |
 *   {kind: "text", input: string, long: boolean} | {kind: "number", integer: boolean, min?: number, max?: number} |
 *   {kind: "flag"} | {kind: "nothing"} | {kind: "json"} |
 *   {kind: "object", members: {name: string, schema: object, required: boolean}[], more: object | null} |
 *   {kind: "list", first: object[], item: object | null, least: number, most: number}} Field
 */

import { t } from "../strings.js";

const MOST_REFERENCES = 32; // that are followed, one behind the other
const MOST_DEPTH = 12; // of a value that is made up
const LONG_TEXT = 100; // characters that have a field of several lines
const INPUTS = { date: "date", email: "email", uri: "url" };
const BESIDE = ["title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly", "$defs", "definitions", "$schema", "$id"];

/** The schema that a schema stands for: references followed, one `allOf` of different parts put together. */
export function resolved(schema, root) {
  let found = schema;
  for (let i = 0; i < MOST_REFERENCES && isObject(found) && typeof found.$ref === "string"; i += 1) {
    const { $ref, ...rest } = found;
    const target = pointed($ref, root);
    if (!isObject(target)) return { ...rest, not: {} };
    found = { ...target, ...rest };
  }
  if (!isObject(found)) return {};
  if (!Array.isArray(found.allOf)) return found;
  const { allOf, ...rest } = found;
  return [rest, ...allOf.map((each) => resolved(each, root))].reduce(together);
}

/** Two schemas that both hold; where that takes more than adding members, what is left is a schema without a field. */
function together(a, b) {
  const both = { ...a };
  for (const [key, value] of Object.entries(b)) {
    if (!(key in both) || same(both[key], value) || BESIDE.includes(key)) both[key] ??= value;
    else if (key === "required") both.required = [...new Set([...both.required, ...value])];
    else if (key === "properties" && !Object.keys(value).some((name) => Object.hasOwn(both.properties, name))) both.properties = { ...both.properties, ...value };
    else return { title: a.title, description: a.description, not: {} };
  }
  return both;
}

function pointed(reference, root) {
  if (reference === "#") return root;
  if (!reference.startsWith("#/")) return undefined;
  let at = root;
  for (const part of reference.slice(2).split("/")) {
    let name;
    try { name = decodeURIComponent(part).replaceAll("~1", "/").replaceAll("~0", "~"); } catch { return undefined; }
    if (at === null || typeof at !== "object" || !Object.hasOwn(at, name)) return undefined;
    at = at[name];
  }
  return at;
}

/** What field a schema has. @returns {Field} */
export function fieldOf(schema, root) {
  const all = resolved(schema, root);
  if ("const" in all) return { kind: "constant", value: all.const };
  if (Array.isArray(all.enum)) return all.enum.length === 1 ? { kind: "constant", value: all.enum[0] } : { kind: "choice", values: all.enum };
  if (["not", "if", "dependentSchemas", "unevaluatedProperties", "unevaluatedItems"].some((key) => key in all)) return { kind: "json" };
  for (const key of ["anyOf", "oneOf"]) {
    if (!Array.isArray(all[key])) continue;
    const { [key]: options, ...rest } = all;
    if (Object.keys(rest).some((each) => !BESIDE.includes(each) && each !== "type")) return { kind: "json" };
    return { kind: "either", options };
  }
  if (Array.isArray(all.type)) return all.type.length === 1 ? typed({ ...all, type: all.type[0] }, root) : { kind: "either", options: all.type.map((type) => plain(all, type)) };
  return typed(all, root);
}

/** A schema of several types as one of one type. */
function plain(schema, type) {
  const { title, description, ...rest } = schema;
  return { ...rest, type };
}

function typed(schema, root) {
  const type = schema.type ?? (isObject(schema.properties) ? "object" : "items" in schema || "prefixItems" in schema ? "array" : undefined);
  switch (type) {
    case "string": return { kind: "text", input: INPUTS[schema.format] ?? "text", long: !schema.format && !(schema.maxLength <= LONG_TEXT) };
    case "integer":
    case "number": return { kind: "number", integer: type === "integer", min: finite(schema.minimum), max: finite(schema.maximum) };
    case "boolean": return { kind: "flag" };
    case "null": return { kind: "nothing" };
    case "object": return objectOf(schema);
    case "array": return listOf(schema);
    default: return { kind: "json" };
  }
}

function objectOf({ properties = {}, required = [], additionalProperties = true, patternProperties }) {
  const names = [...new Set([...Object.keys(properties), ...(Array.isArray(required) ? required : [])])];
  const more = patternProperties ? {} : additionalProperties === false ? null : isObject(additionalProperties) ? additionalProperties : {};
  const known = (name) => (Object.hasOwn(properties, name) ? properties[name] : more ?? {});
  return { kind: "object", members: names.map((name) => ({ name, schema: known(name), required: required.includes?.(name) ?? false })), more };
}

function listOf({ items, prefixItems, minItems = 0, maxItems = Infinity }) {
  const first = Array.isArray(prefixItems) ? prefixItems : Array.isArray(items) ? items : [];
  const item = Array.isArray(items) ? {} : items === false ? null : items === true || items === undefined ? {} : items;
  return { kind: "list", first, item, least: minItems, most: item === null ? Math.min(first.length, maxItems) : maxItems };
}

/** What a member of an object, or an item of a list, is held to. */
export const itemOf = ({ first, item }, at) => first[at] ?? item ?? {};

/** A value to begin with; what the schema wants of it may still have to be filled in. */
export function initial(schema, root, depth = 0) {
  const all = resolved(schema, root);
  if ("default" in all) return structuredClone(all.default);
  if (depth > MOST_DEPTH) return null;
  const field = fieldOf(all, root);
  switch (field.kind) {
    case "constant": return structuredClone(field.value);
    case "choice": return structuredClone(field.values[0]);
    case "either": return field.options.length ? initial(field.options[0], root, depth + 1) : null;
    case "text": return "";
    case "number": return field.min > 0 ? Math.ceil(field.min) : field.max < 0 ? Math.floor(field.max) : 0;
    case "flag": return false;
    case "object": return Object.fromEntries(field.members.filter(({ required }) => required).map((each) => [each.name, initial(each.schema, root, depth + 1)]));
    case "list": return Array.from({ length: Math.min(field.least, 100) }, (_, i) => initial(itemOf(field, i), root, depth + 1));
    default: return null;
  }
}

/** Whether a value can be shown in a schema's field. For shapes of a union: looks at what tells them apart, not at everything. */
export function fits(schema, root, value, depth = 0) {
  const field = fieldOf(schema, root);
  if (depth > MOST_DEPTH) return true;
  switch (field.kind) {
    case "constant": return same(field.value, value);
    case "choice": return field.values.some((each) => same(each, value));
    case "either": return field.options.some((each) => fits(each, root, value, depth + 1));
    case "text": return typeof value === "string";
    case "number": return typeof value === "number" && (!field.integer || Number.isInteger(value));
    case "flag": return typeof value === "boolean";
    case "nothing": return value === null;
    case "object": return isObject(value) && field.members.every((each) => (Object.hasOwn(value, each.name) ? fits(each.schema, root, value[each.name], depth + 1) : !each.required))
      && (field.more !== null || Object.keys(value).every((name) => field.members.some((each) => each.name === name)));
    case "list": return Array.isArray(value) && value.length <= field.most;
    default: return true;
  }
}

/** What an alternative of a union is called. */
export function nameOf(schema, root, at) {
  const { title, type } = resolved(schema, root);
  const field = fieldOf(schema, root);
  if (title) return title;
  if (field.kind === "constant") return typeof field.value === "string" ? field.value : JSON.stringify(field.value);
  const tag = field.kind === "object" && field.members.map((each) => fieldOf(each.schema, root)).find(({ kind }) => kind === "constant");
  if (tag) return String(tag.value);
  return { text: t.kindText, number: type === "integer" ? t.kindWhole : t.kindNumber, flag: t.kindFlag, nothing: t.nothing, list: t.kindList, choice: t.kindChoice }[field.kind] ?? t.kindForm(at + 1);
}

/** What a field has to hold, in words. */
export function hintOf(schema, root) {
  const all = resolved(schema, root);
  const bounds = [
    span(all.minimum ?? all.exclusiveMinimum, all.maximum ?? all.exclusiveMaximum, "", all.exclusiveMinimum !== undefined && all.minimum === undefined, all.exclusiveMaximum !== undefined && all.maximum === undefined),
    span(all.minLength, all.maxLength, t.unitCharacters), span(all.minItems, all.maxItems, t.unitItems),
    all.multipleOf && t.inSteps(all.multipleOf), all.pattern && t.like(all.pattern), all.format && !INPUTS[all.format] && all.format,
  ];
  return [all.description, bounds.filter(Boolean).join(", ")].filter(Boolean).join(" · ").slice(0, 500);
}

function span(least, most, unit, above = false, below = false) {
  if (least === undefined && most === undefined) return "";
  if (most === undefined) return (above ? t.moreThan : t.atLeast)(least, unit);
  if (least === undefined) return (below ? t.lessThan : t.atMost)(most, unit);
  return t.between(least, most, unit, above, below);
}

/** How many values there are in a value, itself included; counting ends above `most`. */
export function size(value, most) {
  let count = 0;
  const left = [value];
  while (left.length && count <= most) {
    const each = left.pop();
    count += 1;
    if (each !== null && typeof each === "object") for (const part of Object.values(each)) left.push(part);
  }
  return count;
}

/** A value as the server lets models write it: one space behind "," and ":". */
export function spelled(value) {
  if (Array.isArray(value)) return `[${value.map(spelled).join(", ")}]`;
  if (isObject(value)) return `{${Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${spelled(each)}`).join(", ")}}`;
  return JSON.stringify(value);
}

/** A member's place below a JSON pointer. */
export const below = (pointer, name) => `${pointer}/${String(name).replaceAll("~", "~0").replaceAll("/", "~1")}`;

export const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);

function same(a, b) {
  if (a === b) return true;
  if (a === null || b === null || typeof a !== "object" || typeof b !== "object" || Array.isArray(a) !== Array.isArray(b)) return false;
  const names = Object.keys(a);
  return names.length === Object.keys(b).length && names.every((name) => Object.hasOwn(b, name) && same(a[name], b[name]));
}

const finite = (value) => (Number.isFinite(value) ? value : undefined);
