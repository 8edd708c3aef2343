/** The worker that checks values under JSON schemas; see `model/checker.js`. */

import { Validator } from "@cfworker/json-schema";

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
  if (keyword === "required") return `“${first}” is missing.`;
  if (keyword === "type") return `This is ${first}, and has to be ${second.replaceAll('", "', " or ")}.`;
  if (keyword === "false") return "This must not be here.";
  return error.replace(/^Instance/, "The value");
}

function errorsOf(schema, value) {
  const { errors } = new Validator(schema, draftOf(schema), false).validate(value);
  const inner = errors.filter(({ keyword }) => !OUTER.includes(keyword));
  const told = new Map((inner.length ? inner : errors).map((each) => [`${each.instanceLocation} ${each.error}`, { at: decodeURIComponent(each.instanceLocation.slice(1)), text: plain(each) }]));
  return [...told.values()].slice(0, MOST_ERRORS);
}

addEventListener("message", ({ data: { id, schema, value } }) => {
  try {
    postMessage({ id, errors: errorsOf(schema, value) });
  } catch (error) {
    postMessage({ id, unknown: `It could not be checked: ${error.message}.` });
  }
});
