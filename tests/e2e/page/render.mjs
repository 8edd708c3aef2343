/** Answers as they are drawn: Markdown, formulas, code; hostile text; and never a long pause of the page. */

import assert from "node:assert/strict";
import { scene, soon, withoutLongTasks } from "./harness.mjs";

/** Draw a text at once, or in pieces of `piece` characters as it would stream; what it became. */
async function drawn(page, text, { piece = 0, every = 0 } = {}) {
  return page.evaluate(async ({ text: whole, piece: step, every: pause }) => {
    const { Answer } = await import("/markdown.js");
    document.querySelector("#drawn")?.remove();
    const host = document.createElement("div");
    host.id = "drawn";
    host.className = "text";
    document.querySelector(".log").replaceChildren(host);
    const answer = new Answer(host);
    for (let at = step; step && at < whole.length; at += step) {
      answer.show(whole.slice(0, at));
      await new Promise((resolve) => { setTimeout(resolve, pause); });
    }
    answer.show(whole, true);
    await answer.done;
    await new Promise((resolve) => { requestAnimationFrame(() => setTimeout(resolve, 60)); });
    return { html: host.innerHTML, text: host.textContent, nodes: host.querySelectorAll("*").length };
  }, { text, piece, every });
}

const SAMPLE = `# Title

Some *emphasis*, **strong**, ~~struck~~, \`code\`, a [link](https://example.org/a?b=c), and https://example.org.

1. first
   \`\`\`py
   def f(x):
       return x  # code in a list
   \`\`\`
2. second
   - nested

- [x] done
- [ ] to do

| left | right |
|:-----|------:|
| a    | 1     |
| b    | 2     |

> quoted

\`\`\`js
const answer = 42; // a block
\`\`\`

Inline $x^2 + y_1$ and a block:

$$\\int_0^1 \\frac{1}{1+x^2} dx = \\frac{\\pi}{4}$$

The end.
`;

scene("all of Markdown, formulas and code", async (page) => {
  const { html } = await drawn(page, SAMPLE);
  for (const part of ["<h1", "<em>", "<strong>", "<s>", "<table>", 'align="right"', "<blockquote", 'type="checkbox"', 'href="https://example.org/a?b=c"']) {
    assert.ok(html.includes(part), part);
  }
  await page.waitForFunction(() => document.querySelectorAll("#drawn math").length === 2);
  await page.waitForFunction(() => document.querySelector("#drawn li .hljs-keyword") && document.querySelector("#drawn > .code .hljs-keyword"));
  await soon(async () => assert.equal(await page.locator("#drawn .code").count(), 2));
  await soon(async () => assert.equal(await page.locator("#drawn a").first().getAttribute("rel"), "noopener noreferrer nofollow"));
  await page.context().grantPermissions(["clipboard-read", "clipboard-write"]);
  await page.locator("#drawn .code button").last().click();
  assert.equal(await page.evaluate(() => navigator.clipboard.readText()), "const answer = 42; // a block");
}, { alone: true });

scene("streamed in pieces of any size it becomes the same, and what is complete is not touched again", async (page) => {
  const shown = async (options) => {
    await drawn(page, SAMPLE, options);
    await page.waitForFunction(() => document.querySelectorAll("#drawn math").length === 2);
    return page.evaluate(() => document.querySelector("#drawn").textContent.replace(/\s+/g, " "));
  };
  const whole = await shown();
  for (const piece of [1, 7, 50]) assert.equal(await shown({ piece }), whole);
  const kept = await page.evaluate(async (text) => {
    const { Answer } = await import("/markdown.js");
    const host = document.createElement("div");
    document.querySelector(".log").append(host);
    const answer = new Answer(host);
    answer.show(text);
    const before = [...host.children].slice(0, 6);
    for (let i = 0; i < 200; i += 1) answer.show(`${text}${"More words. ".repeat(i)}`);
    return before.every((node, i) => host.children[i] === node);
  }, SAMPLE);
  assert.ok(kept);
});

const PROSE = Array.from({ length: 400 }, (_, i) => [`Once upon a time number ${i} there was a **fox`, "who** liked `code", "and` *tails*", "and [links](https://example.org), and snow."][i % 4]).join(" ");

scene("a long paragraph is settled in pieces where no markup is open, and becomes the same however it comes", async (page) => {
  const html = () => page.evaluate(() => document.querySelector("#drawn").innerHTML);
  const { text } = await drawn(page, PROSE);
  assert.equal(text.replace(/\s+/g, " "), PROSE.replace(/\*|`|\[|\]|\(.*?\)/g, ""));
  const counts = await page.evaluate(() => ["strong", "em", "a", "p"].map((tag) => document.querySelectorAll(`#drawn ${tag}`).length));
  assert.deepEqual(counts, [100, 100, 100, Math.ceil(PROSE.length / 9_000)]);
  const whole = await html();
  for (const piece of [97, 1_500, 5_000]) {
    await drawn(page, PROSE, { piece });
    assert.equal(await html(), whole);
  }
  const kept = await page.evaluate(async (prose) => {
    const { Answer } = await import("/markdown.js");
    const host = document.createElement("div");
    document.querySelector(".log").append(host);
    const answer = new Answer(host);
    answer.show(prose.slice(0, 5_000));
    await answer.done;
    const before = [...host.firstElementChild.childNodes].slice(0, 20);
    for (let i = 1; i < 50; i += 1) answer.show(prose.slice(0, 5_000 + i));
    await answer.done;
    return before.length === 20 && before.every((node, i) => host.firstElementChild.childNodes[i] === node);
  }, PROSE);
  assert.ok(kept);
});

const HOSTILE = [
  "<script>window.pwned = 1</script><img src=x onerror='window.pwned = 1'>",
  "[a](javascript:window.pwned=1) [b](data:text/html,<script>window.pwned=1</script>) [c](  JaVaScRiPt:window.pwned=1)",
  "![x](https://example.org/x.png) ![y](javascript:alert(1))",
  "<a href='javascript:window.pwned=1'>x</a> <iframe srcdoc='<script>parent.pwned=1</script>'></iframe>",
  "[x]: javascript:window.pwned=1\n\n[x]",
  "$\\href{javascript:window.pwned=1}{x}$ $\\htmlStyle{color:red}{x}$ $\\includegraphics{https://example.org/x.png}$",
  "```html\n<script>window.pwned = 1</script>\n```",
  "<svg><style><img src=x onerror=window.pwned=1></style></svg><math><mtext><script>window.pwned=1</script></mtext></math>",
  "\ud800 lone \udfff surrogates \u0000 and \u202e controls",
  "| a |\n|---|\n| <b onclick='window.pwned=1'>x</b> |",
  "`".repeat(5000), "[".repeat(5000), "*a ".repeat(5000), "> ".repeat(3000), "- ".repeat(2000), "$".repeat(5000), "![".repeat(2000), "a_b*".repeat(4000),
];

scene("hostile text is harmless", async (page) => {
  for (const text of HOSTILE) {
    const { html } = await drawn(page, text);
    assert.ok(!/<(script|img|iframe|style|svg|form|object)/i.test(html), text.slice(0, 80));
    assert.ok(!/<[^>]*\s(on\w+|style)=/i.test(html), text.slice(0, 80));
    assert.ok(!/href="\s*(javascript|data)/i.test(html), text.slice(0, 80));
  }
  await page.waitForTimeout(300);
  assert.equal(await page.evaluate(() => window.pwned), undefined);
});

const WIDE = `| a | b | c |\n|---|---|---|\n${Array.from({ length: 10_000 }, (_, i) => `| row ${i} | **x** | ${i} |`).join("\n")}\n\nAfter it.\n`;

scene("huge texts are drawn in parts", async (page) => {
  let line;
  let table;
  await withoutLongTasks(page, async () => {
    line = await drawn(page, "word ".repeat(200_000));
    table = await drawn(page, WIDE);
  });
  assert.ok(line.text.length > 999_990);
  assert.ok(table.nodes < 4_000, `${table.nodes} nodes`);
  assert.match(table.text, /After it\.$/);
  const rows = await page.locator("#drawn tbody tr").count();
  await page.getByRole("button", { name: /more rows/ }).click();
  await soon(async () => assert.ok(await page.locator("#drawn tbody tr").count() >= rows + 200));
  const code = await drawn(page, `\`\`\`py\n${"x = 1\n".repeat(50_000)}\`\`\`\n`);
  assert.equal(code.text.length, 300_000 + "pyCopy".length - 1);
}, { alone: true });

const STORY = Array.from({ length: 60 }, (_, i) => `## Part ${i}\n\n${"Once upon a time there was a **fox** who liked \`code\` and $x^2$. ".repeat(3)}\n\n- one\n- two\n\n\`\`\`py\nprint(${i})\n\`\`\`\n`).join("\n");

scene("a long answer streams without long tasks", async (page) => {
  for (const text of [STORY.slice(0, 12_000), PROSE]) await withoutLongTasks(page, () => drawn(page, text, { piece: 32, every: 4 }));
}, { alone: true });
