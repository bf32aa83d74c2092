"""One sound export a case, for all tests of this folder."""

import pytest

from tests.export import exports


@pytest.fixture(scope="session")
def good(tmp_path_factory):
    """`good(case) -> exports.Good`, made once."""
    made = {}

    def get(case):
        if case not in made:
            made[case] = exports.make(tmp_path_factory.mktemp(case.__name__), case)
        return made[case]

    return get
