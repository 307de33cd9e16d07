"""examples/asgi.py for servers to import; it reports resources left open at the end of its lifespan."""

import os
import sys
from pathlib import Path

from starlette.types import Receive, Scope, Send

from aioverbs._core.handles import handles

sys.path.append(str(Path(__file__).parents[2] / "examples"))

from asgi import app as served


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    await served(scope, receive, send)
    if scope["type"] == "lifespan":
        print(f"{os.getpid()} left {handles.open_handles()}", flush=True)
