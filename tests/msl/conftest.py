"""Tests that compile kernels say so instead of failing where there is no compiler for them."""

from __future__ import annotations

import pytest

from tests.msl.compiler import INSTALL, find_compiler


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is in this folder, with the line that installs the compiler."""
    if find_compiler() is None:
        for item in items:
            if "msl" in item.path.parts:
                item.add_marker(pytest.mark.skip(reason=f"no clang++ that knows _Float16; {INSTALL}"))
