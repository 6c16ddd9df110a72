"""Names of published files, and the chain of deltas from one step to another."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptz.errors import MissingBaseError
from ckptz.run.versions import Version, newest_step, route, versions_in
from tests.support.sync_support import refused


@given(st.integers(0, 10**8), st.none() | st.integers(0, 10**8))
@settings(max_examples=60, deadline=None)
def test_a_name_says_what_the_file_is(step: int, base: int | None) -> None:
    version = Version(step, base, 5)
    assert versions_in({version.name: 5}) == [version]


def test_other_files_are_no_versions() -> None:
    names = ["step-1.ckptz", "step-0000001.ckptz", "step-000001.safetensors", "model.ckptz"]
    names += [".step-000001.ckptz.0a1b2c3d.ckptz-tmp", "step-000002.from-1.ckptz"]
    assert versions_in(dict.fromkeys([*names, "step-000002.from-000001.ckptz.part"], 1)) == []


RUN = [
    Version(0, None, 1000),
    *(Version(step, step - 1, 10) for step in range(1, 11)),
    Version(5, None, 1000),
    Version(10, None, 1000),
    Version(9, 6, 12),  # of several steps
]


@pytest.mark.parametrize(
    ("have", "want", "names"),
    [
        (None, 0, ["step-000000.ckptz"]),
        (None, 7, ["step-000005.ckptz", "step-000006.from-000005.ckptz", "step-000007.from-000006.ckptz"]),
        (6, 7, ["step-000007.from-000006.ckptz"]),
        (3, 5, ["step-000004.from-000003.ckptz", "step-000005.from-000004.ckptz"]),
        (6, 10, ["step-000009.from-000006.ckptz", "step-000010.from-000009.ckptz"]),
        (7, 9, ["step-000008.from-000007.ckptz", "step-000009.from-000008.ckptz"]),
        (10, 5, ["step-000005.ckptz"]),
        (3, 3, []),
        (99, 10, ["step-000010.ckptz"]),
    ],
)
def test_the_way_with_the_fewest_bytes_is_taken(have: int | None, want: int, names: list[str]) -> None:
    assert [version.name for version in route(RUN, have, want, "run")] == names


def test_a_full_file_is_taken_where_the_deltas_are_more() -> None:
    versions = [Version(0, None, 10), Version(1, 0, 100), Version(2, 1, 100), Version(2, None, 150)]
    assert [version.base for version in route(versions, 0, 2, "run")] == [None]
    assert [version.base for version in route(versions, 1, 2, "run")] == [1]


def test_a_gap_is_named() -> None:
    versions = [version for version in RUN if version.step not in (7, 9, 10) and version.base != 6]
    assert newest_step(versions) == 8
    with refused(
        MissingBaseError, "run: no files lead from step 6 to step 8.* the next full file closes the gap"
    ):
        route(versions, 6, 8, "run")
    with refused(MissingBaseError, "run: no files lead from nothing to step 8"):
        route(versions, None, 8, "run")
    with refused(MissingBaseError, "run: step 9 is not published here"):
        route(versions, 6, 9, "run")
