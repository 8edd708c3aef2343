/** The JavaScript client of `ramify.v1`: see `session.js` and docs/javascript.md. */

export { connect, mintToken, Session } from "./session.js";
export { Generation, RamifyError } from "./stream.js";
