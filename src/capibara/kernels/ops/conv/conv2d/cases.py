"""The shapes conv2d is built for: layers of image models, and shapes meant to break it."""

from __future__ import annotations

from typing import Any

from capibara.kernels.core.spec import Case

REAL = frozenset({"bench", "tpu", "tune"})
ON_GPU = REAL | {"gpu"}  # lowered for a GPU too: one for each number of channels to a thread, and one product
HOSTILE = frozenset({"test", "tpu"})


def case(
    name: str, image: tuple[int, int, int, int], window: tuple[int, int], outputs: int, tags: frozenset[str],
    dtype: str = "bfloat16", **params: Any,
) -> Case:  # fmt: skip
    """`image` is NHWC."""
    filters = (*window, image[3] // params.get("groups", 1), outputs)
    return Case(name, (image, filters), dtype, params, tags)


CASES = (
    case("56x56x256-f32", (64, 56, 56, 256), (3, 3), 256, ON_GPU, "float32", precision="highest"),
    case("56x56x256", (64, 56, 56, 256), (3, 3), 256, REAL),
    case("28x28x512-f32", (32, 28, 28, 512), (3, 3), 512, REAL, "float32", precision="highest"),
    case("28x28x512", (32, 28, 28, 512), (3, 3), 512, REAL),
    case("112x112x128-f32", (16, 112, 112, 128), (3, 3), 128, ON_GPU, "float32", precision="highest"),
    case("112x112x128", (16, 112, 112, 128), (3, 3), 128, REAL),
    case("1x1", (64, 56, 56, 256), (1, 1), 64, REAL),
    case("stem", (64, 224, 224, 3), (7, 7), 64, REAL, strides=(2, 2)),
    case("patches", (64, 224, 224, 3), (16, 16), 768, ON_GPU, strides=(16, 16), padding="VALID"),
    # Hostile: odd, prime, every parameter, no image.
    case("odd", (2, 7, 5, 3), (3, 3), 5, HOSTILE, "float32", padding=((2, 0), (0, 1))),
    case("prime", (1, 13, 11, 37), (3, 3), 7, HOSTILE, padding="VALID"),
    case("everything", (1, 9, 8, 6), (3, 2), 4, HOSTILE, "float32", groups=2, dilation=(1, 2), strides=(2, 1)),
    case("side-by-side", (2, 10, 9, 3), (4, 3), 5, HOSTILE, "float32", strides=(4, 3)),
    case("no-images", (0, 4, 4, 3), (3, 3), 2, HOSTILE, "float32"),
    case("one", (1, 1, 1, 1), (3, 3), 1, HOSTILE, "float32"),
    case("hopper-edges", (1, 10, 9, 128), (3, 3), 128, frozenset({"gpu"}), "float32", precision="highest"),
    case("shardable", (16, 6, 6, 8), (3, 3), 16, frozenset({"shard", "tpu"}), "float32"),
    case("shardable-patches", (16, 6, 6, 8), (3, 3), 16, frozenset({"shard"}), "float32", strides=(3, 3)),
)
