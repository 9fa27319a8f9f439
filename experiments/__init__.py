"""One script for each published figure or claim."""

from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
RESULTS = REPOSITORY / "experiments" / "results"
