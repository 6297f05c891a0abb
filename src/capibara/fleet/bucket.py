"""A bucket that every host has as a folder: where a run's checkpoints outlive its machines."""

from __future__ import annotations

import re
from collections.abc import Sequence

from capibara.errors import rule_error

__all__ = ["MOUNT", "check_bucket"]

MOUNT = "/bucket"
"""Where the bucket is, on every host."""


def check_bucket(bucket: str, stores: Sequence[str]) -> str:
    """The bucket's own name, out of "gs://name"."""
    match = re.fullmatch(rf"({'|'.join(stores)})://([a-z0-9][a-z0-9._-]*[a-z0-9])/?", bucket)
    if match is None:
        known = " or ".join(f"{store}://NAME" for store in stores)
        raise rule_error(f"A bucket is {known}", repr(bucket), f"write the bucket alone; its folders are in {MOUNT}")
    return match[2]
