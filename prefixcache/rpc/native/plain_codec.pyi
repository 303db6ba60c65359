from collections.abc import Iterable, Mapping

NUM_FIELDS: int

class PlainCodec:
    def __init__(
        self, message: type, fields: Iterable[tuple[int, str, str, PlainCodec | None]]
    ) -> None: ...
    def read(self, data: bytes) -> object | None: ...
    def write(self, values: Mapping[str, object]) -> bytes: ...
