"""A service below a path, behind a proxy that takes the path off or does not."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class RootPath:
    """ASGI middleware: requests for ``/llm/v1/models`` and for ``/v1/models`` are the same below ``/llm``.

    Both reach the application as ASGI has it, with a ``path`` that begins with ``root_path``.
    """

    def __init__(self, app: ASGIApp, *, root_path: str) -> None:
        """``root_path`` : begins with a slash and does not end with one."""
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] == "http":
            path: str = scope["path"]
            if not path.startswith(f"{self._root_path}/"):
                path = self._root_path + path
            scope = {**scope, "path": path, "root_path": self._root_path}
        await self._app(scope, receive, send)


def path_below_root(scope: Scope) -> str:
    """The path that the router reads, in which no proxy's is left."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(f"{root}/") else path
