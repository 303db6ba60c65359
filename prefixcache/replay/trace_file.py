"""The lines of a trace file as records of one format, whatever the file's own is.

Owns what tells the formats apart and what the foreign ones mean; `trace` owns the meaning of a
record. Three kinds of file are read:

* JSON lines with `input_length` and `hash_ids` or `hash_runs`: records as they are.
* JSON lines with `requests`, each with its `prompt` as text (AIBrix). The text is cut into tokens
  of 4 bytes of its UTF-8, which is near what tokenizers make of English; so lengths are rough, but
  what prompts share is theirs.
* CSV with the columns TIMESTAMP, ContextTokens, GeneratedTokens (Azure's): only times and lengths,
  so that no prompt shares anything with another.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prefixcache.errors import InvalidArgumentError

Record = dict[str, Any]

DEFAULT_TRACE_BLOCK = 512
TEXT_TRACE_BLOCK = 16
BYTES_A_TEXT_TOKEN = 4

_CSV_COLUMNS = ("TIMESTAMP", "ContextTokens")


def read_records(
    path: Path, trace_block: int | None, on_read: Callable[[int], object] | None = None
) -> Iterator[tuple[int, Record]]:
    """Each request as a record, with the number of its line from 1; blank lines are skipped.

    trace_block: what was asked for, which decides the ids of formats that have none. on_read: told
    of bytes as they are read. Raises OSError, or InvalidArgumentError naming the line.
    """
    with path.open("rb") as file:
        is_csv = file.readline().lstrip(b"\xef\xbb\xbf").startswith(b"TIMESTAMP,")
    if is_csv:
        yield from _csv_records(path, trace_block or DEFAULT_TRACE_BLOCK)
        return
    with path.open("rb") as file:
        for line_number, line in enumerate(file, start=1):
            if on_read is not None:
                on_read(len(line))
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise bad_line(line_number, f"is not JSON: {error}") from error
            if not isinstance(record, dict):
                raise bad_line(line_number, "is not a JSON object")
            if "requests" not in record:
                yield line_number, record
                continue
            try:
                texts = _texts(record)
            except ValueError as error:
                raise bad_line(line_number, str(error)) from error
            for text in texts:
                yield line_number, _text_record(record, text, trace_block or TEXT_TRACE_BLOCK)


def bad_line(line_number: int, problem: str) -> InvalidArgumentError:
    return InvalidArgumentError("trace", f"line {line_number}: {problem}", line=line_number)


def _texts(record: Record) -> list[bytes]:
    requests = record["requests"]
    if not isinstance(requests, list):
        raise ValueError("requests is not a list")
    texts = []
    try:
        for request in requests:
            prompt = request.get("prompt") if isinstance(request, dict) else None
            if not isinstance(prompt, str):
                raise ValueError("has a request whose prompt is not a text")
            texts.append(prompt.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"has a prompt that is no Unicode text: {error}") from error
    return texts


def _text_record(record: Record, text: bytes, trace_block: int) -> Record:
    width = trace_block * BYTES_A_TEXT_TOKEN
    num_tokens = -(-len(text) // BYTES_A_TEXT_TOKEN)
    starts = range(0, num_tokens // trace_block * width, width)
    parts = (text[start : start + width] for start in starts)
    digests = (hashlib.blake2b(part, digest_size=8).digest() for part in parts)
    return {
        "timestamp": record.get("timestamp"),
        "input_length": num_tokens,
        "trace_block": trace_block,
        "hash_ids": [int.from_bytes(digest, "little") for digest in digests],
    }


def _csv_records(path: Path, trace_block: int) -> Iterator[tuple[int, Record]]:
    next_id = 0
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        rows = csv.DictReader(file)
        for column in _CSV_COLUMNS:
            if column not in (rows.fieldnames or ()):
                raise bad_line(1, f"has no column {column}")
        for row in rows:
            try:
                timestamp_ms = _milliseconds(row["TIMESTAMP"])
                num_tokens = int(row["ContextTokens"])
            except (TypeError, ValueError) as error:
                raise bad_line(rows.line_num, f"is no row of the trace: {error}") from error
            num_full = max(0, num_tokens // trace_block)
            yield (
                rows.line_num,
                {
                    "timestamp": timestamp_ms,
                    "input_length": num_tokens,
                    "hash_runs": [[next_id, num_full]] if num_full else [],
                },
            )
            next_id += num_full


def _milliseconds(text: str) -> float:
    """Since 1970. The trace's dates have no time zone; only their differences matter."""
    moment = datetime.fromisoformat(text)
    return 1000 * (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
