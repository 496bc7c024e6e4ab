"""Codes to bytes and back: exact round trips, expected bytes, and the layouts other libraries read."""

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from hypothesis import given
from hypothesis import strategies as st

from optkit import packing


def codes(shape, num_bits, seed=0):
    return np.random.default_rng(seed).integers(0, 1 << num_bits, shape, dtype=np.uint8)


def test_the_even_index_is_in_the_low_nibble():
    packed = packing.pack_bytes(np.array([[1, 2, 3, 15]], np.uint8), 4)
    assert packed.tolist() == [[0x21, 0xF3]]


def test_an_odd_length_is_padded_with_code_zero():
    assert packing.pack_bytes(np.array([[7, 8, 9]], np.uint8), 4).tolist() == [[0x87, 0x09]]


def test_eight_bit_codes_are_the_bytes_themselves():
    row = codes((3, 5), 8)
    assert np.array_equal(packing.pack_bytes(row, 8), row)


@given(rows=st.integers(1, 5), length=st.integers(1, 40), num_bits=st.sampled_from((4, 8)), seed=st.integers(0, 99))
def test_bytes_come_back_as_the_same_codes(rows, length, num_bits, seed):
    row = codes((rows, length), num_bits, seed)
    assert np.array_equal(packing.unpack_bytes(packing.pack_bytes(row, num_bits), num_bits, length), row)


@given(
    rows=st.integers(1, 9),
    length=st.integers(1, 40),
    num_bits=st.sampled_from((4, 8)),
    axis=st.sampled_from((0, 1, -1)),
    seed=st.integers(0, 99),
)
def test_words_come_back_as_the_same_codes_along_either_axis(rows, length, num_bits, axis, seed):
    row = codes((rows, length), num_bits, seed)
    words = packing.pack_int32(row, num_bits, axis)
    assert words.dtype == np.int32
    assert np.array_equal(packing.unpack_int32(words, num_bits, row.shape[axis], axis), row)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("num_bits", [4, 8])
# one word per column (8 or fewer codes along axis 0) is left out: the library cannot unpack its own words there
@pytest.mark.parametrize("shape", [(16, 32), (11, 5), (9, 7), (64, 96)])
def test_words_are_those_of_the_compressed_tensors_library(shape, num_bits, axis):
    row = codes(shape, num_bits)
    signed = torch.from_numpy(row.astype(np.int16) - (1 << (num_bits - 1))).to(torch.int8)
    theirs = pack_to_int32(signed, num_bits, packed_dim=axis)
    assert np.array_equal(packing.pack_int32(row, num_bits, axis), theirs.numpy())
    back = unpack_from_int32(torch.from_numpy(packing.pack_int32(row, num_bits, axis)), num_bits, shape, packed_dim=axis)
    assert torch.equal(back, signed)


@pytest.mark.parametrize(("num_bits", "group_size"), [(4, 32), (4, 16), (8, 32), (8, 96)])
def test_blocks_come_back_and_have_the_size_the_runtime_expects(num_bits, group_size):
    row = codes((5, 96), num_bits)
    packed = packing.pack_nbits(row, num_bits, group_size)
    assert packed.shape == (5, 96 // group_size, group_size * num_bits // 8)
    assert np.array_equal(packing.unpack_nbits(packed, num_bits, group_size), row)


def test_a_block_holds_consecutive_inputs_of_one_row():
    row = np.arange(64, dtype=np.uint8).reshape(1, 64) % 16
    block = packing.pack_nbits(row, 4, 32)[0, 1]
    assert block[0] == (row[0, 32] | row[0, 33] << 4)


def test_a_code_that_does_not_fit_is_refused_and_not_masked():
    with pytest.raises(ValueError, match="above 15"):
        packing.pack_bytes(np.array([[16]], np.uint8), 4)


@pytest.mark.parametrize("call", [packing.pack_bytes, packing.pack_int32])
def test_signed_codes_and_odd_widths_are_refused(call):
    with pytest.raises(TypeError, match="uint8"):
        call(np.zeros((1, 2), np.int8), 4)
    with pytest.raises(ValueError, match="num_bits 3"):
        call(np.zeros((1, 2), np.uint8), 3)


def test_words_along_the_first_axis_of_a_single_column_have_ordinary_strides():
    """A view with odd strides on the axis of size 1 cannot become a torch tensor."""
    words = packing.pack_int32(np.zeros((48, 1), np.uint8), 8, axis=0)
    assert words.shape == (12, 1)
    assert words.strides == (4, 4)
