"""Turns the fields of `engine.config` into command-line flags, so that flag, keyword and default can never differ."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer

from engine.config import all_fields, default_of

EngineFlags = dict[str, Any]
"""Keyword arguments for `LLM`: the flags that differ from their defaults."""

_GROUPS = {
    "ModelArgs": "Model",
    "MemoryArgs": "Memory",
    "CacheArgs": "Prefix cache",
    "SessionArgs": "Sessions",
    "ScheduleArgs": "Scheduling",
}


def with_engine_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command every engine flag; it receives those that were set as its first argument."""
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    flags = _flag_parameters()

    @wraps(command)
    def run(**kwargs: Any) -> None:
        defaults = {name: parameter.default for name, parameter in flags.items()}
        given = {name: kwargs.pop(name) for name in defaults}
        command({name: value for name, value in given.items() if value != defaults[name]}, **kwargs)

    parameters = [*own, *flags.values()]
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    )
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _flag_parameters() -> dict[str, inspect.Parameter]:
    parameters = {}
    for theme, f in all_fields():
        kind, default = get_type_hints(theme)[f.name], default_of(f)
        spellings = [f"--{name.replace('_', '-')}" for name in (f.name, *f.metadata["aliases"])]
        choices = f" [{', '.join(f.metadata['choices'])}]" if f.metadata["choices"] else ""
        option = typer.Option(*spellings, help=f.metadata["help"] + choices, rich_help_panel=_GROUPS[theme.__name__])
        parameters[f.name] = inspect.Parameter(
            f.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
        )
    return parameters
