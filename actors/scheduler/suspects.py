"""Which requests may be why executors die: suspects run alone, and one that dies alone is refused. Pure.

An executor that dies takes the KV along, and everything that ran goes on in the next one from its last
token. If steps were in flight, the requests that ran are suspects. A suspect that gets another token is
cleared. One with which two executors in a row died, without a token between, is tried *alone*: no other
request runs until it has a token more, or has ended. If an executor dies then, or twice when one request
ran alone, that request is the cause and is refused. No other request ever is.

This file does not know executors, nor how requests are run.
"""

from collections import deque

from ramify.actors.scheduler.request import Request, RequestState

TWICE = 2
MOST = 8  # executors that may die with a request at all, with tokens between


class Suspects:
    """The requests that must run alone, and the one that does."""

    def __init__(self) -> None:
        self.waiting: deque[Request] = deque()  # until no other runs; some may have ended
        self.tried: Request | None = None  # it runs alone, or waits for its pages

    def __bool__(self) -> bool:
        """Whether a request runs alone or must: no other request may begin."""
        self._forget_ended()
        return self.tried is not None or bool(self.waiting)

    def died(self, running: list[Request]) -> list[Request]:
        """Note that an executor died while `running` ran. Returns those to refuse.

        `take` hands out those of the others that must run alone.
        """
        refused = []
        for request in running:
            same = request.died_at == request.done
            request.deaths = request.deaths + 1 if same else 1
            request.died_at = request.done
            request.losses += 1
            if request.losses >= MOST or (len(running) == 1 and request.deaths >= TWICE):
                refused.append(request)
            elif request.deaths >= TWICE and request not in self.waiting:
                self.waiting.append(request)
        self.tried = None
        return refused

    def __contains__(self, request: Request) -> bool:
        return request in self.waiting

    def take(self) -> Request | None:
        """The next request that must run alone, or None while one does."""
        self._forget_ended()
        if self.tried is None and self.waiting:
            self.tried = self.waiting.popleft()
            return self.tried
        return None

    def cleared(self) -> Request | None:
        """The request that ran alone, once it has a token more. It is no longer a suspect."""
        tried = self.tried
        if tried is None or tried.run is None or not tried.run.out:
            return None
        self.tried = None
        return tried

    def _forget_ended(self) -> None:
        while self.waiting and self.waiting[0].state is RequestState.ENDED:
            self.waiting.popleft()
        if self.tried is not None and self.tried.state in (RequestState.ENDED, RequestState.WAITING):
            self.tried = None  # it has ended, or waits like the others
