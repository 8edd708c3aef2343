"""Best of eight: parallel answers on one prefix, ranked by their mean log-probability."""

import argparse
import asyncio

import ramify


async def main(url: str, question: str) -> None:
    async with ramify.connect(url) as session:
        await session.main.append(messages=[{"role": "user", "content": question}])
        names = [f"try-{i}" for i in range(8)]
        answers = await asyncio.gather(
            *session.main.generate(n=8, names=names, max_tokens=60, temperature=0.9, seed=7, logprobs=1)
        )
        for answer in sorted(answers, key=lambda answer: answer.mean_logprob or 0.0, reverse=True):
            print(f"{answer.mean_logprob:7.3f}  {answer.branch}: {answer.text!r}")
        computed = sum(answer.usage.computed for answer in answers)
        prompts = sum(answer.usage.prompt for answer in answers)
        print(f"computed {computed} prompt tokens for eight answers; a stateless server: {prompts}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", nargs="?", default="What is a good name for a small boat?")
    parser.add_argument("--url", default="ws://127.0.0.1:8765/v1/ws")
    options = parser.parse_args()
    try:
        asyncio.run(main(options.url, options.question))
    except ramify.ConnectionLost as lost:
        raise SystemExit(str(lost)) from None
