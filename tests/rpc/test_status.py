"""The one table of errors: every class of the tree crosses the wire and comes back itself."""

from __future__ import annotations

import inspect

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from prefixcache import errors
from prefixcache.errors import PrefixCacheError
from prefixcache.rpc.status import (
    ERROR_DOMAIN,
    STATUS_CODES,
    from_rpc_error,
    from_status_message,
    status_code,
    status_message,
    to_status,
)

BOOT_ID = bytes(range(16))

EXAMPLES = {
    type(error): error
    for error in (
        errors.InvalidArgumentError("token_ids", "is empty"),
        errors.ExceedsPoolError("token_ids", 12, 10),
        errors.NotFoundError("no session", {"session": "s"}),
        errors.SequenceNotFoundError(2**64 - 1),
        errors.SessionNotFoundError("0123456789abcdef"),
        errors.SessionLostError("the daemon was restarted"),
        errors.AlreadyExistsError("exists"),
        errors.RequestIdConflictError("r"),
        errors.FailedPreconditionError("not now"),
        errors.WrongPositionError(7, 3, 4),
        errors.OvertakenError(3, 4),
        errors.BeyondTokensError(7, 20, 10),
        errors.NotComputedError(7, 3, 10),
        errors.EventsOffError(),
        errors.BlocksInUseError(4),
        errors.FingerprintMismatchError(b"a", b"b"),
        errors.ForkedClientError(7, "whose client it is"),
        errors.ReadOnlyViewError(7, 12),
        errors.NoStorageError(),
        errors.ArenaLostError("it is none of the caller's"),
        errors.StorageOwnedError(),
        errors.OutOfRangeError("too far"),
        errors.EventsGoneError(7, 20, 30),
        errors.ResourceExhaustedError("a quota"),
        errors.NoRoomError(12, 3, 40),
        errors.NoRoomError(12, 3, 40, quarantined=2),
        errors.QuotaExceededError(12, 3, 14),
        errors.TooManyStreamsError(256),
        errors.TooManySessionsError(256),
        errors.TooManyOwnersError(4096),
        errors.TooManySequencesError(16384),
        errors.TooManyCallsError(1024),
        errors.WaitedTooLongError(2.5),
        errors.AbortedError("again"),
        errors.SequenceBusyError(7),
        errors.UnavailableError("gone"),
        errors.UnauthenticatedError("the call has none"),
        errors.PermissionDeniedError("admin"),
        errors.AttachDeniedError("write"),
        errors.DrainingError(),
        errors.DeadlineExceededError("late"),
        errors.CancelledCallError("cancelled"),
        errors.InternalError("a bug of ours"),
    )
}


def _tree(base: type[PrefixCacheError] = PrefixCacheError) -> set[type[PrefixCacheError]]:
    below = (_tree(child) for child in base.__subclasses__() if child.__module__ == base.__module__)
    return {base}.union(*below)


class _RpcError(grpc.RpcError):
    """What a client sees of a status."""

    def __init__(self, code, details, trailing_metadata=()) -> None:
        self.code = lambda: code
        self.details = lambda: details
        self.trailing_metadata = lambda: trailing_metadata


def _across(error: PrefixCacheError) -> PrefixCacheError:
    status = to_status(error, BOOT_ID)
    return from_rpc_error(_RpcError(status.code, status.details, status.trailing_metadata))


def test_every_class_of_the_tree_has_an_example_here():
    assert set(EXAMPLES) == _tree() - {PrefixCacheError}


def test_the_table_has_every_branch_and_no_status_twice():
    assert set(STATUS_CODES) == {c for c in _tree() if c.__base__ is PrefixCacheError}
    assert len(set(STATUS_CODES.values())) == len(STATUS_CODES)


def test_reasons_are_different_and_upper_snake():
    reasons = [error.reason for error in _tree()]
    assert len(set(reasons)) == len(reasons)
    assert all(reason.replace("_", "").isalpha() and reason.isupper() for reason in reasons)


def test_every_class_is_exported_and_drawn():
    classes = {error.__name__ for error in _tree()}
    assert set(errors.__all__) == classes
    assert errors.__all__ == sorted(errors.__all__)
    drawn = {word for word in inspect.getdoc(errors).split() if word.endswith("Error")}
    assert drawn == classes


@pytest.mark.parametrize("error", EXAMPLES.values(), ids=lambda error: error.reason)
def test_an_error_comes_back_with_class_message_and_fields(error):
    back = _across(error)
    assert type(back) is type(error)
    assert back.message == str(back) == error.message
    expected = {name: str(value) for name, value in error.fields.items()}
    assert back.fields == expected | {"boot_id": BOOT_ID.hex()}


@pytest.mark.parametrize("error", EXAMPLES.values(), ids=lambda error: error.reason)
def test_an_error_within_a_message_comes_back_as_one_that_ended_a_call(error):
    back = from_status_message(status_message(error, BOOT_ID).SerializeToString())
    across = _across(error)
    assert (type(back), back.message, back.fields) == (type(across), across.message, across.fields)


def test_a_status_within_a_message_that_says_nothing_is_an_error_all_the_same():
    damaged = from_status_message(b"\xff\xff")
    assert type(damaged) is errors.InternalError
    assert type(from_status_message(b"")) is PrefixCacheError
    bare = status_pb2.Status(code=5, message="gone").SerializeToString()
    error = from_status_message(bare)
    assert (type(error), error.message) == (errors.NotFoundError, "NOT_FOUND: gone")
    unknown = status_pb2.Status(code=99, message="what").SerializeToString()
    assert type(from_status_message(unknown)) is PrefixCacheError


@pytest.mark.parametrize("error", EXAMPLES.values(), ids=lambda error: error.reason)
def test_a_status_carries_reason_numbers_and_boot_id_in_the_standard_form(error):
    status = to_status(error, BOOT_ID)
    assert status.code is status_code(error)
    metadata = dict(status.trailing_metadata)
    value = metadata.pop("grpc-status-details-bin")
    stops_retries = type(error) is errors.DrainingError
    assert metadata == ({"grpc-retry-pushback-ms": "-1"} if stops_retries else {})
    message = status_pb2.Status.FromString(value)
    assert (message.code, message.message) == (status.code.value[0], error.message)
    info = error_details_pb2.ErrorInfo()
    assert message.details[0].Unpack(info)
    assert (info.domain, info.reason) == (ERROR_DOMAIN, error.reason)
    kinds = [detail.TypeName() for detail in message.details[1:]]
    can_be_tried_again = type(error) in (
        errors.NoRoomError,
        errors.QuotaExceededError,
        errors.TooManyCallsError,
        errors.WaitedTooLongError,
    )
    assert kinds == (["google.rpc.RetryInfo"] if can_be_tried_again else [])


def test_a_quota_that_can_never_be_kept_asks_for_no_retry():
    message = status_message(errors.QuotaExceededError(15, 3, 14), BOOT_ID)
    assert [detail.TypeName() for detail in message.details] == ["google.rpc.ErrorInfo"]


def test_the_field_of_a_bad_argument_survives():
    assert _across(errors.InvalidArgumentError("token_ids", "is empty")).field == "token_ids"


def test_damaged_details_leave_the_class_of_the_code():
    error = _RpcError(grpc.StatusCode.NOT_FOUND, "text")
    error.trailing_metadata = lambda: [("grpc-status-details-bin", b"\xff\xff")]
    assert type(from_rpc_error(error)) is errors.NotFoundError


@pytest.mark.parametrize("code", [c for c in grpc.StatusCode if c is not grpc.StatusCode.OK])
def test_a_status_of_grpc_itself_becomes_the_class_of_its_code(code):
    error = from_rpc_error(_RpcError(code, "text"))
    expected = {status: cls for cls, status in STATUS_CODES.items()}.get(code, PrefixCacheError)
    assert type(error) is expected
    assert error.message == f"{code.name}: text"
    assert error.fields == {}


def test_details_of_somebody_else_do_not_choose_the_class():
    info = error_details_pb2.ErrorInfo(reason="NO_ROOM", domain="other")
    status = status_pb2.Status(code=5, message="m")
    status.details.add().Pack(info)
    metadata = (("x", "y"), ("grpc-status-details-bin", status.SerializeToString()))
    error = from_rpc_error(_RpcError(grpc.StatusCode.NOT_FOUND, "m", metadata))
    assert type(error) is errors.NotFoundError


def test_a_reason_of_a_newer_daemon_becomes_the_class_of_its_code():
    info = error_details_pb2.ErrorInfo(reason="SHARD_NOT_FOUND", domain=ERROR_DOMAIN)
    info.metadata["shard"] = "s"
    status = status_pb2.Status(code=5, message="no such shard")
    status.details.add().Pack(info)
    metadata = (("grpc-status-details-bin", status.SerializeToString()),)
    error = from_rpc_error(_RpcError(grpc.StatusCode.NOT_FOUND, "no such shard", metadata))
    assert type(error) is errors.NotFoundError
    assert error.fields == {"shard": "s"}
