"""Emulate a long line: a switch between network interfaces that delays every frame.

    python benchmarks/delaying_hub.py --delay-ms 25 port0 port1       (root; until it is ended)
    python benchmarks/delaying_hub.py --plain eth0                    (let the kernel fill in checksums itself)

Kernels without netem cannot delay traffic over a veth pair. This process reads frames from one end of each pair and
writes them to the other pairs after the delay, in order. It learns addresses as any switch does. It does not limit the
bandwidth: `tc tbf` on the interfaces still caps it.
"""

from __future__ import annotations

import argparse
import array
import fcntl
import select
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Sequence

ETH_P_ALL = 0x0003
PACKET_OUTGOING = 4
SIOCETHTOOL = 0x8946
ETHTOOL_STXCSUM = 0x00000017
FRAME_BYTES = 1 << 16
BUFFER_BYTES = 1 << 25


def fill_in_checksums(interface: str) -> None:
    """Switch off the offloads that leave checksums and segmentation to a network card, since there is none."""
    command = array.array("I", [ETHTOOL_STXCSUM, 0])
    request = struct.pack("16sP", interface.encode(), command.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, SIOCETHTOOL, request)


def listening(interface: str) -> socket.socket:
    """Return a raw socket that receives all frames arriving at an interface."""
    found = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        found.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
    found.bind((interface, 0))
    found.setblocking(False)
    return found


def forward(interfaces: Sequence[str], delay_s: float) -> None:
    """Forward frames until the process is ended."""
    ports = [listening(interface) for interface in interfaces]
    known: dict[bytes, socket.socket] = {}
    held: deque[tuple[float, bytes, list[socket.socket]]] = deque()
    while True:
        timeout = max(0.0, held[0][0] - time.monotonic()) if held else None
        ready, _, _ = select.select(ports, [], [], timeout)
        for port in ready:
            for frame in _frames(port):
                known[frame[6:12]] = port
                others = [known[frame[:6]]] if frame[:6] in known else [each for each in ports if each is not port]
                held.append((time.monotonic() + delay_s, frame, others))
        while held and held[0][0] <= time.monotonic():
            _, frame, others = held.popleft()
            for port in others:
                try:
                    port.send(frame)
                # the interface's queue is full: drop the frame, as a real line would
                except (BlockingIOError, OSError):
                    continue


def _frames(port: socket.socket) -> list[bytes]:
    found = []
    while len(found) < 64:
        try:
            frame, where = port.recvfrom(FRAME_BYTES)
        except BlockingIOError:
            break
        if where[2] != PACKET_OUTGOING:
            found.append(frame)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("interfaces", nargs="+")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="in each direction")
    parser.add_argument("--plain", action="store_true")
    options = parser.parse_args()
    for interface in options.interfaces:
        fill_in_checksums(interface)
    if not options.plain:
        print("forwarding", flush=True)
        forward(options.interfaces, options.delay_ms / 1e3)
    return 0


if __name__ == "__main__":
    sys.exit(main())
