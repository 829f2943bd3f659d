"""The live stream under load: nothing lost or doubled for those who read, whatever the others do.

`.venv/bin/python -m benchmarks.live_load` has 200 clients on one run that writes 1,000 events a second for 30 seconds.
After a third of them 20 clients stop reading and 50 vanish without a word. It prints how long an event took from its
write to the healthy clients, and the server's processor time and memory. Then it ends the server with SIGINT while
they are connected, and starts it on the same port. Writer and clients are processes of their own.

The exit status is 1 if a healthy client missed an event or got one twice, or if the server took 5 seconds to end.
"""

import argparse
import asyncio
import multiprocessing
import signal
import sys
import tempfile
import time
from array import array
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import numpy as np
import psutil
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed
from websockets.typing import Origin

from tests.conftest import Server, make_run, started, step, writing
from trainer_core.run_dir import RunDir

STOPPING, VANISHING = 20, 50
END_SECONDS = 5.0


class Head(msgspec.Struct):
    """What a client looks at of an event."""

    seq: int
    time: float


class Message(msgspec.Struct):
    """A message of the stream."""

    events: list[Head] = []


class Client:
    """A client that checks the number of each event, and when it came."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.seq = 0
        self.faults = 0
        self.delays = array("d")

    async def read(self, last: int) -> None:
        """Read up to the event `last`."""
        decoder = msgspec.json.Decoder(Message)
        while self.seq < last:
            message = decoder.decode(await self.socket.recv(decode=False))
            now = time.time()
            for event in message.events:
                self.faults += event.seq != self.seq + 1
                self.seq = event.seq
                self.delays.append(now - event.time)

    async def stop_reading(self, last: int) -> None:
        """Read up to `last`, then no more, with the connection open."""
        await self.read(last)

    async def vanish(self, last: int) -> None:
        """Read up to `last`, then be gone without a close."""
        await self.read(last)
        self.socket.transport.abort()


async def be_clients(address: str, run_id: str, count: int, last: int, report: Connection) -> None:
    """Connect, say so, read; tell how many events were wrong and how late each was; stay until the server ends."""
    live = f"{address.replace('http', 'ws')}/runs/{run_id}/live"
    opening = [connect(live, origin=Origin(address), max_size=None, proxy=None) for _ in range(count)]
    clients = [Client(socket) for socket in await asyncio.gather(*opening)]
    report.send("connected")
    healthy = clients[STOPPING + VANISHING :]
    tasks = [asyncio.ensure_future(client.stop_reading(last // 3)) for client in clients[:STOPPING]]
    tasks += [asyncio.ensure_future(client.vanish(last // 3)) for client in clients[STOPPING : STOPPING + VANISHING]]
    await asyncio.gather(*(client.read(last) for client in healthy))
    report.send(sum(client.faults for client in healthy))
    report.send_bytes(b"".join(client.delays.tobytes() for client in healthy))
    await asyncio.gather(*tasks)
    for client in healthy:
        with suppress(ConnectionClosed):
            while True:
                await client.socket.recv()


def run_clients(address: str, run_id: str, count: int, last: int, report: Connection) -> None:
    """`be_clients` as a process."""
    asyncio.run(be_clients(address, run_id, count, last, report))


def write_steadily(path: Path, rate: int, last: int) -> None:
    """`rate` events a second up to the seq `last`, as a trainer writes them."""
    with writing(RunDir(path)) as writer:
        writer.write(started(total_steps=last))
        began = time.monotonic()
        for number in range(1, last):
            writer.write(step(number))
            time.sleep(max(0.0, began + number / rate - time.monotonic()))


def measure(server: Server, count: int, rate: int, seconds: int) -> bool:
    """Run the load and print what it cost; returns whether every healthy client got everything."""
    run = make_run(server.home)
    last = rate * seconds
    spawn = multiprocessing.get_context("spawn")
    report, reported = spawn.Pipe(duplex=False)
    clients = spawn.Process(target=run_clients, args=(server.address, run.id, count, last, reported))
    writer = spawn.Process(target=write_steadily, args=(run.path, rate, last))
    clients.start()
    assert report.recv() == "connected"
    process = psutil.Process(server.process.pid)
    used, began, memory = process.cpu_times(), time.monotonic(), [process.memory_full_info().uss]
    writer.start()
    while not report.poll(0.5):
        memory.append(process.memory_full_info().uss)
    lasted = time.monotonic() - began
    cpu = sum(process.cpu_times()[:2]) - sum(used[:2])
    faults = report.recv()
    delays = 1000 * np.frombuffer(report.recv_bytes())
    expected = (count - STOPPING - VANISHING) * last
    print(f"{count} clients, {rate} events a second for {seconds} s; {STOPPING} stop reading, {VANISHING} vanish")
    print(f"events for the healthy: {expected:,} expected, {len(delays):,} came, {faults} out of order")
    print(
        f"from write to client: median {np.median(delays):.0f} ms, 99th percentile {np.percentile(delays, 99):.0f} ms,"
        f" worst {delays.max():.0f} ms"
    )
    print(f"server: {100 * cpu / lasted:.0f} % of a core")
    print(f"server's memory: {memory[0] / 1e6:.0f} MB at first, {max(memory) / 1e6:.0f} MB at most")

    began = time.monotonic()
    server.process.send_signal(signal.SIGINT)
    server.end(seconds=60)
    ended = time.monotonic() - began
    print(f"SIGINT with clients connected: the server ended after {ended:.1f} s")
    server.start()
    print("started again on the same port at once")
    for process_of_ours in (writer, clients):
        process_of_ours.join(30)
        process_of_ours.kill()
    return faults == 0 and len(delays) == expected and ended < END_SECONDS


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=200, help="of which 70 misbehave (%(default)s)")
    parser.add_argument("--rate", type=int, default=1000, help="events a second (%(default)s)")
    parser.add_argument("--seconds", type=int, default=30, help="how long (%(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder) / "home")
        try:
            return 0 if measure(server, options.clients, options.rate, options.seconds) else 1
        finally:
            server.stop()


if __name__ == "__main__":
    sys.exit(main())
