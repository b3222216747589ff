"""What the processes of one run exchange: all gradients, or the largest components of their momentum."""

from scantling.comm.allreduce import AllReduce, allreduce_wire_bytes
from scantling.comm.buffers import average_buffers
from scantling.comm.demo import DeMo
from scantling.comm.demo_exchange import DemoExchange
from scantling.comm.exchange import MomentumExchange
from scantling.comm.gradient_exchange import GradientExchange, NoExchange
from scantling.comm.guard import refuse_reduction
from scantling.comm.local_steps import LocalSteps, diloco, sparseloco
from scantling.comm.managed import ManagedLink
from scantling.comm.rank_tensors import load_rank_tensors, rank_tensors
from scantling.comm.replica import merge_local_states

__all__ = [
    "AllReduce",
    "DeMo",
    "DemoExchange",
    "GradientExchange",
    "LocalSteps",
    "ManagedLink",
    "MomentumExchange",
    "NoExchange",
    "allreduce_wire_bytes",
    "average_buffers",
    "diloco",
    "load_rank_tensors",
    "merge_local_states",
    "rank_tensors",
    "refuse_reduction",
    "sparseloco",
]
