"""The blocks that layers are composed of, by the names that a config calls them."""

from __future__ import annotations

from capibara.models.blocks.attention import Attention
from capibara.models.blocks.mlp import Mlp
from capibara.models.blocks.moe import Moe
from capibara.models.blocks.spec import Block, BlockOutput, Sequences, Weight
from capibara.models.blocks.ssm import Ssm
from capibara.models.blocks.vq import Vq

__all__ = ["KINDS", "Attention", "Block", "BlockOutput", "Mlp", "Moe", "Sequences", "Ssm", "Vq", "Weight"]

KINDS: dict[str, type[Block]] = {"attention": Attention, "mlp": Mlp, "moe": Moe, "ssm": Ssm, "vq": Vq}
