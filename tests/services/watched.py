"""examples/asgi.py, which says what it leaves when its lifespan is over: for servers to import."""

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
