"""The chat page's files and those of the JavaScript client, read once at start and served from memory.

A path is looked up among the files that were found, so no path can lead out of the folders.
"""

import hashlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path

from ramify.actors.gateway.port.http import Response

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".txt": "text/plain; charset=utf-8",
    ".woff2": "font/woff2",
}


class StaticFiles:
    """Files by URL path; `/` is `index.html`. Files of other types are not served.

    `folders`: where the files below a path are, `{"/": Path("page")}`.
    """

    def __init__(self, folders: Mapping[str, Path]) -> None:
        self._files: dict[str, Response] = {}
        self._tags: dict[str, str] = {}
        for place, root in folders.items():
            for file in sorted(root.rglob("*")):
                kind = _TYPES.get(file.suffix)
                if kind is not None and file.is_file():
                    self._add(place + file.relative_to(root).as_posix(), file.read_bytes(), kind)

    def get(self, path: str, if_none_match: str | None = None) -> Response | None:
        """Find the file at `path`; 304 if the browser has it already; None if there is none."""
        path = "/index.html" if path == "/" else path
        response = self._files.get(path)
        if response is not None and if_none_match == self._tags[path]:
            return Response(304, b"", response.content_type, response.headers)
        return response

    def _add(self, path: str, body: bytes, kind: str) -> None:
        tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
        self._tags[path] = tag
        # Pages of other origins may import the library; which origins may ask at all, `Routes` decides.
        headers = {"ETag": tag, "Cache-Control": "no-cache", "Access-Control-Allow-Origin": "*"}
        self._files[path] = Response(200, body, kind, headers)


def browser_files() -> dict[str, Path]:
    """Find the page, and the library at `/ramify/`, in `ramify.clients` without importing its code."""
    spec = importlib.util.find_spec("ramify.clients")
    for location in (spec.submodule_search_locations or []) if spec is not None else []:
        web = Path(location) / "web"
        if web.is_dir():
            return {"/": web / "site", "/ramify/": web / "lib"}
    return {}
