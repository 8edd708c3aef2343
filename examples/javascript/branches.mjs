// Two endings of one story, written at once; then the likelier one goes on.
//
//     npm install PATH/clients/web         # in a folder of your own, PATH being this repository
//     node branches.mjs ws://127.0.0.1:8765
//
// Node 22 has WebSockets; before it, `node --experimental-websocket`, or connect(url, { WebSocket: (await import("ws")).WebSocket }).
import { connect } from "ramify-client";

const session = connect(process.argv[2] ?? "ws://127.0.0.1:8765");
const story = session.main;

for await (const { text, cut } of story.chat("Tell me a very short story.", { max_tokens: 60 })) {
  if (!cut) process.stdout.write(text);
}

// What is called in one turn of the event loop is one frame: a program that runs on the server.
const endings = session.frame(() => {
  story.fork(["happy", "sad"]);
  return ["happy", "sad"].map((mood) => session.branch(mood).chat(`Give it a ${mood} end.`, { max_tokens: 40, logprobs: 1 }));
});
for (const ending of endings) {
  const { text, usage } = await ending.result;
  console.log(`\n\n${ending.branch}: ${text}\n(${usage.cached} of ${usage.prompt} prompt tokens were cached)`);
}

const { result } = await story.prune(["happy", "sad"], { by: "logprob" });
console.log(`\nThe likelier one is ${result.kept[0].from}; the story has ${story.position} tokens now.`);
await session.close();
