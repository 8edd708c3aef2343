/**
 * `ramify-client`: the JavaScript client of the `ramify.v1` protocol, for browsers and Node.
 *
 *     import { connect } from "ramify-client";
 *     const session = connect("ws://127.0.0.1:8765");
 *     for await (const { text } of session.main.chat("Tell me a story.")) console.log(text);
 *     await session.close();
 *
 * The reference is docs/javascript.md. The layers, from the bottom: `core.js` is the pure state machine (with
 * `stream.js`, `heads.js`, `frames.js`, `reconnect.js`), `link.js` its sockets and timers, `session.js`, `branch.js` and
 * `generation.js` are what programs hold.
 */
export { Branch } from "./branch.js";
export { BadConstraint, BadRequest, Cancelled, Conflict, ConnectionLost, DeadlineExceeded, Exists, Forbidden, Internal, LimitExceeded, NoBranch, NoSession, Overloaded, RamifyError, Replaced, SessionLost, Skipped, TooLong, Unauthorized, Unsupported, } from "./errors.js";
export { Generation } from "./generation.js";
export { connect, mintToken, Session } from "./session.js";
export type Options = import("./session.js").Options;
export type Abortable = import("./session.js").Abortable;
export type Shown = import("./session.js").Shown;
export type SessionEvent = import("./session.js").SessionEvent;
export type SessionEvents = import("./session.js").SessionEvents;
export type Result = import("./generation.js").Result;
export type TextDelta = import("./stream.js").TextDelta;
export type Status = import("./link.js").Status;
export type StatusChange = import("./link.js").StatusChange;
export type ChatMessage = import("./protocol.js").ChatMessage;
export type GenerateFields = import("./protocol.js").GenerateFields;
export type OpenFields = import("./protocol.js").OpenFields;
export type ErrorCode = import("./protocol.js").ErrorCode;
export type StateMessage = import("./protocol.js").StateMessage;
export type BranchState = import("./protocol.js").BranchState;
export type OkMessage = import("./protocol.js").OkMessage;
export type EventMessage = import("./protocol.js").EventMessage;
export type Note = import("./protocol.js").Note;
export type Usage = import("./protocol.js").Usage;
/** @typedef {import("./session.js").Options} Options */
/** @typedef {import("./session.js").Abortable} Abortable */
/** @typedef {import("./session.js").Shown} Shown */
/** @typedef {import("./session.js").SessionEvent} SessionEvent */
/** @typedef {import("./session.js").SessionEvents} SessionEvents */
/** @typedef {import("./generation.js").Result} Result */
/** @typedef {import("./stream.js").TextDelta} TextDelta */
/** @typedef {import("./link.js").Status} Status */
/** @typedef {import("./link.js").StatusChange} StatusChange */
/** @typedef {import("./protocol.js").ChatMessage} ChatMessage */
/** @typedef {import("./protocol.js").GenerateFields} GenerateFields */
/** @typedef {import("./protocol.js").OpenFields} OpenFields */
/** @typedef {import("./protocol.js").ErrorCode} ErrorCode */
/** @typedef {import("./protocol.js").StateMessage} StateMessage */
/** @typedef {import("./protocol.js").BranchState} BranchState */
/** @typedef {import("./protocol.js").OkMessage} OkMessage */
/** @typedef {import("./protocol.js").EventMessage} EventMessage */
/** @typedef {import("./protocol.js").Note} Note */
/** @typedef {import("./protocol.js").Usage} Usage */
