"""GPTQ's layout, as AutoGPTQ and GPTQModel write it.

A linear layer [K, N] in groups of g rows is qweight int32 [K/8, N], qzeros int32 [ceil(K/g), N/8], scales
[ceil(K/g), N] and g_idx int32 [K], the group of each input row: w = scales * (q - zero). Nibbles are in sequence, along
K in qweight and along N in qzeros. With "desc_act" rows were quantized by decreasing activation, so that a group is
any g rows; g_idx is obeyed whatever the configuration says of it.

What qzeros hold depends on `checkpoint_format`: zero - 1 in "gptq" (v1, also where nothing is said), the zero itself in
"gptq_v2". A stored 15 in v1 is a zero of 16. Files that say the wrong one exist. In symmetric files, where every zero
is 8, that is plain to see, and what the file holds is believed; in others a doubt is told in the log.
"""

import logging
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from pallasite.convert.formats.scheme import (
    SCALES,
    Part,
    check_bits,
    eighth,
    int4_tensor,
    read_group_size,
    rows_of_group,
)
from pallasite.convert.int4 import Int4Tensor, unpack_rows

log = logging.getLogger(__name__)

STORED_LESS = {"gptq": 1, "gptq_v2": 0}
"""By checkpoint_format: how much less than the zero qzeros hold."""

MIDDLE = 8
"""The zero of a symmetric matrix."""


class GPTQ:
    """GPTQ's scheme, from its fields in config.json or in AutoGPTQ's quantize_config.json."""

    method: ClassVar = "gptq"
    marker: ClassVar = "qweight"
    group_index: ClassVar[str | None] = "g_idx"

    def __init__(self, fields: Mapping[str, Any]) -> None:
        check_bits(fields.get("bits"))
        self._group = read_group_size(fields.get("group_size"))
        kind = "marlin" if fields.get("is_marlin_format") else fields.get("checkpoint_format") or "gptq"
        if kind not in STORED_LESS:
            raise ValueError(f"GPTQ checkpoint_format is {kind!r}; supported are {', '.join(STORED_LESS)}")
        self._less = STORED_LESS[kind]
        self._kind = kind
        self._symmetric = fields.get("sym")
        self.skipped = tuple(fields.get("modules_to_not_convert") or ())
        self._told: set[str] = set()

    def group_size(self, k: int) -> int:
        """Rows of a group."""
        return rows_of_group(self._group, k)

    def parts(self, k: int, n: int) -> dict[str, Part]:
        """The four tensors; without g_idx rows are in order."""
        g = self.group_size(k)
        groups = -(-k // g)
        return {
            "qweight": Part((eighth(k, "K"), n), ("I32",), f"K/8={k}/8, N={n}"),
            "qzeros": Part((groups, eighth(n, "N")), ("I32",), f"K/g={k}/{g}, N/8={n}/8"),
            "scales": Part((groups, n), SCALES, f"K/g={k}/{g}, N={n}"),
            "g_idx": Part((k,), ("I32",), f"K={k}", optional=True),
        }

    def read(self, parts: Mapping[str, np.ndarray], k: int, n: int, permutation: np.ndarray | None) -> Int4Tensor:
        """The linear [K, N], its rows sorted by group if `permutation` says so."""
        stored = np.ascontiguousarray(unpack_rows(parts["qzeros"].T, n).T)  # [groups, N]
        zeros = stored + np.uint8(self._stored_less(stored, parts["qweight"]))
        return int4_tensor(parts["qweight"], parts["scales"], zeros, self.group_size(k), (k, n), permutation)

    def _stored_less(self, stored: np.ndarray, qweight: np.ndarray) -> int:
        """How much less than the zeros `stored` is; tells in the log, once, where it differs from what the file says,
        or may well differ."""
        said, other = self._less, 1 - self._less
        if self._symmetric is not False:
            if (stored + said == MIDDLE).all():
                return said
            if (stored + other == MIDDLE).all():
                self._tell(
                    f"checkpoint_format is {self._kind!r}, and its symmetric zeros are stored as {stored.flat[0]}, "
                    f"which would be {stored.flat[0] + said}, not {MIDDLE}: read as the other format"
                )
                return other
        if self._symmetric:
            self._tell(f"sym is true, and zeros differ from {MIDDLE}: read as the file has them")
        # Weights have a mean near 0, so that q has one near the zero; a whole step away is the other format's.
        mean = float(unpack_rows(qweight[:64], 512).mean()) - float(stored.mean())  # of q - stored
        if abs(mean - other) < 0.15:
            self._tell(
                f"checkpoint_format is {self._kind!r}, and weights average {mean - said:+.2f} steps from 0: "
                "the zeros look like those of the other format"
            )
        return said

    def _tell(self, message: str) -> None:
        kind = message.split(",")[0]
        if kind not in self._told:
            self._told.add(kind)
            log.warning("GPTQ: %s", message)
