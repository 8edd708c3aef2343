"""ollama, the package's own top-level way: a chat and a stream. Usage: URL MODEL"""

import sys

from ollama import Client

url, model = sys.argv[1:]
client = Client(host=url.removesuffix("/v1"))
hello = [{"role": "user", "content": "Hello."}]
whole = client.chat(model=model, messages=hello, options={"temperature": 0})
stream = client.chat(model=model, messages=hello, options={"temperature": 0}, stream=True)
assert "".join(part["message"]["content"] for part in stream) == whole["message"]["content"]
print("ok")
