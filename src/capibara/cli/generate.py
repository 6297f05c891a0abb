"""`capibara generate`: text from a preset, a training run or a Hugging Face folder."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any

import typer

from capibara.cli import output

_NO_CHANGE = {"min_p": 0, "repetition_penalty": 1}


def generate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A preset (random weights), a run's folder, or a model folder.")
    ],
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="What to go on from.")],
    max_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens to write at the most.")] = 128,
    temperature: Annotated[
        float | None,
        typer.Option(min=0.0, metavar="T", help="0 takes the likeliest token; the model's own default, or 0.8."),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(min=0, help="Draw from so many likeliest, 0 from all; the model's own default.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Draw from the fewest with this share; the model's own default, or 1."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the drawing.")] = 0,
    precision: Annotated[
        str | None, typer.Option(metavar="TYPE", help="To compute in: float32 or bfloat16; the model's.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write text after a prompt, token by token.

    For example: capibara generate runs/dev --prompt "The " --max-tokens 200
    """
    from capibara.models.restored import load_model

    loaded, origin = load_model(model, precision)
    typer.echo(f"{loaded!r} from {origin}", err=True)
    tokenizer = loaded.tokenizer
    ids = loaded.encode_prompt(prompt)
    stop = tuple(sorted(loaded.eos_ids))
    own = loaded.generation.sampling
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    drawing: dict[str, Any] = {"temperature": 0.8, "top_k": 0, "top_p": 1.0}
    drawing |= {name: value for name, value in own.items() if name in drawing}
    drawing |= {name: value for name, value in given.items() if value is not None}
    if left_out := [name for name, value in own.items() if name not in drawing and value != _NO_CHANGE[name]]:
        typer.echo(f"capibara: generate does not know {' and '.join(left_out)} of generation_config.json", err=True)
    text = tokenizer.stream()
    tokens: list[int] = []
    written = ""
    started = time.perf_counter()
    for step, _ in loaded.stream(
        [ids],
        max_tokens=max_tokens,
        **drawing,
        seed=seed,
        stop=stop,
        words=tokenizer.vocab_size,
    ):
        token = int(step[0])
        tokens.append(token)
        if token in stop:
            break
        part = text.put(token)
        written += part
        if not json:
            sys.stdout.write(part)
            sys.stdout.flush()
    rest = text.end()
    seconds = time.perf_counter() - started
    if json:
        output.show_json(
            {
                "prompt": prompt,
                "text": written + rest,
                "tokens": tokens,
                "model": origin,
                "seconds": seconds,
                "tokens_per_second": len(tokens) / seconds,
                "finish_reason": "stop" if tokens and tokens[-1] in stop else "length",
            }
        )
    else:
        sys.stdout.write(rest + "\n")
