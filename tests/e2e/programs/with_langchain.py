"""LangChain's ChatOpenAI: a chat, a stream, a tool, an answer by schema. Usage: URL MODEL"""

import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

url, model = sys.argv[1:]


class Person(BaseModel):
    """A person"""

    name: str = Field(max_length=12)
    age: int = Field(ge=1, le=99)


@tool
def calculator(expression: str) -> str:
    """Work out a sum"""
    left, _, right = expression.split()
    return str(int(left) + int(right))


chat = ChatOpenAI(model=model, base_url=url, api_key="none", temperature=0, max_retries=0)
assert chat.invoke("Hello.").content
assert "".join(chunk.content for chunk in chat.stream("Hello.")) == chat.invoke("Hello.").content
calling = chat.bind_tools([calculator])
asked = calling.invoke("What is 31 + 47?")
(call,) = asked.tool_calls
assert call["name"] == "calculator", asked
result = calculator.invoke(call)
answer = calling.invoke([("user", "What is 31 + 47?"), asked, result])
assert "78" in answer.content, answer
found = chat.with_structured_output(Person).invoke("Somebody.")
assert isinstance(found, Person), found
over = ChatOpenAI(
    model=model, base_url=url, api_key="none", temperature=0, use_responses_api=True, max_retries=0
)
first = over.invoke("Hello.")
assert first.text
again = over.invoke("And?", previous_response_id=first.response_metadata["id"])
assert again.text
print("ok")
