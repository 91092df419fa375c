"""Values that a JSON file can have, the odd ones among them: numbers and names that nothing can hold."""

from hypothesis import strategies as st

ODD = st.sampled_from(
    [10**300, -(10**300), 10**400, 2**53, 2**63, 2**64, 1e308, 5e-324, float("nan"), float("inf"), "a\0b", "\ud800", "auto"]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 30) | st.floats() | st.text(max_size=6) | ODD,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=6,
)
