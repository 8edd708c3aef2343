"""LlamaIndex's OpenAILike: a chat, a stream, and its structured mode. Usage: URL MODEL"""

import sys

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

url, model = sys.argv[1:]
HELLO = [ChatMessage(role="user", content="Hello.")]


class Person(BaseModel):
    """A person"""

    name: str = Field(max_length=12)
    age: int = Field(ge=1, le=99)


chat = OpenAILike(
    model=model,
    api_base=url,
    api_key="none",
    is_chat_model=True,
    is_function_calling_model=True,
    temperature=0,
    max_tokens=80,
    max_retries=0,
)
answer = chat.chat(HELLO).message.content
assert answer
assert "".join(chunk.delta or "" for chunk in chat.stream_chat(HELLO)) == answer
made = chat.structured_predict(Person, PromptTemplate("Invent a person called {name}."), name="Ann")
assert isinstance(made, Person)
assert isinstance(chat.as_structured_llm(Person).complete("Invent a person.").raw, Person)
print("ok")
