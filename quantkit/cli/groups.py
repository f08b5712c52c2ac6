"""Options in groups: a command's parameter that is a dataclass stands for an option in each of its fields."""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import wraps
from typing import Any, get_type_hints

Command = Callable[..., None]


def grouped(command: Command) -> Command:
    """The command as typer reads it, with all options side by side; it is called with the groups made of them.

    A field says of its option what a parameter would: the annotation what it is, the default what stands for it.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    options: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            of_fields = get_type_hints(groups[name], include_extras=True)
            options += [_option(one.name, of_fields[one.name], _default(one)) for one in fields(groups[name])]
        else:
            options.append(_option(name, hints[name], parameter.default))

    @wraps(command)
    def with_groups(**values: Any) -> None:
        made = {
            name: group(**{one.name: values.pop(one.name) for one in fields(group)}) for name, group in groups.items()
        }
        command(**values, **made)

    with_groups.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    with_groups.__annotations__ = {one.name: one.annotation for one in options}
    return with_groups


def _option(name: str, annotation: object, default: object) -> inspect.Parameter:
    # by its name: so one without a default may follow others
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def _default(field: "Field[Any]") -> object:
    return inspect.Parameter.empty if field.default is MISSING else field.default
