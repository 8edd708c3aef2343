/** An answer's text, while it is written and afterwards: its thought, folded, and its Markdown. */

import { split } from "../model/tree.js";
import { t } from "../strings.js";
import { Data } from "./data.jsx";
import { Markdown } from "./markdown.jsx";

const CALLS = /<tool_call>[\s\S]*?<\/tool_call>/g;

/** @param {{chat: object, message: object, correct?: (text: string) => void}} props  `correct`: keep a corrected JSON answer */
export function AnswerText({ chat, message, correct }) {
  chat.version.value; // read, to be told of changes
  const live = chat.live.get(message.id);
  live?.drawn.value; // read, to be told of more
  const writing = Boolean(live) || message.state === "running"; // or it will be known once we are connected
  const whole = live ? live.text : message.text;
  const { thought, open, rest } = split(whole);
  const shown = message.json && rest ? `\`\`\`json\n${rest}` : message.calls?.length ? rest.replace(CALLS, "").trim() : rest;
  const waits = writing && !whole;
  return (
    <div class={`answer${writing ? " writing" : ""}`} aria-busy={writing ? "true" : undefined}>
      {thought && <Thought text={thought} open={open} ms={live ? live.thoughtMs : message.thoughtMs} live={live} />}
      {waits && <p class="soft waiting">{chat.status.value.status === "open" ? t.thinkingNow : t.waitsForConnection}<span class="cursor" /></p>}
      {message.json && rest && !writing ? <Data text={rest} schema={message.schema} correct={correct} /> : <Markdown text={shown} final={!writing} />}
      {!writing && !whole && !message.calls?.length && message.state !== "failed" && <p class="soft">{message.reason === "cancelled" ? t.stoppedEarly : t.noWords}</p>}
    </div>
  );
}

function Thought({ text, open, ms, live }) {
  const label = open && live ? t.thinkingNow : ms ? t.thoughtFor(duration(ms)) : t.thought;
  return (
    <details class="thought">
      <summary>{label}{open && live && <span class="cursor" />}</summary>
      <div class="thought-text" dir="auto">{text}</div>
    </details>
  );
}

export const duration = (ms) => (ms < 1000 ? t.milliseconds(Math.round(ms)) : ms < 60_000 ? t.seconds(ms / 1000) : t.minutes(Math.floor(ms / 60_000), Math.round((ms % 60_000) / 1000)));
