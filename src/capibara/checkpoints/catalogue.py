"""Which checkpoints a folder has: those that are whole, what is wrong with the others, and which go."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from capibara.checkpoints import manifest as manifests
from capibara.checkpoints.manifest import Damage, Manifest
from capibara.checkpoints.policy import Keep
from capibara.checkpoints.storage import remove

__all__ = ["Catalogue", "Saved"]

_FOLDER = re.compile(r"^step_(\d{8,})(?:\.(\d+))?$")
_UNFINISHED = re.compile(r"^step_\d{8,}(?:\.\d+)?\.orbax-checkpoint-tmp.*$")


@dataclass(frozen=True)
class Saved:
    """A folder with a whole manifest."""

    name: str
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def serial(self) -> int:
        return self.manifest.serial

    @property
    def metrics(self) -> Mapping[str, float]:
        return self.manifest.metrics


class Catalogue:
    """The checkpoints below a folder (an `epath.Path`). It reads anew at each call: other processes write too."""

    def __init__(self, folder: Any) -> None:
        self.folder = folder

    def entries(self) -> list[str]:
        return [path.name for path in self.folder.iterdir()] if self.folder.exists() else []

    def saved(self) -> tuple[list[Saved], dict[str, str]]:
        """Checkpoints with a whole manifest, the newest first; and those without, with what is wrong."""
        saved, damaged = [], {}
        for name in self.entries():
            if not _FOLDER.match(name):
                continue
            try:
                saved.append(self.read(name))
            except Damage as damage:
                damaged[name] = str(damage)
        return sorted(saved, key=lambda entry: entry.serial, reverse=True), damaged

    def read(self, name: str) -> Saved:
        return Saved(name, manifests.read(self.folder / name))

    def choose(self, step: int | None, verify: bool) -> tuple[str | None, dict[str, str]]:
        """The newest good one, of this step if there is one; and what is wrong with those that come before it.

        Args:
          verify: read every file and compare it with its checksum.
        """
        saved, unreadable = self.saved()
        name, damaged = self._first_good([entry for entry in saved if step in (None, entry.step)], verify)
        chosen_step = next((entry.step for entry in saved if entry.name == name), -1)
        for folder, damage in unreadable.items():
            match = _FOLDER.match(folder)
            if match and (int(match[1]) == step if step is not None else int(match[1]) >= chosen_step):
                damaged[folder] = damage
        return name, damaged

    def _first_good(self, newest_first: Sequence[Saved], verify: bool) -> tuple[str | None, dict[str, str]]:
        damaged: dict[str, str] = {}
        for entry in newest_first:
            try:
                if verify:
                    manifests.verify(self.folder / entry.name, entry.manifest)
            except Damage as damage:
                damaged[entry.name] = str(damage)
            else:
                return entry.name, damaged
        return None, damaged

    def clear(self, name: str) -> None:
        """Remove what is there of a save that failed."""
        for entry in self.entries():
            if entry == name or entry.startswith(f"{name}.orbax-checkpoint-tmp"):
                remove(self.folder / entry)

    def prune(self, keep: Keep, rejected: Collection[str]) -> None:
        """Remove what the policy does not keep, after the newest was written to the disk.

        Args:
          rejected: those that a restore passed over: they keep no place that a good one could have.
        """
        saved, damaged = self.saved()
        stay = keep.kept([entry for entry in saved if entry.name not in rejected])
        for entry in saved:
            if entry.serial not in stay:
                # First, so that a process killed in the middle leaves an unfinished save and not a damaged one.
                (self.folder / entry.name / manifests.MANIFEST).unlink()
                remove(self.folder / entry.name)
        # Saves that were cut off: the newest was the last to be begun, and has ended.
        unfinished = [name for name in damaged if not (self.folder / name / manifests.MANIFEST).exists()]
        for name in unfinished + [name for name in self.entries() if _UNFINISHED.match(name)]:
            remove(self.folder / name)
