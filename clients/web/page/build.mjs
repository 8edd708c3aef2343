/**
 * Build the page: `src/` to `../site`, which is committed, goes into the wheel, and is what servers give out at `/`.
 * `--check` builds into memory and compares: exit code 1 where `../site` is not what the sources make.
 */

import { createHash } from "node:crypto";
import { mkdir, readFile, readdir, rm, writeFile } from "node:fs/promises";
import { basename, join } from "node:path";
import { fileURLToPath } from "node:url";
import * as esbuild from "esbuild";
import { wrongWords } from "./words.mjs";

const HERE = fileURLToPath(new URL(".", import.meta.url));
const SITE = join(HERE, "../site");
const MOST_BYTES = 300_000; // of a built file
const COPIED = ["index.html", "game24.html", "manifest.json", "icon.svg", "icon-192.png", "icon-512.png", "icon-maskable.png", "icon-touch.png"];

/** What the page loads; what only some answers need (highlighting, formulas) comes in chunks of its own. */
const page = {
  absWorkingDir: HERE,
  entryPoints: { chat: "src/chat.jsx", game24: "src/game24.jsx", style: "src/chat.css", markdown: "src/render/answer.js", validate: "src/validate.js" },
  outdir: SITE,
  bundle: true,
  splitting: true,
  minify: true,
  format: "esm",
  target: ["chrome123", "firefox121", "safari17.5"],
  jsx: "automatic",
  jsxImportSource: "preact",
  chunkNames: "[name]-[hash]",
  charset: "utf8",
  legalComments: "none",
  preserveSymlinks: true, // where packages really lie must not show in the names of chunks
  write: false,
  logLevel: "warning",
};

async function built() {
  const words = await wrongWords(join(HERE, "src"));
  if (words.length) throw new Error(`what people read is in src/strings.js, in each language:\n  ${words.join("\n  ")}`);
  const files = new Map();
  for (const { path, contents } of (await esbuild.build(page)).outputFiles) files.set(basename(path), Buffer.from(contents));
  for (const name of COPIED) files.set(name, await readFile(join(HERE, "src", name)));
  files.set("sw.js", await worker(files));
  files.set("LICENSES.txt", Buffer.from(await licenses()));
  for (const [name, { length }] of files) {
    if (length > MOST_BYTES) throw new Error(`${name} has ${length} bytes; ${MOST_BYTES} are allowed`);
  }
  return files;
}

/** The service worker, which knows the other files: it differs where any of them does. */
async function worker(files) {
  const version = createHash("sha256");
  for (const [name, contents] of [...files].sort(([a], [b]) => (a < b ? -1 : 1))) version.update(`${name} ${contents.length}\n`).update(contents);
  const paths = [...files.keys()].sort().map((name) => `/${name === "index.html" ? "" : name}`);
  const define = { FILES: JSON.stringify(paths), VERSION: JSON.stringify(version.digest("hex").slice(0, 16)) };
  const { code } = await esbuild.transform(await readFile(join(HERE, "src/sw.js"), "utf8"), { define, minify: true, target: page.target });
  return Buffer.from(code);
}

/** The licenses of what is bundled, as their packages have them. */
async function licenses() {
  const { dependencies } = JSON.parse(await readFile(join(HERE, "package.json"), "utf8"));
  const texts = [];
  const seen = new Set();
  const add = async (name) => {
    if (seen.has(name)) return;
    seen.add(name);
    const folder = join(HERE, "node_modules", name);
    const about = JSON.parse(await readFile(join(folder, "package.json"), "utf8"));
    const file = (await readdir(folder)).sort().find((each) => /^licen[cs]e/i.test(each));
    const text = file ? await readFile(join(folder, file), "utf8") : `License: ${about.license}`;
    texts.push(`${name} ${about.version}\n\n${text.trim()}\n`);
    for (const needed of Object.keys(about.dependencies ?? {}).sort()) if (!needed.startsWith("@types/")) await add(needed);
  };
  for (const name of Object.keys(dependencies).sort()) await add(name);
  return texts.join(`\n${"-".repeat(80)}\n\n`);
}

const files = await built();
if (process.argv.includes("--check")) {
  const there = new Set(await readdir(SITE));
  const wrong = [...files].filter(([name]) => !there.has(name)).map(([name]) => `${name} is missing`);
  for (const name of there) {
    if (!files.has(name)) wrong.push(`${name} is not built any more`);
    else if (!files.get(name).equals(await readFile(join(SITE, name)))) wrong.push(`${name} differs`);
  }
  if (wrong.length) {
    console.error(`clients/web/site is not what its sources make (npm run build, and commit it):\n  ${wrong.join("\n  ")}`);
    process.exit(1);
  }
} else {
  await rm(SITE, { recursive: true, force: true });
  await mkdir(SITE, { recursive: true });
  for (const [name, contents] of files) await writeFile(join(SITE, name), contents);
  for (const [name, { length }] of [...files].sort()) console.log(`${String(length).padStart(8)}  ${name}`);
}
