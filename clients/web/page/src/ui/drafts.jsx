/** Answers to one question side by side: keep one, merge several, let the model judge. */

import { useState } from "preact/hooks";
import { options } from "../model/settings.js";
import { CopyButton, Stats, discard } from "./message.jsx";
import { IconButton } from "./icons.jsx";
import { AnswerText } from "./text.jsx";

const MERGE = ["Here are drafts of an answer to the question above.\n\n", "Write one answer that keeps the best parts of them."];
const JUDGE = "How good is this answer, from 1 (poor) to 9 (excellent)? Say only the number.";
const MARKS = ["1", "2", "3", "4", "5", "6", "7", "8", "9"];

export function Drafts({ chat, question }) {
  chat.version.value; // read, to be told of changes
  const drafts = chat.tree.drafts(question);
  const [picked, setPicked] = useState(new Set());
  const [judging, setJudging] = useState(false);
  const running = drafts.some(({ id }) => chat.live.has(id));
  const done = drafts.filter(({ state, text }) => state === "done" && text);
  const chosen = done.filter(({ id }) => picked.has(id));
  const merged = chosen.length > 1 ? chosen : done;
  const top = Math.max(...drafts.map(({ score }) => score ?? -1));
  const best = top < 0 ? [] : drafts.filter(({ score }) => score === top);
  const tie = best.length > 1;
  const keep = (draft) => {
    chat.compare(question, false);
    chat.choose(draft);
    document.getElementById("input")?.focus();
  };
  const pick = (id) => { const next = new Set(picked); if (!next.delete(id)) next.add(id); setPicked(next); };
  const judge = async () => {
    setJudging(true);
    await chat.judge(done, { question: JUDGE, marks: MARKS }); // a tie leaves what is shown
    setJudging(false);
  };
  const merge = () => {
    chat.compare(question, false);
    chat.merge(merged, { prefix: MERGE[0], suffix: MERGE[1], options: options(chat) });
  };
  const walk = (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || event.target.closest("textarea, pre, .arrows")) return;
    const all = [...event.currentTarget.querySelectorAll(".draft")];
    const at = all.indexOf(event.target.closest(".draft"));
    all[(at + step + all.length) % all.length]?.focus();
    event.preventDefault();
  };
  return (
    <section class="drafts" aria-label={`${drafts.length} drafts`}>
      <div class="drafts-bar">
        <b>{drafts.length} drafts</b>
        <span class="soft">{running ? "streaming side by side" : tie ? `a tie: ${best.length} of them have the best mark` : "keep one, or bring them together"}</span>
        <span class="space" />
        {running ? <button type="button" class="small" onClick={() => chat.stop(drafts)}>Stop all</button> : (
          <>
            <button type="button" class="small" onClick={() => chat.answer(question, { count: 2, options: options(chat) })}>2 more</button>
            <button type="button" class="small" disabled={judging || done.length < 2} title="The model gives each draft a mark from 1 to 9; the server keeps the best" onClick={judge}>{judging ? "Judging" : "Let the model judge"}</button>
            <button type="button" class="small" disabled={merged.length < 2} title="The server joins the branches, and the model writes one answer of them" onClick={merge}>
              {chosen.length > 1 ? `Merge ${chosen.length}` : "Merge all"}</button>
          </>
        )}
      </div>
      <div class="columns" onKeyDown={walk}>
        {drafts.map((draft, i) => (
          <article class={`draft${!tie && best.includes(draft) ? " best" : ""}`} key={draft.id} tabIndex={0} aria-label={`Draft ${i + 1}`}
            onDblClick={() => keep(draft)} onKeyDown={(event) => { if (event.key === "Enter" && event.target === event.currentTarget) keep(draft); }}>
            <header>
              <label><input type="checkbox" checked={picked.has(draft.id)} disabled={chat.live.has(draft.id)} onChange={() => pick(draft.id)} /> Draft {i + 1}</label>
              {draft.score != null && <span class="score" title="The model's own mark">{draft.score} of 9{best.includes(draft) ? (tie ? " · tie" : " · best") : ""}</span>}
            </header>
            <div class="draft-text"><AnswerText chat={chat} message={draft} />{draft.state === "failed" && <p class="failed">{draft.error}</p>}</div>
            <div class="under"><Stats chat={chat} message={draft} /></div>
            <div class="under">
              <button type="button" class="small accent" disabled={chat.live.has(draft.id)} onClick={() => keep(draft)}>Keep this</button>
              <CopyButton text={draft.text} />
              {chat.live.has(draft.id)
                ? <IconButton name="stop" label="Stop this draft" onClick={() => chat.stop([draft])} />
                : drafts.length > 1 && <IconButton name="trash" label="Delete this draft" onClick={() => discard(chat, draft)} />}
            </div>
          </article>
        ))}
      </div>
    </section>
  );
}
