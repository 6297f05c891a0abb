"""`capibara serve`: a model behind OpenAI's interface."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from capibara.cli import output

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from capibara.fleet.scaling.scaler import TpuAutoScaler
    from capibara.models.modular import ModularCapibaraModel
    from capibara.observe.goodput import Goodput
    from capibara.serve.config import EngineConfig
    from capibara.serve.engine import Engine
    from capibara.serve.link import ModelCard


def serve(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A preset (random weights), a run's folder, or a model folder.")
    ],
    host: Annotated[str, typer.Option(metavar="H", help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="P", help="0 takes a free one.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(metavar="K", help="Clients must send it; several may be given. Else $CAPIBARA_API_KEY."),
    ] = None,
    target_latency_ms: Annotated[
        float | None,
        typer.Option(min=0.0, metavar="X", help="Keep the 95th percentile of gaps between tokens below it."),
    ] = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="What clients call the model; its folder's.")] = None,
    max_sequences: Annotated[int, typer.Option(min=1, metavar="N", help="Requests that run at a time.")] = 64,
    max_queue: Annotated[int, typer.Option(min=1, metavar="N", help="That wait; one more gets 429.")] = 256,
    max_batch_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="Of one step, prompts' and new ones.")
    ] = 2048,
    memory_share: Annotated[
        float, typer.Option(min=0.01, max=1.0, metavar="S", help="Of the device's memory, for weights and cache.")
    ] = 0.85,
    max_length: Annotated[
        int | None, typer.Option(min=2, metavar="N", help="Tokens of a prompt and its answer; the model's context.")
    ] = None,
    max_prompt: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Tokens of a prompt; what the context leaves.")
    ] = None,
    max_body_bytes: Annotated[int, typer.Option(min=1024, metavar="N", help="Of a request.")] = 4 << 20,
    request_timeout_s: Annotated[float, typer.Option(min=0.1, metavar="S", help="For a whole answer.")] = 600.0,
    client_timeout_s: Annotated[
        float,
        typer.Option(min=0.1, metavar="S", help="For a client to send its request, or to read some of the answer."),
    ] = 30.0,
    drain_timeout_s: Annotated[
        float, typer.Option(min=0.0, metavar="S", help="For running requests at SIGTERM.")
    ] = 60.0,
    cors_origin: Annotated[
        list[str] | None, typer.Option(metavar="ORIGIN", help="Pages that may ask from a browser; none.")
    ] = None,
    chat_template: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Jinja, in place of the model's own.", exists=True, dir_okay=False),
    ] = None,
    tool_parser: Annotated[
        str | None, typer.Option(metavar="NAME", help="hermes, llama3 or mistral; as the chat template has it.")
    ] = None,
    precision: Annotated[
        str | None, typer.Option(metavar="TYPE", help="To compute in: float32 or bfloat16; the model's.")
    ] = None,
    cache_dtype: Annotated[
        str | None, typer.Option(metavar="TYPE", help="Of keys and values: float32, bfloat16, int8; the model's.")
    ] = None,
    weights: Annotated[str | None, typer.Option(metavar="TYPE", help="int8; as they are.")] = None,
    speculative_tokens: Annotated[
        int, typer.Option(min=0, metavar="N", help="Guessed ahead from what a request has so far; 0 guesses none.")
    ] = 0,
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="The same bits whatever a request is batched with.")
    ] = False,
    adapter: Annotated[
        list[str] | None, typer.Option(metavar="NAME=FOLDER", help="A LoRA adapter that clients may name as a model.")
    ] = None,
    generation_defaults: Annotated[
        bool,
        typer.Option(help="Sample as the model's generation_config.json says, where a request says nothing."),
    ] = True,
    seed: Annotated[int, typer.Option(help="Of requests that bring none.")] = 0,
    chips: Annotated[int, typer.Option(min=1, metavar="N", help="That weights and cache are spread over.")] = 1,
    scale: Annotated[
        str | None, typer.Option(metavar="MIN:MAX", help="Go over to more or fewer chips with the load.")
    ] = None,
    scaling_policy: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of --scale: cost_aware (without it), utilization or fixed.")
    ] = None,
    cost_limit_per_hour: Annotated[
        float | None, typer.Option(metavar="USD", help="Of --scale: chips that could cost more are not taken; 200.")
    ] = None,
    warm_up: Annotated[bool, typer.Option(help="Compile every program before the first request.")] = True,
    page: Annotated[bool, typer.Option(help="A page to chat on at /.")] = True,
    goodput_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keep where the time went, over restarts of this server.", dir_okay=False),
    ] = None,
    log_level: Annotated[str, typer.Option(metavar="LEVEL", help="debug, info, warning or error.")] = "info",
    json: Annotated[bool, typer.Option("--json", help="Print the line that it is ready as JSON.")] = False,
) -> None:
    """Serve a model with OpenAI's interface, and a page to chat on.

    It prints one line with its address when it is ready, and logs JSON on standard error. SIGTERM lets it finish what
    runs. For example: capibara serve runs/dev --port 0
    """
    from capibara.serve.installed import check_installed

    check_installed("capibara serve")
    from capibara.compile.persistent import persistent_cache
    from capibara.errors import unknown_name
    from capibara.kernels.core.tables import cache_directory
    from capibara.observe.goodput import SERVER_PHASES, Goodput
    from capibara.serve.config import EngineConfig, check_target
    from capibara.serve.link import ServerSettings
    from capibara.serve.server import Loaded, Server
    from capibara.serve.tools.formats import parser_of

    levels = ("debug", "info", "warning", "error")
    if log_level not in levels:
        raise unknown_name("log level", log_level, levels)
    if tool_parser is not None:
        parser_of(tool_parser)
    check_target(target_latency_ms)
    template = None if chat_template is None else chat_template.read_text(encoding="utf-8")
    keys = api_key or [key for key in [os.environ.get("CAPIBARA_API_KEY", "")] if key]
    settings = ServerSettings(
        api_keys=tuple(keys),
        cors_origins=tuple(cors_origin or ()),
        max_body_bytes=max_body_bytes,
        request_timeout_s=request_timeout_s,
        client_timeout_s=client_timeout_s,
        drain_timeout_s=drain_timeout_s,
        tool_parser=tool_parser,
        chat_template=template,
        page=page,
        log_level=log_level,
    )
    config = EngineConfig(
        max_sequences=max_sequences,
        max_queue=max_queue,
        max_batch_tokens=max_batch_tokens,
        max_length=max_length,
        memory_share=memory_share,
        cache_dtype=cache_dtype,
        weights=weights,
        speculative_tokens=speculative_tokens,
        batch_invariant=batch_invariant,
        adapters=_adapters(adapter or [], name or _name_of(model)),
        seed=seed,
        cache_folder=cache_directory().parent / "programs",
    )
    scaler = _scaler(scale, scaling_policy, cost_limit_per_hour)
    # The engine's programs have a folder of their own, and are not even traced again; this is for all others: weights
    # that are drawn, placed and converted.
    persistent_cache()
    books = Goodput(goodput_file, phases=SERVER_PHASES, counts="serving", flush_seconds=60.0)
    server = Server(host, port, settings, books=books)
    if server.exposed and not keys:
        typer.echo(f"capibara: {host} is open to other machines, and there is no --api-key", err=True)

    read = _once(model, precision)

    def load(devices: Sequence[Any] | None = None) -> Loaded:
        told = replace(config, mesh=_mesh(chips, devices))
        engine, card = load_engine(
            model, name, template, told, max_prompt, warm_up, generation_defaults, books, read, target_latency_ms
        )
        if target_latency_ms is None:
            return Loaded(engine, card)
        from capibara.serve.latency import LatencyController

        latency = LatencyController(engine, target_latency_ms)
        with _closed_if_it_fails(engine):
            typer.echo(f"capibara: {latency.calibrate()}", err=True)
        return Loaded(engine, card, latency)

    def ready(card: ModelCard) -> None:
        line = {"model": card.name, "address": server.address, "origin": card.origin, "max_length": card.max_length}
        if json:
            output.show_json_line(line)
        else:
            typer.echo(f"capibara: {card.name} at {server.address} ({card.origin})")
        sys.stdout.flush()

    with server.stopped_by_signals(), contextlib.ExitStack() as stack:
        if scaler is not None:
            stack.enter_context(scaler.managed_scaling())
        server.run(load, ready, load)
    spent, per_hour = books.report(), _dollars_per_hour()
    cost = "" if per_hour is None else f"; {sum(spent.dollars(per_hour).values()):.2f} USD"
    typer.echo(f"capibara: {spent}{cost}", err=True)


def _dollars_per_hour() -> float | None:
    """What this machine's devices cost together, on demand where their price is first listed; None of a CPU's."""
    from capibara.hardware import chip_for
    from capibara.hardware.devices import attached
    from capibara.prices import price_table

    devices = attached()
    chip = chip_for(devices[0].device_kind)
    found = None if chip is None or devices[0].platform == "cpu" else price_table().find(chip.name)
    return None if found is None or chip is None else found.usd * len(devices) / chip.devices_per_chip


def _scaler(scale: str | None, policy: str | None, cost_limit_per_hour: float | None) -> TpuAutoScaler | None:
    from capibara.errors import rule_error
    from capibara.fleet import TpuAutoScaler
    from capibara.hardware import chip_for
    from capibara.hardware.devices import attached

    if scale is None:
        for option, value in (("--scaling-policy", policy), ("--cost-limit-per-hour", cost_limit_per_hour)):
            if value is not None:
                raise rule_error(f"{option} is for a server that is scaled", f"{option} {value}", "add --scale 1:8")
        return None
    least, found, most = scale.partition(":")
    if not (found and least.isdecimal() and most.isdecimal()):
        raise rule_error("--scale has the fewest and the most chips", repr(scale), "write --scale 1:8")
    device = attached()[0]
    chip = chip_for(device.device_kind)
    priced = "tpu_v4" if device.platform == "cpu" or chip is None else chip.name  # simulated ones are held to be v4's
    return TpuAutoScaler(
        int(least),
        int(most),
        scaling_policy="cost_aware" if policy is None else policy,
        cost_limit_per_hour=200.0 if cost_limit_per_hour is None else cost_limit_per_hour,
        cost_model=f"{priced}_pricing",
    )


def _mesh(chips: int, devices: Sequence[Any] | None) -> Mesh | None:
    """The devices in one axis, along which products are split; None of a single one. The first `chips` at first."""
    import jax

    from capibara.errors import rule_error
    from capibara.hardware import chip_for
    from capibara.mesh import MeshConfig

    if devices is None:
        there = jax.devices()
        chip = chip_for(there[0].device_kind) if there[0].platform == "tpu" else None
        wanted = chips * (1 if chip is None else chip.devices_per_chip)
        if wanted > len(there):
            raise rule_error("--chips are chips of this machine", f"{chips} of {len(there)} devices", "use fewer")
        devices = there[:wanted]
    return None if len(devices) == 1 else MeshConfig((len(devices),), ("model",)).build(list(devices))


def _once(model: str, precision: str | None = None) -> Callable[[], tuple[ModularCapibaraModel, str]]:
    """The model, read when it is first asked for: a server that goes over to other devices reads no files again."""
    from capibara.models.restored import load_model

    return functools.cache(lambda: load_model(model, precision))


@contextlib.contextmanager
def _closed_if_it_fails(engine: Engine) -> Iterator[None]:
    """A server that cannot go over to other devices makes an engine on those that it had, and needs their memory."""
    try:
        yield
    except BaseException:
        engine.close()
        raise


def _adapters(texts: list[str], model: str) -> dict[str, str]:
    from capibara.errors import rule_error

    adapters: dict[str, str] = {}
    for text in texts:
        name, found, folder = text.partition("=")
        if not (name and found and folder):
            raise rule_error("An adapter is NAME=FOLDER", repr(text), "write --adapter mine=runs/lora")
        if name == model or name in adapters:  # clients could never ask for it
            taken = "the model's name" if name == model else "two of that name"
            raise rule_error("An adapter has a name of its own", f"{name!r}, {taken}", "choose another, or use --name")
        adapters[name] = folder
    return adapters


def _name_of(model: str) -> str:
    path = Path(model)
    if path.is_file():
        return path.stem
    return path.resolve().name if path.is_dir() else model


def load_engine(
    model: str,
    name: str | None,
    template: str | None,
    config: EngineConfig,
    max_prompt: int | None,
    warm_up: bool,
    generation_defaults: bool = True,
    books: Goodput | None = None,
    read: Callable[[], tuple[ModularCapibaraModel, str]] | None = None,
    target_latency_ms: float | None = None,
) -> tuple[Engine, ModelCard]:
    """The engine of a model that a command was given, its programs compiled, and what clients are told of it."""
    from capibara.serve.engine import Engine
    from capibara.serve.http.prompts import check_template
    from capibara.serve.latency import choose_steps
    from capibara.serve.link import ModelCard

    loaded, origin = (read or _once(model))()
    check_template(loaded.tokenizer, template)
    engine = Engine(loaded, config=config)
    with _closed_if_it_fails(engine):
        choose_steps(engine, target_latency_ms)
    if warm_up:
        with (
            _closed_if_it_fails(engine),
            output.progress() as bar,
            contextlib.nullcontext() if books is None else books.phase("warm_up"),
        ):
            task = bar.add_task("")
            made = engine.warm_up(
                lambda done, total, what: bar.update(task, completed=done, total=total, description=what)
            )
        kinds = f"{made.compiled} compiled, {made.from_disk} from disk"
        typer.echo(f"capibara: {made.programs} programs in {made.seconds:.1f} s, {kinds}", err=True)
    card = ModelCard(
        name=name or _name_of(model),
        origin=origin,
        created=int(time.time()),
        tokenizer=str(loaded.config.tokenizer),
        max_length=engine.max_length,
        max_prompt=min(max_prompt or engine.max_prompt, engine.max_prompt),
        vocab_size=loaded.config.vocab,
        prompt_bos=loaded.prompt_bos,
        max_sequences=engine.config.max_sequences,
        max_queue=engine.config.max_queue,
        adapters=tuple(engine.adapters),
        sampling_defaults=dict(loaded.generation.sampling) if generation_defaults else {},
        dollars_per_hour=_dollars_per_hour(),
    )
    if card.sampling_defaults:
        shown = ", ".join(f"{name} {value:g}" for name, value in card.sampling_defaults.items())
        typer.echo(f"capibara: requests are sampled with {shown} where they say nothing else", err=True)
    return engine, card
