"""Compile Triton kernels for GPUs that this machine lacks, in a separate process; other tests interpret them."""

from __future__ import annotations

import os
import subprocess
import sys

BUILD = """
import triton.language as tl
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

def build(kernel, capability, types, **constants):
    "PTX of a kernel; arguments are pointers to fp32 where types and constants say nothing else."
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "*fp32") for name in names}
    pointers = [name for name in names if signature[name].startswith("*")]
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in pointers}
    values = {(names.index(name),): value for name, value in constants.items()}
    return compile(ASTSource(kernel, signature, values, aligned), target=GPUTarget("cuda", capability, 32)).asm["ptx"]
"""


def compile_for_gpus(code: str) -> None:
    """Run code after BUILD, for an A100 and an H100.

    Args:
        code: the body of a loop over `capability`.
    """
    loop = "for capability in (80, 90):\n" + "".join(f"    {line}\n" for line in code.strip().splitlines())
    settings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", BUILD + loop + "    print(capability)\n"]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["80", "90"]
