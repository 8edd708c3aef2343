"""The browser client's files, read once at start and served from memory.

A path is looked up among the files that were found, so no path can lead out of the folder.
"""

import hashlib
import importlib.util
from pathlib import Path

from ramify.actors.gateway.http import Response

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
}


class StaticFiles:
    """Files by URL path; `/` is `index.html`. Files of other types are not served."""

    def __init__(self, root: Path | None) -> None:
        self._files: dict[str, Response] = {}
        self._tags: dict[str, str] = {}
        if root is None or not root.is_dir():
            return
        for file in sorted(root.rglob("*")):
            kind = _TYPES.get(file.suffix)
            if kind is not None and file.is_file():
                self._add("/" + file.relative_to(root).as_posix(), file.read_bytes(), kind)

    def get(self, path: str, if_none_match: str | None = None) -> Response | None:
        """The file at `path`; 304 if the browser has it already; None if there is none."""
        path = "/index.html" if path == "/" else path
        response = self._files.get(path)
        if response is not None and if_none_match == self._tags[path]:
            return Response(304, b"", response.content_type, response.headers)
        return response

    def _add(self, path: str, body: bytes, kind: str) -> None:
        tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
        self._tags[path] = tag
        self._files[path] = Response(200, body, kind, {"ETag": tag, "Cache-Control": "no-cache"})


def browser_client() -> Path | None:
    """The folder `web/` of the package `ramify.clients`, found without importing its code."""
    spec = importlib.util.find_spec("ramify.clients")
    for location in (spec.submodule_search_locations or []) if spec is not None else []:
        folder = Path(location) / "web"
        if folder.is_dir():
            return folder
    return None
