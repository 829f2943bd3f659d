"""The form of a run: made from the config's fields, and read back into the nested dict the config is made from."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic.fields import FieldInfo

from trainer_core.config import RunConfig, Section, allowed, as_text, choices, fields, flatten, is_number


@dataclass(frozen=True)
class FormField:
    """One input: `name` is the config's dotted field name, `value` what stands in it."""

    name: str
    label: str
    help: str
    unit: str
    kind: str
    choices: tuple[str, ...]
    """Of a number, the words that may stand in its place."""
    allowed: str
    only: str
    """The values of another field beside which this one means something, as JSON; empty where it always does."""
    value: str
    error: str | None


@dataclass(frozen=True)
class FormSection:
    """A titled group of fields."""

    title: str
    fields: list[FormField]


def form_sections(values: Mapping[str, str], errors: Mapping[str, str] | None = None) -> list[FormSection]:
    """The whole form with these values, by dotted name, and the errors at their fields."""
    sections: dict[str, FormSection] = {}
    for name, info in fields().items():
        group = name.rpartition(".")[0]
        extra = _extra(info)
        options = choices(info)
        kind = "number" if is_number(info) else "choice" if options else str(extra.get("kind", "text"))
        field = FormField(
            name=name,
            label=info.title or name,
            help=info.description or "",
            unit=str(extra.get("unit", "")),
            kind=kind,
            choices=options,
            allowed=allowed(info),
            only=json.dumps(extra["only"]) if "only" in extra else "",
            value=values.get(name, ""),
            error=(errors or {}).get(name),
        )
        title = str(extra.get("section") or _title(group))
        sections.setdefault(title, FormSection(title, [])).fields.append(field)
    return list(sections.values())


def to_values(config: Mapping[str, Any]) -> dict[str, str]:
    """A config's nested dict as the form's values; unset fields get their defaults."""
    given = flatten(config)
    defaults = flatten(RunConfig().model_dump())
    return {name: as_text(given.get(name, default)) for name, default in defaults.items()}


def from_form(items: Iterable[tuple[str, object]]) -> dict[str, Any]:
    """The nested dict that posted names and values stand for. A name that is no field stays, to be refused."""
    data: dict[str, Any] = {}
    for name, value in items:
        section, _, inner = name.partition(".")
        if inner and data.get(section, {}).__class__ is dict:
            data.setdefault(section, {})[inner] = str(value)
        else:
            data[name] = str(value)
    return data


def without_hidden(data: dict[str, Any]) -> dict[str, Any]:
    """`data` without the settings that the form hides beside an adapter to start from.

    A browser posts hidden fields too, and what stands in them would contradict the adapter, from which they are read.
    """
    adapter = data.get("adapter")
    if not str(data.get("start_from", "")).strip() or not isinstance(adapter, dict):
        return data
    read = {name for name, info in fields().items() if "start_from" in _extra(info).get("only", {})}
    return data | {"adapter": {name: value for name, value in adapter.items() if f"adapter.{name}" not in read}}


def _extra(info: FieldInfo) -> dict[str, Any]:
    return info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}


def _title(group: str) -> str:
    section = RunConfig.model_fields[group].annotation if group else RunConfig
    assert isinstance(section, type)
    assert issubclass(section, Section)
    assert section.__doc__
    return section.__doc__.splitlines()[0]
