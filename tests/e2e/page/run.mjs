/** Play scenes: `node run.mjs URL CHROMIUM FILE...`, the files without their ending. They share one browser. */

import { play } from "./harness.mjs";

for (const name of process.argv.slice(4)) await import(`./${name}.mjs`);
play();
