"""The folder of one run: who may write into it, and the files that say what ran and where."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

from scantling.errors import UserError
from scantling.files import open_lock_file, read_json_object, write_atomic, write_json
from scantling.trainer.recipe import Recipe, check_recipe, differences, dump_recipe, read_yaml
from scantling.trainer.training.cleanup import remove_all
from scantling.trainer.training.sinks import EVENTS_SUFFIX

logger = logging.getLogger(__name__)

MAY_DIFFER = {
    "name",
    "data.workers",
    "train.checkpoint_every",
    "train.eval_every",
    "train.eval_samples",
    "train.keep_checkpoints",
    "train.tensorboard",
}
"""Keys that a resumed run may change, because they do not change what is computed."""
SCHEDULED = {
    "tensor.adapt",
    "train.decay",
    "train.min_lr_ratio",
    "train.schedule",
    "train.steps",
    "train.warmup",
}
"""Keys that a resumed run may change if the steps so far would have been the same."""


class InUseError(UserError):
    """Another process is writing into the run directory."""


class RunDir:
    """The paths of one run, and its lock.

    The lock is the operating system's (flock), so that it ends with the process, however that ends.
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
        self._lock: IO[str] | None = None

    @property
    def _written(self) -> list[Path]:
        """Files that a run writes once, or writes again as a whole."""
        return [self.recipe, self.environment, self.plan, self.metrics, self.result, self.report, self.after]

    def holds_run(self) -> bool:
        """Whether a run has been started here."""
        return self.recipe.exists() or self.metrics.exists() or self.checkpoints.exists()

    def was_claimed(self) -> bool:
        """True if a run has locked this folder before, even if it ended before its first step."""
        return self._lock_file.is_file()

    def lock(self) -> None:
        """Take the folder for this process until `unlock` or its end.

        Raises:
            InUseError: another process has it.
            UserError: it cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = open_lock_file(self._lock_file)  # not through a link: it is truncated below
        except FileExistsError:
            raise UserError(f"the run directory {self.path} is a file; give another --run-dir") from None
        except OSError as error:
            raise UserError(f"cannot write into the run directory {self.path}: {error.strerror or error}") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read().strip() or "unknown"
            lock.close()
            raise InUseError(
                f"the run directory {self.path} is in use by process {holder}; wait for it or give another --run-dir"
            ) from None
        except OSError as error:  # file systems that have no locks
            lock.close()
            raise UserError(f"cannot lock the run directory {self.path}: {error.strerror or error}") from None
        self._lock = lock
        with contextlib.suppress(OSError):  # a full disk; it is there for messages alone
            lock.truncate(0)
            os.pwrite(lock.fileno(), str(os.getpid()).encode(), 0)

    def unlock(self) -> None:
        """Give the folder back."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def clear(self) -> None:
        """Remove a run's files and nothing else.

        A link to a folder that is not empty is only unlinked: who else uses that folder is not known.
        """
        for folder, remove in ((self.checkpoints, remove_all), (self.tensorboard, _remove_events)):
            if folder.is_symlink():
                if not folder.is_dir() or any(folder.iterdir()):
                    logger.warning("%s is removed; it was a link to %s, which stays", folder, folder.readlink())
                    folder.unlink()
            elif folder.is_dir():
                remove(folder)
        for path in self._written:
            if path.is_symlink() or path.is_file():
                path.unlink()

    def check_replaceable(self) -> None:
        """Raise a UserError if `clear` would remove what no run has written."""
        if self.checkpoints.exists() and not self.checkpoints.is_dir():
            raise UserError(f"{self.checkpoints} is not a folder; remove it, or give another --run-dir")
        others = [path.name for path in self._written if path.exists()]
        if others and not self._launch.is_file():
            raise UserError(
                f"{self.path} holds {', '.join(others)}, and no run has been started there: nothing is replaced. "
                "Move these files, or give another --run-dir"
            )

    def stored_recipe(self) -> Recipe:
        """The recipe this run was started with."""
        if not self.recipe.is_file():
            hint = "; it ended before its first step: start it with its recipe" if self.was_claimed() else ""
            if (self.path / "config.json").exists():
                hint = "; it is a model folder, which sc.load reads: give the directory of the run that it comes from"
            raise UserError(f"{self.path} holds no run: there is no {self.recipe.name} in it{hint}")
        return check_recipe(read_yaml(self.recipe), str(self.recipe))

    def started_on(self) -> tuple[int, str]:
        """Return the number of processes and the kind of device of the newest start; 1 and "auto" if unknown."""
        try:
            content = read_json_object(self.environment)
        except UserError:
            return 1, "auto"
        world_size, device = content.get("world_size"), str(content.get("device")).partition(":")[0]
        if not isinstance(world_size, int) or not 0 < world_size < 10**7:
            world_size = 1
        return world_size, device if device in ("cpu", "cuda") else "auto"

    def check_same(self, recipe: Recipe) -> None:
        """Refuse to go on with a recipe that would compute something else, naming the keys."""
        lines = [line for line in differences(self.stored_recipe(), recipe) if line.split(":")[0] not in MAY_DIFFER]
        if any(line.split(":")[0] not in SCHEDULED for line in lines):  # `check_continues` looks at those
            listed = "\n".join(f"  - {line}" for line in lines)
            raise UserError(
                f"cannot resume {self.path} with another recipe; these keys differ (stored -> given):\n{listed}\n"
                "start a new run in another --run-dir, or give the same recipe"
            )

    def was_begun_by(self, launch: str) -> bool:
        """Whether the run in this folder was begun by a launch of torchrun, this one or one before a restart."""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            return self._launch.read_text(encoding="utf-8") == launch
        return False

    def note_launch(self, launch: str) -> None:
        """Write down which launch of torchrun has begun the run."""
        write_atomic(self._launch, launch)

    def write_recipe(self, recipe: Recipe) -> None:
        write_atomic(self.recipe, dump_recipe(recipe))

    def write_environment(self, command: list[str] | None = None, **extra: Any) -> None:
        write_json(self.environment, {**environment(), "command": command or sys.argv, **extra})


def _remove_events(folder: Path) -> None:
    """Remove our TensorBoard events from a folder, and the folder unless other files are in it."""
    for path in folder.glob(f"events.out.tfevents.*{EVENTS_SUFFIX}"):
        path.unlink()
    with contextlib.suppress(OSError):
        folder.rmdir()


def environment() -> dict[str, Any]:
    """Versions, hardware and the git commit of the working folder, as far as they can be read."""
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
