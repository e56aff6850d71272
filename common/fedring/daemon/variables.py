"""The environment variables of a configuration."""

import os
from typing import Any, get_origin

from pydantic.fields import FieldInfo
from pydantic_settings import EnvSettingsSource


class Variables(EnvSettingsSource):
    """The environment variables of a configuration.

    A value that must be JSON and is not is a SettingsError.
    """

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        """Parse a value that must be JSON.

        Raises:
            ValueError: if it is not JSON, with a sentence for people.
        """
        try:
            return super().decode_complex_value(field_name, field, value)
        except ValueError as error:
            listed = bool(field) and get_origin(field.annotation) is list  # a value inside a table has no field
            wanted = 'a list such as ["a", "b"]' if listed else 'a table such as {"key": "value"}'
            raise ValueError(f"environment variable {self._name(field_name, value)} must be JSON, {wanted}") from error

    def _name(self, field_name: str, value: str) -> str:
        """Return the variable's name as it was written in the environment.

        pydantic-settings tells only its lower-case form.
        """
        start, end = self.env_prefix.lower(), field_name.lower()
        for name, text in os.environ.items():
            if text == value and name.lower().startswith(start) and name.lower().endswith(end):
                return name
        return field_name
