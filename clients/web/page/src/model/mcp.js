/**
 * MCP servers that the page's own server calls for it, at /v1/mcp/NAME: which tools they have, and calls of them.
 *
 * Streamable HTTP with the handshake of 2025-06-18, which later servers take as well. What a server says is bounded here
 * before it goes into a chat; bytes and time of an answer are bounded by our server.
 */

import { signal } from "@preact/signals";
import { PROMPTS } from "../strings.js";
import { authorized } from "./connection.js";

const VERSION = "2025-06-18";
const MOST_MS = 90_000; // our server gives up before
const MOST_TOOLS = 64; // of one server
const MOST_PAGES = 16; // of its list
const MOST_SCHEMA = 16_000; // characters; a tool with a longer one is left out
const MOST_ABOUT = 1_000;
const MOST_RESULT = 20_000;
const LONGEST_NAME = 64;

/**
 * What servers that were asked have. @typedef {{name: string, description: string, parameters: object}} Tool
 * @type {import("@preact/signals").Signal<{[server: string]: {tools?: Tool[], error?: string}}>}
 */
export const known = signal({});

/** @type {Map<string, McpServer>} */
const servers = new Map();

/** Ask servers for their tools, each once; one that failed is asked again. @param {string[]} names */
export function learn(names) {
  for (const name of names) {
    if (servers.has(name)) continue;
    const server = new McpServer(name);
    servers.set(name, server);
    const say = (found) => { known.value = { ...known.value, [name]: found }; };
    server.tools().then((tools) => say({ tools }), ({ message }) => { servers.delete(name); say({ error: message }); });
  }
}

/**
 * The tools of servers as a chat takes them, and whose each is.
 * @param {string[]} names @param {typeof known.value} from
 * @returns {{tools: object[], mcp: {[name: string]: {server: string, tool: string, parameters: object}}}}
 */
export function offer(names, from) {
  const mcp = {};
  const tools = [];
  for (const server of names) {
    for (const { name: tool, description, parameters } of from[server]?.tools ?? []) {
      const name = [tool, `${server}_${tool}`].map((each) => each.replace(/[^\w-]/g, "_").slice(0, LONGEST_NAME)).find((each) => !Object.hasOwn(mcp, each));
      if (!name) continue; // two tools of one name
      mcp[name] = { server, tool, parameters };
      tools.push({ type: "function", function: { name, description, parameters } });
    }
  }
  return { tools, mcp };
}

/** Call a tool. Rejects where the server cannot be asked. @returns {Promise<string>} what the model is told */
export async function callTool({ server, tool }, args) {
  learn([server]);
  const result = await servers.get(server).call(tool, args);
  const text = (Array.isArray(result.content) ? result.content : []).map((part) => (typeof part?.text === "string" ? part.text : PROMPTS.noText(part?.type))).join("\n")
    || (result.structuredContent === undefined ? "" : JSON.stringify(result.structuredContent));
  const cut = text.length > MOST_RESULT ? `${text.slice(0, MOST_RESULT)}\n${PROMPTS.cut(text.length - MOST_RESULT)}` : text;
  return result.isError ? PROMPTS.toolError(cut) : cut;
}

/** One server, with a session of this page's own where it has sessions. */
class McpServer {
  #name;
  #session = "";
  #version = VERSION;
  #opened = null;
  #last = 0;

  constructor(name) { this.#name = name; }

  /** @returns {Promise<Tool[]>} */
  async tools() {
    const found = [];
    let cursor;
    for (let i = 0; i < MOST_PAGES; i += 1) {
      const { tools, nextCursor } = await this.#ask("tools/list", cursor === undefined ? {} : { cursor });
      for (const { name, description, inputSchema } of Array.isArray(tools) ? tools : []) {
        if (typeof name !== "string" || JSON.stringify(inputSchema ?? {}).length > MOST_SCHEMA) continue;
        found.push({ name, description: String(description ?? "").slice(0, MOST_ABOUT), parameters: inputSchema ?? { type: "object", properties: {} } });
      }
      cursor = nextCursor;
      if (cursor === undefined || found.length >= MOST_TOOLS) break;
    }
    return found.slice(0, MOST_TOOLS);
  }

  call(name, args) { return this.#ask("tools/call", { name, arguments: args }); }

  async #ask(method, params) {
    const session = await (this.#opened ??= this.#open());
    try {
      return await this.#request(method, params);
    } catch (error) {
      if (error.status !== 404 || !session) throw error;
      this.#opened = null; // the server has forgotten the session: nothing was done
      await (this.#opened = this.#open());
      return this.#request(method, params);
    }
  }

  async #open() {
    try {
      this.#session = "";
      const { protocolVersion } = await this.#request("initialize", { protocolVersion: VERSION, capabilities: {}, clientInfo: { name: "ramify-page", version: "1" } });
      this.#version = protocolVersion ?? VERSION;
      await this.#post({ method: "notifications/initialized" });
      return this.#session;
    } catch (error) {
      this.#opened = null;
      throw error;
    }
  }

  async #request(method, params) {
    this.#last += 1;
    const id = this.#last;
    const answer = await this.#post({ id, method, params });
    this.#session = answer.headers.get("mcp-session-id") ?? this.#session;
    const said = messagesOf(await answer.text(), answer.headers.get("content-type") ?? "").find((each) => each?.id === id);
    if (!said?.result) throw new Error(said?.error?.message ?? `${method} ${answer.status}`);
    return said.result;
  }

  async #post(message) {
    const answer = await fetch(`/v1/mcp/${this.#name}`, {
      method: "POST", body: JSON.stringify({ jsonrpc: "2.0", ...message }), signal: AbortSignal.timeout(MOST_MS),
      headers: { ...authorized(), "content-type": "application/json", "mcp-protocol-version": this.#version, ...(this.#session && { "mcp-session-id": this.#session }) },
    });
    if (answer.ok) return answer;
    const { message: ours, error } = await answer.json().catch(() => ({}));
    throw Object.assign(new Error(ours ?? error?.message ?? `HTTP ${answer.status}`), { status: answer.status });
  }
}

/** The JSON-RPC messages of an answer: one, or those of server-sent events. @param {string} text @param {string} type */
export function messagesOf(text, type) {
  if (!type.startsWith("text/event-stream")) return [parsed(text)];
  return text.split(/\r?\n\r?\n/).map((event) => parsed(event.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5)).join("\n")));
}

function parsed(text) {
  try { return JSON.parse(text); } catch { return null; }
}
