/** Answers to one question side by side: keep one, merge several, let the model judge. */

import { useState } from "preact/hooks";
import { options } from "../model/settings.js";
import { PROMPTS, t } from "../strings.js";
import { CopyButton, Stats, discard } from "./message.jsx";
import { IconButton } from "./icons.jsx";
import { AnswerText } from "./text.jsx";

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
    await chat.judge(done, { question: PROMPTS.judge, marks: MARKS }); // a tie leaves what is shown
    setJudging(false);
  };
  const merge = () => {
    chat.compare(question, false);
    chat.merge(merged, { prefix: PROMPTS.merge[0], each: PROMPTS.merge[1], suffix: PROMPTS.merge[2], options: options(chat) });
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
    <section class="drafts" aria-label={t.someDrafts(drafts.length)}>
      <div class="drafts-bar">
        <b>{t.someDrafts(drafts.length)}</b>
        <span class="soft">{running ? t.streamingSide : tie ? t.tieOf(best.length) : t.keepOne}</span>
        <span class="space" />
        {running ? <button type="button" class="small" onClick={() => chat.stop(drafts)}>{t.stopAll}</button> : (
          <>
            <button type="button" class="small" onClick={() => chat.answer(question, { count: 2, options: options(chat) })}>{t.twoMore}</button>
            <button type="button" class="small" disabled={judging || done.length < 2} title={t.judgeHint} onClick={judge}>{judging ? t.judging : t.letJudge}</button>
            <button type="button" class="small" disabled={merged.length < 2} title={t.mergeHint} onClick={merge}>
              {chosen.length > 1 ? t.mergeSome(chosen.length) : t.mergeAll}</button>
          </>
        )}
      </div>
      <div class="columns" onKeyDown={walk}>
        {drafts.map((draft, i) => (
          <article class={`draft${!tie && best.includes(draft) ? " best" : ""}`} key={draft.id} tabIndex={0} aria-label={t.draft(i + 1)}
            onDblClick={() => keep(draft)} onKeyDown={(event) => { if (event.key === "Enter" && event.target === event.currentTarget) keep(draft); }}>
            <header>
              <label><input type="checkbox" checked={picked.has(draft.id)} disabled={chat.live.has(draft.id)} onChange={() => pick(draft.id)} /> {t.draft(i + 1)}</label>
              {draft.score != null && <span class="score" title={t.ownMark}>{t.mark(draft.score)}{best.includes(draft) ? (tie ? t.tie : t.best) : ""}</span>}
            </header>
            <div class="draft-text"><AnswerText chat={chat} message={draft} />{draft.state === "failed" && <p class="failed">{draft.error}</p>}</div>
            <div class="under"><Stats chat={chat} message={draft} /></div>
            <div class="under">
              <button type="button" class="small accent" disabled={chat.live.has(draft.id)} onClick={() => keep(draft)}>{t.keepThis}</button>
              <CopyButton text={draft.text} />
              {chat.live.has(draft.id)
                ? <IconButton name="stop" label={t.stopDraft} onClick={() => chat.stop([draft])} />
                : drafts.length > 1 && <IconButton name="trash" label={t.deleteDraft} onClick={() => discard(chat, draft)} />}
            </div>
          </article>
        ))}
      </div>
    </section>
  );
}
