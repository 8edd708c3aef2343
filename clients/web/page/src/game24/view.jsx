/** The page of the demo: the puzzle, what it costs, and the tree as it grows from left to right. */

import { useEffect, useState } from "preact/hooks";
import { connection } from "../model/connection.js";
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
        <h1>Tree of thought: the game of 24</h1>
        <a class="button small" href="./">Back to the chat</a>
      </header>
      <main>
        <form onSubmit={start}>
          <label>Four numbers
            <input list="puzzles" value={numbers} pattern="\s*\d{1,2}(\s+\d{1,2}){3}\s*" title="Four numbers with spaces between them" required onInput={(event) => setNumbers(event.target.value)} /></label>
          <datalist id="puzzles">{PUZZLES.map((each) => <option key={each} value={each} />)}</datalist>
          <label>Proposals a state<input type="number" min="2" max="12" value={width} onInput={(event) => setWidth(clamp(event, 2, 12))} /></label>
          <label>Kept a level<input type="number" min="1" max="4" value={keep} onInput={(event) => setKeep(clamp(event, 1, 4))} /></label>
          <button type="submit" class="primary">{running ? "Stop" : "Think"}</button>
        </form>
        {search ? <Figures search={search} /> : (
          <p class="soft intro">The model proposes steps, judges each on a branch of its own, and the server keeps the best: three levels, sent as one
            frame. Every branch streams at once over one socket, and what branches share is computed once. The small demonstration model cannot really
            calculate; watch the tree.</p>
        )}
        {search?.error && <p class="failed" role="alert">{search.error}</p>}
        {search && <div class="forest" tabIndex={0} role="region" aria-label="The tree"><Node search={search} /></div>}
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
    [`${search.ops}`, "ops, sent as one frame"],
    [`${all.length}`, "proposals"],
    [`${writing}`, "writing now"],
    [`${output}`, "tokens written"],
    [prompt ? `${Math.round((100 * cached) / prompt)} %` : "0 %", "of the prompts were cached"],
    [`${seconds.toFixed(1)} s`, { running: "so far", done: "in all", stopped: "until stopped", failed: "until it failed" }[search.status]],
  ];
  return (
    <>
      <dl class="facts">{facts.map(([value, label]) => <div key={label}><dd>{value}</dd><dt>{label}</dt></div>)}</dl>
      <p class={done ? "soft" : "unseen"} role="status">{done ? `The search is done. ${all.some(({ solves }) => solves) ? "A branch makes 24." : "No branch makes 24."}` : ""}</p>
    </>
  );
}

/** A thought and those that go on from it; without `thought`, the puzzle. */
function Node({ search, thought = null }) {
  search.version.value; // read, to be told of changes
  const children = thought ? thought.children : search.roots;
  return (
    <div class="node">
      {thought ? <Card search={search} thought={thought} /> : <div class="thought-card puzzle"><b>{search.numbers}</b><small>make 24</small></div>}
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
    <div class={`thought-card ${state}${thought.solves ? " solved" : ""}`} title={usage ? `${text}\n${usage.cached} of ${usage.prompt} prompt tokens cached, ${usage.output} written` : ""}>
      <span>{text || "…"}{state === "writing" && <span class="cursor" />}</span>
      {wrong && <small class="wrong">wrong</small>}
      {score !== null && <b aria-label={`Mark ${score} of 9`}>{score}</b>}
    </div>
  );
}
