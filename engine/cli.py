"""`rung`: generate, chat, doctor, model. Every engine argument is a flag, made from the fields of `engine.config`.

What belongs to the answer goes to standard output; progress and numbers go to standard error and, when that is not a
terminal, shrink to one line or nothing.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from engine.cli_options import EngineFlags, with_engine_flags
from engine.errors import RungError
from engine.sampling.params import SamplingParams

if TYPE_CHECKING:
    from engine.llm import LLM
    from engine.outputs import GenerationResult, StreamPiece

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False, help=__doc__)
model_app = typer.Typer(no_args_is_help=True, help="Built-in models.")
app.add_typer(model_app, name="model")
notes = Console(stderr=True, highlight=False, soft_wrap=True)

MaxNewTokens = Annotated[int, typer.Option(help="Most tokens to generate.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopK = Annotated[int, typer.Option(help="Choose among the k best tokens; -1 means all.")]
TopP = Annotated[float, typer.Option(help="Choose among the best tokens that reach this probability together.")]
Stop = Annotated[list[str] | None, typer.Option(help="A string that ends the answer; may be repeated.")]


@app.command()
@with_engine_flags
def generate(
    flags: EngineFlags,
    prompts: Annotated[list[str], typer.Argument(help="One prompt or several, answered one after another.")],
    chat_template: Annotated[bool, typer.Option("--chat", help="Ask through the model's chat template.")] = False,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = 0.0,
    top_k: TopK = -1,
    top_p: TopP = 1.0,
    stop: Stop = None,
) -> None:
    """Continue a prompt, streaming, and say what was reused."""
    params = SamplingParams(
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, stop=stop or ()
    )
    llm = _load(flags)
    for prompt in prompts:
        if len(prompts) > 1:
            notes.print(f"> {prompt}", style="bold", markup=False)
        if chat_template:
            pieces = llm.chat([{"role": "user", "content": prompt}], params, stream=True)
        else:
            pieces = llm.generate(prompt, params, stream=True)
        _show(pieces)


@app.command()
@with_engine_flags
def chat(
    flags: EngineFlags,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    max_new_tokens: MaxNewTokens = 512,
    temperature: Temperature = 0.0,
    top_k: TopK = -1,
    top_p: TopP = 1.0,
) -> None:
    """Talk with the model; each turn says how much of the conversation was reused. End with an empty line or ^D."""
    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p)
    llm = _load(flags)
    messages = [{"role": "system", "content": system}] if system else []
    for line in _user_lines():
        messages.append({"role": "user", "content": line})
        try:
            result = _show(llm.chat(messages, params, stream=True))
        except RungError as error:
            messages.pop()
            notes.print(f"error: {error}", style="red", markup=False)
            continue
        messages.append({"role": "assistant", "content": result.text})


@app.command()
def doctor() -> None:
    """Say which devices open here, what they can do, and why the others do not."""
    from devices.doctor import diagnose

    table = Table(box=None, pad_edge=False)
    for heading in ("device", "opens", "self-test", "what it is, or why not"):
        table.add_column(heading, overflow="fold")
    for row in diagnose():
        table.add_row(row.name, "yes" if row.opens else "no", row.self_test or "-", row.text)
    Console(highlight=False, markup=False).print(table)


@model_app.command("list")
def model_list(cache: Annotated[str | None, typer.Option("--model-cache", help="Folder of models.")] = None) -> None:
    """List the built-in models and whether they are here."""
    from engine.weights.catalog import cache_dir, list_entries

    folder = cache_dir(_cache_path(cache))
    table = Table(box=None, pad_edge=False)
    for heading in ("name", "size", "here", "licence", "description"):
        table.add_column(heading, overflow="fold")
    for entry in list_entries():
        is_here = (folder / entry.filename).exists()
        size = f"{entry.num_bytes / 1e6:.0f} MB"
        table.add_row(entry.name, size, "yes" if is_here else "no", entry.licence, entry.description)
    Console(highlight=False, markup=False).print(table)


@model_app.command("fetch")
def model_fetch(
    name: Annotated[str, typer.Argument(help="A name from `rung model list`.")],
    cache: Annotated[str | None, typer.Option("--model-cache", help="Folder of models.")] = None,
) -> None:
    """Get a built-in model and verify it; does nothing when it is here. Prints its path."""
    from engine.weights.catalog import cache_dir, resolve_model

    print(resolve_model(name, cache_dir(_cache_path(cache))))


def main() -> None:
    """Entry point of the command: errors that a user can act on are one line, without a trace."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("rung").setLevel(logging.INFO if notes.is_terminal else logging.WARNING)
    try:
        app()
    except RungError as error:
        notes.print(f"error: {error}", style="red", markup=False)
        sys.exit(2)


def _load(flags: EngineFlags) -> LLM:
    started = time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=notes, transient=True, disable=not notes.is_terminal) as bar:
        task = bar.add_task("importing", total=None)
        from engine.llm import LLM

        llm = LLM(
            progress=lambda done, total: bar.update(task, description="weights", completed=done, total=total), **flags
        )
    notes.print(f"loaded {llm.config.model.model} in {time.perf_counter() - started:.1f} s", style="dim", markup=False)
    return llm


def _show(pieces: Iterator[StreamPiece]) -> GenerationResult:
    """Print an answer as it comes, with its speed while it runs and a line of numbers at the end."""
    with notes.status("", spinner="line") if notes.is_terminal else _NoStatus() as status:
        first, n = 0.0, 0
        for piece in pieces:
            n += len(piece.token_ids)
            first = first or time.perf_counter()
            print(piece.text, end="", flush=True)
            if n > 1:
                status.update(f"{(n - 1) / (time.perf_counter() - first):.1f} tokens/s")
            if piece.result is not None:
                result = piece.result
    print(flush=True)
    usage, timings = result.usage, result.timings
    notes.print(
        f"[{usage.completion_tokens} tokens, {timings.decode_tokens_per_s:.1f} tokens/s; first after "
        f"{timings.time_to_first_token_s * 1e3:.0f} ms; reused {usage.cached_tokens} of {usage.prompt_tokens} prompt "
        f"tokens; ended by {result.finish_reason}] {result.message}".rstrip(),
        style="dim",
        markup=False,
    )
    return result


class _NoStatus:
    """Stands in for a status line where there is no terminal."""

    def __enter__(self) -> _NoStatus:
        return self

    def __exit__(self, *exc: object) -> None: ...

    def update(self, text: str) -> None: ...


def _user_lines() -> Iterator[str]:
    is_terminal = sys.stdin.isatty()
    while True:
        try:
            line = input("you> " if is_terminal else "").strip()
        except EOFError:
            return
        if not line:
            return
        yield line


def _cache_path(folder: str | None) -> Any:
    from engine.config import EngineConfig

    return EngineConfig.from_kwargs(model_cache=folder).model_cache
