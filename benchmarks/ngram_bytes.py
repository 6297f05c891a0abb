"""How well a trained model predicts held-out tokens, beside n-grams that counted the same training tokens.

    python benchmarks/ngram_bytes.py runs/demo-1

Both read the documents that the run's config names and predict all of the held-out part, ends of documents included.
The n-grams are interpolated down to single tokens by the Witten-Bell rule: a context gives the next shorter one as much
weight as it has had different continuations. Without a folder only the n-grams are shown, for python:topics.
"""

from __future__ import annotations

import json
import sys
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


def _windows(documents: list[tuple[int, ...]], order: int, vocab: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """For contexts of 0 to order - 1 tokens: (number of the predicted token, context and token as one integer).

    Predicted are all tokens but the first of a document; a context does not reach before its document.
    """
    ids = np.concatenate([np.asarray(text, np.int64) for text in documents])
    lengths = np.array([len(text) for text in documents])
    place = np.arange(len(ids)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    windows, code = [], ids
    for length in range(order):
        if length:  # the token so many before, as the leading digit
            code = code.copy()
            code[length:] += ids[:-length] * vocab**length
        there = np.flatnonzero(place >= max(1, length))
        windows.append((there, code[there]))
    return windows


def ngram_nats(
    train: list[tuple[int, ...]], held_out: list[tuple[int, ...]], orders: tuple[int, ...], vocab: int
) -> dict[int, float]:
    """Order -> mean nats a token of the held-out documents, the first of each left out: nothing comes before it."""
    most = max(orders)
    if vocab**most > 2**63 - 1:
        raise SystemExit(f"{vocab} ** {most} does not fit an integer: choose lower orders")
    counted = sum(len(text) - 1 for text in held_out)
    chances = np.full(sum(len(text) for text in held_out), 1.0 / vocab)
    nats = {}
    pairs = zip(_windows(train, most, vocab), _windows(held_out, most, vocab), strict=True)
    for order, ((_, seen), (there, asked)) in enumerate(pairs, start=1):
        grams, counts = np.unique(seen, return_counts=True)
        contexts, first, kinds = np.unique(grams // vocab, return_index=True, return_counts=True)
        totals = np.add.reduceat(counts, first)
        context = np.searchsorted(contexts, asked // vocab).clip(max=len(contexts) - 1)
        known = contexts[context] == asked // vocab
        gram = np.searchsorted(grams, asked).clip(max=len(grams) - 1)
        times = np.where(grams[gram] == asked, counts[gram], 0)
        blended = (times + kinds[context] * chances[there]) / (totals[context] + kinds[context])
        # A context that was never seen has no say; longer ones were not seen either.
        chances[there] = np.where(known, blended, chances[there])
        if order in orders:
            nats[order] = float(-np.log(chances[_windows(held_out, 1, vocab)[0][0]]).sum() / counted)
    return nats


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
    nats_by_order = ngram_nats(train, held_out, ORDERS, vocab)
    rows: list[dict[str, Any]] = [{"what": f"{order}-gram", "nats": nats} for order, nats in nats_by_order.items()]
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
