import numpy as np
import pytest
from hypothesis import given, strategies as st

from lpfs.data.store.format import decode_vocabulary, encode_vocabulary, id_dtype
from lpfs.errors import DataError


def test_ids_beyond_31_bits_raise():
    assert id_dtype(2**31 - 1) == np.uint32
    with pytest.raises(DataError, match="below 2\\*\\*31"):
        id_dtype(2**31)


@given(values=st.lists(st.text(alphabet=st.characters(codec=None), max_size=4), max_size=6))
def test_text_vocabularies_read_back(values):
    columns = encode_vocabulary(values)
    assert decode_vocabulary(columns[""], columns["ends"]) == values


def test_numeric_vocabularies_read_back():
    columns = encode_vocabulary(np.array([3, 1, 2**32 - 1], ">u4"))
    assert columns[""].dtype.str == "<u4"
    assert decode_vocabulary(columns[""], None).tolist() == [3, 1, 2**32 - 1]
