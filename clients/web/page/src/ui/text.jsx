/** An answer's text, while it is written and afterwards: its thought, folded, and its Markdown. */

import { memo } from "preact/compat";
import { useEffect, useLayoutEffect, useRef } from "preact/hooks";
import { split } from "../model/tree.js";
import { Answer } from "../render/answer.js";

const CALLS = /<tool_call>[\s\S]*?<\/tool_call>/g;

/** @param {{chat: object, message: object}} props */
export function AnswerText({ chat, message }) {
  chat.version.value; // read, to be told of changes
  const live = chat.live.get(message.id);
  live?.drawn.value; // read, to be told of more
  const writing = Boolean(live) || message.state === "running"; // or it will be known once we are connected
  const whole = live ? live.text : message.text;
  const { thought, open, rest } = split(whole);
  const data = message.json ? asData(rest, writing) : null;
  const shown = data ? data.text : message.calls?.length ? rest.replace(CALLS, "").trim() : rest;
  const waits = writing && !whole;
  return (
    <div class={`answer${writing ? " writing" : ""}`} aria-busy={writing ? "true" : undefined}>
      {thought && <Thought text={thought} open={open} ms={live ? live.thoughtMs : message.thoughtMs} live={live} />}
      {waits && <p class="soft waiting">{chat.status.value.status === "open" ? "Thinking" : "Waiting for the connection"}<span class="cursor" /></p>}
      <Markdown text={shown} final={!writing} />
      {data?.verdict && <p class={data.valid ? "soft" : "failed"}>{data.verdict}</p>}
      {!writing && !whole && !message.calls?.length && message.state !== "failed" && <p class="soft">{message.reason === "cancelled" ? "Stopped before the first word." : "No text."}</p>}
    </div>
  );
}

/** An answer that a JSON schema asked for, as code, with a verdict once it has ended. */
function asData(text, writing) {
  if (writing) return { text: `\`\`\`json\n${text}` };
  try {
    const pretty = JSON.stringify(JSON.parse(text), null, 2);
    return { text: `\`\`\`json\n${pretty}\n\`\`\``, valid: true, verdict: "Valid: the server let the model write nothing that the schema forbids." };
  } catch {
    return { text: `\`\`\`json\n${text}\n\`\`\``, valid: false, verdict: "This answer was cut before its end and is no complete JSON. Allow more tokens in the settings, or go on writing." };
  }
}

function Thought({ text, open, ms, live }) {
  const label = open && live ? "Thinking" : ms ? `Thought for ${duration(ms)}` : "Thought";
  return (
    <details class="thought">
      <summary>{label}{open && live && <span class="cursor" />}</summary>
      <div class="thought-text" dir="auto">{text}</div>
    </details>
  );
}

export const duration = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : ms < 60_000 ? `${(ms / 1000).toFixed(1)} s` : `${Math.floor(ms / 60_000)} min ${Math.round((ms % 60_000) / 1000)} s`);

/** Markdown that grows. The element's content is the renderer's, not the framework's. */
export const Markdown = memo(({ text, final }) => {
  const element = useRef(null);
  const answer = useRef(null);
  useLayoutEffect(() => {
    answer.current ??= new Answer(element.current);
    answer.current.show(text, final);
  }, [text, final]);
  useEffect(() => () => answer.current?.show("", true), []);
  return <div class="text" dir="auto" ref={element} />;
});
