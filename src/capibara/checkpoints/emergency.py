"""Emergency copies: between two checkpoints, each process keeps its own part of the state on its own machine.

They are for a process that dies or a program that is restarted while the machines stay: /dev/shm or a local disk, no
network, no waiting for others. A file is a process's shards, the run's `extra` with the data's position, and a checksum
of each shard; the two newest are kept, so that while the one of step n is being written all processes have n - 1.
They are used when all processes of the program have a whole file of the same step.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import struct
import threading
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capibara.checkpoints.leaves import (
    Leaf,
    changed,
    check_target,
    default_sharding,
    describe,
    from_storable,
    named_leaves,
    storable,
)
from capibara.checkpoints.manifest import Damage
from capibara.checkpoints.shards import Index, bounds, covered, from_pieces, host_shards
from capibara.processes import gather, process_count, process_index

__all__ = ["EmergencyCopies", "EmergencyCopy"]

GENERATIONS = 2
_MAGIC = b"CAPICOPY1"
_NAME = re.compile(r"^step_(?P<step>\d+)\.process_(?P<process>\d+)_of_(?P<count>\d+)$")
_HEAD = struct.Struct("<9sQI")  # magic, bytes of the header, its CRC-32


@dataclass(frozen=True)
class EmergencyCopy:
    """A state that came back from the local folder."""

    step: int
    arrays: dict[str, Any]
    extra: dict[str, Any]
    source: Path


class EmergencyCopies:
    """The local copies of one process.

    Args:
      folder: local to the machine; processes on one machine may share it.
      timeout: seconds that processes wait for each other at a restore.
    """

    def __init__(self, folder: str | os.PathLike[str], timeout: float = 300.0) -> None:
        self.folder = Path(folder).expanduser().absolute()
        self.timeout = timeout
        self._thread: threading.Thread | None = None
        self._failures: list[str] = []

    def _file(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}.process_{process_index()}_of_{process_count()}"

    def _files(self) -> dict[int, Path]:
        """Step -> this process's file, in a program of as many processes."""
        if not self.folder.is_dir():
            return {}
        me = (process_index(), process_count())
        matches = ((path, _NAME.match(path.name)) for path in self.folder.iterdir())
        return {int(m["step"]): path for path, m in matches if m and (int(m["process"]), int(m["count"])) == me}

    def copy(self, step: int, state: Any, extra: Mapping[str, Any], after: int = 0) -> None:
        """Take the state to the host now, and write it in the background.

        Args:
          after: the serial of the checkpoint that this follows, which says later whether it is newer.
        """
        import jax

        leaves = named_leaves(state)
        described = {name: describe(name, leaf) for name, leaf in leaves.items()}
        arrays = {name: storable(leaf) for name, leaf in leaves.items()}
        for leaf in arrays.values():
            if isinstance(leaf, jax.Array):
                leaf.copy_to_host_async()  # all transfers at once, then wait for each
        pieces = {name: host_shards(leaf) for name, leaf in arrays.items()}
        self.wait()
        self._thread = threading.Thread(
            target=self._write, args=(step, after, dict(extra), described, pieces), name="capibara-emergency"
        )
        self._thread.start()

    def _write(
        self,
        step: int,
        after: int,
        extra: dict[str, Any],
        described: dict[str, Leaf],
        pieces: dict[str, dict[Index, Any]],
    ) -> None:
        path = self._file(step)
        draft = path.with_name(path.name + ".draft")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            rows, blocks, offset = [], [], 0
            for name, shards in pieces.items():
                for place, value in shards.items():
                    block = value.reshape(-1).view("uint8") if value.size else value.reshape(-1)
                    rows.append([name, [list(pair) for pair in place], offset, block.nbytes, zlib.crc32(block)])
                    blocks.append(block)
                    offset += block.nbytes
            header = json.dumps(
                {
                    "step": step,
                    "after": after,
                    "extra": extra,
                    "leaves": {name: leaf.to_json() for name, leaf in described.items()},
                    "shards": rows,
                }
            ).encode()
            with open(draft, "wb") as file:
                file.write(_HEAD.pack(_MAGIC, len(header), zlib.crc32(header)))
                file.write(header)
                for block in blocks:
                    file.write(block)
            os.replace(draft, path)
            self._prune(step)
        except OSError as error:
            self._failures.append(
                f"the emergency copy of step {step} could not be written to {self.folder}: {error.strerror or error}; "
                f"the one before it and the checkpoints are as they were"
            )
            with contextlib.suppress(OSError):  # what kept it from being written keeps it from being removed
                draft.unlink()

    def _prune(self, step: int) -> None:
        """Keep the last generations; after going back to an earlier step, later copies are of what did not happen."""
        keep = sorted((other for other in self._files() if other <= step), reverse=True)[:GENERATIONS]
        for path in self.folder.iterdir():
            match = _NAME.match(path.name)
            if match is None:
                continue
            other_program = int(match["count"]) != process_count()
            mine = int(match["process"]) == process_index()
            if other_program or (mine and int(match["step"]) not in keep):
                path.unlink(missing_ok=True)  # of another program: the first to come removes it

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def failures(self) -> list[str]:
        """What went wrong since the last call."""
        failures, self._failures = self._failures, []
        return failures

    def close(self) -> None:
        self.wait()

    def restore(
        self,
        target: Mapping[str, Any],
        wanted: Mapping[str, Leaf],
        newer_than: tuple[int, int],
        partial: bool = False,
        renewed: Sequence[str] = (),
    ) -> EmergencyCopy | None:
        """The newest copy that every process has whole, and that covers the target's layout; None where there is none.

        Args:
          target: shapes with shardings, by name.
          newer_than: serial and step of the checkpoint that would be restored otherwise.
          renewed: as of `Checkpoints.restore`.
        """
        self.wait()
        mine: dict[int, _Header] = {}
        for step, path in self._files().items():
            try:
                header = _Header.read(path)
            except (Damage, OSError) as damage:
                self._refuse(path, damage)
                continue
            if (header.after, step) > newer_than:
                header.leave_out(changed(header.leaves, wanted, renewed))
                if why := header.lacks(target):
                    self._refuse(path, why)
                else:
                    mine[step] = header
        common = set.intersection(*map(set, gather("emergency/steps", sorted(mine), self.timeout)))
        for step in sorted(common, reverse=True):
            header = mine[step]
            there = {name: leaf for name, leaf in wanted.items() if name not in header.left_out}
            check_target(header.leaves, there, str(header.path), partial)
            pieces: dict[str, dict[Index, Any]] | None = None
            try:
                pieces = header.pieces()
            except (Damage, OSError) as damage:
                self._refuse(header.path, damage)
            whole = all(gather("emergency/whole", pieces is not None, self.timeout))
            if whole and pieces is not None:
                arrays = {name: header.array(name, target[name], pieces[name]) for name in there}
                return EmergencyCopy(step, arrays, header.extra, header.path)
        return None

    def _refuse(self, path: Path, why: object) -> None:
        self._failures.append(f"the emergency copy {path.name} is not used: {why}")


class _Header:
    """What a file says of itself, its own checksum checked."""

    def __init__(self, path: Path, header: Mapping[str, Any], start: int) -> None:
        self.path = path
        self.after: int = header["after"]
        self.extra: dict[str, Any] = header["extra"]
        self.leaves = {name: Leaf.from_json(leaf) for name, leaf in header["leaves"].items()}
        self.left_out: frozenset[str] = frozenset()
        self._start = start
        self._shards = [
            (name, tuple((a, b) for a, b in place), offset, size, crc)
            for name, place, offset, size, crc in header["shards"]
        ]

    def leave_out(self, names: frozenset[str]) -> None:
        """Read the file as if it had none of these."""
        self.left_out = names
        self.leaves = {name: leaf for name, leaf in self.leaves.items() if name not in names}
        self._shards = [shard for shard in self._shards if shard[0] not in names]

    @classmethod
    def read(cls, path: Path) -> _Header:
        with open(path, "rb") as file:
            head = file.read(_HEAD.size)
            if len(head) != _HEAD.size:
                raise Damage("it is cut")
            magic, size, crc = _HEAD.unpack(head)
            header = file.read(size) if magic == _MAGIC else b""
            if magic != _MAGIC or zlib.crc32(header) != crc:
                raise Damage("its header is cut or was changed")
            return cls(path, json.loads(header), file.tell())

    def pieces(self) -> dict[str, dict[Index, Any]]:
        """Every shard, its checksum checked."""
        pieces: dict[str, dict[Index, Any]] = {name: {} for name in self.leaves}
        with open(self.path, "rb") as file:
            for name, place, offset, size, crc in self._shards:
                file.seek(self._start + offset)
                block = file.read(size)
                if len(block) != size or zlib.crc32(block) != crc:
                    raise Damage(f"{name} is cut or was changed: its checksum does not fit")
                pieces[name][place] = _as_array(block, self.leaves[name].dtype, place)
        return pieces

    def lacks(self, target: Mapping[str, Any]) -> str:
        """What of the target's layout on this process is not in the file; "" where all of it is."""
        places: dict[str, list[Index]] = {}
        for name, place, *_ in self._shards:
            places.setdefault(name, []).append(place)
        for name, leaf in target.items():
            if name not in self.leaves:
                continue  # `check_target` says it better
            shape = self.leaves[name].shape
            sharding = default_sharding(name, leaf)
            for index in sharding.addressable_devices_indices_map(shape).values():
                if not covered(bounds(index, shape), places.get(name, [])):
                    return f"it has not all that this process needs of {name}: the mesh or its processes were others"
        return ""

    def array(self, name: str, leaf: Any, pieces: Mapping[Index, Any]) -> Any:
        saved = self.leaves[name]
        return from_storable(from_pieces(saved.shape, default_sharding(name, leaf), pieces), saved)


def _as_array(block: bytes, dtype: str, place: Index) -> Any:
    import jax.numpy as jnp
    import numpy as np

    return np.frombuffer(block, jnp.dtype(dtype)).reshape([stop - start for start, stop in place])
