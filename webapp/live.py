"""The live stream of a run: its event lines as they are on disk, and its state when that changes.

Each client has its own cursor into the file, so a reload, a second tab or a slow reader changes nothing for anyone
else, and nothing is kept in memory for any of them.
"""

import asyncio
import json
import time

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.websockets import WebSocket, WebSocketDisconnect

from trainer_core.events import EventReader
from webapp import runs
from webapp.api import after_parameter

POLL_SECONDS = 0.05
"""Between looks at the event file: half of it is the mean delay of an event."""
STATUS_SECONDS = 0.5
"""Between looks at the lock."""
SETTLE_SECONDS = 2.0
"""How long an ended run's state must stay the same before the stream ends: the exit status comes after the end."""
NO_SUCH_RUN, BAD_REQUEST = 4404, 4400


async def live(websocket: WebSocket) -> None:
    """Send every event after `after`, then each new one, until the run has ended or the client has gone."""
    await websocket.accept()
    try:
        run = runs.requested(websocket)
        reader = EventReader(run.events, after_parameter(websocket.query_params.get("after")))
    except HTTPException as error:
        await websocket.close(NO_SUCH_RUN if error.status_code == 404 else BAD_REQUEST, error.detail)
        return

    gone = asyncio.ensure_future(_until_gone(websocket))
    sent_state: tuple[object, ...] | None = None
    changed_at = looked_at = 0.0
    ended = False
    try:
        while not gone.done():
            message = []
            now = time.monotonic()
            if now - looked_at >= STATUS_SECONDS:
                looked_at = now
                if not run.config.is_file():
                    await websocket.close(NO_SUCH_RUN, "The run was deleted.")
                    return
                summary = await run_in_threadpool(run.summary)
                state = (summary.status, summary.message, summary.may_kill, summary.checkpoints)
                ended = not summary.active and summary.status != "queued"
                if state != sent_state:
                    sent_state, changed_at = state, now
                    message.append(f'"run":{json.dumps(runs.as_data(summary))}')
            # After the status, so that an ended run's last events are read before the stream ends.
            if lines := reader.read():
                message.insert(0, f'"events":[{",".join(lines)}]')
            if message:
                await websocket.send_text(f"{{{','.join(message)}}}")
            elif ended and now - changed_at > SETTLE_SECONDS:
                await websocket.close(1000)
                return
            await asyncio.wait([gone], timeout=0 if lines else POLL_SECONDS)
    except (WebSocketDisconnect, asyncio.CancelledError):
        pass  # the client has gone, or the server is ending and this client reads too slowly to be told
    finally:
        gone.cancel()


async def _until_gone(websocket: WebSocket) -> None:
    while (await websocket.receive())["type"] != "websocket.disconnect":
        pass
