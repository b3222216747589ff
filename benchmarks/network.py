"""Measure sent bytes and step times on a slow link, with real processes, real sockets and a real bandwidth cap.

    python benchmarks/network.py --replicas 2 --rate 100mbit           (root, iproute2)
    python benchmarks/network.py --replicas 2 --rate uncapped --methods "ddp fp32" "ours k8 all_gather"
    python benchmarks/network.py --rate 10mbit --round-trip-ms 150     (emulated, see delaying_hub.py)

Every replica runs in its own network namespace, joined to the others by a veth pair and a bridge. `tc tbf` caps both
ends of each pair. First, a plain socket copy measures the throughput under the cap. Bytes are read from the interface's
counters between barriers, minus its idle traffic. Next to them stand the bytes by the methods' formulas, which leave
out packet headers. Times are medians over the steps; each process has one thread on its own core. With fewer cores than
replicas, only bytes are reported. `--rounds` repeats all methods several times and reports each method's ratio to the
first one in the same round.

A CPU without bf16 instructions computes bf16 products in fp32 and rounds them; `widened` marks the lines of such runs.

With a round-trip time, a process instead of the bridge delays every frame, of 9000 bytes, by half of it. The round trip
of a byte is measured first, and the result is marked as emulated.

The file results/network-N-RATE-DATE.json is written after every method. A method that fails is reported and left out.
Without namespaces, tc or root, the script says so and exits with code 4, which is neither a pass nor a failure.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from dated import dated, write
from interleaved import ratio

HUB = Path(__file__).with_name("delaying_hub.py")
NETWORK, PORT = "10.77.0", 29777
SKIPPED = 4
STEPS, WARM_UP = 12, 6  # auto_off decides in the fifth step
COPY_S, SLOW_START_S = 6.0, 2.0
JUMBO = "9000"
"""Frame size in bytes if a process forwards the frames."""
SETTLE_S = 0.4
BURST = 32 << 10


def parse_mbit(rate: str) -> float:
    """Return the Mbit/s of a rate in `tc`'s spelling; infinity without a cap."""
    if rate == "uncapped":
        return math.inf
    units = {"kbit": 1e-3, "mbit": 1.0, "gbit": 1e3}
    try:
        return float(rate[:-4]) * units[rate[-4:]]
    except (ValueError, KeyError):
        raise argparse.ArgumentTypeError(f"a number of kbit, mbit or gbit, or uncapped; given {rate}") from None


def burst_bytes(rate: str) -> int:
    """Return the burst size of a cap in bytes: 32 KiB, or 2 ms of a fast link, about one tick of the cap's clock."""
    return max(BURST, round(2e-3 * parse_mbit(rate) * 1e6 / 8))


def checked_rate(rate: str) -> str:
    """Return a rate unchanged; raise if it cannot be parsed."""
    parse_mbit(rate)
    return rate


def address(rank: int) -> str:
    return f"{NETWORK}.{rank + 1}"


def why_not() -> str | None:
    """Return why namespaces with a bandwidth cap are unavailable, or None."""
    if os.geteuid() != 0:
        return "it needs root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"there is no {tool}; install iproute2"
    name = f"scantling-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"network namespaces cannot be made: {tried.stderr.strip()}"
    cap = ("tc", "qdisc", "add", "dev", "lo", "root", "tbf", "rate", "1mbit", "burst", "32kb", "latency", "50ms")
    tried = subprocess.run(["ip", "netns", "exec", name, *cap], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", name], check=False)
    return f"tc has no tbf: {tried.stderr.strip()}" if tried.returncode else None


@contextmanager
def namespaces(count: int, rate: str, round_trip_ms: float = 0.0) -> Iterator[list[str]]:
    """Yield the names of network namespaces joined by a bridge; remove them afterwards.

    Args:
        count: number of namespaces.
        rate: rate of each link in both directions, in `tc`'s spelling, or "uncapped".
        round_trip_ms: round-trip time between any two, by a process instead of the bridge; 0 for none.
    """
    prefix = f"sc{os.getpid()}"
    names = [f"{prefix}-{rank}" for rank in range(count)]
    hub = f"{prefix}-hub"

    def run(*command: str) -> None:
        subprocess.run(command, check=True, capture_output=True, text=True)

    with ExitStack() as undo:
        for name in (hub, *names):
            run("ip", "netns", "add", name)
            undo.callback(subprocess.run, ["ip", "netns", "del", name], check=False)
        if not round_trip_ms:
            run("ip", "-n", hub, "link", "add", "bridge", "type", "bridge")
            run("ip", "-n", hub, "link", "set", "bridge", "up")
        for rank, name in enumerate(names):
            inner, outer = "eth0", f"port{rank}"
            run("ip", "-n", name, "link", "add", inner, "type", "veth", "peer", "name", outer, "netns", hub)
            run("ip", "-n", hub, "link", "set", outer, *(() if round_trip_ms else ("master", "bridge")), "up")
            run("ip", "-n", name, "addr", "add", f"{address(rank)}/24", "dev", inner)
            if round_trip_ms:
                run("ip", "-n", name, "link", "set", inner, "mtu", JUMBO)
                run("ip", "-n", hub, "link", "set", outer, "mtu", JUMBO)
            run("ip", "-n", name, "link", "set", inner, "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
            if rate != "uncapped":
                for where, device in ((name, inner), (hub, outer)):
                    cap = ("tbf", "rate", rate, "burst", str(burst_bytes(rate)), "latency", "50ms")
                    run("ip", "netns", "exec", where, "tc", "qdisc", "add", "dev", device, "root", *cap)
        if round_trip_ms:
            for name in names:
                run("ip", "netns", "exec", name, sys.executable, str(HUB), "--plain", "eth0")
            ports = [f"port{rank}" for rank in range(count)]
            forwarding = subprocess.Popen(
                ["ip", "netns", "exec", hub, sys.executable, str(HUB), "--delay-ms", str(round_trip_ms / 2), *ports],
                stdout=subprocess.PIPE,
                text=True,
            )
            undo.callback(forwarding.wait)
            undo.callback(forwarding.kill)
            assert forwarding.stdout is not None
            forwarding.stdout.readline()
        yield names


def between(names: Sequence[str], listening: str, calling: str) -> tuple[str, str]:
    """Run this script as a listener in the first namespace and as a client in the second; return their output."""
    command = ["ip", "netns", "exec"]
    script = [sys.executable, __file__]
    first = subprocess.Popen([*command, names[0], *script, listening], stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    first.stdout.readline()  # wait until it listens
    second = subprocess.run([*command, names[1], *script, calling], check=True, stdout=subprocess.PIPE, text=True)
    return first.communicate(timeout=600)[0], second.stdout


def measured_round_trip_ms(names: Sequence[str]) -> float:
    """Return the milliseconds of a byte's round trip from the second namespace to the first: the median of ten."""
    _, asked = between(names, "--echo", "--ask")
    return float(asked)


def answer() -> None:
    with socket.create_server((address(0), PORT)) as server:
        print("listening", flush=True)
        connection, _ = server.accept()
        with connection:
            while part := connection.recv(1):
                connection.sendall(part)


def ask() -> None:
    times = []
    with socket.create_connection((address(0), PORT), timeout=60) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(10):
            began = time.perf_counter()
            connection.sendall(b"x")
            connection.recv(1)
            times.append(time.perf_counter() - began)
    print(1e3 * float(np.median(times)))


def copied_mbit(names: Sequence[str]) -> float:
    """Return the Mbit/s of a plain socket copy from the second namespace to the first."""
    received, _ = between(names, "--receive", "--send")
    return float(received)


def receive() -> None:
    with socket.create_server((address(0), PORT)) as server:
        print("listening", flush=True)
        connection, _ = server.accept()
        with connection:
            began = time.perf_counter()
            while time.perf_counter() - began < SLOW_START_S and connection.recv(65536):
                pass
            began, found = time.perf_counter(), 0
            while part := connection.recv(65536):
                found += len(part)
            print(found * 8 / 1e6 / (time.perf_counter() - began))


def send() -> None:
    with socket.create_connection((address(0), PORT), timeout=60) as connection:
        began, part = time.perf_counter(), bytes(65536)
        while time.perf_counter() - began < COPY_S:
            connection.sendall(part)


def sent_bytes() -> int:
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def worker(rank: int, options: argparse.Namespace) -> None:
    """Run one replica in its namespace; print a line of JSON to stdout."""
    import torch
    from comm_methods import group
    from small_models import keep_freed_memory

    from scantling.numerics.bf16_products import bf16_products

    torch.set_num_threads(1)
    keep_freed_memory()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    with group(f"{address(0)}:{PORT + 1}", rank, options.replicas), bf16_products(torch.device("cpu")):
        print(json.dumps({"rank": rank, **time_steps(rank, options)}), flush=True)


def time_steps(rank: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return bytes and times of the steps of one replica, in the current process group."""
    import torch
    from comm_methods import METHODS
    from comm_quality import WORKS, channel_options

    from scantling.numerics.device import autocast, has_fast_matmul

    torch.manual_seed(0)
    model, examples = workload(options, torch.Generator().manual_seed(rank))
    given = channel_options(options.preset, options.method) if options.preset in WORKS else {}
    replica = METHODS[options.method](model, 1e-3, **given)

    def compute_loss(model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        with autocast(options.compute, torch.device("cpu")):
            loss: torch.Tensor = model(**inputs).loss
        return loss

    def one() -> float:
        inputs = examples()
        began = time.perf_counter()
        replica.step(lambda model: compute_loss(model, inputs))
        return time.perf_counter() - began

    for _ in range(WARM_UP):
        one()
    idle = count_sent_bytes(lambda: time.sleep(1.0)) / (1.0 + 2 * SETTLE_S)
    times: list[float] = []
    cpu = time.process_time()
    began = time.perf_counter()
    total = count_sent_bytes(lambda: times.extend(one() for _ in range(options.steps)))
    took = time.perf_counter() - began
    return {
        "sent_bytes": (total - idle * took) / options.steps,
        "computed_bytes": replica.computed_bytes(),
        "published_bytes": replica.published_bytes,
        "idle_bytes_a_s": idle,
        "step_s": times,
        "cpu_s": (time.process_time() - cpu) / options.steps,
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "num_parameters": sum(param.numel() for param in replica.model.parameters()),
        **({} if has_fast_matmul(options.compute, torch.device("cpu")) else {"widened": True}),
    }


def workload(options: argparse.Namespace, generator: Any) -> tuple[Any, Callable[[], dict[str, Any]]]:
    """Return a model and random examples: a Llama or ViT preset, or a model of comm_quality.py."""
    import torch
    from comm_quality import WORKS
    from transformers import LlamaConfig, LlamaForCausalLM, ViTConfig, ViTForImageClassification

    from scantling.trainer.models.presets import PRESETS

    if options.preset.startswith("vit"):
        digits = {"num_labels": 10, "image_size": 8, "num_channels": 1}
        config = ViTConfig(**{**PRESETS[options.preset].config, **digits})
        size = (options.batch, config.num_channels, config.image_size, config.image_size)
        return ViTForImageClassification(config), lambda: {
            "pixel_values": torch.randn(size, generator=generator),
            "labels": torch.randint(10, (options.batch,), generator=generator),
        }
    work = WORKS.get(options.preset)
    if work is not None and "tokenizer" in work.data:
        given = {**PRESETS[work.model["preset"]].config, **work.model["overrides"]}
        given["vocab_size"] = work.data["tokenizer"]["bpe"]
    else:
        given = {**PRESETS[options.preset].config, "vocab_size": 320}
    ids = (options.batch, options.length)

    def examples() -> dict[str, Any]:
        drawn = torch.randint(given["vocab_size"], ids, generator=generator)
        return {"input_ids": drawn, "labels": drawn}

    return LlamaForCausalLM(LlamaConfig(**given)), examples


def count_sent_bytes(work: Any) -> int:
    """Return the bytes that this interface sends during some work, between two barriers."""
    import torch.distributed as dist

    dist.barrier()
    time.sleep(SETTLE_S)
    before = sent_bytes()
    work()
    time.sleep(SETTLE_S)
    found = sent_bytes() - before
    dist.barrier()
    return found


def run_method(names: Sequence[str], method: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the lines of all replicas of one method."""
    # a method with an exchange only every few steps is measured over whole periods
    every = exchanges_every(method)
    steps = max(options.steps, every) // every * every
    own = ["--method", method, "--replicas", str(len(names)), "--preset", options.preset, "--steps", str(steps)]
    own += ["--batch", str(options.batch), "--length", str(options.length), "--compute", options.compute]
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, sys.executable, __file__, "--worker", str(rank), *own],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        for rank, name in enumerate(names)
    ]
    try:
        outputs = [process.communicate(timeout=options.timeout) for process in started]
    except subprocess.TimeoutExpired:
        raise FailedError(f"{method}: not ended after {options.timeout:g} s") from None
    finally:
        for process in started:
            process.kill()
    for process, (_, errors) in zip(started, outputs, strict=True):
        if process.returncode:
            raise FailedError(f"{method}: a replica failed\n{errors[-2000:]}")
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


class FailedError(Exception):
    """Raised if a method could not be measured."""


def step_seconds(rows: Sequence[dict[str, Any]], method: str) -> float:
    """Return the slowest replica's step time in one round: the median, or the mean if not every step exchanges."""
    middle = np.mean if exchanges_every(method) > 1 else np.median
    return max(float(middle(row["step_s"])) for row in rows)


def exchanges_every(method: str) -> int:
    """Return the number of steps from one exchange to the next."""
    found = re.search(r" h(\d+)\b", method)
    return int(found[1]) if found else 1


def cpu_seconds(rounds: Sequence[Sequence[dict[str, Any]]]) -> float:
    """Return the median CPU seconds of a step over all replicas."""
    return float(np.median([row["cpu_s"] for rows in rounds for row in rows]))


def peak_bytes(rounds: Sequence[Sequence[dict[str, Any]]]) -> float:
    """Return the peak bytes of the largest process."""
    return float(max(row["peak_bytes"] for rows in rounds for row in rows))


def table(found: dict[str, list[list[dict[str, Any]]]], *, with_times: bool) -> None:
    """Print bytes, their formula and times, one line per method, from the rows of its replicas in each round."""
    dense = max((row["computed_bytes"] for rows in found.get("ddp fp32", []) for row in rows), default=None)
    for method, rounds in found.items():
        rows = [row for each in rounds for row in each]
        sent, computed = (max(row[key] for row in rows) for key in ("sent_bytes", "computed_bytes"))
        parts = [f"{method:22} {sent / 1e6:9.4f} MB a step, formula {computed / 1e6:9.4f}"]
        parts.append(f"x {sent / computed:5.3f}" if computed else "       ")
        if dense and sent > 0:
            parts.append(f"{dense / sent:8.1f} x fewer than fp32, {dense / 2 / sent:7.1f} than 16 bits")
        if published := rows[0]["published_bytes"]:
            parts.append(f"its published code {published / 1e6:9.4f} MB")
        if with_times:
            steps = [step_seconds(each, method) for each in rounds]
            parts.append(f"{1e3 * float(np.median(steps)):9.1f} ms")
            means = [max(float(np.mean(row["step_s"])) for row in each) for each in rounds]
            parts.append(f"mean {1e3 * float(np.median(means)):9.1f} ms")
            if alone := found.get("alone"):
                parts.append(f"{1e3 * (cpu_seconds(rounds) - cpu_seconds(alone)):7.1f} ms of a core more than alone")
                parts.append(f"{(peak_bytes(rounds) - peak_bytes(alone)) / 1e6:+6.0f} MB")
            first, control = next(iter(found.items()))
            if method != first and len(control) == len(rounds) > 1:
                against = ratio(steps, [step_seconds(each, first) for each in control])
                low, high = against["ratio_95"]
                parts.append(f"{against['ratio']:.3f} [{low:.3f}, {high:.3f}] of {first}")
        print("  ".join(parts), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument(
        "--rate", type=checked_rate, default="100mbit", help="of each link, as tc spells it, or uncapped"
    )
    parser.add_argument("--round-trip-ms", type=float, default=0.0, help="of the line, emulated")
    parser.add_argument("--methods", nargs="+", help="default: all")
    parser.add_argument("--preset", default="llama-10m", help="llama-10m, vit-digits, or data of comm_quality.py")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--compute", choices=["fp32", "bf16"], default="bf16", help="format of matrix products")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--rounds", type=int, default=1, help="how often all methods are gone through")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds of one method")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--method", help=argparse.SUPPRESS)
    ends = {"receive": receive, "send": send, "echo": answer, "ask": ask}
    for name in ends:
        parser.add_argument(f"--{name}", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for name, end in ends.items():
        if getattr(options, name):
            end()
            return 0
    if options.worker is not None:
        worker(options.worker, options)
        return 0
    reason = why_not()
    if reason is not None:
        print(f"skipped: {reason}")
        return SKIPPED
    from comm_methods import METHODS

    with_times = len(os.sched_getaffinity(0)) >= options.replicas
    found: dict[str, list[list[dict[str, Any]]]] = {}
    failures: dict[str, str] = {}
    with namespaces(options.replicas, options.rate, options.round_trip_ms) as names:
        copied, round_trip = copied_mbit(names), measured_round_trip_ms(names)
        line = f"a plain copy takes {copied:.1f} Mbit/s, a byte there and back {round_trip:.2f} ms"
        print(f"{options.replicas} replicas, {options.rate}: {line}", flush=True)
        cap = parse_mbit(options.rate)
        if copied > 1.1 * cap:
            raise SystemExit(f"the link carries more than the {options.rate} that it should be capped at")
        if not options.round_trip_ms and math.isfinite(cap) and copied < 0.9 * cap:
            raise SystemExit(f"the link does not carry the {options.rate} that it is capped at")
        for number in range(options.rounds):
            for method in options.methods or METHODS:
                if method in failures:
                    continue
                try:
                    found.setdefault(method, []).append(run_method(names, method, options))
                except FailedError as error:
                    failures[method] = str(error)
                    found.pop(method, None)
                    print(error, flush=True)
                    continue
                first = next(iter(found))
                if not number:
                    shown = (first, *(name for name in ("alone",) if name in found), method)
                    table({name: found[name] for name in dict.fromkeys(shown)}, with_times=with_times)
                report = dated(
                    __file__,
                    replicas=options.replicas,
                    rate=options.rate,
                    copied_mbit=copied,
                    round_trip_ms=round_trip,
                    emulated_round_trip=options.round_trip_ms > 0,
                    preset=options.preset,
                    batch=options.batch,
                    length=options.length,
                    compute=options.compute,
                    with_times=with_times,
                    failures=failures,
                    methods=found,
                )
                line = f"-{options.round_trip_ms:g}ms" if options.round_trip_ms else ""
                line += "" if options.preset == "llama-10m" else f"-{options.preset}"
                path = write(report, f"network-{options.replicas}-{options.rate}{line}", options.out)
    print()
    table(found, with_times=with_times)
    if found:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
