/**
 * The connection of one session: socket, timers, the browser's `online` and `visibilitychange`. A lost connection
 * is made again and the session resumed, unseen by those who wait for replies. This file does not know ops.
 */
import { RamifyError } from "./errors.js";
import type { Core } from "./core.js";
import type { Note, StateMessage } from "./protocol.js";
export type Status = "connecting" | "open" | "waiting" | "offline" | "draining" | "closed";
export type StatusChange = {
    status: "connecting" | "open" | "draining";
} | {
    status: "waiting" | "offline";
    retryAt: number;
    error: RamifyError;
} | {
    status: "closed";
    error: RamifyError;
};
export type Socket = {
    send: (data: string) => void;
    close: (code?: number) => void;
    onopen: ((event: any) => void) | null;
    onmessage: ((event: any) => void) | null;
    onclose: ((event: any) => void) | null;
    onerror: ((event: any) => void) | null;
};
export type SocketClass = new (url: string, protocols?: string[]) => any;
export type Token = string | (() => string | undefined | Promise<string | undefined>);
export type LinkOptions = {
    /**
     * a bearer token; a function is asked for a fresh one for each connection
     */
    token?: Token;
    /**
     * which connections are tried again: those that were there once
     * (default), also the first one, or none
     */
    retry?: "resume" | "always" | "never";
    /**
     * how long to try without a connection (10 minutes)
     */
    giveUpMs?: number;
    /**
     * open a new session where the server has forgotten this one (false: it ends)
     */
    renew?: boolean;
    /**
     * while the page is hidden, let text and ends of generations wait on the server
     */
    pauseHidden?: boolean;
    /**
     * default: the global one, which Node has from 22 on
     */
    WebSocket?: SocketClass;
};
export type Hooks = {
    status: (change: StatusChange) => void;
    attached: (state: StateMessage) => void;
    noted: (note: Note) => void;
    /**
     * the server has forgotten the session; a new one is being opened
     */
    lost: (error: RamifyError) => void;
};
/**
 * `connecting`, `open`, `waiting` (for the next try), `offline` (the browser says so), `draining` (the server is
 * about to stop), `closed` (for good).
 *
 * @typedef {"connecting" | "open" | "waiting" | "offline" | "draining" | "closed"} Status
 *
 * @typedef {{status: "connecting" | "open" | "draining"}
 *   | {status: "waiting" | "offline", retryAt: number, error: RamifyError}
 *   | {status: "closed", error: RamifyError}} StatusChange  `retryAt`: when the next try is, as `Date.now()` tells it
 *
 * @typedef {object} Socket  What is used of a WebSocket.
 * @property {(data: string) => void} send
 * @property {(code?: number) => void} close
 * @property {((event: any) => void) | null} onopen
 * @property {((event: any) => void) | null} onmessage
 * @property {((event: any) => void) | null} onclose
 * @property {((event: any) => void) | null} onerror
 *
 * @typedef {new (url: string, protocols?: string[]) => any} SocketClass
 * @typedef {string | (() => string | undefined | Promise<string | undefined>)} Token
 *
 * @typedef {object} LinkOptions
 * @property {Token} [token]  a bearer token; a function is asked for a fresh one for each connection
 * @property {"resume" | "always" | "never"} [retry]  which connections are tried again: those that were there once
 *   (default), also the first one, or none
 * @property {number} [giveUpMs]  how long to try without a connection (10 minutes)
 * @property {boolean} [renew]  open a new session where the server has forgotten this one (false: it ends)
 * @property {boolean} [pauseHidden]  while the page is hidden, let text and ends of generations wait on the server
 * @property {SocketClass} [WebSocket]  default: the global one, which Node has from 22 on
 *
 * @typedef {object} Hooks  Whom the link tells.
 * @property {(change: StatusChange) => void} status
 * @property {(state: StateMessage) => void} attached
 * @property {(note: Note) => void} noted
 * @property {(error: RamifyError) => void} lost  the server has forgotten the session; a new one is being opened
 */
/** See the module. */
export declare class Link {
    #private;
    /** @type {Status} */ status: Status;
    /** @param {string} url @param {Core} core @param {LinkOptions} options @param {Hooks} hooks */
    constructor(url: string, core: Core, options: LinkOptions, hooks: Hooks);
    /** Begin. */
    start(): void;
    /** Try again now instead of waiting. */
    reconnect(): void;
    /** Send what the core has to send, as far as the limits allow. */
    pump(): void;
    /** The session is over. @param {RamifyError} error */
    end(error: RamifyError): void;
}
/** `http(s)` becomes `ws(s)`; an address without a path gets `/v1/ws`. @param {string} address @returns {string} */
export declare function websocketUrl(address: string): string;
