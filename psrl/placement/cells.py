"""The grid of a step, and the names of its rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from psrl.errors import ConfigError
from psrl.types import IntArray


class RowKey(NamedTuple):
    """A row's key in TransferQueue: ``{uid}_{session}_{index}``."""

    uid: str
    session: str
    step: int
    """Index of the row among those of the session."""

    @classmethod
    def parse(cls, key: str) -> RowKey:
        uid, session, index = key.rsplit("_", 2)
        return cls(uid, session, int(index))


@dataclass(frozen=True, slots=True)
class Cells:
    """The grid of a step: every cell has the same number of rows."""

    num_ranks: int
    num_mini_batches: int
    rows_per_cell: int

    @classmethod
    def of(cls, num_rows: int, num_ranks: int, mini_batch_rows: int) -> Cells:
        """
        Raises:
            ConfigError: the rows do not divide.
        """
        if num_rows % mini_batch_rows or mini_batch_rows % num_ranks:
            raise ConfigError(
                f"{num_rows} rows do not divide into mini-batches of {mini_batch_rows} rows over {num_ranks} ranks"
            )
        return cls(num_ranks, num_rows // mini_batch_rows, mini_batch_rows // num_ranks)

    @property
    def num_rows(self) -> int:
        return self.num_ranks * self.num_mini_batches * self.rows_per_cell

    def split(self, order_S: IntArray) -> IntArray:
        """[ranks, mini-batches, rows of a cell] rows of an order that is rank-major, then mini-batch-major."""
        return order_S.reshape(self.num_ranks, self.num_mini_batches, self.rows_per_cell)
