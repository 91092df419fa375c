"""Settings of the tests of FusedLamb."""

import pytest

pytest.register_assert_rewrite("tests.optim.op_tests", "tests.optim.tables")


@pytest.fixture(params=["auto", "plain"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param
