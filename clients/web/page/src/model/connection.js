/** How the page connects: the server that gave it out, and the token that a person typed in, kept for the tab. */

import { signal } from "@preact/signals";
import { connect, mintToken } from "../../../lib/index.js";

const KEPT = "ramify chat token";

/** The answer of /v1/info; null before. */
export const server = signal(null);

let bearer = recall();

function recall() {
  try { return sessionStorage.getItem(KEPT) ?? ""; } catch { return ""; }
}

/** Whether a token was typed in. */
export const hasToken = () => Boolean(bearer);

export function setToken(text) {
  bearer = text;
  try { sessionStorage.setItem(KEPT, text); } catch { /* it is asked for again */ }
}

/** Arguments for `connect`. @returns {{url: string, token?: () => Promise<string | undefined>}} */
export function connection() {
  return { url: location.origin, ...(bearer && { token }) };
}

/** Single-use, so that the long-lived token stays out of URLs and frames. */
async function token() {
  try {
    return await mintToken(location.origin, bearer);
  } catch (error) {
    if (error.code === "unsupported") return undefined; // the server has no tokens
    throw error;
  }
}

/** End a chat's session on the server. @returns {Promise<boolean>} false: it could not be asked, and may still have it */
export async function endSession({ session, key, client }) {
  if (!session) return true;
  const { url, ...options } = connection();
  const last = connect(url, { ...options, session, key, client, retry: "never" });
  try {
    await last.ready;
    return await last.close();
  } catch (error) {
    return ["no_session", "forbidden", "bad_request"].includes(error.code); // trying again would change nothing
  }
}

/** Make a new session of a file that `export` gave. @param {Uint8Array<ArrayBuffer>} file @param {string} client */
export async function sessionOf(file, client) {
  const { url, ...options } = connection();
  const session = connect(url, { ...options, client, import: file, retry: "never" });
  try {
    const state = await (await session.ready).tree({ text: true });
    return { state, login: { session: session.id, key: session.key, server: session.state.server?.epoch } };
  } finally {
    await session.close({ keep: true });
  }
}

/** Headers of a request that needs the token. */
export const authorized = () => (bearer ? { Authorization: `Bearer ${bearer}` } : {});

/** What the server says of itself and its model (/v1/info). Null: no answer; `refused`: it wants a (better) token. */
export async function askServer() {
  const answer = await fetch("/v1/info", { headers: authorized() }).catch(() => null);
  if (answer?.status === 401) return { refused: true };
  return answer?.ok ? answer.json() : null;
}
