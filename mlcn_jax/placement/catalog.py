"""Offers of machines: prices read from SkyPilot's catalogs or from a plain CSV.

SkyPilot's columns are InstanceType, vCPUs, MemoryGiB, AcceleratorName, AcceleratorCount, Region, AvailabilityZone,
Price and SpotPrice; prices are dollars an hour. A plain CSV has `machine` and `price`, and any of `PLAIN_COLUMNS`.
"""

import csv
import dataclasses
import datetime
import math
from pathlib import Path

from mlcn_jax.errors import InputError, did_you_mean

PLAIN_COLUMNS = {
    "machine": "its name",
    "price": "per hour",
    "spot_price": "per hour; the machine may then be taken away",
    "profile": "file of the device profile; otherwise --profiles says which",
    "devices": "devices of the machine that train, default 1",
    "memory_gib": "memory for programs, if less than in the profile",
    "region": "where it is",
    "available": "how many may be rented, at either price, default unlimited",
    "startup_seconds": "from the order to the first step, default --startup_seconds",
    "minimum_seconds": "shortest time that is paid for, default --minimum_seconds",
    "interruptions_per_hour": "of a spot machine, default --interruptions_per_hour",
    "priced_on": "day of the price, such as 2026-01-31",
}
_OLDEST_DAYS = 365
_ANY = 10**6


@dataclasses.dataclass(frozen=True)
class Offer:
    """A machine at a price.

    Attributes:
      machine: its name.
      price: per hour.
      spot: whether it may be taken away at any time.
      accelerator: the accelerator's name; empty if there is none, or if a plain CSV does not say.
      devices: accelerators, or devices that train.
      cpus: cores of a machine without accelerators; None if the catalog does not say.
      memory_bytes: memory of the machine for programs; infinity if that of the profile holds.
      region, zone: where it is.
      available: how many may be rented, together with all offers of the same row.
      row: where in the catalog it is; empty if it is in none.
      startup_seconds, minimum_seconds, interruptions_per_hour: None if the catalog does not say.
      profile: file of the device profile; empty if the catalog does not say.
      cloud: whether SkyPilot knows it.
    """

    machine: str
    price: float
    spot: bool = False
    accelerator: str = ""
    devices: int = 1
    cpus: float | None = None
    memory_bytes: float = math.inf
    region: str = ""
    zone: str = ""
    available: int = _ANY
    startup_seconds: float | None = None
    minimum_seconds: float | None = None
    interruptions_per_hour: float | None = None
    profile: str = ""
    cloud: bool = False
    row: str = ""

    @property
    def place(self) -> tuple[str, str]:
        """Region and zone: the link between machines is that of machines in one place."""
        return self.region, self.zone

    @property
    def name(self) -> str:
        """Machine, place, and whether it is a spot offer, for display: offers of other rows may have the same."""
        return " ".join(part for part in (self.machine, self.zone or self.region, "spot" if self.spot else "") if part)


def read_catalog(path: Path, priced_on: str = "", today: datetime.date | None = None) -> tuple[list[Offer], list[str]]:
    """The offers of a catalog, on demand and spot, and what was passed over.

    Skipped are SkyPilot's rows without a price, and rows for an accelerator without a machine or for a fraction of one.

    Args:
      path: a CSV file.
      priced_on: day of the prices, `YYYY-MM-DD`; if empty, that of the column `priced_on` or of the file's last change.
      today: the day to compare with.

    Raises:
      InputError: the file cannot be read, has other columns or one twice, a value that is none, no price, or prices a
        year old.
    """
    today = today or datetime.date.today()
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:  # Excel starts files with a BOM
            reader = csv.DictReader(file)
            rows = [(reader.line_num, row) for row in reader]  # blank lines are left out
            columns = list(reader.fieldnames or ())
            changed = datetime.date.fromtimestamp(path.stat().st_mtime)
    except OSError as error:
        raise InputError(f"--catalog={path} cannot be read ({error.strerror}): give a CSV file with prices") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"--catalog={path} is not a CSV file ({error})") from error
    if not rows:
        raise InputError(f"--catalog={path} has no rows: give a header line and a line for each machine")
    given = _day(priced_on, "--priced_on") if priced_on else None
    if twice := [column for n, column in enumerate(columns) if column and column in columns[:n]]:
        raise InputError(f"--catalog={path} has the column {twice[0]!r} twice: remove one")
    is_sky = "InstanceType" in columns
    if not is_sky:
        _check_columns(path, columns)
    offers: list[Offer] = []
    unused = 0
    for number, row in rows:
        where = f"{path}, line {number}"
        if None in row or None in row.values():
            raise InputError(f"{where}: value count differs from the number of columns in the header")
        text = row.get("priced_on") or ""
        day = given or (_day(text, f"{where}: priced_on") if text else changed)
        _check_age(day, today, where if text and not given else str(path))
        found = _of_sky(row, where) if is_sky else _of_plain(row, where)
        offers += found
        unused += not found
    if not offers:
        raise InputError(f"--catalog={path} has no price in any row: fetch it again, or fill in Price or SpotPrice")
    passed = [f"{unused} of {len(rows)} rows: no price, no InstanceType, or a part of an accelerator"] if unused else []
    return offers, passed


def _of_sky(row: dict[str, str], where: str) -> list[Offer]:
    count = _number(row, "AcceleratorCount", where, 0.0)
    memory, cpus = _number(row, "MemoryGiB", where, math.inf), _number(row, "vCPUs", where, 0.0)
    if not row["InstanceType"].strip() or 0 < count < 1:
        return []  # an accelerator without its machine, or a part of one
    common = {
        "machine": row["InstanceType"],
        "accelerator": row.get("AcceleratorName", ""),
        "devices": max(1, int(count)),
        "cpus": None if row.get("AcceleratorName") or not cpus else cpus,
        "memory_bytes": math.inf if row.get("AcceleratorName") else memory * 2**30,
        "region": row.get("Region", ""),
        "zone": row.get("AvailabilityZone", ""),
        "cloud": True,
        "row": where,
    }
    found = []
    for column, spot in (("Price", False), ("SpotPrice", True)):
        price = _number(row, column, where, math.inf)
        if price < math.inf:
            found.append(Offer(price=price, spot=spot, **common))  # type: ignore[arg-type]
    return found


def _of_plain(row: dict[str, str], where: str) -> list[Offer]:
    if not row["machine"].strip():
        raise InputError(f"{where}: machine is empty: give the machine a name")
    prices = {spot: _number(row, name, where, math.inf) for name, spot in (("price", False), ("spot_price", True))}
    if min(prices.values()) == math.inf:
        raise InputError(f"{where}: {row['machine']} has no price: fill in price or spot_price (0 if it costs nothing)")
    startup, minimum, interruptions = (
        value if (value := _number(row, name, where, math.inf)) < math.inf else None
        for name in ("startup_seconds", "minimum_seconds", "interruptions_per_hour")
    )
    whole = {name: _number(row, name, where, default) for name, default in (("devices", 1), ("available", _ANY))}
    for name, value in whole.items():
        if value < 1 or value != int(value):
            raise InputError(f"{where}: {name} is {row[name]!r}: give a whole number, 1 or more")
    return [
        Offer(
            machine=row["machine"].strip(),
            price=price,
            spot=spot,
            devices=int(whole["devices"]),
            memory_bytes=_number(row, "memory_gib", where, math.inf) * 2**30,
            region=row.get("region", ""),
            available=int(whole["available"]),
            profile=row.get("profile", ""),
            startup_seconds=startup,
            minimum_seconds=minimum,
            interruptions_per_hour=interruptions,
            row=where,
        )
        for spot, price in prices.items()
        if price < math.inf
    ]


def _number(row: dict[str, str], column: str, where: str, default: float) -> float:
    text = (row.get(column) or "").strip()
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise InputError(f"{where}: {column} is {text!r}: give a number of 0 or more, without a unit")
    return value


def _check_columns(path: Path, columns: list[str]) -> None:
    told = f"a plain catalog has {', '.join(PLAIN_COLUMNS)}; SkyPilot's starts with InstanceType"
    unknown = [column for column in columns if column not in PLAIN_COLUMNS]
    if unknown:
        meant = did_you_mean(str(unknown[0]), PLAIN_COLUMNS)
        raise InputError(f"--catalog={path} has an unknown column {unknown[0]!r}{meant}; {told}")
    missing = [name for name in ("machine",) if name not in columns]
    missing += [] if {"price", "spot_price"} & set(columns) else ["price"]
    if missing:
        raise InputError(f"--catalog={path} has no column {missing[0]}: {told}")


def _day(text: str, what: str) -> datetime.date:
    try:
        return datetime.date.fromisoformat(text.strip())
    except ValueError:
        raise InputError(f"{what} is {text!r}: give a day such as 2026-01-31") from None


def _check_age(day: datetime.date, today: datetime.date, where: str) -> None:
    age = (today - day).days
    if age > _OLDEST_DAYS:
        raise InputError(
            f"{where}: the price is of {day}, {age} days old: fetch the catalog again or look the price up; if it "
            f"still holds, say so with --priced_on={today}"
        )
    if age < -1:
        raise InputError(f"{where}: the price is of {day}, in the future: correct the date")
