"""Replicas that leave and join during a run, through torchft (https://github.com/pytorch/torchft).

Each replica is one process that was started without torchrun and has its own run directory. Before every step, the
manager of torchft says which replicas take part. A replica that joins, or that missed a step, first takes weights,
optimizer state and position in the data from another one. Each replica then computes its share of the batch.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from scantling.comm import TorchFTGroup
from scantling.errors import RunError, UserError, first_line
from scantling.trainer.recipe import Recipe
from scantling.trainer.training.resume import compare_data, compare_recipes

LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"
"""Environment variable with the address of the lighthouse, which all replicas must reach."""


class ElasticReplicas:
    """Connection of this replica to those that train with it.

    Args:
        timeout_s: seconds after which a replica that does not answer is left out.

    Attributes:
        group: process group for the exchange.

    Raises:
        UserError: torchft is missing, or the lighthouse has no valid address.
        RunError: the lighthouse does not answer.
    """

    def __init__(self, timeout_s: float) -> None:
        check_elastic()
        os.environ.setdefault("RUST_LOG", "warn")  # torchft reports several lines in each step otherwise
        import torchft
        from torchft.checkpointing.http_transport import HTTPTransport

        host, timeout = _own_address(), timedelta(seconds=timeout_s)
        transport = HTTPTransport(timeout=timeout, num_chunks=0)
        # its own address has the name of this machine, which other machines may not know
        address = transport.address().replace(f"//{socket.gethostname()}:", f"//{host}:")
        transport.address = lambda: address
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        group = torchft.ProcessGroupGloo(timeout=timeout)
        try:
            self._manager = torchft.Manager(
                pg=group,
                load_state_dict=None,
                state_dict=None,
                min_replica_size=1,
                use_async_quorum=False,
                timeout=timeout,
                quorum_timeout=timeout,
                connect_timeout=timeout,
                rank=0,
                world_size=1,
                store_addr=host,
                store_port=self._store.port,
                lighthouse_addr=os.environ[LIGHTHOUSE],
                replica_id=platform.node(),
                hostname=host,
                checkpoint_transport=transport,
            )
        except (RuntimeError, TimeoutError, ConnectionError) as error:
            raise RunError(
                f"the lighthouse at {LIGHTHOUSE}={os.environ[LIGHTHOUSE]} does not answer: {first_line(error)}"
            ) from error
        self.group = TorchFTGroup(self._manager, group)

    def join(self, step: int, identity: dict[str, Any], model: nn.Module, *parts: Any) -> None:
        """Start at a step, and register the state that a joining replica takes over.

        Args:
            step: steps that this replica has taken.
            identity: `recipe` and `fingerprint` of the data; a replica with others is refused.
            model, parts: see `TorchFTGroup.join`.
        """
        self._manager.load_state_dict({"step": step, "batches_committed": 0})

        def compare(other: dict[str, Any]) -> None:
            self._takes_over = True
            where = "the other replicas"
            compare_recipes(other["recipe"], Recipe.model_validate(identity["recipe"]), where)
            compare_data(other["fingerprint"], identity["fingerprint"], where)

        # before the weights, which may have other shapes
        self._manager.register_state_dict_fn("identity", compare, lambda: identity)
        self.group.join(model, *parts)

    def begin_step(self) -> None:
        """Wait until it is known who takes part in the next step; this may load the state of another replica.

        Raises:
            UserError: the state of another replica does not fit, for example that of another recipe or other data.
            RunError: the lighthouse does not answer, or waits for more replicas; nothing was loaded.
        """
        self._takes_over = False
        try:
            self._manager.start_quorum()
        except (RuntimeError, TimeoutError, ConnectionError) as error:
            if self._takes_over:
                raise UserError(f"the state of another replica does not fit this one: {first_line(error)}") from error
            raise RunError(
                f"the lighthouse at {LIGHTHOUSE}={os.environ[LIGHTHOUSE]} did not report the replicas of step "
                f"{self.group.step + 1} within comm.timeout: it has ended, or waits for more replicas "
                f"(--min_replicas). Resume the run when it is there ({first_line(error)})"
            ) from error

    def close(self) -> None:
        """Leave the group; the other replicas go on."""
        self._manager.shutdown(wait=False)


class JoinedState:
    """State of a training loop that joining replicas take over, as an object like an optimizer.

    Args:
        save: returns the state.
        load: takes it over.
    """

    def __init__(self, save: Callable[[], dict[str, Any]], load: Callable[[dict[str, Any]], None]) -> None:
        self.state_dict, self.load_state_dict = save, load


def check_elastic() -> None:
    """Raise a UserError if this machine cannot run an elastic replica."""
    if importlib.util.find_spec("torchft") is None:
        raise UserError("comm.elastic needs torchft: pip install 'scantling[torchft]'")
    address = os.environ.get(LIGHTHOUSE, "")
    try:
        parts = urlsplit(address)
        valid = parts.scheme == "http" and bool(parts.hostname) and parts.port is not None
    except ValueError:
        valid = False
    if not valid:
        raise UserError(
            f"comm.elastic needs the address of the lighthouse in the environment variable {LIGHTHOUSE}, such as "
            f"http://host:29510; given {address!r}. Start one with: torchft_lighthouse --min_replicas 1"
        )


def _own_address() -> str:
    """Return the address of this machine on its network towards the lighthouse."""
    parts = urlsplit(os.environ[LIGHTHOUSE])
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:  # sends nothing
            udp.connect((parts.hostname, parts.port))
            found: str = udp.getsockname()[0]
    except OSError as error:
        raise UserError(f"{LIGHTHOUSE}={os.environ[LIGHTHOUSE]}: {error}") from error
    return found
