"""Deliveries to sessions: new tokens and ends, one message per session.

Results are only noted when they arrive. They become messages after the next plan has left, so that the
fan-out is not on the device's critical path. This file makes no decisions.
"""

import msgspec

from ramify.actors.scheduler.request import Account, Reason, Request, RequestRun
from ramify.protocol.errors import Code
from ramify.protocol.messages import Progress, Tokens
from ramify.protocol.plan import StepResult

# of a result's tokens: whose they are, the first, the one behind the last, how many came as drafts
Segment = tuple[RequestRun, int, int, int]


class Deliveries:
    def __init__(self) -> None:
        # as `landed` got them, or as `landed_several` did
        self._landed: list[tuple[StepResult, list[RequestRun], list[int] | None, list[Segment]]] = []
        self._began: dict[int, int] = {}  # of requests with their first token: what was cached
        self._ended: list[tuple[Request, Reason, float, Code | None, str]] = []

    def landed(self, result: StepResult, bound: list[RequestRun], live: list[int] | None) -> None:
        """Note a step's tokens: one for each run of `bound`; only those at `live` count (None: all)."""
        self._landed.append((result, bound, live, []))

    def landed_several(self, result: StepResult, segments: list[Segment]) -> None:
        """Note a step's tokens where some runs have several. Only those in `segments` count."""
        self._landed.append((result, [], None, segments))

    def began(self, run: RequestRun) -> None:
        """Note that the next tokens of `run` are the first ones of its request."""
        self._began[run.ident] = run.request.cached

    def ended(
        self, request: Request, reason: Reason, now: float, error: Code | None, message: str
    ) -> None:
        """Note the end of `request`. It is delivered once the cache has heard of it."""
        self._ended.append((request, reason, now, error, message))

    def take(self, ends: bool) -> list[tuple[int, Tokens]]:
        """Messages by session. Without `ends`, ends stay here: the cache must hear of them first."""
        told: dict[int, Account] = {}
        for result, bound, live, segments in self._landed:
            self._progress(result, bound, live, told)
            if segments:
                self._segments(result, segments, told)
        self._landed.clear()
        if self._began:
            self._introduce(told)
        if ends and self._ended:
            for request, reason, now, error, message in self._ended:
                account = request.account
                if not account.closed:
                    account.finished.append(request.finish(reason, now, error, message))
                    told[account.session] = account
            self._ended.clear()
        messages = []
        for session, account in told.items():
            messages.append((session, Tokens(account.progress, account.finished)))
            account.progress, account.finished = [], []
        return messages

    def _introduce(self, told: dict[int, Account]) -> None:
        """Say with first tokens what was cached."""
        for account in told.values():
            for i, each in enumerate(account.progress):
                if (cached := self._began.pop(each.request, None)) is not None:
                    account.progress[i] = msgspec.structs.replace(each, cached=cached)
        self._began.clear()  # the others' sessions are gone

    def _progress(
        self,
        result: StepResult,
        bound: list[RequestRun],
        live: list[int] | None,
        told: dict[int, Account],
    ) -> None:
        raw, logprobs, forced = result.tokens, result.logprobs, result.forced
        for i in range(len(bound)) if live is None else live:
            run = bound[i]
            account = run.account
            progress = account.progress
            token = raw[4 * i : 4 * i + 4]
            if not progress and not account.closed:
                told[account.session] = account
            if logprobs and logprobs[i] is not None:
                progress.append(Progress(run.ident, token, [logprobs[i]], forced[i] if forced else 0))
            elif forced and forced[i]:
                progress.append(Progress(run.ident, token, forced=1))
            else:
                progress.append(Progress(run.ident, token))

    def _segments(self, result: StepResult, segments: list[Segment], told: dict[int, Account]) -> None:
        raw, logprobs, forced = result.tokens, result.logprobs, result.forced
        for run, first, end, accepted in segments:
            account = run.account
            progress = account.progress
            if not progress and not account.closed:
                told[account.session] = account
            tokens = raw[4 * first : 4 * end]
            scored = logprobs[first:end] if logprobs and logprobs[first] is not None else []
            progress.append(Progress(run.ident, tokens, scored, forced.count(1, first, end), accepted))
