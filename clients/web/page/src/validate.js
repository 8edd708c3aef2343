/** The worker that checks values under JSON schemas; see `model/checker.js`. */

import { Validator } from "@cfworker/json-schema";
import { language, t } from "./strings.js";

const MOST_ERRORS = 100;
/** Keywords whose errors only say that there is one further inside. */
const OUTER = ["properties", "additionalProperties", "patternProperties", "items", "prefixItems", "additionalItems", "allOf", "$ref", "$dynamicRef", "$recursiveRef", "dependentSchemas"];

function draftOf({ $schema = "" }) {
  const [, draft] = /(draft-0[3-7]|2019-09|2020-12)/.exec($schema) ?? [];
  return { "draft-03": "4", "draft-04": "4", "draft-06": "7", "draft-07": "7", "2019-09": "2019-09" }[draft] ?? "2020-12";
}

/** The library's words, where a person who is no programmer would ask what they mean. */
function plain({ keyword, error }) {
  const [, first, second] = /"([^"]*)"[^"]*(?:"(.*)")?/.exec(error) ?? [];
  if (keyword === "required") return t.isMissing(first);
  if (keyword === "type") return t.wrongType(first, second.split('", "'));
  if (keyword === "false") return t.mustNotBe;
  return error.replace(/^Instance/, t.theValue);
}

function errorsOf(schema, value) {
  const { errors } = new Validator(schema, draftOf(schema), false).validate(value);
  const inner = errors.filter(({ keyword }) => !OUTER.includes(keyword));
  const told = new Map((inner.length ? inner : errors).map((each) => [`${each.instanceLocation} ${each.error}`, { at: decodeURIComponent(each.instanceLocation.slice(1)), text: plain(each) }]));
  return [...told.values()].slice(0, MOST_ERRORS);
}

addEventListener("message", ({ data: { id, schema, value, words } }) => {
  language.value = words;
  try {
    postMessage({ id, errors: errorsOf(schema, value) });
  } catch (error) {
    postMessage({ id, unknown: t.notChecked(error.message) });
  }
});
