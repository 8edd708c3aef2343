/** The page of the demo: the puzzle, what it costs, and the tree as it grows from left to right. */

import { useEffect, useState } from "preact/hooks";
import { connection } from "../model/connection.js";
import { t } from "../strings.js";
import { Search } from "./search.js";

const PUZZLES = ["4 5 6 10", "1 2 4 6", "3 3 8 8", "2 3 5 12", "1 5 5 5"];
const FOUR = /^\s*\d{1,2}(\s+\d{1,2}){3}\s*$/;

export function Game() {
  const [numbers, setNumbers] = useState(PUZZLES[0]);
  const [width, setWidth] = useState(5);
  const [keep, setKeep] = useState(2);
  const [search, setSearch] = useState(null);
  search?.version.value; // read, to be told of changes
  const running = search?.status === "running";
  const start = (event) => {
    event.preventDefault();
    if (running) return search.stop();
    if (FOUR.test(numbers)) setSearch(new Search(numbers.trim().replace(/\s+/g, " "), { width, keep, connection: connection() }));
    return undefined;
  };
  useEffect(() => () => search?.stop(), [search]);
  return (
    <div class="game">
      <header>
        <a href="./" class="brand"><img src="icon.svg" alt="" width="22" height="22" />Ramify</a>
        <h1>{t.gameTitle}</h1>
        <a class="button small" href="./">{t.backToChat}</a>
      </header>
      <main>
        <form onSubmit={start}>
          <label>{t.fourNumbers}
            <input list="puzzles" value={numbers} pattern="\s*\d{1,2}(\s+\d{1,2}){3}\s*" title={t.fourNumbersHint} required onInput={(event) => setNumbers(event.target.value)} /></label>
          <datalist id="puzzles">{PUZZLES.map((each) => <option key={each} value={each} />)}</datalist>
          <label>{t.proposals}<input type="number" min="2" max="12" value={width} onInput={(event) => setWidth(clamp(event, 2, 12))} /></label>
          <label>{t.keptALevel}<input type="number" min="1" max="4" value={keep} onInput={(event) => setKeep(clamp(event, 1, 4))} /></label>
          <button type="submit" class="primary">{running ? t.stop : t.think}</button>
        </form>
        {search ? <Figures search={search} /> : (
          <p class="soft intro">{t.gameAbout}</p>
        )}
        {search?.error && <p class="failed" role="alert">{search.error}</p>}
        {search && <div class="forest" tabIndex={0} role="region" aria-label={t.theTree}><Node search={search} /></div>}
      </main>
    </div>
  );
}

const clamp = (event, least, most) => Math.min(most, Math.max(least, Number(event.target.value) || least));

/** What the search has cost so far. */
function Figures({ search }) {
  search.version.value; // read, to be told of changes
  const [, tick] = useState(0);
  useEffect(() => {
    if (search.status !== "running") return undefined;
    const timer = setInterval(() => tick((n) => n + 1), 200);
    return () => clearInterval(timer);
  }, [search, search.status]);
  const all = search.thoughts;
  const writing = all.filter(({ state }) => state === "writing").length;
  const { prompt, cached, output } = search.total;
  const seconds = search.status === "running" ? (performance.now() - search.began) / 1000 : search.seconds;
  const done = search.status === "done";
  const facts = [
    [`${search.ops}`, t.factOps],
    [`${all.length}`, t.factProposals],
    [`${writing}`, t.factWriting],
    [`${output}`, t.factTokens],
    [prompt ? `${Math.round((100 * cached) / prompt)} %` : "0 %", t.factCached],
    [t.seconds(seconds), { running: t.soFar, done: t.inAll, stopped: t.untilStopped, failed: t.untilFailed }[search.status]],
  ];
  return (
    <>
      <dl class="facts">{facts.map(([value, label]) => <div key={label}><dd>{value}</dd><dt>{label}</dt></div>)}</dl>
      <p class="soft outcome" role="status">{done ? t.searchDone(all.some(({ solves }) => solves)) : ""}</p>
    </>
  );
}

/** A thought and those that go on from it; without `thought`, the puzzle. */
function Node({ search, thought = null }) {
  search.version.value; // read, to be told of changes
  const children = thought ? thought.children : search.roots;
  return (
    <div class="node">
      {thought ? <Card search={search} thought={thought} /> : <div class="thought-card puzzle"><b>{search.numbers}</b><small>{t.make24}</small></div>}
      {children.length > 0 && <ul>{children.map((each) => <li key={each.name} class={each.state}><Node search={search} thought={each} /></li>)}</ul>}
    </div>
  );
}

function Card({ search, thought }) {
  search.version.value; // read, to be told of changes
  thought.live.drawn.value; // read, to be told of more text
  const { state, score, usage, text } = thought;
  const wrong = state !== "writing" && thought.left === null;
  return (
    <div class={`thought-card ${state}${thought.solves ? " solved" : ""}`} title={usage ? t.thoughtCost(text, usage.cached, usage.prompt, usage.output) : ""}>
      <span>{text || "…"}{state === "writing" && <span class="cursor" />}</span>
      {wrong && <small class="wrong">{t.wrong}</small>}
      {score !== null && <b role="img" aria-label={t.markOf9(score)}>{score}</b>}
    </div>
  );
}
