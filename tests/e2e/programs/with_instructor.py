"""instructor: an answer as an object, by schema and by a tool. Usage: URL MODEL"""

import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel, Field

url, model = sys.argv[1:]


class Person(BaseModel):
    """A person"""

    name: str = Field(max_length=12)
    age: int = Field(ge=1, le=99)


plain = OpenAI(base_url=url, api_key="none", max_retries=0)
for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS_STRICT):
    client = instructor.from_openai(plain, mode=mode)
    person = client.chat.completions.create(
        model=model,
        response_model=Person,
        messages=[{"role": "user", "content": "Somebody."}],
        max_retries=3 if mode is instructor.Mode.TOOLS_STRICT else 0,
    )
    assert isinstance(person, Person), person
print("ok")
