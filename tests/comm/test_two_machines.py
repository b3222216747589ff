"""Tests of the how-to for two machines, followed literally in two network namespaces."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runs import WIDE, records, tiny_recipe, write_recipe

ROOT = Path(__file__).resolve().parents[2]
RATE_MBIT = 100

pytestmark = pytest.mark.dist


GUIDE = ROOT / "docs" / "guides" / "several-machines.md"
SNIFF = """
import socket, sys
packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0800))  # IPv4
packets.bind(("eth0", 0))
packets.settimeout(1.0)
found, ports = {}, set()
print("ready", flush=True)
while not sys.stdin.closed:
    try:
        packet = packets.recv(65536)[14:]
    except TimeoutError:
        import select
        if select.select([sys.stdin], [], [], 0)[0]:
            break
        continue
    start = 4 * (packet[0] & 15)
    ports = sorted(int.from_bytes(packet[start + at : start + at + 2], "big") for at in (0, 2))
    found[packet[9], 51820 in ports] = found.get((packet[9], 51820 in ports), 0) + len(packet)
print(found)
"""
"""Program that prints the bytes on eth0 by protocol (17 is UDP) and whether they are of WireGuard's port."""


def commands() -> list[str]:
    """Return the commands of the how-to for the first and the second machine."""
    text = GUIDE.read_text(encoding="utf-8")
    how_to = text[text.index("## Two machines over the internet") :]
    return [line.strip() for line in how_to.splitlines() if line.strip().startswith("torchrun --nnodes 2 ")]


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import network

    reason = network.why_not()
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setattr(network, "NETWORK", re.search(r"--master-addr (\S+)\.1 ", commands()[0])[1])
    with network.namespaces(2, f"{RATE_MBIT}mbit") as names:
        yield names


def on_both(machines: list[str], lines: list[str], folder: Path, interface: str = "eth0") -> list[str]:
    environment = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": interface,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT / "src"),
    }
    started = []
    for machine, line in zip(machines, lines, strict=True):
        words = [sys.executable, "-m", "torch.distributed.run", *shlex.split(line)[1:]]
        started.append(
            subprocess.Popen(
                ["ip", "netns", "exec", machine, *words],
                env=environment,
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        found = [process.communicate(timeout=240)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    for process, text in zip(started, found, strict=True):
        assert process.returncode == 0, text
    return found


def test_doctor_and_a_run_between_two_machines(machines: list[str], tmp_path: Path) -> None:
    lines = commands()
    assert len(lines) == 2
    first, _ = on_both(machines, lines, tmp_path)
    measured = re.search(r"^\W*0\W+1\W+[\d.]+ ms\W+([\d,]+) Mbit/s", first, re.MULTILINE)
    assert measured is not None, first
    assert 0.5 * RATE_MBIT < float(measured[1]) < 1.05 * RATE_MBIT
    recipe = {**tiny_recipe(tmp_path, comm={"name": "demo"}), "optim": {"name": "sign", "lr": 1e-3}}
    recipe["model"]["overrides"] |= WIDE
    path = write_recipe(tmp_path / "recipe.yaml", recipe)
    train = f"scantling train {path} --run-dir {tmp_path / 'run'}"
    on_both(machines, [line.replace("scantling doctor", train) for line in lines], tmp_path)
    assert [record["step"] for record in records(tmp_path / "run")] == list(range(1, 9))
    assert records(tmp_path / "run")[-1]["wire_bytes"] > 0


def run_in(machine: str, line: str, folder: Path) -> None:
    words = ["ip", "netns", "exec", machine, "bash", "-c", line]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_run_over_wireguard_sends_nothing_beside_it(machines: list[str], tmp_path: Path) -> None:
    if not all(map(shutil.which, ("wg", "wg-quick", "wireguard-go"))):
        pytest.skip("needs wireguard-tools and wireguard-go")
    guide = GUIDE.read_text(encoding="utf-8")
    how_to = guide[guide.index("## Encrypt the link") :]
    make_key = re.search(r"^ +(umask 077; wg genkey .*)$", how_to, re.MULTILINE)[1]
    files = [textwrap.dedent(text) for text in re.findall(r"```ini\n(.*?)```", how_to, re.DOTALL)[:2]]
    folders = [tmp_path / machine for machine in machines]
    for folder, machine in zip(folders, machines, strict=True):
        folder.mkdir()
        run_in(machine, make_key, folder)
    own = re.search(r"--master-addr (\S+) ", commands()[0])[1]
    for number, (folder, text) in enumerate(zip(folders, files, strict=True)):
        text = text.replace("KEY-OF-THIS-MACHINE", (folder / "key").read_text().strip())
        text = text.replace("KEY.PUB-OF-THE-OTHER-MACHINE", (folders[1 - number] / "key.pub").read_text().strip())
        (folder / "wg0.conf").write_text(text.replace("203.0.113.1", own))
    up = re.search(r"`(wg-quick up \S+)`", how_to)[1]
    try:
        for folder, machine in zip(folders, machines, strict=True):
            # two processes of wireguard-go on one machine need their own folders for control sockets
            apart = "mkdir -p /run/wireguard; mount -t tmpfs none /run/wireguard"
            run_in(machine, f"{apart}; chmod 600 wg0.conf; {up}", folder)
        words = ["ip", "netns", "exec", machines[0], sys.executable, "-c", SNIFF]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as sniffer:
            assert sniffer.stdout.readline() == "ready\n"
            lines = [line.replace(own, "10.8.0.1") for line in commands()]
            first, _ = on_both(machines, lines, tmp_path, interface="wg0")
            found, _ = sniffer.communicate("stop\n")
        assert re.search(r"^\W*0\W+1\W+[\d.]+ ms\W+([\d,]+) Mbit/s", first, re.MULTILINE), first
        sent = ast.literal_eval(found)
        sent.pop((2, False), None)  # IGMP: the kernel reports its multicast groups when an address is new
        assert sent.keys() == {(17, True)}, sent
        assert sent[17, True] > 1_000_000
    finally:
        for machine in machines:
            subprocess.run(["ip", "-n", machine, "link", "delete", "wg0"], check=False)
