"""How well a trained model predicts held-out tokens, beside n-grams that counted the same training tokens.

    python benchmarks/ngram_bytes.py runs/demo-1

Both read the documents that the run's config names and predict all of the held-out part, ends of documents included.
The n-grams are interpolated down to single tokens by the Witten-Bell rule: a context gives the next shorter one as much
weight as it has had different continuations. Without a folder only the n-grams are shown, for python:topics.
"""

from __future__ import annotations

import json
import math
import sys
from collections import defaultdict
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from capibara.kernels.lab.bench import versions
from capibara.models.tokenizer import load_tokenizer
from capibara.train.config import load_run
from capibara.train.data.cache import tokenised
from capibara.train.data.config import DataConfig
from capibara.train.data.split import split

ORDERS = (1, 2, 3, 4, 5, 6)


def documents(config: DataConfig, part: str) -> list[tuple[int, ...]]:
    tokenizer = load_tokenizer(config.tokenizer)
    found = split(tokenised(config, config.path, tokenizer), config.held_out_share, part)
    ids = np.asarray(found.tokens.ids)
    return [
        tuple(ids[begin : begin + length].tolist()) for begin, length in zip(found.begins, found.lengths(), strict=True)
    ]


def ngram_nats(train: list[tuple[int, ...]], held_out: list[tuple[int, ...]], order: int, vocab: int) -> float:
    """Mean nats a token of the held-out documents, the first of each left out: nothing comes before it."""
    follows: dict[tuple[int, ...], dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for text in train:
        for place in range(1, len(text)):
            for length in range(min(order - 1, place) + 1):
                follows[text[place - length : place]][text[place]] += 1
    totals = {context: sum(counts.values()) for context, counts in follows.items()}
    nats, counted = 0.0, 0
    for text in held_out:
        for place in range(1, len(text)):
            probability = 1.0 / vocab
            for length in range(min(order - 1, place) + 1):
                context = text[place - length : place]
                counts = follows.get(context)
                if counts is None:
                    break
                kinds, total = len(counts), totals[context]
                probability = (counts.get(text[place], 0) + kinds * probability) / (total + kinds)
            nats -= math.log(probability)
            counted += 1
    return nats / counted


def model_nats(folder: Path) -> tuple[float, int]:
    """The run's model over all of the held-out part: mean nats a token, and how many."""
    import jax

    from capibara.models import decoder
    from capibara.models.restored import from_checkpoint
    from capibara.parallel.trainer_step import compute_dtype
    from capibara.train.data.batches import open_batches

    run = load_run(folder / "config.toml", environment={})
    settings, model = run.preset.train, from_checkpoint(folder)
    dtype = compute_dtype(settings.precision)
    loss = jax.jit(lambda params, batch: decoder.loss(model.config, params, batch, dtype=dtype)[1]["loss"])
    nats = counted = 0.0
    shape: dict[str, Any] = {"batch_size": settings.batch_size, "sequence_length": settings.sequence_length}
    with open_batches(run.data, split="eval", **shape) as batches:
        for batch in batches:
            count = float(np.sum(batch["mask"])) if "mask" in batch else float(batch["targets"].size)
            nats, counted = nats + float(loss(model.params, batch)) * count, counted + count
    return nats / counted, int(counted)


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    config = DataConfig("python:topics") if folder is None else load_run(folder / "config.toml", environment={}).data
    vocab = load_tokenizer(config.tokenizer).vocab_size
    train, held_out = documents(config, "train"), documents(config, "eval")
    rows: list[dict[str, Any]] = [
        {"what": f"{order}-gram", "nats": ngram_nats(train, held_out, order, vocab)} for order in ORDERS
    ]
    if folder is not None:
        nats, counted = model_nats(folder)
        rows.append({"what": f"the model of {folder.name}", "nats": nats, "tokens": counted})
    for row in rows:
        print(f"{row['what']:<28} {row['nats']:.3f} nats a token", file=sys.stderr)
    sizes = {"train_tokens": sum(map(len, train)), "held_out_tokens": sum(map(len, held_out))}
    document = {
        "date": date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "versions": versions(),
        "data": config.path,
        **sizes,
        "rows": rows,
    }
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
