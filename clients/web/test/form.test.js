import assert from "node:assert/strict";
import { test } from "node:test";

import { below, fieldOf, fits, hintOf, initial, nameOf, resolved, size, spelled } from "../page/src/model/form.js";

const kind = (schema, root = schema) => fieldOf(schema, root).kind;

test("each type has its field, and what has none is JSON", () => {
  const kinds = [
    [{ type: "string" }, "text"], [{ type: "integer" }, "number"], [{ type: "boolean" }, "flag"], [{ type: "null" }, "nothing"],
    [{ enum: [1, 2] }, "choice"], [{ enum: [1] }, "constant"], [{ const: 3 }, "constant"], [{ type: ["string", "null"] }, "either"],
    [{ anyOf: [{ type: "string" }, { type: "null" }] }, "either"], [{ properties: {} }, "object"], [{ items: {} }, "list"], [{}, "json"],
    [{ type: "object", not: { required: ["a"] } }, "json"], [{ anyOf: [{ type: "string" }], minLength: 2 }, "json"],
    [{ $ref: "#/$defs/none" }, "json"], [{ $ref: "https://example.org/x" }, "json"], [{ $ref: "#" }, "json"],
  ];
  for (const [schema, expected] of kinds) assert.equal(kind(schema), expected, JSON.stringify(schema));
});

test("references are followed, and parts of an allOf put together", () => {
  const root = {
    $defs: { "a/b": { type: "integer", minimum: 2 }, base: { type: "object", properties: { a: { $ref: "#/$defs/a~1b" } }, required: ["a"] } },
    allOf: [{ $ref: "#/$defs/base" }, { properties: { b: { type: "string" } }, required: ["b"] }],
  };
  const { members } = fieldOf(root, root);
  assert.deepEqual(members.map(({ name, required }) => [name, required]), [["a", true], ["b", true]]);
  assert.deepEqual(initial(root, root), { a: 2, b: "" });
  assert.equal(kind({ allOf: [{ type: "string", maxLength: 3 }, { maxLength: 5 }] }), "json"); // both hold: no field says that
});

test("a schema that holds itself has a beginning", () => {
  const tree = { type: "object", properties: { left: { $ref: "#" } }, required: ["left"] };
  assert.ok(JSON.stringify(initial(tree, tree)).length < 500);
  const circle = { $defs: { a: { $ref: "#/$defs/b" }, b: { $ref: "#/$defs/a" } }, $ref: "#/$defs/a" };
  assert.equal(kind(resolved(circle, circle), circle), "json");
});

test("a union finds the shape of a value", () => {
  const cat = { title: "A cat", type: "object", properties: { kind: { const: "cat" }, lives: { type: "integer" } }, required: ["kind"] };
  const dog = { type: "object", properties: { kind: { const: "dog" } }, required: ["kind"], additionalProperties: false };
  assert.ok(fits(cat, cat, { kind: "cat", lives: 9 }) && !fits(dog, dog, { kind: "cat", lives: 9 }));
  assert.ok(fits(dog, dog, { kind: "dog" }) && !fits(dog, dog, { kind: "dog", name: "Rex" }));
  assert.deepEqual([cat, dog, { type: "null" }, { type: "array" }].map((each, i) => nameOf(each, each, i)), ["A cat", "dog", "nothing", "list"]);
});

test("a new value is one that fits", () => {
  const schemas = [
    { type: "integer", minimum: 3 }, { type: "number", maximum: -2.5 }, { enum: ["a", "b"] }, { type: "array", items: { type: "boolean" }, minItems: 2 },
    { type: "array", prefixItems: [{ const: 1 }, { type: "string" }], minItems: 2 }, { type: "string", default: "as ever" }, { type: ["null", "string"] },
  ];
  assert.deepEqual(schemas.map((each) => initial(each, each)), [3, -3, "a", [false, false], [1, ""], "as ever", null]);
  for (const each of schemas) assert.ok(fits(each, each, initial(each, each)));
});

test("hints, sizes, pointers and spelling", () => {
  assert.equal(hintOf({ description: "Its age", minimum: 0, exclusiveMaximum: 5 }, {}), "Its age · 0 to below 5");
  assert.equal(hintOf({ maxLength: 4, pattern: "^a" }, {}), "at most 4 characters, like ^a");
  assert.equal(size({ a: [1, 2, { b: 3 }] }, 100), 6);
  assert.ok(size(Array(1e6).fill(0), 10) <= 11);
  assert.equal(below("/a", "b/c~d"), "/a/b~1c~0d");
  assert.equal(spelled({ a: [1, "é\n", null], b: {} }), '{"a": [1, "é\\n", null], "b": {}}');
});

test("names that objects have from elsewhere are members like others", () => {
  const schema = JSON.parse('{"type": "object", "properties": {"__proto__": {"type": "string"}, "constructor": {"type": "integer"}}, "required": ["__proto__"]}');
  assert.equal(JSON.stringify(initial(schema, schema)), '{"__proto__":""}');
  assert.ok(!fits(schema, schema, {}));
});
