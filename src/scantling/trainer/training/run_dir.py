"""Folder of one run: its files, its lock, and a description of the environment."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from scantling.errors import UserError
from scantling.files import no_follow, read_json_object, write_atomic, write_json
from scantling.trainer.recipe import Recipe, check_recipe, dump_recipe, read_yaml
from scantling.trainer.training.checkpoint_files import remove_all
from scantling.trainer.training.sinks import EVENTS_SUFFIX

logger = logging.getLogger(__name__)


class InUseError(UserError):
    """Another process writes into the run directory."""


class RunDir:
    """Paths of one run, and its lock.

    The lock is the operating system's (flock), so that it is released whenever the process ends.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recipe = path / "recipe.yaml"
        self.environment = path / "environment.json"
        self.plan = path / "plan.json"
        self.metrics = path / "metrics.jsonl"
        self.result = path / "result.json"
        self.report = path / "report.html"
        self.after = path / "after.json"
        self.checkpoints = path / "checkpoints"
        self.tensorboard = path / "tensorboard"
        self._launch = path / ".launch"
        self._lock_file = path / ".lock"
        # never opened through a link, and closed in forked children such as data workers, which may outlive the run
        self._lock = FileLock(self._lock_file, thread_local=False, fallback_to_soft=False)

    @property
    def _written(self) -> list[Path]:
        """Files that a run writes once or replaces; the rest is in folders."""
        return [self.recipe, self.environment, self.plan, self.metrics, self.result, self.report, self.after]

    def holds_run(self) -> bool:
        """Return True if a run was started here."""
        return self.recipe.exists() or self.metrics.exists() or self.checkpoints.exists()

    def was_locked(self) -> bool:
        """Return True if a run has locked this folder before, even if it ended before its first step."""
        return self._lock_file.is_file()

    def lock(self) -> None:
        """Lock the folder for this process until `unlock` or its end.

        Raises:
            InUseError: another process has locked it.
            UserError: the folder cannot be written.
        """
        # 1. open the lock file, 2. lock it without waiting, 3. write our process id for messages
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(blocking=False)
        except Timeout:
            holder = self._lock_file.read_text(encoding="utf-8").strip() or "unknown"
            raise InUseError(
                f"the run directory {self.path} is in use by process {holder}; wait for it or give another --run-dir"
            ) from None
        except FileExistsError:
            raise UserError(f"the run directory {self.path} is a file; give another --run-dir") from None
        except OSError as error:
            problem = error.strerror or error
            # some network file systems do not support flock
            if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise UserError(
                    f"cannot lock the run directory {self.path}: {problem}; give a --run-dir on another file system"
                ) from None
            raise UserError(f"cannot write into the run directory {self.path}: {problem}") from None
        # on a full disk there is no number, which is only for messages
        with contextlib.suppress(OSError), open(self._lock_file, "w", opener=no_follow) as file:
            file.write(str(os.getpid()))

    def unlock(self) -> None:
        """Release the lock."""
        self._lock.release()

    def clear(self) -> None:
        """Remove a run's files and nothing else.

        A link to a folder that is not empty is only unlinked, because other programs may use that folder.
        """
        for folder, remove in ((self.checkpoints, remove_all), (self.tensorboard, _remove_events)):
            if folder.is_symlink():
                # a link to an empty folder stays: the new run writes through it
                if not folder.is_dir() or any(folder.iterdir()):
                    logger.warning("removed %s, a link; its target %s stays", folder, folder.readlink())
                    folder.unlink()
            elif folder.is_dir():
                remove(folder)
        for path in self._written:
            if path.is_symlink() or path.is_file():
                path.unlink()

    def check_replaceable(self) -> None:
        """Raise a UserError if `clear` would remove files that no run has written."""
        if self.checkpoints.exists() and not self.checkpoints.is_dir():
            raise UserError(f"{self.checkpoints} is not a folder; remove it, or give another --run-dir")
        others = [path.name for path in self._written if path.exists()]
        if others and not self._launch.is_file():
            raise UserError(
                f"{self.path} holds {', '.join(others)}, and no run has been started there: nothing is replaced. "
                "Move these files, or give another --run-dir"
            )

    def read_recipe(self) -> Recipe:
        """Return the recipe of this run.

        Raises:
            UserError: the folder holds no run.
        """
        if not self.recipe.is_file():
            hint = "; it ended before its first step: start it with its recipe" if self.was_locked() else ""
            if (self.path / "config.json").exists():
                hint = "; it is a model folder, which sc.load reads: give the directory of the run that it comes from"
            raise UserError(f"{self.path} holds no run: there is no {self.recipe.name} in it{hint}")
        return check_recipe(read_yaml(self.recipe), str(self.recipe))

    def read_world(self) -> tuple[int, str]:
        """Return the number of processes and the type of device of the newest start; 1 and "auto" if unknown."""
        try:
            content = read_json_object(self.environment)
        except UserError:
            return 1, "auto"
        # "cuda:0" -> "cuda"
        world_size, device = content.get("world_size"), str(content.get("device")).partition(":")[0]
        if not isinstance(world_size, int) or not 0 < world_size < 10**7:
            world_size = 1
        return world_size, device if device in ("cpu", "cuda") else "auto"

    def was_started_by(self, launch: str) -> bool:
        """Return True if a launch of torchrun started the run in this folder; a restart has the same launch."""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            return self._launch.read_text(encoding="utf-8") == launch
        return False

    def write_launch(self, launch: str) -> None:
        """Write the id of the launch of torchrun that started the run."""
        write_atomic(self._launch, launch)

    def write_recipe(self, recipe: Recipe) -> None:
        write_atomic(self.recipe, dump_recipe(recipe))

    def write_environment(self, command: list[str] | None = None, **extra: Any) -> None:
        write_json(self.environment, {**environment(), "command": command or sys.argv, **extra})


def _remove_events(folder: Path) -> None:
    """Remove our TensorBoard events from a folder, and the folder unless it holds other files."""
    for path in folder.glob(f"events.out.tfevents.*{EVENTS_SUFFIX}"):
        path.unlink()
    with contextlib.suppress(OSError):
        folder.rmdir()


def environment() -> dict[str, Any]:
    """Return versions, hardware and the git commit of the working folder, as far as they can be read."""
    import numpy
    import torch
    import transformers

    import scantling

    cuda = torch.cuda.is_available()
    return {
        "versions": {
            "scantling": scantling.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "numpy": numpy.__version__,
            "cuda": torch.version.cuda if cuda else None,
        },
        "hardware": {
            "platform": platform.platform(),
            "cpu": _cpu_name(),
            # cores that this process may use, not all cores of the machine
            "cpu_count": len(os.sched_getaffinity(0)),
            "threads": torch.get_num_threads(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
        },
        "git_commit": _git_commit(),
    }


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), "unknown")
    except OSError:
        return platform.processor() or "unknown"


def _git_commit() -> str | None:
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40"], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
