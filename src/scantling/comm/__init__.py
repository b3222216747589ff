"""Communication between the processes of a run: all gradients, or the largest components of their momentum.

Names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scantling.lazy_names import lazy_names

if TYPE_CHECKING:
    from scantling.comm.dcp import load_rank_tensors, rank_tensors
    from scantling.comm.ddp import AllReduce, allreduce_wire_bytes, average_buffers
    from scantling.comm.ddp_guard import refuse_reduction
    from scantling.comm.demo import DeMo
    from scantling.comm.demo_exchange import DemoExchange
    from scantling.comm.exchange import MomentumExchange
    from scantling.comm.gradient_exchange import GradientExchange, NoExchange
    from scantling.comm.local_exchange import LocalStepsExchange
    from scantling.comm.local_steps import LocalSteps, diloco, sparseloco
    from scantling.comm.residuals import merge_local_states
    from scantling.comm.sharded_exchange import ShardedExchange, sharded_wire_bytes
    from scantling.comm.transport.torchft import TorchFTGroup

_HOMES = {
    "AllReduce": "ddp",
    "DeMo": "demo",
    "DemoExchange": "demo_exchange",
    "GradientExchange": "gradient_exchange",
    "LocalSteps": "local_steps",
    "LocalStepsExchange": "local_exchange",
    "MomentumExchange": "exchange",
    "NoExchange": "gradient_exchange",
    "ShardedExchange": "sharded_exchange",
    "TorchFTGroup": "transport.torchft",
    "allreduce_wire_bytes": "ddp",
    "average_buffers": "ddp",
    "diloco": "local_steps",
    "load_rank_tensors": "dcp",
    "merge_local_states": "residuals",
    "rank_tensors": "dcp",
    "refuse_reduction": "ddp_guard",
    "sharded_wire_bytes": "sharded_exchange",
    "sparseloco": "local_steps",
}

__all__ = [
    "AllReduce",
    "DeMo",
    "DemoExchange",
    "GradientExchange",
    "LocalSteps",
    "LocalStepsExchange",
    "MomentumExchange",
    "NoExchange",
    "ShardedExchange",
    "TorchFTGroup",
    "allreduce_wire_bytes",
    "average_buffers",
    "diloco",
    "load_rank_tensors",
    "merge_local_states",
    "rank_tensors",
    "refuse_reduction",
    "sharded_wire_bytes",
    "sparseloco",
]

__getattr__, __dir__ = lazy_names(__name__, {name: f"{__name__}.{home}" for name, home in _HOMES.items()})
