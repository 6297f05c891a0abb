"""Whether `batch_invariant` holds on this machine's device, and what it costs.

    python benchmarks/serve_invariance.py --preset llama-1b --out invariance.json
    python benchmarks/serve_invariance.py --preset dev --prompt 24 --new 8 --requests 4 --max-batch-tokens 64

    python benchmarks/serve_invariance.py --only-places       # which of a step's operations hang on a row's place

Requests run together, together once more, one by one, and with prompts cut into other pieces; the tokens and the
log-probabilities of the 20 likeliest are compared bit for bit, with `batch_invariant` and without it. Beside the count
of requests that differ stand tokens per second of one request alone and of all together. The command fails where the
bits differ with it on.

Where they do, it says of each operation of a step, by itself and in a full step's shape, how many rows come out
otherwise when all rows stand in other places, and of attention when a token stands alone or in other tiles.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any


def _run(engine: Any, prompts: list[tuple[int, ...]], new: int) -> tuple[list[Any], float]:
    """Each request's tokens with log-probabilities, and new tokens per second of all."""
    from capibara.serve import Request, SamplingParams

    asked = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True, logprobs=20)
    bits: dict[str, list[Any]] = {str(number): [] for number in range(len(prompts))}
    for number, prompt in enumerate(prompts):
        engine.add(Request(str(number), prompt, asked))
    start = time.perf_counter()
    while engine.has_work():
        for output in engine.step():
            bits[output.id] += output.logprobs or ()
    return list(bits.values()), new * len(prompts) / (time.perf_counter() - start)


def _measured(asked: argparse.Namespace, invariant: bool) -> dict[str, Any]:
    import numpy as np

    from capibara.models import ModularCapibaraModel, load_preset
    from capibara.serve import Engine, EngineConfig

    model = ModularCapibaraModel(load_preset(asked.preset).model, precision="bfloat16")
    draw = np.random.default_rng(0)
    lengths = draw.integers(max(1, asked.prompt // 4), asked.prompt + 1, asked.requests)
    prompts = [tuple(draw.integers(0, model.config.vocab, length).tolist()) for length in lengths]

    def engine(**changes: Any) -> Any:
        config = EngineConfig(
            max_sequences=asked.requests,
            max_batch_tokens=asked.max_batch_tokens,
            max_length=asked.prompt + asked.new,
            prefix_sharing=False,
            batch_invariant=invariant,
            cache_folder=asked.programs,
            **changes,
        )
        return Engine(model, config=config)

    whole = engine()
    # Makes the programs; of those for one alone the first request pays.
    before, _ = _run(whole, prompts, asked.new)
    together, rate_together = _run(whole, prompts, asked.new)
    alone = [_run(whole, [prompt], asked.new) for prompt in prompts]
    whole.close()
    cut = engine(prefill_chunk=max(1, asked.prompt // 7))
    pieces, _ = _run(cut, prompts, asked.new)
    cut.close()
    return {
        "batch_invariant": invariant,
        "requests": asked.requests,
        "differ_again": sum(bits != other for bits, other in zip(before, together, strict=True)),
        "differ_alone": sum(bits[0] != other for (bits, _), other in zip(alone, together, strict=True)),
        "differ_in_other_pieces": sum(bits != other for bits, other in zip(pieces, together, strict=True)),
        "tokens_per_second_together": rate_together,
        "tokens_per_second_alone": max(rate for _, rate in alone),
    }


def _places(asked: argparse.Namespace) -> dict[str, int]:
    """Rows that differ, by the operation of a step."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from capibara.kernels import gated_activation, paged_attention, rms_norm
    from capibara.models import decoder, load_preset
    from capibara.models.blocks.attention import Attention
    from capibara.serve.weights import prepared

    model = load_preset(asked.preset).model
    rows = asked.max_batch_tokens
    params = prepared(model, decoder.init(model, jax.random.key(0)), jnp.bfloat16)
    order = np.random.default_rng(1).permutation(rows)
    (names, *_), (layer, *_) = model.period, params["layers"]
    found: dict[str, int] = {}

    def draw(*shape: int) -> jax.Array:
        return jax.random.normal(jax.random.key(len(found)), shape, jnp.bfloat16)

    def compare(name: str, run: Any, x: jax.Array) -> None:
        run = jax.jit(run)
        one, other = (np.asarray(y, np.float32) for y in (run(x), run(x[order])))
        found[name] = int(np.any((one[order] != other).reshape(rows, -1), axis=1).sum())

    for number, name in enumerate(names):
        own = layer[decoder.slot_of(names, number)]
        for key, weight in own.items():
            if key.endswith("_by_output"):
                flat = weight.reshape(-1, weight.shape[-1])
                compare(f"{name}.{key}", lambda x, w=flat: jnp.tensordot(x, w, ((1,), (1,))), draw(rows, flat.shape[1]))
    hidden = model.hidden
    compare("norm", lambda x: rms_norm(x, jnp.ones(hidden, x.dtype)), draw(rows, hidden))
    compare("gate", lambda x: gated_activation(x[:, :hidden], x[:, hidden:], kind="silu"), draw(rows, 2 * hidden))
    compare("head", lambda x: decoder.logits(model, params, x), draw(rows, hidden))

    block = next(one for one in model.blocks.values() if isinstance(one, Attention))
    width, page_size, sequences = block.width(model), 64, asked.requests
    context = min(asked.prompt, rows)
    pages = -(-context // page_size)
    pools = [draw(sequences * pages, page_size, block.kv_heads * width) for _ in range(2)]
    table = jnp.arange(sequences * pages, dtype=jnp.int32).reshape(sequences, pages)
    queries = draw(context, block.heads, width)

    def attend(first: int, count: int) -> np.ndarray:
        """The last token's row, its sequence having `count` tokens from `first` on in this step."""
        lengths = jnp.zeros(sequences, jnp.int32).at[0].set(first + count)
        starts = jnp.full(sequences + 1, count, jnp.int32).at[0].set(0)
        query = jnp.zeros((rows, block.heads, width), jnp.bfloat16).at[:count].set(queries[first : first + count])
        out = jax.jit(lambda *given: paged_attention(*given, key_splits=1))(query, *pools, table, lengths, starts)
        return np.asarray(out[count - 1], np.float32)

    alone = attend(context - 1, 1)
    for count in sorted({min(n, context) for n in (2, 7, 40, context)}):
        found[f"attention of {count} tokens"] = int((attend(context - count, count) != alone).any())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="llama-1b")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the longest prompt")
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--max-batch-tokens", type=int, default=256)
    parser.add_argument("--programs", type=Path, help="a folder for compiled programs")
    parser.add_argument("--only-places", action="store_true")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    import jax

    rows = [] if asked.only_places else [_measured(asked, invariant) for invariant in (True, False)]
    for row in rows:
        print(json.dumps(row))
    differs = asked.only_places or rows[0]["differ_alone"] or rows[0]["differ_in_other_pieces"]
    if differs:
        rows.append({"rows_that_hang_on_their_place": _places(asked)})
        print(json.dumps(rows[-1]))
    if asked.out is not None:
        where = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "machine": platform.machine()}
        command = " ".join(["python", *sys.argv])
        kept = {"date": time.strftime("%Y-%m-%d"), "command": command, **where, "rows": rows}
        asked.out.write_text(json.dumps(kept, indent=1) + "\n")
    if differs and not asked.only_places:
        sys.exit("With batch_invariant the bits differ: it does not hold on this device.")


if __name__ == "__main__":
    main()
