/**
 * Chats in IndexedDB: a record for each chat, and one for each message, so that a save writes what has changed.
 * Other tabs hear of changes. Where IndexedDB is not allowed, all is kept in memory, and `durable` is false.
 */

import { openDB } from "idb";

const NAME = "ramify";
const VERSION = 1;
const channel = typeof BroadcastChannel === "undefined" ? null : new BroadcastChannel("ramify chats");

/** @typedef {{id: string, title: string, named?: boolean, created: number, updated: number, client: string, session?: string, key?: string,
 *   op?: number, epoch: number, server?: string, names: number, chosen?: string, draft?: string, system?: string, tools?: object[], deleted?: number}} Record */

export class Store {
  #db;

  static async open() {
    const store = new Store();
    try {
      store.#db = await openDB(NAME, VERSION, {
        upgrade(db) {
          db.createObjectStore("chats", { keyPath: "id" });
          db.createObjectStore("messages", { keyPath: ["chat", "id"] });
        },
        blocking(_, __, event) { event.target.close(); },
      });
    } catch {
      store.#db = null; // private windows of some browsers
    }
    return store;
  }

  get durable() { return Boolean(this.#db); }

  /** @returns {Promise<Record[]>} the newest first */
  async chats() {
    const all = this.#db ? await this.#db.getAll("chats") : [];
    return all.sort((a, b) => b.updated - a.updated);
  }

  async chat(id) { return this.#db?.get("chats", id); }

  async messages(id) {
    const found = await this.#db?.getAll("messages", within(id)) ?? [];
    return found.map(({ chat, ...message }) => message);
  }

  /** Save a chat's record and those of its messages that have changed. */
  async save(record, messages = []) {
    if (!this.#db) return;
    const change = this.#db.transaction(["chats", "messages"], "readwrite");
    const writes = messages.map((each) => change.objectStore("messages").put({ ...each, chat: record.id }));
    await Promise.all([change.objectStore("chats").put({ ...record }), ...writes, change.done]);
    channel?.postMessage({ chat: record.id });
  }

  /** Forget a chat for good, but for what is `left` of its record: at once, so that no reload comes between. @param {Record} [left] */
  async remove(id, left) {
    if (!this.#db) return;
    const change = this.#db.transaction(["chats", "messages"], "readwrite");
    const chats = change.objectStore("chats");
    await Promise.all([left ? chats.put(left) : chats.delete(id), change.objectStore("messages").delete(within(id)), change.done]);
    channel?.postMessage({ chat: id });
  }

  /** Chats one of whose messages holds `words`. @returns {Promise<Set<string>>} */
  async search(words) {
    const found = new Set();
    const wanted = words.toLowerCase();
    let cursor = await this.#db?.transaction("messages").store.openCursor();
    while (cursor) {
      const { chat, text, gone } = cursor.value;
      if (!gone && !found.has(chat) && text.toLowerCase().includes(wanted)) found.add(chat);
      cursor = await cursor.continue();
    }
    return found;
  }

  /** Call `told(chat id)` when another tab has saved. */
  onchange(told) { channel?.addEventListener("message", ({ data }) => told(data.chat)); }
}

const within = (id) => IDBKeyRange.bound([id, ""], [id, "\uffff"]);
