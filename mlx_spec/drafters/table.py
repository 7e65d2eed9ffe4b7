"""The table of families as this process knows it: our own rows, and those that installed packages bring."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from mlx_spec.drafters.families import FAMILIES, KNOWN_DRAFTER_KINDS, Family
from mlx_spec.errors import FamilyClash

GROUP = "mlx_spec.drafters"
"""Entry points of this group name a `Family`, or a tuple of them. They are read when a drafter is first looked for."""

OURS = "mlx_spec"


class Table:
    """Families, found by what their checkpoints say of themselves.

    Args:
        rows: (package that brings it, family), in the order they are printed.

    Attributes:
        rows: the families.
        kinds: those a caller may ask for.
        by_name, by_architecture, by_model_type, by_native: what each of them says -> the family.

    Raises:
        FamilyClash: two rows go by one name, architecture, model type or native.
    """

    def __init__(self, rows: Iterable[tuple[str, Family]]) -> None:
        owned = tuple(rows)
        self.rows = tuple(family for _, family in owned)
        self.kinds = tuple(dict.fromkeys((*KNOWN_DRAFTER_KINDS, *(family.kind for family in self.rows))))
        self.by_name = _index(owned, "name", lambda family: (family.name,))
        self.by_architecture = _index(owned, "architecture", lambda family: family.architectures)
        self.by_model_type = _index(owned, "model_type", lambda family: family.model_types)
        self.by_native = _index(owned, "native", lambda family: family.natives)


def _index(
    rows: Iterable[tuple[str, Family]], said: str, names_of: Callable[[Family], Iterable[str]]
) -> Mapping[str, Family]:
    found: dict[str, tuple[str, Family]] = {}
    for package, family in rows:
        for name in names_of(family):
            first, known = found.setdefault(name, (package, family))
            if known is not family:
                raise FamilyClash(
                    f"{said} {name!r} belongs to one family of drafters: {known.name!r} of {first} and "
                    f"{family.name!r} of {package} both claim it. Uninstall one of the packages, or rename its row."
                )
    return {name: family for name, (_, family) in found.items()}


@cache
def known_families() -> Table:
    """The table, read when it is first asked for and the same from then on.

    Raises:
        FamilyClash: an installed package brings a row that cannot be read or whose names are taken. Says which.
    """
    brought = [
        (_package_of(entry), family) for entry in sorted(entry_points(group=GROUP)) for family in _families_of(entry)
    ]
    return Table([*((OURS, family) for family in FAMILIES), *brought])


def _families_of(entry: EntryPoint) -> tuple[Family, ...]:
    try:
        value = entry.load()
    except Exception as error:
        raise FamilyClash(
            f"{_package_of(entry)} brings drafters as {entry.name!r} ({entry.value}), and that cannot be imported: "
            f"{type(error).__name__}: {error}. Repair or uninstall it."
        ) from error
    families = value if isinstance(value, tuple) else (value,)
    wrong = [family for family in families if not isinstance(family, Family)]
    if wrong or not families:
        raise FamilyClash(
            f"{_package_of(entry)} brings drafters as {entry.name!r} ({entry.value}): wanted a "
            f"mlx_spec.drafters.Family or a tuple of them, got {value!r}. Repair or uninstall it."
        )
    return families


def _package_of(entry: EntryPoint) -> str:
    return "an unnamed package" if entry.dist is None else entry.dist.name
