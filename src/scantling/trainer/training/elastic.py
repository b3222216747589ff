"""Replicas that leave and join during a run, through torchft (https://github.com/pytorch/torchft).

Each replica is one process that was started without torchrun and has its own run directory. Before every step, the
manager of torchft says which replicas take part. A replica that joins, or that missed a step, first takes weights,
optimizer state and position in the data from another one. Each replica then computes its share of the batch.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import platform
import socket
import zlib
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from scantling.comm import TorchFTGroup
from scantling.errors import RunError, UserError, first_line
from scantling.trainer.recipe import Recipe
from scantling.trainer.recipe.parsing import flatten
from scantling.trainer.training.resume import FREE_KEYS, PATH_KEYS, compare_data, compare_recipes

logger = logging.getLogger(__name__)

LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"
"""Environment variable with the address of the lighthouse, which all replicas must reach."""
QUORUM_S = 30.0
"""Seconds between two requests to take part in a step, while others are not ready."""
TRANSFER_S = 3600.0
"""Seconds in which a joining replica must have taken over the state."""
MOST_FAILED = 3
"""Attempts to take over the state, or to connect to the other replicas."""


class ElasticReplicas:
    """Connection of this replica to those that train with it; first call `check_elastic`.

    Args:
        timeout_s: seconds after which a replica that does not answer in an exchange is left out.

    Attributes:
        group: process group for the exchange.
    """

    def __init__(self, timeout_s: float) -> None:
        os.environ.setdefault("RUST_LOG", "warn")  # torchft reports several lines in each step otherwise
        import torchft

        manager_logger = logging.getLogger("torchft.manager")
        if manager_logger.level == logging.NOTSET:
            manager_logger.setLevel(logging.ERROR)  # it warns of NCCL at every change
        self._timeout = timedelta(seconds=timeout_s)
        self._processes = torchft.ProcessGroupGloo(timeout=self._timeout)
        self.group = TorchFTGroup(None, self._processes)
        self._takes_over = False

    def join(self, step: int, identity: dict[str, Any], model: nn.Module, *parts: Any) -> None:
        """Start at a step, and register the state that a joining replica takes over.

        Args:
            step: steps that this replica has taken.
            identity: `recipe`, `fingerprint` of the data and `decoder`; a replica with others is refused.
            model, parts: see `TorchFTGroup.join`.

        Raises:
            RunError: the lighthouse does not answer.
        """
        manager = self.group.manager = self._make_manager()
        manager.load_state_dict({"step": step, "batches_committed": 0})

        def compare(other: dict[str, Any]) -> None:
            self._takes_over = True
            compare_identities(other, identity)

        # before the weights, which may have other shapes
        manager.register_state_dict_fn("identity", compare, lambda: identity)
        self.group.join(model, *parts)

    def _make_manager(self) -> Any:
        import torchft
        from torchft.checkpointing.http_transport import HTTPTransport

        host, transfer = _own_address(), timedelta(seconds=TRANSFER_S)
        transport = HTTPTransport(timeout=transfer, num_chunks=0)
        # its own address has the name of this machine, which other machines may not know
        address = transport.address().replace(f"//{socket.gethostname()}:", f"//{host}:")
        transport.address = lambda: address
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        try:
            return torchft.Manager(
                pg=self._processes,
                load_state_dict=None,
                state_dict=None,
                min_replica_size=1,
                use_async_quorum=False,
                timeout=transfer,
                quorum_timeout=timedelta(seconds=QUORUM_S),
                connect_timeout=self._timeout,
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
                f"the lighthouse at {os.environ[LIGHTHOUSE]} does not answer: {first_line(error)}"
            ) from error

    def begin_step(self, stop: Callable[[], bool]) -> bool:
        """Wait until it is known who takes part in the next step; this may load the state of another replica.

        Args:
            stop: returns True to wait no longer.

        Returns:
            False if the wait was stopped.

        Raises:
            UserError: the state of another replica does not fit, for example that of another recipe or other data.
            RunError: the lighthouse does not answer, or the state of another replica cannot be read. Weights and
                optimizer state are as before.
        """
        manager, num_failed, has_waited = self.group.manager, 0, False
        while not stop():
            self._takes_over = False
            try:
                manager.start_quorum()
            except (RuntimeError, TimeoutError, ConnectionError) as error:
                manager._quorum_future = None  # it would raise the same error again
                if self._takes_over:
                    raise UserError(
                        f"the state of another replica does not fit this one: {first_line(error)}"
                    ) from error
                if not _lighthouse_answers():
                    raise RunError(
                        f"the lighthouse at {os.environ[LIGHTHOUSE]} does not answer any more: {first_line(error)}. "
                        "Start it again, and resume the run"
                    ) from error
                if not has_waited:
                    logger.warning(
                        "waiting for other replicas: some are busy, or fewer than --min_replicas have joined"
                    )
                    has_waited = True
                continue
            failure = manager.errored()
            if failure is None:
                return True
            # the others must not wait for this replica, whose state is not theirs
            num_failed += 1
            reason = first_line(failure.original_exception)
            logger.warning("cannot take part in step %d: %s", self.group.step + 1, reason)
            self._disconnect()
            manager.should_commit()  # False
            if num_failed == MOST_FAILED:
                raise RunError(f"cannot connect to the other replicas or take over their state: {reason}")
        return False

    def close(self) -> None:
        """Leave the group; the other replicas go on."""
        if self.group.manager is not None:
            self.group.manager.shutdown(wait=False)
        self._disconnect()

    def _disconnect(self) -> None:
        with suppress(RuntimeError):
            self._processes.abort()


def compare_identities(other: dict[str, Any], own: dict[str, Any]) -> None:
    """Raise a UserError if recipe, data or decoder of this replica differ from those of the others."""
    where = "the other replicas"
    compare_recipes(other["recipe"], Recipe.model_validate(own["recipe"]), where, free=FREE_KEYS)
    compare_data(other["fingerprint"], own["fingerprint"], where)
    if other["decoder"] != own["decoder"]:
        raise UserError(
            f"this replica has {own['decoder']}, and the other replicas have {other['decoder']}, which would round "
            "otherwise. Set the same OMP_NUM_THREADS, and install the same PyTorch"
        )


def hash_identity(identity: dict[str, Any]) -> int:
    """Return a hash of recipe, data and decoder, without the keys that `compare_identities` leaves out."""
    keys = {key: value for key, value in flatten(identity["recipe"]) if key not in FREE_KEYS | PATH_KEYS}
    text = json.dumps([keys, identity["fingerprint"], identity["decoder"]], sort_keys=True)
    return zlib.crc32(text.encode())


def check_elastic() -> None:
    """Raise a UserError if this machine cannot run an elastic replica."""
    if importlib.util.find_spec("torchft") is None:
        raise UserError("comm.elastic needs torchft: pip install 'scantling[torchft]'")
    _lighthouse()


def _lighthouse() -> tuple[str, int]:
    """Return host and port of the lighthouse; raise a UserError without a valid address."""
    address = os.environ.get(LIGHTHOUSE, "")
    with suppress(ValueError):  # a port that is no number
        parts = urlsplit(address)
        if parts.scheme == "http" and parts.hostname and parts.port is not None:
            return parts.hostname, parts.port
    raise UserError(
        f"comm.elastic needs the address of the lighthouse in the environment variable {LIGHTHOUSE}, such as "
        f"http://host:29510; given {address!r}. Start one with: torchft_lighthouse --min_replicas 1"
    )


def _lighthouse_answers() -> bool:
    try:
        with socket.create_connection(_lighthouse(), timeout=10.0):
            return True
    except OSError:
        return False


def _own_address() -> str:
    """Return the address of this machine on its network towards the lighthouse."""
    host, port = _lighthouse()
    try:
        found = _address_towards(host, port)
    except OSError as error:
        raise UserError(f"{LIGHTHOUSE}={os.environ[LIGHTHOUSE]}: {error}") from error
    # the name of this machine may resolve to a loopback address, which other machines cannot use
    if found.startswith("127.") and host != "localhost" and not host.startswith("127."):
        with suppress(OSError):
            return _address_towards("192.0.2.1", port)  # reserved for documentation; takes the default route
    return found


def _address_towards(host: str, port: int) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:  # sends nothing
        udp.connect((host, port))
        found: str = udp.getsockname()[0]
    return found
