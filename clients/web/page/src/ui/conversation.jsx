/** The messages that are shown, from the first to the last, and the place to start where there are none. */

import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { greeted, server } from "../model/app.js";
import { options, settings } from "../model/settings.js";
import { english, t } from "../strings.js";
import { ToolMessage } from "./calls.jsx";
import { Drafts } from "./drafts.jsx";
import { Icon } from "./icons.jsx";
import { AnswerMessage, UserMessage } from "./message.jsx";
import { about, nameOf } from "./sidebar.jsx";

/** Names of strings, and how many answers. The demo model speaks English only. */
const EXAMPLES = [["exampleFox", 1], ["exampleOwl", 3], ["exampleSum", 1]];
const NEAR_END = 60; // pixels

export function Conversation({ chat }) {
  chat.version.value; // read, to be told of changes
  const path = chat.tree.path();
  const log = useRef(null);
  const { following, toEnd } = useFollowing(log, chat);
  const wide = path.some((message) => message.compare && chat.tree.drafts(message).length > 1);
  return (
    <div class="log-area">
      <div class="log" id="log" ref={log} role="log" aria-live="off" aria-label={t.conversation} tabIndex={0}>
        {path.length === 0 ? !chat.watching && <Welcome chat={chat} /> : (
          <div class={`messages${wide ? " wide" : ""}`}>{shown(chat, path)}</div>
        )}
        <Announcer path={path} />
      </div>
      {!following && <button type="button" class="latest" onClick={toEnd}><Icon name="down" /> {t.latest}</button>}
    </div>
  );
}

function shown(chat, path) {
  return path.map((message, i) => {
    const last = i === path.length - 1;
    const key = message.id;
    if (message.role === "user") return <UserMessage key={key} chat={chat} message={message} last={last} />;
    if (message.role === "tool") return <ToolMessage key={key} message={message} />;
    const question = path[i - 1];
    if (last && question?.compare && chat.tree.drafts(question).length > 1) return <Drafts key={`drafts ${question.id}`} chat={chat} question={question} />;
    return <AnswerMessage key={key} chat={chat} message={message} last={last} />;
  });
}

function Welcome({ chat }) {
  const model = server.value?.model;
  const demo = model?.model === "default_model";
  const ask = (text, count) => chat.send({ text, count, options: options(chat), system: settings.value.system.trim() });
  return (
    <section class="welcome">
      <h2>{t.welcome}</h2>
      {model && <p>{demo
        ? t.aboutDemo(about(model))
        : `${nameOf(model)}: ${about(model)}.`}</p>}
      {greeted.value && <div class="examples">
        {EXAMPLES.map(([name, count]) => [(demo ? english : t)[name], count]).map(([text, count]) => (
          <button type="button" key={text} onClick={() => { chat.open(); ask(text, count); }}>
            {text}{count > 1 && <small>{t.draftsBeside(count)}</small>}
          </button>
        ))}
        <a class="button" href="game24.html">{t.watchTree}<small>{t.everyBranch}</small></a>
      </div>}
    </section>
  );
}

/** Screen readers hear an answer when it is complete, not in pieces. */
function Announcer({ path }) {
  const [said, setSaid] = useState("");
  const last = path.at(-1);
  const running = last?.state === "running";
  const was = useRef(running);
  useEffect(() => {
    if (was.current && !running && last) setSaid(t.answerIs(last.text.slice(0, 2000)));
    was.current = running;
  }, [running]);
  return <p class="unseen" aria-live="polite">{said}</p>;
}

/** Stay at the end while answers grow, until the reader scrolls up. */
function useFollowing(log, chat) {
  const [following, setFollowing] = useState(true);
  const state = useRef({ following: true, seen: 0 });
  const toEnd = () => {
    state.current.following = true;
    setFollowing(true);
    log.current.scrollTop = log.current.scrollHeight;
  };
  useEffect(() => {
    const element = log.current;
    const scrolled = () => {
      const { scrollTop, scrollHeight, clientHeight } = element;
      const near = scrollHeight - scrollTop - clientHeight < NEAR_END;
      state.current.following = near || (state.current.following && scrollTop >= state.current.seen); // only a reader scrolls up
      state.current.seen = scrollTop;
      setFollowing(state.current.following);
    };
    element.addEventListener("scroll", scrolled, { passive: true });
    const grown = new ResizeObserver(() => { if (state.current.following) element.scrollTop = element.scrollHeight; });
    grown.observe(element);
    const watch = new MutationObserver(() => { if (element.firstElementChild) grown.observe(element.firstElementChild); });
    watch.observe(element, { childList: true });
    if (element.firstElementChild) grown.observe(element.firstElementChild);
    return () => { element.removeEventListener("scroll", scrolled); grown.disconnect(); watch.disconnect(); };
  }, []);
  const count = chat.tree.size;
  useLayoutEffect(() => { if (log.current) toEnd(); }, [count]); // a message more: show it
  return { following, toEnd };
}
