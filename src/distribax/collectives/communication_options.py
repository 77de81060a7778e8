"""Hints that a caller can give to the collectives."""

from __future__ import annotations

from dataclasses import dataclass

from distribax.types import ParsedEnum


class CommunicationImplementation(ParsedEnum):
    """Which library carries the bytes between devices; AUTO lets the platform choose."""

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


@dataclass(frozen=True)
class CommunicationOptions:
    """Hints for collectives; they change speed, never a result.

    Attributes:
        bytes_per_pack: Small tensors are joined into packs of at most this size before they are
            reduced. 0 sets no limit.
        timeout_seconds: How long a collective over several machines may wait for the slowest.
        implementation: Which library carries the bytes.
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO

    def __post_init__(self) -> None:
        if self.bytes_per_pack < 0:
            raise ValueError(
                f"CommunicationOptions: bytes_per_pack={self.bytes_per_pack} is negative. "
                "Expected a number of bytes, or 0 for the default."
            )
        if self.timeout_seconds is not None and self.timeout_seconds <= 0:
            raise ValueError(
                f"CommunicationOptions: timeout_seconds={self.timeout_seconds} is not positive. "
                "Expected seconds, or None for the default."
            )
        parsed = CommunicationImplementation.parse(self.implementation, "implementation")
        object.__setattr__(self, "implementation", parsed)
