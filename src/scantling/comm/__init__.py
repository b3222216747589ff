"""What the processes of one run exchange, behind one seam: `GradientExchange`."""

from scantling.comm.allreduce import AllReduce, allreduce_wire_bytes
from scantling.comm.exchange import GradientExchange, NoExchange

__all__ = ["AllReduce", "GradientExchange", "NoExchange", "allreduce_wire_bytes"]
