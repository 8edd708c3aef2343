/** Pictures that are attached: brought to a size that a frame has room for, as the server takes them. */

import { toBase64 } from "../../../lib/base64.js";

export const MOST_PICTURES = 4; // of a message
const KEPT = ["image/png", "image/jpeg", "image/webp", "image/gif"]; // formats that go as they are, if they are small
const MOST_FILE = 64 << 20; // bytes that are decoded here
const MOST_SIDE = 1568; // pixels
const FRAME = 1 << 20; // bytes, where the server has not said
const SHARE = 0.7; // of a frame that all pictures of a message may fill, before base64
const SMALLER = 0.75; // of a side, where a picture is still too large
const QUALITY = 0.85;

/**
 * A picture as a file of a message. @param {File} source @param {number} [frame] bytes of the largest message
 * @returns {Promise<{name: string, picture: string, type: string}>} @throws {Error} what is no picture for this browser
 */
export async function pictureOf(source, frame = FRAME) {
  if (source.size > MOST_FILE) throw new RangeError(source.name);
  const most = (frame * SHARE * 3) / 4 / MOST_PICTURES;
  const bitmap = await createImageBitmap(source);
  try {
    const small = KEPT.includes(source.type) && source.size <= most && Math.max(bitmap.width, bitmap.height) <= MOST_SIDE;
    const made = small ? source : await smaller(bitmap, most);
    const bytes = new Uint8Array(await made.arrayBuffer());
    return { name: source.name || "picture", picture: toBase64(bytes), type: made.type };
  } finally {
    bitmap.close();
  }
}

/** A JPEG of at most so many bytes. */
async function smaller(bitmap, most) {
  let scale = Math.min(1, MOST_SIDE / Math.max(bitmap.width, bitmap.height));
  for (;;) {
    const canvas = new OffscreenCanvas(Math.max(1, Math.round(bitmap.width * scale)), Math.max(1, Math.round(bitmap.height * scale)));
    const context = canvas.getContext("2d");
    context.fillStyle = "#fff"; // what is see-through
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
    const made = await canvas.convertToBlob({ type: "image/jpeg", quality: QUALITY });
    if (made.size <= most || canvas.width * canvas.height === 1) return made;
    scale *= SMALLER;
  }
}

/** Where an `img` finds it. */
export const urlOf = ({ picture, type }) => `data:${type};base64,${picture}`;
