"""The config numbers of published models, and which of them nothing is ever tuned or fitted on."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from pathlib import Path

from capibara import toml_tables

__all__ = ["Model", "held_back", "models"]

FILE = Path(__file__).with_name("models.toml")
# Part of the hash below. It was chosen once, before any row was timed: so that every family of ops has models on both
# sides, and that none of the quarter is a model whose shapes a rule or a tuned table was made on before.
_SALT = "lattice-21162"


@dataclasses.dataclass(frozen=True)
class Model:
    """What a published config says; None and empty for parts that the model does not have.

    Attributes:
      hidden, ffn, vocab: widths of the residual stream, of the feed-forward layer, and the number of words.
      gated, activation, norm: of the feed-forward layer and of the residual stream.
      heads, kv_heads, head_dim: of attention; `window` and `softcap` where it has them, `qk_norm` where heads are
        normalised.
      tokens: lengths that are the model's own, of images and sound, which all see each other; text has any length and
        looks back.
      experts, top_k, expert_ffn, gate: of a mixture.
      inner, state, conv_width: channels, states and taps of a state space model.
      dual_heads, dual_head_dim, dual_groups: where it has the dual form.
      recurrence: width of a gated linear recurrence.
      images: (side, channels, filters, window, stride) of convolutions.
      codes, code_width, code_rows: of a quantiser, and the vectors that an image or a second of sound has.
      long_filter: taps of a long convolution over `hidden` channels.
      transforms: (points, axes) of Fourier transforms over the hidden channels.
    """

    hidden: int | None = None
    ffn: int | None = None
    vocab: int | None = None
    gated: bool = True
    activation: str = "silu"
    norm: str = "rms"
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    window: int | None = None
    softcap: float | None = None
    qk_norm: bool = False
    tokens: tuple[int, ...] = ()
    experts: int | None = None
    top_k: int = 1
    expert_ffn: int | None = None
    gate: str = "softmax"
    inner: int | None = None
    state: int | None = None
    conv_width: int | None = None
    dual_heads: int | None = None
    dual_head_dim: int | None = None
    dual_groups: int = 1
    recurrence: int | None = None
    images: tuple[tuple[int, ...], ...] = ()
    codes: int | None = None
    code_width: int | None = None
    code_rows: int | None = None
    long_filter: int | None = None
    transforms: tuple[tuple[int, ...], ...] = ()


@functools.lru_cache(maxsize=1)
def models() -> dict[str, Model]:
    """Every model by name, in the order of the file."""
    table = toml_tables.read(FILE)
    return {name: toml_tables.build_part(Model, values, table, name) for name, values in table.values.items()}


def held_back(name: str) -> bool:
    """Whether a model is of the quarter that no rule, table or time model is ever made on: by a hash of its name.

    >>> held_back("llama-3-8b"), sum(map(held_back, models())) / len(models()) < 0.3
    (False, True)
    """
    digest = hashlib.sha256(f"{_SALT}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % 4 == 0
