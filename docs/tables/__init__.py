"""Tables and figures of README.md and docs/, made from committed JSON."""

from tables import accuracy, devices, lanes, memory, rounds, searches, small, speed, tiers
from tables.parts import MADE

__all__ = ["MADE", "accuracy", "devices", "lanes", "memory", "rounds", "searches", "small", "speed", "tiers"]
