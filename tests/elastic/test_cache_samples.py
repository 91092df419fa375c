"""Samples of a micro-batch: their names, and their outputs as bytes and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_terapipe.elastic.cache.samples import decode, encode, names, sample_dims, some_rows

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool]


def random_tensor(shape, dtype, seed=0):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 10
    return values > 0 if dtype is torch.bool else (values * (1 if dtype.is_floating_point else 1000)).to(dtype)


def test_a_name_is_of_all_that_the_model_gets_of_a_sample():
    tokens, mask = torch.arange(12).view(3, 4), torch.ones(3, 1, 1, 4, dtype=torch.bool)
    everywhere = torch.ones(4, 4)
    before = names((tokens, mask, everywhere))
    assert len(set(before)) == 3 and before == names((tokens.clone(), mask, everywhere))
    assert names((tokens[[2, 0]], mask[[2, 0]], everywhere)) == [before[2], before[0]]  # in other company
    for index, change in ((0, (1, 2)), (1, (1, 0, 0, 3))):
        inputs = [tokens.clone(), mask.clone(), everywhere]
        inputs[index][change] = 0
        after = names(tuple(inputs))
        assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, True]
    assert not set(before) & set(names((tokens, mask, everywhere * 2)))
    assert not set(before) & set(names((tokens.float(), mask, everywhere)))
    padded = torch.cat([tokens, torch.zeros(3, 1, dtype=torch.long)], 1)
    assert not set(names(tokens)) & set(names(padded))
    assert not set(names(tokens)) & set(names((tokens, mask)))


def test_a_name_is_of_contents_and_not_of_strides():
    images = torch.randn(2, 3, 5, 5)
    assert names(images) == names(images.to(memory_format=torch.channels_last))
    assert names(images[:, :, ::2]) == names(images[:, :, ::2].clone())


def test_dimensions_of_samples_are_found_whatever_their_sizes():
    def outputs(rows):
        return torch.zeros(4, rows, 4), torch.zeros(rows, 4), torch.zeros(4, 4)

    assert sample_dims(outputs(4), outputs(1), 4, 1) == [1, 0, None]
    assert sample_dims(torch.zeros(1, 1), torch.zeros(2, 1), 1, 2) == [0]
    assert sample_dims(torch.zeros(4, 4), torch.zeros(1, 1), 4, 1) is None
    assert sample_dims(torch.zeros(8), torch.zeros(2), 4, 1) is None  # pooled over a part
    assert sample_dims(torch.zeros(4), torch.zeros(1, 1), 4, 1) is None


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_bytes_and_back(data):
    rows = data.draw(st.integers(1, 4))
    tensors, dims = [], []
    for number in range(data.draw(st.integers(1, 3))):
        shape = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
        dim = data.draw(st.one_of(st.none(), st.integers(0, len(shape) - 1)))
        if dim is not None:
            shape[dim] = rows
        tensors.append(random_tensor(shape, data.draw(st.sampled_from(DTYPES)), number))
        dims.append(dim)
    outputs = tuple(tensors) if len(tensors) > 1 or data.draw(st.booleans()) else tensors[0]
    smaller = data.draw(st.booleans())
    order = data.draw(st.permutations(range(rows)))
    entries = [memoryview(b"".join(map(bytes, encode(outputs, dims, row, smaller)))) for row in order]
    found = decode(entries)
    assert isinstance(found, tuple) == isinstance(outputs, tuple)
    for one, other, dim in zip(tensors, found if isinstance(found, tuple) else [found], dims, strict=True):
        expected = one if dim is None else one.index_select(dim, torch.tensor(order))
        if smaller and one.is_floating_point():
            expected = expected.to(torch.bfloat16).to(one.dtype)
        assert other.dtype == one.dtype and torch.equal(expected, other)


def test_other_lengths_make_no_micro_batch():
    entries = [b"".join(map(bytes, encode(torch.zeros(1, n, 2), [0], 0, False))) for n in (3, 4)]
    assert decode([memoryview(each) for each in entries]) is None


@pytest.mark.parametrize("rows", [[0], [2, 2], [1, 0]])
def test_some_rows(rows):
    tokens, mask = torch.arange(12).view(3, 4), torch.ones(4, 4)
    some = some_rows((tokens, mask), rows)
    assert torch.equal(some[0], tokens[rows]) and some[1] is mask
    assert torch.equal(some_rows(tokens, rows), tokens[rows])
