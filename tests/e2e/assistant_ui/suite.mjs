/**
 * assistant-ui's runtime in React, in a DOM without a browser, over both transports of the AI SDK.
 * Prints what happened; ../test_assistant_ui.py knows what should.
 *
 *     node suite.mjs ws://HOST:PORT websocket|ramify
 */

import { Window } from "happy-dom";

const window = new Window({ url: "http://localhost/" });
const { WebSocket } = globalThis; // Node's own: happy-dom's is a client of `ws`
for (const name of ["window", "document", "HTMLElement", "HTMLIFrameElement", "Element", "Node", "MutationObserver", "requestAnimationFrame", "cancelAnimationFrame", "navigator"]) {
  Object.defineProperty(globalThis, name, { value: name === "window" ? window : window[name], configurable: true, writable: true });
}
globalThis.WebSocket = WebSocket;

const { createElement, useEffect } = await import("react");
const { createRoot } = await import("react-dom/client");
const { AssistantRuntimeProvider } = await import("@assistant-ui/react");
const { useChatRuntime } = await import("@assistant-ui/react-ai-sdk");
const { WebSocketChatTransport } = await import("ai");
const { RamifyChatTransport } = await import("../../../clients/web/lib/ai.js");

const [address, way] = process.argv.slice(2);
const transport = way === "websocket"
  ? new WebSocketChatTransport({ url: `${address}/v1/ai`, body: { temperature: 0, maxOutputTokens: 8 } })
  : new RamifyChatTransport({ url: address, generate: { temperature: 0, max_tokens: 8 } });

let runtime;
function App() {
  const made = useChatRuntime({ transport });
  useEffect(() => { runtime = made; }, [made]);
  return createElement(AssistantRuntimeProvider, { runtime: made });
}

const root = createRoot(window.document.body.appendChild(window.document.createElement("div")));
root.render(createElement(App));
const until = async (condition, what) => {
  for (let i = 0; !condition(); i += 1) {
    if (i > 2000) throw new Error(`never: ${what}: ${JSON.stringify(shown())}`);
    await new Promise((resolve) => setTimeout(resolve, 5));
  }
};
await until(() => runtime?.thread, "a runtime");
const { thread } = runtime;
const text = ({ content }) => content.filter(({ type }) => type === "text").map((part) => part.text).join("");
const shown = () => thread?.getState().messages.map((message) => {
  const { branchNumber, branchCount } = thread.getMessageById(message.id).getState();
  return { role: message.role, text: text(message), status: message.status?.type, branch: [branchNumber, branchCount] };
});
const answered = (count) => until(() => {
  const { messages, isRunning } = thread.getState();
  return !isRunning && messages.length === count && messages.at(-1).status?.type === "complete" && text(messages.at(-1));
}, `${count} messages`);

const out = {};
thread.append("Hello.");
await answered(2);
out.first = shown();
thread.append("And then?");
await answered(4);
out.second = shown();

const [question, answer] = thread.getState().messages;
thread.append({ parentId: null, sourceId: question.id, role: "user", content: [{ type: "text", text: "Something else." }] });
await until(() => shown()[0]?.text === "Something else.", "the edit");
await answered(2);
out.edited = shown();

thread.getMessageById(thread.getState().messages[0].id).switchToBranch({ position: "previous" });
await until(() => thread.getState().messages[1]?.id === answer.id, "the first branch");
out.back = shown();
thread.append("And then?");
await until(() => thread.getState().messages.length >= 4, "more");
await until(() => !thread.getState().isRunning, "the end");
out.further = shown();

if (transport.session) {
  const { branches } = await transport.session.tree();
  out.branches = branches.map(({ branch, parent }) => ({ branch, parent }));
}
root.unmount();
await transport.close();
process.stdout.write(JSON.stringify(out));
setTimeout(() => process.exit(0), 50); // happy-dom keeps timers
