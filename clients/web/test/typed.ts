// Checked by `npm run check`, never run: what a TypeScript program sees of the package.
import { Branch, Conflict, Generation, RamifyError, connect, type Note, type Options, type Result, type SessionEvent, type TextDelta } from "ramify-client";

const options: Options = { token: async () => "t", retry: "always", open: { parts: true, tick_ms: 30 } };
const session = await connect("ws://127.0.0.1:8765", options).ready;

const answer: Generation = session.main.chat("Hi", { max_tokens: 3, signal: AbortSignal.timeout(1000) });
for await (const delta of answer) {
  const text: string = (delta satisfies TextDelta).text;
  console.log(text, delta.parts?.map(({ kind }) => kind));
}
const result: Result = await answer.result;
const prompt: number = result.usage.prompt;

const [first]: Generation[] = session.generate({ branch: ["a", "b"], seed: prompt });
const one: Generation = session.generate({ branch: "a", regex: "[0-9]+" });
const many: Generation[] = session.main.generateMany(3, { temperature: 1 });
const forks: Branch[] = await session.main.fork(["a", "b"], { at: 4 });
const { result: pruned } = await session.prune(["a", "b"], { by: "vote", into: "main" });
const scores: Record<string, number | null> | undefined = pruned?.scores;
const best: string | undefined = (await session.main.tree({ text: true })).turns?.at(-1)?.text;
const position: number | undefined = (await session.append("x")).position;
session.send([{ type: "append", text: "x" }, { type: "generate", max_tokens: 1 }]);

session.addEventListener("status", ({ detail }) => {
  if (detail.status === "waiting") console.log(detail.retryAt satisfies number, detail.error.code);
  // @ts-expect-error: only where there will be another try
  else console.log(detail.retryAt);
});
const heard = (event: SessionEvent): string => {
  switch (event.type) {
    case "status": return event.detail.status;
    case "state": return event.detail.session;
    case "tree": return event.detail.op === "fork" ? `${event.detail.details?.as?.length}` : event.detail.op;
    case "text": return event.detail.text;
    case "lost": return event.detail.message;
    default: return event satisfies never;
  }
};
session.addEventListener("tree", heard, { once: true });
session.addEventListener("lost", { handleEvent: ({ detail }) => console.log(detail.retryMs) });
session.removeEventListener("tree", heard);
const target: EventTarget = session;
// @ts-expect-error: no such event
session.addEventListener("open", () => {});
// @ts-expect-error: only another client's `set` has an old name
session.addEventListener("tree", ({ detail }) => detail.op === "fork" && detail.details?.from);
for await (const note of session.events()) {
  const said: Note = note;
  if (said.type === "event" && said.op === "generate") console.log(said.details?.reason, target);
  else if (said.type === "delta") console.log(said.text);
  else if (said.type === "error") console.log(said.code);
}

// @ts-expect-error: no such option
session.main.generate({ max_token: 1 });
// @ts-expect-error: a number is no input
session.append(3);
// @ts-expect-error: one of four ways
session.prune(["a"], { by: "luck" });

try {
  await session.main.append("x", { expect: 1 });
} catch (error) {
  if (error instanceof Conflict) console.log(error.code, error.details?.position);
  else if (error instanceof RamifyError && error.code === "overloaded") console.log(error.retryMs);
}
console.log(first, one, many, forks, scores, best, position);
const file: Uint8Array = await session.export({ signal: AbortSignal.timeout(1000) });
connect("ws://127.0.0.1:8765", { import: file });
// @ts-expect-error: bytes, not text
connect("ws://127.0.0.1:8765", { import: "file" });
