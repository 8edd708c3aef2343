"""What each URL answers. A function of the request, the status and the time, but for /metrics; no I/O.

| route | needs a token, if the server has any |
|---|---|
| /healthz (/health), /readyz | no, and any Host: probes call by address |
| /metrics | with --metrics-auth |
| / and the browser client's files | no |
| /v1/info | yes |
| POST /v1/tokens | yes, one that the server was started with |
| /v1/ws | at the upgrade or in `open.token`: see connection.py |
"""

import asyncio
from collections.abc import Callable
from typing import Any

from ramify.actors.gateway.port.access.auth import AccessTokens, HostPolicy, bearer_header
from ramify.actors.gateway.port.http import HttpRequest, Response, error_response, json_response
from ramify.actors.gateway.port.interfaces import GatewayMetrics, Status
from ramify.actors.gateway.port.static import StaticFiles
from ramify.protocol.codec import SUBPROTOCOLS
from ramify.protocol.credentials import Credential
from ramify.protocol.errors import Overloaded

WEBSOCKET_PATH = "/v1/ws"
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_METHODS = {"/v1/tokens": ("POST",)}  # all others: GET, HEAD
_SCRAPE_S = 0.1  # from one reading of the numbers to the next: it takes 2 ms, with replicas 14
_PREFLIGHT_S = 600  # that a browser remembers what a page of another site may ask


class SharedReadings:
    """Reads the numbers of /metrics once for all who wait, and not again for `_SCRAPE_S`.

    Nobody gets numbers older than the request.
    """

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics
        self._waiting: list[Callable[[bytes], object]] = []
        self._resting = False

    def ask(self, done: Callable[[bytes], object]) -> None:
        """Call `done` with the text, now or later."""
        self._waiting.append(done)
        if not self._resting:
            self._read()

    def _read(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._resting = bool(waiting)
        if not waiting:
            return
        asyncio.get_running_loop().call_later(_SCRAPE_S, self._read)

        def read(text: bytes) -> None:
            for done in waiting:
                done(text)

        self._metrics.scrape(read)


class Routes:
    """Answers every request that is not an accepted WebSocket handshake."""

    def __init__(
        self,
        tokens: AccessTokens,
        hosts: HostPolicy,
        status: Status,
        metrics: GatewayMetrics,
        static: StaticFiles,
        *,
        metrics_auth: bool = False,
        model: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        """`model`: what doors know of the model beside `status`, for /v1/info."""
        self._tokens = tokens
        self._hosts = hosts
        self._status = status
        self._readings = SharedReadings(metrics)
        self._static = static
        self._metrics_auth = metrics_auth
        self._model = model

    def respond(self, request: HttpRequest, now: float, send: Callable[[Response], object]) -> None:
        """Give `send` the response to a request that asks for no upgrade, now or later."""
        if request.path == "/metrics" and request.method in ("GET", "HEAD"):
            refusal = self.refuse(request)
            if refusal is None and self._metrics_auth and self._holder(request) is None:
                refusal = self.unauthorized()
            if refusal is not None:
                send(refusal)
            else:
                self._readings.ask(lambda text: send(Response(200, text, METRICS_TYPE)))
            return
        send(self.answer(request, now))

    def answer(self, request: HttpRequest, now: float) -> Response:
        """Make the response to a request that can be answered at once."""
        allowed = _METHODS.get(request.path, ("GET", "HEAD"))
        if request.method not in allowed:
            return error_response(
                405,
                "bad_request",
                f"{request.path} answers {' and '.join(allowed)}, not {request.method}",
                Allow=", ".join(allowed),
            )
        match request.path:
            case "/healthz" | "/health":
                return json_response(200, {"ok": True})
            case "/readyz":
                return self._ready()
        refusal = self.refuse(request)
        if refusal is not None:
            return refusal
        match request.path:
            case "/v1/info":
                return self._info(request)
            case "/v1/tokens":
                return self._mint(request, now)
            case path if path == WEBSOCKET_PATH:
                return error_response(
                    426,
                    "bad_request",
                    f"{WEBSOCKET_PATH} speaks WebSocket; subprotocols: {', '.join(SUBPROTOCOLS)}",
                    Upgrade="websocket",
                )
        found = self._static.get(request.path, request.headers.get("if-none-match"))
        return found or error_response(404, "bad_request", f"nothing is served at {request.path[:200]}")

    def refuse(self, request: HttpRequest) -> Response | None:
        """Make a 403 if the Host or the Origin is not allowed; for upgrades, too."""
        host, origin = request.headers.get("host"), request.headers.get("origin")
        if not self._hosts.host_allowed(host):
            return _forbidden("Host", host)
        if not self._hosts.origin_allowed(origin, host):
            return error_response(
                403,
                "forbidden",
                f"Origin {origin!r} is not on the allow-list: start with --allowed-origin",
            )
        return None

    def cors(self, request: HttpRequest) -> dict[str, str]:
        """Make the headers that let the asking page read the answer, if its site is allowed."""
        origin = request.headers.get("origin")
        if origin is None or self.refuse(request) is not None:
            return {}
        return {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Expose-Headers": "*",
            "Vary": "Origin",
        }

    def preflight(self, request: HttpRequest) -> Response | None:
        """Answer what a browser asks first for a page of another site, without a token.

        None: the request is something else.
        """
        asked = request.headers
        if (
            request.method != "OPTIONS"
            or not {"origin", "access-control-request-method"} <= asked.keys()
        ):
            return None
        refusal = self.refuse(request)
        if refusal is not None:
            return refusal
        headers = {
            "Access-Control-Allow-Methods": "GET, HEAD, POST, DELETE",
            "Access-Control-Allow-Headers": asked.get("access-control-request-headers", "*"),
            "Access-Control-Max-Age": str(_PREFLIGHT_S),
        }
        if "access-control-request-private-network" in asked:  # a public site asks a server at home
            headers["Access-Control-Allow-Private-Network"] = "true"
        return Response(200, content_type="text/plain; charset=utf-8", headers=headers)

    def upgrade(self, request: HttpRequest) -> Response | None:
        """Make the response that refuses a WebSocket here and now; None: it may be opened."""
        refusal = self.refuse(request)
        if refusal is None and not self._status.ready:
            return self.unavailable()
        return refusal

    def unavailable(self) -> Response:
        """Make a 503 that says what the engine is doing."""
        message = f"not ready: {self._status.phase}"
        return error_response(503, "overloaded", message, Retry_After="1")

    def unauthorized(self) -> Response:
        """Make a 401: a token was offered and is wrong, or none was and one is needed."""
        return error_response(
            401,
            "unauthorized",
            "the bearer token is missing, wrong, expired or used up",
            WWW_Authenticate="Bearer",
        )

    def _ready(self) -> Response:
        status, store = self._status, self._status.store
        fault = status.fault
        if fault is None and store.error is not None:  # who comes is refused, who is there is served
            fault = f"sessions cannot be saved: {store.error}"
        told: dict[str, object] = {"ready": status.ready and fault is None, "phase": status.phase}
        if fault is not None:
            told["fault"] = fault
        if store.damaged:
            told["damaged_sessions"] = store.damaged
        return json_response(200, told) if told["ready"] else json_response(503, told, Retry_After="1")

    def _holder(self, request: HttpRequest) -> Credential | None:
        """Find the credential of a request with a token that the server was configured with."""
        token = bearer_header(request.headers.get("authorization"))
        return self._tokens.configured(token) if token else None

    def _info(self, request: HttpRequest) -> Response:
        if self._tokens.required and self._holder(request) is None:
            return self.unauthorized()
        info = self._status.info()
        if isinstance(model := info.get("model"), dict):  # it is loaded
            info = info | {"model": model | self._model()}
        return json_response(200, info)

    def _mint(self, request: HttpRequest, now: float) -> Response:
        if not self._tokens.required:
            message = "this server was started without tokens: connect without one"
            return error_response(404, "unsupported", message)
        holder = self._holder(request)
        if holder is None:
            return self.unauthorized()
        try:
            minted = self._tokens.mint(holder, now)
        except Overloaded as error:
            return error_response(503, "overloaded", error.message, Retry_After="5")
        return json_response(201, {"token": minted, "expires_s": self._tokens.ttl_s})


def _forbidden(header: str, value: str | None) -> Response:
    flag = f"--allowed-{header.lower()}"
    return error_response(
        403, "forbidden", f"{header} {value!r} is not on the allow-list: {flag} adds it"
    )
