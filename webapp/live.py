"""The live stream of a run: its event lines as they are on disk, and its state when that changes.

Each client has its own cursor and its own task, so that a slow one waits for itself alone, with no more kept for it
than a message and what the system buffers. One that was in step and then reads too slowly is given a snapshot, the
series that a page begins with, in place of what it missed. One that asks for old events gets them all, in order.
"""

import asyncio
import time
from collections.abc import Awaitable

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.websockets import WebSocket, WebSocketDisconnect

from trainer_core.event_reader import EventReader
from trainer_core.run_dir import RunDir
from webapp import runs
from webapp.api import after_parameter
from webapp.series import snapshot
from webapp.watch import Watch, events_message, watching

PING_SECONDS = 10.0
"""Between websocket pings, and how long one may go without an answer before the client counts as gone."""
HEARTBEAT_SECONDS = 10.0
"""After so long without a message an empty one is sent, as a page can't see pings; run_socket.js waits for 25 s."""
SLOW_SECONDS = 1.0
"""A client that lets a message wait for so long is slow."""
GONE_SECONDS = 20.0
"""A client that lets a message wait for so long is gone: pings wait behind the message, and end nothing."""
NO_SUCH_RUN, BAD_REQUEST = 4404, 4400


async def live(websocket: WebSocket) -> None:
    """Send every event after `after`, then each new one, until the run has ended or the client has gone."""
    await websocket.accept()
    try:
        run = await run_in_threadpool(runs.requested, websocket)
        after = after_parameter(websocket.query_params.get("after"))
    except HTTPException as error:
        await websocket.close(NO_SUCH_RUN if error.status_code == 404 else BAD_REQUEST, error.detail)
        return
    async with watching(websocket.app.state.watches, run) as (watch, waker):
        gone = asyncio.ensure_future(_until_gone(websocket))
        gone.add_done_callback(lambda _: waker.set())
        try:
            await _Client(websocket, run, watch, after).serve(waker, gone)
        except (WebSocketDisconnect, asyncio.CancelledError):
            pass  # the client has gone or doesn't read, or the server is ending
        finally:
            gone.cancel()


class _Client:
    def __init__(self, websocket: WebSocket, run: RunDir, watch: Watch, after: int) -> None:
        self._websocket = websocket
        self._run = run
        self._watch = watch
        self._seq = after
        """The last event that was sent."""
        self._state: str | None = None
        self._reader: EventReader | None = None
        """While it is behind the watch's tail."""
        self._is_in_step = False
        self._is_slow = False
        self._sent_at = time.monotonic()

    async def serve(self, waker: asyncio.Event, gone: "asyncio.Future[None]") -> None:
        """Send what is due until there is nothing more to come, or nobody to send it to."""
        while not gone.done():
            waker.clear()
            if message := await self._next_message():
                await self._send(message)
            elif self._watch.is_deleted:
                await self._unless_gone(self._websocket.close(NO_SUCH_RUN, "The run was deleted."))
                return
            elif self._watch.has_settled:
                await self._unless_gone(self._websocket.close(1000))
                return
            elif time.monotonic() - self._sent_at >= HEARTBEAT_SECONDS:
                await self._send("{}")
            elif self._watch.task.done():
                self._watch.task.result()  # raises what ended it
            else:
                await waker.wait()

    async def _next_message(self) -> str | None:
        watch = self._watch
        if self._state != watch.state:
            self._state = watch.state
            return self._state
        if self._state is None:  # nothing was looked at yet
            return None
        if watch.holds(self._seq):
            self._is_in_step, self._is_slow, self._reader = True, False, None
            if not (batch := watch.batch_after(self._seq)):
                return None
            message = batch.after(self._seq)
            self._seq = batch.last
            return message
        self._is_in_step = False
        try:
            if self._is_slow:
                body, self._seq = await run_in_threadpool(snapshot, self._run.events)
                return f'{{"snapshot":{body.decode()}}}'
            self._reader = self._reader or EventReader(self._run.events, self._seq)
            async with watch.catching_up:
                lines = await run_in_threadpool(self._reader.read)
        except OSError:  # just deleted, as the watch will see
            return None
        self._seq += len(lines)
        return events_message(lines) if lines else None

    async def _send(self, message: str) -> None:
        began = time.monotonic()
        await self._unless_gone(self._websocket.send_text(message))
        self._sent_at = time.monotonic()
        self._is_slow |= self._is_in_step and self._sent_at - began >= SLOW_SECONDS

    async def _unless_gone(self, sending: Awaitable[None]) -> None:
        """Await `sending`, or end this client's task where that takes too long."""
        task = asyncio.current_task()
        assert task
        giving_up = asyncio.get_running_loop().call_later(GONE_SECONDS, task.cancel)
        try:
            await sending
        finally:
            giving_up.cancel()


async def _until_gone(websocket: WebSocket) -> None:
    while (await websocket.receive())["type"] != "websocket.disconnect":
        pass
