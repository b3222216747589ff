"""What the processes of one run exchange: all gradients, or the largest components of their momentum."""

from scantling.comm.dcp import load_rank_tensors, rank_tensors
from scantling.comm.ddp import AllReduce, allreduce_wire_bytes, average_buffers
from scantling.comm.ddp_guard import refuse_reduction
from scantling.comm.demo import DeMo
from scantling.comm.demo_exchange import DemoExchange
from scantling.comm.diloco import LocalSteps, diloco, sparseloco
from scantling.comm.exchange import MomentumExchange
from scantling.comm.gradient_exchange import GradientExchange, NoExchange
from scantling.comm.replica import merge_local_states
from scantling.comm.transport.torchft import TorchFTGroup

__all__ = [
    "AllReduce",
    "DeMo",
    "DemoExchange",
    "GradientExchange",
    "LocalSteps",
    "MomentumExchange",
    "NoExchange",
    "TorchFTGroup",
    "allreduce_wire_bytes",
    "average_buffers",
    "diloco",
    "load_rank_tensors",
    "merge_local_states",
    "rank_tensors",
    "refuse_reduction",
    "sparseloco",
]
