"""Import the modules that test processes need, once: `tests.processes` forks them from a server that imports this.

CAME's C code is compiled here too, which takes seconds, so that forked processes have the library. Nothing here runs
computations, because a server with threads could not be forked safely.
"""

from __future__ import annotations

import matplotlib.figure
import pytest
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama
import transformers.trainer

import scantling.cli.app
import scantling.cli.commands
import scantling.cli.console
import scantling.hf
import scantling.trainer.reporting.html
import scantling.trainer.training.run
from scantling.optim import _cpu

_cpu._library()

del matplotlib, pytest, scantling, torch, transformers
