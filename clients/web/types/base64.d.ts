/** Bytes as base64 and back: how a file travels in a message of JSON. Pure. */
/** @param {Uint8Array} bytes @returns {string} */
export declare function toBase64(bytes: Uint8Array): string;
/** What a server sent. Throws Internal. @param {unknown} text @returns {Uint8Array<ArrayBuffer>} */
export declare function fromBase64(text: unknown): Uint8Array<ArrayBuffer>;
