"""How long a short prompt waits beside long ones on a slow machine, in simulated time."""

import random
from collections import deque

import pytest

from ramify.actors.scheduler.core import Scheduler
from ramify.protocol.config import ScheduleConfig
from ramify.protocol.messages import Granted, Settled, Submit
from ramify.protocol.plan import ExecutorInfo, StepResult, pack, unpack
from ramify.protocol.sampling import SamplingParams

PAGES = 1 << 20
GREEDY = SamplingParams(temperature=0.0)


class Server:
    """The scheduler with a cache that has room for all, and one core of a CPU as the executor."""

    def __init__(self, slower=1.0):
        info = ExecutorInfo(
            model="", architecture="", parameters=1, vocab_size=100, context=2048, page_size=1,
            pages=PAGES, max_rows=64, step_tokens=2048, device="cpu", dtype="", attention="",
            eos_token_ids=[], kv_bytes_per_token=1, load_seconds=0.0,
        )  # fmt: skip
        self.core = Scheduler(info, ScheduleConfig())
        self.slower = slower
        self.prompts = {}  # request: tokens
        self.now = 0.0
        self.plans = deque()
        self.ends = 0.0  # when the step that runs is done
        self.first = {}  # request: when its first token came
        self.finished = set()
        self.computed = 0

    def seconds(self, prompts, decodes):
        """Of a step: the bundled model on one thread."""
        return self.slower * (0.033 + 1.6e-3 * prompts + 2e-3 * decodes)

    def turn(self, *events):
        events = deque(events)
        while True:
            if events:
                self.core.handle(events.popleft(), self.now)
            while (plan := self.core.plan()) is not None:
                if not self.plans:
                    self.ends = self.now + self._lasts(plan)
                self.plans.append(plan)
            if (settle := self.core.settle(self.now)) is not None:
                events.append(self._settled(settle))
            for _, tokens in self.core.deliver():
                for progress in tokens.progress:
                    self.first.setdefault(progress.request, self.now)
                self.finished.update(each.request for each in tokens.finished)
            if not events:
                return

    def until(self, when):
        """Let the executor work until `when`."""
        while self.plans and self.ends <= when:
            self._step()
        self.now = when

    def _settled(self, settle):
        granted = []
        for acquire in settle.acquires:
            prompt = self.prompts.pop(acquire.request)
            pages = pack(range(prompt + acquire.extra))
            granted.append(Granted(acquire.request, 0, pack([1] * prompt), pages, b""))
        return Settled(granted, [], PAGES, 0, 0)

    def submit(self, session, number, prompt):
        ident = session << 32 | number
        self.prompts[ident] = prompt
        self.turn(Submit(ident, ident, prompt, 4, GREEDY))
        return ident

    def _lasts(self, plan):
        prompts = sum(len(extend.tokens) // 4 for extend in plan.extends)
        return self.seconds(prompts, len(plan.decodes) // 4)

    def _step(self):
        plan, self.now = self.plans.popleft(), self.ends
        lasted = self._lasts(plan)
        rows = [each.row for each in plan.extends if each.sample] + list(unpack(plan.decodes))
        work = sum(len(extend.tokens) // 4 for extend in plan.extends)
        self.computed += work
        if self.plans:
            self.ends = self.now + self._lasts(self.plans[0])
        tokens = pack([7] * len(rows))
        self.turn(
            StepResult(plan.step, pack(rows), tokens, work + len(plan.decodes) // 4, int(1e6 * lasted))
        )


def serve(server, sessions, seconds, shorts):
    """Four prompts of 1,900 tokens are always in work; short ones come one after the other.

    Returns how long each short one waited for its first token.
    """
    dice = random.Random(5)
    waits, count, running = [], 0, {}
    short, begun, next_short = None, 0.0, 3.0
    while server.now < seconds:
        for place in range(4):
            if place not in running or running[place] in server.finished:
                count += 1
                running[place] = server.submit(1 + place % sessions, count, 1900)
        if shorts and short is None and server.now >= next_short:
            count += 1
            short, begun = server.submit(1000 + count, count, 24), server.now
        if short in server.first:
            waits.append(server.first[short] - begun)
            short, next_short = None, server.now + dice.uniform(0.0, 0.3)
        # The next event: a step's end, or a tenant that comes in the middle of one.
        when = server.ends
        if shorts and short is None and server.now < next_short:
            when = min(when, next_short)
        server.until(when)
    return waits


@pytest.mark.parametrize("sessions", [1, 4])
@pytest.mark.parametrize("slower", [1.0, 3.0])
def test_a_short_prompt_waits_for_two_steps_of_bounded_length(sessions, slower):
    server = Server(slower)
    waits = sorted(serve(server, sessions, 120.0, shorts=True))
    assert len(waits) > 40
    step = max(0.4, 6 * 0.033 * slower)
    assert waits[-1] <= 2.2 * step
    assert waits[len(waits) // 2] <= 1.6 * step


def test_long_prompts_lose_little_by_it():
    """Against steps of full size, which share what a step costs among most tokens."""
    server = Server()
    serve(server, 1, 240.0, shorts=False)
    rate = server.computed / server.now
    best = 1900 / (server.seconds(1900, 0) + 4 * server.seconds(0, 1) / 4)
    assert rate > 0.88 * best
