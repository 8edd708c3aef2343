/**
 * The client half of `ramify.v1`, without sockets or timers: server messages in, frames out.
 *
 * `link.js` feeds it what it reads and sends what `nextFrame` gives. One object lives as long as the session,
 * over as many connections as it takes. Ops get their ids when they are first sent, so ids rise in the order
 * of sending; an op without a terminal reply is sent again, same id, after every resume, and the server runs
 * it once (docs/protocol.md, rules 3 and 6). This file knows no time, no DOM, and nobody who waits.
 */
import { RamifyError } from "./errors.js";
import { Heads } from "./heads.js";
import { Stream, Ticket } from "./stream.js";
import type { Op, OpenFields, ServerMessage, StateMessage } from "./protocol.js";
export type NewOp = Omit<Op, "id"> & Record<string, unknown>;
export type Sendable = Ticket & {
    json: string;
};
/** @import { BranchState, DeltaMessage, DoneMessage, ErrorMessage, EventMessage, OkMessage, Op, OpenFields,
 *    ServerMessage, StateMessage } from "./protocol.js" */
/** @typedef {Omit<Op, "id"> & Record<string, unknown>} NewOp  An op whose id is given when it is sent. */
/** @typedef {Ticket & {json: string}} Sendable */
/** The state of one client in one session. */
export declare class Core {
    #private;
    opening: OpenFields & {
        client: string;
    };
    /** @type {string | undefined} */ session: string | undefined;
    /** @type {string | undefined} */ key: string | undefined;
    /** @type {string | undefined} */ viewKey: string | undefined;
    /** The last `state` that answered an `open`. @type {StateMessage | null} */ state: StateMessage | null;
    /** The server's limits, once it told them. @type {Record<string, number>} */ limits: Record<string, number>;
    heads: Heads;
    open: boolean;
    /** Why it is over. @type {RamifyError | null} */ error: RamifyError | null;
    /**
     * @param {OpenFields & {client: string}} opening  fields of `open` that stay the same
     * @param {{session?: string, key?: string}} [saved]  a session that exists
     * @param {string} [file]  a session that `export` wrote, in base64: the new session is made of it
     */
    constructor(opening: OpenFields & {
        client: string;
    }, { session, key }?: {
        session?: string;
        key?: string;
    }, file?: string);
    /** A connection was made: the message to send first. @returns {Record<string, unknown>} */
    connected(): Record<string, unknown>;
    /** The connection is gone. */
    disconnected(): void;
    /** A frame was too big for the path to the server: it fails, or it would loop for ever. @param {RamifyError} cause */
    dropBiggest(cause: RamifyError): void;
    /** The session is over here: every op without a reply fails. @param {RamifyError} error */
    end(error: RamifyError): void;
    /** The server does not know the session any more: start over with the next `connected`. @param {RamifyError} error */
    forget(error: RamifyError): void;
    /** A ticket for an op, not queued yet. Throws BadRequest for values that JSON cannot say. @param {NewOp} op
     *  @param {Ticket[]} frame  the tickets of its frame; it is added @returns {Sendable} */
    ticket(op: NewOp, frame: Ticket[]): Sendable;
    /** Queue a frame. @param {Sendable[]} frame @param {boolean} [whole]  it goes out in one piece, or not at all */
    submit(frame: Sendable[], whole?: boolean): void;
    /** Let the server deliver `branch` up to position `upto`; said again after a resume.
     *  @param {string} branch @param {number} upto */
    credit(branch: string, upto: number): void;
    /** What to say beside ops: credit. @returns {object[]} */
    takePosts(): object[];
    /**
     * The next frame to send now; null: there is none, or too many ops wait for a reply. At most
     * `limits.replies_kept` ops are under way: the server keeps that many replies, so after a resume none is
     * missing. A frame over the server's limits is sent in several, unless it is to stay `whole`.
     *
     * @returns {Sendable[] | null}
     */
    nextFrame(): Sendable[] | null;
    /**
     * Take ops back that were not sent; later ones of their frame that touch their branches are skipped, as the
     * server would. False: they were sent already.
     *
     * @param {Ticket[]} tickets @param {RamifyError} error
     */
    withdraw(tickets: Ticket[], error: RamifyError): boolean;
    /**
     * A frame from the server.
     * @param {ServerMessage | ServerMessage[]} frame
     * @returns {ServerMessage[]} what the shell has to act on: the state of an open, errors that answer no op, bye,
     *   pong, events, and deltas of generations that were not started here
     */
    receive(frame: ServerMessage | ServerMessage[]): ServerMessage[];
    /** Generations that have not ended, with those that this object did not start. */
    running(): {
        ticket: Ticket;
        stream: Stream;
    }[];
}
