"""The settings of `ServeConfig` by name, and a config made of a flat mapping of them.

Derives, of each field, the flag (`--num-blocks`), the environment name (`PREFIXCACHE_NUM_BLOCKS`)
and the file key (`num_blocks`). Knows no source of values: `prefixcache.cli.load_config` does.
Everything here is constant after import.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args, get_origin, get_type_hints

from pydantic import SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from prefixcache.config import ServeConfig
from prefixcache.config.section import ENV_PREFIX, Section
from prefixcache.errors import InvalidArgumentError

S = TypeVar("S", bound=Section)


@dataclass(frozen=True, slots=True)
class Option:
    """One setting's names and description, derived from its field."""

    key: str
    section: str
    title: str
    attribute: str
    field: FieldInfo

    @property
    def flag(self) -> str:
        return "--" + self.key.replace("_", "-")

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.key.upper()

    @property
    def help(self) -> str:
        return self.field.description or ""

    @property
    def unit(self) -> str:
        extra = self.field.json_schema_extra
        return str(extra["unit"]) if isinstance(extra, dict) else ""

    @property
    def choices(self) -> tuple[str, ...]:
        """The values allowed, if they are a fixed list of words."""
        kinds = (self.field.annotation, *get_args(self.field.annotation))
        return next((get_args(kind) for kind in kinds if get_origin(kind) is Literal), ())

    @property
    def is_switch(self) -> bool:
        return bool in (self.field.annotation, *get_args(self.field.annotation))

    @property
    def is_list(self) -> bool:
        return get_origin(self.field.annotation) is tuple

    @property
    def is_secret(self) -> bool:
        return SecretStr in get_args(self.field.annotation)

    def value_in(self, config: ServeConfig) -> object:
        return getattr(getattr(config, self.section), self.attribute)


SECTIONS: dict[str, type[Section]] = get_type_hints(ServeConfig)
OPTIONS: dict[str, Option] = {
    option.key: option
    for name, section in SECTIONS.items()
    for attribute, field in section.model_fields.items()
    for option in (Option(field.alias or attribute, name, section.title, attribute, field),)
}
"""All settings by their key, in the order of the help."""


def make_config(values: Mapping[str, object]) -> ServeConfig:
    """A config of values by key; keys left out have their defaults.

    Raises InvalidArgumentError: its `field` is the flag, or the key if there is no such setting.
    """
    for key, value in values.items():
        if key not in OPTIONS:
            raise InvalidArgumentError(key, f"is no setting{did_you_mean(key, OPTIONS)}")
        texts = value if isinstance(value, (list, tuple)) else (value,)
        if not all(_is_unicode(text) for text in texts if isinstance(text, str)):
            # Bytes of a command line or an environment that are no UTF-8.
            raise InvalidArgumentError(OPTIONS[key].flag, "is no valid UTF-8")
        if isinstance(value, bool) and not OPTIONS[key].is_switch:
            raise InvalidArgumentError(OPTIONS[key].flag, f"is no switch, so not {value!r}")
    sections: dict[str, Section] = {}
    for name, section in SECTIONS.items():
        own = {key: value for key, value in values.items() if OPTIONS[key].section == name}
        sections[name] = make_section(section, own)
    return ServeConfig(**sections)  # type: ignore[arg-type]  # the fields of ServeConfig


def make_section(section: type[S], values: Mapping[str, object]) -> S:
    """One section of values by key, all of them its own. Raises InvalidArgumentError: its `field`
    is the flag.
    """
    try:
        return section(**values)
    except ValidationError as invalid:
        detail = invalid.errors()[0]
        option = OPTIONS[str(detail["loc"][0])]
        raise _invalid_argument(option, detail, values[option.key]) from None


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or nothing if no known word is close."""
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _invalid_argument(option: Option, detail: ErrorDetails, value: object) -> InvalidArgumentError:
    if detail["type"] == "value_error":
        return InvalidArgumentError(option.flag, str(detail["ctx"]["error"]))
    problem = detail["msg"].replace("Input should", "should", 1)
    return InvalidArgumentError(
        option.flag, problem if option.is_secret else f"{problem}, is {value!r}"
    )
