"""What all sections of the configuration are made of."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from prefixcache.sizes import parse_size

ENV_PREFIX = "PREFIXCACHE_"
MAX_SECONDS = 1e9  # gRPC's clock takes no date after the year 9999


def _split_list(value: object) -> object:
    """An environment variable holds a list with commas."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


Size = Annotated[int, BeforeValidator(parse_size)]
"""Bytes."""
# NoDecode: pydantic-settings would else expect JSON in the environment.
StringList = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_list)]


def setting(default: object, text: str, *, unit: str = "", **field: Any) -> Any:
    """The field of a setting: its help, and its bounds as pydantic names them."""
    return Field(default, description=text, json_schema_extra={"unit": unit}, **field)


class Section(BaseSettings):
    """Base of the sections; `title` heads their flags in the help."""

    # An alias gets the prefix too. populate_by_name lets Python callers use the attribute.
    model_config = SettingsConfigDict(
        allow_inf_nan=False,
        env_ignore_empty=True,
        env_prefix=ENV_PREFIX,
        env_prefix_target="all",
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
        populate_by_name=True,
        protected_namespaces=(),
    )
    title: ClassVar[str]

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """A constructor takes its arguments only; who loads asks the environment."""
        return (init_settings,)
