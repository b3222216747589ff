"""Compile Triton kernels for GPUs that this machine lacks, in a separate process; other tests interpret them."""

from __future__ import annotations

import os
import subprocess
import sys

SHARED_MEMORY = {80: 166_912, 86: 101_376, 90: 232_448}
"""Shared memory of a program in bytes, by compute capability (CUDA C Programming Guide, technical specifications)."""
BUILD = """
import re, subprocess, tempfile
import triton.language as tl
from triton import compile, knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

def build(kernel, capability, types, num_warps=4, **constants):
    "PTX of a kernel that fits; arguments are pointers to fp32 where types and constants say nothing else."
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "*fp32") for name in names}
    pointers = [name for name in names if signature[name].startswith("*")]
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in pointers}
    values = {(names.index(name),): value for name, value in constants.items()}
    target = GPUTarget("cuda", capability, 32)
    made = compile(ASTSource(kernel, signature, values, aligned), target=target, options={"num_warps": num_warps})
    case = f"{kernel.__name__} {signature} {constants} for {capability}"
    assert made.metadata.shared <= limit, f"{made.metadata.shared} bytes of shared memory: {case}"
    arch = f"sm_{capability}" + ("a" if capability == 90 else "")
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(made.asm["ptx"])
        file.flush()
        command = [knobs.nvidia.ptxas.path, "--verbose", f"--gpu-name={arch}", "--output-file=/dev/null", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spills = int(re.search(r"(\\d+) bytes spill stores", told).group(1))
    assert spills <= max_spills, f"{spills} bytes of registers spilled: {case}"
    return made.asm["ptx"]
"""


def compile_for_gpus(code: str, max_spills: int = 1 << 10) -> None:
    """Run code after BUILD, for an A100, an RTX 3090 and an H100.

    Args:
        code: the body of a loop over `capability`.
        max_spills: bytes of registers per thread that a kernel may store in memory.
    """
    limits = f"max_spills = {max_spills}\nfor capability, limit in {SHARED_MEMORY}.items():\n"
    loop = limits + "".join(f"    {line}\n" for line in code.strip().splitlines())
    settings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", BUILD + loop + "    print(capability)\n"]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == [*map(str, SHARED_MEMORY)]
