"""Counts of client processes in a file that all map: those of a killed one are there too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from prefixcache.rpc import wire
from tests.chaos.killer import CLIENT_PHASES

_METHODS = [method for method in wire.methods() if not method.is_watch]
RPCS = tuple(method.name for method in _METHODS)
"""Without watches, which change nothing."""
_UNARY = [index for index, method in enumerate(_METHODS) if not method.is_stream]
_ENDINGS = ("started", "answered", "refused", "cut", "late")
_MARKS = ("checked", "wrong", "kill_rpc", "kill_phase", "steps")
_WIDTH = len(RPCS) * len(_ENDINGS) + len(_MARKS)

Counts = npt.NDArray[np.uint64]


class Tally:
    """One row a client process; only that process writes it, and each thread its own cells.

    Per RPC: calls started, answered, refused, cut by a fault of ours, and ended too late.
    checked: hits whose K/V were compared; wrong: those that were not what they must be.
    """

    def __init__(self, path: Path, num_rows: int, *, create: bool = False) -> None:
        mode = "w+" if create else "r+"
        self._rows: Counts = np.memmap(path, np.uint64, mode, shape=(num_rows, _WIDTH))

    def of_row(self, row: int) -> ClientTally:
        return ClientTally(self._rows[row])

    def total(self, ending: str) -> int:
        column = _ENDINGS.index(ending)
        return int(self._rows[:, column : len(RPCS) * len(_ENDINGS) : len(_ENDINGS)].sum())

    def by_rpc(self, ending: str) -> dict[str, int]:
        column = _ENDINGS.index(ending)
        sums = self._rows[:, column : len(RPCS) * len(_ENDINGS) : len(_ENDINGS)].sum(axis=0)
        return dict(zip(RPCS, sums.tolist(), strict=True))

    def marks(self, name: str) -> int:
        return int(self._rows[:, _mark(name)].sum())


class ClientTally:
    """The row of one process."""

    def __init__(self, row: Counts) -> None:
        self._row = row

    def count(self, rpc: str, ending: str) -> None:
        self._row[RPCS.index(rpc) * len(_ENDINGS) + _ENDINGS.index(ending)] += 1

    def mark(self, name: str, count: int = 1) -> None:
        self._row[_mark(name)] += count

    def marked(self, name: str) -> int:
        return int(self._row[_mark(name)])

    def num_unanswered(self) -> int:
        """Unary calls that have started and not ended."""
        cells = self._row[: len(RPCS) * len(_ENDINGS)].reshape(len(RPCS), len(_ENDINGS))
        started, answered, refused, cut = (int(cells[_UNARY, i].sum()) for i in range(4))
        return started - answered - refused - cut

    def killed_by_itself(self, rpc: str, phase: str) -> None:
        self._row[_mark("kill_rpc")] = RPCS.index(rpc) + 1
        self._row[_mark("kill_phase")] = CLIENT_PHASES.index(phase) + 1

    def kill(self) -> tuple[str, str] | None:
        """The RPC and the phase in which the process killed itself, if it did."""
        rpc, phase = int(self._row[_mark("kill_rpc")]), int(self._row[_mark("kill_phase")])
        return (RPCS[rpc - 1], CLIENT_PHASES[phase - 1]) if rpc and phase else None


def _mark(name: str) -> int:
    return len(RPCS) * len(_ENDINGS) + _MARKS.index(name)
