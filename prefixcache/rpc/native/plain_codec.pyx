# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""The wire form of plain messages, to and from Python objects, in one step.

`prefixcache.rpc.plain` says what a plain message is. What is no plain message is not read here,
and is no error either: protobuf judges it.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_GetItem
from cpython.ref cimport PyObject
from libc.stdint cimport INT32_MAX, UINT32_MAX, uint8_t, uint64_t
from libc.string cimport memcpy

cdef enum:
    _NUM_FIELDS = 16  # those whose tag is one byte
    _MAX_VARINT_BYTES = 10

cdef enum field_kind:
    ABSENT = 0  # no plain message has it
    BOOL
    INT32
    UINT32
    UINT64
    FIXED64
    TEXT
    COLUMN32
    COLUMN64
    BYTES
    MESSAGE

cdef enum:
    _VARINT = 0
    _I64 = 1
    _LEN = 2

cdef dict _KINDS = {
    "bool": BOOL,
    "int32": INT32,
    "uint32": UINT32,
    "uint64": UINT64,
    "fixed64": FIXED64,
    "string": TEXT,
    "column32": COLUMN32,
    "column64": COLUMN64,
    "bytes": BYTES,
    "message": MESSAGE,
}

NUM_FIELDS = _NUM_FIELDS


cdef class PlainCodec:
    """Of one message. `message`: the class of what is read; its instances have a `__dict__`.

    fields: number below NUM_FIELDS, name, kind (a key of `_KINDS`), and the codec of a message. Any
    other field makes a message one that is not plain.
    """

    cdef object _message
    cdef field_kind _kinds[16]
    cdef list _names
    cdef list _codecs

    def __init__(self, message, fields):
        cdef int number
        self._message = message
        self._names, self._codecs = [None] * _NUM_FIELDS, [None] * _NUM_FIELDS
        for number in range(_NUM_FIELDS):
            self._kinds[number] = ABSENT
        for number, name, kind, codec in fields:
            if not 0 < number < _NUM_FIELDS:
                raise ValueError(f"field {number}, must be 1 to {_NUM_FIELDS - 1}")
            self._kinds[number] = _KINDS[kind]
            self._names[number], self._codecs[number] = name, codec

    def read(self, bytes data):
        """The message, with the fields that are there in its `__dict__`; None if it is not plain."""
        cdef const uint8_t *start = <const uint8_t *>PyBytes_AS_STRING(data)
        return self._read(start, start + PyBytes_GET_SIZE(data))

    cdef object _read(self, const uint8_t *at, const uint8_t *end):
        cdef dict values = {}
        cdef field_kind kind
        cdef uint64_t number
        cdef int tag, field, seen = 0
        while at < end:
            tag, field = at[0], at[0] >> 3
            at += 1
            if tag & 0x80 or seen & 1 << field:
                return None
            seen |= 1 << field
            kind = self._kinds[field]
            if kind == ABSENT or tag & 7 != _wire_type(kind):
                return None
            if kind == FIXED64:
                if end - at < 8:
                    return None
                memcpy(&number, at, 8)
                at += 8
                value = number
            else:
                at = _read_varint(at, end, &number)
                if at == NULL:
                    return None
                if kind >= TEXT:
                    if number > <uint64_t>(end - at):
                        return None
                    value = self._read_bytes(kind, field, at, number)
                    at += number
                else:
                    value = _of_varint(kind, number)
                if value is None:
                    return None
            values[<object>self._names[field]] = value
        message = self._message.__new__(self._message)
        message.__dict__ = values
        return message

    cdef object _read_bytes(self, field_kind kind, int field, const uint8_t *at, uint64_t length):
        if kind == MESSAGE:
            return (<PlainCodec>self._codecs[field])._read(at, at + length)
        if kind == TEXT:
            try:
                return (<const char *>at)[:length].decode("utf-8")
            except UnicodeDecodeError:
                return None
        if (kind == COLUMN32 and length % 4) or (kind == COLUMN64 and length % 8):
            return None
        return PyBytes_FromStringAndSize(<const char *>at, length)

    def write(self, dict values):
        """The bytes of a message with these fields, in the order of their numbers.

        Text and messages cannot be written. Raises OverflowError for a number out of range.
        """
        cdef uint64_t numbers[16]
        cdef const uint8_t *contents[16]
        cdef Py_ssize_t size = 0
        cdef int field, num_found = 0
        cdef field_kind kind
        cdef PyObject *found
        cdef bytes content
        for field in range(1, _NUM_FIELDS):
            numbers[field] = 0
            kind = self._kinds[field]
            if kind == ABSENT:
                continue
            found = PyDict_GetItem(values, self._names[field])
            if found == NULL:
                continue
            num_found += 1
            if kind == TEXT or kind == MESSAGE:
                raise TypeError(f"{self._names[field]} cannot be written")
            if kind >= COLUMN32:
                content = <object>found
                numbers[field] = PyBytes_GET_SIZE(content)
                contents[field] = <const uint8_t *>PyBytes_AS_STRING(content)
                size += numbers[field]
            else:
                numbers[field] = _to_varint(kind, <object>found)
            if numbers[field]:
                size += 1 + (8 if kind == FIXED64 else _varint_bytes(numbers[field]))
        if num_found != len(values):
            raise TypeError(f"{sorted(values)}: no such fields")
        cdef bytes data = PyBytes_FromStringAndSize(NULL, size)
        cdef uint8_t *at = <uint8_t *>PyBytes_AS_STRING(data)
        for field in range(1, _NUM_FIELDS):
            if not numbers[field]:
                continue
            kind = self._kinds[field]
            at[0] = field << 3 | _wire_type(kind)
            at += 1
            if kind == FIXED64:
                memcpy(at, &numbers[field], 8)
                at += 8
                continue
            at = _write_varint(at, numbers[field])
            if kind >= COLUMN32:
                memcpy(at, contents[field], numbers[field])
                at += numbers[field]
        return data


cdef inline int _wire_type(field_kind kind) noexcept:
    if kind == FIXED64:
        return _I64
    return _LEN if kind >= TEXT else _VARINT


cdef object _of_varint(field_kind kind, uint64_t number):
    if kind == BOOL:
        return None if number > 1 else number == 1
    if (kind == INT32 and number > INT32_MAX) or (kind == UINT32 and number > UINT32_MAX):
        return None
    return number


cdef uint64_t _to_varint(field_kind kind, object value) except? 0:
    cdef uint64_t number = value
    if kind == BOOL and number > 1 or kind == INT32 and number > INT32_MAX:
        raise OverflowError(value)
    if kind == UINT32 and number > UINT32_MAX:
        raise OverflowError(value)
    return number


cdef inline const uint8_t *_read_varint(
    const uint8_t *at, const uint8_t *end, uint64_t *number
) noexcept:
    """Where the next byte is; NULL if there is no varint of 64 bits."""
    cdef int shift = 0
    number[0] = 0
    while at < end and shift < 7 * _MAX_VARINT_BYTES:
        if shift == 63 and at[0] > 1:
            return NULL
        number[0] |= <uint64_t>(at[0] & 0x7F) << shift
        if at[0] < 0x80:
            return at + 1
        at += 1
        shift += 7
    return NULL


cdef inline int _varint_bytes(uint64_t number) noexcept:
    cdef int count = 1
    while number > 0x7F:
        number >>= 7
        count += 1
    return count


cdef inline uint8_t *_write_varint(uint8_t *at, uint64_t number) noexcept:
    while number > 0x7F:
        at[0] = number & 0x7F | 0x80
        number >>= 7
        at += 1
    at[0] = number
    return at + 1
