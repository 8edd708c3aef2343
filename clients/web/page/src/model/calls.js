/** Calls of MCP servers' tools: allowed by a person, checked against the tool's schema, and bounded in number. */

import { PROMPTS } from "../strings.js";
import { check } from "./checker.js";
import { callTool } from "./mcp.js";

const MOST_ROUNDS = 8; // of calls that nobody looks at, behind a person's message

/** Whose tool a call is. @returns {{server: string, tool: string, parameters: object} | undefined} undefined: a person answers */
export const toolOf = (chat, { name }) => (Object.hasOwn(chat.record.mcp ?? {}, name) ? chat.record.mcp[name] : undefined);

/** Whether all calls of an answer may be made without asking: each tool was allowed in this chat, and they are not too many. */
export function allowed(chat, message) {
  const path = chat.tree.path();
  const rounds = path.slice(path.findLastIndex(({ role }) => role === "user")).filter(({ role }) => role === "tool").length;
  return !message.asked && rounds < MOST_ROUNDS && message.calls.every((call) => toolOf(chat, call) && chat.record.allowed?.includes(call.name));
}

/** Make a call. @returns {Promise<{text: string, failed?: string}>} `text`: for the model; `failed`: why the server could not be asked */
export async function made(chat, call) {
  const tool = toolOf(chat, call);
  const wrong = await wrongArguments(tool, call.arguments);
  if (wrong) return { text: PROMPTS.toolError(wrong) };
  try {
    return { text: await callTool(tool, valueOf(call.arguments)) };
  } catch (error) {
    return { text: "", failed: error.message };
  }
}

/** What is wrong with arguments, in words; "": nothing. */
async function wrongArguments({ parameters }, given) {
  let value;
  try { value = valueOf(given); } catch (error) { return error.message; }
  const { errors, unknown } = await check(parameters, value);
  return unknown ?? errors.map(({ at, text }) => `${at || "/"}: ${text}`).join("; ");
}

const valueOf = (given) => (typeof given === "string" ? JSON.parse(given || "{}") : given);
