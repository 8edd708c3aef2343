/** Bytes as base64 and back: how a file travels in a message of JSON. Pure. */

import { BadRequest, Internal } from "./errors.js";

const CHUNK = 1 << 13; // bytes: a call takes so many arguments everywhere

/** @param {Uint8Array} bytes @returns {string} */
export function toBase64(bytes) {
  if (!(bytes instanceof Uint8Array)) throw new BadRequest("a file is given as a Uint8Array");
  let text = "";
  for (let at = 0; at < bytes.length; at += CHUNK) text += String.fromCharCode(...bytes.subarray(at, at + CHUNK));
  return btoa(text);
}

/** What a server sent. Throws Internal. @param {unknown} text @returns {Uint8Array<ArrayBuffer>} */
export function fromBase64(text) {
  try {
    return Uint8Array.from(atob(/** @type {string} */ (text)), (char) => char.charCodeAt(0));
  } catch {
    throw new Internal("the server sent a file that is no base64");
  }
}
