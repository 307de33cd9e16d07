"""Completion queues, and how they wait."""

import enum

__all__ = ["MessageModel"]


class MessageModel(enum.Enum):
    """What the queues of a resource domain are good at, as documented for resource domains."""

    FORCE_LOW_LATENCY = "force low latency"
    """The provider is forced to optimise for low latency."""

    LOW_LATENCY = "low latency"
    """The provider is asked to optimise for low latency."""

    HIGH_BANDWIDTH = "high bandwidth"
    """The provider is asked to optimise for high bandwidth."""

    DEFAULT = "default"
    """The provider does as it usually does."""
