"""Numbers with a unit that suits their size: a small one is never printed as 0.000."""

_DECIMAL = ("", "k", "M", "G", "T", "P", "E")
_BINARY = ("", "Ki", "Mi", "Gi", "Ti", "Pi")
_TIMES = (
    ("days", 86_400.0),
    ("hours", 3600.0),
    ("minutes", 60.0),
    ("s", 1.0),
    ("ms", 1e-3),
    ("µs", 1e-6),
    ("ns", 1e-9),
)


def decimal(value: float, unit: str) -> str:
    """`1.235 GFLOP`: four digits, in thousands."""
    return _scaled(value, unit, 1000, _DECIMAL)


def binary(size: float) -> str:
    """`12.50 MiB`: four digits, in 1024s."""
    return _scaled(size, "B", 1024, _BINARY)


def duration(seconds: float) -> str:
    """`3.25 days`, `12.0 ms`: three digits."""
    name, scale = next((row for row in _TIMES if seconds >= row[1]), _TIMES[-1])
    return f"{significant(seconds / scale, 3)} {name}"


def share(part: float, decimals: int = 0) -> str:
    """A share of 1 as a percentage: 0 % is nothing at all, and less than can be printed says so."""
    least = 10.0 ** -(decimals + 2)
    return f"<{least:.{decimals}%}" if 0 < part < least / 2 else f"{part:.{decimals}%}"


def significant(value: float, digits: int) -> str:
    """The number in so many digits, without an exponent and never fewer than the integer has: 0.00123, 1.23, 12,345."""
    if value == 0:
        return "0"
    before_point = len(str(int(abs(value)))) if abs(value) >= 1 else 1 - _leading_zeros(abs(value))
    return f"{value:,.{max(digits - before_point, 0)}f}"


def _leading_zeros(value: float) -> int:
    """Zeros before the first digit of a value below 1, the one before the point included: 1 for 0.5, 3 for 0.005."""
    return -int(f"{value:e}".partition("e")[2])


def _scaled(value: float, unit: str, step: int, prefixes: tuple[str, ...]) -> str:
    power = 0
    while abs(value) >= step and power < len(prefixes) - 1:
        value, power = value / step, power + 1
    number = f"{value:,.0f}" if power == 0 and value == int(value) else significant(value, 4)
    return f"{number} {prefixes[power]}{unit}"
