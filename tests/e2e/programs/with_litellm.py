"""litellm: a chat whole and streamed, a tool, a response, errors. Usage: URL MODEL"""

import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # nothing is fetched
import litellm

url, model = sys.argv[1:]
settings = {
    "model": f"openai/{model}",
    "api_base": url,
    "api_key": "none",
    "temperature": 0,
    "max_tokens": 60,
    "num_retries": 0,
}
hello = [{"role": "user", "content": "Hello."}]
whole = litellm.completion(**settings, messages=hello)
text = whole.choices[0].message.content
assert text
stream = litellm.completion(**settings, messages=hello, stream=True)
assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text
parameters = {"type": "object", "properties": {"expression": {"type": "string"}}}
function = {"name": "calculator", "description": "Work out a sum", "parameters": parameters}
called = litellm.completion(
    **settings,
    messages=[{"role": "user", "content": "What is 31 + 47?"}],
    tools=[{"type": "function", "function": function}],
)
assert called.choices[0].message.tool_calls[0].function.name == "calculator", called
try:
    litellm.completion(**settings, messages=[{"role": "user", "content": "x " * 90000}])
except litellm.ContextWindowExceededError:
    pass
else:
    raise AssertionError("too long a prompt went through")
print("ok")
