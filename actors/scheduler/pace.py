"""How many prompt tokens a step may take beside decodes, so that it lasts no longer than it should.

Every stream waits for the step's end, so a step with prompts is a pause between two tokens of all
streams. `--itl-target-ms` says how long it may last. The duration of a step is learnt from results, as a
sum of three parts:

    seconds = w0 + w1 * decodes + w2 * prompt tokens

The weights come from recursive least squares that forget slowly (Plackett 1950), so they follow contexts
that grow. Directions that no step has informed for a while are kept, not forgotten. One slow step counts
as only somewhat slower than expected. Three such in a row mean that the machine has changed: all weights
are scaled alike. To learn their proportions anew from steps of almost one size would be to learn noise.

Steps of one size never tell what a token takes, so a weight that is far too great would stay: it makes
the steps small, and small steps all alike. So after some small steps a larger one is tried (`_PROBE`),
more rarely as more of them last as expected. Whatever was learnt, a step takes enough that the waiting
prompts are done in `SURE` steps, as far as steps of `SMALL` tokens can.

- Prompts never starve: a step may always last half as long again as its decodes alone.
- Where many tenants wait for first tokens, steps take more, to compute all of their prompts within
  `DRAIN` seconds if steps of `--mixed-tokens` can do that. Otherwise a burst would have late first
  tokens on a half idle machine. One tenant, or one long prompt, counts little, so that one tenant's
  flood does not lengthen the pauses of others.
- A step without decodes may last several targets, because no stream waits for it.
- At first few tokens are taken, then not many more than in any step seen: estimates far from all
  measurements are not trusted.
- On a CPU tokens take milliseconds, and the largest steps seconds. So a step for many tenants lasts at
  most `PATIENCE` targets there, or twice its decodes alone; new requests would wait for anything longer.
  A step without decodes may last until the fixed cost of a step (most of a target) is made good, but at
  most `ENOUGH` seconds. It begins with fewer tokens. A GPU must not: its small steps all last the same
  and teach nothing about tokens.
- A scored position costs more than another one, because it needs logits: it counts as the prompt tokens
  that could have been computed in that time (`ExecutorInfo.logits_cost`).
- A GPU pads a step to the next captured size, so such a size is chosen.

This file knows sizes and seconds, not prompts or rows.
"""

from bisect import bisect_right

from ramify.actors.scheduler.request import Request, RequestRun
from ramify.protocol.config import ScheduleConfig
from ramify.protocol.plan import ExecutorInfo

LEAST = 16  # tokens: smaller chunks cost a step's overhead for nothing
SMALL = 4 * LEAST  # tokens of a step that is tried where only fewer are allowed
SURE = 256  # steps
FIRST, FIRST_ON_CPU = 256, 64  # tokens before anything is known: 5 ms on a GPU, 0.1 s on a core
AIM = 0.9  # of the target: steps scatter about what is aimed at
PATIENCE = 3.0  # targets that a step without decodes may last while a prompt takes several
LONGEST = 12.0  # targets that it may last at all
WORTH = 12.0  # times a step's own cost that it may last in any case: more tokens save less than 1/12
ENOUGH = 0.4  # seconds: for that reason no step lasts longer
DRAIN = 0.5  # seconds
_OF_REQUEST, _OF_TENANT = 1024, 4096  # prompt tokens that count at most as waiting
_BEYOND = 1.25  # times the largest captured size: a graph of that is better than slightly more
_EACH = 8  # of so many steps of decodes alone one is learnt from: they are all alike
_KEPT = 0.97  # of what was known before a step: about 30 of them count
_STEPS = 8  # that the mean of what a step lasts is about
_UNSURE = 100.0  # variance of what is not known, in units where a step's own noise has 1
_CLIP = 0.5  # a step counts as at most so many times what was expected more, or less
_SCALED = 1.0  # the same, where only the machine's speed has changed
_PROBE = 16, 512  # small steps until a larger one is tried, at first and at most
_AS_EXPECTED = 0.75  # of what was expected: so long a larger step lasts that tells nothing new
_AT_ONCE = 4.0  # times that a token may turn out cheaper by one step
_UNITS = 1.0, 1 / 64, 1 / 512  # of the three sizes, so that each weighs about as much


class Pace:
    def __init__(self, info: ExecutorInfo, config: ScheduleConfig) -> None:
        self._on_cpu = info.device == "cpu"
        self._first = FIRST_ON_CPU if self._on_cpu else FIRST
        self._step = info.step_tokens
        self._most = min(config.mixed_tokens, info.step_tokens)
        self._target = AIM * config.itl_target_ms / 1e3
        self._sizes = info.extend_sizes
        self._logits_cost = info.logits_cost
        self._weights = [0.0, 0.0, 0.0]
        self._variance = _unsure(_UNSURE)
        self._skipped = 0  # steps of decodes alone since one was learnt from
        self.allowed = self._most  # prompt tokens, when last asked
        self._odd: list[float] = []  # steps in a row that were far from what was expected: times that
        self._small = 0  # steps of fewer than `SMALL` prompt tokens since a larger one
        self._size = 0  # tokens in the last one of those
        self._patience = _PROBE[0]  # of them until a larger one is tried
        self._known = 0  # most prompt tokens in a measured step beside decodes
        self._full = 0  # most in one without; on a CPU in any
        self.step_s = 0.0  # that a step lasts, a mean that forgets
        self.waiting = 0  # prompt tokens that lack, of each tenant `_OF_TENANT` at most

    def work(self, run: RequestRun, start: int, end: int) -> int:
        """Cost of positions [start, end) of a prompt, in prompt tokens."""
        targets = run.request.targets
        scored = targets.lines(start, end) if targets is not None else 0
        return end - start + int(self._logits_cost * scored)

    def forced(self, lines: int) -> int:
        """Cost of `lines` tokens that constraints force, in prompt tokens: each needs logits."""
        return lines + int(self._logits_cost * lines)

    def lacks(self, request: Request, tokens: int) -> None:
        """Note that `tokens` tokens of the prompt of `request` are not computed; 0: it has its first
        token.
        """
        if tokens > _OF_REQUEST:
            tokens = _OF_REQUEST
        tenant = request.account.tenant
        before = tenant.lacking
        tenant.lacking = after = before + tokens - request.lacking
        request.lacking = tokens
        most = _OF_TENANT
        self.waiting += (after if after < most else most) - (before if before < most else most)

    def learn(self, prompts: int, decodes: int, seconds: float) -> None:
        """Learn from a step of `prompts` prompt tokens and `decodes` decodes."""
        if not seconds or not prompts + decodes:
            return
        self.step_s += (seconds - self.step_s) / _STEPS if self.step_s else seconds
        if not prompts:
            self._skipped = (self._skipped + 1) % _EACH
            if self._skipped != 1:
                return
        if decodes:
            self._known = max(self._known, prompts)
        if not decodes or self._on_cpu:
            self._full = max(self._full, prompts)
        if decodes and prompts:
            self._probed(prompts, decodes, seconds)
        self._regress(prompts, decodes, seconds)

    def _regress(self, prompts: int, decodes: int, seconds: float) -> None:
        """Recursive least squares, in which earlier steps count less, and exceptions in part."""
        x = (1.0, decodes * _UNITS[1], prompts * _UNITS[2])
        w, variance = self._weights, self._variance
        expected = self.expected(prompts, decodes)
        error = seconds - expected
        spread = [row[0] + row[1] * x[1] + row[2] * x[2] for row in variance]
        scale = _KEPT + spread[0] + spread[1] * x[1] + spread[2] * x[2]
        if expected and scale < 1 + _KEPT:  # a step like those before
            most = _CLIP * expected
            if (self._odd or abs(error) > most) and self._changed(expected, seconds):
                return
            error = max(-most, min(error, most))
        self._weights = [max(0.0, w[i] + spread[i] * error / scale) for i in range(3)]
        keep = 1 / _KEPT if variance[0][0] + variance[1][1] + variance[2][2] < 3 * _UNSURE else 1.0
        self._variance = [
            [(variance[i][j] - spread[i] * spread[j] / scale) * keep for j in range(3)] for i in range(3)
        ]

    def _changed(self, expected: float, seconds: float) -> bool:
        """Whether the machine's speed has changed, and is learnt anew.

        One step that differs much from those before is an exception; three in a row are not.
        """
        far = abs(seconds - expected) > _CLIP * expected
        self._odd = [*self._odd, seconds / expected] if far else []
        if len(self._odd) < 3:
            return False
        times = sorted(self._odd)[1]
        self._weights = [times * weight for weight in self._weights]
        self._variance = _unsure(_SCALED)
        self._odd = []
        return True

    def expected(self, prompts: int, decodes: int) -> float:
        """Seconds that a step of so many prompt tokens and decodes should last, as far as was learnt."""
        base, decode, prompt = self._weights
        return base + decode * (decodes * _UNITS[1]) + prompt * (prompts * _UNITS[2])

    def rate(self, decodes: int) -> float:
        """Prompt tokens a second while prompts wait beside `decodes` decodes; 0.0: not known yet.

        Of a step at most twice as large as any seen: small steps do not tell what thousands take.
        """
        tokens = min(self.allowed if decodes else self._step, 2 * max(self._known, self._full))
        seconds = self.expected(tokens, decodes)
        return tokens / seconds if seconds else 0.0

    def beside(self, decodes: int) -> int:
        """Most prompt tokens in a step with `decodes` decodes."""
        if not self._target:
            return self._most
        alone = self.expected(0, decodes)
        allowed = max(self._within(max(self._target - alone, alone / 2)), self._draining(alone))
        allowed = max(allowed, min(SMALL, self.waiting // SURE))
        if self._small >= self._patience:
            allowed = max(allowed, SMALL)
        trusted = max(self._first, 2 * self._known if self._on_cpu else self._known + self._known // 2)
        self.allowed = self._fit(min(self._most, trusted, allowed))
        return self.allowed

    def _probed(self, prompts: int, decodes: int, seconds: float) -> None:
        """Learn what a token takes from a larger step that was short: from the line through it and the
        usual time of steps as small as the last ones.
        """
        if prompts < SMALL:
            self._small += prompts >= LEAST
            self._size = prompts
            return
        if self._small >= self._patience:
            slope = self._weights[2]
            small = self.expected(self._size, decodes)
            more = (prompts - self._size) * _UNITS[2]
            if seconds >= _AS_EXPECTED * (small + slope * more):
                self._patience = min(2 * self._patience, _PROBE[1])
            else:
                self._patience = _PROBE[0]
                less = max((seconds - small) / more, slope / _AT_ONCE)
                self._weights[0] += (slope - less) * self._size * _UNITS[2]
                self._weights[2] = less
        self._small = 0

    def _draining(self, alone: float) -> int:
        """Prompt tokens in each step that lasts `alone` without them, to have no prompt wait longer."""
        rate = self.waiting / DRAIN
        idle = 1 - rate * self._weights[2] * _UNITS[2]  # the part of the time that prompts leave
        most = self._most
        if self._on_cpu:
            most = min(most, self._within(max(PATIENCE * self._target - alone, alone)))
        return int(min(most, rate * alone / idle)) if idle > 0 else most

    def alone(self, long: bool) -> int:
        """Most prompt tokens in a step without decodes.

        `long`: a prompt needs several of the largest steps. It is computed in shorter ones, because new
        requests wait for the step's end.
        """
        if not self._target:
            return self._step
        patience = (PATIENCE if long else LONGEST) * self._target
        cost = self._weights[0]
        if self._on_cpu:
            allowed = self._within(max(patience, min(WORTH * cost, ENOUGH)) - cost)
            return max(LEAST, min(self._step, max(self._first, 2 * self._full), allowed))
        trusted = self._full + self._full // 2 if long else self._step
        allowed = self._within(patience - cost)
        return max(min(self._first, self._step), min(self._step, trusted, allowed))

    def _within(self, seconds: float) -> int:
        """Prompt tokens that take so long."""
        slope = self._weights[2] * _UNITS[2]
        return int(max(0.0, min(seconds / slope, self._step))) if slope > 0 else self._step

    def _fit(self, tokens: int) -> int:
        """The largest captured size that is not more, unless `tokens` are well beyond all of them."""
        if not self._sizes or tokens > _BEYOND * self._sizes[-1]:
            return max(LEAST, tokens)
        return max(LEAST, self._sizes[max(0, bisect_right(self._sizes, tokens) - 1)])


def _unsure(variance: float) -> list[list[float]]:
    """A covariance matrix of independent weights."""
    return [[variance * (i == j) for j in range(3)] for i in range(3)]
