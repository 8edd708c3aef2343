import assert from "node:assert/strict";
import { test } from "node:test";

import { BadRequest, ConnectionLost, Forbidden, Replaced, Unauthorized } from "../lib/errors.js";
import { Pacer, afterClose, delay, pause } from "../lib/reconnect.js";

test("close codes as docs/protocol.md has them", () => {
  const verdicts = { 1000: "stop", 1001: "resume", 1002: "stop", 1003: "stop", 1006: "resume", 1007: "stop", 1009: "split",
    1011: "resume", 1012: "resume", 4400: "stop", 4401: "newToken", 4403: "stop", 4408: "resume", 4409: "stop", 4429: "backOff", 4999: "stop" };
  for (const [code, action] of Object.entries(verdicts)) assert.equal(afterClose(Number(code)).action, action, code);
  const kinds = { 1003: BadRequest, 4401: Unauthorized, 4403: Forbidden, 4409: Replaced, 1006: ConnectionLost };
  for (const [code, kind] of Object.entries(kinds)) assert.ok(afterClose(Number(code), "why").error instanceof kind, code);
  assert.deepEqual(afterClose(4403, "why").error.details, { close: 4403, reason: "why" });
});

test("delays double to a ceiling, and the server's wish is a floor", () => {
  assert.deepEqual([0, 1, 2, 3, 30].map((attempt) => delay(attempt, 1)), [100, 200, 400, 800, 10_000]);
  assert.equal(delay(0, 0.5, 5000), 5050);
  assert.deepEqual([pause(), pause(-5), pause(1e9)], [0, 0, 60_000]);
});

test("the pacer waits as long as the bucket needs", () => {
  const pacer = new Pacer();
  assert.equal(pacer.wait(1e6, 0), 0); // no limit was told
  pacer.limit(200, 400, 0);
  assert.equal(pacer.wait(400, 0), 0);
  assert.equal(pacer.wait(100, 0), 500);
  assert.equal(pacer.wait(100, 1000), 0); // 100 were owed, 200 came
});
