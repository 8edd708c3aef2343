"""The Vercel AI SDK's `WebSocketChatTransport` (`ai` v7) at /v1/ai: `useChat` needs no other server.

`requests.py` is what it sends, `chunks.py` makes UI message chunks of what a session says, `chats.py`
keeps answers for those who come back, `chat_run.py` is an answer under way, `ai_door.py` the socket.
"""
